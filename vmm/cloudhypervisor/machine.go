package cloudhypervisor

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/hypervisor"
)

// machine is one process.
type machine struct {
	*hypervisor.Machine
	driver   *Driver
	hub      *hub
	endpoint *endpoint
	api      *client
	told     chan struct{} // closed when all events were read
	copied   bool          // its memory is in no file until it is snapshotted

	// What follows belongs to who has the machine's turn.
	state       string // of the API; "" when an interrupted call left it unknown
	snapshotted bool
}

var _ vmm.Machine = (*machine)(nil)

// Dial connects to a port of the guest.
func (m *machine) Dial(ctx context.Context, port uint32) (net.Conn, error) {
	c, err := m.hub.dial(ctx, port)
	return c, m.Wrap("dial", err)
}

// Listen accepts connections of the guest.
func (m *machine) Listen(port uint32) (net.Listener, error) {
	ln, err := m.hub.listen(port)
	return ln, m.Wrap("listen", err)
}

// Disconnect ends every connection. Listeners stay.
func (m *machine) Disconnect() error { return m.Wrap("disconnect", m.hub.disconnect()) }

// operate runs fn in its turn, with the machine's state known. A failure that comes with the end of the machine is
// vmm.ErrClosed.
func (m *machine) operate(ctx context.Context, doing string, fn func(context.Context) error) error {
	release, err := m.Take(ctx)
	if err != nil {
		return m.Wrap(doing, err)
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
	return m.Wrap(doing, err)
}

// endsNow tells whether a lost connection is the end of the machine.
func (m *machine) endsNow() bool {
	timeout := time.NewTimer(lastEvents)
	defer timeout.Stop()
	select {
	case <-m.Exited():
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
