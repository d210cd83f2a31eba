package run

import (
	"slices"
	"testing"
	"time"
)

// TestEndsOnNoNode: the store tells once of every run that no node settled, and of no other.
func TestEndsOnNoNode(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 1_000_000)
	type told struct {
		state  State
		code   string
		events []EventType
	}
	got := map[ID][]told{}
	f.onEnded = func(r Run, events []Event) {
		one := told{state: r.State}
		if r.Error != nil {
			one.code = r.Error.Code
		}
		for _, e := range events {
			one.events = append(one.events, e.Type)
		}
		got[r.ID] = append(got[r.ID], one)
	}
	cancel := func(id ID) {
		t.Helper()
		_, err := f.Cancel(f.ctx, "o", id)
		f.must(err)
	}
	want := map[ID]told{}
	closed := func(state State, between ...EventType) []EventType {
		return append(append([]EventType{EventQueued}, between...), EventType(state), EventWorkerDestroyed)
	}

	waiting := f.admit("o", 1000)
	cancel(waiting.ID)
	cancel(waiting.ID)
	want[waiting.ID] = told{Cancelled, "", closed(Cancelled)}

	f.admit("o", 1000)
	returned := f.take()
	cancel(returned.Run)
	f.must(f.Requeue(f.ctx, returned))
	want[returned.Run] = told{Cancelled, "", closed(Cancelled)}

	hidden, _, err := f.Admit(f.ctx, Admission{Org: "o", Spec: Spec{Prompt: "p", MaxCostMicros: 1000, ZeroDataRetention: true}})
	f.must(err)
	f.must(f.rdb.Del(f.ctx, f.keys.spec(string(hidden.ID))).Err())
	if l, err := f.tryTake(f.ctx, "node"); l != nil || err != nil {
		t.Fatal(l, err)
	}
	want[hidden.ID] = told{Failed, "content_lost", closed(Failed)}

	hidden, _, err = f.Admit(f.ctx, Admission{Org: "o", Spec: Spec{Prompt: "p", MaxCostMicros: 1000, ZeroDataRetention: true}})
	f.must(err)
	f.must(f.rdb.Del(f.ctx, f.keys.spec(string(hidden.ID))).Err())
	f.admit("o", 1000)
	settled := f.take() // passes the other by
	want[hidden.ID] = told{Failed, "content_lost", closed(Failed)}
	f.begin(settled)
	cancel(settled.Run)
	_, err = f.Settle(f.ctx, settled, Outcome{State: Cancelled})
	f.must(err)

	f.admit("o", 1000)
	stopped := f.take()
	cancel(stopped.Run)
	want[stopped.Run] = told{Cancelled, "", closed(Cancelled)}
	f.admit("o", 1000)
	lost := f.take()
	f.begin(lost)
	f.must(f.Append(f.ctx, lost, NewEvent{Type: EventShell, At: f.clock.now(), Data: ShellData{Outcome: "exited"}}))
	want[lost.Run] = told{Failed, "node_lost", closed(Failed, EventMicroVMReady, EventShell)}
	f.admit("o", 1000)
	again := f.take()
	f.clock.advance(time.Hour)
	for range 2 {
		_, _, err = f.Reap(f.ctx, "")
		f.must(err)
	}
	if r := f.get(again.Run); r.State != Queued {
		t.Errorf("never started: %s", r.State)
	}

	if len(got) != len(want) {
		t.Errorf("told of %d runs, want %d", len(got), len(want))
	}
	for id, w := range want {
		if g := got[id]; len(g) != 1 || g[0].state != w.state || g[0].code != w.code || !slices.Equal(g[0].events, w.events) {
			t.Errorf("%s: told %+v, want %+v", id, g, w)
		}
	}
}
