package vmmtest

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/ephemeral-run/ephemeral/vmm"
)

// Run checks that a driver keeps the contract of package vmm. Each check is a subtest, at the end of which no process,
// descriptor or goroutine of it may be left.
func Run(t *testing.T, h Harness) { run(t, h, nil) }

// RunOnly runs the checks of those names.
func RunOnly(t *testing.T, h Harness, names ...string) { run(t, h, names) }

func run(t *testing.T, h Harness, only []string) {
	s := &suite{Harness: h.withDefaults()}
	s.makeTemplate(t)
	memory := checksum(t, s.template.RAM)
	for _, c := range []struct {
		name  string
		check func(*suite, *testing.T)
	}{
		{"Boot", (*suite).testBoot},
		{"BootCancelled", (*suite).testBootCancelled},
		{"BootRefusesBadSpecs", (*suite).testBadSpecs},
		{"DialRetries", (*suite).testDialRetries},
		{"DialEndsWithContext", (*suite).testDialEndsWithContext},
		{"Listen", (*suite).testListen},
		{"ManyStreams", (*suite).testManyStreams},
		{"BytesToHost", (*suite).testBytesToHost},
		{"BytesToGuest", (*suite).testBytesToGuest},
		{"PauseAndResume", (*suite).testPauseAndResume},
		{"Disconnect", (*suite).testDisconnect},
		{"SnapshotRefuses", (*suite).testSnapshotRefuses},
		{"RestoreIsPaused", (*suite).testRestoreIsPaused},
		{"RestoreRefusesBadTemplates", (*suite).testBadTemplates},
		{"RestoreCancelled", (*suite).testRestoreCancelled},
		{"Empty", (*suite).testEmpty},
		{"ClonesAreApart", (*suite).testClonesAreApart},
		{"ClonesInARow", (*suite).testClonesInARow},
		{"ClonesAtOnce", (*suite).testClonesAtOnce},
		{"Stats", (*suite).testStats},
		{"CloseInEveryState", (*suite).testCloseInEveryState},
		{"CloseEndsCalls", (*suite).testCloseEndsCalls},
		{"AfterClose", (*suite).testAfterClose},
		{"KilledInEveryState", (*suite).testKilledInEveryState},
		{"KilledDuringRestore", (*suite).testKilledDuringRestore},
		{"PowerOff", (*suite).testPowerOff},
		{"Reboot", (*suite).testReboot},
		{"Panic", (*suite).testPanic},
	} {
		if only != nil && !slices.Contains(only, c.name) {
			continue
		}
		t.Run(c.name, func(t *testing.T) {
			if reason, ok := s.LeaveOut[c.name]; ok {
				t.Skip(reason)
			}
			leavesNothing(t)
			c.check(s, t)
		})
	}
	if checksum(t, s.template.RAM) != memory {
		t.Error("the template's memory has changed")
	}
}

// makeTemplate makes the template that most checks restore from, and restores it once, so that what a driver keeps for
// all clones is there before leaks are counted.
func (s *suite) makeTemplate(t *testing.T) {
	t.Helper()
	s.template = s.MakeTemplate(t, t.TempDir())
	m, _ := s.running(t)
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
}

func (s *suite) testBoot(t *testing.T) {
	m := s.boot(t, nil)
	a := NewAgent(m.Dial)
	if err := a.Ping(s.within(t, bootTime)); err != nil {
		t.Fatal(err)
	}
	if m.ID() == "" {
		t.Error("no id")
	}
	select {
	case <-m.Done():
		t.Error("done while it runs")
	default:
	}
	if err := m.Err(); err != nil {
		t.Errorf("error while it runs: %v", err)
	}
}

func (s *suite) testBadSpecs(t *testing.T) {
	for name, spoil := range map[string]func(*vmm.Spec){
		"no kernel":     func(s *vmm.Spec) { s.Image.Kernel = filepath.Join(s.Dir, "missing") },
		"no root":       func(s *vmm.Spec) { s.Image.RootFS = filepath.Join(s.Dir, "missing") },
		"no CPU":        func(s *vmm.Spec) { s.Shape.VCPUs = 0 },
		"no memory":     func(s *vmm.Spec) { s.Shape.MemoryMiB = 0 },
		"RAM too short": func(s *vmm.Spec) { s.RAM = shortFile(t, s.Dir) },
	} {
		t.Run(name, func(t *testing.T) {
			spec := s.spec(t)
			spoil(&spec)
			m, err := s.Driver.Boot(s.within(t, callTime), spec)
			if err == nil {
				closeAfter(t, m)
				t.Fatal("it boots")
			}
			t.Log(err)
		})
	}
}

func shortFile(t testing.TB, dir string) string {
	t.Helper()
	path := filepath.Join(dir, "short")
	if err := os.WriteFile(path, make([]byte, 4096), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func (s *suite) testSnapshotRefuses(t *testing.T) {
	dir := t.TempDir()
	refused := func(what string, m vmm.Machine) {
		t.Helper()
		if err := m.Snapshot(s.within(t, callTime), dir); !errors.Is(err, vmm.ErrState) {
			t.Errorf("snapshot of %s: %v", what, err)
		}
	}
	refused("a clone", s.restore(t))

	m := s.boot(t, func(spec *vmm.Spec) { spec.RAM = filepath.Join(dir, "ram") })
	a := NewAgent(m.Dial)
	if err := a.Ping(s.within(t, bootTime)); err != nil {
		t.Fatal(err)
	}
	refused("a connected, running machine", m)
	if err := m.Disconnect(); err != nil {
		t.Fatal(err)
	}
	refused("a running machine", m)
	if err := a.Ping(s.within(t, callTime)); err != nil {
		t.Fatal(err)
	}
	if err := m.Pause(s.within(t, callTime)); err != nil {
		t.Fatal(err)
	}
	refused("a connected machine", m)
	if err := m.Disconnect(); err != nil {
		t.Fatal(err)
	}
	if err := m.Snapshot(s.within(t, callTime), dir); err != nil {
		t.Fatal(err)
	}
	if err := m.Resume(s.within(t, callTime)); !errors.Is(err, vmm.ErrState) {
		t.Errorf("resume of a template's machine, whose memory would change: %v", err)
	}
	if err := m.Snapshot(s.within(t, callTime), t.TempDir()); !errors.Is(err, vmm.ErrState) {
		t.Errorf("a second snapshot: %v", err)
	}
}
