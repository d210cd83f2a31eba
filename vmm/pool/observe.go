package pool

import "time"

// Observer is told what happens in a pool, for metrics. Its methods are called by many goroutines, outside of the pool's
// lock, and must return at once.
type Observer interface {
	// Claimed: a claim got a machine after wait, with ready true when it found one. age is how long ago that was made.
	Claimed(wait, age time.Duration, ready bool)
	// Made: a make has ended, well or with an error.
	Made(took time.Duration, err error)
}

type deaf struct{}

func (deaf) Claimed(time.Duration, time.Duration, bool) {}
func (deaf) Made(time.Duration, error)                  {}
