package run

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"
)

func TestTimesNeverGoBack(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 10_000)
	r := f.admit("o", 1000)
	l := f.take()
	past, future := r.QueuedAt.Add(-time.Hour), r.QueuedAt.Add(7*time.Millisecond)
	f.must(f.Start(f.ctx, l, Start{At: past, Machine: "m"}))
	f.must(f.Append(f.ctx, l, NewEvent{Type: EventShell, At: future, Data: ShellData{}}, NewEvent{Type: EventWeb, At: past, Data: CallData{}}))
	_, err := f.Settle(f.ctx, l, Outcome{At: past, State: Succeeded})
	f.must(err)
	events, _, err := f.Events(f.ctx, "o", r.ID, 0)
	f.must(err)
	var seq []int64
	var at []float64
	for _, e := range events {
		seq, at = append(seq, e.Seq), append(at, e.At)
	}
	f.same(seq, []int64{1, 2, 3, 4, 5, 6})
	f.same(at, []float64{0, 0, 7, 7, 7, 7})
	f.same(*f.get(r.ID).StartedAt, r.QueuedAt)
}

func TestAppend(t *testing.T) {
	f := newFixture(t)
	l := f.started(1000)
	at := f.clock.now()
	shell := NewEvent{Type: EventShell, At: at, Data: ShellData{Command: "\x00\u2028</script>\"\\", Output: "ä\n", Outcome: "exited"}}
	f.must(f.Append(f.ctx, l))
	f.must(f.Append(f.ctx, l, shell))
	f.must(f.Append(f.ctx, l, shell)) // again
	later := shell
	later.At = at.Add(time.Nanosecond)
	f.must(f.Append(f.ctx, l, shell, later)) // again, with more
	f.same(f.types(l.Run)[2:], []EventType{EventShell, EventShell})
	events, _, err := f.Events(f.ctx, "o", l.Run, 2)
	f.must(err)
	f.same(events[0], Event{Seq: 3, Run: l.Run, Type: EventShell, At: 0, Data: shell.Data})
	for _, bad := range []EventType{EventQueued, EventMicroVMReady, "succeeded", "failed", EventWorkerDestroyed, "", "x\"y"} {
		f.want(f.Append(f.ctx, l, NewEvent{Type: bad, At: at}), ErrRange)
	}
	f.want(f.Append(f.ctx, l, NewEvent{Type: EventShell, At: at, Data: ShellData{Output: strings.Repeat("x", maxEventData)}}), ErrRange)
	f.same(len(f.types(l.Run)), 4)

	f.must(f.rdb.HSet(f.ctx, f.keys.run(string(l.Run)), "seq", maxEvents).Err())
	f.want(f.Append(f.ctx, l, NewEvent{Type: EventShell, At: at.Add(time.Second)}), ErrQueueFull)
}

func TestStartAgain(t *testing.T) {
	f := newFixture(t)
	l := f.started(1000)
	f.must(f.Start(f.ctx, l, Start{At: f.clock.now(), Machine: "m1"}))
	f.want(f.Start(f.ctx, l, Start{At: f.clock.now(), Machine: "m2"}), ErrState)
	f.same(f.types(l.Run), []EventType{EventQueued, EventMicroVMReady})
}

func TestEventDataHasItsType(t *testing.T) {
	for _, data := range []struct {
		typ  EventType
		data any
	}{
		{EventQueued, QueuedData{Reserved: 1}}, {EventMicroVMReady, MicroVMReadyData{"m", "i", "kvm"}}, {EventWorkerStarted, WorkerStartedData{true, false}},
		{EventModel, ModelData{Model: "a/b", Charged: 3}}, {EventShell, ShellData{Command: "ls"}}, {EventWeb, CallData{Kind: "fetch"}},
		{EventConnection, CallData{Kind: "connection"}}, {EventMicroVMDestroyed, MicroVMDestroyedData{Egress: Egress{1, 2}}},
		{EventWorkerDestroyed, Money{Reserved: 1}}, {"failed", EndedData{Tokens: 9, Error: &Error{"a", "b"}}}, {"later", json.RawMessage(`{"x":1}`)}, {"none", nil},
	} {
		b, err := json.Marshal(Event{Seq: 1, Run: "run_1", Type: data.typ, At: 2.5, Data: data.data})
		if err != nil {
			t.Fatal(err)
		}
		var e Event
		if err := json.Unmarshal(b, &e); err != nil {
			t.Fatal(err)
		}
		again, err := json.Marshal(e)
		if err != nil {
			t.Fatal(err)
		}
		if fmt.Sprintf("%T", e.Data) != fmt.Sprintf("%T", data.data) || string(again) != string(b) {
			t.Errorf("%s: %T %s", data.typ, e.Data, again)
		}
	}
}

func TestSubscribe(t *testing.T) {
	f := newFixture(t)
	ctx, cancel := context.WithCancel(f.ctx)
	events, gap, err := f.open().Subscribe(ctx, nil)
	f.must(err)
	l := f.started(1000)
	_, err = f.Settle(f.ctx, l, Outcome{State: Succeeded, Result: &Result{Output: "answer"}})
	f.must(err)
	want, _, err := f.Events(f.ctx, "o", l.Run, 0)
	f.must(err)
	for _, w := range want {
		select {
		case e := <-events:
			f.same(e, w)
		case <-time.After(5 * time.Second):
			t.Fatalf("event %d missing", w.Seq)
		}
	}
	select {
	case <-gap:
		t.Error("gap without a reason")
	default:
	}
	f.must(f.rdb.ClientKillByFilter(f.ctx, "TYPE", "pubsub").Err())
	select {
	case <-gap:
	case <-time.After(5 * time.Second):
		t.Fatal("a broken subscription is no gap")
	}
	f.admit("o", 1)
	select {
	case e := <-events:
		f.same(e.Type, EventQueued)
	case <-time.After(5 * time.Second):
		t.Fatal("no events after the connection broke")
	}
	cancel()
	for range events { // closes
	}
}

func TestSlowSubscriberIsToldOfTheGap(t *testing.T) {
	f := newFixture(t)
	_, gap, err := f.Subscribe(f.ctx, nil)
	f.must(err)
	e := `{"seq":1,"run":"run_0","type":"queued","at_ms":0}`
	for range eventBuffer/1000 + 1 {
		p := f.rdb.Pipeline()
		for range 1000 {
			p.Publish(f.ctx, f.keys.events(), e)
		}
		_, err := p.Exec(f.ctx)
		f.must(err)
	}
	select {
	case <-gap:
	case <-time.After(5 * time.Second):
		t.Fatal("not told")
	}
}
