package node

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/run"
)

// hold is an in-memory ledger: what a run's hold in the store does, for tests of the meter alone.
type hold struct {
	mu       sync.Mutex
	amount   run.Micros
	charged  run.Micros
	pending  map[string]run.Micros
	away     bool // the store does not answer
	hung     bool // the store keeps whoever asks waiting
	captures []string
}

func (h *hold) Authorize(ctx context.Context, c run.Call) (run.Micros, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.hung {
		<-ctx.Done()
		return 0, run.ErrUnavailable
	}
	if h.away {
		return 0, run.ErrUnavailable
	}
	free := h.amount - h.charged
	for _, p := range h.pending {
		free -= p
	}
	if free < c.Min {
		return 0, run.ErrBudget
	}
	h.pending[c.ID] = min(free, c.Max)
	return h.pending[c.ID], nil
}

func (h *hold) Capture(_ context.Context, id string, amount run.Micros) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.away {
		return run.ErrUnavailable
	}
	if amount > h.pending[id] {
		return errors.New("captured more than authorised")
	}
	delete(h.pending, id)
	h.charged += amount
	h.captures = append(h.captures, id)
	return nil
}

func (h *hold) Void(_ context.Context, id string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.pending, id)
	return nil
}

func (h *hold) set(away bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.away = away
}

func newHold(amount run.Micros) *hold { return &hold{amount: amount, pending: map[string]run.Micros{}} }

