package node

import (
	"context"
	"errors"
	"sync"
)

// errFewer ends a take for which there is no slot any more.
var errFewer = errors.New("the node takes fewer runs")

// slots limits the runs at once; the limit may change at any time. Only one goroutine takes.
type slots struct {
	mu      sync.Mutex
	limit   int
	used    int
	changed chan struct{}           // closed and replaced whenever something changes
	taking  context.CancelCauseFunc // ends the take under way
}

func newSlots(limit int) *slots { return &slots{limit: limit, changed: make(chan struct{})} }

func (s *slots) wake() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// resize changes the limit. Runs at work go on; a take under way ends when there is no slot for what it would take.
func (s *slots) resize(limit int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.limit = limit
	if s.taking != nil && s.used > limit {
		s.taking(errFewer)
	}
	s.wake()
}

// acquire waits for a slot, and returns a context for the take, which ends with ctx or when the slot is gone. free gives the
// slot back; taken says that the take has ended.
func (s *slots) acquire(ctx context.Context) (take context.Context, taken, free func(), err error) {
	for {
		if ctx.Err() != nil {
			return nil, nil, nil, context.Cause(ctx)
		}
		s.mu.Lock()
		if s.used < s.limit {
			take, cancel := context.WithCancelCause(ctx)
			s.used++
			s.taking = cancel
			s.mu.Unlock()
			taken := func() {
				s.mu.Lock()
				s.taking = nil
				s.mu.Unlock()
				cancel(nil)
			}
			return take, taken, s.free, nil
		}
		changed := s.changed
		s.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, nil, nil, context.Cause(ctx)
		}
	}
}

func (s *slots) free() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.used--
	s.wake()
}

func (s *slots) now() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.limit
}
