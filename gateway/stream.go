package gateway

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	"github.com/ephemeral-run/ephemeral/run"
)

// frame is one event in the form of server-sent events (WHATWG HTML, section 9.2).
type frame struct {
	seq  int64
	last bool // nothing follows in this run
	text []byte
}

// Lines of a stream beside its events.
const (
	retryLine     = "retry: 1000\n\n" // milliseconds until a client reconnects
	heartbeatLine = ": heartbeat\n\n"
	drainLine     = ": this server is going away, reconnect\nretry: 1000\n\n"
)

// encodeFrame writes an event with its number as id and its type as event name.
func encodeFrame(ev run.Event) (frame, error) {
	if strings.ContainsAny(string(ev.Type), "\r\n") {
		return frame{}, fmt.Errorf("event type %q has a line break", ev.Type)
	}
	data, err := json.Marshal(ev) // has no line breaks
	if err != nil {
		return frame{}, fmt.Errorf("encode event: %w", err)
	}
	text := make([]byte, 0, len(data)+len(ev.Type)+48)
	text = append(text, "id: "...)
	text = strconv.AppendInt(text, ev.Seq, 10)
	text = append(text, "\nevent: "...)
	text = append(text, ev.Type...)
	text = append(text, "\ndata: "...)
	text = append(text, data...)
	text = append(text, "\n\n"...)
	return frame{seq: ev.Seq, last: ev.Type == run.EventWorkerDestroyed, text: text}, nil
}

// Why a stream ended, for the log.
var (
	errGone = errors.New("client_gone") // or too slow to take one write in time
	errSlow = errors.New("slow_reader")

	errRevoked = errors.New("key_revoked") // or expired; or the share was
)

// stream sends one run's events to one client: first what is stored, then what happens.
type stream struct {
	reader    *reader
	stored    func(after int64) (events []run.Event, more bool, err error)
	heartbeat time.Duration
	valid     func() error // asked with each heartbeat, and when something is revoked, whether the client may still read; nil: it may
	backlog   []run.Event  // stored when the client asked
	since     []run.Event  // stored since then: most of them come live as well, and then say more
	more      bool         // stored events follow those of since
	over      bool         // the run had ended by then
	sent      int64        // number of the last event sent
	bytes     int
}

// run writes until the run's last event, the client is gone or too slow, or the gateway drains. It returns nil at the
// proper end.
func (s *stream) run(w *bufio.Writer) (err error) {
	defer func() {
		if r := recover(); r != nil { // no one else would catch it: the writer has its own goroutine
			err = fmt.Errorf("panic: %v\n%s", r, debug.Stack())
		}
	}()
	if err := s.write(w, []byte(retryLine)); err != nil {
		return err
	}
	done, err := s.events(w, s.backlog)
	for err == nil && !done && s.more {
		done, err = s.nextPage(w)
	}
	done = done || s.over
	if err == nil && !done && len(s.since) > 0 {
		done, err = s.overlap(w)
	}
	s.backlog, s.since = nil, nil // a long stream does not keep them
	beat := time.NewTicker(s.heartbeat)
	defer beat.Stop()
	for err == nil && !done {
		select {
		case <-beat.C:
			if err = s.check(); err == nil {
				err = s.write(w, []byte(heartbeatLine))
			}
		case <-s.reader.wake:
			done, err = s.advance(w)
		}
	}
	return err
}

// check is errRevoked when the client may read no further.
func (s *stream) check() error {
	if s.valid != nil && s.valid() != nil {
		return errRevoked
	}
	return nil
}

// take is what the reader was given, unless it was cut off or may read no further.
func (s *stream) take() (taken, error) {
	t := s.reader.take()
	switch {
	case t.cut:
		return t, errSlow
	case t.recheck:
		return t, s.check()
	}
	return t, nil
}

