package proto

import (
	"encoding/binary"
	"net"
)

// ttrpc's framing, PROTOCOL.md of github.com/containerd/ttrpc.
const (
	headerBytes = 10
	mostMessage = headerBytes + 4<<20
)

// Whole is a connection over which each message of ttrpc is written at once. ttrpc writes a longer one in two parts, and
// every write is a packet of the machine's transport, with a wake-up on the other side: most of what a message costs. Only
// one goroutine may write at a time, as those of ttrpc do.
func Whole(c net.Conn) net.Conn { return &whole{Conn: c} }

type whole struct {
	net.Conn
	held    []byte // the part of a message that was written so far
	message int    // bytes of it in all
}

// Write holds the beginning of a message until the rest comes.
func (w *whole) Write(p []byte) (int, error) {
	if len(w.held) == 0 {
		if len(p) < headerBytes {
			return w.Conn.Write(p)
		}
		w.message = headerBytes + int(binary.BigEndian.Uint32(p))
		if w.message <= len(p) || w.message > mostMessage {
			return w.Conn.Write(p)
		}
	}
	w.held = append(w.held, p...)
	if len(w.held) < w.message {
		return len(p), nil
	}
	_, err := w.Conn.Write(w.held)
	w.held = w.held[:0]
	if cap(w.held) > 256<<10 { // not to keep what one large message took
		w.held = nil
	}
	if err != nil {
		return 0, err
	}
	return len(p), nil
}

// WholeListener accepts connections that are Whole.
func WholeListener(l net.Listener) net.Listener { return wholeListener{l} }

type wholeListener struct{ net.Listener }

func (l wholeListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return Whole(c), nil
}
