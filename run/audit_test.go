package run

import (
	"fmt"
	"sync"
	"testing"

	"github.com/redis/go-redis/v9"
)

func TestAuditFindsDoctoring(t *testing.T) {
	open, ended := "", ""
	doctor := map[string]func(p redis.Pipeliner, f *fixture){
		"balance":  func(p redis.Pipeliner, f *fixture) { p.HIncrBy(f.ctx, f.keys.org("o"), "balance", 1) },
		"held":     func(p redis.Pipeliner, f *fixture) { p.HIncrBy(f.ctx, f.keys.org("o"), "held", -1) },
		"deposits": func(p redis.Pipeliner, f *fixture) { p.HIncrBy(f.ctx, f.keys.org("o"), "deposits", 1) },
		"charged":  func(p redis.Pipeliner, f *fixture) { p.HIncrBy(f.ctx, f.keys.org("o"), "charged", 1) },
		"charged and balance": func(p redis.Pipeliner, f *fixture) {
			p.HIncrBy(f.ctx, f.keys.org("o"), "charged", 1)
			p.HIncrBy(f.ctx, f.keys.org("o"), "balance", -1)
		},
		"deposit and balance": func(p redis.Pipeliner, f *fixture) {
			p.HIncrBy(f.ctx, f.keys.org("o"), "deposits", 1)
			p.HIncrBy(f.ctx, f.keys.org("o"), "balance", 1)
		},
		"no number":            func(p redis.Pipeliner, f *fixture) { p.HSet(f.ctx, f.keys.org("o"), "balance", "much") },
		"account removed":      func(p redis.Pipeliner, f *fixture) { p.Del(f.ctx, f.keys.org("o")) },
		"hold of an open run":  func(p redis.Pipeliner, f *fixture) { p.HIncrBy(f.ctx, f.keys.run(open), "reserved", 1) },
		"hold of an ended run": func(p redis.Pipeliner, f *fixture) { p.HIncrBy(f.ctx, f.keys.run(ended), "reserved", 1) },
		"charge of a run":      func(p redis.Pipeliner, f *fixture) { p.HIncrBy(f.ctx, f.keys.run(ended), "charged", 1) },
		"part of a charge": func(p redis.Pipeliner, f *fixture) {
			p.HIncrBy(f.ctx, f.keys.run(ended), "model", 1)
			p.HIncrBy(f.ctx, f.keys.run(ended), "web", -1)
		},
		"charge, consistently": func(p redis.Pipeliner, f *fixture) {
			p.HIncrBy(f.ctx, f.keys.run(ended), "charged", 1)
			p.HIncrBy(f.ctx, f.keys.run(ended), "model", 1)
			p.HIncrBy(f.ctx, f.keys.run(ended), "released", -1)
			p.HSet(f.ctx, f.keys.calls(ended), "m", "c model 500 301")
		},
		"pending":          func(p redis.Pipeliner, f *fixture) { p.HIncrBy(f.ctx, f.keys.run(open), "pending", -1) },
		"call above grant": func(p redis.Pipeliner, f *fixture) { p.HSet(f.ctx, f.keys.calls(ended), "m", "c model 200 300") },
		"call removed":     func(p redis.Pipeliner, f *fixture) { p.HDel(f.ctx, f.keys.calls(ended), "m") },
		"call damaged":     func(p redis.Pipeliner, f *fixture) { p.HSet(f.ctx, f.keys.calls(ended), "m", "x") },
		"ledger charge":    func(p redis.Pipeliner, f *fixture) { p.HSet(f.ctx, f.keys.ledger("o"), "c:"+ended, "2 1 301 301 0 0") },
		"ledger removed":   func(p redis.Pipeliner, f *fixture) { p.HDel(f.ctx, f.keys.ledger("o"), "c:"+ended) },
		"ledger damaged":   func(p redis.Pipeliner, f *fixture) { p.HSet(f.ctx, f.keys.ledger("o"), "d:start", "x") },
		"order changed":    func(p redis.Pipeliner, f *fixture) { p.LSet(f.ctx, f.keys.entries("o"), 0, "c:"+ended+" 1000000") },
		"running balance":  func(p redis.Pipeliner, f *fixture) { p.LSet(f.ctx, f.keys.entries("o"), 1, "c:"+ended+" 999701") },
		"entry dropped":    func(p redis.Pipeliner, f *fixture) { p.RPop(f.ctx, f.keys.entries("o")) },
		"entry added":      func(p redis.Pipeliner, f *fixture) { p.RPush(f.ctx, f.keys.entries("o"), "d:x 1") },
		"deposit removed":  func(p redis.Pipeliner, f *fixture) { p.HDel(f.ctx, f.keys.ledger("o"), "d:start") },
		"deposit invented": func(p redis.Pipeliner, f *fixture) { p.HSet(f.ctx, f.keys.ledger("o"), "d:gift", "1 1 1000") },
		"deposit changed":  func(p redis.Pipeliner, f *fixture) { p.HSet(f.ctx, f.keys.ledger("o"), "d:start", "1 1 1") },
		"early charge":     func(p redis.Pipeliner, f *fixture) { p.HSet(f.ctx, f.keys.ledger("o"), "c:"+open, "3 1 1 1 0 0") },
		"state":            func(p redis.Pipeliner, f *fixture) { p.HSet(f.ctx, f.keys.run(open), "state", "queued") },
		"lost from queue":  func(p redis.Pipeliner, f *fixture) { p.SRem(f.ctx, f.keys.active("o"), open) },
		"lease lost":       func(p redis.Pipeliner, f *fixture) { p.ZRem(f.ctx, f.keys.leases(), open) },
		"record removed":   func(p redis.Pipeliner, f *fixture) { p.Del(f.ctx, f.keys.run(ended)) },
		"open run removed": func(p redis.Pipeliner, f *fixture) { p.Del(f.ctx, f.keys.run(open)) },
		"owner":            func(p redis.Pipeliner, f *fixture) { p.HSet(f.ctx, f.keys.run(ended), "org", "p") },
	}
	for name, change := range doctor {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			l := f.started(1000)
			_, err := f.Authorize(f.ctx, l, Call{ID: "m", Kind: KindModel, Min: 1, Max: 500})
			f.must(err)
			f.must(f.Capture(f.ctx, l, "m", 300))
			_, err = f.Settle(f.ctx, l, Outcome{State: Succeeded})
			f.must(err)
			f.admit("o", 1000)
			other := f.take()
			_, err = f.Authorize(f.ctx, other, Call{ID: "m", Kind: KindModel, Min: 1, Max: 500})
			f.must(err)
			rep := f.balanced()
			f.same([]int{rep.Orgs, rep.Runs, rep.OpenHolds}, []int{1, 2, 1})
			f.same([]Micros{rep.Deposits, rep.Balance, rep.Held, rep.Charged, rep.OpenHoldSum}, []Micros{1_000_000, 999_700, 1000, 300, 1000})
			open, ended = string(other.Run), string(l.Run)
			_, err = f.rdb.Pipelined(f.ctx, func(p redis.Pipeliner) error { change(p, f); return nil })
			f.must(err)
			rep, err = f.Audit(f.ctx)
			f.must(err)
			if rep.Err() == nil {
				t.Fatal("not found")
			}
			t.Log(rep.Err())
		})
	}
}

