package provision

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"
)

// closeLimit bounds the taking apart of one machine. The parts have smaller limits of their own.
const closeLimit = time.Minute

// cleanup is what is to be undone, in reverse order. It knows no context: undoing does not stop because a caller left.
type cleanup struct {
	steps []undo
}

type undo struct {
	what string
	do   func() error
}

// push adds what undoes a step that has just succeeded.
func (c *cleanup) push(what string, do func() error) { c.steps = append(c.steps, undo{what, do}) }

// run undoes everything, going on after errors, and joins them. When a part hangs, run returns after limit with an error
// that names it; the rest then happens when, and if, the part ends.
func (c *cleanup) run(limit time.Duration) error {
	steps := c.steps
	c.steps = nil
	var at atomic.Int64
	ended := make(chan error, 1)
	go func() {
		var errs []error
		for i := len(steps) - 1; i >= 0; i-- {
			at.Store(int64(i))
			if err := steps[i].do(); err != nil {
				errs = append(errs, fmt.Errorf("remove %s: %w", steps[i].what, err))
			}
		}
		ended <- errors.Join(errs...)
	}()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case err := <-ended:
		return err
	case <-timer.C:
		return fmt.Errorf("remove %s: not done in %s", steps[at.Load()].what, limit)
	}
}
