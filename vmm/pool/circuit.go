package pool

import "time"

const (
	// threshold is how many failures in a row open the circuit.
	threshold = 3
	// retryBase is the pause after one failure below the threshold; it doubles with the next.
	retryBase = 100 * time.Millisecond
	// openBase is how long the circuit is open the first time; it doubles each time up to openMax.
	openBase = time.Second
	openMax  = time.Minute
)

// CircuitState says whether the pool makes machines.
type CircuitState string

// A closed circuit makes machines, an open one waits, a half-open one has one trial under way.
const (
	CircuitClosed   CircuitState = "closed"
	CircuitOpen     CircuitState = "open"
	CircuitHalfOpen CircuitState = "half-open"
)

// circuit stops the making of machines when it keeps failing, and lets one trial through after a pause.
//
// Two things count: makes that fail in a row, and machines that die in the pool in a row, with none handed out alive
// between. The second is needed because a template can be broken such that its machines are made well and die soon.
type circuit struct {
	state  CircuitState
	fails  int       // failed makes since the last that succeeded
	deaths int       // machines that died while ready since the last that was handed out
	level  int       // how often it opened without recovery; sets the length of the pause
	epoch  int       // how often it opened; the ends of makes of an earlier epoch say nothing about this one
	until  time.Time // open: when a trial may start; closed: when the next make may start
	trial  bool      // half-open: the trial is under way
	reason error     // the last failure; nil after recovery
}

// lets says how many of want makes may start now; let notes how many of these do.
func (c *circuit) lets(now time.Time, want int) int {
	switch {
	case want <= 0, now.Before(c.until), c.state == CircuitHalfOpen && c.trial:
		return 0
	case c.state == CircuitClosed:
		return want
	}
	return 1
}

func (c *circuit) let(n int) {
	if n > 0 && c.state != CircuitClosed {
		c.state, c.trial = CircuitHalfOpen, true
	}
}

// blocks tells whether a claim would wait for nothing.
func (c *circuit) blocks(now time.Time) bool { return c.state == CircuitOpen && now.Before(c.until) }

// err is what such a claim gets.
func (c *circuit) err() error { return &CircuitError{Reason: c.reason, Until: c.until} }

// failed notes a make that failed and tells whether that opened the circuit.
func (c *circuit) failed(epoch int, now time.Time, reason error) (opened bool) {
	if epoch != c.epoch {
		return false
	}
	c.fails++
	c.reason = reason
	if c.state == CircuitHalfOpen || c.fails >= threshold {
		c.open(now)
		return true
	}
	c.until = now.Add(retryBase << (c.fails - 1))
	return false
}

// died notes a machine that died while ready and tells whether that opened the circuit.
func (c *circuit) died(now time.Time, reason error) (opened bool) {
	c.deaths++
	c.reason = reason
	if c.state == CircuitOpen || c.deaths < threshold {
		return false
	}
	c.open(now)
	return true
}

func (c *circuit) open(now time.Time) {
	pause := openMax
	if c.level < 6 { // 1 s << 6 is above openMax
		pause = openBase << c.level
	}
	c.level++
	c.epoch++
	c.state, c.trial, c.until = CircuitOpen, false, now.Add(pause)
}

// made notes a make that succeeded.
func (c *circuit) made(epoch int) {
	if epoch != c.epoch {
		return
	}
	c.fails = 0
	c.state, c.trial, c.until = CircuitClosed, false, time.Time{}
	if c.deaths >= threshold {
		c.deaths = threshold - 1 // the next death opens it again, with a longer pause
	}
	if c.deaths == 0 {
		c.level, c.reason = 0, nil
	}
}

// renew forgets everything: machines are made in another way from now on.
func (c *circuit) renew() { *c = circuit{state: CircuitClosed, epoch: c.epoch + 1} }

// healthy tells whether the next make has every reason to succeed.
func (c *circuit) healthy() bool { return c.state == CircuitClosed && c.fails == 0 }

// served notes a machine that was handed out alive.
func (c *circuit) served() {
	c.deaths = 0
	if c.state == CircuitClosed && c.fails == 0 {
		c.level, c.reason = 0, nil
	}
}

// untried notes a make that was let through but did not start.
func (c *circuit) untried(epoch int) {
	if epoch == c.epoch {
		c.trial = false
	}
}
