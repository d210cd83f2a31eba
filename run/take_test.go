package run

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"
)

func TestTakeIsFairAndOldestFirst(t *testing.T) {
	f := newFixture(t)
	for _, org := range []string{"a", "b", "c"} {
		f.newOrg(org, 0, 1000)
	}
	var want []ID
	admit := func(org string) ID {
		f.clock.advance(time.Millisecond)
		return f.admit(org, 1).ID
	}
	a1, a2, a3 := admit("a"), admit("a"), admit("a")
	b1, b2, c1 := admit("b"), admit("b"), admit("c")
	want = append(want, a1, b1, c1, a2, b2, a3)
	for i, id := range want {
		if l := f.take(); l.Run != id {
			t.Fatalf("take %d: %s of %s, want %s", i, l.Run, l.Org, id)
		}
	}
	f.balanced()
}

func TestBurstDoesNotDelayASingleRun(t *testing.T) {
	f := newFixture(t, func(c *Config) { c.Concurrency = 1000 })
	f.newOrg("burst", 0, 1000)
	f.newOrg("single", 0, 1000)
	for range 100 {
		f.admit("burst", 1)
	}
	for range 5 {
		f.take()
	}
	id := f.admit("single", 1).ID
	f.same(f.take().Run, id)
}

func TestConcurrencyLimit(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 2, 1000)
	for range 3 {
		f.admit("o", 1)
	}
	first, _ := f.take(), f.take()
	l, err := f.tryTake(f.ctx, "n1")
	f.must(err)
	if l != nil {
		t.Fatal("third run taken with a limit of 2")
	}
	_, err = f.Settle(f.ctx, first, Outcome{State: Failed})
	f.must(err)
	f.take()
	f.balanced()
}

func TestDefaultConcurrencyLimit(t *testing.T) {
	f := newFixture(t, func(c *Config) { c.Concurrency = 1 })
	f.newOrg("o", 0, 1000)
	f.admit("o", 1)
	f.admit("o", 1)
	f.take()
	l, err := f.tryTake(f.ctx, "n1")
	f.must(err)
	if l != nil {
		t.Fatal("second run taken with a default limit of 1")
	}
}

// A node with a lower default keeps to its own, whatever the one before it saw.
func TestNodesWithDifferentDefaults(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 1000)
	for range 3 {
		f.admit("o", 1)
	}
	f.take()
	other := f.open()
	other.cfg.Concurrency = 1
	l, err := other.tryTake(f.ctx, "n2")
	f.must(err)
	if l != nil {
		t.Fatal("second run taken with a default limit of 1")
	}
}

// A reaper that looked before the run was taken again does not touch it.
func TestReapWithAStaleLook(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 1000)
	r := f.admit("o", 1)
	f.must(f.Requeue(f.ctx, f.take()))
	f.take()
	f.clock.advance(2 * f.cfg.Lease)
	code, err := f.reapOne(f.ctx, r.ID, "o", "1", "n1")
	f.must(err)
	f.same(code, "SKIP")
	code, err = f.reapOne(f.ctx, r.ID, "o", "2", "")
	f.must(err)
	f.same(code, "REQUEUED")
	code, err = f.reapOne(f.ctx, r.ID, "o", "2", "")
	f.must(err)
	f.same(code, "SKIP")
	f.balanced()
}

func TestTakeEndsWithItsContext(t *testing.T) {
	f := newFixture(t)
	ctx, cancel := context.WithTimeout(f.ctx, 50*time.Millisecond)
	defer cancel()
	_, err := f.Take(ctx, "n1")
	f.want(err, context.DeadlineExceeded)
	_, err = f.Take(f.ctx, "no such:node")
	f.want(err, ErrRange)
}

