package pool

import (
	"errors"
	"fmt"
)

// ErrFilling: the pool has not made its first machines yet.
var ErrFilling = errors.New("the pool is being filled for the first time")

// Ready tells whether the pool can serve: nil once it has made MinReady machines and as long as making them does not
// fail. A pool that is empty because of a burst is ready: its claims wait.
func (p *Pool[M]) Ready() error {
	s := p.Stats()
	if s.Circuit != CircuitClosed {
		return fmt.Errorf("making machines fails: %s", s.CircuitReason)
	}
	if least := int64(p.Config().MinReady); s.Made < least {
		return fmt.Errorf("%w: %d of %d", ErrFilling, s.Made, least)
	}
	return nil
}
