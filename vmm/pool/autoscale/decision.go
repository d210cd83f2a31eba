package autoscale

import (
	"fmt"
	"time"
)

// Decision is a target and what led to it.
type Decision struct {
	Target   int // machines to keep ready
	Previous int // the target before
	At       time.Time

	Rate           float64       // claims a second
	Refill         time.Duration // time to make a machine
	Mean, Variance float64       // of claims per refill time
	Needed         int           // ready machines that keep to the miss rate, by these
	Held           int           // the most that was needed within HoldDown
	HeldAt         time.Time
	HoldDown       time.Duration
	Idle           time.Duration // time without a claim, where that decided; else 0
	Saturated      bool          // machines are claimed faster than the makers can make them
	MissRate       float64
	Range          Range
}

// Reason is the decision as a sentence.
func (d Decision) Reason() string {
	if d.At.IsZero() {
		return ""
	}
	if d.Idle > 0 {
		return fmt.Sprintf("%s %d: no claim for %s.", d.verb(), d.Target, d.Idle.Round(time.Second))
	}
	why := fmt.Sprintf("%.3g claims/s and %s to make a machine are %.2g claims per refill (variance %.2g), so that %s at most %g%% of claims",
		d.Rate, d.Refill.Round(time.Millisecond), d.Mean, d.Variance, misses(d.Needed), d.MissRate*100)
	switch {
	case d.Needed > d.Range.Max:
		why += fmt.Sprintf(", and %d are allowed", d.Range.Max)
	case d.Target > d.Needed && d.Target > d.Range.Min:
		why += fmt.Sprintf(", but %d were needed %s ago and are held for %s", d.Held, d.At.Sub(d.HeldAt).Round(time.Second), d.HoldDown)
	case d.Needed < d.Range.Min:
		why += fmt.Sprintf(", and %d are the least", d.Range.Min)
	}
	if d.Saturated {
		why += fmt.Sprintf("; %d at once cannot be made as fast as they are claimed", d.Range.Makers)
	}
	return fmt.Sprintf("%s %d: %s.", d.verb(), d.Target, why)
}

func (d Decision) verb() string {
	switch {
	case d.Target > d.Previous:
		return fmt.Sprintf("Raised from %d to", d.Previous)
	case d.Target < d.Previous:
		return fmt.Sprintf("Lowered from %d to", d.Previous)
	}
	return "Kept at"
}

func misses(n int) string {
	if n == 1 {
		return "1 ready machine misses"
	}
	return fmt.Sprintf("%d ready machines miss", n)
}
