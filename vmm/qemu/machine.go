package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/hypervisor"
)

// lastEvents is how long the monitor of an ended QEMU may take to tell its last events.
const lastEvents = 2 * time.Second

// machine is one QEMU process.
type machine struct {
	*hypervisor.Machine
	driver      *Driver
	monitor     *monitor
	line        *line
	snapshotted bool       // belongs to who has the machine's turn
	loaded      chan error // the end of a migration

	mu         sync.Mutex
	running    bool
	loadFailed bool // a migration failed
}

var _ vmm.Machine = (*machine)(nil)

// start launches QEMU and waits until its monitor serves. build adds what is special to booting or restoring; it returns
// the paths that QEMU needs to see.
func (d *Driver) start(ctx context.Context, s vmm.Spec, build func(*command) (readOnly, writable []string, err error)) (*machine, error) {
	monitorHost, monitorGuest, err := socketPair("monitor")
	if err != nil {
		return nil, err
	}
	lineHost, lineGuest, err := socketPair("line")
	if err != nil {
		_ = monitorHost.Close()
		_ = monitorGuest.Close()
		return nil, err
	}

	m := &machine{Machine: hypervisor.New("QEMU", s), driver: d, loaded: make(chan error, 1)}
	var c command
	d.boardArgs(&c, s, monitorGuest, lineGuest)
	readOnly, writable, err := build(&c)
	if err == nil {
		err = m.Launch(ctx, d.launchable(&c, s, readOnly, writable))
	}
	// From here on they are QEMU's alone, so that its end is the end of the connections.
	_ = monitorGuest.Close()
	_ = lineGuest.Close()
	if err != nil {
		_ = monitorHost.Close()
		_ = lineHost.Close()
		return nil, err
	}
	m.monitor = newMonitor(monitorHost, m.onEvent)
	m.line = newLine(lineHost, m.renewLine)
	go m.watch()
	if err := m.monitor.handshake(ctx); err != nil {
		return nil, m.abort(fmt.Errorf("start QEMU for machine %s: %w", s.ID, err))
	}
	return m, nil
}

// abort destroys a machine that did not come up and explains why, with QEMU's own words when it ended by itself.
func (m *machine) abort(err error) error {
	select { // a process that ends takes its monitor with it: let its end be the explanation
	case <-m.Done():
	case <-m.monitor.done:
		select {
		case <-m.Done():
		case <-time.After(lastEvents):
		}
	default:
	}
	if end := m.Err(); end != nil {
		err = end
	}
	if cerr := m.Close(); cerr != nil {
		err = errors.Join(err, cerr)
	}
	return err
}

// socketPair makes a connection with one end for Go and the other to be inherited.
func socketPair(name string) (*net.UnixConn, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("socket pair for %s: %w", name, err)
	}
	host, guest := os.NewFile(uintptr(fds[0]), name), os.NewFile(uintptr(fds[1]), name+" of QEMU")
	conn, err := net.FileConn(host) // has a descriptor of its own
	_ = host.Close()
	if err != nil {
		_ = guest.Close()
		return nil, nil, fmt.Errorf("socket pair for %s: %w", name, err)
	}
	return conn.(*net.UnixConn), guest, nil
}

// watch sees QEMU end, for whatever reason, and cleans up.
func (m *machine) watch() {
	<-m.Exited()
	select {
	case <-m.monitor.done: // with the process the other end was closed; what it said last is read
	case <-time.After(lastEvents):
	}
	m.monitor.close()
	m.line.close()
	m.Finish(m.explain, nil)
}

// explain classes the end of QEMU.
func (m *machine) explain(told *hypervisor.End, exit error) error {
	switch {
	case told == nil:
		return m.Failure(exit)
	case told.Err == nil:
		return nil
	}
	return fmt.Errorf("machine %s: %w (%s)", m.ID(), told.Err, told.Reason)
}

// onEvent keeps what matters of QEMU's events: migration, and the guest's end.
func (m *machine) onEvent(e event) {
	switch e.name {
	case "SHUTDOWN":
		var data struct {
			Reason string `json:"reason"`
		}
		_ = json.Unmarshal(e.data, &data) // an unknown reason is a failure
		m.Ended(shutdownReason(data.Reason))
	case "GUEST_PANICKED":
		m.Ended(hypervisor.End{Reason: "panic event", Err: vmm.ErrPanicked})
	case "MIGRATION":
		var data struct {
			Status string `json:"status"`
		}
		_ = json.Unmarshal(e.data, &data)
		m.migrated(data.Status)
	case "STOP":
		m.mu.Lock()
		unasked := m.running
		m.mu.Unlock()
		if unasked { // an internal error of the accelerator, for example: the guest will never run again
			m.Ended(hypervisor.End{Reason: "stopped by itself", Err: vmm.ErrVMM})
			m.Kill()
		}
	}
}

// shutdownReason classes QEMU's ShutdownCause.
func shutdownReason(reason string) hypervisor.End {
	switch reason {
	case "guest-shutdown":
		return hypervisor.End{Reason: reason, Err: nil}
	case "guest-reset":
		return hypervisor.End{Reason: reason, Err: vmm.ErrRebooted}
	case "guest-panic":
		return hypervisor.End{Reason: reason, Err: vmm.ErrPanicked}
	}
	return hypervisor.End{Reason: fmt.Sprintf("shut down: %.40q", reason), Err: vmm.ErrVMM}
}

// migrated tells who waits for the end of a migration.
func (m *machine) migrated(status string) {
	var err error
	switch status {
	case "completed":
	case "failed", "cancelled":
		err = fmt.Errorf("migration %s", status)
		m.mu.Lock()
		m.loadFailed = true
		m.mu.Unlock()
	default: // on its way
		return
	}
	select {
	case m.loaded <- err:
	default:
	}
}

// Dial connects to a port of the guest.
func (m *machine) Dial(ctx context.Context, port uint32) (net.Conn, error) {
	c, err := m.line.dial(ctx, port)
	return c, m.Wrap("dial", err)
}

// Listen accepts connections of the guest.
func (m *machine) Listen(port uint32) (net.Listener, error) {
	ln, err := m.line.listen(port)
	return ln, m.Wrap("listen", err)
}
