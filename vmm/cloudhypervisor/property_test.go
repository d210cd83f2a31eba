package cloudhypervisor_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/cloudhypervisor/chfake"
	"github.com/ephemeral-run/ephemeral/vmm/vmmtest"
)

// TestAnySequence makes random calls of a clone while one kind of fault befalls one of the API's calls. Whatever comes, an
// operation ends in time, its error is one that callers can decide on, and at the end nothing is left.
func TestAnySequence(t *testing.T) {
	h := fakeHarness(t, chfake.Options{})
	tpl := h.MakeTemplate(t, t.TempDir())
	calls := []string{"none", "vmm.ping", "vm.restore", "vm.pause", "vm.resume", "vm.info"}
	kinds := []string{chfake.Slow, chfake.Refuse, chfake.Crash, chfake.Half, chfake.Hang, chfake.Garbage, chfake.Gap, chfake.Exit}
	vmmtest.LeavesNothing(t)
	drivers := map[string]vmm.Driver{}
	for _, call := range calls {
		for _, kind := range kinds {
			drivers[call+kind] = fakeDriver(t, fault(call, kind, "Error from API", "a fault"))
		}
	}
	root := t.TempDir()
	n := 0
	rapid.Check(t, func(rt *rapid.T) {
		n++
		dir := filepath.Join(root, fmt.Sprint(n))
		if err := os.Mkdir(dir, 0o755); err != nil {
			rt.Fatal(err)
		}
		call, kind := rapid.SampledFrom(calls).Draw(rt, "call"), rapid.SampledFrom(kinds).Draw(rt, "kind")
		launcher := &vmmtest.Launcher{}
		within := func() context.Context {
			ctx, cancel := context.WithTimeout(context.Background(), 700*time.Millisecond)
			rt.Cleanup(cancel)
			return ctx
		}
		m, err := drivers[call+kind].Restore(within(), tpl, vmm.Spec{ID: "any", Dir: dir, Launcher: launcher})
		if err == nil {
			anyCalls(rt, m, within, call == "none")
			if err := m.Close(); err != nil {
				rt.Fatal(err)
			}
		} else if call == "none" && !errors.Is(err, context.DeadlineExceeded) {
			rt.Fatalf("without a fault: %v", err)
		}
		if pids := launcher.Pids(); len(pids) > 0 {
			rt.Fatalf("processes %v are left", pids)
		}
		for _, name := range []string{"vsock", "api.sock", "vsock_1025"} {
			if _, err := os.Lstat(filepath.Join(dir, name)); !errors.Is(err, os.ErrNotExist) {
				rt.Fatalf("%s is left: %v", name, err)
			}
		}
	})
}

// anyCalls makes some calls of a machine.
func anyCalls(rt *rapid.T, m vmm.Machine, within func() context.Context, sound bool) {
	agent := vmmtest.NewAgent(m.Dial)
	running := false // as far as is known
	operations := map[string]func() error{
		"pause":      func() error { err := m.Pause(within()); running = running && err != nil; return err },
		"resume":     func() error { err := m.Resume(within()); running = err == nil; return err },
		"disconnect": m.Disconnect,
		"listen": func() error {
			ln, err := m.Listen(1025)
			if err == nil {
				err = ln.Close()
			}
			return err
		},
		"snapshot": func() error {
			err := m.Snapshot(within(), rt.Name())
			if !errors.Is(err, vmm.ErrState) && sound {
				rt.Fatalf("a clone is snapshotted: %v", err)
			}
			return nil
		},
		"stats": func() error { _, err := m.Stats(); return err },
		"ping": func() error {
			was := running
			err := agent.Ping(within())
			if sound && err == nil && !was {
				rt.Fatal("a paused machine answers")
			}
			if !was {
				err = nil
			}
			return err
		},
	}
	names := []string{"pause", "resume", "disconnect", "listen", "snapshot", "stats", "ping"}
	for range rapid.IntRange(0, 8).Draw(rt, "length") {
		name := rapid.SampledFrom(names).Draw(rt, "operation")
		begin := time.Now()
		err := operations[name]()
		if took := time.Since(begin); took > 10*time.Second {
			rt.Fatalf("%s takes %v", name, took)
		}
		if err != nil && sound && !errors.Is(err, context.DeadlineExceeded) {
			rt.Fatalf("%s without a fault: %v", name, err)
		}
	}
}
