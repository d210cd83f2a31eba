package gateway

import (
	"bytes"
	"context"
	"net/http"

	"github.com/gofiber/fiber/v2"

	"github.com/ephemeral-run/ephemeral/run"
)

// largeAnswer is how many bytes of content a run has whose answer counts as memory until it is sent: a slow client holds it.
const largeAnswer = 256 << 10

// sendRun answers with a run. Large answers share as much memory as bodies do: one that does not fit is read again when it
// does, and refused when that is not within the time of a request.
func (s *Server) sendRun(c *fiber.Ctx, org string, status int, record run.Run) error {
	return s.sendView(c, org, status, record, func(r run.Run) run.Run { return r })
}

// sendView is sendRun with what view makes of the run.
func (s *Server) sendView(c *fiber.Ctx, org string, status int, record run.Run, view func(run.Run) run.Run) error {
	record = view(record)
	size := contentSize(record)
	if size < largeAnswer {
		return sendSmall(c, status, &record)
	}
	held := int64(min(size, s.cfg.BodyMemory))
	if !s.answers.TryAcquire(held) {
		id := record.ID
		record = run.Run{} // not held while others are sent
		var err error
		if record, err = s.readWhenRoom(org, id, held); err != nil {
			return err
		}
		record = view(record)
	}
	body, err := encodeRun(make([]byte, 0, size+size/16+4<<10), &record)
	if err != nil {
		s.answers.Release(held)
		return err
	}
	setHeader(c, fiber.HeaderContentType, fiber.MIMEApplicationJSON)
	c.Status(status)
	c.Context().SetBodyStream(&heldBody{Reader: bytes.NewReader(body), release: func() { s.answers.Release(held) }}, len(body))
	return nil
}

// readWhenRoom reads the run as soon as there is room for so many bytes, which are taken unless there is an error.
func (s *Server) readWhenRoom(org string, id run.ID, bytes int64) (run.Run, error) {
	ctx := s.deadline()
	if err := s.answers.Acquire(ctx, bytes); err != nil {
		return run.Run{}, problem(CodeUnavailable, "Too many large answers are being sent.").because(err)
	}
	read := false
	defer func() {
		if !read { // also when it panicked
			s.answers.Release(bytes)
		}
	}()
	record, err := s.deps.Store.Get(ctx, org, id)
	read = err == nil
	return record, err
}

// sendLarge answers with the JSON that make makes, which may be large: then it counts as memory as that of a run does, and is made
// again when there is room.
func (s *Server) sendLarge(ctx context.Context, c *fiber.Ctx, make func(context.Context) ([]byte, error)) error {
	body, err := make(ctx)
	if err != nil {
		return err
	}
	setHeader(c, fiber.HeaderContentType, fiber.MIMEApplicationJSON)
	if len(body) < largeAnswer {
		return c.Status(http.StatusOK).Send(body)
	}
	held := s.answerMemory(body)
	if !s.answers.TryAcquire(held) {
		body = nil // not held while others are sent
		if body, held, err = s.makeWhenRoom(make, held); err != nil {
			return err
		}
	}
	c.Status(http.StatusOK)
	c.Context().SetBodyStream(&heldBody{Reader: bytes.NewReader(body), release: func() { s.answers.Release(held) }}, len(body))
	return nil
}

func (s *Server) answerMemory(body []byte) int64 { return int64(min(len(body), s.cfg.BodyMemory)) }

// makeWhenRoom makes an answer as soon as there is room for so many bytes. As many as it has then are taken unless there is an error.
func (s *Server) makeWhenRoom(make func(context.Context) ([]byte, error), bytes int64) (body []byte, held int64, err error) {
	full := func(err error) error {
		return problem(CodeUnavailable, "Too many large answers are being sent.").because(err)
	}
	ctx := s.deadline()
	if err := s.answers.Acquire(ctx, bytes); err != nil {
		return nil, 0, full(err)
	}
	held = bytes
	made := false
	defer func() {
		if !made { // also when it panicked
			s.answers.Release(held)
		}
	}()
	if body, err = make(ctx); err != nil {
		return nil, 0, err
	}
	if more := s.answerMemory(body) - held; more > 0 { // what is shown has grown
		if err := s.answers.Acquire(ctx, more); err != nil {
			return nil, 0, full(err)
		}
		held += more
	}
	made = true
	return body, held, nil
}

// heldBody is an answer's body; when it is sent, or the client gone, its memory is given back.
type heldBody struct {
	*bytes.Reader
	release func()
}

// Close is called once, by the HTTP server.
func (b *heldBody) Close() error {
	b.release()
	return nil
}

// contentSize is how many bytes of content a run has.
func contentSize(r run.Run) int {
	n := 0
	if q := r.Request; q != nil {
		n += len(q.Prompt) + len(q.Command)
		for _, f := range q.Files {
			n += len(f.Content)
		}
	}
	if o := r.Result; o != nil {
		n += len(o.Output)
		for _, st := range []*run.Stream{o.Stdout, o.Stderr} {
			if st != nil {
				n += len(st.Content)
			}
		}
	}
	return n
}

// answerSize is how many bytes the answer's body has. That of a stream is not read for it.
func answerSize(c *fiber.Ctx) int {
	if c.Response().IsBodyStream() {
		return max(c.Response().Header.ContentLength(), 0)
	}
	return len(c.Response().Body())
}