// Every run is taken at once by some waiting node: none may sit until the fallback timer.
func TestNoLostWakeUp(t *testing.T) {
	f := newFixture(t, func(c *Config) { c.Concurrency = 1000 })
	f.newOrg("o", 0, 1_000_000)
	const rounds, takers = 300, 4
	taken := make(chan ID, rounds)
	ctx, cancel := context.WithCancel(f.ctx)
	var wg sync.WaitGroup
	for i := range takers {
		s := f.Store
		if i >= takers/2 {
			s = f.open()
		}
		wg.Go(func() {
			for {
				l, err := s.Take(ctx, fmt.Sprintf("n%d", i))
				if err != nil {
					if ctx.Err() == nil {
						t.Error(err)
					}
					return
				}
				taken <- l.Run
			}
		})
	}
	time.Sleep(100 * time.Millisecond) // let the subscriptions come up
	admitted := map[ID]bool{}
	begin := time.Now()
	for i := 0; i < rounds; {
		for range 1 + i%3 {
			admitted[f.admit("o", 1).ID] = true
			i++
		}
		for len(admitted) > 0 {
			select {
			case id := <-taken:
				if !admitted[id] {
					t.Fatalf("%s taken twice", id)
				}
				delete(admitted, id)
			case <-time.After(pollInterval * 8 / 10):
				t.Fatalf("run %d waits for the fallback timer", i)
			}
		}
	}
	t.Logf("%d runs taken in %v", rounds, time.Since(begin))
	cancel()
	wg.Wait()
}

func TestTakeRepeatedOnTheNetwork(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 1000)
	f.admit("o", 1)
	f.admit("o", 1)
	args := []any{f.keys.events(), f.keys.work(), "n1", f.micros(), f.micros() + 1e7, 10_000, 5, 1000, "{}", "{}", ""}
	for _, k := range f.keys.closing("<org>", "<run>") {
		args = append(args, k)
	}
	keys := []string{f.keys.ring(), f.keys.turn(), f.keys.leases(), f.keys.answer("x")}
	first, err := f.eval(f.ctx, takeScript, keys, args...)
	f.must(err)
	again, err := f.eval(f.ctx, takeScript, keys, args...)
	f.must(err)
	f.same(again, first)
	f.same(f.rdb.SCard(f.ctx, f.keys.active("o")).Val(), int64(1))
	f.balanced()
}

func TestRenewAndFencing(t *testing.T) {
	f := newFixture(t)
	l := f.started(1000)
	f.clock.advance(f.cfg.Lease - time.Second)
	asked, err := f.Renew(f.ctx, l)
	f.must(err)
	f.same(asked, false)
	f.clock.advance(f.cfg.Lease - time.Second)
	requeued, lost, err := f.Reap(f.ctx, "")
	f.must(err)
	f.same([2]int{requeued, lost}, [2]int{0, 0})

	_, err = f.Cancel(f.ctx, "o", l.Run)
	f.must(err)
	asked, err = f.Renew(f.ctx, l)
	f.must(err)
	f.same(asked, true)

	f.clock.advance(f.cfg.Lease + time.Second)
	_, lost, err = f.Reap(f.ctx, "")
	f.must(err)
	f.same(lost, 1)
	// The old node wakes up: it can write nothing.
	_, err = f.Renew(f.ctx, l)
	f.want(err, ErrLeaseLost)
	f.want(f.Start(f.ctx, l, Start{At: f.clock.now()}), ErrLeaseLost)
	f.want(f.Append(f.ctx, l, NewEvent{Type: EventShell, At: f.clock.now(), Data: ShellData{}}), ErrLeaseLost)
	_, err = f.Authorize(f.ctx, l, Call{ID: "c", Kind: KindWeb, Max: 1})
	f.want(err, ErrLeaseLost)
	f.want(f.Capture(f.ctx, l, "c", 1), ErrLeaseLost)
	f.want(f.Void(f.ctx, l, "c"), ErrLeaseLost)
	f.want(f.Requeue(f.ctx, l), ErrLeaseLost)
	_, err = f.Settle(f.ctx, l, Outcome{State: Succeeded})
	f.want(err, ErrLeaseLost)
	f.same(f.get(l.Run).State, Failed)
	f.balanced()
}

func TestRequeue(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 10_000)
	first := f.admit("o", 1000)
	f.clock.advance(time.Millisecond)
	f.admit("o", 1000)
	l := f.take()
	_, err := f.Authorize(f.ctx, l, Call{ID: "compute-1", Kind: KindCompute, Min: 200, Max: 200})
	f.must(err)
	f.must(f.Capture(f.ctx, l, "compute-1", 200))
	f.must(f.Requeue(f.ctx, l))
	f.must(f.Requeue(f.ctx, l)) // again
	r := f.get(first.ID)
	f.same(r.State, Queued)
	f.same(r.Node, "")
	f.same(r.Money, Money{Reserved: 1000})
	_, err = f.Renew(f.ctx, l)
	f.want(err, ErrLeaseLost)
	f.balanced()

	second := f.take()
	f.same(second.Run, first.ID) // it kept its place
	f.same(second.Token, int64(2))
	_, err = f.Authorize(f.ctx, second, Call{ID: "compute-1", Kind: KindCompute, Min: 200, Max: 200})
	f.must(err)
	f.want(f.Requeue(f.ctx, l), ErrLeaseLost)
	f.must(f.Start(f.ctx, second, Start{At: f.clock.now(), Machine: "m"}))
	f.want(f.Requeue(f.ctx, second), ErrState)
	f.balanced()
}

