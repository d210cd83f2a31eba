package run

import (
	"fmt"
	"sync"
	"testing"
)

func TestAuthorizeCaptureVoid(t *testing.T) {
	f := newFixture(t)
	l := f.started(1000)
	ask := func(id string, low, high, want Micros) {
		t.Helper()
		got, err := f.Authorize(f.ctx, l, Call{ID: id, Kind: KindModel, Min: low, Max: high})
		f.must(err)
		f.same(got, want)
	}
	refuse := func(c Call, want error) {
		t.Helper()
		_, err := f.Authorize(f.ctx, l, c)
		f.want(err, want)
	}
	ask("a", 1, 600, 600)
	ask("a", 1, 600, 600) // again
	ask("b", 1, 600, 400) // as much as is free
	refuse(Call{ID: "c", Kind: KindModel, Min: 1, Max: 600}, ErrBudget)
	refuse(Call{ID: "a", Kind: KindWeb, Min: 1, Max: 600}, ErrState) // another kind
	f.must(f.Void(f.ctx, l, "b"))
	f.must(f.Void(f.ctx, l, "b")) // again
	f.must(f.Capture(f.ctx, l, "a", 100))
	f.must(f.Capture(f.ctx, l, "a", 100)) // again
	f.want(f.Capture(f.ctx, l, "a", 101), ErrState)
	f.want(f.Void(f.ctx, l, "a"), ErrState)
	f.want(f.Capture(f.ctx, l, "b", 1), ErrState)
	f.want(f.Capture(f.ctx, l, "never", 1), ErrNotFound)
	refuse(Call{ID: "a", Kind: KindModel, Min: 1, Max: 600}, ErrState) // over
	ask("d", 900, 5000, 900)
	f.want(f.Capture(f.ctx, l, "d", 901), ErrRange) // never above the grant
	f.same(f.get(l.Run).Money, Money{Reserved: 1000, Charged: 100, Model: 100})
	f.must(f.Capture(f.ctx, l, "d", 900))
	ask("free", 0, 10, 0)
	refuse(Call{ID: "e", Kind: KindCompute, Min: 1, Max: 1}, ErrBudget)
	f.balanced()
	done, err := f.Settle(f.ctx, l, Outcome{State: BudgetExhausted})
	f.must(err)
	f.same(done.Money, Money{Reserved: 1000, Charged: 1000, Model: 1000})
	f.must(f.Capture(f.ctx, l, "a", 100)) // again, after the end
	f.want(f.Capture(f.ctx, l, "free", 0), ErrLeaseLost)
	f.balanced()
}

func TestAuthorizeLeavesWhatItCan(t *testing.T) {
	f := newFixture(t)
	l := f.started(1000)
	for i, tt := range []struct{ low, high, leave, want Micros }{
		{1, 5000, 400, 600},  // leaves it
		{1, 100, 400, 100},   // the most is less
		{700, 900, 400, 700}, // the least goes first
		{1, 5000, 5000, 1},   // as little as may be
		{1000, 1000, 1, 1000},
	} {
		id := fmt.Sprint(i)
		got, err := f.Authorize(f.ctx, l, Call{ID: id, Kind: KindModel, Min: tt.low, Max: tt.high, Leave: tt.leave})
		f.must(err)
		f.same(got, tt.want)
		f.must(f.Void(f.ctx, l, id))
	}
	_, err := f.Authorize(f.ctx, l, Call{ID: "x", Kind: KindModel, Min: 1, Max: 1, Leave: -1})
	f.want(err, ErrRange)
}

func TestCallsThatCannotBe(t *testing.T) {
	f := newFixture(t)
	l := f.started(1000)
	for name, c := range map[string]Call{
		"no kind":          {ID: "a", Max: 1},
		"unknown kind":     {ID: "a", Kind: "gift", Max: 1},
		"a field's name":   {ID: "a", Kind: "charged", Max: 1},
		"no id":            {Kind: KindWeb, Max: 1},
		"id with a space":  {ID: "a b", Kind: KindWeb, Max: 1},
		"negative minimum": {ID: "a", Kind: KindWeb, Min: -1, Max: 1},
		"minimum above":    {ID: "a", Kind: KindWeb, Min: 2, Max: 1},
		"beyond exact":     {ID: "a", Kind: KindWeb, Max: maxMicros + 1},
	} {
		if _, err := f.Authorize(f.ctx, l, c); err == nil {
			t.Errorf("%s: granted", name)
		} else {
			f.want(err, ErrRange)
		}
	}
	f.want(f.Capture(f.ctx, l, "a", -1), ErrRange)
	f.want(f.Capture(f.ctx, l, "a", maxMicros+1), ErrRange)
	f.want(f.Void(f.ctx, l, "a\n"), ErrNotFound)
	f.balanced()
}

// 200 calls at once, each of which would fit alone, never charge more than the hold.
func TestHardCap(t *testing.T) {
	f := newFixture(t)
	l := f.started(10_000)
	var wg sync.WaitGroup
	for i := range 200 {
		wg.Go(func() {
			id := fmt.Sprintf("model-%d", i)
			granted, err := f.Authorize(f.ctx, l, Call{ID: id, Kind: KindModel, Min: 300, Max: 900})
			if err != nil {
				return
			}
			if err := f.Capture(f.ctx, l, id, granted); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	m := f.get(l.Run).Money
	if m.Charged > 10_000 || m.Charged < 9_700 {
		t.Errorf("charged %v of a hold of 10000", m.Charged)
	}
	f.balanced()
}

func TestLargestAmounts(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, maxMicros)
	_, err := f.Credit(f.ctx, "o", 1, "one more")
	f.want(err, ErrRange)
	f.admit("o", maxMicros)
	l := f.take()
	f.begin(l)
	granted, err := f.Authorize(f.ctx, l, Call{ID: "a", Kind: KindModel, Min: maxMicros, Max: maxMicros})
	f.must(err)
	f.same(granted, maxMicros)
	f.must(f.Capture(f.ctx, l, "a", maxMicros-1))
	f.balanced()
	r, err := f.Settle(f.ctx, l, Outcome{State: Succeeded})
	f.must(err)
	f.same(r.Money, Money{Reserved: maxMicros, Charged: maxMicros - 1, Released: 1, Model: maxMicros - 1})
	f.same(f.account("o"), Account{Org: "o", Balance: 1, Available: 1, Deposits: maxMicros, Charged: maxMicros - 1})
	f.balanced()
}
