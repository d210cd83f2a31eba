package node

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/tracing"
)

// maxEvents bounds what one run may append to its timeline, so that a guest cannot grow it without end.
const maxEvents = 10_000

// appendTime is how long an event may hold up the run that it tells of.
const appendTime = time.Second

// errTooManyEvents ends a run whose guest reports more than maxEvents.
var errTooManyEvents = errors.New("more events than a run may have")

// appender writes events to the run's record; run.Store is one.
type appender interface {
	Append(ctx context.Context, l *run.Lease, events ...run.NewEvent) error
}

// timeline is one run's clock, stages and events. Its clock is the wall clock read once, then carried on by the
// monotonic one, so a stepped host clock cannot make times go back.
type timeline struct {
	lease *run.Lease
	store appender
	base  time.Time // when the run was taken; has a monotonic reading

	mu      sync.Mutex
	stages  []run.Stage
	mark    time.Duration // since queued, where the last stage ended
	events  int
	waiting []run.NewEvent // not yet stored, because the store was away
	traced  *tracing.Record
}

func newTimeline(store appender, l *run.Lease) *timeline {
	t := &timeline{lease: l, store: store, base: time.Now()}
	t.stage("queue")
	return t
}

// now is the time in the run's own clock.
func (t *timeline) now() time.Time { return t.base.Add(time.Since(t.base)) }

// sinceQueued is the age of the run, in whole microseconds: the resolution of the record.
func (t *timeline) sinceQueued() time.Duration {
	return max(t.now().Sub(t.lease.QueuedAt), 0).Truncate(time.Microsecond)
}

// stage ends the current stage under the given name; the next begins where it ends, so that the stages sum to the wall
// time without gap.
func (t *timeline) stage(name string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	at := max(t.sinceQueued(), t.mark)
	t.stages = append(t.stages, run.Stage{Name: name, Ms: float64((at - t.mark).Microseconds()) / 1000})
	t.mark = at
}

// ended returns the stages so far and the time at which the last one ended.
func (t *timeline) ended() ([]run.Stage, time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return append([]run.Stage(nil), t.stages...), t.lease.QueuedAt.Add(t.mark)
}

// emit appends an event, in the order of the calls. While the store is away events wait and go out with the next.
func (t *timeline) emit(ctx context.Context, e run.NewEvent) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.events >= maxEvents && e.Type != run.EventMicroVMDestroyed {
		return errTooManyEvents
	}
	t.events++
	if e.At.IsZero() {
		e.At = t.now()
	}
	t.traced.Event(e)
	t.waiting = append(t.waiting, e)
	ctx, cancel := context.WithTimeout(ctx, appendTime)
	defer cancel()
	if err := t.flushLocked(ctx); !errors.Is(err, run.ErrUnavailable) {
		return err
	}
	return nil
}

// flush stores what waits. It must have returned nil before the run is settled: an ended run takes no more events.
func (t *timeline) flush(ctx context.Context) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.flushLocked(ctx)
}

func (t *timeline) flushLocked(ctx context.Context) error {
	if len(t.waiting) == 0 {
		return nil
	}
	if err := t.store.Append(ctx, t.lease, t.waiting...); err != nil {
		return fmt.Errorf("append %s to %s: %w", t.waiting[0].Type, t.lease.Run, err)
	}
	t.waiting = nil
	return nil
}
