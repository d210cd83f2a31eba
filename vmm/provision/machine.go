package provision

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/network"
)

// Step is one named part of making a machine and how long it took.
type Step struct {
	Name     string
	Duration time.Duration
}

// Machine is a machine with all that belongs to it on the host.
type Machine struct {
	vmm.Machine
	image  string
	cell   cell
	tap    tap
	rest   Rest
	steps  []Step
	madeAt time.Time
	close  func() error
	probe  func(context.Context, vmm.Machine) error
	turns  turns                  // of the provisioner
	turn   atomic.Pointer[func()] // ends the turn that it has to wake
	urgent atomic.Bool            // Wake gave it the CPU first

	preparation *preparation // nil: it has none, and rests since it was made
}

// Steps says how long each step of its creation took, in order. Together they are the whole time.
func (m *Machine) Steps() []Step { return m.steps }

// Image is the digest of the image that it was made from.
func (m *Machine) Image() string { return m.image }

// MadeAt is when the machine was ready.
func (m *Machine) MadeAt() time.Time { return m.madeAt }

// Wake makes a machine that rests paused run, or ends what goes on before its rest, and begins to set its clock, which has
// stood still: Confirmed must be called next. It is called once. A machine that wakes gets the CPU before those that are at work, so that a burst
// of claims does not wait for the first of them to finish: until Settled, which must be called before anything untrusted runs.
// A machine that rests running, with its clock right, has nothing to do.
func (m *Machine) Wake(ctx context.Context) error {
	paused := m.rest == RestPaused
	if m.preparation != nil {
		var err error
		if paused, err = m.preparation.claim(ctx); err != nil {
			return fmt.Errorf("wake machine %s: %w", m.ID(), err)
		}
		if !paused && m.preparation.clock.Right() {
			m.preparation.isRight()
			return nil
		}
	}
	done, err := m.turns.take(ctx)
	if err != nil {
		return fmt.Errorf("wake machine %s: %w", m.ID(), err)
	}
	m.turn.Store(&done)
	m.urgent.Store(m.cell.SetUrgent(true) == nil) // a host on which that fails wakes it like any other
	if m.preparation != nil {
		m.preparation.set(ctx) // the guest finds the call when it runs
	}
	if !paused {
		return nil
	}
	if err := m.Resume(ctx); err != nil {
		m.endTurn()
		return err
	}
	return nil
}

// endTurn lets the next machine wake.
func (m *Machine) endTurn() {
	if done := m.turn.Swap(nil); done != nil {
		(*done)()
	}
}

// ErrUnprepared: the machine is one of a provisioner whose agent does not prepare.
var ErrUnprepared = errors.New("machine not prepared by its provisioner")

// Confirmed returns when a machine that wakes has answered that its clock is right. One that does not must not be used, nor
// one that was not prepared (ErrUnprepared) until its user has done that.
func (m *Machine) Confirmed(ctx context.Context) error {
	defer m.endTurn()
	if m.preparation == nil {
		return ErrUnprepared
	}
	if err := m.preparation.confirmed(ctx); err != nil {
		return fmt.Errorf("wake machine %s: %w", m.ID(), err)
	}
	return nil
}

// Exercise has a machine that rests running run a command, so that its memory is not reclaimed, and sets its clock.
func (m *Machine) Exercise(ctx context.Context) error {
	if err := m.Rested(ctx); err != nil {
		return err
	}
	if err := m.probe(ctx, m.Machine); err != nil {
		return fmt.Errorf("exercise machine %s: %w", m.ID(), err)
	}
	if m.preparation == nil {
		return nil
	}
	if err := m.preparation.clock.Set(ctx); err != nil {
		return fmt.Errorf("exercise machine %s: %w", m.ID(), err)
	}
	return nil
}

// Settled ends what Wake gave it: it shares the CPU with others as they with it.
func (m *Machine) Settled() error {
	if !m.urgent.Swap(false) {
		return nil
	}
	if err := m.cell.SetUrgent(false); err != nil {
		return fmt.Errorf("settle machine %s: %w", m.ID(), err)
	}
	return nil
}

// Err says why a machine ended that nobody closed: it could not be prepared, or what its VMM tells.
func (m *Machine) Err() error {
	if m.preparation != nil {
		m.preparation.mu.Lock()
		defer m.preparation.mu.Unlock()
		if m.preparation.err != nil {
			return m.preparation.err
		}
	}
	return m.Machine.Err()
}

// Rested returns when the machine rests: at once, but for one that was made a moment ago.
func (m *Machine) Rested(ctx context.Context) error {
	if m.preparation == nil {
		return nil
	}
	select {
	case <-m.preparation.done:
	case <-ctx.Done():
		return fmt.Errorf("wait for machine %s to rest: %w", m.ID(), context.Cause(ctx))
	}
	m.preparation.mu.Lock()
	defer m.preparation.mu.Unlock()
	return m.preparation.err
}

// Egress counts the frames and bytes that the guest tried to send. None got anywhere. It keeps the last numbers after
// Close.
func (m *Machine) Egress() (packets, bytes int64, err error) {
	if m.tap == nil {
		return 0, 0, nil
	}
	return m.tap.Counters()
}

// EgressAttempts says whom the guest tried to reach, once the machine is closed.
func (m *Machine) EgressAttempts() network.Attempts {
	if m.tap == nil {
		return network.Attempts{}
	}
	return m.tap.Attempts()
}

// Close destroys the machine and removes all that belongs to it: VMM with its connections and listeners, tap, cgroup,
// user id, directory. It does this once, goes on after errors and joins them, and is bounded in time.
func (m *Machine) Close() error { return m.close() }

// own makes the machine's Close and puts it among the open ones.
func (p *Provisioner) own(m *Machine, parts *cleanup, told Observer) {
	m.close = sync.OnceValue(func() error {
		began := time.Now()
		m.endTurn()
		err := p.left(parts.run(closeLimit))
		told.Closed(time.Since(began), err)
		p.mu.Lock()
		delete(p.open, m)
		p.mu.Unlock()
		if err != nil {
			return fmt.Errorf("close machine %s: %w", m.ID(), err)
		}
		return nil
	})
	p.mu.Lock()
	p.open[m] = struct{}{}
	p.mu.Unlock()
}
