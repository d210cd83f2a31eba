package cloudhypervisor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ephemeral-run/ephemeral/vmm"
)

// Times of a dial. A guest whose driver is not up, or that is paused, does not answer at all.
const (
	firstAnswer = 500 * time.Millisecond // how long the first attempt waits
	lastAnswer  = 2 * time.Second        // and the later ones at most
	firstPause  = time.Millisecond       // between two attempts, after a refusal
	lastPause   = 25 * time.Millisecond
)

// maxAnswer is the longest line that answers a CONNECT, in bytes: "OK", a space, a port, the line's end.
const maxAnswer = 32

// errRefused: the guest has nobody listening on the port.
var errRefused = errors.New("the guest refuses the connection")

// hub is the host's side of a machine's vsock. All that is open is its own and ends with it.
type hub struct {
	dir   *os.File // the machine's directory
	owner int      // user and group that the process runs under, who connects to listeners

	socketMu sync.RWMutex // held for reading while socket's number is in use
	socket   *os.File     // the process's socket, once it is there

	mu        sync.Mutex
	conns     map[*conn]struct{}
	listeners map[uint32]*listener
	used      bool // connected since the last disconnect
	done      chan struct{}
	closed    bool
}

// newHub opens a machine's directory and removes what lies in the sockets' way.
func newHub(dir string) (*hub, error) {
	f, err := os.OpenFile(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("stat %s: %w", dir, err)
	}
	h := &hub{
		dir: f, owner: int(st.Uid), conns: map[*conn]struct{}{}, listeners: map[uint32]*listener{}, done: make(chan struct{}),
	}
	if err := h.removeSockets(); err != nil {
		_ = f.Close()
		return nil, err
	}
	return h, nil
}

// removeSockets removes the sockets' names.
func (h *hub) removeSockets() error {
	names, err := filepath.Glob(h.path(vsockName + "_*"))
	if err != nil {
		return err
	}
	var errs []error
	for _, path := range append(names, h.path(vsockName)) {
		if err := unix.Unlink(path); err != nil && !errors.Is(err, unix.ENOENT) {
			errs = append(errs, fmt.Errorf("remove %s: %w", filepath.Base(path), err))
		}
	}
	return errors.Join(errs...)
}

// path is a short name for a file in the machine's directory, valid while that is open.
func (h *hub) path(name string) string {
	return "/proc/self/fd/" + strconv.Itoa(int(h.dir.Fd())) + "/" + name
}

// open takes hold of the socket that the process has made. The file is held, not the name: the process may put
// something else there, and whoever connects by name would follow a link out of the directory.
func (h *hub) open() error {
	fd, err := unix.Openat(int(h.dir.Fd()), vsockName, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open vsock socket: %w", err)
	}
	f := os.NewFile(uintptr(fd), vsockName)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFSOCK {
		_ = f.Close()
		return fmt.Errorf("open vsock socket: it is no socket (%v)", err)
	}
	h.socketMu.Lock()
	defer h.socketMu.Unlock()
	select {
	case <-h.done:
		_ = f.Close()
		return vmm.ErrClosed
	default:
	}
	h.socket = f
	return nil
}

// dial connects to a port of the guest, as often as it takes.
func (h *hub) dial(ctx context.Context, port uint32) (net.Conn, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stop := make(chan struct{})
	defer close(stop)
	go func() {
		select {
		case <-h.done:
			cancel(vmm.ErrClosed)
		case <-stop:
		}
	}()
	patience, pause := firstAnswer, firstPause
	for {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		c, err := h.attempt(ctx, port, patience)
		if err == nil {
			return c, nil
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			patience = min(2*patience, lastAnswer)
		} else if !errors.Is(err, errRefused) {
			if ctx.Err() != nil {
				err = context.Cause(ctx)
			}
			return nil, err
		}
		select {
		case <-time.After(pause):
			pause = min(2*pause, lastPause)
		case <-ctx.Done():
			return nil, fmt.Errorf("%w (last attempt: %w)", context.Cause(ctx), err)
		}
	}
}

// attempt makes one connection to a port of the guest.
func (h *hub) attempt(ctx context.Context, port uint32, patience time.Duration) (*conn, error) {
	raw, err := h.connect(ctx)
	if err != nil {
		return nil, err
	}
	c, err := h.track(raw)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = raw.SetDeadline(time.Unix(1, 0)) })
	err = raw.SetDeadline(time.Now().Add(patience))
	if ctx.Err() != nil { // the deadline just set may have replaced an earlier end
		err = context.Cause(ctx)
	}
	if err == nil {
		err = handshake(raw, port)
	}
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err == nil {
		err = raw.SetDeadline(time.Time{})
	}
	if err != nil {
		_ = c.Close()
		return nil, err
	}
	return c, nil
}

