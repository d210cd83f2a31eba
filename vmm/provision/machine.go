package provision

import (
	"context"
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
	urgent atomic.Bool // Wake gave it the CPU first

	preparation *preparation // nil: it has none, and rests since it was made
}

// Steps says how long each step of its creation took, in order. Together they are the whole time.
func (m *Machine) Steps() []Step { return m.steps }

// Image is the digest of the image that it was made from.
func (m *Machine) Image() string { return m.image }

// MadeAt is when the machine was ready.
func (m *Machine) MadeAt() time.Time { return m.madeAt }

// Wake makes a machine that rests paused run, or ends what goes on before its rest. A machine that wakes gets the CPU before
// those that are at work, so that a burst of claims does not wait for the first of them to finish: until Settled, which must
// be called before anything untrusted runs.
func (m *Machine) Wake(ctx context.Context) error {
	m.urgent.Store(m.cell.SetUrgent(true) == nil) // a host on which that fails wakes it like any other
	paused := m.rest == RestPaused
	if m.preparation != nil {
		var err error
		if paused, err = m.preparation.claim(ctx); err != nil {
			return fmt.Errorf("wake machine %s: %w", m.ID(), err)
		}
	}
	if !paused {
		return nil
	}
	return m.Resume(ctx)
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
