package run

import (
	"errors"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// The model says what the store must do, in the plainest way. Random steps go to both, each step may be repeated as a
// lost answer would make it, and after each the books must agree to the micro-dollar.

type modelCall struct {
	kind              Kind
	state             byte
	granted, captured Micros
}

type modelRun struct {
	id       ID
	org      string
	state    State
	reserved Micros
	calls    map[string]modelCall
	zdr      bool
	cancel   bool
	slot     bool   // may start as far as its API key goes
	key      string // limitedKey(org) has limits
	lost     int
	lease    *Lease
	expires  time.Time
	old      []*Lease // leases that are over
}

func (r *modelRun) sums() (charged, pending Micros) {
	for _, c := range r.calls {
		charged += c.captured
		if c.state == 'p' {
			pending += c.granted
		}
	}
	return charged, pending
}

func (r *modelRun) leased() bool { return r.state == Starting || r.state == Running }

type modelOrg struct {
	deposits, settled Micros
	limit             int
	refs              map[string]Micros
	idem              map[string]string // key -> fingerprint
	first             map[string]ID
}

type machine struct {
	f    *fixture
	t    *rapid.T
	orgs map[string]*modelOrg
	runs []*modelRun // by age
}

func (m *machine) held(org string) (sum Micros) {
	for _, r := range m.runs {
		if r.org == org && !r.state.Terminal() {
			sum += r.reserved
		}
	}
	return sum
}

func (m *machine) active(org string) (n int) {
	for _, r := range m.runs {
		if r.org == org && r.leased() {
			n++
		}
	}
	return n
}

// keyAtOnce and keyWaiting are the limits of each organisation's limited key.
const keyAtOnce, keyWaiting = 2, 4

func limitedKey(org string) string { return "key_l" + org }

// ofKey counts the runs of an organisation's limited key that have not ended, in its slots and waiting.
func (m *machine) ofKey(org string) (slots, waiting int) {
	for _, r := range m.runs {
		if r.key != limitedKey(org) || r.state.Terminal() {
			continue
		}
		if r.slot {
			slots++
		}
		if r.state == Queued {
			waiting++
		}
	}
	return slots, waiting
}

// end is what any end of a run does to the model.
func (m *machine) end(r *modelRun, s State) {
	if r.key == limitedKey(r.org) && r.slot {
		r.slot = false
		for _, next := range m.runs {
			if next.key == r.key && next.state == Queued && !next.slot && next != r {
				next.slot = true
				break
			}
		}
	}
	charged, _ := r.sums()
	m.orgs[r.org].settled += charged
	r.state = s
	for id, c := range r.calls {
		if c.state == 'p' {
			c.state = 'v'
			r.calls[id] = c
		}
	}
	m.drop(r)
}

func (m *machine) drop(r *modelRun) {
	if r.lease != nil {
		r.old = append(r.old, r.lease)
		r.lease = nil
	}
}

// twice runs a step once or several times: its repetition must give what it gave.
func (m *machine) twice(step func() error) error {
	err := step()
	for range rapid.IntRange(0, 2).Draw(m.t, "repeat") {
		if again := step(); (again == nil) != (err == nil) {
			m.t.Fatalf("repeated: %v, first: %v", again, err)
		}
	}
	return err
}

func (m *machine) expect(what string, err, want error) {
	if want == nil && err != nil || want != nil && !errors.Is(err, want) {
		m.t.Fatalf("%s: error %v, want %v", what, err, want)
	}
}

func (m *machine) org() string { return rapid.SampledFrom([]string{"a", "b"}).Draw(m.t, "org") }

// pick draws a run that satisfies the condition, or skips the step.
func (m *machine) pick(cond func(*modelRun) bool) *modelRun {
	var fit []*modelRun
	for _, r := range m.runs {
		if cond(r) {
			fit = append(fit, r)
		}
	}
	if len(fit) == 0 {
		m.t.Skip("no such run")
	}
	return rapid.SampledFrom(fit).Draw(m.t, "run")
}

func (m *machine) withLease() *modelRun {
	return m.pick(func(r *modelRun) bool { return r.lease != nil })
}

func (m *machine) credit(*rapid.T) {
	org, ref := m.org(), rapid.SampledFrom([]string{"r1", "r2", "r3", "r4"}).Draw(m.t, "ref")
	amount := Micros(rapid.Int64Range(-3000, 10_000).Filter(func(n int64) bool { return n != 0 }).Draw(m.t, "amount"))
	o := m.orgs[org]
	err := m.twice(func() error { _, err := m.f.Credit(m.f.ctx, org, amount, ref); return err })
	before, seen := o.refs[ref]
	switch {
	case seen && before != amount:
		m.expect("credit", err, ErrIdempotencyConflict)
	case seen:
		m.expect("credit", err, nil)
	case o.deposits-o.settled+amount < m.held(org):
		m.expect("credit", err, ErrInsufficientFunds)
	default:
		m.expect("credit", err, nil)
		o.refs[ref], o.deposits = amount, o.deposits+amount
	}
}

func (m *machine) admit(*rapid.T) {
	org := m.org()
	o := m.orgs[org]
	a := Admission{Org: org, Key: rapid.SampledFrom([]string{"key_1", limitedKey(org)}).Draw(m.t, "api key"), FirstSlice: 100, Spec: Spec{Command: "true", TimeoutSeconds: 1,
		MaxCostMicros:     Micros(rapid.Int64Range(50, 4000).Draw(m.t, "cost")),
		ZeroDataRetention: rapid.Bool().Draw(m.t, "zdr")}}
	if k := rapid.SampledFrom([]string{"", "k1", "k2"}).Draw(m.t, "key"); k != "" {
		a.IdempotencyKey, a.Fingerprint = k, rapid.SampledFrom([]string{"f1", "f2"}).Draw(m.t, "fingerprint")
	}
	r, replayed, err := m.f.Admit(m.f.ctx, a)
	if f, seen := o.idem[a.IdempotencyKey]; seen && a.IdempotencyKey != "" {
		if f != a.Fingerprint {
			m.expect("admit", err, ErrIdempotencyConflict)
			return
		}
		m.expect("admit", err, nil)
		if !replayed || r.ID != o.first[a.IdempotencyKey] {
			m.t.Fatalf("replay gave %s, want %s", r.ID, o.first[a.IdempotencyKey])
		}
		return
	}
	slots, waiting := m.ofKey(org)
	switch {
	case a.Spec.MaxCostMicros < 100:
		m.expect("admit", err, ErrBudget)
	case o.deposits-o.settled-m.held(org) < a.Spec.MaxCostMicros:
		m.expect("admit", err, ErrInsufficientFunds)
	case a.Key == limitedKey(org) && waiting >= keyWaiting:
		m.expect("admit", err, ErrQueueFull)
	default:
		m.expect("admit", err, nil)
		m.runs = append(m.runs, &modelRun{id: r.ID, key: a.Key, slot: a.Key != limitedKey(org) || slots < keyAtOnce, org: org, state: Queued, reserved: a.Spec.MaxCostMicros, zdr: a.Spec.ZeroDataRetention, calls: map[string]modelCall{}})
		if a.IdempotencyKey != "" {
			o.idem[a.IdempotencyKey], o.first[a.IdempotencyKey] = a.Fingerprint, r.ID
		}
	}
	m.f.clock.advance(time.Microsecond)
}

func (m *machine) take(*rapid.T) {
	l, err := m.f.tryTake(m.f.ctx, "n1")
	m.expect("take", err, nil)
	oldest := map[string]*modelRun{}
	for _, r := range m.runs {
		if r.state == Queued && r.slot && oldest[r.org] == nil && m.active(r.org) < m.orgs[r.org].limit {
			oldest[r.org] = r
		}
	}
	if l == nil {
		if len(oldest) > 0 {
			m.t.Fatalf("nothing taken, though %d organisations have work", len(oldest))
		}
		return
	}
	r := oldest[l.Org]
	if r == nil || r.id != l.Run || l.Spec.Command != "true" {
		m.t.Fatalf("took %s of %s, want %+v", l.Run, l.Org, r)
	}
	for _, old := range r.old {
		if old.Token >= l.Token {
			m.t.Fatalf("token %d after %d", l.Token, old.Token)
		}
	}
	r.state, r.lease, r.expires = Starting, l, m.f.clock.now().Add(m.f.cfg.Lease)
}

func (m *machine) start(*rapid.T) {
	r := m.withLease()
	err := m.twice(func() error { return m.f.Start(m.f.ctx, r.lease, Start{At: m.f.clock.now(), Machine: "m"}) })
	m.expect("start", err, nil)
	r.state = Running
}

func (m *machine) renew(*rapid.T) {
	r := m.withLease()
	asked, err := m.f.Renew(m.f.ctx, r.lease)
	m.expect("renew", err, nil)
	if asked != r.cancel {
		m.t.Fatalf("cancel asked: %t, want %t", asked, r.cancel)
	}
	r.expires = m.f.clock.now().Add(m.f.cfg.Lease)
}

func (m *machine) appendEvents(*rapid.T) {
	r := m.withLease()
	m.f.clock.advance(time.Nanosecond * 1000)
	e := NewEvent{Type: EventShell, At: m.f.clock.now(), Data: ShellData{Command: "ls"}}
	before := len(m.f.types(r.id))
	m.expect("append", m.twice(func() error { return m.f.Append(m.f.ctx, r.lease, e) }), nil)
	if n := len(m.f.types(r.id)); n != before+1 {
		m.t.Fatalf("%d events, want %d", n, before+1)
	}
}

func (m *machine) authorize(*rapid.T) {
	r := m.withLease()
	c := Call{ID: rapid.SampledFrom([]string{"c1", "c2", "c3", "c4"}).Draw(m.t, "call"), Kind: rapid.SampledFrom([]Kind{KindModel, KindWeb, KindCompute}).Draw(m.t, "kind"),
		Min: Micros(rapid.Int64Range(0, 1500).Draw(m.t, "min"))}
	c.Max = c.Min + Micros(rapid.Int64Range(0, 1500).Draw(m.t, "more"))
	c.Leave = Micros(rapid.SampledFrom([]int64{0, 0, 300, 5000}).Draw(m.t, "leave"))
	var granted Micros
	err := m.twice(func() (err error) { granted, err = m.f.Authorize(m.f.ctx, r.lease, c); return err })
	charged, pending := r.sums()
	free := r.reserved - charged - pending
	free = min(free, c.Max, max(free-c.Leave, c.Min))
	before, seen := r.calls[c.ID]
	switch {
	case seen && before.state == 'p' && before.kind == c.Kind:
		m.expect("authorise", err, nil)
		free = before.granted
	case seen:
		m.expect("authorise", err, ErrState)
		return
	case free < c.Min:
		m.expect("authorise", err, ErrBudget)
		return
	default:
		m.expect("authorise", err, nil)
		r.calls[c.ID] = modelCall{kind: c.Kind, state: 'p', granted: free}
	}
	if granted != free {
		m.t.Fatalf("granted %d, want %d", granted, free)
	}
}

func (m *machine) closeCall(*rapid.T) {
	r := m.withLease()
	id := rapid.SampledFrom([]string{"c1", "c2", "c3", "c4"}).Draw(m.t, "call")
	amount, state := Micros(rapid.Int64Range(0, 2000).Draw(m.t, "amount")), byte('c')
	if rapid.Bool().Draw(m.t, "void") {
		amount, state = 0, 'v'
	}
	err := m.twice(func() error {
		if state == 'v' {
			return m.f.Void(m.f.ctx, r.lease, id)
		}
		return m.f.Capture(m.f.ctx, r.lease, id, amount)
	})
	c, seen := r.calls[id]
	switch {
	case !seen:
		m.expect("close call", err, ErrNotFound)
	case c.state != 'p' && (c.state != state || c.captured != amount):
		m.expect("close call", err, ErrState)
	case c.state != 'p':
		m.expect("close call", err, nil)
	case amount > c.granted:
		m.expect("close call", err, ErrRange)
	default:
		m.expect("close call", err, nil)
		c.state, c.captured = state, amount
		r.calls[id] = c
	}
}

func (m *machine) settle(*rapid.T) {
	r := m.withLease()
	state := rapid.SampledFrom([]State{Succeeded, Failed, Cancelled, TimedOut, BudgetExhausted}).Draw(m.t, "state")
	l := r.lease
	err := m.twice(func() error {
		_, err := m.f.Settle(m.f.ctx, l, Outcome{At: m.f.clock.now(), State: state})
		return err
	})
	if r.state == Starting && (state == Succeeded || state == TimedOut) {
		m.expect("settle", err, ErrState)
		return
	}
	m.expect("settle", err, nil)
	m.end(r, state)
	if done, err := m.f.Settle(m.f.ctx, l, Outcome{State: Failed}); err != nil || done.State != state {
		m.t.Fatalf("settled again: %s, %v; want %s", done.State, err, state)
	}
}

func (m *machine) requeue(*rapid.T) {
	r := m.withLease()
	err := m.twice(func() error {
		err := m.f.Requeue(m.f.ctx, r.lease)
		if r.cancel && errors.Is(err, ErrLeaseLost) {
			return nil // the first of them ended the run
		}
		return err
	})
	if r.state == Running {
		m.expect("requeue", err, ErrState)
		return
	}
	m.expect("requeue", err, nil)
	r.calls = map[string]modelCall{}
	if r.cancel {
		m.end(r, Cancelled)
		return
	}
	r.state = Queued
	m.drop(r)
}

func (m *machine) cancel(*rapid.T) {
	r := m.pick(func(*modelRun) bool { return true })
	err := m.twice(func() error { _, err := m.f.Cancel(m.f.ctx, r.org, r.id); return err })
	m.expect("cancel", err, nil)
	switch {
	case r.state == Queued:
		m.end(r, Cancelled)
	case r.leased():
		r.cancel = true
	}
}

func (m *machine) reap(*rapid.T) {
	m.f.clock.advance(time.Duration(rapid.IntRange(0, 12).Draw(m.t, "seconds")) * time.Second)
	dead := rapid.SampledFrom([]string{"", "", "", "n1", "n2"}).Draw(m.t, "dead")
	_, _, err := m.f.Reap(m.f.ctx, dead)
	m.expect("reap", err, nil)
	for _, r := range m.runs {
		if !r.leased() || (!r.expires.Before(m.f.clock.now()) && dead != "n1") {
			continue
		}
		r.lost++
		started := r.state == Running
		if !started {
			r.calls = map[string]modelCall{}
		}
		switch {
		case !started && r.cancel:
			m.end(r, Cancelled)
		case started || r.zdr || r.lost >= maxLost:
			m.end(r, Failed)
		default:
			r.state = Queued
			m.drop(r)
		}
	}
}

// stale writes with a lease that is over.
func (m *machine) stale(*rapid.T) {
	r := m.pick(func(r *modelRun) bool { return len(r.old) > 0 && !r.state.Terminal() })
	l := rapid.SampledFrom(r.old).Draw(m.t, "lease")
	_, err := m.f.Settle(m.f.ctx, l, Outcome{State: Succeeded})
	m.expect("stale settle", err, ErrLeaseLost)
	m.expect("stale start", m.f.Start(m.f.ctx, l, Start{At: m.f.clock.now(), Machine: "x"}), ErrLeaseLost)
	_, err = m.f.Authorize(m.f.ctx, l, Call{ID: "c1", Kind: KindWeb, Max: 1})
	m.expect("stale authorise", err, ErrLeaseLost)
	m.expect("stale capture", m.f.Capture(m.f.ctx, l, "c1", 0), ErrLeaseLost)
	m.expect("stale append", m.f.Append(m.f.ctx, l, NewEvent{Type: EventWeb, At: m.f.clock.now()}), ErrLeaseLost)
	_, err = m.f.Renew(m.f.ctx, l)
	m.expect("stale renew", err, ErrLeaseLost)
}

func (m *machine) erase(*rapid.T) {
	r := m.pick(func(*modelRun) bool { return true })
	err := m.twice(func() error { return m.f.Delete(m.f.ctx, r.org, r.id) })
	if r.state.Terminal() {
		m.expect("delete", err, nil)
	} else {
		m.expect("delete", err, ErrState)
	}
}

func TestRandomInterleavings(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		m := &machine{f: newFixture(t), t: rt, orgs: map[string]*modelOrg{}}
		for i, id := range []string{"a", "b"} {
			m.f.newOrg(id, i+1, 0)
			m.f.must(m.f.rdb.HSet(m.f.ctx, m.f.keys.limits(limitedKey(id)), "concurrency", keyAtOnce, "queue", keyWaiting).Err())
			m.orgs[id] = &modelOrg{limit: i + 1, refs: map[string]Micros{}, idem: map[string]string{}, first: map[string]ID{}}
			m.expect("credit", func() error { _, err := m.f.Credit(m.f.ctx, id, 10_000, "r0"); return err }(), nil)
			m.orgs[id].deposits = 10_000
		}
		step := func(f func(*rapid.T)) func(*rapid.T) { return func(t *rapid.T) { m.t = t; f(t) } }
		rt.Repeat(map[string]func(*rapid.T){
			"credit": step(m.credit), "admit": step(m.admit), "admit2": step(m.admit), "take": step(m.take), "take2": step(m.take),
			"start": step(m.start), "renew": step(m.renew), "append": step(m.appendEvents), "authorize": step(m.authorize),
			"authorize2": step(m.authorize), "close": step(m.closeCall), "close2": step(m.closeCall), "settle": step(m.settle),
			"requeue": step(m.requeue), "cancel": step(m.cancel), "reap": step(m.reap), "stale": step(m.stale), "erase": step(m.erase),
			"": step(m.check),
		})
		m.drain()
	})
}
