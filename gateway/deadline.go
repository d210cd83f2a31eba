package gateway

import (
	"context"
	"sync"
	"time"
)

// deadlines gives the contexts of store calls. Requests that begin close to each other share one: a context of its own, with
// a timer, costs a request more than a hundredth of all it does.
type deadlines struct {
	base context.Context // ends all of them
	life time.Duration

	mu     sync.Mutex
	latest context.Context
	until  time.Time          // latest is given out before this
	cancel context.CancelFunc // never called: the deadline releases what the context holds
}

// shareOf is the part of its life for which a context is given out; a request has that much less time at worst.
const shareOf = 100

// next is a context that ends after the life that contexts have, or up to a hundredth of it sooner.
func (d *deadlines) next() context.Context {
	now := time.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	if !now.Before(d.until) {
		d.until = now.Add(d.life / shareOf)
		d.latest, d.cancel = context.WithDeadline(d.base, now.Add(d.life))
	}
	return d.latest
}

// deadline is the context of the store calls of one request.
func (s *Server) deadline() context.Context { return s.deadlines.next() }
