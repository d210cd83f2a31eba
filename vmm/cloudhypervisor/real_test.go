package cloudhypervisor_test

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/cloudhypervisor"
	"github.com/ephemeral-run/ephemeral/vmm/vmmtest"
)

// program is the real Cloud Hypervisor that the environment names. Without one, there is nothing to test.
func program(t testing.TB) string {
	t.Helper()
	path := os.Getenv("EPHEMERAL_TEST_CLOUD_HYPERVISOR")
	if path == "" {
		t.Skip("EPHEMERAL_TEST_CLOUD_HYPERVISOR names no program")
	}
	return path
}

// realDriver needs KVM.
func realDriver(t testing.TB) *cloudhypervisor.Driver {
	t.Helper()
	path := program(t)
	if ok, reason := vmm.KVMUsable(); !ok {
		t.Skip(reason)
	}
	d, err := cloudhypervisor.New(cloudhypervisor.Config{Path: path})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	return d
}

// slow is how much slower than hardware this host is: KVM may itself be inside an emulated machine.
func slow(t testing.TB) float64 {
	t.Helper()
	cpu, err := vmm.HostCPU()
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(cpu, "TCG") {
		return 20
	}
	return 2
}

func TestRealConformance(t *testing.T) {
	vmmtest.Run(t, vmmtest.Harness{Driver: realDriver(t), Image: vmmtest.Image(t), Slow: slow(t)})
}

// TestRealTapByName restores clones whose tap the process opens itself, under landlock.
func TestRealTapByName(t *testing.T) {
	d := realDriver(t)
	h := vmmtest.Harness{Driver: d, Image: vmmtest.Image(t), Slow: slow(t), Shape: vmm.Shape{VCPUs: 2, MemoryMiB: 256}, NIC: tap}
	vmmtest.RunOnly(t, h, "RestoreIsPaused", "ClonesAreApart", "CloseInEveryState")
}

// tap makes a persistent one.
func tap(t testing.TB, id string) *vmm.NIC {
	t.Helper()
	name := "t" + id
	ip := func(args ...string) error {
		out, err := exec.Command("ip", args...).CombinedOutput()
		if err != nil {
			return fmt.Errorf("ip %v: %w: %s", args, err, out)
		}
		return nil
	}
	if err := errors.Join(ip("tuntap", "add", "dev", name, "mode", "tap", "vnet_hdr"), ip("link", "set", name, "up")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := ip("link", "del", name); err != nil {
			t.Error(err)
		}
	})
	return &vmm.NIC{Tap: name, MAC: net.HardwareAddr{2, 0, 0, 0, 0, 1}}
}

// TestRealCopies makes clones where they cannot map their template's memory.
func TestRealCopies(t *testing.T) {
	path := program(t)
	realDriver(t)
	d, err := cloudhypervisor.New(cloudhypervisor.Config{Path: path}, cloudhypervisor.WithoutSharing())
	if err != nil {
		t.Fatal(err)
	}
	h := vmmtest.Harness{Driver: d, Image: vmmtest.Image(t), Slow: slow(t), Shape: vmm.Shape{VCPUs: 1, MemoryMiB: 256}}
	vmmtest.RunOnly(t, h, "RestoreIsPaused", "ClonesAreApart")
}

func TestRealConsole(t *testing.T) {
	path := program(t)
	realDriver(t)
	d, err := cloudhypervisor.New(cloudhypervisor.Config{Path: path, Console: true})
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	m, err := d.Boot(t.Context(), vmm.Spec{ID: "console", Dir: dir, Image: vmmtest.Image(t), Shape: vmm.Shape{VCPUs: 1, MemoryMiB: 256}, Launcher: &vmmtest.Launcher{}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = m.Close() }()
	for deadline := time.Now().Add(3 * time.Minute); ; time.Sleep(50 * time.Millisecond) {
		log, err := os.ReadFile(filepath.Join(dir, "console.log"))
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(log, []byte("Linux version")) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("the console says %q", log)
		}
	}
}
