package gateway

import (
	"errors"
	"net"
	"slices"
	"sync"
	"syscall"
	"time"
)

// conns is a listener that knows its open connections and gives every piece written a deadline. The HTTP server has one
// deadline for a whole answer, which would cut every long event stream; this one cuts only a client that takes nothing.
type conns struct {
	net.Listener
	writeTimeout time.Duration

	mu   sync.Mutex
	open map[*conn]struct{}
}

func newConns(ln net.Listener, writeTimeout time.Duration) *conns {
	return &conns{Listener: ln, writeTimeout: writeTimeout, open: map[*conn]struct{}{}}
}

// acceptPause is how long a host that is out of descriptors or memory is left alone before the next try.
const acceptPause = 50 * time.Millisecond

// exhausted are the errors of accept(2) that pass by themselves. They must not end the server: its runs would end with it.
var exhausted = []error{
	syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.ECONNABORTED,
}

// Accept waits for the next connection. While the host is out of resources connections wait in the kernel.
func (l *conns) Accept() (net.Conn, error) {
	nc, err := l.Listener.Accept()
	for err != nil && slices.ContainsFunc(exhausted, func(e error) bool { return errors.Is(err, e) }) {
		time.Sleep(acceptPause)
		nc, err = l.Listener.Accept()
	}
	if err != nil {
		return nil, err
	}
	c := &conn{Conn: nc, owner: l}
	l.mu.Lock()
	l.open[c] = struct{}{}
	l.mu.Unlock()
	return c, nil
}

// closeAll ends every connection that is still open.
func (l *conns) closeAll() {
	l.mu.Lock()
	left := make([]*conn, 0, len(l.open))
	for c := range l.open {
		left = append(left, c)
	}
	l.mu.Unlock()
	for _, c := range left {
		_ = c.Close() // nothing is left to do for a connection that does not close
	}
}

type conn struct {
	net.Conn
	owner *conns
}

// writePiece is how much a client must take within the write timeout: a large answer may take longer as a whole.
const writePiece = 32 << 10

// Write sends p or fails when the client does not take a piece of it in time.
func (c *conn) Write(p []byte) (n int, err error) {
	for {
		piece := p[n:min(n+writePiece, len(p))]
		if err := c.SetWriteDeadline(time.Now().Add(c.owner.writeTimeout)); err != nil {
			return n, err
		}
		m, err := c.Conn.Write(piece)
		if n += m; err != nil || n == len(p) {
			return n, err
		}
	}
}

// Close ends the connection.
func (c *conn) Close() error {
	c.owner.mu.Lock()
	delete(c.owner.open, c)
	c.owner.mu.Unlock()
	return c.Conn.Close()
}
