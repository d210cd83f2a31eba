package run

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// writer is one of many that do whatever comes to their mind: each call is repeated while the store is away, some are
// repeated for nothing, and now and then one forgets what it was doing, as a crash between two calls would make it.
type writer struct {
	s    *Store
	f    *fixture
	rnd  *rand.Rand
	node string
	fail func(error)
	mine []ID

	steps *atomic.Int64 // calls, of all writers
}

// chaosSteps is how many calls the writers make: EPHEMERAL_CHAOS_STEPS, or 100,000.
func chaosSteps(t *testing.T) int64 {
	t.Helper()
	v := os.Getenv("EPHEMERAL_CHAOS_STEPS")
	if v == "" {
		return 100_000
	}
	n, err := strconv.ParseInt(v, 10, 64)
	if err != nil || n < 1000 {
		t.Fatalf("EPHEMERAL_CHAOS_STEPS is %q: want a number, at least 1000", v)
	}
	return n
}

// chaosSeed is what the writers' decisions follow from: EPHEMERAL_CHAOS_SEED, or 1.
func chaosSeed(t *testing.T) uint64 {
	t.Helper()
	v := os.Getenv("EPHEMERAL_CHAOS_SEED")
	if v == "" {
		return 1
	}
	n, err := strconv.ParseUint(v, 10, 64)
	if err != nil {
		t.Fatalf("EPHEMERAL_CHAOS_SEED is %q: want a number", v)
	}
	t.Logf("EPHEMERAL_CHAOS_SEED=%d", n)
	return n
}

// do calls until the store answers. The errors that a race may bring are no failures; what else comes back is.
func (w *writer) do(call func() error, races ...error) bool {
	for {
		w.steps.Add(1)
		err := call()
		if err == nil && w.rnd.IntN(4) == 0 {
			err = call()
		}
		if errors.Is(err, ErrUnavailable) && w.f.ctx.Err() == nil {
			time.Sleep(time.Millisecond)
			continue
		}
		for _, r := range races {
			if errors.Is(err, r) {
				return false
			}
		}
		if err != nil {
			w.fail(err)
		}
		return err == nil
	}
}

func (w *writer) admit() {
	a := admission(fmt.Sprint(w.node, len(w.mine)))
	a.Org, a.Spec.MaxCostMicros = []string{"a", "b", "c"}[w.rnd.IntN(3)], Micros(100+w.rnd.IntN(900))
	a.Fingerprint = a.Org
	if w.rnd.IntN(3) == 0 {
		a.Key = limitedKey(a.Org)
	}
	var r Run
	if w.do(func() (err error) { r, _, err = w.s.Admit(w.f.ctx, a); return err }, ErrInsufficientFunds, ErrQueueFull) {
		w.mine = append(w.mine, r.ID)
	}
}

func (w *writer) cancel() {
	if len(w.mine) > 0 {
		id := w.mine[w.rnd.IntN(len(w.mine))]
		w.do(func() error { _, err := w.s.Cancel(w.f.ctx, "", id); return err })
	}
}

// work carries out one run, or drops it on the way.
func (w *writer) work() {
	var l *Lease
	if !w.do(func() (err error) {
		if l == nil {
			l, err = w.s.tryTake(w.f.ctx, w.node)
		}
		return err
	}) || l == nil {
		return
	}
	ctx := w.f.ctx
	end := Succeeded
	switch w.rnd.IntN(10) {
	case 0:
		return // forgotten
	case 1:
		w.do(func() error { return w.s.Requeue(ctx, l) }, ErrLeaseLost)
		return
	case 2: // never started
		end = Failed
	default:
		if !w.do(func() error { return w.s.Start(ctx, l, Start{At: time.Now(), Machine: string(l.Run)}) }, ErrLeaseLost) {
			return
		}
	}
	for i := range w.rnd.IntN(6) {
		c := Call{ID: fmt.Sprintf("c%d", i), Kind: []Kind{KindModel, KindWeb, KindCompute}[w.rnd.IntN(3)], Min: Micros(w.rnd.IntN(200))}
		c.Max = c.Min + Micros(w.rnd.IntN(200))
		var granted Micros
		if !w.do(func() (err error) { granted, err = w.s.Authorize(ctx, l, c); return err }, ErrLeaseLost, ErrBudget) {
			continue
		}
		switch w.rnd.IntN(4) {
		case 0: // left pending
		case 1:
			w.do(func() error { return w.s.Void(ctx, l, c.ID) }, ErrLeaseLost)
		default:
			amount := Micros(w.rnd.Int64N(int64(granted) + 1))
			w.do(func() error { return w.s.Capture(ctx, l, c.ID, amount) }, ErrLeaseLost)
		}
	}
	if w.rnd.IntN(10) > 0 {
		w.do(func() error { _, err := w.s.Settle(ctx, l, Outcome{At: time.Now(), State: end}); return err }, ErrLeaseLost)
	}
}

