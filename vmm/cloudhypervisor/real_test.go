package cloudhypervisor_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ephemeral-run/ephemeral/images"
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

// image is the one that the environment names, or that `make image` builds.
func image(t testing.TB) images.Image {
	t.Helper()
	dir := os.Getenv("EPHEMERAL_TEST_IMAGE")
	if dir == "" {
		dir = filepath.Join("..", "..", "build", "images", "base")
	}
	img, err := images.Open(dir)
	if err != nil {
		t.Fatalf("%v: run make image", err)
	}
	return img
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
	vmmtest.Run(t, vmmtest.Harness{Driver: realDriver(t), Image: image(t), Slow: slow(t)})
}
