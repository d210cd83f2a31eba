// Package hypervisor is what drivers have in common: a machine is one process of a hypervisor, it does one thing at a time,
// and it is told apart how it ended. A template fits its clones by the same measures. What a hypervisor says and is told is
// its driver's own.
package hypervisor

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/ephemeral-run/ephemeral/vmm"
)

const (
	// maxWords is how much a machine keeps of what its process says last, in bytes.
	maxWords = 8192
	// killTimeout bounds the end of a killed process. Beyond it, it hangs in the kernel.
	killTimeout = 30 * time.Second
)

// Machine is the process of a machine. A driver's machine embeds it; its exported methods that vmm.Machine has are those.
type Machine struct {
	Spec vmm.Spec // what it was made from; not to be changed

	program string // as messages call it
	words   tail
	process vmm.Process
	done    chan struct{}
	err     error // valid after done
	left    error // valid after done

	turn chan struct{}

	mu      sync.Mutex
	closing bool
	end     *End
}

// End is how a machine ended, as its hypervisor told.
type End struct {
	Reason string
	Err    error // nil: the guest powered off
}

// New makes a machine that has no process yet; messages call its program by the name.
func New(program string, s vmm.Spec) *Machine {
	return &Machine{Spec: s, program: program, words: tail{limit: maxWords}, done: make(chan struct{}), turn: make(chan struct{}, 1)}
}

// Launch starts the process, once. What it says on standard error is kept for messages. After it has succeeded the driver
// watches Exited, and calls Finish then.
func (m *Machine) Launch(ctx context.Context, c vmm.Command) error {
	c.Stderr = &m.words
	p, err := m.Spec.Launcher.Launch(ctx, c)
	if err != nil {
		return fmt.Errorf("launch %s for machine %s: %w", m.program, m.Spec.ID, err)
	}
	m.process = p
	return nil
}

// Exited is closed when the process has ended and was reaped.
func (m *Machine) Exited() <-chan struct{} { return m.process.Done() }

// Kill ends the process; it does not wait. What the kernel says against it shows when the end does not come.
func (m *Machine) Kill() { _ = m.process.Kill() }

// ID is the spec's.
func (m *Machine) ID() string { return m.Spec.ID }

// Words are the last bytes that the process said on standard error.
func (m *Machine) Words() string { return strings.TrimSpace(m.words.String()) }

// Wrap says of an error what was being done to the machine; nil stays nil.
func (m *Machine) Wrap(doing string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s machine %s: %w", doing, m.Spec.ID, err)
}

// Take waits for the turn to operate on the machine: one operation at a time. The returned function ends it. vmm.ErrClosed:
// the machine has ended.
func (m *Machine) Take(ctx context.Context) (func(), error) {
	select {
	case <-m.done:
		return nil, vmm.ErrClosed
	default:
	}
	select {
	case m.turn <- struct{}{}:
		return func() { <-m.turn }, nil
	case <-m.done:
		return nil, vmm.ErrClosed
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// Stats reads memory and CPU time of the process from /proc.
func (m *Machine) Stats() (vmm.Stats, error) {
	select {
	case <-m.process.Done(): // its pid may be another's by now
		return vmm.Stats{}, m.Wrap("stats of", vmm.ErrClosed)
	default:
	}
	s, err := vmm.ProcessStats(m.process.Pid())
	return s, m.Wrap("stats of", err)
}

// Ended notes how the machine ends. The first to say so is believed.
func (m *Machine) Ended(e End) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.end == nil {
		m.end = &e
	}
}

// Finish says that the process has ended and everything of it was cleaned up, but for what left tells of. Unless the
// machine was closed, explain makes Err of what Ended was told (nil: nothing) and of how the process ended.
func (m *Machine) Finish(explain func(told *End, exit error) error, left error) {
	m.mu.Lock()
	closing, end := m.closing, m.end
	m.mu.Unlock()
	if !closing {
		m.err = explain(end, m.process.Err())
	}
	m.left = left
	close(m.done)
}

// Failure is the end of a process that failed, with its own last words.
func (m *Machine) Failure(exit error) error {
	err := fmt.Errorf("machine %s: %w", m.Spec.ID, vmm.ErrVMM)
	if exit != nil {
		err = fmt.Errorf("%w: %w", err, exit)
	}
	if words := m.Words(); words != "" {
		err = fmt.Errorf("%w: %s", err, words)
	}
	return err
}

// Done is closed when the process has ended and everything of it was cleaned up.
func (m *Machine) Done() <-chan struct{} { return m.done }

// Err says why the machine ended; nil before that, after Close, and after power-off.
func (m *Machine) Err() error {
	select {
	case <-m.done:
		return m.err
	default:
		return nil
	}
}

// Close kills the process and waits for its end.
func (m *Machine) Close() error {
	m.mu.Lock()
	m.closing = true
	m.mu.Unlock()
	select {
	case <-m.done:
		return m.Wrap("close", m.left)
	default:
	}
	killed := m.process.Kill()
	timeout := time.NewTimer(killTimeout)
	defer timeout.Stop()
	select {
	case <-m.done:
		return m.Wrap("close", m.left)
	case <-timeout.C:
		return errors.Join(fmt.Errorf("close machine %s: %s (process %d) did not end in %v", m.Spec.ID, m.program, m.process.Pid(), killTimeout), killed)
	}
}

// Made is what a clone must have in common with this machine, when a template is made of it.
func (m *Machine) Made(d Identity) Made {
	return Made{Version: d.Version(), CPU: d.CPUModel(), Shape: m.Spec.Shape, NIC: m.Spec.NIC != nil}
}