func TestRequeueOfACancelledRunEndsIt(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 10_000)
	f.admit("o", 1000)
	l := f.take()
	_, err := f.Cancel(f.ctx, "o", l.Run)
	f.must(err)
	f.must(f.Requeue(f.ctx, l))
	f.same(f.get(l.Run).State, Cancelled)
	f.same(f.types(l.Run), []EventType{EventQueued, "cancelled", EventWorkerDestroyed})
	f.same(f.account("o").Held, Micros(0))
	f.balanced()
}

func TestReap(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 100_000)
	for range 4 {
		f.admit("o", 1000)
		f.clock.advance(time.Millisecond)
	}
	waiting, working, cancelled := f.take(), f.take(), f.take()
	other, err := f.Take(f.ctx, "n2")
	f.must(err)
	for _, l := range []*Lease{waiting, working, cancelled, other} {
		_, err := f.Authorize(f.ctx, l, Call{ID: "compute-1", Kind: KindCompute, Min: 200, Max: 200})
		f.must(err)
		f.must(f.Capture(f.ctx, l, "compute-1", 200))
		_, err = f.Authorize(f.ctx, l, Call{ID: "model-1", Kind: KindModel, Min: 1, Max: 300})
		f.must(err)
	}
	_, err = f.Cancel(f.ctx, "", cancelled.Run)
	f.must(err)
	f.must(f.Start(f.ctx, working, Start{At: f.clock.now(), Machine: "m"}))
	f.must(f.Append(f.ctx, working, NewEvent{Type: EventModel, At: f.clock.now(), Data: ModelData{InputTokens: 7, OutputTokens: 3, Status: 200}},
		NewEvent{Type: EventShell, At: f.clock.now(), Data: ShellData{Command: "ls"}}))
	f.clock.advance(5 * time.Millisecond)

	requeued, lost, err := f.Reap(f.ctx, "n1")
	f.must(err)
	f.same([2]int{requeued, lost}, [2]int{1, 2})
	f.same(f.get(waiting.Run).State, Queued)
	f.same(f.get(cancelled.Run).State, Cancelled)
	f.same(f.get(cancelled.Run).Money.Charged, Micros(0))
	f.same(f.get(other.Run).State, Starting)
	r := f.get(working.Run)
	f.same(r.State, Failed)
	f.same(r.Error.Code, "node_lost")
	f.same(r.Money, Money{Reserved: 1000, Charged: 200, Released: 800, Compute: 200})
	f.same(r.Usage, Usage{ModelCalls: 1, InputTokens: 7, OutputTokens: 3, TotalTokens: 10, ShellCommands: 1})
	wall := 0.0
	for _, st := range r.Stages {
		wall += st.Ms
	}
	f.same(wall, float64(r.EndedAt.Sub(r.QueuedAt).Microseconds())/1000)
	f.balanced()

	requeued, lost, err = f.Reap(f.ctx, "n1") // again
	f.must(err)
	f.same([2]int{requeued, lost}, [2]int{0, 0})
	f.same(f.take().Run, waiting.Run)
}

func TestRunThatLosesItsNodesIsGivenUp(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 100_000)
	r := f.admit("o", 1000)
	for i := 1; i <= maxLost; i++ {
		f.same(f.take().Run, r.ID)
		f.clock.advance(f.cfg.Lease + time.Second)
		requeued, lost, err := f.Reap(f.ctx, "")
		f.must(err)
		if (lost == 1) != (i == maxLost) || requeued+lost != 1 {
			t.Fatalf("loss %d: requeued %d, ended %d", i, requeued, lost)
		}
	}
	f.same(f.get(r.ID).Error.Code, "node_lost")
	f.same(f.account("o").Charged, Micros(0))
	f.balanced()
}
