package qemu

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/ephemeral-run/ephemeral/guestagent/proto/mux"
	"github.com/ephemeral-run/ephemeral/vmm"
)

// Pauses between tries to reach a guest that refuses or that ended the session.
const (
	firstRetry = 2 * time.Millisecond
	lastRetry  = 100 * time.Millisecond
)

// renewEvery bounds the rate at which a guest can make the host start over, by ending one session after another.
const renewEvery = 100 * time.Millisecond

// line is the host's end of a machine's serial line: it opens a session when one is needed, carries connections over it
// and lets go of it on disconnect.
type line struct {
	// renew puts a fresh connection in the place of one that was closed.
	renew func(context.Context) (net.Conn, error)
	life  context.Context // ends with close
	end   context.CancelFunc
	wg    sync.WaitGroup

	renewed time.Time // only the opening in progress uses it

	mu        sync.Mutex
	conn      net.Conn     // given, not yet used by a session
	session   *mux.Session // the latest; may have ended
	opening   *opening     // in progress, or nil
	listeners map[uint32]*listener
	closed    bool
}

// opening is one try to open a session. Its fields are valid when done is closed.
type opening struct {
	done    chan struct{}
	cancel  context.CancelFunc
	session *mux.Session
	err     error
}

func newLine(conn net.Conn, renew func(context.Context) (net.Conn, error)) *line {
	l := &line{renew: renew, conn: conn, listeners: make(map[uint32]*listener)}
	l.life, l.end = context.WithCancel(context.Background())
	return l
}

// dial connects to a port of the guest. It tries again, while the guest is not up, refuses, or starts over, until ctx ends.
func (l *line) dial(ctx context.Context, port uint32) (net.Conn, error) {
	wait := firstRetry
	for {
		c, err := l.tryDial(ctx, port)
		if err == nil || errors.Is(err, vmm.ErrClosed) {
			return c, err
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("dial guest port %d: %w (last: %w)", port, context.Cause(ctx), err)
		case <-l.life.Done():
			return nil, vmm.ErrClosed
		case <-time.After(wait):
			wait = min(2*wait, lastRetry)
		}
	}
}

func (l *line) tryDial(ctx context.Context, port uint32) (net.Conn, error) {
	session, err := l.open(ctx)
	if err != nil {
		return nil, err
	}
	return session.Dial(ctx, port)
}

// open returns the session, and opens one if there is none.
func (l *line) open(ctx context.Context) (*mux.Session, error) {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return nil, vmm.ErrClosed
	}
	if s := l.session; s != nil && alive(s) {
		l.mu.Unlock()
		return s, nil
	}
	o := l.startOpening()
	l.mu.Unlock()
	select {
	case <-o.done:
		return o.session, o.err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

func alive(s *mux.Session) bool {
	select {
	case <-s.Done():
		return false
	default:
		return true
	}
}

// startOpening returns the try in progress or starts one. It needs l.mu.
func (l *line) startOpening() *opening {
	if l.opening != nil {
		return l.opening
	}
	ctx, cancel := context.WithCancel(l.life)
	o := &opening{done: make(chan struct{}), cancel: cancel}
	conn, last := l.conn, l.session
	l.opening, l.conn, l.session = o, nil, nil
	l.wg.Add(1)
	go func() {
		defer l.wg.Done()
		defer cancel()
		if last != nil {
			_ = last.Close()
		}
		session, err := l.greet(ctx, conn)
		l.mu.Lock()
		l.opening = nil
		switch {
		case err == nil:
			l.session = session
			l.attachAll(session)
		case ctx.Err() == nil && len(l.listeners) > 0:
			l.startOpening()
		}
		l.mu.Unlock()
		o.session, o.err = session, err
		close(o.done)
	}()
	return o
}

// greet opens a session over conn, or over a new connection if conn is nil.
func (l *line) greet(ctx context.Context, conn net.Conn) (*mux.Session, error) {
	if conn == nil {
		select {
		case <-time.After(time.Until(l.renewed.Add(renewEvery))):
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
		l.renewed = time.Now()
		var err error
		if conn, err = l.renew(ctx); err != nil {
			return nil, fmt.Errorf("reconnect the serial line: %w", err)
		}
	}
	return mux.Host(ctx, conn)
}

// disconnect ends the session and the connection under it. The next dial or listen opens new ones.
func (l *line) disconnect() {
	l.mu.Lock()
	if o := l.opening; o != nil {
		o.cancel()
		l.mu.Unlock()
		<-o.done
		l.mu.Lock()
	}
	session, conn := l.session, l.conn
	l.session, l.conn = nil, nil
	l.mu.Unlock()
	if session != nil {
		_ = session.Close()
	}
	if conn != nil {
		_ = conn.Close()
	}
}

// connected tells whether the host's end is open.
func (l *line) connected() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.opening != nil || l.session != nil || l.conn != nil
}

// close ends everything and waits for it.
func (l *line) close() {
	l.mu.Lock()
	l.closed = true
	l.mu.Unlock()
	l.end()
	l.disconnect()
	l.mu.Lock()
	open := l.listeners
	l.listeners = nil
	l.mu.Unlock()
	for _, ln := range open {
		ln.shut()
	}
	l.wg.Wait()
}

// listen takes the connections that the guest opens to port, over this session and those that follow.
func (l *line) listen(port uint32) (net.Listener, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, vmm.ErrClosed
	}
	if _, taken := l.listeners[port]; taken {
		return nil, fmt.Errorf("listen on port %d: %w", port, mux.ErrPortInUse)
	}
	ln := &listener{line: l, port: port, conns: make(chan net.Conn), done: make(chan struct{})}
	l.listeners[port] = ln
	if l.session != nil && alive(l.session) {
		l.attach(l.session, ln)
	} else {
		l.startOpening()
	}
	return ln, nil
}

