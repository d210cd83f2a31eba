package node

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ephemeral-run/ephemeral/run"
)

// How compute is paid: in slices, each authorised before it begins and captured when it begins. What a run costs is
// therefore the number of slices it has begun, the first when it is authorised, at the claim of its machine; nothing where
// its worker never started.
const (
	// slice is the length of one paid slice of compute.
	slice = time.Second
	// lead is how long before the end of a paid slice the next one is authorised.
	lead = 600 * time.Millisecond
	// margin is how long before the first unpaid slice a machine is stopped, so that it is gone when the slice begins.
	margin = 300 * time.Millisecond
	// ahead is for how long compute is authorised before its use, so that a store that restarts or hangs ends no run. Of a
	// small hold it takes less: what is set aside for compute is missing for model calls.
	ahead = 10 * time.Second
	// early is how many slices of those are authorised with the first, so that this holds from a run's first moment on; the
	// others follow with the second slice, which most runs do not come to.
	early = 2
	// aheadShare is the part of a hold that may be set aside ahead: one in so many.
	aheadShare = 8
	// captureTime is how long a charge may take before it is put off: the next slice must be authorised in time.
	captureTime = (slice - lead) / 2
	// kept is for how long the worst case of other calls leaves compute paid: a model call in flight sets aside far more
	// than it will cost, and must not end the machine that waits for it.
	kept = 60 * time.Second
)

// ledger pays for the calls of one run; see run.Store for the three methods.
type ledger struct {
	store *run.Store
	lease *run.Lease
	price run.Micros   // of one slice of compute
	spent *atomic.Bool // the hold pays for no more than the grace; see meter
}

// Authorize leaves the price of kept free, at most half of the hold, unless the call's least needs it.
func (l ledger) Authorize(ctx context.Context, c run.Call) (run.Micros, error) {
	if c.Kind != run.KindCompute {
		if l.spent.Load() {
			return 0, fmt.Errorf("only the time to write results is left: %w", run.ErrBudget)
		}
		c.Leave = min(l.price*run.Micros(kept/slice), l.lease.Reserved/2)
	}
	return l.store.Authorize(ctx, l.lease, c)
}

func (l ledger) Capture(ctx context.Context, callID string, amount run.Micros) error {
	return l.store.Capture(ctx, l.lease, callID, amount)
}

func (l ledger) Void(ctx context.Context, callID string) error {
	return l.store.Void(ctx, l.lease, callID)
}

// payer is what the meter needs of a ledger.
type payer interface {
	Authorize(ctx context.Context, c run.Call) (run.Micros, error)
	Capture(ctx context.Context, callID string, amount run.Micros) error
	Void(ctx context.Context, callID string) error
}

// meter pays for one machine, slice by slice, ahead of use.
type meter struct {
	ledger payer
	price  run.Micros // of one slice
	ahead  int        // slices authorised beyond the next one, where the hold allows it
	paid   int        // slices begun, all of them authorised

	// When the hold pays for no more than grace slices beyond the one under way, it is spent: no other call is made, and the
	// worker has that long to write its results. A call in flight that costs less than it set aside may undo it.
	grace int
	spent atomic.Bool

	// refused is called when no slice is to be had beyond the next one, and when the next one is not: before the machine is
	// stopped, and perhaps twice. nil: nothing is called.
	refused func(error)

	authorised int // the last slice that is authorised

	mu         sync.Mutex
	due        bool  // charge was called
	uncaptured []int // begun before that, or while the store was away
}

// newMeter makes the meter of a run whose hold is reserved. The grace is cut to whole slices, and to those that are set aside
// ahead.
func newMeter(l payer, price, reserved run.Micros, grace time.Duration) *meter {
	m := &meter{ledger: l, price: price}
	if price > 0 {
		m.ahead = int(min(run.Micros(ahead/slice), reserved/aheadShare/price))
	}
	m.grace = min(int(grace/slice), m.ahead)
	return m
}

func sliceID(n int) string { return fmt.Sprintf("compute-%d", n) }

func (m *meter) call(n int) run.Call {
	return run.Call{ID: sliceID(n), Kind: run.KindCompute, Min: m.price, Max: m.price}
}

// begin sets the first slice aside, and those that are early, which it is no matter not to get. It returns run.ErrBudget when
// the hold cannot pay the first.
func (m *meter) begin(ctx context.Context) error {
	var asking sync.WaitGroup
	had := make([]bool, min(early, m.ahead))
	for i := range had {
		asking.Go(func() {
			_, err := m.ledger.Authorize(ctx, m.call(i+2))
			had[i] = err == nil
		})
	}
	_, err := m.ledger.Authorize(ctx, m.call(1))
	asking.Wait()
	if err != nil {
		return fmt.Errorf("authorise the first compute slice: %w", err)
	}
	m.paid, m.authorised, m.uncaptured = 1, 1, []int{1}
	for m.authorised <= len(had) && had[m.authorised-1] {
		m.authorised++
	}
	return nil
}

