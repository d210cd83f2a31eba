package hypervisor

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/ephemeral-run/ephemeral/images"
	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/vmmtest"
)

func TestMain(m *testing.M) {
	// The launcher's thread stays.
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("github.com/ephemeral-run/ephemeral/vmm/vmmtest.init.func1.1"))
}

// launched is a machine whose process is a shell's script, watched as a driver does.
func launched(t *testing.T, script string, explain func(*Machine, *End, error) error, left error) *Machine {
	t.Helper()
	m := New("the shell", vmm.Spec{ID: "m", Dir: t.TempDir(), Launcher: &vmmtest.Launcher{}})
	if err := m.Launch(t.Context(), vmm.Command{Args: []string{"/bin/sh", "-c", script}}); err != nil {
		t.Fatal(err)
	}
	go func() {
		<-m.Exited()
		m.Finish(func(told *End, exit error) error { return explain(m, told, exit) }, left)
	}()
	t.Cleanup(func() { _ = m.Close() })
	return m
}

// failure takes every end for a failure.
func failure(m *Machine, _ *End, exit error) error { return m.Failure(exit) }

func TestEndByItself(t *testing.T) {
	m := launched(t, "echo last words >&2; exit 3", failure, nil)
	<-m.Done()
	if err := m.Err(); !errors.Is(err, vmm.ErrVMM) || !strings.Contains(err.Error(), "last words") || !strings.Contains(err.Error(), "exit status 3") {
		t.Errorf("it ended with %v", err)
	}
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	if err := m.Err(); !errors.Is(err, vmm.ErrVMM) {
		t.Errorf("after close: %v", err)
	}
	if _, err := m.Stats(); !errors.Is(err, vmm.ErrClosed) {
		t.Errorf("stats: %v", err)
	}
	if _, err := m.Take(t.Context()); !errors.Is(err, vmm.ErrClosed) {
		t.Errorf("take: %v", err)
	}
}

func TestClose(t *testing.T) {
	left := errors.New("a socket")
	m := launched(t, "sleep 100", failure, left)
	if s, err := m.Stats(); err != nil || s.Pid == 0 {
		t.Errorf("stats: %+v, %v", s, err)
	}
	if m.Err() != nil || m.ID() != "m" {
		t.Errorf("a running machine: %v, %s", m.Err(), m.ID())
	}
	for range 2 {
		if err := m.Close(); !errors.Is(err, left) {
			t.Errorf("close does not tell what is left: %v", err)
		}
	}
	if err := m.Err(); err != nil {
		t.Errorf("closed, but: %v", err)
	}
}

// TestFirstEndCounts: what is said later of the end, as a consequence, changes nothing.
func TestFirstEndCounts(t *testing.T) {
	m := launched(t, "sleep 100", func(_ *Machine, told *End, _ error) error { return told.Err }, nil)
	m.Ended(End{Reason: "reset", Err: vmm.ErrRebooted})
	m.Ended(End{Reason: "killed", Err: vmm.ErrVMM})
	m.Kill()
	<-m.Done()
	if err := m.Err(); !errors.Is(err, vmm.ErrRebooted) || errors.Is(err, vmm.ErrVMM) {
		t.Errorf("it ended with %v", err)
	}
}

func TestOneAtATime(t *testing.T) {
	m := launched(t, "sleep 100", failure, nil)
	release, err := m.Take(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := m.Take(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a second turn: %v", err)
	}
	release()
	if release, err = m.Take(t.Context()); err != nil {
		t.Fatal(err)
	}
	waiting := make(chan error, 1)
	go func() {
		_, err := m.Take(t.Context())
		waiting <- err
	}()
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-waiting; !errors.Is(err, vmm.ErrClosed) {
		t.Errorf("a turn of a closed machine: %v", err)
	}
	release()
}

func TestLaunchFails(t *testing.T) {
	m := New("the shell", vmm.Spec{ID: "m", Launcher: &vmmtest.Launcher{}})
	err := m.Launch(t.Context(), vmm.Command{Args: []string{"/missing"}})
	if !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "the shell for machine m") {
		t.Errorf("a missing program: %v", err)
	}
}

func TestTail(t *testing.T) {
	w := tail{limit: 4}
	for _, p := range []string{"a", "", "bcdefgh", "i"} {
		if n, err := w.Write([]byte(p)); n != len(p) || err != nil {
			t.Errorf("%q: %d, %v", p, n, err)
		}
	}
	if w.String() != "fghi" {
		t.Errorf("the tail is %q", w.String())
	}
}

