package run

import (
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func TestAdmitRefusals(t *testing.T) {
	ok := Admission{Org: "o", Spec: Spec{Command: "true", MaxCostMicros: 1000}, FirstSlice: 200}
	tests := []struct {
		name   string
		change func(*Admission)
		want   error
	}{
		{"no such organisation", func(a *Admission) { a.Org = "other" }, ErrNotFound},
		{"an organisation id that cannot be", func(a *Admission) { a.Org = "o:x" }, ErrNotFound},
		{"below the first slice", func(a *Admission) { a.FirstSlice = 1001 }, ErrBudget},
		{"above what is available", func(a *Admission) { a.Spec.MaxCostMicros = 5001 }, ErrInsufficientFunds},
		{"no hold", func(a *Admission) { a.Spec.MaxCostMicros = 0 }, ErrRange},
		{"negative hold", func(a *Admission) { a.Spec.MaxCostMicros = -1 }, ErrRange},
		{"a hold beyond exact numbers", func(a *Admission) { a.Spec.MaxCostMicros = maxMicros + 1 }, ErrRange},
		{"negative first slice", func(a *Admission) { a.FirstSlice = -1 }, ErrRange},
		{"key without fingerprint", func(a *Admission) { a.IdempotencyKey = "k" }, ErrRange},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f := newFixture(t)
			f.newOrg("o", 0, 5000)
			a := ok
			tt.change(&a)
			_, _, err := f.Admit(f.ctx, a)
			f.want(err, tt.want)
			f.same(f.account("o"), Account{Org: "o", Balance: 5000, Available: 5000, Deposits: 5000})
			runs, _, err := f.List(f.ctx, "o", Page{})
			f.must(err)
			f.same(len(runs), 0)
			f.balanced()
		})
	}
}

func TestAdmitReservesToTheLastMicro(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 5000)
	f.admit("o", 5000)
	f.same(f.account("o").Available, Micros(0))
	_, _, err := f.Admit(f.ctx, Admission{Org: "o", Spec: Spec{Command: "true", MaxCostMicros: 1}})
	f.want(err, ErrInsufficientFunds)
	f.balanced()
}

func TestQueueLimit(t *testing.T) {
	f := newFixture(t, func(c *Config) { c.QueueLimit = 2 })
	f.newOrg("o", 0, 5000)
	f.admit("o", 1)
	second := f.admit("o", 1)
	_, _, err := f.Admit(f.ctx, Admission{Org: "o", Spec: Spec{Command: "true", MaxCostMicros: 1}})
	f.want(err, ErrQueueFull)
	if _, err := f.Cancel(f.ctx, "o", second.ID); err != nil {
		t.Fatal(err)
	}
	f.admit("o", 1)
	f.balanced()
}

func TestIdempotency(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 5000)
	f.newOrg("p", 0, 5000)
	a := Admission{Org: "o", IdempotencyKey: "a key of any text: \x00 \n {}", Fingerprint: "f1", Spec: Spec{Command: "true", MaxCostMicros: 100}}
	first, replayed, err := f.Admit(f.ctx, a)
	f.must(err)
	f.same(replayed, false)

	t.Run("a replay shows the run as it is now", func(t *testing.T) {
		_, err := f.Cancel(f.ctx, "o", first.ID)
		f.must(err)
		r, replayed, err := f.Admit(f.ctx, a)
		f.must(err)
		f.same(replayed, true)
		f.same(r, f.get(first.ID))
		f.same(r.State, Cancelled)
	})
	t.Run("another request conflicts", func(t *testing.T) {
		b := a
		b.Fingerprint = "f2"
		_, _, err := f.Admit(f.ctx, b)
		f.want(err, ErrIdempotencyConflict)
	})
	t.Run("another organisation has keys of its own", func(t *testing.T) {
		b := a
		b.Org, b.Fingerprint = "p", "f2"
		_, replayed, err := f.Admit(f.ctx, b)
		f.must(err)
		f.same(replayed, false)
	})
	t.Run("a refusal is not remembered", func(t *testing.T) {
		b := a
		b.IdempotencyKey, b.Spec.MaxCostMicros = "poor", 1_000_000
		_, _, err := f.Admit(f.ctx, b)
		f.want(err, ErrInsufficientFunds)
		_, err = f.Credit(f.ctx, "o", 1_000_000, "more")
		f.must(err)
		_, replayed, err := f.Admit(f.ctx, b)
		f.must(err)
		f.same(replayed, false)
	})
	t.Run("kept for 24 hours, shorter than any record", func(t *testing.T) {
		ttl := f.rdb.PTTL(f.ctx, f.keys.idem("o", a.IdempotencyKey)).Val()
		if ttl > 24*time.Hour || ttl < 24*time.Hour-time.Minute {
			t.Errorf("lives %v", ttl)
		}
	})
	t.Run("survives another process and a forgotten script", func(t *testing.T) {
		f.must(f.rdb.ScriptFlush(f.ctx).Err())
		r, replayed, err := f.open().Admit(f.ctx, a)
		f.must(err)
		f.same(replayed, true)
		f.same(r.ID, first.ID)
	})
	f.balanced()
}

