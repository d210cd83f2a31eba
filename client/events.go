package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"mime"
	"net/http"
	"strconv"
	"time"

	"github.com/ephemeral-run/ephemeral/run"
)

// silence is how long a stream may say nothing, not even a heartbeat, before it is taken for dead.
const silence = 50 * time.Second

// errSilent ends a stream that says nothing.
var errSilent = errors.New("the event stream is silent")

// Events yields the run's events after the one numbered after, 0 for all, as they happen, each once and in order. It
// reconnects where a connection breaks and ends after the run's last event. The last pair may have an error: a
// *Problem, ctx's error, or that the server was away for too long.
func (c *Client) Events(ctx context.Context, id run.ID, after int64) iter.Seq2[run.Event, error] {
	return c.events(ctx, runPath(id)+"/events", string(id), after)
}

func (c *Client) events(ctx context.Context, path, what string, after int64) iter.Seq2[run.Event, error] {
	return func(yield func(run.Event, error) bool) {
		b := c.newBackoff()
		f := &follower{client: c, path: path, last: after, answered: b.answered, yield: func(e run.Event) bool {
			b.achieved()
			return yield(e, nil)
		}}
		for {
			err := f.follow(ctx)
			if f.done {
				return
			}
			if ctx.Err() == nil && temporary(err) && b.sleep(ctx, err) {
				continue
			}
			if ctx.Err() != nil {
				err = context.Cause(ctx)
			}
			yield(run.Event{}, fmt.Errorf("events of %s: %w", what, err))
			return
		}
	}
}

// follower follows one run through any number of connections.
type follower struct {
	client   *Client
	path     string
	last     int64 // number of the last event that was yielded
	answered func()
	yield    func(run.Event) bool
	done     bool // the run's last event was yielded, or nobody wants more
}

// follow reads one connection to its end. The error says why it ended.
func (f *follower) follow(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	watch := time.AfterFunc(silence, func() { cancel(errSilent) })
	defer watch.Stop()
	header := map[string]string{"Accept": "text/event-stream"}
	if f.last > 0 {
		header["Last-Event-ID"] = strconv.FormatInt(f.last, 10)
	}
	req, err := f.client.newRequest(ctx, request{method: http.MethodGet, path: f.path, header: header})
	if err != nil {
		return err
	}
	resp, err := f.client.http.Do(req)
	if err != nil {
		return &unreachableError{err}
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusNoContent { // the run has ended and all of it is known
		f.done = true
		return nil
	}
	if resp.StatusCode != http.StatusOK {
		return readProblem(resp)
	}
	if mediaType, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type")); mediaType != "text/event-stream" {
		return fmt.Errorf("the answer is not of this API: content type %q", resp.Header.Get("Content-Type"))
	}
	f.answered()
	s := newScanner(resp.Body, func() { watch.Reset(silence) })
	for !f.done {
		m, err := s.next()
		if errors.Is(err, errMessageTooLarge) {
			return err
		}
		if err != nil {
			return &unreachableError{fmt.Errorf("event stream: %w", err)}
		}
		if err := f.take(m); err != nil {
			return err
		}
	}
	return nil
}

// take yields the event in a message, unless it was yielded before.
func (f *follower) take(m message) error {
	var e run.Event
	if err := json.Unmarshal(m.data, &e); err != nil {
		return fmt.Errorf("event %.32q is not of this API: %w", m.id, err)
	}
	if e.Seq <= f.last {
		return nil
	}
	f.last = e.Seq
	if !f.yield(e) || e.Type == run.EventWorkerDestroyed {
		f.done = true
	}
	return nil
}