func goodSpec(t *testing.T) vmm.Spec {
	t.Helper()
	return vmm.Spec{
		ID: "0123456789ab", Dir: t.TempDir(), Shape: vmm.Shape{VCPUs: 1, MemoryMiB: 64}, Launcher: &vmmtest.Launcher{},
		Image: images.Image{Kernel: "/k", Initramfs: "/i", RootFS: "/r"},
	}
}

func TestCheck(t *testing.T) {
	if err := Check(goodSpec(t)); err != nil {
		t.Fatal(err)
	}
	for name, spoil := range map[string]func(*vmm.Spec){
		"no id":           func(s *vmm.Spec) { s.ID = "" },
		"comma in id":     func(s *vmm.Spec) { s.ID = "a,b" },
		"relative":        func(s *vmm.Spec) { s.Dir = "machines/m" },
		"not clean":       func(s *vmm.Spec) { s.Dir += "/../x" },
		"URL's end":       func(s *vmm.Spec) { s.Dir += "/a#b" },
		"no CPU":          func(s *vmm.Spec) { s.Shape.VCPUs = 0 },
		"many CPUs":       func(s *vmm.Spec) { s.Shape.VCPUs = 65 },
		"no memory":       func(s *vmm.Spec) { s.Shape.MemoryMiB = 0 },
		"relative file":   func(s *vmm.Spec) { s.RAM = "ram" },
		"no kernel":       func(s *vmm.Spec) { s.Image.Kernel = "" },
		"card, no tap":    func(s *vmm.Spec) { s.NIC = &vmm.NIC{} },
		"nobody to start": func(s *vmm.Spec) { s.Launcher = nil },
	} {
		s := goodSpec(t)
		spoil(&s)
		if err := Check(s); err == nil {
			t.Errorf("%s: it passes", name)
		}
	}
}

func TestPrepareRAM(t *testing.T) {
	s := goodSpec(t)
	s.RAM = filepath.Join(s.Dir, "ram")
	for range 2 { // also where it is already
		if err := PrepareRAM(s); err != nil {
			t.Fatal(err)
		}
	}
	if info, err := os.Stat(s.RAM); err != nil || info.Size() != 64<<20 || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
	if err := os.Truncate(s.RAM, 4096); err != nil {
		t.Fatal(err)
	}
	if err := PrepareRAM(s); err == nil {
		t.Error("a file of another size is taken")
	}
}

// here is a driver's identity.
type here struct{ name, version, cpu string }

func (h here) Name() string     { return h.name }
func (h here) Version() string  { return h.version }
func (h here) CPUModel() string { return h.cpu }

func TestFit(t *testing.T) {
	s := goodSpec(t)
	tpl := vmm.Template{Dir: s.Dir, RAM: filepath.Join(s.Dir, "ram"), Image: s.Image, Shape: s.Shape, Driver: "d", Version: "1"}
	if err := os.WriteFile(tpl.RAM, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(tpl.RAM, 64<<20); err != nil {
		t.Fatal(err)
	}
	made := New("d", s).Made(here{"d", "1", "c"})
	if err := Fit(here{"d", "1", "c"}, tpl, made, Clone(tpl, s)); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		driver here
		change func(*vmm.Template, *vmm.Spec)
	}{
		"driver":         {here{"e", "1", "c"}, nil},
		"version":        {here{"d", "2", "c"}, nil},
		"CPU":            {here{"d", "1", "other"}, nil},
		"claimed":        {here{"d", "1", "c"}, func(t *vmm.Template, _ *vmm.Spec) { t.Version = "2" }},
		"shape":          {here{"d", "1", "c"}, func(_ *vmm.Template, s *vmm.Spec) { s.Shape.VCPUs = 2 }},
		"card":           {here{"d", "1", "c"}, func(_ *vmm.Template, s *vmm.Spec) { s.NIC = &vmm.NIC{} }},
		"no memory":      {here{"d", "1", "c"}, func(t *vmm.Template, _ *vmm.Spec) { t.RAM += "x" }},
		"memory is none": {here{"d", "1", "c"}, func(t *vmm.Template, _ *vmm.Spec) { t.RAM = t.Dir }},
	} {
		tpl, s := tpl, Clone(tpl, s)
		if c.change != nil {
			c.change(&tpl, &s)
		}
		if err := Fit(c.driver, tpl, made, s); err == nil {
			t.Errorf("another %s fits", name)
		}
	}
}

func TestSharedMapping(t *testing.T) {
	dir := t.TempDir()
	if err := SharedMapping(dir); err != nil {
		t.Error(err)
	}
	if err := namedMapping(dir); err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("left: %v, %v", left, err)
	}
	for _, bad := range []string{filepath.Join(dir, "missing"), "/proc"} {
		if err := SharedMapping(bad); err == nil {
			t.Errorf("files of %s can be mapped", bad)
		}
	}
}
