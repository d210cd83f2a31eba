package mux

import (
	"encoding/binary"
	"fmt"
	"io"
)

// Fields of a yamux frame header: version, type, flags, stream, length; see the specification of hashicorp/yamux.
const (
	frameHeader = 12
	frameData   = 0
	frameWindow = 1
	framePing   = 2
	frameAway   = 3
	// maxFrame is the largest receive window of a stream, and so the largest data frame of an honest peer.
	maxFrame = 256 << 10
)

// guard checks the frames of the peer before yamux sees them. Yamux answers each ping on a goroutine of its own, so a
// peer that sends pings and reads nothing would make this side grow without bound; keep-alive is off, so an honest one
// sends none. It also ends a session that announces a frame larger than any window.
type guard struct {
	io.ReadWriteCloser
	header []byte // of the frame being read, until it is whole
	body   uint32 // bytes of the frame still to come
	err    error
}

// Read passes on whole valid frames. After a violation it fails for good.
func (g *guard) Read(p []byte) (int, error) {
	if g.err != nil {
		return 0, g.err
	}
	n, err := g.ReadWriteCloser.Read(p)
	if bad := g.check(p[:n]); bad != nil {
		g.err = bad
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
		n := min(frameHeader-len(g.header), len(p))
		g.header = append(g.header, p[:n]...)
		p = p[n:]
		if len(g.header) < frameHeader {
			return nil
		}
		kind, length := g.header[1], binary.BigEndian.Uint32(g.header[8:])
		switch {
		case g.header[0] != 0:
			return fmt.Errorf("%w: frame version %d", ErrProtocol, g.header[0])
		case kind == frameData && length <= maxFrame:
			g.body = length
		case kind == frameWindow && length <= maxFrame, kind == frameAway:
		default:
			return fmt.Errorf("%w: frame type %d, length %d", ErrProtocol, kind, length)
		}
		g.header = g.header[:0]
	}
	return nil
}
