package cloudhypervisor_test

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/images"
	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/cloudhypervisor"
	"github.com/ephemeral-run/ephemeral/vmm/cloudhypervisor/chfake"
	"github.com/ephemeral-run/ephemeral/vmm/vmmtest"
)

// fakeDriver drives a fake.
func fakeDriver(t testing.TB, o chfake.Options) *cloudhypervisor.Driver {
	t.Helper()
	d, err := cloudhypervisor.New(cloudhypervisor.Config{Path: chfake.Install(t, o)}, cloudhypervisor.WithoutKVM())
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// fakeImage is one that nothing can boot but a fake.
func fakeImage(t testing.TB) images.Image {
	t.Helper()
	dir := t.TempDir()
	img := images.Image{Name: "fake", Digest: "sha256:0", Kernel: filepath.Join(dir, "kernel"), Initramfs: filepath.Join(dir, "initramfs"), RootFS: filepath.Join(dir, "root")}
	for _, path := range []string{img.Kernel, img.Initramfs, img.RootFS} {
		if err := os.WriteFile(path, []byte("fake"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return img
}

// fakeGuest ends a fake's guest.
type fakeGuest struct{}

func (fakeGuest) PowerOff(ctx context.Context, a *vmmtest.Agent) error { return a.Shutdown(ctx) }
func (fakeGuest) Reboot(ctx context.Context, a *vmmtest.Agent) error {
	return control(ctx, a, "reboot")
}
func (fakeGuest) Panic(ctx context.Context, a *vmmtest.Agent) error { return control(ctx, a, "panic") }

func control(ctx context.Context, a *vmmtest.Agent, how string) error {
	return a.Run(ctx, nil, io.Discard, "sh", "-c", "echo "+how+" >"+chfake.Control+"; sleep 60")
}

func fakeHarness(t testing.TB, o chfake.Options) vmmtest.Harness {
	return vmmtest.Harness{
		Driver: fakeDriver(t, o), Image: fakeImage(t), Shape: vmm.Shape{VCPUs: 1, MemoryMiB: 64}, Slow: 10, Guest: fakeGuest{},
		Clones: 5, AtOnce: 4, StreamBytes: 8 << 20,
		LeaveOut: map[string]string{"Stats": "a fake's guest has no memory"},
	}
}

func TestFakeConformance(t *testing.T) { vmmtest.Run(t, fakeHarness(t, chfake.Options{})) }

// TestFakeCopies makes templates and clones where clones cannot map their template's memory.
func TestFakeCopies(t *testing.T) {
	h := fakeHarness(t, chfake.Options{})
	var err error
	h.Driver, err = cloudhypervisor.New(cloudhypervisor.Config{Path: chfake.Install(t, chfake.Options{})}, cloudhypervisor.WithoutKVM(), cloudhypervisor.WithoutSharing())
	if err != nil {
		t.Fatal(err)
	}
	vmmtest.RunOnly(t, h, "RestoreIsPaused", "RestoreRefusesBadTemplates", "SnapshotRefuses", "ClonesAreApart", "ClonesAtOnce", "Empty")
}

// TestFaults restores a clone while something goes wrong: an error that says what, and nothing left.
func TestFaults(t *testing.T) {
	h := fakeHarness(t, chfake.Options{})
	tpl := h.MakeTemplate(t, t.TempDir())
	chain := []string{"Error from API", "The VM could not be restored", "Error from device manager", "Cannot open tap"}
	for name, c := range map[string]struct {
		options chfake.Options
		within  time.Duration
		is      error
		says    []string
	}{
		"slow":               {options: fault("vm.restore", chfake.Slow), is: nil},
		"refused restore":    {options: fault("vm.restore", chfake.Refuse, chain...), says: append([]string{"vm.restore", "500"}, chain...)},
		"another CPU":        {options: fault("vm.restore", chfake.Refuse, "Error from API", "CPUID mismatch"), is: vmm.ErrTemplate},
		"crash before ping":  {options: fault("vmm.ping", chfake.Crash), is: vmm.ErrVMM},
		"crash in restore":   {options: fault("vm.restore", chfake.Crash), is: vmm.ErrVMM},
		"half a reply":       {options: fault("vm.restore", chfake.Half), says: []string{"vm.restore", "read answer"}},
		"garbage":            {options: fault("vm.restore", chfake.Garbage), says: []string{"vm.restore", "malformed"}},
		"hang":               {options: fault("vm.restore", chfake.Hang), within: 500 * time.Millisecond, is: context.DeadlineExceeded},
		"no API":             {options: chfake.Options{NoAPI: true}, within: 500 * time.Millisecond, is: context.DeadlineExceeded},
		"quiet end":          {options: fault("vm.restore", chfake.Exit), is: vmm.ErrVMM, says: []string{"VCPU generated error"}},
		"cut event":          {options: fault("vm.restore", chfake.Gap), is: vmm.ErrVMM, says: []string{"events"}},
		"another version":    {options: chfake.Options{Answers: "v53.1"}, says: []string{"53.1", "53.0"}},
		"exit before answer": {options: fault("vmm.ping", chfake.Exit), is: vmm.ErrVMM},
	} {
		t.Run(name, func(t *testing.T) {
			vmmtest.LeavesNothing(t)
			h := h
			h.Driver = fakeDriver(t, c.options)
			if c.within == 0 {
				c.within = 20 * time.Second
			}
			ctx, cancel := context.WithTimeout(context.Background(), c.within)
			defer cancel()
			_, err := h.TimeClone(ctx, t, tpl)
			t.Log(err)
			if c.is == nil && c.says == nil {
				if err != nil {
					t.Error(err)
				}
				return
			}
			if err == nil {
				t.Fatal("it works")
			}
			if c.is != nil && !errors.Is(err, c.is) {
				t.Errorf("not %v", c.is)
			}
			for _, text := range c.says {
				if !strings.Contains(err.Error(), text) {
					t.Errorf("it does not say %q", text)
				}
			}
		})
	}
}

func fault(call, kind string, causes ...string) chfake.Options {
	return chfake.Options{Faults: []chfake.Fault{{Call: call, Kind: kind, Milliseconds: 300, Status: 500, Causes: causes}}}
}

// TestFaultsOfBoot has each call of a boot and of a snapshot go wrong in each way.
func TestFaultsOfBoot(t *testing.T) {
	for _, call := range []string{"vmm.ping", "vm.create", "vm.boot", "vm.pause", "vm.snapshot"} {
		for _, kind := range []string{chfake.Refuse, chfake.Crash, chfake.Half, chfake.Hang, chfake.Garbage, chfake.Exit} {
			t.Run(call+" "+kind, func(t *testing.T) {
				vmmtest.LeavesNothing(t)
				dir := t.TempDir()
				own := filepath.Join(dir, "m")
				if err := os.Mkdir(own, 0o755); err != nil {
					t.Fatal(err)
				}
				d := fakeDriver(t, fault(call, kind, "Error from API", "a fault"))
				ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
				defer cancel()
				m, err := d.Boot(ctx, vmm.Spec{
					ID: "boot", Dir: own, RAM: filepath.Join(dir, "ram"), Image: fakeImage(t), Shape: vmm.Shape{VCPUs: 1, MemoryMiB: 64}, Launcher: &vmmtest.Launcher{},
				})
				if err == nil {
					defer func() {
						if err := m.Close(); err != nil {
							t.Error(err)
						}
					}()
					if err = m.Pause(ctx); err == nil {
						err = m.Snapshot(ctx, dir)
					}
				}
				if err == nil {
					t.Fatal("it works")
				}
				if kind == chfake.Refuse && (!strings.Contains(err.Error(), call) || !strings.Contains(err.Error(), "a fault")) {
					t.Errorf("it does not say what: %v", err)
				}
				if _, err := os.Lstat(filepath.Join(dir, "cloud-hypervisor.json")); err == nil {
					t.Error("a template is left that looks complete")
				}
			})
		}
	}
}