func TestMeterStopsBeforeTheFirstUnpaidSlice(t *testing.T) {
	h := newHold(500) // pays for two slices of 200
	m := newMeter(h, 200, h.amount, 0)
	if err := m.begin(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := m.charge(t.Context()); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	err := m.keep(t.Context(), start)
	if !errors.Is(err, run.ErrBudget) {
		t.Fatalf("keep returned %v, want ErrBudget", err)
	}
	if got, limit := time.Since(start), 2*slice; got >= limit {
		t.Errorf("stopped %s after the start, which is not before the first unpaid slice at %s", got, limit)
	}
	if h.charged != 400 || len(h.pending) != 0 {
		t.Errorf("charged %d with %d pending, want 400 and none", h.charged, len(h.pending))
	}
}

func TestMeterRefusesWhenTheFirstSliceCannotBePaid(t *testing.T) {
	h := newHold(199)
	m := newMeter(h, 200, h.amount, 0)
	if err := m.begin(t.Context()); !errors.Is(err, run.ErrBudget) {
		t.Fatalf("begin returned %v, want ErrBudget", err)
	}
	if h.charged != 0 {
		t.Errorf("charged %d for nothing", h.charged)
	}
}

func TestMeterGivesBackTheSliceThatNeverBegan(t *testing.T) {
	h := newHold(10_000)
	m := newMeter(h, 200, h.amount, 0)
	if err := m.begin(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := m.charge(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(slice-lead/2, cancel) // the second slice is authorised, and has not begun
	if err := m.keep(ctx, time.Now()); err != nil {
		t.Fatal(err)
	}
	if h.charged != 200 || len(h.pending) != 0 {
		t.Errorf("charged %d with %d pending, want 200 and none", h.charged, len(h.pending))
	}
}

func TestMeterChargesLaterWhatItCouldNotWhileTheStoreWasAway(t *testing.T) {
	h := newHold(10_000)
	m := newMeter(h, 200, h.amount, 0)
	if err := m.begin(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := m.charge(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(slice-lead/2, func() { h.set(true) }) // authorised, cannot be captured
	time.AfterFunc(slice+lead/2, cancel)
	if err := m.keep(ctx, time.Now()); err != nil {
		t.Fatal(err)
	}
	if err := m.finish(t.Context()); !errors.Is(err, run.ErrUnavailable) {
		t.Fatalf("finish returned %v with the store away, want ErrUnavailable", err)
	}
	h.set(false)
	for range 2 { // twice: finish may be repeated
		if err := m.finish(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if h.charged != 400 {
		t.Errorf("charged %d, want 400", h.charged)
	}
}

func TestMeterOutlastsAnAbsenceOfTheStore(t *testing.T) {
	h := newHold(40_000)
	m := newMeter(h, 200, h.amount, 0)
	if err := m.begin(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := m.charge(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(slice, func() { h.set(true) })
	time.AfterFunc(4*slice+slice/2, cancel)
	if err := m.keep(ctx, time.Now()); err != nil {
		t.Fatalf("a store that was away for %s ended the run: %v", 3*slice, err)
	}
	h.set(false)
	if err := m.finish(t.Context()); err != nil {
		t.Fatal(err)
	}
	if h.charged != 5*200 {
		t.Errorf("charged %d for 4.5 s, want 1000", h.charged)
	}
}

// TestMeterOutlastsAnAbsenceFromTheFirstMomentOn: once begin has returned the store may be away.
func TestMeterOutlastsAnAbsenceFromTheFirstMomentOn(t *testing.T) {
	h := newHold(40_000)
	m := newMeter(h, 200, h.amount, 0)
	if err := m.begin(t.Context()); err != nil {
		t.Fatal(err)
	}
	h.set(true)
	ctx, cancel := context.WithTimeout(t.Context(), early*slice+slice-lead/2)
	defer cancel()
	if err := m.keep(ctx, time.Now()); err != nil {
		t.Errorf("a store that was away from the first moment on ended the run: %v", err)
	}
}

func TestMeterSetsLittleAsideAhead(t *testing.T) {
	for _, c := range []struct {
		reserved run.Micros
		want     int
	}{{500, 0}, {3_200, 2}, {40_000, 10}, {1_000_000, 10}} {
		if got := newMeter(nil, 200, c.reserved, 0).ahead; got != c.want {
			t.Errorf("of a hold of %d: %d slices ahead, want %d", c.reserved, got, c.want)
		}
	}
}

func TestMeterStopsBeforeTheFirstUnpaidSliceWhenTheStoreHangs(t *testing.T) {
	h := newHold(1_000)
	m := newMeter(h, 200, h.amount, 0)
	if err := m.begin(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := m.charge(t.Context()); err != nil {
		t.Fatal(err)
	}
	h.mu.Lock()
	h.hung = true
	h.mu.Unlock()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	start := time.Now()
	err := m.keep(ctx, start)
	if !errors.Is(err, run.ErrUnavailable) {
		t.Errorf("keep returned %v, want ErrUnavailable", err)
	}
	if got := time.Since(start); got >= slice {
		t.Errorf("stopped %s after the start, which is not before the first unpaid slice at %s", got, slice)
	}
}

// TestMeterChargesNothingBeforeTheWorkerStarts: what was begun for a run that could not be started is not charged; for one
// that starts late it is.
func TestMeterChargesNothingBeforeTheWorkerStarts(t *testing.T) {
	for _, starts := range []bool{false, true} {
		h := newHold(10_000)
		m := newMeter(h, 200, h.amount, 0)
		if err := m.begin(t.Context()); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), slice+200*time.Millisecond)
		defer cancel()
		if err := m.keep(ctx, time.Now()); err != nil {
			t.Fatal(err)
		}
		want := run.Micros(0)
		if starts {
			want = 400
			if err := m.charge(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if err := m.finish(t.Context()); err != nil {
			t.Fatal(err)
		}
		if h.charged != want {
			t.Errorf("worker started %v: charged %d, want %d", starts, h.charged, want)
		}
	}
}

// When the hold pays for no more than the grace, no other call is made; a call that gives back what it had set aside
// undoes that.
func TestMeterKeepsTheGraceForResults(t *testing.T) {
	h := newHold(2000) // ten slices
	m := newMeter(h, 200, 8000, 2*time.Second)
	calls := ledger{price: 200, spent: &m.spent}
	h.pending["model"] = 1000
	if err := m.begin(t.Context()); err != nil {
		t.Fatal(err)
	}
	spent := func(paid int) bool {
		t.Helper()
		m.paid = paid
		if err := m.fill(t.Context(), time.Now().Add(time.Second)); err != nil {
			t.Fatal(err)
		}
		return m.spent.Load()
	}
	for paid, want := range []bool{1: false, 2: false, 3: true, 4: true} {
		if paid > 0 && spent(paid) != want {
			t.Errorf("%d of 5 slices begun: spent is %t", paid, !want)
		}
	}
	if _, err := calls.Authorize(t.Context(), run.Call{ID: "next", Kind: run.KindModel}); !errors.Is(err, run.ErrBudget) {
		t.Errorf("a call of a spent hold: %v", err)
	}
	delete(h.pending, "model") // it cost nothing
	if spent(4) {
		t.Error("spent, with five more slices")
	}
}

// TestMeterTellsBeforeTheMoneyEnds: whoever has to hand something in hears of the end while there is paid time left.
func TestMeterTellsBeforeTheMoneyEnds(t *testing.T) {
	h := newHold(700) // pays for three slices of 200
	m := newMeter(h, 200, 8*400, 0)
	told := make(chan time.Time, 8)
	m.refused = func(err error) {
		if !errors.Is(err, run.ErrBudget) {
			t.Error(err)
		}
		told <- time.Now()
	}
	if err := m.begin(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := m.keep(t.Context(), time.Now()); !errors.Is(err, run.ErrBudget) {
		t.Fatal(err)
	}
	end := time.Now()
	if first := <-told; end.Sub(first) < slice {
		t.Errorf("told %v before the end, want a slice at least", end.Sub(first))
	}
}
