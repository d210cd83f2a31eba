package run

import (
	"testing"
	"time"
)

// limitedKey is a member's key with limits.
func (f *fixture) limitedKey(org string, l Limits) string {
	f.t.Helper()
	k, _, err := f.CreateKey(f.ctx, org, "k", Member)
	f.must(err)
	f.must(f.LimitKey(f.ctx, k.ID, l))
	got, err := f.KeyLimits(f.ctx, k.ID)
	f.must(err)
	f.same(got, l)
	return k.ID
}

func (f *fixture) admitWith(org, key string) ID {
	f.t.Helper()
	f.clock.advance(time.Millisecond)
	r, _, err := f.Admit(f.ctx, Admission{Org: org, Key: key, Spec: Spec{Command: "true", MaxCostMicros: 1}})
	f.must(err)
	return r.ID
}

func (f *fixture) takesNothing() {
	f.t.Helper()
	l, err := f.tryTake(f.ctx, "n1")
	f.must(err)
	if l != nil {
		f.t.Fatalf("took %s", l.Run)
	}
}

// Runs of a key at its limit wait, however many there are, and those of other keys pass them.
func TestKeyConcurrency(t *testing.T) {
	f := newFixture(t, func(c *Config) { c.Concurrency = 1000 })
	f.newOrg("o", 0, 1_000_000)
	limited, free := f.limitedKey("o", Limits{Concurrency: 2}), f.limitedKey("o", Limits{})
	var ids []ID
	for range 300 { // more than one take looks at
		ids = append(ids, f.admitWith("o", limited))
	}
	other := f.admitWith("o", free)
	a, b := f.take(), f.take()
	f.same([]ID{a.Run, b.Run}, ids[:2])
	f.same(f.take().Run, other)
	f.takesNothing()
	f.balanced()
	// A slot is free again however a run ends; given back, it keeps its slot.
	f.must(f.Requeue(f.ctx, a))
	a = f.take()
	f.same(a.Run, ids[0])
	f.takesNothing()
	f.must(second(f.Settle(f.ctx, a, Outcome{State: Failed})))
	f.same(f.take().Run, ids[2])
	f.must(second(f.Cancel(f.ctx, "o", ids[3]))) // parked
	f.takesNothing()
	f.clock.advance(f.cfg.Lease + time.Second)
	f.begin(b)
	_, lost, err := f.Reap(f.ctx, "")
	f.must(err)
	f.same(lost, 1)
	got := map[ID]bool{f.take().Run: true, f.take().Run: true, f.take().Run: true}
	f.same(got, map[ID]bool{ids[2]: true, other: true, ids[4]: true}) // the requeued ones, and the next
	f.takesNothing()
	// More, and none at all: those that were held back come at once, oldest first.
	f.must(f.LimitKey(f.ctx, limited, Limits{Concurrency: 4}))
	f.same([]ID{f.take().Run, f.take().Run}, ids[5:7])
	f.takesNothing()
	f.must(f.LimitKey(f.ctx, limited, Limits{}))
	for _, id := range ids[7:] {
		f.same(f.take().Run, id)
	}
	f.same(f.rdb.HGet(f.ctx, f.keys.limits(limited), "waiting").Val(), "0")
	f.clock.advance(f.cfg.Lease + time.Second)
	f.settleEach()
	f.same(f.rdb.HGet(f.ctx, f.keys.limits(limited), "slots").Val(), "0")
	f.same(f.balanced().Held, Micros(0))
}

// settleEach reaps what is leased and fails what is left.
func (f *fixture) settleEach() {
	f.t.Helper()
	_, _, err := f.Reap(f.ctx, "")
	f.must(err)
	for {
		l, err := f.tryTake(f.ctx, "n1")
		f.must(err)
		if l == nil {
			return
		}
		f.must(second(f.Settle(f.ctx, l, Outcome{State: Failed})))
	}
}

