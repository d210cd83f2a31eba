package run

import (
	"context"
	"errors"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/run/redisserver/redistest"
)

// With EPHEMERAL_REDIS_WAIT nothing is acknowledged that a replica does not have, also not when it is repeated.
func TestWaitForReplica(t *testing.T) {
	primary := redistest.Start(t)
	replica := primary.Replicas(1)[0]
	f := newFixture(t, func(c *Config) { c.RedisURL, c.Replicas = "redis://"+primary.Addr(), 1 })
	f.newOrg("o", 0, 10_000)
	key, secret, err := f.CreateKey(f.ctx, "o", "k", Member)
	f.must(err)
	f.must(f.oneRun("first"))
	f.must(f.rdb.ScriptFlush(f.ctx).Err())
	f.must(f.oneRun("forgotten-scripts"))

	f.must(replica.Cmd.Process.Signal(syscall.SIGSTOP))
	for range 2 {
		_, _, err := f.Admit(f.ctx, admission("k"))
		f.want(err, ErrUnavailable)
	}
	_, err = f.Credit(f.ctx, "o", 5, "c")
	f.want(err, ErrUnavailable)
	f.want(f.RevokeKey(f.ctx, key.ID), ErrUnavailable)
	l, err := f.tryTake(f.ctx, "n1")
	f.want(err, ErrUnavailable)
	f.same(l, (*Lease)(nil))
	f.clock.advance(f.cfg.Lease * 9 / 10)
	f.must(replica.Cmd.Process.Signal(syscall.SIGCONT))
	// The take that nobody heard of is the node's next one, for the whole time of a lease.
	l = f.take()
	f.same(l.Token, int64(1))
	f.clock.advance(f.cfg.Lease * 9 / 10)
	f.must(second(f.Renew(f.ctx, l)))
	requeued, lost, err := f.Reap(f.ctx, "")
	f.must(err)
	f.same([]int{requeued, lost}, []int{0, 0})
	_, replayed, err := f.Admit(f.ctx, admission("k"))
	f.must(err)
	f.same(replayed, true)
	f.must(second(f.Credit(f.ctx, "o", 5, "c")))
	f.must(f.RevokeKey(f.ctx, key.ID))
	_, err = f.Authenticate(f.ctx, secret)
	f.want(err, ErrUnauthenticated)
	f.same(f.account("o").Held, Micros(100))
	f.balanced()
}

// Writers admit, work and settle while Sentinel replaces a killed primary: whatever was acknowledged is there afterwards,
// once.
func TestSentinelFailOver(t *testing.T) {
	primary := redistest.Start(t)
	primary.Replicas(2)
	url := primary.Sentinel(2)
	f := newFixture(t, func(c *Config) {
		c.RedisURL, c.Replicas, c.Lease = url, 1, time.Minute
	})
	f.Store.now = time.Now
	f.newOrg("o", 1000, 1_000_000)
	insist := func(what string, f func() error) bool {
		for end := time.Now().Add(25 * time.Second); ; time.Sleep(10 * time.Millisecond) {
			err := f()
			if err == nil {
				return true
			}
			if !errors.Is(err, ErrUnavailable) || time.Now().After(end) {
				t.Errorf("%s: %v", what, err)
				return false
			}
		}
	}
	var mu sync.Mutex
	admitted, settled := map[string]ID{}, map[ID]bool{}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				key := word(8)
				var r Run
				if !insist("admit", func() (err error) { r, _, err = f.Admit(f.ctx, admission(key)); return err }) {
					return
				}
				mu.Lock()
				admitted[key] = r.ID
				mu.Unlock()
				var l *Lease
				if !insist("take", func() (err error) { l, err = f.tryTake(f.ctx, "n1"); return err }) || l == nil {
					continue // a take that was not acknowledged keeps a run leased until the lease is over
				}
				if insist("start", func() error { return f.Start(f.ctx, l, Start{At: time.Now(), Machine: "m"}) }) &&
					insist("authorise", func() error { return second(f.Authorize(f.ctx, l, Call{ID: "c", Kind: KindWeb, Min: 7, Max: 7})) }) &&
					insist("capture", func() error { return f.Capture(f.ctx, l, "c", 7) }) &&
					insist("settle", func() error { return second(f.Settle(f.ctx, l, Outcome{At: time.Now(), State: Succeeded})) }) {
					mu.Lock()
					settled[l.Run] = true
					mu.Unlock()
				}
			}
		})
	}
	count := func() int { mu.Lock(); defer mu.Unlock(); return len(settled) }
	more := func(what string) {
		n := count()
		primary.Until(what, func(context.Context) bool { return count() >= n+30 })
	}
	more("30 runs before the fail-over")
	f.must(primary.Cmd.Process.Kill())
	more("30 runs after the fail-over")
	close(stop)
	wg.Wait()

	for key, id := range admitted {
		r, replayed, err := f.Admit(f.ctx, admission(key))
		f.must(err)
		if !replayed || r.ID != id {
			t.Fatalf("key %s: run %s, replayed %t; want %s", key, r.ID, replayed, id)
		}
		if settled[id] && (r.State != Succeeded || r.Money.Charged != 7) {
			t.Errorf("%s: settled, and now %s with %+v", id, r.State, r.Money)
		}
	}
	rep := f.balanced()
	f.same(rep.Charged >= Micros(7*len(settled)), true)
	t.Logf("%d runs admitted, %d settled", len(admitted), len(settled))
}
