package exec

import (
	"os"
	"sync/atomic"
	"time"
	"unicode/utf8"
)

// ChunkSize is the most a Sink gets at once. A message costs its way through the machine's transport whatever its size: the
// larger, the faster.
const ChunkSize = 128 << 10

// Stream says where output came from.
type Stream int

// The streams of a command. With Spec.Combined all is Stdout.
const (
	Stdout Stream = iota
	Stderr
)

// Sink takes output. It may block, which in the end blocks the command, but not beyond the end of the context of Run; p is valid during the call only. The chunks of a
// stream never end within a UTF-8 character unless the command itself ended there.
type Sink func(s Stream, p []byte)

// Volume is what a command wrote to one stream.
type Volume struct {
	Bytes     int64 // in all
	Truncated bool  // more than the limit came; what followed was counted and dropped
}

// pump carries one stream from its pipe to the sink.
type pump struct {
	file   *os.File
	stream Stream
	sink   Sink
	limit  int64

	kept   int64
	volume Volume        // valid once done is closed
	last   atomic.Int64  // when bytes last came, in nanoseconds since start
	busy   atomic.Bool   // within the sink: a silence that says nothing about the command
	done   chan struct{} // closed at end of file
	start  time.Time
}

func newPump(file *os.File, stream Stream, spec *Spec, start time.Time) *pump {
	return &pump{file: file, stream: stream, sink: spec.Output, limit: spec.OutputLimit, done: make(chan struct{}), start: start}
}

func (p *pump) run() {
	defer close(p.done)
	buffer := make([]byte, ChunkSize)
	carried := 0 // bytes of an unfinished character at the buffer's start
	for {
		n, err := p.file.Read(buffer[carried:])
		p.volume.Bytes += int64(n)
		n += carried
		if err != nil {
			p.deliver(buffer[:n])
			return
		}
		p.last.Store(int64(time.Since(p.start)))
		whole := Whole(buffer[:n])
		p.deliver(buffer[:whole])
		carried = copy(buffer, buffer[whole:n])
	}
}

func (p *pump) deliver(chunk []byte) {
	if room := p.limit - p.kept; int64(len(chunk)) > room || p.volume.Truncated {
		if p.volume.Truncated {
			return
		}
		p.volume.Truncated = true
		chunk = chunk[:Whole(chunk[:room])]
	}
	if len(chunk) == 0 {
		return
	}
	p.kept += int64(len(chunk))
	p.busy.Store(true)
	p.sink(p.stream, chunk)
	p.last.Store(int64(time.Since(p.start)))
	p.busy.Store(false)
}

// quiet says for how long nothing came although something could have.
func (p *pump) quiet() time.Duration {
	if p.busy.Load() {
		return 0
	}
	return time.Since(p.start) - time.Duration(p.last.Load())
}

func (p *pump) ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// Whole returns the length of b without the beginning of a UTF-8 character at its end, if there is one.
func Whole(b []byte) int {
	for i := len(b) - 1; i >= 0 && i >= len(b)-utf8.UTFMax+1; i-- {
		if !utf8.RuneStart(b[i]) {
			continue
		}
		if !utf8.FullRune(b[i:]) {
			return i
		}
		break
	}
	return len(b)
}
