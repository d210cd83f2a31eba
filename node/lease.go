package node

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ephemeral-run/ephemeral/run"
)

// track remembers how to end a run and returns how to forget it.
func (r *Runner) track(id run.ID, end context.CancelCauseFunc) (forget func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.cancels == nil {
		r.cancels = make(map[run.ID]context.CancelCauseFunc)
	}
	r.cancels[id] = end
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.cancels, id)
	}
}

// Watch ends runs as soon as they are asked to be cancelled, until ctx ends. Renewal notices what Watch misses.
func (r *Runner) Watch(ctx context.Context) error {
	ids, err := r.Store.Cancels(ctx)
	if ctx.Err() != nil {
		return nil
	}
	if err != nil {
		return fmt.Errorf("watch for cancelled runs: %w", err)
	}
	for id := range ids {
		r.mu.Lock()
		end := r.cancels[id]
		r.mu.Unlock()
		if end != nil {
			end(errCancelled)
		}
	}
	return nil
}

// renew keeps the lease until ctx ends. A lease that is lost, or was not renewed within its time, ends the run at once:
// somebody else may own it by now.
func (x *execution) renew(ctx context.Context) {
	last := time.Now()
	for sleepUntil(ctx, time.Now().Add(x.Lease/4)) {
		asked := time.Now()
		asking, stop := context.WithDeadline(ctx, last.Add(x.Lease))
		cancelled, err := x.Store.Renew(asking, x.lease)
		stop()
		switch {
		case err == nil:
			last = asked
			if cancelled {
				x.end(errCancelled)
			}
		case errors.Is(err, run.ErrLeaseLost):
			x.end(run.ErrLeaseLost)
			return
		case time.Since(last) >= x.Lease:
			x.end(fmt.Errorf("not renewed for %s: %w", x.Lease, run.ErrLeaseLost))
			return
		}
	}
}
