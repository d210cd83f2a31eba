package pool

import (
	"fmt"
	"time"
)

// Stepper is a pool's policy by itself, for simulators: it starts nothing and has no clock. Its caller says what time it
// is, starts what Plan says, and tells when that has ended. It decides exactly as a Pool does. It is not safe for concurrent
// use, and times must not go back.
type Stepper[M Machine] struct {
	policy *policy[M]
}

// Waiting is a claim that found no machine ready.
type Waiting[M Machine] struct{ w *waiter[M] }

// Answered tells whether Take has something to give. Claims are answered in order of arrival.
func (w Waiting[M]) Answered() bool { return w.w.el == nil }

// Make is a make that a plan started.
type Make struct{ ticket ticket }

// Doomed is a machine that a plan wants destroyed.
type Doomed[M Machine] struct {
	Machine M
	slot    *slot[M]
}

// Steps is what is to be started now, and when to ask again; a zero Next: when something has happened.
type Steps[M Machine] struct {
	Makes    int
	Make     Make // goes with each of them
	Destroys []Doomed[M]
	Next     time.Time
}

// Counts is how many machines are in which state.
type Counts struct{ Ready, Leased, Making, Destroying, Waiting int }

// NewStepper is the policy of a pool that opens now.
func NewStepper[M Machine](cfg Config, now time.Time) (*Stepper[M], error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("open pool: %w", err)
	}
	return &Stepper[M]{newPolicy[M](cfg, now)}, nil
}

// Claim hands out a ready machine (ok), or a place in the line, or the error that Pool.Claim would give.
func (s *Stepper[M]) Claim(now time.Time) (m M, ok bool, w Waiting[M], err error) {
	slot, err := s.policy.claim(now)
	switch {
	case err != nil:
		return m, false, w, err
	case slot != nil:
		return slot.m, true, w, nil
	}
	return m, false, Waiting[M]{s.policy.wait(now)}, nil
}

// Take hands out the machine of a claim that was answered; not ok: the claim is back in line.
func (s *Stepper[M]) Take(w Waiting[M], now time.Time) (m M, ok bool, err error) {
	slot, err := s.policy.take(w.w, now)
	if slot == nil {
		return m, false, err
	}
	return slot.m, true, nil
}

// Cancel ends a claim that waited.
func (s *Stepper[M]) Cancel(w Waiting[M], now time.Time) { s.policy.cancel(w.w, now) }

// Settled is Pool.Settled.
func (s *Stepper[M]) Settled(m M) { s.policy.settled(m) }

// Released is Pool.Released.
func (s *Stepper[M]) Released(m M) { s.policy.released(m) }

// Plan is to be called after whatever happened, and at the time it named.
func (s *Stepper[M]) Plan(now time.Time) Steps[M] {
	pl := s.policy.plan(now)
	steps := Steps[M]{Makes: pl.makes, Make: Make{pl.ticket}, Next: pl.next}
	for _, slot := range pl.destroys {
		steps.Destroys = append(steps.Destroys, Doomed[M]{slot.m, slot})
	}
	return steps
}

// Made takes in the machine of a make that succeeded.
func (s *Stepper[M]) Made(mk Make, m M, now time.Time) { _, _, _ = s.policy.made(m, mk.ticket, now) }

// MakeFailed notes a make that failed.
func (s *Stepper[M]) MakeFailed(mk Make, now time.Time, reason error) {
	s.policy.makeFailed(mk.ticket, now, reason)
}

// Destroyed notes that a machine of Steps.Destroys is gone.
func (s *Stepper[M]) Destroyed(d Doomed[M]) { s.policy.destroyed(d.slot) }

// Stats is Pool.Stats.
func (s *Stepper[M]) Stats(now time.Time) Stats { return s.policy.stats(now) }

// Counts is the part of Stats that costs nothing.
func (s *Stepper[M]) Counts() Counts {
	p := s.policy
	return Counts{p.readyLen(), p.leased, p.making, len(p.retired) + p.destroying, p.waiters.Len()}
}

// Target is how many machines should be ready.
func (s *Stepper[M]) Target() int { return s.policy.target() }
