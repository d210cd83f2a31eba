package broker_test

import (
	"context"
	"fmt"
	"sync"

	"github.com/ephemeral-run/ephemeral/run"
)

// memoryLedger is a double of a run's hold, with the rules of the store: grants as much as is free, at most what is asked
// and at least the least; captures at most what was granted; repeats harmlessly.
type memoryLedger struct {
	mu      sync.Mutex
	amount  run.Micros
	charged run.Micros
	calls   map[string]*ledgerCall
	faults  []error // given by the next calls, in order, before they do anything
	asked   []run.Call
	broken  []string // rules that the broker broke
}

type ledgerCall struct {
	granted, captured run.Micros
	state             string // pending, captured, voided
}

func newLedger(amount run.Micros) *memoryLedger {
	return &memoryLedger{amount: amount, calls: map[string]*ledgerCall{}}
}

func (l *memoryLedger) fault() error {
	if len(l.faults) == 0 {
		return nil
	}
	err := l.faults[0]
	l.faults = l.faults[1:]
	return err
}

func (l *memoryLedger) pending() (sum run.Micros) {
	for _, c := range l.calls {
		if c.state == "pending" {
			sum += c.granted
		}
	}
	return sum
}

func (l *memoryLedger) Authorize(_ context.Context, c run.Call) (run.Micros, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.fault(); err != nil {
		return 0, err
	}
	l.asked = append(l.asked, c)
	if c.Min < 0 || c.Max < c.Min || c.Kind != run.KindModel && c.Kind != run.KindWeb || c.ID == "" {
		l.broken = append(l.broken, fmt.Sprintf("odd call %+v", c))
	}
	if old := l.calls[c.ID]; old != nil {
		return old.granted, nil
	}
	free := l.amount - l.charged - l.pending()
	if free < c.Min {
		return 0, run.ErrBudget
	}
	granted := min(free, c.Max)
	l.calls[c.ID] = &ledgerCall{granted: granted, state: "pending"}
	return granted, nil
}

func (l *memoryLedger) Capture(_ context.Context, id string, amount run.Micros) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.fault(); err != nil {
		return err
	}
	c := l.calls[id]
	switch {
	case c == nil:
		l.broken = append(l.broken, "captured an unknown call")
		return run.ErrNotFound
	case c.state == "captured" && c.captured == amount:
		return nil
	case c.state != "pending":
		l.broken = append(l.broken, "captured a call that is "+c.state)
		return run.ErrState
	case amount < 0 || amount > c.granted:
		l.broken = append(l.broken, fmt.Sprintf("captured %d of %d", amount, c.granted))
	}
	c.state, c.captured = "captured", amount
	l.charged += amount
	return nil
}

func (l *memoryLedger) Void(_ context.Context, id string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.fault(); err != nil {
		return err
	}
	c := l.calls[id]
	switch {
	case c == nil:
		l.broken = append(l.broken, "voided an unknown call")
		return run.ErrNotFound
	case c.state == "captured":
		l.broken = append(l.broken, "voided a captured call")
		return run.ErrState
	}
	c.state = "voided"
	return nil
}

// check returns what is wrong with the books once no call is in flight.
func (l *memoryLedger) check() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.broken) > 0 {
		return fmt.Errorf("rules broken: %q", l.broken)
	}
	var sum run.Micros
	for id, c := range l.calls {
		if c.state == "pending" {
			return fmt.Errorf("call %s was neither captured nor voided", id)
		}
		sum += c.captured
	}
	if sum != l.charged || l.charged > l.amount {
		return fmt.Errorf("captured %d in all, charged %d of %d", sum, l.charged, l.amount)
	}
	return nil
}

func (l *memoryLedger) total() run.Micros {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.charged
}
