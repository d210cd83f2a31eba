package run

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// situation is a run in some state, with something about it that a transition may depend on.
type situation struct {
	*fixture
	org   string
	state State
	id    ID
	lease *Lease // the last one; nil before the first
}

// circumstances are what may be special about a run.
var circumstances = map[string]func(*situation){
	"nothing":         func(*situation) {},
	"cancel asked":    func(s *situation) { s.must(second(s.Cancel(s.ctx, "", s.id))) },
	"content lost":    func(s *situation) { s.must(s.rdb.Del(s.ctx, s.keys.spec(string(s.id))).Err()) },
	"lost four times": func(s *situation) { s.must(s.rdb.HSet(s.ctx, s.keys.run(string(s.id)), "lost", maxLost-1).Err()) },
	"lease expired":   func(s *situation) { s.clock.advance(s.cfg.Lease + time.Second) },
	"an older lease":  func(s *situation) { old := *s.lease; old.Token--; s.lease = &old },
	"a lease to come": func(s *situation) { old := *s.lease; old.Token++; s.lease = &old },
	"expired, cancel": func(s *situation) {
		s.must(second(s.Cancel(s.ctx, "", s.id)))
		s.clock.advance(s.cfg.Lease + time.Second)
	},
	"expired, 5 times": func(s *situation) {
		s.must(s.rdb.HSet(s.ctx, s.keys.run(string(s.id)), "lost", maxLost-1).Err())
		s.clock.advance(s.cfg.Lease + time.Second)
	},
}

func second[T any](_ T, err error) error { return err }

// attempts are all calls that change states, each by whom the table says may call it.
func attempts() map[string]func(*situation) error {
	all := map[string]func(*situation) error{
		"Take":    func(s *situation) error { return second(s.tryTake(s.ctx, "n1")) },
		"Start":   func(s *situation) error { return s.Start(s.ctx, s.lease, Start{At: s.clock.now(), Machine: "another"}) },
		"Requeue": func(s *situation) error { return s.Requeue(s.ctx, s.lease) },
		"Cancel":  func(s *situation) error { return second(s.Cancel(s.ctx, s.org, s.id)) },
		"Reap":    func(s *situation) error { _, _, err := s.Reap(s.ctx, ""); return err },
	}
	for _, to := range States {
		all["Settle "+string(to.State)] = func(s *situation) error {
			return second(s.Settle(s.ctx, s.lease, Outcome{State: to.State}))
		}
	}
	return all
}

// reach brings a fresh run of a fresh organisation into the state. One that kept its content in memory can lose it.
func reach(f *fixture, state State, zdr bool) *situation {
	s := &situation{fixture: f, org: fmt.Sprintf("o%d", cells.Add(1)), state: state}
	f.newOrg(s.org, 0, 1000)
	r, _, err := f.Admit(f.ctx, Admission{Org: s.org, Spec: Spec{Command: "true", MaxCostMicros: 100, ZeroDataRetention: zdr}})
	f.must(err)
	s.id = r.ID
	if state == Queued {
		// Given back once: there is a lease to try with.
		s.lease = f.take()
		f.must(f.Requeue(f.ctx, s.lease))
		return s
	}
	s.lease = f.take()
	if state == Starting {
		return s
	}
	f.begin(s.lease)
	if state != Running {
		f.must(second(f.Settle(f.ctx, s.lease, Outcome{State: state})))
	}
	return s
}

// record is everything kept of the run but what a change of its lease or a wish to cancel it may touch.
func (s *situation) record() map[string]string {
	f, err := s.rdb.HGetAll(s.ctx, s.keys.run(string(s.id))).Result()
	s.must(err)
	delete(f, "cancel")
	f["events"] = fmt.Sprint(s.rdb.LLen(s.ctx, s.keys.runEvents(string(s.id))).Val())
	f["account"] = fmt.Sprint(s.account(s.org))
	return f
}

