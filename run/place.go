package run

import (
	"context"
	"time"
)

var placeScript = loadLax("place")

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

// decodePlace reads the place that a script answered with, after its code; nil: there is none.
func decodePlace(r reply) (*Place, error) {
	position, err := r.int(1)
	if err != nil {
		return nil, err
	}
	wait, err := r.int(2)
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

// placeOf tells where a run stands; nil: it does not wait any more.
//
// Script place.lua.
func (s *Store) placeOf(ctx context.Context, org string, id ID) (*Place, error) {
	r, err := s.eval(ctx, placeScript, s.keys.closing(org, string(id)), string(id), org, s.micros(), s.cfg.Concurrency)
	if err != nil {
		return nil, err
	}
	if r.code() == "GONE" {
		return nil, nil
	}
	return decodePlace(r)
}
