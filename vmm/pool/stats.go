package pool

import (
	"slices"
	"time"
)

// Stats is what a pool looks like at one moment.
type Stats struct {
	Ready, Leased, Making int
	Outdated              int    // of the ready ones, those of an earlier template
	Warming               int    // ready, but being exercised
	Generation            int    // how often the template was swapped
	Destroying            int    // being destroyed, or waiting for it
	Waiting               int    // claims without a machine
	Target                int    // machines that should be ready
	Reason                string // of the target, as a sentence

	OldestReady time.Duration // how long the oldest ready machine has waited in the pool
	LongestWait time.Duration // how long the first of the waiting claims has waited

	Circuit       CircuitState
	CircuitReason string    // the last failure; empty after recovery
	CircuitUntil  time.Time // when the next make may start; zero: now
	Admission     string    // why admission refused the last make; empty when it did not

	Decisions []Decision // the last ones, oldest first

	Totals
}

// Totals count since the pool was made.
type Totals struct {
	Claims       int64         // claims that got a machine
	Hits         int64         // of these, without waiting
	Wait         time.Duration // the waits of all claims that got a machine, summed
	Cancelled    int64         // claims that gave up
	Refused      int64         // claims that ended because the circuit was open or the pool closed
	Made         int64         // machines made
	MakeFailures int64         // makes that failed, timed out or gave a dead machine
	Died         int64         // machines that ended while ready
	Expired      int64         // machines retired because of their age
	Surplus      int64         // machines retired because there were too many, or because their replacement was there
	Destroyed    int64         // machines the pool destroyed
}

// reason is why the target is what it is.
func (p *policy[M]) reason() string {
	switch {
	case p.closed:
		return "The pool is closed."
	case p.scaler != nil:
		return p.decision.Reason()
	}
	return "The least that is kept ready; the pool does not scale itself."
}

func (p *policy[M]) stats(now time.Time) Stats {
	s := Stats{
		Ready: p.readyLen(), Outdated: p.outdated.Len(), Warming: p.warming, Generation: p.generation,
		Leased: p.leased, Making: p.making, Destroying: len(p.retired) + p.destroying,
		Waiting: p.waiters.Len(), Target: p.target(),
		Circuit: p.circuit.state, Totals: p.totals,
	}
	s.Reason = p.reason()
	s.Decisions = slices.Clone(p.journal.decisions)
	if last := p.last(); last != nil {
		s.OldestReady = now.Sub(last.madeAt)
	}
	if el := p.waiters.Front(); el != nil {
		s.LongestWait = now.Sub(el.Value.(*waiter[M]).since)
	}
	if p.circuit.reason != nil {
		s.CircuitReason = p.circuit.reason.Error()
	}
	if now.Before(p.circuit.until) {
		s.CircuitUntil = p.circuit.until
	}
	if p.refused != nil {
		s.Admission = p.refused.Error()
	}
	return s
}