// clear ends the run, so that the next situation is alone in the queue.
func (s *situation) clear() {
	s.must(second(s.Cancel(s.ctx, "", s.id)))
	s.clock.advance(s.cfg.Lease + time.Second)
	_, _, err := s.Reap(s.ctx, "")
	s.must(err)
	if r := s.get(s.id); !r.State.Terminal() {
		s.t.Fatalf("left in state %s", r.State)
	}
}

// typed tells whether the error is one that callers can decide on.
func typed(err error) bool {
	for _, known := range []error{ErrState, ErrLeaseLost, ErrRange, ErrNotFound} {
		if errors.Is(err, known) {
			return true
		}
	}
	return false
}

// TestEveryEdge tries every call in every state under every circumstance: what changes a state is in the table, all that
// is in the table happens, and what is refused changes nothing and says so.
func TestEveryEdge(t *testing.T) {
	f := newFixture(t)
	seen := map[Edge]bool{}
	for _, from := range States {
		for about, prepare := range circumstances {
			for name, attempt := range attempts() {
				for _, zdr := range []bool{false, true} {
					s := reach(f, from.State, zdr)
					prepare(s)
					before := s.record()
					if State(before["state"]) == from.State { // a queued run that is cancelled has left its state already
						where := fmt.Sprintf("%s of a run that is %s (%s, without content: %t)", name, from.State, about, zdr)
						err := attempt(s)
						s.judge(where, name, before, s.record(), err, seen)
					}
					s.clear()
				}
			}
		}
	}
	// Admit is the edge that starts them all; there is no state to try it from.
	seen[Edge{To: Queued, Call: "Admit"}] = true
	for _, e := range Edges {
		if !seen[Edge{From: e.From, To: e.To, Call: e.Call}] {
			t.Errorf("%s: %s -> %s is in the table and does not happen", e.Call, e.From, e.To)
		}
	}
	f.same(f.balanced().Held, Micros(0))
}

func (s *situation) judge(where, name string, before, after map[string]string, err error, seen map[Edge]bool) {
	s.t.Helper()
	from, to := State(before["state"]), State(after["state"])
	call, target, _ := strings.Cut(name, " ")
	e := Edge{From: from, To: to, Call: call}
	switch {
	case err != nil && !typed(err):
		s.t.Errorf("%s: error %v has no type", where, err)
	case err != nil:
		if d := cmp.Diff(before, after); d != "" {
			s.t.Errorf("%s: refused (%v), and yet:\n%s", where, err, d)
		}
		var refused *TransitionError
		if errors.As(err, &refused) && (refused.From != from || refused.Run != s.id) {
			s.t.Errorf("%s: refused as %v", where, refused)
		}
	case from == to && State(target) == to && !to.Terminal():
		s.t.Errorf("%s: nothing happened, and it is no error", where)
	case from != to:
		if !slices.ContainsFunc(Edges, func(l Edge) bool { return l.From == from && l.To == to && l.Call == call }) {
			s.t.Errorf("%s: %s -> %s is not in the table", where, from, to)
		}
		if target != "" && State(target) != to {
			s.t.Errorf("%s: became %s", where, to)
		}
		seen[e] = true
	case from.Terminal():
		if d := cmp.Diff(before, after); d != "" {
			s.t.Errorf("%s: a terminal run changed:\n%s", where, d)
		}
	}
}

// The tables fit each other: every state is reached, only terminal ones are ends, no edge is there twice.
func TestTablesOfStates(t *testing.T) {
	for _, s := range States {
		in, out := 0, 0
		for i, e := range Edges {
			if e.To == s.State {
				in++
			}
			if e.From == s.State {
				out++
			}
			if slices.ContainsFunc(Edges[:i], func(o Edge) bool { return o.From == e.From && o.To == e.To && o.Call == e.Call }) {
				t.Errorf("%s: %s -> %s is there twice", e.Call, e.From, e.To)
			}
		}
		if in == 0 || (out == 0) != s.Terminal || s.Terminal != s.State.Terminal() {
			t.Errorf("state %s: %d edges in, %d out, terminal: %t", s.State, in, out, s.Terminal)
		}
	}
	if State("x").Terminal() {
		t.Error("an unknown state is terminal")
	}
}
