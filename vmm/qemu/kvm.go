package qemu

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Usable tells whether KVM can run stock guest kernels on this host, and if not, why, with the way to change it. A
// /dev/kvm that opens is no proof.
func Usable() (bool, string) { return usable("/") }

// kvmAPIVersion is what KVM_GET_API_VERSION has returned since Linux 2.6.22.
const (
	kvmAPIVersion    = 12
	kvmGetAPIVersion = 0xAE00
)

// usable looks at the host below root; only with root "/" does it also ask the device.
func usable(root string) (bool, string) {
	device := filepath.Join(root, "dev/kvm")
	f, err := os.OpenFile(device, os.O_RDWR, 0)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return false, "there is no /dev/kvm: load the module kvm_intel or kvm_amd, or enable nested virtualisation for this host"
	case errors.Is(err, fs.ErrPermission):
		return false, "/dev/kvm may not be opened: add the user to the group kvm"
	case err != nil:
		return false, fmt.Sprintf("/dev/kvm does not open: %v", err)
	}
	defer func() { _ = f.Close() }()
	if _, err := os.Stat(filepath.Join(root, "sys/module/kvm_pvm")); err == nil {
		return false, "KVM here is kvm_pvm (page-table virtualisation), under which stock guest kernels fail: use a host with vmx or svm"
	}
	flags, err := cpuFlags(filepath.Join(root, "proc/cpuinfo"))
	if err != nil {
		return false, fmt.Sprintf("the CPU's features are unknown: %v", err)
	}
	if !slices.Contains(flags, "vmx") && !slices.Contains(flags, "svm") {
		return false, "the CPU has neither vmx nor svm: enable virtualisation in the firmware, or nested virtualisation for this host"
	}
	if root != "/" {
		return true, ""
	}
	version, err := unix.IoctlRetInt(int(f.Fd()), kvmGetAPIVersion)
	if err != nil || version != kvmAPIVersion {
		return false, fmt.Sprintf("/dev/kvm answers with API version %d (%v), not %d", version, err, kvmAPIVersion)
	}
	return true, ""
}

// cpuFlags reads the first processor's flags.
func cpuFlags(path string) ([]string, error) {
	value, err := cpuInfo(path, "flags")
	return strings.Fields(value), err
}

// cpuInfo reads one field of the first processor.
func cpuInfo(path, field string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }()
	scan := bufio.NewScanner(f)
	for scan.Scan() {
		name, value, ok := strings.Cut(scan.Text(), ":")
		if ok && strings.TrimSpace(name) == field {
			return strings.TrimSpace(value), nil
		}
	}
	if err := scan.Err(); err != nil {
		return "", err
	}
	return "", fmt.Errorf("%s has no %s", path, field)
}
