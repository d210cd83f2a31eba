package cloudhypervisor

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/ephemeral-run/ephemeral/vmm"
)

// machine is one process.
type machine struct {
	driver   *Driver
	spec     vmm.Spec
	hub      *hub
	endpoint *endpoint
	api      *client
	process  vmm.Process
	stderr   *tail
	told     chan struct{} // closed when all events were read
	done     chan struct{} // closed when everything has ended
	err      error         // valid after done
	cleanErr error         // valid after done: what could not be removed

	// turn has one token, which operations on the machine take: one at a time.
	turn chan struct{}
	// What follows belongs to the owner of turn.
	state       string // of the API; "" when an interrupted call left it unknown
	snapshotted bool

	mu      sync.Mutex
	closing bool // Close was called
	end     *end // what the events said of the end
}

var _ vmm.Machine = (*machine)(nil)

// ID is the spec's.
func (m *machine) ID() string { return m.spec.ID }

// Dial connects to a port of the guest.
func (m *machine) Dial(ctx context.Context, port uint32) (net.Conn, error) {
	c, err := m.hub.dial(ctx, port)
	return c, m.wrap("dial", err)
}

// Listen accepts connections of the guest.
func (m *machine) Listen(port uint32) (net.Listener, error) {
	ln, err := m.hub.listen(port)
	return ln, m.wrap("listen", err)
}

// Disconnect ends every connection. Listeners stay.
func (m *machine) Disconnect() error { return m.wrap("disconnect", m.hub.disconnect()) }

func (m *machine) wrap(doing string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s machine %s: %w", doing, m.spec.ID, err)
}

// take waits for this operation's turn. The returned function ends it.
func (m *machine) take(ctx context.Context) (func(), error) {
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

// operate runs fn in its turn, with the machine's state known. A failure that comes with the end of the machine is
// vmm.ErrClosed.
func (m *machine) operate(ctx context.Context, doing string, fn func(context.Context) error) error {
	release, err := m.take(ctx)
	if err != nil {
		return m.wrap(doing, err)
	}
	defer release()
	before := m.state
	if before == "" {
		before, err = m.api.info(ctx)
		m.state = before
	}
	if err == nil {
		err = fn(ctx)
	}
	if err == nil {
		return nil
	}
	var refused *APIError
	switch {
	case errors.As(err, &refused):
		err = fmt.Errorf("it is %s: %w", before, err)
	case ctx.Err() == nil && !errors.Is(err, vmm.ErrState) && m.endsNow():
		err = fmt.Errorf("%w: %w", vmm.ErrClosed, err)
	}
	return m.wrap(doing, err)
}

// endsNow tells whether a lost connection is the end of the machine.
func (m *machine) endsNow() bool {
	timeout := time.NewTimer(lastEvents)
	defer timeout.Stop()
	select {
	case <-m.process.Done():
		return true
	case <-timeout.C:
		return false
	}
}

// change makes the API bring the machine from one state into another; being there already is fine.
func (m *machine) change(ctx context.Context, to string, call func(context.Context) error) error {
	if m.state == to {
		return nil
	}
	from := m.state
	m.state = "" // until the call has been answered
	err := call(ctx)
	var refused *APIError
	switch {
	case err == nil:
		m.state = to
	case errors.As(err, &refused):
		m.state = from
	}
	return err
}

// Pause stops the guest's CPUs. It is idempotent.
func (m *machine) Pause(ctx context.Context) error {
	return m.operate(ctx, "pause", func(ctx context.Context) error {
		return m.change(ctx, statePaused, m.api.pause)
	})
}

// Resume lets the guest's CPUs run. It is idempotent. A machine that was snapshotted is refused: its memory is the
// template's.
func (m *machine) Resume(ctx context.Context) error {
	return m.operate(ctx, "resume", func(ctx context.Context) error {
		if m.snapshotted {
			return fmt.Errorf("%w: its memory belongs to a template now", vmm.ErrState)
		}
		return m.change(ctx, stateRunning, m.api.resume)
	})
}

// Stats reads memory and CPU time of the process from /proc.
func (m *machine) Stats() (vmm.Stats, error) {
	select {
	case <-m.process.Done(): // its pid may be another's by now
		return vmm.Stats{}, m.wrap("stats of", vmm.ErrClosed)
	default:
	}
	s, err := vmm.ProcessStats(m.process.Pid())
	return s, m.wrap("stats of", err)
}

// Done is closed when the process has ended and everything of it was cleaned up.
func (m *machine) Done() <-chan struct{} { return m.done }

// Err says why the machine ended; nil before that, after Close, and after power-off.
func (m *machine) Err() error {
	select {
	case <-m.done:
		return m.err
	default:
		return nil
	}
}

// Close kills the process and waits for its end.
func (m *machine) Close() error {
	m.mu.Lock()
	m.closing = true
	m.mu.Unlock()
	select {
	case <-m.done:
		return m.wrap("close", m.cleanErr)
	default:
	}
	killed := m.process.Kill()
	timeout := time.NewTimer(killTimeout)
	defer timeout.Stop()
	select {
	case <-m.done:
		return m.wrap("close", m.cleanErr)
	case <-timeout.C:
		return errors.Join(fmt.Errorf("close machine %s: process %d did not end in %v", m.spec.ID, m.process.Pid(), killTimeout), killed)
	}
}