// connect reaches the process's socket.
func (h *hub) connect(ctx context.Context) (net.Conn, error) {
	h.socketMu.RLock()
	defer h.socketMu.RUnlock()
	if h.socket == nil {
		return nil, vmm.ErrClosed
	}
	var d net.Dialer
	raw, err := d.DialContext(ctx, "unix", "/proc/self/fd/"+strconv.Itoa(int(h.socket.Fd())))
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.ECONNREFUSED) {
		return nil, errRefused // its backlog is full, or the process has ended, which will be noticed
	}
	return raw, err
}

// handshake asks for a port of the guest. errRefused: nobody listens there. What the guest sends at once stays unread.
func handshake(rw io.ReadWriter, port uint32) error {
	if _, err := fmt.Fprintf(rw, "CONNECT %d\n", port); err != nil {
		return refusal(err)
	}
	line := make([]byte, 0, maxAnswer)
	for {
		var one [1]byte
		if _, err := io.ReadFull(rw, one[:]); err != nil {
			return refusal(err)
		}
		if one[0] == '\n' {
			break
		}
		if len(line) == maxAnswer {
			return fmt.Errorf("answer to CONNECT: more than %d bytes, %.40q", maxAnswer, line)
		}
		line = append(line, one[0])
	}
	number, ok := strings.CutPrefix(string(line), "OK ")
	if _, err := strconv.ParseUint(number, 10, 32); !ok || err != nil {
		return fmt.Errorf("answer to CONNECT: %.40q", line)
	}
	return nil
}

// refusal classes the end of a connection during the handshake.
func refusal(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) || errors.Is(err, unix.EPIPE) || errors.Is(err, net.ErrClosed) {
		return errRefused
	}
	return err
}

// listen accepts connections of the guest to a port of the host.
func (h *hub) listen(port uint32) (net.Listener, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil, vmm.ErrClosed
	}
	if h.listeners[port] != nil {
		return nil, fmt.Errorf("port %d: %w", port, unix.EADDRINUSE)
	}
	name := fmt.Sprintf("%s_%d", vsockName, port)
	inner, err := net.ListenUnix("unix", &net.UnixAddr{Name: h.path(name), Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("port %d: %w", port, err)
	}
	// To connect takes the right to write.
	if err := unix.Fchownat(int(h.dir.Fd()), name, h.owner, -1, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		_ = inner.Close()
		return nil, fmt.Errorf("port %d: give socket to user %d: %w", port, h.owner, err)
	}
	l := &listener{UnixListener: inner, hub: h, port: port}
	h.listeners[port] = l
	return l, nil
}

// disconnect ends all connections; listeners stay.
func (h *hub) disconnect() error {
	h.mu.Lock()
	if h.closed {
		h.mu.Unlock()
		return vmm.ErrClosed
	}
	all := h.take()
	h.used = false
	h.mu.Unlock()
	closeAll(all)
	return nil
}

// connected tells whether there was a connection since the last disconnect.
func (h *hub) connected() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.used
}

// close ends everything. The sockets' names are removed.
func (h *hub) close() error {
	h.mu.Lock()
	if h.closed {
		h.mu.Unlock()
		return nil
	}
	h.closed = true
	close(h.done)
	all := h.take()
	listeners := make([]*listener, 0, len(h.listeners))
	for _, l := range h.listeners {
		listeners = append(listeners, l)
	}
	h.mu.Unlock()
	closeAll(all)
	for _, l := range listeners {
		_ = l.Close()
	}
	h.socketMu.Lock()
	if h.socket != nil {
		_ = h.socket.Close()
		h.socket = nil
	}
	h.socketMu.Unlock()
	return errors.Join(h.removeSockets(), h.dir.Close())
}

// take needs h.mu.
func (h *hub) take() []*conn {
	all := make([]*conn, 0, len(h.conns))
	for c := range h.conns {
		all = append(all, c)
	}
	return all
}

func closeAll(all []*conn) {
	for _, c := range all {
		_ = c.Close()
	}
}

// track makes a connection one of the machine's.
func (h *hub) track(raw net.Conn) (*conn, error) {
	c := &conn{Conn: raw, hub: h}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		_ = raw.Close()
		return nil, vmm.ErrClosed
	}
	h.conns[c] = struct{}{}
	h.used = true
	return c, nil
}

// conn is a connection with the guest. It cannot be closed for writing alone: up to v52 that ends all of it.
type conn struct {
	net.Conn
	hub *hub
}

// Close ends the connection.
func (c *conn) Close() error {
	c.hub.mu.Lock()
	delete(c.hub.conns, c)
	c.hub.mu.Unlock()
	return c.Conn.Close()
}

// listener is one port of the host.
type listener struct {
	*net.UnixListener
	hub  *hub
	port uint32
	once sync.Once
	err  error
}

// Accept returns the guest's next connection.
func (l *listener) Accept() (net.Conn, error) {
	raw, err := l.UnixListener.Accept()
	if err != nil {
		return nil, err
	}
	return l.hub.track(raw)
}

// Close frees the port.
func (l *listener) Close() error {
	l.once.Do(func() {
		l.err = l.UnixListener.Close() // removes the name, before the port may be taken again
		l.hub.mu.Lock()
		delete(l.hub.listeners, l.port)
		l.hub.mu.Unlock()
	})
	return l.err
}
