package run

import "time"

// Place is where a waiting run stands in the line of its organisation, and an estimate of how long it will wait: from how
// many runs the nodes take at once, how long those at work have been and how long runs took lately, and from the
// organisations that take turns. It is as good as the next runs are like the last ones.
type Place struct {
	Position int64    `json:"position,omitempty"`          // 1: the next of its organisation
	Wait     *float64 `json:"estimated_wait_ms,omitempty"` // from now on; nil: no run has ended yet to estimate from
}

// QueueFullError is an ErrQueueFull that may know when there will be room.
type QueueFullError struct {
	RetryAfter time.Duration // when this request will be let in; 0: not known
}

// Error is that of ErrQueueFull.
func (e *QueueFullError) Error() string { return ErrQueueFull.Error() }

// Unwrap gives ErrQueueFull.
func (e *QueueFullError) Unwrap() error { return ErrQueueFull }

func queueFull(r reply) error {
	wait, err := r.int(1)
	if err != nil {
		return err
	}
	return &QueueFullError{RetryAfter: max(0, time.Duration(wait)*time.Microsecond)}
}

// decodePlace reads the place that a script answered with, from the i-th value on; nil: there is none.
func decodePlace(r reply, i int) (*Place, error) {
	position, err := r.int(i)
	if err != nil {
		return nil, err
	}
	wait, err := r.int(i + 1)
	if err != nil {
		return nil, err
	}
	if position == 0 {
		return nil, nil
	}
	p := &Place{Position: position}
	if wait >= 0 {
		ms := float64(wait) / 1000
		p.Wait = &ms
	}
	return p, nil
}
