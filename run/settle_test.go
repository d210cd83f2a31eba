package run

import (
	"bytes"
	"crypto/rand"
	"errors"
	"sync"
	"testing"
	"time"
)

func TestSettleStates(t *testing.T) {
	for _, state := range []State{Succeeded, Failed, Cancelled, TimedOut, BudgetExhausted} {
		t.Run(string(state), func(t *testing.T) {
			f := newFixture(t)
			l := f.started(1000)
			r, err := f.Settle(f.ctx, l, Outcome{State: state, Error: &Error{Code: "c", Detail: "d"}})
			f.must(err)
			f.same(r.State, state)
			f.same(f.types(l.Run)[2:], []EventType{EventType(state), EventWorkerDestroyed})
			f.want(f.Start(f.ctx, l, Start{}), ErrLeaseLost)
			f.balanced()
		})
	}
	f := newFixture(t)
	l := f.started(1000)
	for _, state := range []State{Queued, Starting, Running, "", "won"} {
		_, err := f.Settle(f.ctx, l, Outcome{State: state})
		f.want(err, ErrRange)
	}
}

func TestSettleFromStarting(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 1000)
	f.admit("o", 1000)
	l := f.take()
	f.clock.advance(3 * time.Millisecond)
	r, err := f.Settle(f.ctx, l, Outcome{State: Failed, Error: &Error{Code: "prepare_failed"}, Stages: []Stage{{"queue", 0}, {"claim", 2.5}}})
	f.must(err)
	f.same(r.StartedAt, (*time.Time)(nil))
	f.same(r.Stages, []Stage{{"queue", 0}, {"claim", 2.5}, {"settle", 0.5}})
	f.balanced()
}

// Stages that claim more than the wall time move the end: their sum is the wall time in any case.
func TestStagesSumToWallTime(t *testing.T) {
	f := newFixture(t)
	l := f.started(1000)
	f.clock.advance(time.Millisecond)
	r, err := f.Settle(f.ctx, l, Outcome{At: f.clock.now(), State: Succeeded, Stages: []Stage{{"queue", 2}, {"worker", 7.25}}})
	f.must(err)
	f.same(r.EndedAt.Sub(r.QueuedAt), 9250*time.Microsecond)
	f.same(r.Stages[2], Stage{"settle", 0})
}

