package cloudhypervisor

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ephemeral-run/ephemeral/images"
	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/cloudhypervisor/chfake"
	"github.com/ephemeral-run/ephemeral/vmm/vmmtest"
)

// fakeProcess starts a fake for direct calls.
func fakeProcess(t *testing.T, o chfake.Options) (*Driver, *machine) {
	t.Helper()
	dir := t.TempDir()
	p, err := Find(Config{Path: chfake.Install(t, o)})
	if err != nil {
		t.Fatal(err)
	}
	d := &Driver{program: p}
	s := vmm.Spec{
		ID: "api", Dir: dir, Shape: vmm.Shape{VCPUs: 1, MemoryMiB: 64}, Launcher: &vmmtest.Launcher{},
		Image: images.Image{Kernel: filepath.Join(dir, "k"), Initramfs: filepath.Join(dir, "i"), RootFS: filepath.Join(dir, "r")},
	}
	for _, path := range []string{s.Image.Kernel, s.Image.Initramfs, s.Image.RootFS} {
		if err := os.WriteFile(path, []byte("fake"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	m, err := d.start(t.Context(), s, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return d, m
}

// TestCalls makes each call of the driver once.
func TestCalls(t *testing.T) {
	d, m := fakeProcess(t, chfake.Options{})
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(m.api.create(ctx, d.bootConfig(m.Spec)))
	must(m.api.addNet(ctx, nicConfig(vmm.NIC{Tap: "tap", MAC: net.HardwareAddr{2, 0, 0, 0, 0, 1}, File: os.Stdin}), int(os.Stdin.Fd())))
	must(m.api.boot(ctx))
	counters, err := m.api.counters(ctx)
	must(err)
	disk := counters["root"]
	if _, ok := disk["read_latency_min"]; ok || len(disk) != 2 {
		t.Errorf("counters without a sample are told: %v", counters)
	}
	must(m.api.pause(ctx))
	if state, err := m.api.info(ctx); err != nil || state != statePaused {
		t.Errorf("%s, %v", state, err)
	}
	must(m.api.resume(ctx))
	must(m.api.shutdown(ctx))
	if state, err := m.api.info(ctx); err != nil || state != stateCreated {
		t.Errorf("%s, %v", state, err)
	}
	must(m.api.remove(ctx))
	must(m.api.shutdownVMM(ctx))
	select {
	case <-m.Done():
	case <-ctx.Done():
		t.Fatal("it does not end")
	}
	if err := m.api.pause(ctx); err == nil {
		t.Error("a call of an ended process succeeds")
	}
}

// TestInterruptedCall gives up waiting for a call, after which the machine's state is asked for.
func TestInterruptedCall(t *testing.T) {
	d, m := fakeProcess(t, chfake.Options{Faults: []chfake.Fault{{Call: "vm.pause", Kind: chfake.Slow, Milliseconds: 300}}})
	if err := m.api.create(t.Context(), d.bootConfig(m.Spec)); err != nil {
		t.Fatal(err)
	}
	if err := m.api.boot(t.Context()); err != nil {
		t.Fatal(err)
	}
	m.state = stateRunning
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if err := m.Pause(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("paused within its time: %v", err)
	}
	if m.state != "" {
		t.Errorf("its state is believed to be %s", m.state)
	}
	// The call was carried out all the same: pausing again is none, and resuming is one.
	if err := m.Pause(t.Context()); err != nil {
		t.Error(err)
	}
	if err := m.Resume(t.Context()); err != nil {
		t.Error(err)
	}
	if state, err := m.api.info(t.Context()); err != nil || state != stateRunning {
		t.Errorf("%s, %v", state, err)
	}
}

// TestSocketOfTheProcess puts something else where the process's socket should be: it is not connected to.
func TestSocketOfTheProcess(t *testing.T) {
	dir, other := t.TempDir(), filepath.Join(t.TempDir(), "other")
	victim, err := net.Listen("unix", other)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = victim.Close() }()
	h, err := newHub(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = h.close() }()
	if err := os.Symlink(other, filepath.Join(dir, vsockName)); err != nil {
		t.Fatal(err)
	}
	if err := h.open(); err == nil {
		t.Error("a link out of the directory is taken for the socket")
	}
	if err := h.close(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(other); err != nil {
		t.Errorf("what the link leads to: %v", err)
	}
}

// TestStaleSockets starts in a directory with the sockets of an earlier life, and with a long name.
func TestStaleSockets(t *testing.T) {
	dir := filepath.Join(t.TempDir(), strings.Repeat("long", 40))
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{vsockName, vsockName + "_1025", apiName} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	h, err := newHub(dir)
	if err != nil {
		t.Fatal(err)
	}
	e, err := newEndpoint(h)
	if err != nil {
		t.Fatal(err)
	}
	e.close()
	ln, err := h.listen(1025)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := h.listen(1025); !errors.Is(err, unix.EADDRINUSE) {
		t.Errorf("a port is taken twice: %v", err)
	}
	if err := errors.Join(h.close(), ln.Close()); err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
	if _, err := h.listen(1025); !errors.Is(err, vmm.ErrClosed) {
		t.Errorf("listen after close: %v", err)
	}
}
