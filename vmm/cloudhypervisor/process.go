package cloudhypervisor

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ephemeral-run/ephemeral/vmm"
)

const (
	// maxStderr is how much of the log a machine keeps, in bytes.
	maxStderr = 8192
	// lastEvents is how long the events of an ended process may take to be read, and how long one lives that has closed
	// its event stream.
	lastEvents = 2 * time.Second
	// killTimeout bounds the end of a killed process. Beyond it, it hangs in the kernel.
	killTimeout = 30 * time.Second
	// apiBacklog is how many connections wait for the API, of which one is needed.
	apiBacklog = 4
	apiName    = "api.sock"
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
		driver: d, spec: s, hub: h, endpoint: e, api: newClient(e.dial),
		stderr: &tail{limit: maxStderr}, done: make(chan struct{}), told: make(chan struct{}), turn: make(chan struct{}, 1),
	}
	c := vmm.Command{
		Args: []string{
			d.program.Path, "--api-socket", "fd=3", "--event-monitor", "fd=4", "--seccomp", "true",
		},
		Files:    []*os.File{e.listener, eventsEnd},
		ReadOnly: slices.Concat([]string{d.program.Path}, readOnly),
		Writable: slices.Concat([]string{s.Dir}, writable),
		Stderr:   m.stderr,
	}
	if d.kvm {
		c.Devices = append(c.Devices, "/dev/kvm")
	}
	if s.NIC != nil && s.NIC.File == nil {
		c.Devices = append(c.Devices, tunDevice)
	}
	m.process, err = s.Launcher.Launch(ctx, c)
	e.launched()
	_ = eventsEnd.Close()
	if err != nil {
		_ = events.Close()
		e.close()
		return nil, errors.Join(fmt.Errorf("launch Cloud Hypervisor for machine %s: %w", s.ID, err), h.close())
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
		m.ended(end{fmt.Sprintf("its events cannot be followed: %v", err), vmm.ErrVMM})
		_ = m.process.Kill()
		return
	}
	timeout := time.NewTimer(lastEvents)
	defer timeout.Stop()
	select {
	case <-m.process.Done():
	case <-timeout.C: // a reset would go unnoticed
		m.ended(end{"it closed its event stream", vmm.ErrVMM})
		_ = m.process.Kill()
	}
}

// watch sees the process end, for whatever reason, and cleans up.
func (m *machine) watch(events *os.File) {
	<-m.process.Done()
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
	m.cleanErr = m.hub.close()
	m.err = m.explain()
	close(m.done)
}

// explain classes the end of the process.
func (m *machine) explain() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	words := strings.TrimSpace(m.stderr.String())
	if m.closing {
		return nil
	}
	if m.end != nil && m.end.err != nil {
		return fmt.Errorf("machine %s: %w (%s)", m.spec.ID, m.end.err, m.end.reason)
	}
	failure := m.process.Err()
	// After a failure inside, it shuts the machine down as for a guest that asks for it, and exits with 0. Only the log
	// tells.
	if failure == nil && m.end != nil && !failed(words) {
		return nil
	}
	err := fmt.Errorf("machine %s: %w", m.spec.ID, vmm.ErrVMM)
	if failure != nil {
		err = fmt.Errorf("%w: %w", err, failure)
	}
	if words != "" {
		err = fmt.Errorf("%w: %s", err, words)
	}
	return err
}

// failed tells whether a log tells of a failure.
func failed(log string) bool {
	return strings.Contains(log, "ERROR:") || strings.Contains(log, "panicked at")
}

// end is how a machine ended, as told by events.
type end struct {
	reason string
	err    error // nil for a shutdown
}

// ended keeps the first reason.
func (m *machine) ended(e end) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.end == nil {
		m.end = &e
	}
}

// onEvent keeps what matters: how the guest ends.
func (m *machine) onEvent(e event) {
	switch e.String() {
	case "guest panic":
		m.ended(end{e.String(), vmm.ErrPanicked})
	case "vm rebooting": // it would be booted again
		m.ended(end{e.String(), vmm.ErrRebooted})
	case "vm shutdown":
		m.ended(end{e.String(), nil})
		return // it ends by itself
	default:
		return
	}
	_ = m.process.Kill()
}

// abort destroys a machine that did not come up and explains why, with the process's own words when it ended by itself.
func (m *machine) abort(err error) error {
	var refused *APIError
	if !errors.As(err, &refused) && !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded) {
		select { // a process that ends takes its API with it: let its end be the explanation
		case <-m.done:
			if m.err != nil {
				err = fmt.Errorf("%w: %w", err, m.err)
			}
		case <-time.After(lastEvents):
		}
	}
	if cerr := m.Close(); cerr != nil {
		err = errors.Join(err, cerr)
	}
	return err
}

// prepareRAM makes the memory file, owned like the machine's directory, if it is not there.
func prepareRAM(s vmm.Spec, owner int) error {
	size := int64(s.Shape.MemoryMiB) << 20
	f, err := os.OpenFile(s.RAM, os.O_RDWR|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW, 0o600)
	if errors.Is(err, os.ErrExist) {
		info, err := os.Stat(s.RAM)
		if err != nil {
			return err
		}
		if info.Size() != size {
			return fmt.Errorf("memory file %s has %d bytes, not %d", s.RAM, info.Size(), size)
		}
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	if err := f.Truncate(size); err != nil {
		return err
	}
	return f.Chown(owner, -1)
}

// ownerOf is the user that a machine's process runs under.
func ownerOf(dir string) (int, error) {
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return 0, fmt.Errorf("stat %s: %w", filepath.Base(dir), err)
	}
	return int(st.Uid), nil
}
