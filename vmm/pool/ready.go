package pool

import (
	"errors"
	"fmt"
	"time"
)

// ErrFilling: the pool has not made its first machines yet.
var ErrFilling = errors.New("the pool is being filled for the first time")

// Ready tells whether the pool can serve: nil once it has made MinReady machines and as long as making them does not
// fail. A pool that is empty because of a burst, or was made larger, is ready: its claims wait.
func (p *Pool[M]) Ready() error {
	s := p.Stats()
	if s.Circuit != CircuitClosed {
		return &unreadyError{fmt.Sprintf("making machines fails: %s", s.CircuitReason), max(0, s.CircuitUntil.Sub(p.clock.Now()))}
	}
	if p.filled.Load() {
		return nil
	}
	if least := int64(p.Config().MinReady); s.Made < least {
		return fmt.Errorf("%w: %d of %d", ErrFilling, s.Made, least)
	}
	if s.Made > 0 {
		p.filled.Store(true)
	}
	return nil
}

// unreadyError knows when the pool tries again.
type unreadyError struct {
	reason string
	after  time.Duration
}

func (e *unreadyError) Error() string { return e.reason }

// RetryAfter is when the pool tries again; 0: now.
func (e *unreadyError) RetryAfter() time.Duration { return e.after }
