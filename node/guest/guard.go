package guest

import (
	"encoding/binary"
	"fmt"
	"math"
	"net"
	"sync"
)

// The header of a ttrpc message: length, stream, type, flags; PROTOCOL.md of containerd/ttrpc.
const (
	headerSize   = 10
	typeResponse = 2
	typeData     = 3
)

// unlimited is the allowance of calls whose messages are bounded elsewhere.
const unlimited = math.MaxInt64

// guard checks the headers of the agent's messages before the ttrpc client sees them. It refuses oversized messages
// before memory is set aside for them, and those that no call waits for: the client would log each.
type guard struct {
	net.Conn

	mu        sync.Mutex
	stream    uint32 // of the call in progress
	allowance int64  // messages it may still get
	broken    error

	header []byte // of the message being read, until it is whole
	body   uint32 // bytes of it still to come
}

func newGuard(c net.Conn) *guard { return &guard{Conn: c, header: make([]byte, 0, headerSize)} }

// unary announces a call with one answer. Calls are made one after the other; the client counts their streams 1, 3, 5 ...
func (g *guard) unary() { g.streaming(1) }

// streaming announces a call that may get as many messages.
func (g *guard) streaming(messages int64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.stream == 0 {
		g.stream = 1
	} else {
		g.stream += 2
	}
	g.allowance = messages
}

// allow lets the call in progress get more messages.
func (g *guard) allow(messages int64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.allowance != unlimited {
		g.allowance += messages
	}
}

func (g *guard) violation() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.broken
}

// Read passes on checked bytes. After a violation it fails for good.
func (g *guard) Read(p []byte) (int, error) {
	if err := g.violation(); err != nil {
		return 0, err
	}
	n, err := g.Conn.Read(p)
	if bad := g.check(p[:n]); bad != nil {
		return 0, bad
	}
	return n, err
}

func (g *guard) check(p []byte) error {
	for len(p) > 0 {
		if g.body > 0 {
			n := min(int(g.body), len(p))
			g.body -= uint32(n)
			p = p[n:]
			continue
		}
		n := min(headerSize-len(g.header), len(p))
		g.header = append(g.header, p[:n]...)
		p = p[n:]
		if len(g.header) < headerSize {
			return nil
		}
		if err := g.admit(); err != nil {
			return err
		}
		g.body = binary.BigEndian.Uint32(g.header)
		g.header = g.header[:0]
	}
	return nil
}

// admit decides on the message whose header was read.
func (g *guard) admit() error {
	length, stream, kind := binary.BigEndian.Uint32(g.header), binary.BigEndian.Uint32(g.header[4:]), g.header[8]
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case length > maxMessage:
		g.broken = fmt.Errorf("%w: message of %d bytes, limit %d", errRules, length, maxMessage)
	case kind != typeResponse && kind != typeData:
		g.broken = fmt.Errorf("%w: message type %d", errRules, kind)
	case stream != g.stream:
		g.broken = fmt.Errorf("%w: message for stream %d, not %d", errRules, stream, g.stream)
	case g.allowance <= 0:
		g.broken = fmt.Errorf("%w: more messages than allowed", errRules)
	case g.allowance != unlimited:
		g.allowance--
	}
	return g.broken
}
