package pool

import (
	"errors"
	"testing"
	"time"
)

// filled is a policy with n ready machines made at the given time. Nothing watches them: only the policy's own checks
// stand between a bad machine and a claim.
func filled(cfg Config, w *world, n int, at time.Time) *policy[*fakeMachine] {
	p := newPolicy[*fakeMachine](cfg, at)
	for i := range n {
		p.making++
		m := &fakeMachine{w: w, id: i, madeAt: at, done: make(chan struct{})}
		w.machines = append(w.machines, m)
		p.made(m, ticket{}, at)
	}
	return p
}

func TestClaimItselfRefusesDeadAndOldMachines(t *testing.T) {
	start := time.Unix(1000, 0)
	w := &world{}
	p := filled(config(), w, 3, start)
	w.machines[0].die()
	s, err := p.claim(start)
	if err != nil || s.m != w.machines[1] || len(p.retired) != 1 {
		t.Fatalf("claim: %+v, %v; retired %d", s, err, len(p.retired))
	}
	s, err = p.claim(start.Add(config().MaxAge))
	if s != nil || err != nil || len(p.retired) != 2 {
		t.Fatalf("claim after the age: %+v, %v; retired %d", s, err, len(p.retired))
	}
}

func TestOfferedMachineThatDiesIsNotHandedOut(t *testing.T) {
	now := time.Unix(1000, 0)
	w := &world{}
	p := filled(config(), w, 0, now)
	first, second := p.wait(now), p.wait(now)
	third := p.wait(now)
	for i := range 2 {
		p.making++
		m := &fakeMachine{w: w, id: i, done: make(chan struct{})}
		w.machines = append(w.machines, m)
		p.made(m, ticket{}, now)
		m.die()
	}
	for _, wt := range []*waiter[*fakeMachine]{first, second} {
		if s, err := p.take(wt, now); s != nil || err != nil {
			t.Fatalf("took %+v, %v", s, err)
		}
	}
	if p.leased != 0 || p.offered != 0 || len(p.retired) != 2 {
		t.Fatalf("leased %d, offered %d, retired %d", p.leased, p.offered, len(p.retired))
	}
	for _, want := range []*waiter[*fakeMachine]{first, second, third} { // back in their old places
		p.making++
		p.made(&fakeMachine{w: w, done: make(chan struct{})}, ticket{}, now)
		if want.slot == nil {
			t.Fatalf("claim %d was not next", want.number)
		}
		if s, err := p.take(want, now); s == nil || err != nil {
			t.Fatalf("took %+v, %v", s, err)
		}
	}
}

func TestClosedPoolWaitsForClaimsThatHaveNotTakenTheirMachine(t *testing.T) {
	now := time.Unix(1000, 0)
	w := &world{}
	p := filled(config(), w, 0, now)
	taking, leaving := p.wait(now), p.wait(now)
	for range 2 {
		p.making++
		p.made(&fakeMachine{w: w, done: make(chan struct{})}, ticket{}, now)
	}
	p.shut()
	if p.over() {
		t.Fatal("over, with two machines offered")
	}
	if s, err := p.take(taking, now); s != nil || !errors.Is(err, ErrClosed) {
		t.Fatalf("took %+v, %v", s, err)
	}
	p.cancel(leaving, now)
	pl := p.plan(now)
	if len(pl.destroys) != 2 || pl.makes != 0 || p.over() {
		t.Fatalf("plan %+v, over %v", pl, p.over())
	}
	for _, s := range pl.destroys {
		p.destroyed(s)
	}
	if !p.over() || len(p.slots) != 0 {
		t.Fatalf("not over: %+v", p)
	}
}

func TestAReleasedMachineMakesAdmissionAskedAnew(t *testing.T) {
	now := time.Unix(1000, 0)
	w := &world{}
	p := filled(config(), w, 1, now)
	s, err := p.claim(now)
	if s == nil || err != nil {
		t.Fatalf("claim: %v, %v", s, err)
	}
	p.settled(s.m)
	if pl := p.plan(now); pl.makes != 2 {
		t.Fatalf("%d makes", pl.makes)
	}
	p.makeRefused(ticket{}, now, errors.New("no memory"))
	p.makeRefused(ticket{}, now, errors.New("no memory"))
	if pl := p.plan(now); pl.makes != 0 || !pl.next.Equal(now.Add(refusedPause)) || p.stats(now).Admission != "no memory" {
		t.Fatalf("after the refusal: %+v", pl)
	}
	p.released(s.m)
	if pl := p.plan(now); pl.makes != 2 || p.stats(now).Admission != "" {
		t.Fatalf("after the release: %+v", pl)
	}
}