// Many writers, some of which forget what they do, and a Redis that is killed: at any moment the books balance, and at the
// end every run has ended once.
func TestManyWritersAndAKilledRedis(t *testing.T) {
	f, own := ownServer(t)
	total, seed := chaosSteps(t), chaosSeed(t)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute+time.Duration(total/500)*time.Second)
	defer cancel()
	f.ctx = ctx
	f.cfg.Lease = 200 * time.Millisecond
	f.Store.cfg.Lease, f.Store.cfg.QueueLimit, f.Store.now = f.cfg.Lease, 200, time.Now
	for i, org := range []string{"a", "b", "c"} {
		f.newOrg(org, 2+i, 1_000_000_000)
		f.must(f.rdb.HSet(f.ctx, f.keys.limits(limitedKey(org)), "concurrency", 1, "queue", 20).Err())
	}
	const writers = 8
	var steps atomic.Int64
	all := make([]*writer, writers)
	var wg sync.WaitGroup
	for i := range all {
		w := &writer{s: f.Store, f: f, node: fmt.Sprintf("n%d", i), rnd: rand.New(rand.NewPCG(seed, uint64(i))), steps: &steps, fail: func(err error) { t.Error(err) }}
		all[i] = w
		wg.Go(func() {
			for steps.Load() < total && f.ctx.Err() == nil {
				switch n := w.rnd.IntN(20); {
				case n < 8:
					w.admit()
				case n < 9:
					w.cancel()
				case n < 10:
					w.do(func() error { _, _, err := w.s.Reap(f.ctx, ""); return err })
				default:
					w.work()
				}
			}
		})
	}
	const kills = 4
	audits := 0
	for n := int64(1); n < 4*(kills+1); n++ {
		for steps.Load() < n*total/(4*(kills+1)) && f.ctx.Err() == nil {
			time.Sleep(5 * time.Millisecond)
		}
		if pid := own.PID(); n%4 == 0 && pid != 0 {
			f.must(syscall.Kill(pid, syscall.SIGKILL))
		}
		rep, err := f.Audit(f.ctx)
		if errors.Is(err, ErrUnavailable) {
			continue
		}
		f.must(err)
		f.must(rep.Err())
		audits++
	}
	wg.Wait()
	f.settleAll()
	rep := f.balanced()
	f.same([]Micros{rep.Held, rep.OpenHoldSum}, []Micros{0, 0})
	runs := 0
	for _, w := range all {
		for _, id := range w.mine {
			runs++
			f.endedOnce(id)
		}
	}
	if runs != rep.Runs {
		t.Errorf("%d runs acknowledged, %d kept", runs, rep.Runs)
	}
	for _, org := range []string{"a", "b", "c"} {
		f.same(f.rdb.HMGet(f.ctx, f.keys.limits(limitedKey(org)), "slots", "waiting").Val(), []any{"0", "0"})
	}
	t.Logf("%d steps, %d runs, %d audits, redis-server started %d times", steps.Load(), runs, audits, own.Starts())
}

// settleAll brings everything to its end.
func (f *fixture) settleAll() {
	f.t.Helper()
	for {
		time.Sleep(f.cfg.Lease)
		_, _, err := f.Reap(f.ctx, "")
		f.must(err)
		n := 0
		for {
			l, err := f.tryTake(f.ctx, "last")
			f.must(err)
			if l == nil {
				break
			}
			n++
			_, err = f.Settle(f.ctx, l, Outcome{State: Failed})
			f.must(err)
		}
		if n == 0 && f.rdb.ZCard(f.ctx, f.keys.leases()).Val() == 0 {
			return
		}
	}
}

// endedOnce fails unless the run has one terminal event and one settlement, the last event.
func (f *fixture) endedOnce(id ID) {
	f.t.Helper()
	r := f.get(id)
	ends := 0
	types := f.types(id)
	for _, e := range types {
		if State(e).Terminal() || e == EventWorkerDestroyed {
			ends++
		}
	}
	if ends != 2 || types[len(types)-1] != EventWorkerDestroyed || !r.State.Terminal() || r.Money.Charged+r.Money.Released != r.Money.Reserved || r.Money.Charged > r.Money.Reserved {
		f.t.Errorf("%s: state %s, money %+v, events %v", id, r.State, r.Money, types)
	}
}
