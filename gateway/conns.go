package gateway

import (
	"crypto/tls"
	"errors"
	"io"
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
	limit        int           // connections open at once
	refusal      func() []byte // what a connection beyond the limit is told; nil: nothing

	mu   sync.Mutex
	open map[*conn]struct{}

	refusing chan struct{} // a slot for each connection that is being told
	told     sync.WaitGroup
}

// refuseAtOnce bounds the connections beyond the limit that get an answer at the same time; others are closed.
const refuseAtOnce = 64

func newConns(ln net.Listener, writeTimeout time.Duration, limit int, refusal func() []byte) *conns {
	return &conns{Listener: ln, writeTimeout: writeTimeout, limit: limit, refusal: refusal, open: map[*conn]struct{}{},
		refusing: make(chan struct{}, refuseAtOnce)}
}

// acceptPause is how long a host that is out of descriptors or memory is left alone before the next try.
const acceptPause = 50 * time.Millisecond

// exhausted are the errors of accept(2) that pass by themselves. They must not end the server: its runs would end with it.
var exhausted = []error{
	syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.ECONNABORTED,
}

// Accept waits for the next connection. While the host is out of resources connections wait in the kernel; those beyond
// the limit are refused.
func (l *conns) Accept() (net.Conn, error) {
	for {
		nc, err := l.Listener.Accept()
		for err != nil && slices.ContainsFunc(exhausted, func(e error) bool { return errors.Is(err, e) }) {
			time.Sleep(acceptPause)
			nc, err = l.Listener.Accept()
		}
		if err != nil {
			return nil, err
		}
		c := &conn{Conn: nc, owner: l, remote: nc.RemoteAddr().String()}
		if l.add(c) {
			return c, nil
		}
		l.refuse(nc)
	}
}

// add takes the connection in, unless there are as many as there may be.
func (l *conns) add(c *conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.open) >= l.limit {
		return false
	}
	l.open[c] = struct{}{}
	return true
}

// refuseTime bounds how long a connection beyond the limit is kept to be told so.
const refuseTime = time.Second

// refuse answers before any request and closes the connection when the client has read it: to close at once would reset
// it, and the answer be lost.
func (l *conns) refuse(nc net.Conn) {
	var answer []byte
	if l.refusal != nil {
		answer = l.refusal()
	}
	select {
	case l.refusing <- struct{}{}:
	default:
		answer = nil
	}
	if answer == nil {
		_ = nc.Close() // nobody is there to be told
		return
	}
	l.told.Go(func() {
		defer func() { <-l.refusing }()
		defer nc.Close()
		_ = nc.SetDeadline(time.Now().Add(refuseTime)) // a connection that has no deadline fails at the next call
		if _, err := nc.Write(answer); err != nil {
			return
		}
		if tcp := tcpOf(nc); tcp != nil && tcp.CloseWrite() == nil {
			_, _ = io.Copy(io.Discard, io.LimitReader(nc, 64<<10)) // until the client closes, or the time is over
		}
	})
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
	owner  *conns
	remote string    // address of the other side
	timed  time.Time // when the deadline of writes was last set
	ended  bool      // the client sends no more
}

// remoteOf is the address of the other side of a connection.
func remoteOf(nc net.Conn) string {
	for {
		switch c := nc.(type) {
		case *conn:
			return c.remote
		case interface{ NetConn() net.Conn }: // TLS
			nc = c.NetConn()
		default:
			return nc.RemoteAddr().String()
		}
	}
}

// NetConn is the connection below.
func (c *conn) NetConn() net.Conn { return c.Conn }

// timeWrites gives a write the write timeout, or up to a tenth less: on a busy connection it need not be set before each.
func (c *conn) timeWrites() error {
	now := time.Now()
	if now.Sub(c.timed) < c.owner.writeTimeout/10 {
		return nil
	}
	c.timed = now
	return c.SetWriteDeadline(now.Add(c.owner.writeTimeout))
}

// writePiece is how much a client must take within the write timeout: a large answer may take longer as a whole.
const writePiece = 32 << 10

// Write sends p or fails when the client does not take a piece of it in time.
func (c *conn) Write(p []byte) (n int, err error) {
	for {
		piece := p[n:min(n+writePiece, len(p))]
		if err := c.timeWrites(); err != nil {
			return n, err
		}
		m, err := c.Conn.Write(piece)
		if n += m; err != nil || n == len(p) {
			return n, err
		}
	}
}

// Read notes the end of what the client sends: the HTTP server takes it for the end of a chunked body when it comes between two
// chunks.
func (c *conn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if errors.Is(err, io.EOF) {
		c.ended = true
	}
	return n, err
}

// tlsConns are the connections of a listener over TLS, of which each notes its end too.
type tlsConns struct{ net.Listener }

// Accept waits for the next connection.
func (l tlsConns) Accept() (net.Conn, error) {
	nc, err := l.Listener.Accept()
	if secure, ok := nc.(*tls.Conn); ok {
		return &tlsConn{Conn: secure}, err
	}
	return nc, err
}

type tlsConn struct {
	*tls.Conn
	ended bool // the client sends no more
}

// Read notes the end of what the client sends.
func (c *tlsConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if errors.Is(err, io.EOF) {
		c.ended = true
	}
	return n, err
}

// hungUp tells whether the connection's end was read. It may be asked only by the handler of its request.
func hungUp(nc net.Conn) bool {
	switch c := nc.(type) {
	case *tlsConn:
		return c.ended
	case *conn:
		return c.ended
	}
	return false
}

// Close ends the connection.
func (c *conn) Close() error {
	c.owner.mu.Lock()
	delete(c.owner.open, c)
	c.owner.mu.Unlock()
	return c.Conn.Close()
}
