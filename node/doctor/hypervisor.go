package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/ephemeral-run/ephemeral/vmm/cloudhypervisor"
)

// checkKVM tells whether the hardware isolates machines, and if not, why.
func checkKVM(_ context.Context, c *Config) Check {
	usable, reason := c.Host.KVM()
	switch {
	case usable:
		return ok("KVM is usable: machines are isolated by hardware virtualisation")
	case c.Hypervisor == cloudHypervisor:
		return fail("make KVM usable, or set EPHEMERAL_HYPERVISOR=auto", "no machine can start: Cloud Hypervisor needs KVM; %s", reason)
	default:
		return warn("use a host with usable KVM for code you do not trust",
			"machines are emulated (QEMU TCG): slower, and no security boundary; %s", reason)
	}
}

// cloudHypervisor is how EPHEMERAL_HYPERVISOR names it, and its program.
const cloudHypervisor = "cloud-hypervisor"

// wantsCloudHypervisor tells whether Cloud Hypervisor makes the machines, if it is there.
func wantsCloudHypervisor(c *Config) bool {
	usable, _ := c.Host.KVM()
	return c.Hypervisor == cloudHypervisor || usable && c.Hypervisor != "qemu"
}

func checkCloudHypervisor(_ context.Context, c *Config) Check {
	program, err := c.Host.CloudHypervisor(c.CloudHypervisor)
	wanted := wantsCloudHypervisor(c)
	problem := func(format string, args ...any) Check {
		detail := fmt.Sprintf(format, args...)
		switch {
		case c.Hypervisor == cloudHypervisor:
			return fail(installCloudHypervisor(c.Host), "no machine can start: %s", detail)
		case wanted:
			return warn(installCloudHypervisor(c.Host), "%s: QEMU makes the machines, which take more memory and start slower", detail)
		default:
			return ok("%s; not needed: QEMU makes the machines", detail)
		}
	}
	switch {
	case errors.Is(err, cloudhypervisor.ErrVersion):
		return problem("%v", err)
	case errors.Is(err, cloudhypervisor.ErrNotFound):
		return problem("it is not installed")
	case err != nil:
		return problem("it does not run: %v", err)
	case program.Warning != "" && wanted:
		return warn(installCloudHypervisor(c.Host), "%s", program.Warning)
	default:
		return ok("%s is version %s", program.Path, program.Version)
	}
}

// installCloudHypervisor is how the host's distribution gets the program.
func installCloudHypervisor(h Host) string {
	const static = "put the release's static binary into the PATH: " +
		"`curl -fLo /usr/local/bin/cloud-hypervisor https://github.com/cloud-hypervisor/cloud-hypervisor/releases/download/v53.0/cloud-hypervisor-static" +
		" && chmod 755 /usr/local/bin/cloud-hypervisor`, or name it by EPHEMERAL_CLOUD_HYPERVISOR"
	release, _ := h.ReadFile("/etc/os-release") // unknown: the binary runs everywhere
	id, version := distribution(release)
	packaged := func(command string) string {
		return "install version 53: `" + command + "`, or, where the package is of another version, " + static
	}
	switch id {
	case "ubuntu":
		if version >= 26.10 {
			return packaged("apt-get install cloud-hypervisor")
		}
	case "fedora":
		return packaged("dnf install cloud-hypervisor")
	case "arch":
		return packaged("pacman -S cloud-hypervisor")
	case "alpine":
		return packaged("apk add cloud-hypervisor")
	case "nixos":
		return packaged("nix-env -iA nixos.cloud-hypervisor")
	}
	return static // Debian has no package
}

// distribution reads os-release(5): the distribution's name, or of what it derives, and its version, 0 if it has none.
func distribution(release []byte) (id string, version float64) {
	known := map[string]bool{"ubuntu": true, "debian": true, "fedora": true, "arch": true, "alpine": true, "nixos": true}
	var like string
	for line := range strings.Lines(string(release)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		value = strings.Trim(value, `"'`)
		switch name {
		case "ID":
			id = value
		case "ID_LIKE":
			like = value
		case "VERSION_ID":
			version, _ = strconv.ParseFloat(value, 64)
		}
	}
	if known[id] {
		return id, version
	}
	for _, parent := range strings.Fields(like) {
		if known[parent] {
			return parent, 0 // its own version says nothing about its parent's
		}
	}
	return id, version
}

func checkLandlock(_ context.Context, c *Config) Check {
	abi := c.Host.LandlockABI()
	switch {
	case abi >= cloudhypervisor.MinLandlock:
		return ok("landlock has ABI %d: Cloud Hypervisor confines itself to its files", abi)
	case !wantsCloudHypervisor(c):
		return ok("landlock has ABI %d; not needed: QEMU makes the machines", abi)
	default:
		return warn("use Linux 6.2 or newer, with landlock in the kernel parameter lsm=",
			"landlock has ABI %d, Cloud Hypervisor asks for %d: its process is confined by the jail alone", abi, cloudhypervisor.MinLandlock)
	}
}

// checkUserfaultfd tells of what clones would need that are not mapped from their template's file. Ours are.
func checkUserfaultfd(_ context.Context, c *Config) Check {
	const unused = "not needed: clones map their template's file"
	if err := c.Host.OpenDevice("/dev/userfaultfd"); err == nil {
		return ok("/dev/userfaultfd opens; %s", unused)
	} else if !errors.Is(err, os.ErrNotExist) {
		return ok("/dev/userfaultfd does not open (%v); %s", err, unused)
	}
	if b, err := c.Host.ReadFile("/proc/sys/vm/unprivileged_userfaultfd"); err == nil {
		return ok("no /dev/userfaultfd, vm.unprivileged_userfaultfd is %s; %s", strings.TrimSpace(string(b)), unused)
	}
	return ok("the kernel has none; %s", unused)
}

// checkTemplates tells whether clones can share their template's memory where templates are kept.
func checkTemplates(_ context.Context, c *Config) Check {
	if err := c.Host.SharedMapping(c.DataDir); err != nil {
		return warn("choose a data directory on ext4, XFS, Btrfs or tmpfs by EPHEMERAL_DATA_DIR",
			"clones cannot share their template's memory there, each takes a copy: %v", err)
	}
	return ok("clones share their template's memory: files there can be mapped")
}
