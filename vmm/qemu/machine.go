package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ephemeral-run/ephemeral/vmm"
)

const (
	// maxStderr is how much of QEMU's last words a machine keeps, in bytes.
	maxStderr = 4096
	// lastEvents is how long the monitor of an ended QEMU may take to tell its last events.
	lastEvents = 2 * time.Second
	// killTimeout bounds the end of a killed QEMU. Beyond it, it hangs in the kernel.
	killTimeout = 30 * time.Second
)

// machine is one QEMU process.
type machine struct {
	driver  *Driver
	spec    vmm.Spec
	monitor *monitor
	line    *line
	process vmm.Process
	stderr  *tail
	done    chan struct{} // closed when everything has ended
	err     error         // valid after done

	// turn has one token, which operations on the machine take: one at a time.
	turn chan struct{}
	// What follows belongs to the owner of turn.
	snapshotted bool

	loaded chan error // the end of a migration

	mu         sync.Mutex
	running    bool
	closing    bool // Close was called
	loadFailed bool // a migration failed
	end        *end // what the guest or QEMU said of the end
}

// end is how a machine ended, as told by events.
type end struct {
	reason string
	err    error // nil for power-off
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

	m := &machine{
		driver: d,
		spec:   s,
		stderr: &tail{limit: maxStderr},
		done:   make(chan struct{}),
		turn:   make(chan struct{}, 1),
		loaded: make(chan error, 1),
	}
	var c command
	d.boardArgs(&c, s, monitorGuest, lineGuest)
	readOnly, writable, err := build(&c)
	if err == nil {
		launch := d.launchable(&c, s, readOnly, writable)
		launch.Stderr = m.stderr
		m.process, err = s.Launcher.Launch(ctx, launch)
	}
	// From here on they are QEMU's alone, so that its end is the end of the connections.
	_ = monitorGuest.Close()
	_ = lineGuest.Close()
	if err != nil {
		_ = monitorHost.Close()
		_ = lineHost.Close()
		return nil, fmt.Errorf("launch QEMU for machine %s: %w", s.ID, err)
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
	case <-m.done:
	case <-m.monitor.done:
		select {
		case <-m.done:
		case <-time.After(lastEvents):
		}
	default:
	}
	select {
	case <-m.done:
		if m.err != nil {
			err = m.err
		}
	default:
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
	<-m.process.Done()
	select {
	case <-m.monitor.done: // with the process the other end was closed; what it said last is read
	case <-time.After(lastEvents):
	}
	m.monitor.close()
	m.line.close()
	m.err = m.explain()
	close(m.done)
}

// explain classes the end of QEMU.
func (m *machine) explain() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closing {
		return nil
	}
	if m.end != nil {
		if m.end.err == nil {
			return nil
		}
		return fmt.Errorf("machine %s: %w (%s)", m.spec.ID, m.end.err, m.end.reason)
	}
	err := fmt.Errorf("machine %s: %w", m.spec.ID, vmm.ErrVMM)
	if perr := m.process.Err(); perr != nil {
		err = fmt.Errorf("%w: %w", err, perr)
	}
	if words := strings.TrimSpace(m.stderr.String()); words != "" {
		err = fmt.Errorf("%w: %s", err, words)
	}
	return err
}

// onEvent keeps what matters of QEMU's events: migration, and the guest's end.
func (m *machine) onEvent(e event) {
	switch e.name {
	case "SHUTDOWN":
		var data struct {
			Reason string `json:"reason"`
		}
		_ = json.Unmarshal(e.data, &data) // an unknown reason is a failure
		m.ended(shutdownReason(data.Reason))
	case "GUEST_PANICKED":
		m.ended(end{"panic event", vmm.ErrPanicked})
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
			m.ended(end{"stopped by itself", vmm.ErrVMM})
			_ = m.process.Kill()
		}
	}
}

// shutdownReason classes QEMU's ShutdownCause.
func shutdownReason(reason string) end {
	switch reason {
	case "guest-shutdown":
		return end{reason, nil}
	case "guest-reset":
		return end{reason, vmm.ErrRebooted}
	case "guest-panic":
		return end{reason, vmm.ErrPanicked}
	}
	return end{fmt.Sprintf("shut down: %.40q", reason), vmm.ErrVMM}
}

// ended keeps the first reason.
func (m *machine) ended(e end) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.end == nil {
		m.end = &e
	}
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

// ID is the spec's.
func (m *machine) ID() string { return m.spec.ID }

// Dial connects to a port of the guest.
func (m *machine) Dial(ctx context.Context, port uint32) (net.Conn, error) {
	c, err := m.line.dial(ctx, port)
	return c, m.wrap("dial", err)
}

// Listen accepts connections of the guest.
func (m *machine) Listen(port uint32) (net.Listener, error) {
	ln, err := m.line.listen(port)
	return ln, m.wrap("listen", err)
}

func (m *machine) wrap(doing string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s machine %s: %w", doing, m.spec.ID, err)
}

// Done is closed when QEMU has ended and everything of it was cleaned up.
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

// Close kills QEMU and waits for its end.
func (m *machine) Close() error {
	m.mu.Lock()
	m.closing = true
	m.mu.Unlock()
	select {
	case <-m.done:
		return nil
	default:
	}
	kerr := m.process.Kill()
	timeout := time.NewTimer(killTimeout)
	defer timeout.Stop()
	select {
	case <-m.done:
		return nil
	case <-timeout.C:
		return errors.Join(fmt.Errorf("close machine %s: QEMU (pid %d) did not end in %v", m.spec.ID, m.process.Pid(), killTimeout), kerr)
	}
}
