package run

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"pgregory.net/rapid"
)

// check compares the books with the model and asks the audit.
func (m *machine) check(*rapid.T) {
	for id, o := range m.orgs {
		want := Account{Org: id, Balance: o.deposits - o.settled, Held: m.held(id), Deposits: o.deposits, Charged: o.settled}
		want.Available = want.Balance - want.Held
		got, err := m.f.Account(m.f.ctx, id)
		if err != nil || got != want {
			m.t.Fatalf("account %+v, %v; want %+v", got, err, want)
		}
	}
	rep, err := m.f.Audit(m.f.ctx)
	if err = errors.Join(err, rep.Err()); err != nil {
		m.t.Fatal(err)
	}
	for id := range m.orgs {
		slots, waiting := m.ofKey(id)
		got := m.f.rdb.HMGet(m.f.ctx, m.f.keys.limits(limitedKey(id)), "slots", "waiting").Val()
		for i, want := range []int{slots, waiting} {
			if n, _ := got[i].(string); n != fmt.Sprint(want) && (want != 0 || n != "") {
				m.t.Fatalf("counts of the limited key of %s: %v, want %d and %d", id, got, slots, waiting)
			}
		}
	}
	for _, r := range m.runs {
		m.checkRun(r)
	}
}

func (m *machine) checkRun(r *modelRun) {
	got, err := m.f.Get(m.f.ctx, r.org, r.id)
	charged, _ := r.sums()
	if err != nil || got.State != r.state || got.Money.Charged != charged || charged > r.reserved {
		m.t.Fatalf("%s: state %s, charged %d, %v; want %s, %d of %d", r.id, got.State, got.Money.Charged, err, r.state, charged, r.reserved)
	}
	events, _, err := m.f.Events(m.f.ctx, r.org, r.id, 0)
	if err != nil {
		m.t.Fatal(err)
	}
	ends, last := 0, -1.0
	for i, e := range events {
		if e.Seq != int64(i+1) || e.At < last {
			m.t.Fatalf("%s: event %d has seq %d, at %v after %v", r.id, i, e.Seq, e.At, last)
		}
		last = e.At
		if State(e.Type).Terminal() {
			ends++
		}
	}
	want := 0
	if r.state.Terminal() {
		want = 1
		if got.Money.Charged+got.Money.Released != r.reserved || events[len(events)-1].Type != EventWorkerDestroyed {
			m.t.Fatalf("%s: settled with %+v, last event %s", r.id, got.Money, events[len(events)-1].Type)
		}
	}
	if ends != want {
		m.t.Fatalf("%s: %d terminal events in state %s", r.id, ends, r.state)
	}
}

// drain brings everything to its end: then nothing is held, queued or leased.
func (m *machine) drain() {
	for {
		m.f.clock.advance(m.f.cfg.Lease + time.Second)
		m.reapAll()
		l, err := m.f.tryTake(m.f.ctx, "n1")
		m.expect("take", err, nil)
		if l == nil {
			break
		}
		if _, err := m.f.Settle(m.f.ctx, l, Outcome{State: Failed}); err != nil {
			m.t.Fatal(err)
		}
	}
	rep, err := m.f.Audit(m.f.ctx)
	if err = errors.Join(err, rep.Err()); err != nil || rep.Held != 0 || rep.OpenHolds != 0 {
		m.t.Fatalf("at the end: %+v, %v", rep, err)
	}
	left := []string{m.f.keys.leases(), m.f.keys.ring()}
	for id := range m.orgs {
		left = append(left, m.f.keys.queue(id), m.f.keys.active(id))
	}
	slices.Sort(left)
	if n := m.f.rdb.Exists(m.f.ctx, left...).Val(); n != 0 {
		m.t.Fatalf("%d of %v are left", n, left)
	}
}

func (m *machine) reapAll() {
	if _, _, err := m.f.Reap(m.f.ctx, ""); err != nil {
		m.t.Fatal(fmt.Errorf("reap: %w", err))
	}
}
