package node

import (
	"context"
	"errors"
	"time"

	"github.com/ephemeral-run/ephemeral/run"
)

// The worker's time ends before the run's, by a tenth of it within these bounds, so that its final answer arrives.
const (
	leastSlack = 300 * time.Millisecond
	mostSlack  = 2 * time.Second
)

// wall is how long the worker may work on from now.
func (x *execution) wall() time.Duration {
	limit := time.Duration(x.lease.Spec.TimeoutSeconds) * time.Second
	slack := min(max(limit/10, leastSlack), mostSlack)
	return max(limit-slack-x.line.now().Sub(x.ready), time.Millisecond)
}

// conclude asks the worker for what it has done so far, when no further slice of compute can be paid. It has until the end
// of what is paid: a slice and a half, or of a hold too small to pay ahead 300 milliseconds.
func (x *execution) conclude(ctx context.Context, err error) {
	if x.lease.Spec.Prompt == "" || !errors.Is(err, run.ErrBudget) {
		return
	}
	x.owned.Go(func() {
		if err := x.guest.Conclude(ctx, "budget_exhausted"); err != nil && ctx.Err() == nil {
			x.Log.Warn("worker not concluded", "run", x.lease.Run, "error", err)
		}
	})
}
