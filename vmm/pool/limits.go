package pool

import (
	"fmt"
	"slices"
	"sync"
)

// Capacity is what pools share. A limit of 0 is none.
type Capacity struct {
	Machines  int // alive at once, in whatever state
	MemoryMiB int // of these
	Makes     int // at once
}

// Limits are shared by the pools of one node. A claim that waits goes before a machine made ahead of need: while it does,
// other pools refill nothing, and give up ready machines if that is what it takes. Limits are safe for concurrent use.
type Limits struct {
	mu     sync.Mutex
	most   Capacity
	used   Capacity
	shares []*share
}

// NewLimits opens limits.
func NewLimits(most Capacity) (*Limits, error) {
	if most.Machines < 0 || most.MemoryMiB < 0 || most.Makes < 0 {
		return nil, fmt.Errorf("limits of pools: %+v: must not be negative", most)
	}
	return &Limits{most: most}, nil
}

// Used is what the pools use now.
func (l *Limits) Used() Capacity {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.used
}

// share is what one pool has of the limits. Its methods do nothing on nil. They are called under the lock of the pool's
// policy, which is always taken before that of the limits; wake only sends on a channel.
type share struct {
	limits   *Limits
	memory   int // MiB of a machine
	wake     func()
	doomed   int  // machines on their way out
	starving int  // makes that claims wait for and that do not fit
	refused  bool // a make did not fit, or had to stand back: wake it when something changes
}

func (l *Limits) join(memoryMiB int, wake func()) (*share, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case memoryMiB < 0:
		return nil, fmt.Errorf("a machine of %d MiB", memoryMiB)
	case l.most.MemoryMiB > 0 && memoryMiB > l.most.MemoryMiB:
		return nil, fmt.Errorf("a machine of %d MiB does not fit into %d MiB", memoryMiB, l.most.MemoryMiB)
	}
	s := &share{limits: l, memory: memoryMiB, wake: wake}
	l.shares = append(l.shares, s)
	return s, nil
}

// leave ends a share. Machines in use still count until they are free.
func (s *share) leave() {
	if s == nil {
		return
	}
	s.starve(0)
	s.limits.mu.Lock()
	defer s.limits.mu.Unlock()
	s.limits.shares = slices.DeleteFunc(s.limits.shares, func(o *share) bool { return o == s })
}

// room is how many more machines of this size fit, given what is on its way out.
func (l *Limits) room(memory int, leaving Capacity) int {
	n := 1 << 30
	if l.most.Machines > 0 {
		n = min(n, l.most.Machines-l.used.Machines+leaving.Machines)
	}
	if l.most.MemoryMiB > 0 && memory > 0 {
		n = min(n, (l.most.MemoryMiB-l.used.MemoryMiB+leaving.MemoryMiB)/memory)
	}
	return max(n, 0)
}

// take grants as many of want makes as fit; claims is how many of these claims wait for.
func (s *share) take(want, claims int) int {
	if s == nil {
		return want
	}
	l := s.limits
	l.mu.Lock()
	fit := l.room(s.memory, Capacity{})
	makes := fit
	if l.most.Makes > 0 {
		makes = min(makes, max(0, l.most.Makes-l.used.Makes))
	}
	n := min(want, makes)
	if l.othersStarve(s) {
		n = min(n, claims)
	}
	l.used.Machines += n
	l.used.MemoryMiB += n * s.memory
	l.used.Makes += n
	s.refused = n < want
	l.mu.Unlock()
	s.starve(max(0, claims-fit))
	return n
}

// starve notes how many makes claims wait for and do not fit. Others then give room or, afterwards, take it again.
func (s *share) starve(n int) {
	if s == nil {
		return
	}
	s.limits.mu.Lock()
	defer s.limits.mu.Unlock()
	was := s.starving
	s.starving = n
	if n > was || n == 0 && was > 0 {
		for _, o := range s.limits.shares {
			if o != s {
				o.wake()
			}
		}
	}
}

func (l *Limits) othersStarve(s *share) bool {
	return slices.ContainsFunc(l.shares, func(o *share) bool { return o != s && o.starving > 0 })
}

// makeEnded gives back what a make takes beside its machine.
func (s *share) makeEnded() {
	if s == nil {
		return
	}
	s.limits.mu.Lock()
	defer s.limits.mu.Unlock()
	s.limits.used.Makes--
	s.limits.changed()
}

// free gives back what a machine takes.
func (s *share) free() {
	if s == nil {
		return
	}
	s.limits.mu.Lock()
	defer s.limits.mu.Unlock()
	s.limits.used.Machines--
	s.limits.used.MemoryMiB -= s.memory
	s.limits.changed()
}

// changed wakes the pools that were refused something.
func (l *Limits) changed() {
	for _, s := range l.shares {
		if s.refused {
			s.wake()
		}
	}
}

// doom notes that a machine is to be destroyed, reprieve that it is no more among these.
func (s *share) doom() { s.addDoomed(1) }

func (s *share) reprieve() { s.addDoomed(-1) }

func (s *share) addDoomed(n int) {
	if s == nil {
		return
	}
	s.limits.mu.Lock()
	defer s.limits.mu.Unlock()
	s.doomed += n
}

// mustGive tells whether a claim waits for a machine of another pool that only fits when this one gives up a ready one.
func (s *share) mustGive() bool {
	if s == nil {
		return false
	}
	l := s.limits
	l.mu.Lock()
	defer l.mu.Unlock()
	var leaving Capacity
	for _, o := range l.shares {
		leaving.Machines += o.doomed
		leaving.MemoryMiB += o.doomed * o.memory
	}
	return slices.ContainsFunc(l.shares, func(o *share) bool {
		return o != s && o.starving > 0 && l.room(o.memory, leaving) < o.starving
	})
}

// short tells whether no further machine of this pool fits.
func (s *share) short() bool {
	if s == nil {
		return false
	}
	s.limits.mu.Lock()
	defer s.limits.mu.Unlock()
	return s.limits.room(s.memory, Capacity{}) == 0
}