// charge charges the slices begun so far, and from now on each as it begins: the worker starts. Before that nothing is,
// so that a run which cannot be started costs nothing.
func (m *meter) charge(ctx context.Context) error {
	m.mu.Lock()
	m.due = true
	m.mu.Unlock()
	return m.captureDue(ctx)
}

// capture charges a slice that begins, and those before it that could not be. While the store is away the charge is
// remembered for the next slice and for finish: the slice is authorised, so the money is there.
func (m *meter) capture(ctx context.Context, n int) error {
	m.mu.Lock()
	m.uncaptured = append(m.uncaptured, n)
	m.mu.Unlock()
	return m.captureDue(ctx)
}

func (m *meter) captureDue(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), captureTime)
	defer cancel()
	if err := m.finish(ctx); !errors.Is(err, run.ErrUnavailable) {
		return err
	}
	return nil
}

// finish charges what capture could not. It must have returned nil before the run is settled. Slices of a run whose worker
// did not start are left to be released.
func (m *meter) finish(ctx context.Context) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.due {
		return nil
	}
	for len(m.uncaptured) > 0 {
		n := m.uncaptured[0]
		if err := m.ledger.Capture(ctx, sliceID(n), m.price); err != nil {
			return fmt.Errorf("capture compute slice %d: %w", n, err)
		}
		m.uncaptured = m.uncaptured[1:]
	}
	return nil
}

// keep pays on from start, when the first slice began, until ctx ends (nil) or no further slice can be paid: then it
// returns the reason, early enough for the machine to be destroyed within what is paid.
func (m *meter) keep(ctx context.Context, start time.Time) error {
	defer m.giveBack(ctx)
	m.fillEarly(ctx, start.Add(slice-lead))
	for {
		end := start.Add(time.Duration(m.paid) * slice)
		if !sleepUntil(ctx, end.Add(-lead)) {
			return nil
		}
		if err := m.fill(ctx, end.Add(-margin)); err != nil {
			if m.refused != nil {
				m.refused(err)
			}
			if sleepUntil(ctx, end.Add(-margin)) {
				return err
			}
			return nil
		}
		if !sleepUntil(ctx, end) {
			return nil
		}
		m.paid++
		if err := m.capture(ctx, m.paid); err != nil {
			return err
		}
	}
}

// fillEarly asks for the early slices that begin did not get, until the deadline. It is no matter when they are not to be had:
// they are asked for again in time.
func (m *meter) fillEarly(ctx context.Context, deadline time.Time) {
	for m.authorised < m.paid+min(early, m.ahead) {
		if err := m.authorize(ctx, m.authorised+1, deadline); err != nil {
			return
		}
		m.authorised++
	}
}

// fill authorises the next slice and those ahead of it, until the deadline. It fails only when the next one cannot be had:
// the others are asked for again before the slice after it.
func (m *meter) fill(ctx context.Context, deadline time.Time) error {
	for m.authorised < m.paid+1+m.ahead {
		err := m.authorize(ctx, m.authorised+1, deadline)
		switch {
		case err == nil:
			m.authorised++
		case m.authorised > m.paid && errors.Is(err, run.ErrBudget):
			m.spent.Store(m.authorised-m.paid <= m.grace)
			if m.authorised == m.paid+1 && m.refused != nil {
				m.refused(err)
			}
			return nil
		case m.authorised > m.paid && errors.Is(err, run.ErrUnavailable):
			return nil
		default:
			m.spent.Store(errors.Is(err, run.ErrBudget))
			return err
		}
	}
	m.spent.Store(false)
	return nil
}

// authorize asks for one slice until the deadline, again while the store is away.
func (m *meter) authorize(ctx context.Context, n int, deadline time.Time) error {
	asking, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	for {
		_, err := m.ledger.Authorize(asking, m.call(n))
		if err == nil {
			return nil
		}
		if !errors.Is(err, run.ErrUnavailable) || !sleepUntil(asking, time.Now().Add(20*time.Millisecond)) {
			return fmt.Errorf("authorise compute slice %d: %w", n, err)
		}
	}
}

// giveBack voids the slices that never began. Settlement would release them as well: this only keeps the hold exact. One
// that was asked for while ctx ended may be authorised without that anybody heard of it.
func (m *meter) giveBack(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), captureTime)
	defer cancel()
	for n := m.paid + 1; n <= m.authorised+1; n++ {
		if err := m.ledger.Void(ctx, sliceID(n)); err != nil && !errors.Is(err, run.ErrNotFound) {
			return
		}
	}
}

// sleepUntil waits for t and tells whether ctx still stands.
func sleepUntil(ctx context.Context, t time.Time) bool {
	timer := time.NewTimer(time.Until(t))
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return ctx.Err() == nil
	}
}