func TestResultStreams(t *testing.T) {
	random := make([]byte, maxStreamBytes)
	rand.Read(random)
	for name, b := range map[string][]byte{
		"empty":       {},
		"text":        []byte("a\nb"),
		"NUL":         []byte("a\x00b\x00"),
		"split UTF-8": []byte("caf\xc3"),
		"10 MB text":  bytes.Repeat([]byte("0123456789"), 1<<20),
		"the largest": random,
		"one piece":   random[:pieceBytes],
		"two pieces":  random[:pieceBytes+1],
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			l := f.started(1000)
			exit := 0
			res := &Result{ExitCode: &exit, Stdout: NewStream(b, int64(len(b))), Stderr: NewStream(b, int64(len(b))+1)}
			_, err := f.Settle(f.ctx, l, Outcome{State: Succeeded, Result: res})
			f.must(err)
			r := f.get(l.Run)
			f.same(r.Result, res)
			got, err := r.Result.Stdout.bytes()
			f.must(err)
			if !bytes.Equal(got, b) {
				t.Error("bytes differ")
			}
			for _, key := range f.rdb.Keys(f.ctx, f.keys.run(string(l.Run))+"*").Val() {
				if ttl := f.rdb.PTTL(f.ctx, key).Val(); ttl < 719*time.Hour {
					t.Errorf("%s lives %v", key, ttl)
				}
			}
		})
	}
	f := newFixture(t)
	l := f.started(1000)
	for name, res := range map[string]Result{
		"too large":        {Stdout: NewStream(append(random, 0), maxStreamBytes+1)},
		"not base64":       {Stdout: &Stream{Content: "*", Encoding: "base64"}},
		"unknown encoding": {Stderr: &Stream{Encoding: "rot13"}},
	} {
		_, err := f.Settle(f.ctx, l, Outcome{State: Succeeded, Result: &res})
		if !errors.Is(err, ErrRange) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A stream that went missing between its pieces and the settlement is put again; half a result is never settled.
func TestSettleNoticesAMissingStream(t *testing.T) {
	f := newFixture(t)
	l := f.started(1000)
	b := bytes.Repeat([]byte("x"), 2<<20)
	args, err := f.settleArgs(l, Outcome{State: Succeeded}, false)
	f.must(err)
	placed, err := f.place(f.ctx, l, [3][]byte{nil, b, nil})
	f.must(err)
	f.must(f.rdb.SetRange(f.ctx, f.keys.stdout(string(l.Run)), int64(len(b)), "y").Err())
	r, err := f.eval(f.ctx, settleScript, f.keys.closing("o", string(l.Run)), append(args, placed...)...)
	f.must(err)
	f.same(r.code(), "SHORT")
	f.same(f.get(l.Run).State, Running)
}

func TestCancel(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 10_000)
	asked, err := f.Cancels(f.ctx)
	f.must(err)
	queued := f.admit("o", 1000)
	f.clock.advance(2 * time.Millisecond)
	for range 2 {
		r, err := f.Cancel(f.ctx, "o", queued.ID)
		f.must(err)
		f.same(r.State, Cancelled)
		f.same(r.Money, Money{Reserved: 1000, Released: 1000})
		f.same(r.Stages, []Stage{{"queue", 2}, {"settle", 0}})
	}
	f.same(f.types(queued.ID), []EventType{EventQueued, "cancelled", EventWorkerDestroyed})

	f.admit("o", 1000)
	l := f.take()
	r, err := f.Cancel(f.ctx, "o", l.Run)
	f.must(err)
	f.same(r.State, Starting)
	select {
	case id := <-asked:
		f.same(id, l.Run)
	case <-time.After(5 * time.Second):
		t.Fatal("the node is not told")
	}
	yes, err := f.Renew(f.ctx, l)
	f.must(err)
	f.same(yes, true)
	f.begin(l)
	_, err = f.Settle(f.ctx, l, Outcome{State: Succeeded})
	f.must(err)
	r, err = f.Cancel(f.ctx, "o", l.Run)
	f.must(err)
	f.same(r.State, Succeeded)

	_, err = f.Cancel(f.ctx, "p", l.Run)
	f.want(err, ErrNotFound)
	_, err = f.Cancel(f.ctx, "o", "run_x")
	f.want(err, ErrNotFound)
	f.balanced()
}

// Whoever comes first wins, and the other sees what the first decided.
func TestCancelAgainstTakeAndSettle(t *testing.T) {
	f := newFixture(t, func(c *Config) { c.Concurrency = 1000 })
	f.newOrg("o", 0, 1_000_000)
	for range 100 {
		id := f.admit("o", 100).ID
		var l *Lease
		var wg sync.WaitGroup
		wg.Go(func() {
			if _, err := f.Cancel(f.ctx, "o", id); err != nil {
				t.Error(err)
			}
		})
		wg.Go(func() {
			var err error
			if l, err = f.tryTake(f.ctx, "n1"); err != nil {
				t.Error(err)
			}
		})
		wg.Wait()
		if l == nil {
			f.same(f.get(id).State, Cancelled)
			continue
		}
		f.begin(l)
		wg.Go(func() {
			if _, err := f.Settle(f.ctx, l, Outcome{State: Succeeded}); err != nil {
				t.Error(err)
			}
		})
		wg.Go(func() {
			if _, err := f.Cancel(f.ctx, "o", id); err != nil {
				t.Error(err)
			}
		})
		wg.Wait()
		f.same(f.get(id).State, Succeeded)
		f.same(f.types(id), []EventType{EventQueued, EventMicroVMReady, "succeeded", EventWorkerDestroyed})
	}
	f.same(f.balanced().Held, Micros(0))
}

// A book that does not fit is refused whole, not clamped.
func TestSettleRefusesADamagedAccount(t *testing.T) {
	f := newFixture(t)
	l := f.started(1000)
	f.must(f.rdb.HSet(f.ctx, f.keys.org("o"), "held", 999).Err())
	_, err := f.Settle(f.ctx, l, Outcome{State: Succeeded})
	f.want(err, errCorrupt)
	f.same(f.get(l.Run).State, Running)
	f.same(f.account("o").Held, Micros(999))
}
