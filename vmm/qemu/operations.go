package qemu

import (
	"context"
	"fmt"
	"net"
	"time"

	"github.com/ephemeral-run/ephemeral/vmm"
)

// operate runs fn in its turn. A failure that comes with the end of the machine is vmm.ErrClosed.
func (m *machine) operate(ctx context.Context, doing string, fn func(context.Context) error) error {
	release, err := m.Take(ctx)
	if err != nil {
		return m.Wrap(doing, err)
	}
	defer release()
	err = fn(ctx)
	if err != nil {
		select {
		case <-m.monitor.done:
			err = fmt.Errorf("%w: %w", vmm.ErrClosed, err)
		default:
		}
	}
	return m.Wrap(doing, err)
}

// Pause stops the guest's CPUs. It is idempotent.
func (m *machine) Pause(ctx context.Context) error {
	return m.operate(ctx, "pause", func(ctx context.Context) error {
		if !m.setRunning(false) { // first: the event of the stop is expected
			return nil
		}
		if err := m.monitor.execute(ctx, "stop", nil); err != nil {
			m.setRunning(true)
			return err
		}
		return nil
	})
}

// Resume lets the guest's CPUs run. It is idempotent. A machine that was snapshotted is refused: its memory is the
// template's.
func (m *machine) Resume(ctx context.Context) error {
	return m.operate(ctx, "resume", func(ctx context.Context) error {
		if m.snapshotted {
			return fmt.Errorf("%w: its memory belongs to a template now", vmm.ErrState)
		}
		if m.isRunning() {
			return nil
		}
		if err := m.monitor.execute(ctx, "cont", nil); err != nil {
			return err
		}
		m.setRunning(true)
		return nil
	})
}

func (m *machine) isRunning() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.running
}

// setRunning returns whether it was different.
func (m *machine) setRunning(running bool) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	changed := m.running != running
	m.running = running
	return changed
}

// Disconnect ends every connection and closes the host's end of the serial line, so that the guest sees the end of its
// session. The next Dial or Listen connects it again.
func (m *machine) Disconnect() error {
	ctx, cancel := context.WithTimeout(context.Background(), disconnectTimeout)
	defer cancel()
	return m.operate(ctx, "disconnect", func(ctx context.Context) error {
		m.line.disconnect()
		return m.awaitDisconnected(ctx)
	})
}

const disconnectTimeout = 10 * time.Second

// awaitDisconnected waits until QEMU has seen the end of the line and told the guest.
func (m *machine) awaitDisconnected(ctx context.Context) error {
	for {
		var chardevs []struct {
			Label    string `json:"label"`
			Filename string `json:"filename"`
		}
		if err := m.monitor.query(ctx, &chardevs, "query-chardev", nil); err != nil {
			return err
		}
		for _, c := range chardevs {
			if c.Label == "line" && disconnected(c.Filename) {
				return nil
			}
		}
		select {
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("QEMU does not see the end of the serial line: %w", context.Cause(ctx))
		}
	}
}

// disconnected reads a socket's state from the name that QEMU shows for it.
func disconnected(filename string) bool {
	const prefix = "disconnected:"
	return len(filename) >= len(prefix) && filename[:len(prefix)] == prefix
}

// renewLine gives QEMU a fresh end of the serial line.
func (m *machine) renewLine(ctx context.Context) (net.Conn, error) {
	host, guest, err := socketPair("line")
	if err != nil {
		return nil, err
	}
	defer func() { _ = guest.Close() }()
	const name = "line"
	err = m.monitor.execute(ctx, "getfd", map[string]any{"fdname": name}, guest)
	if err == nil {
		err = m.monitor.execute(ctx, "chardev-change", map[string]any{
			"id": "line",
			"backend": map[string]any{"type": "socket", "data": map[string]any{
				"server": false,
				"addr":   map[string]any{"type": "fd", "data": map[string]any{"str": name}},
			}},
		})
	}
	if err != nil {
		_ = host.Close()
		return nil, err
	}
	return host, nil
}
