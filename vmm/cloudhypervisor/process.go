package cloudhypervisor

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/hypervisor"
)

const (
	// lastEvents is how long the events of an ended process may take to be read, and how long one lives that has closed
	// its event stream.
	lastEvents = 2 * time.Second
	// apiBacklog is how many connections wait for the API, of which one is needed.
	apiBacklog = 4
	apiName    = "api.sock"
	openFiles  = 4096
)

// endpoint is the API's socket. It has no name in the file system any more.
type endpoint struct {
	listener *os.File // for the process
	mu       sync.RWMutex
	inode    *os.File // to connect to
}

// newEndpoint makes the socket in the machine's directory and removes its name: nothing stays behind, and nobody but who
// holds the file can connect.
func newEndpoint(h *hub) (_ *endpoint, err error) {
	path := h.path(apiName)
	if err := unix.Unlink(path); err != nil && !errors.Is(err, unix.ENOENT) {
		return nil, fmt.Errorf("remove %s: %w", apiName, err)
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	e := &endpoint{listener: os.NewFile(uintptr(fd), apiName)}
	defer func() {
		if err != nil {
			e.close()
		}
	}()
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: path}); err != nil {
		return nil, os.NewSyscallError("bind", err)
	}
	inode, err := unix.Open(path, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err == nil {
		e.inode = os.NewFile(uintptr(inode), apiName)
	}
	if err = errors.Join(err, unix.Unlink(path), unix.Listen(fd, apiBacklog)); err != nil {
		return nil, fmt.Errorf("make API socket: %w", err)
	}
	return e, nil
}

// dial connects to the API. It does so as soon as the socket is there; the process accepts later.
func (e *endpoint) dial(ctx context.Context) (*net.UnixConn, error) {
	e.mu.RLock()
	defer e.mu.RUnlock()
	if e.inode == nil {
		return nil, vmm.ErrClosed
	}
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", "/proc/self/fd/"+strconv.Itoa(int(e.inode.Fd())))
	if err != nil {
		return nil, err
	}
	return c.(*net.UnixConn), nil
}

// launched closes what is the process's alone from now on, so that its end is the end of connections.
func (e *endpoint) launched() { _ = e.listener.Close() }

func (e *endpoint) close() {
	_ = e.listener.Close()
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.inode != nil {
		_ = e.inode.Close()
		e.inode = nil
	}
}

// start launches the process and waits until its API serves. readOnly and writable are paths that it needs to see.
func (d *Driver) start(ctx context.Context, s vmm.Spec, readOnly, writable []string) (*machine, error) {
	h, err := newHub(s.Dir)
	if err != nil {
		return nil, fmt.Errorf("open directory of machine %s: %w", s.ID, err)
	}
	e, err := newEndpoint(h)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("machine %s: %w", s.ID, err), h.close())
	}
	events, eventsEnd, err := os.Pipe()
	if err != nil {
		e.close()
		return nil, errors.Join(fmt.Errorf("pipe for events of machine %s: %w", s.ID, err), h.close())
	}
	m := &machine{
		Machine: hypervisor.New("Cloud Hypervisor", s),
		driver:  d, hub: h, endpoint: e, api: newClient(e.dial), told: make(chan struct{}),
	}
	c := vmm.Command{
		Args: []string{
			d.program.Path, "--api-socket", "fd=3", "--event-monitor", "fd=4", "--seccomp", "true",
		},
		Files:    []*os.File{e.listener, eventsEnd},
		ReadOnly: slices.Concat([]string{d.program.Path}, readOnly),
		Writable: slices.Concat([]string{s.Dir}, writable),
		// It makes room for so many at its start, lest the table grow while a machine is restored.
		OpenFiles: openFiles,
	}
	if d.kvm {
		c.Devices = append(c.Devices, "/dev/kvm")
	}
	if s.NIC != nil && s.NIC.File == nil {
		c.Devices = append(c.Devices, tunDevice)
	}
	err = m.Launch(ctx, c)
	e.launched()
	_ = eventsEnd.Close()
	if err != nil {
		_ = events.Close()
		e.close()
		return nil, errors.Join(err, h.close())
	}
	go m.follow(events)
	go m.watch(events)
	if err := m.ready(ctx); err != nil {
		return nil, m.abort(fmt.Errorf("start Cloud Hypervisor for machine %s: %w", s.ID, err))
	}
	return m, nil
}

// ready waits until the API answers. The end of the process ends the wait, since it closes the socket.
func (m *machine) ready(ctx context.Context) error {
	got, err := m.api.ping(ctx)
	if err != nil {
		return err
	}
	if text := strings.TrimPrefix(got.Version, "v"); text != m.driver.program.Version {
		return fmt.Errorf("the process is version %.40q, the program was %q", text, m.driver.program.Version)
	}
	return nil
}

// follow reads the events until the process has ended.
func (m *machine) follow(events *os.File) {
	err := readEvents(events, m.onEvent)
	close(m.told)
	if err != nil {
		m.Ended(hypervisor.End{Reason: fmt.Sprintf("its events cannot be followed: %v", err), Err: vmm.ErrVMM})
		m.Kill()
		return
	}
	timeout := time.NewTimer(lastEvents)
	defer timeout.Stop()
	select {
	case <-m.Exited():
	case <-timeout.C: // a reset would go unnoticed
		m.Ended(hypervisor.End{Reason: "it closed its event stream", Err: vmm.ErrVMM})
		m.Kill()
	}
}

// watch sees the process end, for whatever reason, and cleans up.
func (m *machine) watch(events *os.File) {
	<-m.Exited()
	timeout := time.NewTimer(lastEvents)
	defer timeout.Stop()
	select {
	case <-m.told: // with the process the other end was closed; what it said last is read
	case <-timeout.C:
	}
	_ = events.Close()
	<-m.told
	m.api.close()
	m.endpoint.close()
	m.Finish(m.explain, m.hub.close())
}

// explain classes the end of the process.
func (m *machine) explain(told *hypervisor.End, exit error) error {
	if told != nil && told.Err != nil {
		return fmt.Errorf("machine %s: %w (%s)", m.ID(), told.Err, told.Reason)
	}
	// After a failure inside, it shuts the machine down as for a guest that asks for it, and exits with 0. Only the log
	// tells.
	if exit == nil && told != nil && !failed(m.Words()) {
		return nil
	}
	return m.Failure(exit)
}

// failed tells whether a log tells of a failure.
func failed(log string) bool {
	return strings.Contains(log, "ERROR:") || strings.Contains(log, "panicked at")
}

// onEvent keeps what matters: how the guest ends.
func (m *machine) onEvent(e event) {
	switch e.String() {
	case "guest panic":
		m.Ended(hypervisor.End{Reason: e.String(), Err: vmm.ErrPanicked})
	case "vm rebooting": // it would be booted again
		m.Ended(hypervisor.End{Reason: e.String(), Err: vmm.ErrRebooted})
	case "vm shutdown":
		m.Ended(hypervisor.End{Reason: e.String(), Err: nil})
		return // it ends by itself
	default:
		return
	}
	m.Kill()
}

// abort destroys a machine that did not come up and explains why, with the process's own words when it ended by itself.
func (m *machine) abort(err error) error {
	var refused *APIError
	if !errors.As(err, &refused) && !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded) {
		select { // a process that ends takes its API with it: let its end be the explanation
		case <-m.Done():
			if end := m.Err(); end != nil {
				err = fmt.Errorf("%w: %w", err, end)
			}
		case <-time.After(lastEvents):
		}
	}
	if cerr := m.Close(); cerr != nil {
		err = errors.Join(err, cerr)
	}
	return err
}
