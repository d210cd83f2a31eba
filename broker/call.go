package broker

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"sync/atomic"
	"time"

	"github.com/ephemeral-run/ephemeral/broker/price"
	"github.com/ephemeral-run/ephemeral/run"
)

const (
	maxBody      = 4 << 20
	bodyTimeout  = 30 * time.Second
	drainTimeout = 3 * time.Second
	// inputMargin is what a provider may wrap around a request, in tokens: its own instructions and the marks between
	// messages.
	inputMargin = 256
	// minOutput is the least output, in tokens, that is worth a call.
	minOutput = 64
)

// call is one model call, from the guest's request to its settlement. It belongs to one goroutine.
type call struct {
	h        *Handler
	id       string // of the ledger
	began    time.Time
	guest    context.Context
	req      *chatRequest
	provider *provider
	name     string // of the model at the provider
	cost     price.Model

	body    string
	input   int64 // tokens, at most
	limit   int64 // output tokens, at most
	granted run.Micros

	sent    atomic.Bool // an attempt may have reached the provider
	started bool        // some of the answer went to the guest
	status  int         // of the provider's last answer
	meter   meter
}

// chat serves POST /v1/chat/completions.
func (h *Handler) chat(w http.ResponseWriter, r *http.Request) error {
	c := &call{h: h, id: "model_" + rand.Text(), began: time.Now(), guest: r.Context()}
	data, err := readBody(w, r, maxBody, h.b.bodyTimeout)
	if err != nil {
		return err
	}
	if c.req, err = parseRequest(data); err != nil {
		return err
	}
	if err := c.choose(); err != nil {
		return err
	}
	ctx, cancel := c.context()
	defer cancel()
	if err := c.authorise(ctx); err != nil {
		return err
	}
	return c.perform(ctx, w)
}

// readBody reads the guest's body within its bounds of size and time.
func readBody(w http.ResponseWriter, r *http.Request, most int64, within time.Duration) ([]byte, error) {
	if r.ContentLength > most {
		return nil, &problem{status: http.StatusRequestEntityTooLarge, code: codeTooLarge, message: fmt.Sprintf("at most %d bytes", most)}
	}
	control := http.NewResponseController(w)
	// A connection without deadlines is still bounded by the run's own end.
	_ = control.SetReadDeadline(time.Now().Add(within))
	data, err := io.ReadAll(http.MaxBytesReader(w, r.Body, most))
	var tooLarge *http.MaxBytesError
	if errors.As(err, &tooLarge) {
		return nil, &problem{status: http.StatusRequestEntityTooLarge, code: codeTooLarge, message: fmt.Sprintf("at most %d bytes", most)}
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return nil, &problem{status: http.StatusRequestTimeout, code: codeTooSlow, message: "the body could not be read in time"}
	}
	if err != nil {
		return nil, &problem{status: http.StatusBadRequest, code: codeInvalid, message: "the body could not be read"}
	}
	_ = control.SetReadDeadline(time.Time{}) // for the next request; after an error the deadline ends the connection
	return data, nil
}

// choose checks that the model is the run's, and finds its provider and price.
func (c *call) choose() error {
	allowed := c.h.s.Spec.Model
	if c.req.model != "" && c.req.model != allowed {
		return &problem{status: http.StatusForbidden, code: codeModelNotAllowed, param: "model", message: "this run may use " + allowed + " only"}
	}
	var ok bool
	if c.provider, c.name, c.cost, ok = c.h.b.model(allowed); !ok {
		return &problem{status: http.StatusNotFound, code: codeNotFound, param: "model", message: "the model is not configured any more, or has no price"}
	}
	return nil
}

// context is what the upstream call runs under: it ends with the run, after the longest time of a call, at the deadline of
// the guest's request, and a while after the guest has gone. The while lets the usage of an abandoned call arrive.
func (c *call) context() (context.Context, context.CancelFunc) {
	deadline := c.began.Add(c.h.b.cfg.CallTimeout)
	if d, ok := c.guest.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	ctx, cancel := context.WithDeadline(c.h.ctx, deadline)
	context.AfterFunc(c.guest, func() {
		t := time.NewTimer(drainTimeout)
		defer t.Stop()
		select {
		case <-t.C:
			cancel()
		case <-ctx.Done():
		}
	})
	return ctx, cancel
}

// abandoned tells whether the guest or the run has gone.
func (c *call) abandoned() bool { return c.guest.Err() != nil || c.h.ctx.Err() != nil }

// perform makes the call, with retries while nothing of an answer has reached the guest, and settles it.
func (c *call) perform(ctx context.Context, w http.ResponseWriter) error {
	out := &guestWriter{w: w, control: http.NewResponseController(w)}
	for attempt := 1; ; attempt++ {
		err := c.attempt(ctx, out)
		if err == nil {
			return nil // attempt has settled it
		}
		var f *failure
		if !errors.As(err, &f) {
			f = &failure{reason: "the provider could not be reached", retry: true, cause: err}
		}
		switch {
		case c.started:
			c.settleEstimated(f.reason)
			out.breakOff(c.failed(f))
			return nil
		case c.abandoned():
			c.settleAbandoned()
			return errAbandoned
		case !f.retry || attempt >= c.h.b.cfg.Attempts || !c.pause(ctx, attempt, f.after):
			c.settleFailed(f.reason)
			return c.failed(f)
		}
	}
}

// failed is the answer to the guest when the provider failed. The cause stays here: it is not for guests.
func (c *call) failed(f *failure) *problem {
	c.h.log.Warn("model call failed", "model", c.h.s.Spec.Model, "status", c.status, "reason", f.reason)
	if f.problem != nil {
		return f.problem
	}
	message := f.reason
	if c.status != 0 {
		message = fmt.Sprintf("%s (status %d)", f.reason, c.status)
	}
	return &problem{status: http.StatusBadGateway, code: codeModelError, message: message, upstream: c.status}
}
