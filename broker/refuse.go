package broker

import (
	"bytes"
	"context"
	"math/bits"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ephemeral-run/ephemeral/run"
)

// suspicious are the codes of refusals that operators should see: no honest program gets them.
var suspicious = map[string]bool{
	codeWrongRun: true, codeReplayed: true, codeTooLarge: true, codeTooSlow: true, codeCallLimit: true, codeTooMany: true, codeRate: true,
	codeAddress: true, codePath: true, codeNotHere: true, codeSQLNotAllowed: true, codeModelNotAllowed: true, codeWithheld: true, codeRedirect: true,
	codeMalformed: true, codeTooManyConns: true,
}

// refuse counts a refusal, and makes an event of the 1st, 2nd, 4th, 8th ... with the same code.
func (h *Handler) refuse(code string) {
	h.mu.Lock()
	h.refused[code]++
	n := h.refused[code]
	h.mu.Unlock()
	if bits.OnesCount64(uint64(n)) != 1 || h.s.Emit == nil {
		return
	}
	h.s.Emit(run.NewEvent{Type: run.EventRefused, At: time.Now(), Data: run.RefusedData{Code: code, Count: n}})
}

// watchedListener keeps a machine within maxConnections, and notices connections that carry no HTTP.
type watchedListener struct {
	net.Listener
	h    *Handler
	open atomic.Int64
}

func (h *Handler) watch(ln net.Listener) net.Listener { return &watchedListener{Listener: ln, h: h} }

var crowdedAnswer = []byte("HTTP/1.1 429 Too Many Requests\r\nContent-Type: application/json\r\nEphemeral-Error: " + codeTooManyConns +
	"\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")

// Accept returns the next connection that there is room for. Others are told so and closed.
func (l *watchedListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if l.open.Add(1) <= maxConnections {
			return &watchedConn{Conn: conn, l: l}, nil
		}
		l.open.Add(-1)
		l.h.refuse(codeTooManyConns)
		_ = conn.SetWriteDeadline(time.Now().Add(50 * time.Millisecond))
		_, _ = conn.Write(crowdedAnswer) // best effort: nobody has to read it
		_ = conn.Close()
	}
}

// watchedConn notices when what came over it was no request.
type watchedConn struct {
	net.Conn
	l     *watchedListener
	bytes atomic.Bool // something came
	heard atomic.Bool // a request was understood
	odd   atomic.Bool // that there was none was said
	once  sync.Once
}

type connKey struct{}

// heard marks the connection of a request's context as one that speaks HTTP.
func heard(ctx context.Context) {
	if c, ok := ctx.Value(connKey{}).(*watchedConn); ok {
		c.heard.Store(true)
	}
}

// serversOwn is what net/http's server answers when it does not understand a request, and only then.
var serversOwn = []byte("\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\r\n")

func (c *watchedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n > 0 {
		c.bytes.Store(true)
	}
	return n, err
}

func (c *watchedConn) Write(p []byte) (int, error) {
	if len(p) < 512 && bytes.HasPrefix(p, []byte("HTTP/1.1 ")) && bytes.Contains(p, serversOwn) && c.odd.CompareAndSwap(false, true) {
		c.l.h.refuse(codeMalformed)
	}
	return c.Conn.Write(p)
}

func (c *watchedConn) Close() error {
	c.once.Do(func() {
		c.l.open.Add(-1)
		if c.bytes.Load() && !c.heard.Load() && c.odd.CompareAndSwap(false, true) {
			c.l.h.refuse(codeMalformed)
		}
	})
	return c.Conn.Close()
}