func TestParallelAdmissionsWithOneKey(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 1_000_000)
	stores := []*Store{f.Store, f.open()}
	ids := make([]ID, 50)
	var fresh atomic.Int64
	var wg sync.WaitGroup
	for i := range ids {
		wg.Go(func() {
			r, replayed, err := stores[i%2].Admit(f.ctx, Admission{Org: "o", IdempotencyKey: "k", Fingerprint: "f1",
				Spec: Spec{Command: "true", MaxCostMicros: 100}})
			if err != nil {
				t.Error(err)
				return
			}
			if !replayed {
				fresh.Add(1)
			}
			ids[i] = r.ID
		})
	}
	wg.Wait()
	for _, id := range ids {
		f.same(id, ids[0])
	}
	f.same(fresh.Load(), int64(1))
	f.same(f.account("o").Held, Micros(100))
	runs, _, err := f.List(f.ctx, "o", Page{})
	f.must(err)
	f.same(len(runs), 1)
	f.balanced()
}

// An admission that is repeated on the network, after the first was carried out and its answer lost, is one run also
// without an idempotency key.
func TestAdmissionRepeatedOnTheNetwork(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 5000)
	r := f.admit("o", 100)
	id, k := string(r.ID), f.keys
	rep, err := f.eval(f.ctx, admitScript, []string{k.idem("o", ""), k.run(id), k.runEvents(id), k.spec(id), k.org("o"),
		k.queue("o"), k.active("o"), k.runs("o"), k.ring()}, k.events(), k.work(), id, "o", f.micros(), "", 1000, 100, 0,
		"{}", "", "0", "", 0, 1, "", "")
	f.must(err)
	f.same(rep.code(), "OK")
	f.same(f.account("o").Held, Micros(100))
	f.same(len(f.types(r.ID)), 1)
	f.balanced()
}

func TestIndexForgetsExpiredRuns(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 5000)
	old := f.admit("o", 100)
	_, err := f.Cancel(f.ctx, "o", old.ID)
	f.must(err)
	for _, key := range f.rdb.Keys(f.ctx, f.keys.run(string(old.ID))+"*").Val() {
		ttl := f.rdb.PTTL(f.ctx, key).Val()
		if ttl < 719*time.Hour || ttl > 720*time.Hour {
			t.Errorf("%s lives %v", key, ttl)
		}
		f.must(f.rdb.Del(f.ctx, key).Err())
	}
	f.admit("o", 100)
	f.same(f.rdb.ZCard(f.ctx, f.keys.runs("o")).Val(), int64(1))
	_, err = f.Get(f.ctx, "o", old.ID)
	f.want(err, ErrNotFound)
	f.balanced()
}

func TestLargeRequest(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 5000)
	big := strings.Repeat("0123456789abcdef", 1<<16)
	spec := Spec{Prompt: "p", MaxCostMicros: 1, Files: []File{{Path: "a", Content: big}, {Path: "b", Content: "AAEC", Encoding: "base64"}}}
	r, _, err := f.Admit(f.ctx, Admission{Org: "o", Spec: spec})
	f.must(err)
	f.same(*f.get(r.ID).Request, spec)
	list, _, err := f.List(f.ctx, "o", Page{})
	f.must(err)
	f.same(list[0].Request.Files, []File{{Path: "a"}, {Path: "b", Encoding: "base64"}})
	f.same(f.take().Spec, spec)
	spec.Files[0].Content = strings.Repeat(big, 65)
	_, _, err = f.Admit(f.ctx, Admission{Org: "o", Spec: spec})
	f.want(err, ErrRange)
}
