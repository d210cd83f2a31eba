package client

import (
	"bufio"
	"bytes"
	"errors"
	"io"
)

// maxMessage bounds one message of an event stream.
const maxMessage = 64 << 20

// errMessageTooLarge ends a stream whose message does not fit.
var errMessageTooLarge = errors.New("a message is too large")

// message is one server-sent event (WHATWG HTML, section 9.2).
type message struct {
	id, event string
	data      []byte
}

// scanner reads messages from an event stream. Comments and unknown fields are skipped; a message that the stream cuts
// off is dropped.
type scanner struct {
	r     *bufio.Reader
	alive func() // called for each line, also of a heartbeat
	limit int    // bytes of one message
	first bool   // nothing was read yet
	cr    bool   // the last line ended with CR, of which an LF may be left
}

func newScanner(r io.Reader, alive func()) *scanner {
	return &scanner{r: bufio.NewReader(r), alive: alive, limit: maxMessage, first: true}
}

// next returns the next message with data.
func (s *scanner) next() (message, error) {
	var m message
	size, have := 0, false
	for {
		line, err := s.line(s.limit - size)
		if err != nil {
			return message{}, err
		}
		s.alive()
		if len(line) == 0 {
			if have {
				m.data = bytes.TrimSuffix(m.data, []byte("\n"))
				return m, nil
			}
			m, size = message{}, 0
			continue
		}
		size += len(line)
		name, value, _ := bytes.Cut(line, []byte(":"))
		value = bytes.TrimPrefix(value, []byte(" "))
		switch string(name) {
		case "id":
			m.id = string(value)
		case "event":
			m.event = string(value)
		case "data":
			have = true
			m.data = append(append(m.data, value...), '\n')
		}
	}
}

// line reads one line of at most limit bytes without its end, which is LF, CR or both.
func (s *scanner) line(limit int) ([]byte, error) {
	var line []byte
	for {
		c, err := s.r.ReadByte()
		if err != nil {
			return nil, unexpected(err)
		}
		left := s.cr && c == '\n'
		s.cr = c == '\r'
		switch {
		case left:
			continue
		case c == '\r', c == '\n':
			return s.trimMark(line), nil
		}
		if len(line) >= limit {
			return nil, errMessageTooLarge
		}
		line = append(line, c)
	}
}

// trimMark removes the byte order mark that a stream may begin with.
func (s *scanner) trimMark(line []byte) []byte {
	if s.first {
		s.first = false
		return bytes.TrimPrefix(line, []byte("\ufeff"))
	}
	return line
}

// unexpected makes the end of the stream an error: a stream ends after its last message, never before.
func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
