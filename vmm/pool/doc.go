// Package pool keeps machines ready: it is policy only and knows nothing of how a machine is made.
//
// A machine is made by the function given to New, waits in the pool, is handed out once by Claim and is never taken
// back. A claim on a ready machine is a pointer move under one mutex. Claims that find none wait in order of arrival; the
// pool makes machines for them within its limits, so that a burst never starts a storm of makes.
//
// Decisions are made by policy, which has no goroutine, lock or clock of its own; Pool gives it those.
package pool

import (
	"errors"
	"fmt"
	"time"

	"github.com/ephemeral-run/ephemeral/vmm/pool/autoscale"
)

// Machine is what a pool holds. Close destroys it, is idempotent and bounded in time; Done is closed when it has died.
type Machine interface {
	comparable
	Close() error
	Done() <-chan struct{}
}

// Config is the size and the temper of a pool.
type Config struct {
	MinReady          int           `env:"EPHEMERAL_POOL_MIN_READY" envDefault:"2" help:"machines kept ready"`
	MaxReady          int           `env:"EPHEMERAL_POOL_MAX_READY" envDefault:"8" help:"ready machines above this number are destroyed"`
	MaxMachines       int           `env:"EPHEMERAL_POOL_MAX_MACHINES" envDefault:"16" help:"machines alive at once: ready, in use, being made and being destroyed"`
	RefillConcurrency int           `env:"EPHEMERAL_POOL_REFILL_CONCURRENCY" envDefault:"2" help:"machines made at once"`
	MaxAge            time.Duration `env:"EPHEMERAL_POOL_MAX_AGE" envDefault:"1h" help:"how long a machine may wait in the pool before it is replaced; 0: for ever"`
	MakeTimeout       time.Duration `env:"EPHEMERAL_POOL_MAKE_TIMEOUT" envDefault:"30s" help:"how long making one machine may take"`
	Yield             time.Duration `env:"EPHEMERAL_POOL_YIELD" envDefault:"250ms" help:"how long refill and destruction stand back for claimed machines that are being started"`
	KeepWarm          time.Duration `env:"EPHEMERAL_POOL_KEEP_WARM" envDefault:"1m" help:"how often a ready machine is exercised where machines rest running, so that it stays in memory; 0: never"`

	// Autoscale moves the number of machines kept ready between MinReady and MaxReady; off unless it has a target.
	Autoscale autoscale.Config
}

// Validate says what is wrong with the configuration, all of it at once.
func (c Config) Validate() error {
	var errs []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	check(c.MinReady >= 0, "EPHEMERAL_POOL_MIN_READY is %d, must not be negative", c.MinReady)
	check(c.MaxReady >= c.MinReady, "EPHEMERAL_POOL_MAX_READY is %d, less than EPHEMERAL_POOL_MIN_READY (%d)", c.MaxReady, c.MinReady)
	check(c.MaxMachines >= 1, "EPHEMERAL_POOL_MAX_MACHINES is %d, must be at least 1", c.MaxMachines)
	check(c.MaxMachines >= c.MinReady, "EPHEMERAL_POOL_MAX_MACHINES is %d, less than EPHEMERAL_POOL_MIN_READY (%d)", c.MaxMachines, c.MinReady)
	check(c.RefillConcurrency >= 1, "EPHEMERAL_POOL_REFILL_CONCURRENCY is %d, must be at least 1", c.RefillConcurrency)
	check(c.MaxAge >= 0, "EPHEMERAL_POOL_MAX_AGE is %s, must not be negative", c.MaxAge)
	check(c.MakeTimeout > 0, "EPHEMERAL_POOL_MAKE_TIMEOUT is %s, must be positive", c.MakeTimeout)
	check(c.Yield >= 0, "EPHEMERAL_POOL_YIELD is %s, must not be negative", c.Yield)
	check(c.KeepWarm >= 0, "EPHEMERAL_POOL_KEEP_WARM is %s, must not be negative", c.KeepWarm)
	errs = append(errs, c.Autoscale.Validate())
	return errors.Join(errs...)
}

// What callers decide on with errors.Is.
var (
	// ErrClosed: the pool was closed.
	ErrClosed = errors.New("pool closed")
	// ErrCircuitOpen: making machines fails, and the pool waits before it tries again. The error is a *CircuitError.
	ErrCircuitOpen = errors.New("pool circuit open")
)

// CircuitError is what a claim gets that would have to wait for a machine while making machines fails.
type CircuitError struct {
	Reason error     // the last failure
	Until  time.Time // when the pool tries again
}

func (e *CircuitError) Error() string {
	return fmt.Sprintf("%v until %s: %v", ErrCircuitOpen, e.Until.UTC().Format(time.RFC3339), e.Reason)
}

// Unwrap gives ErrCircuitOpen and the reason.
func (e *CircuitError) Unwrap() []error { return []error{ErrCircuitOpen, e.Reason} }

// Clock is the time a pool goes by. AfterFunc calls f in a goroutine of its own; stop cancels it.
type Clock interface {
	Now() time.Time
	AfterFunc(d time.Duration, f func()) (stop func() bool)
}

type systemClock struct{}

func (systemClock) Now() time.Time { return time.Now() }

func (systemClock) AfterFunc(d time.Duration, f func()) func() bool { return time.AfterFunc(d, f).Stop }
