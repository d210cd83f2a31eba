package broker

import (
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/ephemeral-run/ephemeral/broker/secret"
)

var errLeak = errors.New("the provider's answer holds a credential")

// maxChannels bounds the texts that one answer may interleave.
const maxChannels = 256

// gate passes the events of a stream on, but holds them back while the text that they carry may be growing into a
// credential piece by piece.
type gate struct {
	scrubber *secret.Scrubber
	write    func(raw []byte)

	tails   map[string][]byte // of each text: as much of its end as a credential may begin in
	growing map[string]bool   // texts that may be about to spell a credential
	held    [][]byte
}

// push takes one event, already scrubbed, and its content. It returns false when a text spells a credential.
func (g *gate) push(raw []byte, chunk *completion) bool {
	longest := g.scrubber.Longest()
	if longest == 0 {
		g.write(raw)
		return true
	}
	if g.tails == nil {
		g.tails, g.growing = map[string][]byte{}, map[string]bool{}
	}
	ok := true
	chunk.texts(func(channel, text string) {
		joined := append(g.tails[channel], text...)
		if g.scrubber.Found(joined) {
			ok = false
		}
		if n := g.scrubber.Tail(joined); n >= secret.MinLength {
			g.growing[channel] = true
		} else {
			delete(g.growing, channel)
		}
		if len(joined) >= longest {
			joined = append([]byte(nil), joined[len(joined)-longest+1:]...)
		}
		g.tails[channel] = joined
	})
	if !ok || len(g.tails) > maxChannels {
		return false
	}
	g.held = append(g.held, raw)
	if len(g.growing) == 0 {
		g.release()
	}
	return true
}

// finish passes on what is still held at the end of the stream. It returns false, and drops it, when that shows most of
// a credential.
func (g *gate) finish() bool {
	if len(g.growing) > 0 {
		return false
	}
	g.release()
	return true
}

func (g *gate) release() {
	for _, raw := range g.held {
		g.write(raw)
	}
	g.held = g.held[:0]
}

const writeTimeout = 30 * time.Second

// guestWriter writes an answer to the guest. When the guest is gone or does not read, the rest is dropped: what the
// provider still sends is read to its end, for the usage.
type guestWriter struct {
	w       http.ResponseWriter
	control *http.ResponseController
	begun   bool
	gone    bool
}

func (g *guestWriter) begin(kind string) {
	if g.begun {
		return
	}
	g.begun = true
	g.w.Header().Set("Content-Type", kind)
	g.w.Header().Set("Cache-Control", "no-store")
	g.w.WriteHeader(http.StatusOK)
}

func (g *guestWriter) send(data []byte) {
	if g.gone {
		return
	}
	// A connection without deadlines is still bounded by the run's own end.
	_ = g.control.SetWriteDeadline(time.Now().Add(writeTimeout))
	if _, err := g.w.Write(data); err != nil {
		g.gone = true
		return
	}
	if err := g.control.Flush(); err != nil {
		g.gone = true
	}
}

// event writes one event of a stream.
func (g *guestWriter) event(raw []byte) {
	g.begin("text/event-stream")
	g.send(raw)
}

// whole writes an answer that is one document.
func (g *guestWriter) whole(data []byte) {
	g.w.Header().Set("Content-Length", fmt.Sprint(len(data)))
	g.begin("application/json")
	g.send(data)
}

// breakOff ends a stream with an error instead of its proper end.
func (g *guestWriter) breakOff(p *problem) {
	g.event(fmt.Appendf(nil, "data: %s\n\n", p.body()))
}
