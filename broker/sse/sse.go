// Package sse reads the event streams (WHATWG HTML, "Server-sent events") that model providers answer with. Only data
// matters to them, so event names, ids and comments are skipped. What it reads is untrusted and bounded.
package sse

import (
	"bufio"
	"bytes"
	"errors"
	"io"
)

// ErrTooLong: an event has more bytes than the reader takes.
var ErrTooLong = errors.New("event of the stream is too long")

// Event is one event that has data.
type Event struct {
	// Raw holds the event's data lines as they came, line ends included, and the empty line behind them.
	Raw []byte
	// Data is the data of the lines, joined by line feeds.
	Data []byte
}

// Reader splits a stream into events. It is for one goroutine.
type Reader struct {
	r     *bufio.Reader
	limit int
	begun bool
}

// NewReader reads from r events of at most limit bytes, lines that are skipped included.
func NewReader(r io.Reader, limit int) *Reader {
	return &Reader{r: bufio.NewReaderSize(r, 8<<10), limit: limit}
}

var byteOrderMark = []byte("\xef\xbb\xbf")

// Next returns the next event with data. Its bytes are the caller's. At the clean end of the stream it returns io.EOF;
// when the stream ends inside an event, io.ErrUnexpectedEOF and nothing of the event.
func (r *Reader) Next() (Event, error) {
	var e Event
	seen, hasData := 0, false
	for {
		line, err := r.line(r.limit - seen)
		if err != nil {
			if err == io.EOF && (hasData || len(line) > 0) {
				err = io.ErrUnexpectedEOF
			}
			return Event{}, err
		}
		if !r.begun {
			r.begun = true
			line = bytes.TrimPrefix(line, byteOrderMark)
		}
		seen += len(line)
		text := bytes.TrimSuffix(bytes.TrimSuffix(line, []byte("\n")), []byte("\r"))
		if len(text) == 0 {
			if !hasData {
				seen = 0
				continue
			}
			e.Raw = append(e.Raw, line...)
			return e, nil
		}
		name, value, _ := bytes.Cut(text, []byte(":"))
		if string(name) != "data" {
			continue
		}
		if hasData {
			e.Data = append(e.Data, '\n')
		}
		hasData = true
		e.Raw = append(e.Raw, line...)
		e.Data = append(e.Data, bytes.TrimPrefix(value, []byte(" "))...)
	}
}

// line reads up to and with the next line feed, at most limit bytes.
func (r *Reader) line(limit int) ([]byte, error) {
	var line []byte
	for {
		part, err := r.r.ReadSlice('\n')
		if len(line)+len(part) > limit {
			return nil, ErrTooLong
		}
		line = append(line, part...)
		if err != bufio.ErrBufferFull {
			return line, err
		}
	}
}
