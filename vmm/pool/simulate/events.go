package simulate

import (
	"time"

	"github.com/ephemeral-run/ephemeral/vmm/pool"
)

type kind uint8

const (
	arrives  kind = iota // a claim
	makes                // a make ends
	settles              // a claimed machine is up
	ends                 // a claimed machine is gone
	destroys             // a machine of the pool is gone
	givesUp              // a claim stops waiting
	wakes                // the policy asked to be asked again
)

// event is what happens at a time.
type event struct {
	at      time.Time
	number  uint64 // in order of push, so that equal times keep it
	late    bool   // after all others of its time: a claim that may not wait still gets a machine that takes no time
	kind    kind
	service time.Duration
	machine *machine
	claim   *claim
	make    pool.Make
	doomed  pool.Doomed[*machine]
}

func (e *event) before(f *event) bool {
	if c := e.at.Compare(f.at); c != 0 {
		return c < 0
	}
	if e.late != f.late {
		return f.late
	}
	return e.number < f.number
}

// events is a binary heap. container/heap would box each event; a simulation handles several millions a second.
type events struct {
	heap   []*event
	free   []*event
	pushed uint64
}

func (h *events) push(e event) {
	h.pushed++
	e.number = h.pushed
	var p *event
	if n := len(h.free); n > 0 {
		p, h.free = h.free[n-1], h.free[:n-1]
	} else {
		p = new(event)
	}
	*p = e
	h.heap = append(h.heap, p)
	i := len(h.heap) - 1
	for i > 0 {
		parent := (i - 1) / 2
		if !h.heap[i].before(h.heap[parent]) {
			return
		}
		h.heap[i], h.heap[parent] = h.heap[parent], h.heap[i]
		i = parent
	}
}

// pop takes out the first event. There must be one.
func (h *events) pop() event {
	first := h.heap[0]
	last := len(h.heap) - 1
	h.heap[0], h.heap[last] = h.heap[last], nil
	h.heap = h.heap[:last]
	for i := 0; ; {
		least := i
		for child := 2*i + 1; child <= 2*i+2 && child < last; child++ {
			if h.heap[child].before(h.heap[least]) {
				least = child
			}
		}
		if least == i {
			break
		}
		h.heap[i], h.heap[least] = h.heap[least], h.heap[i]
		i = least
	}
	e := *first
	*first = event{}
	h.free = append(h.free, first)
	return e
}
