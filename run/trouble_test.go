package run

import (
	"context"
	"log/slog"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/ephemeral-run/ephemeral/run/redisserver"
)

// ownServer is a fixture on a Redis of its own, with the settings that serve gives it, which the test may hurt.
func ownServer(t *testing.T) (*fixture, *redisserver.Server) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	own, err := redisserver.Start(ctx, filepath.Join(t.TempDir(), "redis"), redisserver.Options{Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { own.Close() })
	return newFixture(t, func(c *Config) { c.RedisURL = own.URL() }), own
}

func admission(key string) Admission {
	return Admission{Org: "o", IdempotencyKey: key, Fingerprint: "f", Spec: Spec{Command: "true", MaxCostMicros: 100}}
}

// What was acknowledged survives a killed Redis; what was not may be repeated; the store recovers alone.
func TestKilledRedis(t *testing.T) {
	f, own := ownServer(t)
	l := f.started(1000)
	admitted := map[string]ID{}
	pid, killed := own.PID(), false
	for i := range 200 {
		if i == 50 {
			f.must(syscall.Kill(pid, syscall.SIGKILL))
			killed = true
		}
		key := word(8)
		for {
			r, _, err := f.Admit(f.ctx, admission(key))
			if err == nil {
				admitted[key] = r.ID
				break
			}
			f.want(err, ErrUnavailable)
			time.Sleep(10 * time.Millisecond)
		}
	}
	if !killed || own.Starts() != 2 {
		t.Fatalf("started %d times", own.Starts())
	}
	for key, id := range admitted {
		r, replayed, err := f.Admit(f.ctx, admission(key))
		f.must(err)
		if !replayed || r.ID != id {
			t.Fatalf("key %s: run %s, replayed %t; want %s", key, r.ID, replayed, id)
		}
	}
	f.same(f.account("o").Held, Micros(1000+100*len(admitted)))
	_, err := f.Settle(f.ctx, l, Outcome{State: Succeeded})
	f.must(err)
	f.balanced()
}