// attachAll connects the listeners to a new session, and sees to a next one when it ends. It needs l.mu.
func (l *line) attachAll(s *mux.Session) {
	for _, ln := range l.listeners {
		l.attach(s, ln)
	}
	l.wg.Add(1)
	go func() {
		defer l.wg.Done()
		<-s.Done()
		l.mu.Lock()
		defer l.mu.Unlock()
		if !l.closed && l.session == s && len(l.listeners) > 0 { // not by disconnect
			l.startOpening()
		}
	}()
}

// attach passes on what the session accepts for a listener, until either ends. It needs l.mu.
func (l *line) attach(s *mux.Session, ln *listener) {
	from, err := s.Listen(ln.port)
	if err != nil {
		return // the session has ended; the next one is attached again
	}
	ln.from = from
	l.wg.Add(1)
	go func() {
		defer l.wg.Done()
		for {
			c, err := from.Accept()
			if err != nil {
				return
			}
			select {
			case ln.conns <- c:
			case <-ln.done:
				_ = c.Close()
			case <-s.Done():
				_ = c.Close()
			}
		}
	}()
}

// listener is a port of the host as long as the machine lives, whatever becomes of sessions.
type listener struct {
	line  *line
	port  uint32
	from  net.Listener // of the latest session; under line.mu
	conns chan net.Conn
	once  sync.Once
	done  chan struct{}
}

// Accept waits for the next connection; net.ErrClosed when listener or machine are closed.
func (ln *listener) Accept() (net.Conn, error) {
	select {
	case <-ln.done:
	default:
		select {
		case c := <-ln.conns:
			return c, nil
		case <-ln.done:
		}
	}
	return nil, fmt.Errorf("accept on port %d: %w", ln.port, net.ErrClosed)
}

func (ln *listener) shut() { ln.once.Do(func() { close(ln.done) }) }

// Close refuses further connections. It is idempotent.
func (ln *listener) Close() error {
	ln.line.mu.Lock()
	if ln.line.listeners[ln.port] == ln {
		delete(ln.line.listeners, ln.port)
	}
	if ln.from != nil {
		_ = ln.from.Close()
	}
	ln.line.mu.Unlock()
	ln.shut()
	return nil
}

// Addr is the port.
func (ln *listener) Addr() net.Addr { return portAddr(ln.port) }

type portAddr uint32

func (portAddr) Network() string  { return "guest" }
func (a portAddr) String() string { return fmt.Sprintf("port %d", uint32(a)) }
