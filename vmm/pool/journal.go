package pool

import (
	"fmt"
	"slices"
	"time"
)

// mostDecisions is how many decisions a pool remembers.
const mostDecisions = 32

// Decision is a change of mind that a pool remembers, for people.
type Decision struct {
	At     time.Time
	What   string // a few words
	Reason string // a sentence
}

// journal remembers the last decisions.
type journal struct {
	target    int
	decisions []Decision
	putOff    time.Time // when a make was last put off
}

func (j *journal) note(now time.Time, what, reason string) {
	if len(j.decisions) == mostDecisions {
		j.decisions = slices.Delete(j.decisions, 0, 1)
	}
	j.decisions = append(j.decisions, Decision{now, what, reason})
}

// moved notes another target.
func (j *journal) moved(now time.Time, target int, reason string) {
	j.note(now, fmt.Sprintf("target %d -> %d", j.target, target), reason)
	j.target = target
}

func (j *journal) opened(now time.Time, c *circuit) {
	j.note(now, "circuit opened", fmt.Sprintf("%v. The pool tries again in %s.", c.reason, c.until.Sub(now).Round(time.Millisecond)))
}

func (j *journal) closed(now time.Time, was, is CircuitState) {
	if was != CircuitClosed && is == CircuitClosed {
		j.note(now, "circuit closed", "A machine was made.")
	}
}

// refused notes the first of the makes that are put off for the same reason, and one a minute of those that follow.
func (j *journal) refused(now time.Time, last, reason error) {
	if last != nil && now.Sub(j.putOff) < time.Minute {
		return
	}
	j.putOff = now
	j.note(now, "make put off", reason.Error()+".")
}
