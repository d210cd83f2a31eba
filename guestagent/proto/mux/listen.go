package mux

import (
	"fmt"
	"net"
	"sync"
)

// Listen takes the connections the other side opens to port. Closing the session closes the listener.
func (s *Session) Listen(port uint32) (net.Listener, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, fmt.Errorf("listen on port %d: %w", port, ErrClosed)
	}
	l := s.listeners[port]
	if l != nil && l.taken {
		return nil, fmt.Errorf("listen on port %d: %w", port, ErrPortInUse)
	}
	if l == nil {
		l = s.newListener(port)
		s.listeners[port] = l
	}
	l.taken = true
	return l, nil
}

func (s *Session) newListener(port uint32) *listener {
	return &listener{
		session: s,
		port:    port,
		slots:   make(chan struct{}, listenBacklog),
		queue:   make(chan *conn, listenBacklog),
		done:    make(chan struct{}),
	}
}

type listener struct {
	session *Session
	port    uint32
	taken   bool          // by a call of Listen; guarded by the session's lock
	slots   chan struct{} // one token a connection that is answered or waits in queue
	queue   chan *conn

	mu     sync.Mutex
	closed bool
	done   chan struct{}
}

// reserve takes a place in the queue, if there is one, before the peer is told that it was accepted.
func (l *listener) reserve() bool {
	select {
	case <-l.done:
		return false
	case l.slots <- struct{}{}:
		return true
	default:
		return false
	}
}

func (l *listener) unreserve() { <-l.slots }

func (l *listener) deliver(c *conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		l.unreserve()
		_ = c.Close()
		return
	}
	l.queue <- c // cannot block: the place was reserved
}

// Accept waits for the next connection; net.ErrClosed after Close.
func (l *listener) Accept() (net.Conn, error) {
	select {
	case <-l.done:
	default:
		select {
		case c := <-l.queue:
			l.unreserve()
			return c, nil
		case <-l.done:
		}
	}
	return nil, fmt.Errorf("accept on port %d: %w", l.port, net.ErrClosed)
}

// Close refuses further connections and ends those that nobody accepted. It is idempotent.
func (l *listener) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil
	}
	l.closed = true
	close(l.done)
	l.session.mu.Lock()
	delete(l.session.listeners, l.port)
	l.session.mu.Unlock()
	for {
		select {
		case c := <-l.queue:
			l.unreserve()
			_ = c.Close()
		default:
			return nil
		}
	}
}

// Addr is the port.
func (l *listener) Addr() net.Addr { return addr(l.port) }

type addr uint32

func (addr) Network() string  { return "mux" }
func (a addr) String() string { return fmt.Sprintf("port %d", uint32(a)) }