// nextPage sends the next stored events. The last ones it leaves to overlap, which may find more of them.
func (s *stream) nextPage(w *bufio.Writer) (done bool, err error) {
	if done, err = s.events(w, s.since); done || err != nil {
		return done, err
	}
	s.since, s.more, err = s.stored(s.sent)
	if err != nil {
		return false, fmt.Errorf("read stored events: %w", err)
	}
	if s.over && !s.more {
		return s.events(w, s.since)
	}
	return false, nil
}

// overlapTime bounds the wait for the live frame of an event that was stored when the reader had joined.
const overlapTime = 250 * time.Millisecond

// overlap sends what happened while the reader joined. Under zero data retention the content of an event is in its live
// frame only, which comes a moment after the event is stored.
func (s *stream) overlap(w *bufio.Writer) (done bool, err error) {
	last := s.since[len(s.since)-1].Seq
	limit := time.NewTimer(overlapTime)
	defer limit.Stop()
	var live []frame
	for waiting := true; waiting && (len(live) == 0 || live[len(live)-1].seq < last); {
		select {
		case <-limit.C:
			waiting = false
		case <-s.reader.wake:
			t, err := s.take()
			if err != nil {
				return false, err
			}
			live = append(live, t.frames...)
			if t.gap || t.drained {
				s.reader.signal(func() { s.reader.gap, s.reader.drained = t.gap, t.drained })
				waiting = false
			}
		}
	}
	if done, err = s.catchUp(w, s.since, live); done || err != nil {
		return done, err
	}
	return s.frames(w, live)
}

// errDrained ends a stream of a gateway that goes away.
var errDrained = errors.New("drained")

// advance sends what the reader was given since it last looked.
func (s *stream) advance(w *bufio.Writer) (done bool, err error) {
	t, err := s.take()
	if err != nil {
		return false, err
	}
	missing := len(t.frames) > 0 && t.frames[0].seq > s.sent+1
	for i := 1; i < len(t.frames); i++ {
		missing = missing || t.frames[i].seq > t.frames[i-1].seq+1
	}
	for more := t.gap || missing; more; {
		var events []run.Event
		if events, more, err = s.stored(s.sent); err != nil {
			return false, fmt.Errorf("read stored events: %w", err)
		}
		if done, err = s.catchUp(w, events, t.frames); done || err != nil {
			return done, err
		}
	}
	if done, err = s.frames(w, t.frames); done || err != nil {
		return done, err
	}
	if t.drained {
		_ = s.write(w, []byte(drainLine)) // the stream ends either way
		return false, errDrained
	}
	return false, nil
}

// catchUp sends the stored events that are not among the live frames. A live frame says more than the stored event
// under zero data retention.
func (s *stream) catchUp(w *bufio.Writer, events []run.Event, live []frame) (done bool, err error) {
	have := make(map[int64]frame, len(live))
	for _, f := range live {
		have[f.seq] = f
	}
	for _, ev := range events {
		if f, ok := have[ev.Seq]; ok {
			done, err = s.frames(w, []frame{f})
		} else {
			done, err = s.events(w, []run.Event{ev})
		}
		if done || err != nil {
			return done, err
		}
	}
	return false, nil
}

// events encodes and sends events, skipping those sent before.
func (s *stream) events(w *bufio.Writer, events []run.Event) (done bool, err error) {
	for _, ev := range events {
		f, err := encodeFrame(ev)
		if err != nil {
			return false, err
		}
		if done, err = s.frames(w, []frame{f}); done || err != nil {
			return done, err
		}
	}
	return false, nil
}

// frames sends frames, skipping those sent before.
func (s *stream) frames(w *bufio.Writer, frames []frame) (done bool, err error) {
	for _, f := range frames {
		if f.seq > s.sent {
			if err := s.write(w, f.text); err != nil {
				return false, err
			}
			s.sent = f.seq
		}
		if f.last {
			return true, nil
		}
	}
	return false, nil
}

// write sends text at once.
func (s *stream) write(w *bufio.Writer, text []byte) error {
	n, err := w.Write(text)
	s.bytes += n
	if err == nil {
		err = w.Flush()
	}
	if err != nil {
		return errGone
	}
	return nil
}
