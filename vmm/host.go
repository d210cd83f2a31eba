package vmm

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// What drivers share: how they see the host and the process of a machine.

// KVMUsable tells whether KVM can run stock guest kernels on this host, and if not, why, with the way to change it. A
// /dev/kvm that opens is no proof.
func KVMUsable() (bool, string) { return kvmUsable("/") }

// kvmAPIVersion is what KVM_GET_API_VERSION has returned since Linux 2.6.22.
const (
	kvmAPIVersion    = 12
	kvmGetAPIVersion = 0xAE00
)

// kvmUsable looks at the host below root; only with root "/" does it also ask the device.
func kvmUsable(root string) (bool, string) {
	f, err := os.OpenFile(filepath.Join(root, "dev/kvm"), os.O_RDWR, 0)
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
	flags, err := cpuInfo(filepath.Join(root, "proc/cpuinfo"), "flags")
	if err != nil {
		return false, fmt.Sprintf("the CPU's features are unknown: %v", err)
	}
	if all := strings.Fields(flags); !slices.Contains(all, "vmx") && !slices.Contains(all, "svm") {
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

// HostCPU names this host's CPU with a digest of its features, of which a clone must not miss one.
func HostCPU() (string, error) { return hostCPU("/proc/cpuinfo") }

func hostCPU(path string) (string, error) {
	model, err := cpuInfo(path, "model name")
	if err != nil {
		return "", err
	}
	flags, err := cpuInfo(path, "flags")
	if err != nil {
		return "", err
	}
	digest := sha256.Sum256([]byte(flags))
	return model + " " + hex.EncodeToString(digest[:8]), nil
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

// ProcessStats reads memory and CPU time of a VMM's process from /proc. ErrClosed: there is no such process.
func ProcessStats(pid int) (Stats, error) {
	s, err := processStats(fmt.Sprintf("/proc/%d/", pid))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		err = fmt.Errorf("%w: %w", ErrClosed, err)
	}
	s.Pid = pid
	return s, err
}

func processStats(dir string) (Stats, error) {
	rollup, err := os.ReadFile(dir + "smaps_rollup")
	if err != nil {
		return Stats{}, err
	}
	private, err := privateBytes(rollup)
	if err != nil {
		return Stats{}, err
	}
	stat, err := os.ReadFile(dir + "stat")
	if err != nil {
		return Stats{}, err
	}
	cpu, err := cpuTime(string(stat))
	if err != nil {
		return Stats{}, err
	}
	return Stats{PrivateBytes: private, CPU: cpu}, nil
}

// privateBytes sums Private_Clean and Private_Dirty of a smaps_rollup, proc_pid_smaps(5).
func privateBytes(rollup []byte) (int64, error) {
	var sum int64
	found := 0
	for line := range bytes.Lines(rollup) {
		name, value, _ := strings.Cut(string(line), ":")
		if name != "Private_Clean" && name != "Private_Dirty" {
			continue
		}
		kib, err := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(value), "kB")), 10, 64)
		if err != nil {
			return 0, fmt.Errorf("smaps_rollup: %s: %w", name, err)
		}
		sum += kib << 10
		found++
	}
	if found != 2 {
		return 0, errors.New("smaps_rollup: private memory is missing")
	}
	return sum, nil
}

// userHz is the unit of times in /proc, in hertz: USER_HZ, 100 on every architecture that Go supports.
const userHz = 100

// cpuTime is user and system time in a line of /proc/pid/stat, proc_pid_stat(5).
func cpuTime(stat string) (time.Duration, error) {
	// The second field, the program's name in parentheses, may hold anything. Fields 14 and 15 are the times.
	fields := strings.Fields(stat[strings.LastIndexByte(stat, ')')+1:])
	if len(fields) < 13 {
		return 0, errors.New("stat: too few fields")
	}
	var ticks int64
	for _, field := range fields[11:13] {
		n, err := strconv.ParseInt(field, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("stat: %w", err)
		}
		ticks += n
	}
	return time.Duration(ticks) * (time.Second / userHz), nil
}
