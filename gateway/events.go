package gateway

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"

	"github.com/gofiber/fiber/v2"

	"github.com/ephemeral-run/ephemeral/run"
)

const mimeEventStream = "text/event-stream"

// eventList is the body of GET /v1/runs/{id}/events.
type eventList struct {
	Events    []run.Event `json:"events"`
	NextAfter int64       `json:"next_after,omitempty"` // for the next page; absent on the last
}

// getEvents answers GET /v1/runs/{id}/events: the stored events as JSON, page by page, or all of them to the
// end as server-sent events.
func (s *Server) getEvents(ctx context.Context, c *fiber.Ctx, key run.Key) error {
	id, err := runID(c)
	if err != nil {
		return err
	}
	return s.sendEvents(ctx, c, key, id)
}

// sendEvents answers with the events of a run of the key's organisation.
func (s *Server) sendEvents(ctx context.Context, c *fiber.Ctx, key run.Key, id run.ID) error {
	if err := onlyParameters(c, "after"); err != nil {
		return err
	}
	after, err := lastEventID(c)
	if err != nil {
		return err
	}
	if c.Method() == http.MethodGet && c.Accepts(fiber.MIMEApplicationJSON, mimeEventStream) == mimeEventStream {
		return s.streamEvents(ctx, c, key, id, after)
	}
	if _, err := s.deps.Store.Get(ctx, key.Org, id); err != nil {
		return err
	}
	return s.sendLarge(ctx, c, func(ctx context.Context) ([]byte, error) { return s.eventPage(ctx, key.Org, id, after) })
}

// eventPage is a page of stored events as JSON.
func (s *Server) eventPage(ctx context.Context, org string, id run.ID, after int64) ([]byte, error) {
	events, more, err := s.deps.Store.Events(ctx, org, id, after)
	if err != nil {
		return nil, err
	}
	page := eventList{Events: nonNil(events)}
	if more && len(events) > 0 {
		page.NextAfter = events[len(events)-1].Seq
	}
	body, err := json.Marshal(page)
	if err != nil {
		return nil, fmt.Errorf("encode page of events: %w", err)
	}
	return body, nil
}

// streamEvents answers with server-sent events. Everything that can be refused is refused before the first byte. A
// client that has the last event of an ended run is told not to come again: 204 stops an EventSource.
func (s *Server) streamEvents(ctx context.Context, c *fiber.Ctx, key run.Key, id run.ID, after int64) error {
	record, err := s.deps.Store.Get(ctx, key.Org, id)
	if err != nil {
		return err
	}
	backlog, more, err := s.deps.Store.Events(ctx, key.Org, id, after)
	if err != nil {
		return err
	}
	if record.State.Terminal() && len(backlog) == 0 {
		return c.SendStatus(http.StatusNoContent)
	}
	r := s.hub.join(key.Org, id)
	joined := true
	defer func() {
		if joined {
			s.hub.leave(r)
		}
	}()
	s.hub.ready(ctx, r)
	last := after
	if len(backlog) > 0 {
		last = backlog[len(backlog)-1].Seq
	}
	var since []run.Event
	if !more {
		since, more, err = s.deps.Store.Events(ctx, key.Org, id, last) // so that nothing falls between
		if err != nil {
			return err
		}
	}
	c.Set(fiber.HeaderContentType, mimeEventStream)
	c.Set(fiber.HeaderCacheControl, "no-store, no-transform")
	c.Set("X-Accel-Buffering", "no") // nginx would hold events back
	boundSendBuffer(c.Context().Conn())
	k := callOf(c)
	k.streaming = true
	joined = false // the stream leaves from here on
	st := &stream{
		reader:    r,
		heartbeat: s.cfg.Heartbeat,
		valid:     func() error { return s.stillValid(k) },
		backlog:   backlog,
		since:     since,
		more:      more,
		over:      record.State.Terminal(),
		sent:      after,
		stored: func(after int64) ([]run.Event, bool, error) {
			ctx := s.deadline()
			return s.deps.Store.Events(ctx, key.Org, id, after)
		},
	}
	s.takeOver(c, func(w *bufio.Writer) {
		defer s.hub.leave(r)
		s.ended(k, st, st.run(w))
	})
	return nil
}

// streamSendBuffer is how many bytes of a stream the kernel may keep for a client that does not read; by itself it would
// keep megabytes for each.
const streamSendBuffer = 256 << 10

// boundSendBuffer limits the connection's send buffer, where it has one.
func boundSendBuffer(nc net.Conn) {
	if tcp := tcpOf(nc); tcp != nil {
		_ = tcp.SetWriteBuffer(streamSendBuffer) // fails only on a connection that is gone, as the next write will tell
	}
}

// ended logs the end of a stream.
func (s *Server) ended(k *call, st *stream, err error) {
	end := "finished"
	switch {
	case errors.Is(err, errGone), errors.Is(err, errSlow), errors.Is(err, errDrained), errors.Is(err, errRevoked):
		end = err.Error()
	case err != nil:
		end = "failed"
		s.log.Error("event stream failed", "request_id", k.id, "run", k.run, "error", err)
	}
	s.metrics.streamEnded(end)
	s.observe(k, http.StatusOK, st.bytes, end)
}

// nonNil makes an empty list [] instead of null.
func nonNil[T any](s []T) []T {
	if s == nil {
		return []T{}
	}
	return s
}
