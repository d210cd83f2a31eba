package mux

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"sync"
	"time"
)

// A line may hold bytes of an earlier session when a session starts: a machine restored from a template has the end of
// the template's session in its queues, and a guest that reopens its port throws away what has arrived. Therefore the
// ends agree on a start with three records of 16 bytes, a kind and a nonce that the host draws for the session:
//
//	host  -> guest  hello   repeated until it is answered
//	guest -> host   answer  once for each new nonce
//	host  -> guest  begin   the host's first frame follows
//
// Each side skips what is no record. The host repeats no hello after the answer, so what follows `begin` is the session;
// the guest answers a nonce once, so what follows `answer` is the session too.
const (
	kindSize     = 8
	nonceSize    = 8
	recordSize   = kindSize + nonceSize
	helloEvery   = 50 * time.Millisecond
	maxGarbage   = 8 << 20 // bytes the host skips before it gives up; the buffers of a line hold less
	kindHello    = "\xe5EPHRUN?"
	kindAnswer   = "\xe5EPHRUN!"
	kindBegin    = "\xe5EPHRUN:"
	readerBuffer = 4096
)

type record struct {
	kind  string
	nonce [nonceSize]byte
}

func (r record) bytes() []byte { return append([]byte(r.kind), r.nonce[:]...) }

// scanner finds records in a stream of bytes.
type scanner struct {
	r       *bufio.Reader
	window  []byte
	skipped int
	limit   int // of skipped bytes; 0: none
}

// next returns the next record of any kind.
func (s *scanner) next() (record, error) {
	for {
		b, err := s.r.ReadByte()
		if err != nil {
			return record{}, err
		}
		s.window = append(s.window, b)
		if len(s.window) < recordSize {
			continue
		}
		switch kind := string(s.window[:kindSize]); kind {
		case kindHello, kindAnswer, kindBegin:
			found := record{kind: kind, nonce: [nonceSize]byte(s.window[kindSize:])}
			s.window = s.window[:0]
			return found, nil
		}
		drop := 1
		if next := bytes.IndexByte(s.window[1:], kindHello[0]); next >= 0 {
			drop += next
		} else {
			drop = len(s.window)
		}
		s.window = append(s.window[:0], s.window[drop:]...)
		if s.skipped += drop; s.limit > 0 && s.skipped > s.limit {
			return record{}, fmt.Errorf("%w: no greeting in %d bytes", ErrProtocol, s.skipped)
		}
	}
}

// buffered is a line whose first bytes are in a buffer already.
type buffered struct {
	io.ReadWriteCloser
	r io.Reader
}

func (b buffered) Read(p []byte) (int, error) { return b.r.Read(p) }

// Host starts a session on the host's end of the line and returns when the guest has answered. It takes the line over:
// on error, and when ctx ends before the answer, the line is closed.
func Host(ctx context.Context, line io.ReadWriteCloser) (*Session, error) {
	hello := record{kind: kindHello}
	if _, err := rand.Read(hello.nonce[:]); err != nil {
		return nil, fmt.Errorf("greet: %w", err)
	}
	closeLine := sync.OnceFunc(func() { _ = line.Close() })
	stop := context.AfterFunc(ctx, closeLine)

	answered := make(chan struct{})
	written := make(chan error, 1)
	go func() { written <- repeat(line, hello.bytes(), answered) }()

	reader := bufio.NewReaderSize(line, readerBuffer)
	scan := scanner{r: reader, limit: maxGarbage}
	err := awaitAnswer(&scan, hello.nonce)
	if err != nil {
		closeLine() // ends a hello that nobody takes
	}
	close(answered)
	if werr := <-written; err == nil {
		err = werr
	}
	if err == nil {
		_, err = line.Write(record{kind: kindBegin, nonce: hello.nonce}.bytes())
	}
	if !stop() {
		err = context.Cause(ctx)
	}
	if err != nil {
		closeLine()
		return nil, fmt.Errorf("greet: %w", err)
	}
	return start(buffered{line, reader}, true, nil)
}

// repeat writes the hello until it was answered.
func repeat(line io.Writer, hello []byte, answered <-chan struct{}) error {
	tick := time.NewTicker(helloEvery)
	defer tick.Stop()
	for {
		if _, err := line.Write(hello); err != nil {
			return err
		}
		select {
		case <-answered:
			return nil
		case <-tick.C:
		}
	}
}

func awaitAnswer(scan *scanner, nonce [nonceSize]byte) error {
	for {
		got, err := scan.next()
		if err != nil {
			return err
		}
		if got == (record{kind: kindAnswer, nonce: nonce}) {
			return nil
		}
	}
}

// Guest starts a session on the guest's end of the line and returns when a host has begun one. It returns the line's
// read error, and leaves the line open, while there is no host. Connections to the ports named are queued from the first
// moment on, until Listen takes them.
func Guest(line io.ReadWriteCloser, ports ...uint32) (*Session, error) {
	reader := bufio.NewReaderSize(line, readerBuffer)
	scan := scanner{r: reader}
	var answeredTo record
	for {
		got, err := scan.next()
		if err != nil {
			return nil, fmt.Errorf("await greeting: %w", err)
		}
		switch {
		case got.kind == kindHello && got != answeredTo:
			if _, err := line.Write(record{kind: kindAnswer, nonce: got.nonce}.bytes()); err != nil {
				return nil, fmt.Errorf("answer greeting: %w", err)
			}
			answeredTo = got
		case got.kind == kindBegin && answeredTo.kind != "" && got.nonce == answeredTo.nonce:
			return start(buffered{line, reader}, false, ports)
		}
	}
}
