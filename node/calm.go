package node

import (
	"context"
	"sync"
	"time"
)

// standBack is how long a run with a machine that is up waits, at the most, for those whose machines are about to be.
const standBack = 100 * time.Millisecond

// starts counts the runs that have got a machine and are not up. Its zero value is ready for use.
type starts struct {
	mu    sync.Mutex
	under int
	calm  chan struct{} // closed when there are none any more; nil while there are none
}

// begin counts one; end, which may be called again, takes it off.
func (s *starts) begin() (end func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.under++; s.under == 1 {
		s.calm = make(chan struct{})
	}
	return sync.OnceFunc(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.under--; s.under == 0 {
			close(s.calm)
			s.calm = nil
		}
	})
}

// wait returns when there are none, after standBack, or when ctx ends: in a burst, what is nearer to its start goes first.
func (s *starts) wait(ctx context.Context) {
	s.mu.Lock()
	calm := s.calm
	s.mu.Unlock()
	if calm == nil {
		return
	}
	limit := time.NewTimer(standBack)
	defer limit.Stop()
	select {
	case <-calm:
	case <-limit.C:
	case <-ctx.Done():
	}
}
