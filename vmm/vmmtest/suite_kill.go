package vmmtest

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/vmm"
)

// killing kills what it launches after a while.
type killing struct {
	vmm.Launcher
	after time.Duration
}

func (k killing) Launch(ctx context.Context, c vmm.Command) (vmm.Process, error) {
	p, err := k.Launcher.Launch(ctx, c)
	if err != nil {
		return nil, err
	}
	go func() {
		select {
		case <-time.After(k.after):
			_ = p.Kill()
		case <-p.Done():
		}
	}()
	return p, nil
}

// testKilledDuringRestore kills the VMM at many moments between its launch and the first answer of the guest. Whatever was
// being done ends in time, with an error that says so.
func (s *suite) testKilledDuringRestore(t *testing.T) {
	begin := time.Now()
	m, _ := s.running(t)
	whole := time.Since(begin)
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	const moments = 12
	for i := range moments {
		spec := s.spec(t)
		spec.Launcher = killing{spec.Launcher, whole * time.Duration(i) / moments}
		ctx := s.within(t, 4*callTime)
		m, err := s.Driver.Restore(ctx, s.template, spec)
		if err == nil {
			if err = m.Resume(ctx); err == nil {
				err = NewAgent(m.Dial).Ping(ctx)
			}
			select { // by itself
			case <-m.Done():
			case <-time.After(s.limit(endTime) + whole):
				t.Error("its end was not noticed")
			}
			if end := m.Err(); !errors.Is(end, vmm.ErrVMM) {
				t.Errorf("it ended with %v", end)
			}
			if cerr := m.Close(); cerr != nil {
				t.Error(cerr)
			}
		} else if !errors.Is(err, vmm.ErrVMM) && !errors.Is(err, vmm.ErrClosed) {
			t.Errorf("killed, but: %v", err)
		}
		if ctx.Err() != nil {
			t.Errorf("moment %d: it went on until its time was over: %v", i, err)
		}
	}
}
