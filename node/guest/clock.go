package guest

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// driftPerSecond is how far the clock of a running guest may come off its host's in a second: the most by which the host's
// own is slewed, 500 ppm; adjtimex(2).
const driftPerSecond = 500 * time.Microsecond

// Clock is a connection to the agent of a prepared machine, kept open for its clock to be set over it: a machine that wakes
// has one message to answer then, and none before it. Set is not for concurrent use.
type Clock struct {
	k   *call
	set time.Time     // when it was set; zero: not known to be right
	off time.Duration // how far it was off the host's then, at the most
}

// Clock opens the connection. It is closed by Close, by the end of the machine, or by the agent.
func (c *Client) Clock(ctx context.Context) (*Clock, error) {
	k, err := c.open(ctx, "open clock")
	if err != nil {
		return nil, err
	}
	return &Clock{k: k}, nil
}

// Set sets the clock. It may be called just before the machine is resumed: the guest finds the call when it runs. The clock
// is right to MaxClockError then, or the error is ErrNotPrepared and the machine must not be used, as one that never was
// prepared: its agent refuses.
func (c *Clock) Set(ctx context.Context) error {
	c.set = time.Time{}
	err := c.k.do(ctx, "set clock", func(k *call) error {
		// A machine that answers at once is set at once. For one that does not, how far it is off is measured first.
		s, err := k.setClock(ctx, 0)
		if err == nil {
			s, err = k.correctClock(ctx, s)
		}
		if err != nil {
			return err
		}
		c.set, c.off = time.Now(), s.off()
		return nil
	})
	if refused := new(RefusedError); errors.As(err, &refused) {
		err = fmt.Errorf("%w: %w", ErrNotPrepared, err)
	}
	return err
}

// Right tells whether the clock of a machine that has run ever since it was set is right to MaxClockError still.
func (c *Clock) Right() bool { return !c.set.IsZero() && c.offBy(time.Now()) <= MaxClockError }

// offBy is how far the guest's clock is off the host's at the most: what it was, what it may have drifted, and what the
// host's was moved meanwhile.
func (c *Clock) offBy(now time.Time) time.Duration {
	ran := now.Sub(c.set)
	moved := now.Round(0).Sub(c.set.Round(0)) - ran
	return c.off + time.Duration(ran.Seconds()*float64(driftPerSecond)) + moved.Abs()
}

// SetClock is Set over a connection of its own.
func (c *Client) SetClock(ctx context.Context) error {
	clock, err := c.Clock(ctx)
	if err != nil {
		return err
	}
	return errors.Join(clock.Set(ctx), clock.Close())
}

// Close closes the connection.
func (c *Clock) Close() error {
	c.k.close()
	return nil
}
