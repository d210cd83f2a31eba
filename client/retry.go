package client

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"time"
)

// Delays between attempts: doubled each time, each drawn between half and whole so that clients do not return together.
const (
	minDelay      = 100 * time.Millisecond
	maxDelay      = 5 * time.Second
	maxRetryAfter = time.Minute // more than this is not believed
)

// errNoAnswer ends an attempt that takes too long.
var errNoAnswer = errors.New("the server did not answer in time")

// unreachableError says that no whole answer came. Whether the server acted is unknown.
type unreachableError struct{ err error }

func (e *unreachableError) Error() string { return e.err.Error() }
func (e *unreachableError) Unwrap() error { return e.err }

// noAnswer marks err as a failure of the way to the server, unless the caller gave up.
func noAnswer(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		cause := context.Cause(ctx)
		if !errors.Is(cause, errNoAnswer) {
			return cause
		}
		err = fmt.Errorf("%w: %w", errNoAnswer, err)
	}
	return &unreachableError{err}
}

// temporary tells whether the same request may succeed later.
func temporary(err error) bool {
	var u *unreachableError
	if errors.As(err, &u) {
		return true
	}
	var p *Problem
	if !errors.As(err, &p) {
		return false
	}
	switch p.Status {
	case http.StatusTooManyRequests, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout, http.StatusRequestTimeout:
		return true
	}
	return false
}

// backoff paces the attempts of one call.
type backoff struct {
	since time.Time // of the outage
	max   time.Duration
	least time.Duration // the first delay
	delay time.Duration
}

func (c *Client) newBackoff() *backoff {
	return &backoff{max: c.outage, least: c.delay, delay: c.delay}
}

// answered ends the outage. The delay stays: a server that answers and leaves at once is not to be hurried.
func (b *backoff) answered() { b.since = time.Time{} }

// achieved ends the outage and starts the delays anew.
func (b *backoff) achieved() { b.since, b.delay = time.Time{}, b.least }

// sleep waits for the next attempt after err, at least as long as the server asked for. It is false when the outage has
// lasted too long, would last too long by then, or ctx has ended.
func (b *backoff) sleep(ctx context.Context, err error) bool {
	if b.since.IsZero() {
		b.since = time.Now()
	}
	d := b.delay/2 + rand.N(b.delay/2)
	b.delay = min(2*b.delay, maxDelay)
	var p *Problem
	if errors.As(err, &p) && p.RetryAfter > 0 {
		d = min(p.RetryAfter, maxRetryAfter) + rand.N(p.RetryAfter/10+1)
	}
	if time.Since(b.since)+d > b.max {
		return false
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}