func TestTakeWakesAfterRedisCameBack(t *testing.T) {
	f, own := ownServer(t)
	f.newOrg("o", 0, 1000)
	got := make(chan *Lease)
	go func() {
		for {
			l, err := f.Take(f.ctx, "n1")
			if err == nil || f.ctx.Err() != nil {
				got <- l
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
	}()
	time.Sleep(50 * time.Millisecond)
	f.must(syscall.Kill(own.PID(), syscall.SIGKILL))
	var id ID
	for id == "" {
		if r, _, err := f.Admit(f.ctx, admission("k")); err == nil {
			id = r.ID
		}
	}
	select {
	case l := <-got:
		f.same(l.Run, id)
	case <-time.After(10 * time.Second):
		t.Fatal("not taken")
	}
}

// A Redis that is gone is said to be unavailable, soon.
func TestGoneRedis(t *testing.T) {
	f, own := ownServer(t)
	l := f.started(1000)
	f.must(own.Close())
	begin := time.Now()
	for name, call := range map[string]func() error{
		"ping":         func() error { return f.Ping(f.ctx) },
		"admit":        func() error { _, _, err := f.Admit(f.ctx, admission("k")); return err },
		"get":          func() error { _, err := f.Get(f.ctx, "o", l.Run); return err },
		"events":       func() error { _, _, err := f.Events(f.ctx, "o", l.Run, 0); return err },
		"list":         func() error { _, _, err := f.List(f.ctx, "o", Page{}); return err },
		"account":      func() error { _, err := f.Account(f.ctx, "o"); return err },
		"orgs":         func() error { _, err := f.Orgs(f.ctx); return err },
		"authenticate": func() error { _, err := f.Authenticate(f.ctx, "eph_"+strings.Repeat("A", 43)); return err },
		"take":         func() error { _, err := f.Take(f.ctx, "n1"); return err },
		"renew":        func() error { _, err := f.Renew(f.ctx, l); return err },
		"append":       func() error { return f.Append(f.ctx, l, NewEvent{Type: EventWeb}) },
		"authorize":    func() error { _, err := f.Authorize(f.ctx, l, Call{ID: "a", Kind: KindWeb}); return err },
		"capture":      func() error { return f.Capture(f.ctx, l, "a", 1) },
		"settle":       func() error { _, err := f.Settle(f.ctx, l, Outcome{State: Failed}); return err },
		"cancel":       func() error { _, err := f.Cancel(f.ctx, "o", l.Run); return err },
		"delete":       func() error { return f.Delete(f.ctx, "o", l.Run) },
		"reap":         func() error { _, _, err := f.Reap(f.ctx, ""); return err },
		"audit":        func() error { _, err := f.Audit(f.ctx); return err },
		"subscribe": func() error {
			ctx, cancel := context.WithTimeout(f.ctx, 10*time.Second)
			defer cancel()
			_, _, err := f.Subscribe(ctx, nil)
			return err
		},
		"open": func() error { _, err := Open(f.ctx, f.cfg); return err },
	} {
		if err := call(); err == nil {
			t.Errorf("%s: no error", name)
		} else {
			f.want(err, ErrUnavailable)
		}
	}
	if d := time.Since(begin); d > 20*time.Second {
		t.Errorf("took %v", d)
	}
}

// A Redis that runs and cannot serve is unavailable too, and nothing is done by halves.
func TestRefusingRedis(t *testing.T) {
	f, own := ownServer(t)
	l := f.started(1000)
	before := f.account("o")
	set := func(name, value string) { t.Helper(); f.must(f.rdb.ConfigSet(f.ctx, name, value).Err()) }
	for name, sick := range map[string]struct{ hurt, heal func() }{
		"out of memory": {func() { set("maxmemory", "1") }, func() { set("maxmemory", "0") }},
		"read-only": {
			func() { f.must(f.rdb.Do(f.ctx, "REPLICAOF", "127.0.0.1", "1").Err()) },
			func() { f.must(f.rdb.Do(f.ctx, "REPLICAOF", "NO", "ONE").Err()) },
		},
		"too few replicas": {func() { set("min-replicas-to-write", "1") }, func() { set("min-replicas-to-write", "0") }},
	} {
		sick.hurt()
		for what, call := range map[string]func() error{
			"admit":   func() error { _, _, err := f.Admit(f.ctx, admission(strings.ReplaceAll(name, " ", "-"))); return err },
			"capture": func() error { _, err := f.Authorize(f.ctx, l, Call{ID: "a", Kind: KindWeb, Max: 10}); return err },
			"settle":  func() error { _, err := f.Settle(f.ctx, l, Outcome{State: Failed}); return err },
		} {
			if err := call(); err == nil {
				t.Errorf("%s: %s succeeded", name, what)
			} else {
				f.want(err, ErrUnavailable)
			}
		}
		sick.heal()
		f.same(f.account("o"), before)
		f.same(f.get(l.Run).State, Running)
		f.balanced()
	}
	if own.Starts() != 1 {
		t.Errorf("redis-server died")
	}
}

func TestSlowRedis(t *testing.T) {
	f, own := ownServer(t)
	f.newOrg("o", 0, 1000)
	f.must(syscall.Kill(own.PID(), syscall.SIGSTOP))
	time.AfterFunc(time.Second, func() { syscall.Kill(own.PID(), syscall.SIGCONT) })
	r, _, err := f.Admit(f.ctx, admission("k"))
	f.must(err)
	f.same(f.account("o").Held, Micros(100))

	// Slower than any time-out: the caller is told, repeats, and there is one run.
	f.must(syscall.Kill(own.PID(), syscall.SIGSTOP))
	ctx, cancel := context.WithTimeout(f.ctx, 300*time.Millisecond)
	defer cancel()
	_, _, err = f.Admit(ctx, admission("k2"))
	f.want(err, ErrUnavailable)
	f.must(syscall.Kill(own.PID(), syscall.SIGCONT))
	first, _, err := f.Admit(f.ctx, admission("k2"))
	f.must(err)
	again, _, err := f.Admit(f.ctx, admission("k2"))
	f.must(err)
	f.same(again.ID, first.ID)
	f.same(f.account("o").Held, Micros(200))
	f.get(r.ID)
	f.balanced()
}

func TestConfigThatCannotBe(t *testing.T) {
	for name, c := range map[string]Config{
		"no URL":          {},
		"no URL at all":   {RedisURL: "::"},
		"unknown scheme":  {RedisURL: "http://x"},
		"cell":            {RedisURL: server.URL(), Cell: "{a}"},
		"lease":           {RedisURL: server.URL(), Lease: time.Millisecond},
		"retention":       {RedisURL: server.URL(), Retention: time.Hour},
		"concurrency":     {RedisURL: server.URL(), Concurrency: -1},
		"queue limit":     {RedisURL: server.URL(), QueueLimit: -1},
		"password in URL": {RedisURL: "redis://u:s3cret@h:port"},
	} {
		s, err := Open(t.Context(), c)
		if err == nil {
			s.Close()
			t.Errorf("%s: opened", name)
		} else if strings.Contains(err.Error(), "s3cret") {
			t.Errorf("%s: the error shows the password: %v", name, err)
		}
	}
}

func TestOtherSchemaIsRefused(t *testing.T) {
	f := newFixture(t)
	f.must(f.rdb.Set(f.ctx, f.keys.schema(), "0", redis.KeepTTL).Err())
	if s, err := Open(f.ctx, f.cfg); err == nil {
		s.Close()
		t.Fatal("opened")
	}
}