// The audit is right while the cell works, too.
func TestAuditOfAWorkingCell(t *testing.T) {
	f := newFixture(t, func(c *Config) { c.Concurrency = 1000 })
	f.newOrg("o", 0, 1_000_000)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for i := range 3 {
		wg.Go(func() {
			for n := 0; n < 1000; n++ {
				select {
				case <-stop:
					return
				default:
				}
				if err := f.oneRun(fmt.Sprintf("w%d-%d", i, n)); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	for range 10 {
		f.balanced()
	}
	close(stop)
	wg.Wait()
	f.same(f.balanced().Held, Micros(0))
}

// oneRun admits a run, takes one, charges and settles it.
func (f *fixture) oneRun(ref string) error {
	if _, err := f.Credit(f.ctx, "o", 10, ref); err != nil {
		return err
	}
	if _, _, err := f.Admit(f.ctx, Admission{Org: "o", Spec: Spec{Command: "true", MaxCostMicros: 10}}); err != nil {
		return err
	}
	l, err := f.tryTake(f.ctx, "n1")
	if err != nil || l == nil {
		return err
	}
	if err := f.Start(f.ctx, l, Start{At: f.clock.now(), Machine: "m1"}); err != nil {
		return err
	}
	if _, err := f.Authorize(f.ctx, l, Call{ID: "m", Kind: KindModel, Min: 1, Max: 5}); err != nil {
		return err
	}
	if err := f.Capture(f.ctx, l, "m", 3); err != nil {
		return err
	}
	_, err = f.Settle(f.ctx, l, Outcome{State: Succeeded})
	return err
}