func TestQueueLimits(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 1_000_000)
	key := f.limitedKey("o", Limits{Queue: 3, Concurrency: 1})
	full := func(key string) {
		t.Helper()
		before := f.account("o")
		_, _, err := f.Admit(f.ctx, Admission{Org: "o", Key: key, IdempotencyKey: "k", Fingerprint: "f", Spec: Spec{Command: "true", MaxCostMicros: 1}})
		f.want(err, ErrQueueFull)
		f.same(f.account("o"), before) // nothing held, and the key not remembered
	}
	for range 3 {
		f.admitWith("o", key)
	}
	full(key)
	f.take()
	f.admitWith("o", key)
	full(key)
	f.admitWith("o", "")
	o, err := f.LimitOrg(f.ctx, "o", Limits{Queue: 5})
	f.must(err)
	f.same(o.QueueLimit, 5)
	f.admitWith("o", "")
	full("")
	f.must(second(f.LimitOrg(f.ctx, "o", Limits{Queue: 6})))
	f.admitWith("o", "")
	f.balanced()
	// The same organisation made again, as at a start, keeps its limits.
	o, err = f.CreateOrg(f.ctx, Org{ID: "o", Name: "o"})
	f.must(err)
	f.same(o.QueueLimit, 6)
}

func TestLimitOrgWakesAndHolds(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 1, 1000)
	for range 4 {
		f.admitWith("o", "")
	}
	first := f.take()
	f.takesNothing()
	f.must(second(f.LimitOrg(f.ctx, "o", Limits{Concurrency: 3})))
	f.take()
	f.take()
	f.takesNothing()
	f.must(second(f.LimitOrg(f.ctx, "o", Limits{Concurrency: 2})))
	f.must(second(f.Settle(f.ctx, first, Outcome{State: Failed})))
	f.takesNothing()
}

func TestLimitsRefused(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 0)
	admin, _, err := f.CreateKey(f.ctx, "", "a", Admin)
	f.must(err)
	for _, key := range []string{admin.ID, "key_0123456789abcdef", "x"} {
		f.want(f.LimitKey(f.ctx, key, Limits{}), ErrNotFound)
		f.want(second(f.KeyLimits(f.ctx, key)), ErrNotFound)
	}
	f.want(second(f.LimitOrg(f.ctx, "p", Limits{})), ErrNotFound)
	f.want(second(f.LimitOrg(f.ctx, "P!", Limits{})), ErrNotFound)
	for _, l := range []Limits{{-1, 0}, {0, -1}, {1 << 30, 0}, {0, 1 << 30}} {
		f.want(f.LimitKey(f.ctx, admin.ID, l), ErrRange)
		f.want(second(f.LimitOrg(f.ctx, "o", l)), ErrRange)
	}
	_, _, err = f.Admit(f.ctx, Admission{Org: "o", Key: "a b", Spec: Spec{MaxCostMicros: 1}})
	f.want(err, ErrRange)
}

func TestBudgetWarning(t *testing.T) {
	f := newFixture(t)
	l := f.started(1005)
	charge := func(id string, amount Micros) {
		t.Helper()
		f.must(second(f.Authorize(f.ctx, l, Call{ID: id, Kind: KindModel, Min: amount, Max: amount})))
		for range 2 {
			f.must(f.Capture(f.ctx, l, id, amount))
		}
	}
	f.must(second(f.Authorize(f.ctx, l, Call{ID: "pending", Kind: KindWeb, Min: 50, Max: 50})))
	charge("a", 904) // 89.95 percent
	f.same(f.types(l.Run), []EventType{EventQueued, EventMicroVMReady})
	f.must(second(f.Authorize(f.ctx, l, Call{ID: "none", Kind: KindModel, Min: 10, Max: 10})))
	f.must(f.Capture(f.ctx, l, "none", 0))
	f.clock.advance(1500 * time.Microsecond)
	charge("b", 1)
	charge("c", 40)
	f.must(f.Capture(f.ctx, l, "pending", 50))
	events, _, err := f.Events(f.ctx, "o", l.Run, 2)
	f.must(err)
	f.same(events, []Event{{Seq: 3, Run: l.Run, Type: EventBudgetWarning, At: 1.5, Data: BudgetWarningData{Reserved: 1005, Charged: 905, Pending: 50}}})
	f.want(f.Append(f.ctx, l, NewEvent{Type: EventBudgetWarning, At: f.clock.now()}), ErrRange)
	f.must(second(f.Settle(f.ctx, l, Outcome{State: Succeeded})))
	f.balanced()
}
