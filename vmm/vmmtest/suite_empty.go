package vmmtest

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ephemeral-run/ephemeral/vmm"
)

// testEmpty has processes launched ahead of time end in every way, with and without a guest.
func (s *suite) testEmpty(t *testing.T) {
	driver, ok := s.Driver.(vmm.EmptyLauncher)
	if !ok {
		t.Skip("the driver launches no empty processes")
	}
	launch := func(t *testing.T) vmm.Empty {
		t.Helper()
		e, err := driver.LaunchEmpty(s.within(t, callTime), s.template, s.spec(t))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := e.Close(); err != nil {
				t.Error(err)
			}
		})
		return e
	}
	for name, check := range map[string]func(t *testing.T, e vmm.Empty){
		"loaded": s.checkLoaded, "closed": s.checkEmptyClosed, "killed": s.checkEmptyKilled, "cancelled": s.checkLoadCancelled,
	} {
		t.Run(name, func(t *testing.T) {
			leavesNothing(t)
			check(t, launch(t))
		})
	}
	t.Run("bad template", func(t *testing.T) {
		tpl := s.template
		tpl.Version += "-other"
		if _, err := driver.LaunchEmpty(s.within(t, callTime), tpl, s.spec(t)); !errors.Is(err, vmm.ErrTemplate) {
			t.Errorf("another version's template: %v", err)
		}
	})
	t.Run("cancelled at launch", func(t *testing.T) {
		leavesNothing(t)
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		if _, err := driver.LaunchEmpty(ctx, s.template, s.spec(t)); !errors.Is(err, context.Canceled) {
			t.Errorf("cancelled: %v", err)
		}
	})
}

// checkLoaded makes a machine that is as good as a restored one, and outlives the empty process's Close.
func (s *suite) checkLoaded(t *testing.T, e vmm.Empty) {
	waiting, err := e.Stats()
	if err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	m, err := e.Load(s.within(t, callTime))
	if err != nil {
		t.Fatal(err)
	}
	closeAfter(t, m)
	took := time.Since(begin)
	if m.ID() != e.ID() {
		t.Errorf("the machine is %s, the process was launched for %s", m.ID(), e.ID())
	}
	if _, err := e.Load(s.within(t, callTime)); !errors.Is(err, vmm.ErrState) {
		t.Errorf("loaded again: %v", err)
	}
	if err := e.Close(); err != nil {
		t.Error(err)
	}
	a := NewAgent(m.Dial)
	s.mustNotAnswer(t, a)
	if err := m.Resume(s.within(t, callTime)); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := a.Run(s.within(t, callTime), nil, &out, "cat", inheritance); err != nil || out.String() != "template\n" {
		t.Errorf("the clone's memory is not the template's: %q, %v", out.String(), err)
	}
	t.Logf("an empty process has %.1f MiB of its own; load took %v", float64(waiting.PrivateBytes)/(1<<20), took)
}

func (s *suite) checkEmptyClosed(t *testing.T, e vmm.Empty) {
	for range 2 { // idempotent
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	}
	select {
	case <-e.Done():
	default:
		t.Error("closed, but not done")
	}
	if err := e.Err(); err != nil {
		t.Errorf("closed, but: %v", err)
	}
	if _, err := e.Load(s.within(t, callTime)); !errors.Is(err, vmm.ErrClosed) {
		t.Errorf("load after close: %v", err)
	}
	if _, err := e.Stats(); !errors.Is(err, vmm.ErrClosed) {
		t.Errorf("stats after close: %v", err)
	}
}

func (s *suite) checkEmptyKilled(t *testing.T, e vmm.Empty) {
	got, err := e.Stats()
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(got.Pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	select {
	case <-e.Done():
	case <-time.After(s.limit(endTime)):
		t.Fatal("its end was not noticed")
	}
	if err := e.Err(); !errors.Is(err, vmm.ErrVMM) {
		t.Errorf("killed, but: %v", err)
	}
	if _, err := e.Load(s.within(t, callTime)); !errors.Is(err, vmm.ErrClosed) || !errors.Is(err, vmm.ErrVMM) {
		t.Errorf("load of what was killed: %v", err)
	}
}

func (s *suite) checkLoadCancelled(t *testing.T, e vmm.Empty) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if m, err := e.Load(ctx); !errors.Is(err, context.Canceled) {
		if err == nil {
			closeAfter(t, m)
		}
		t.Errorf("cancelled: %v", err)
	}
	select {
	case <-e.Done():
	case <-time.After(s.limit(endTime)):
		t.Error("the process outlives its load")
	}
}
