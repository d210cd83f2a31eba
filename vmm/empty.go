package vmm

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
)

// EmptyLauncher is a Driver whose Restore can be had in two parts: launching the hypervisor's process in its jail, which
// takes most of the time and knows nothing of the guest, and loading the template into it. Restore is both at once.
// Processes launched ahead of time are what a pool keeps in hand to refill faster.
type EmptyLauncher interface {
	Driver
	// LaunchEmpty launches the process of a machine that will be a clone of t and returns when it serves. The jail shows it
	// the files of t alone, so it can load no other template; t's files must stay until Load has returned or the process is
	// closed. spec is as for Restore: who made its parts removes them after the machine, or the empty process, is closed.
	// ErrTemplate: t does not fit. ctx bounds the call alone.
	LaunchEmpty(ctx context.Context, t Template, spec Spec) (Empty, error)
}

// Empty is a hypervisor's process that serves and has no guest yet. Its methods are safe for concurrent use.
type Empty interface {
	// ID is the spec's.
	ID() string
	// Load makes the machine: a clone of the template that the process was launched for, paused. It can be called once;
	// afterwards the process is the machine's, or has ended together with the error. ErrClosed: the process was closed, or
	// has ended while it waited. ErrState: it was called before.
	Load(ctx context.Context) (Machine, error)
	// Stats is what the process takes while it waits.
	Stats() (Stats, error)
	// Done is closed when the process has ended, by itself or by Close; Err then says why (nil after Close).
	Done() <-chan struct{}
	Err() error
	// Close ends the process and leaves nothing. After Load was called it does nothing: close the machine. It is idempotent.
	Close() error
}

// NewEmpty makes an Empty of a driver's machine whose process serves and has no guest: load brings it in, and destroys m
// when it fails.
func NewEmpty(m Machine, load func(context.Context) error) Empty {
	return &empty{Machine: m, load: load}
}

// empty hides what of a machine needs a guest.
type empty struct {
	Machine
	load func(context.Context) error
	fate atomic.Int32
}

// What became of an empty process.
const (
	emptyWaits int32 = iota
	emptyLoaded
	emptyClosed
)

func (e *empty) Load(ctx context.Context) (Machine, error) {
	if !e.fate.CompareAndSwap(emptyWaits, emptyLoaded) {
		err := ErrState
		if e.fate.Load() == emptyClosed {
			err = ErrClosed
		}
		return nil, fmt.Errorf("load machine %s: %w", e.ID(), err)
	}
	select {
	case <-e.Done(): // it ended while it waited; closed again for what could not be removed
		return nil, fmt.Errorf("load machine %s: %w", e.ID(), errors.Join(ErrClosed, e.Err(), e.Machine.Close()))
	default:
	}
	if err := e.load(ctx); err != nil {
		return nil, err
	}
	return e.Machine, nil
}

func (e *empty) Close() error {
	if !e.fate.CompareAndSwap(emptyWaits, emptyClosed) && e.fate.Load() == emptyLoaded {
		return nil
	}
	return e.Machine.Close()
}
