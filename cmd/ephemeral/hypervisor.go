package main

import (
	"fmt"
	"log/slog"

	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/cloudhypervisor"
	"github.com/ephemeral-run/ephemeral/vmm/qemu"
)

// hypervisorConfig says which driver makes machines.
type hypervisorConfig struct {
	Name string `env:"EPHEMERAL_HYPERVISOR" envDefault:"auto" help:"cloud-hypervisor, qemu, or auto: the former where it is installed and KVM is usable"`
}

// driver is an open driver.
type driver interface {
	vmm.Driver
	Close() error
}

// openDriver opens the configured driver, or the best that the host can run, and says which and why.
func openDriver(s settings, log *slog.Logger) (driver, error) {
	switch s.Hypervisor.Name {
	case "cloud-hypervisor":
		return cloudhypervisor.New(s.CloudHypervisor)
	case "qemu":
		return qemu.New(s.QEMU)
	case "auto":
		if _, err := cloudhypervisor.Find(s.CloudHypervisor); err != nil {
			log.Debug("cloud-hypervisor is not used", "reason", err)
			return qemu.New(s.QEMU)
		}
		if usable, reason := vmm.KVMUsable(); !usable {
			log.Info("cloud-hypervisor is not used", "reason", reason)
			return qemu.New(s.QEMU)
		}
		return cloudhypervisor.New(s.CloudHypervisor)
	default:
		return nil, fmt.Errorf("EPHEMERAL_HYPERVISOR is %q: it must be auto, cloud-hypervisor or qemu", s.Hypervisor.Name)
	}
}
