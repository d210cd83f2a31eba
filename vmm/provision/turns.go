package provision

import (
	"context"
	"runtime"
	"sync"
	"time"
)

// turnLimit is how long a machine that wakes keeps others waiting: one that does not answer must not hold up all.
const turnLimit = 50 * time.Millisecond

// turns has machines wake in the order in which they were asked to, as many at once as the host has processors. All at once
// they share the processors, so that each is up when the last is; and one that answers late has to be asked again what its
// clock says, which makes all of them later still.
type turns chan struct{}

func newTurns() turns { return make(turns, runtime.NumCPU()) }

// take waits for a turn. It ends with done, which may be called again, or after turnLimit.
func (t turns) take(ctx context.Context) (done func(), err error) {
	select {
	case t <- struct{}{}:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	over := sync.OnceFunc(func() { <-t })
	timer := time.AfterFunc(turnLimit, over)
	return func() {
		timer.Stop()
		over()
	}, nil
}
