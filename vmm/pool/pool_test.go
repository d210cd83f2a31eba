package pool

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

func TestFillsToMinReadyWithBoundedConcurrency(t *testing.T) {
	cfg := config()
	cfg.MinReady = 3
	bubble(t, cfg, func(t *testing.T, w *world, p *Pool[*fakeMachine]) {
		if got := w.making(); got != 2 {
			t.Fatalf("%d makes under way at the start, want 2", got)
		}
		w.fill()
		if s := p.Stats(); s.Ready != 3 || s.Making != 0 || s.Made != 3 {
			t.Fatalf("after filling: %+v", s)
		}
	})
}

func TestClaimOfReadyMachineRefillsByItself(t *testing.T) {
	bubble(t, config(), func(t *testing.T, w *world, p *Pool[*fakeMachine]) {
		w.fill()
		c := claim(p)
		if !c.done || c.err != nil {
			t.Fatalf("claim on a full pool: done %v, error %v", c.done, c.err)
		}
		if w.making() != 0 {
			t.Fatal("refill did not stand back for a machine that has not settled")
		}
		p.Settled(c.m)
		synctest.Wait() // no time passes: the claim wakes the refill, not a tick
		if w.making() != 1 {
			t.Fatalf("%d makes after the machine settled, want 1", w.making())
		}
		w.fill()
		give(p, c.m)
		if s := p.Stats(); s.Ready != 2 || s.Leased != 0 || s.Hits != 1 {
			t.Fatalf("at the end: %+v", s)
		}
	})
}

func TestRefillStandsBackForBurstButNotForEver(t *testing.T) {
	cfg := config()
	cfg.MinReady, cfg.MaxReady, cfg.MaxMachines = 6, 6, 100
	bubble(t, cfg, func(t *testing.T, w *world, p *Pool[*fakeMachine]) {
		w.fill()
		var ms []*fakeMachine
		for i := range 5 { // steady load: never a moment with every machine settled
			c := claim(p)
			ms = append(ms, c.m)
			if i > 0 {
				p.Settled(ms[i-1])
			}
			synctest.Wait()
			if i < 2 && w.making() != 0 {
				t.Fatalf("refill started within the burst, at claim %d", i)
			}
			time.Sleep(100 * time.Millisecond)
			synctest.Wait()
		}
		if w.making() == 0 {
			t.Fatal("steady load starves the refill")
		}
		w.fill()
		for _, m := range ms {
			give(p, m)
		}
	})
}

func TestWaitersAreServedInOrderAndNotStoodBackFor(t *testing.T) {
	bubble(t, config(), func(t *testing.T, w *world, p *Pool[*fakeMachine]) {
		w.fill()
		var cs []*claimed
		for range 5 { // 2 ready, 3 wait
			cs = append(cs, claim(p))
		}
		if !cs[1].done || cs[2].done {
			t.Fatal("want two served, three waiting")
		}
		if w.making() != 2 {
			t.Fatalf("%d makes while claims wait, want 2 at once", w.making())
		}
		for i := 2; i < 5; i++ {
			w.finish("ok")
			for j, c := range cs {
				if c.done != (j <= i) {
					t.Fatalf("after %d machines: claim %d done = %v", i+1, j, c.done)
				}
			}
		}
		for _, c := range cs {
			give(p, c.m)
		}
		w.fill()
	})
}

func TestBurstOf200NeverPassesTheLimits(t *testing.T) {
	cfg := config()
	cfg.MinReady, cfg.MaxReady, cfg.MaxMachines, cfg.RefillConcurrency = 4, 4, 6, 3
	bubble(t, cfg, func(t *testing.T, w *world, p *Pool[*fakeMachine]) {
		w.fill()
		cs := make([]*claimed, 200)
		for i := range cs {
			cs[i] = claim(p)
		}
		for next := 0; next < len(cs); {
			if next < len(cs) && cs[next].done {
				give(p, cs[next].m)
				next++
				continue
			}
			if !w.finish("ok") {
				time.Sleep(10 * time.Millisecond)
				synctest.Wait()
			}
		}
		seen := map[*fakeMachine]bool{}
		for i, c := range cs {
			if c.err != nil || seen[c.m] {
				t.Fatalf("claim %d: error %v, handed out before %v", i, c.err, seen[c.m])
			}
			seen[c.m] = true
		}
	})
}

func TestMachinesAreReplacedBeforeTheyAreTooOld(t *testing.T) {
	cfg := config()
	cfg.MaxReady = 2
	bubble(t, cfg, func(t *testing.T, w *world, p *Pool[*fakeMachine]) {
		w.fill()
		time.Sleep(54*time.Minute + time.Second) // nine tenths of the age
		synctest.Wait()
		if s := p.Stats(); s.Ready != 2 || s.Making != 2 {
			t.Fatalf("before the end of their age: %+v", s)
		}
		w.fill()
		time.Sleep(time.Second)
		s := p.Stats()
		if s.Ready != 2 || s.OldestReady > time.Minute || s.Surplus != 2 {
			t.Fatalf("after the replacement: %+v", s)
		}
		time.Sleep(2 * time.Hour) // makes hang, there is no replacement
		c := claim(p)
		if c.m != nil {
			t.Fatalf("a claim got machine %d, past its age", c.m.id)
		}
		c.cancel()
		synctest.Wait()
		if s := p.Stats(); s.Expired != 2 || s.Ready != 0 || s.Destroyed != 4 {
			t.Fatalf("past their age: %+v", s)
		}
	})
}

func TestAdmissionPutsMakesOff(t *testing.T) {
	full := errors.New("12 MiB of memory free")
	var allow atomic.Bool
	admit := WithAdmission(func() error {
		if allow.Load() {
			return nil
		}
		return full
	})
	bubble(t, config(), func(t *testing.T, w *world, p *Pool[*fakeMachine]) {
		s := p.Stats()
		if w.making() != 0 || s.Admission != full.Error() || s.MakeFailures != 0 || s.Circuit != CircuitClosed {
			t.Fatalf("%d makes, %+v", w.making(), s)
		}
		allow.Store(true)
		time.Sleep(refusedPause)
		synctest.Wait()
		w.fill()
		if s := p.Stats(); s.Ready != 2 || s.Admission != "" {
			t.Fatalf("%+v", s)
		}
	}, admit)
}

func TestResizeShrinksWithoutTouchingLeased(t *testing.T) {
	cfg := config()
	cfg.MinReady = 4
	bubble(t, cfg, func(t *testing.T, w *world, p *Pool[*fakeMachine]) {
		w.fill()
		c := claim(p)
		p.Settled(c.m)
		synctest.Wait()
		w.fill()
		small := cfg
		small.MinReady, small.MaxReady, small.MaxMachines = 1, 1, 2
		if err := p.Resize(small); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		if s := p.Stats(); s.Ready != 1 || s.Leased != 1 || !c.m.alive() {
			t.Fatalf("after shrinking: %+v, leased alive %v", s, c.m.alive())
		}
		give(p, c.m)
		small.MaxMachines = 0
		if err := p.Resize(small); err == nil {
			t.Fatal("a senseless size was accepted")
		}
	})
}

func TestDeadMachineCountsNoMoreWithoutReleased(t *testing.T) {
	bubble(t, config(), func(t *testing.T, w *world, p *Pool[*fakeMachine]) {
		w.fill()
		c := claim(p)
		c.m.die()
		synctest.Wait()
		if s := p.Stats(); s.Leased != 0 {
			t.Fatalf("%+v", s)
		}
		give(p, c.m)
		give(p, c.m) // once more, harmless
		w.fill()
		if s := p.Stats(); s.Leased != 0 || s.Ready != 2 {
			t.Fatalf("%+v", s)
		}
	})
}

// undying is a machine whose Done is never closed: watching it must end with its release.
type undying struct{ *fakeMachine }

func (undying) Done() <-chan struct{} { return nil }

func TestReleasedMachineIsWatchedNoMore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{maxMachines: 8, concurrency: 2}
		cfg := config()
		cfg.MinReady = 0
		p, err := New(cfg, func(ctx context.Context) (undying, error) {
			m, err := w.make(ctx)
			return undying{m}, err
		}, quiet)
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		before := runtime.NumGoroutine()
		claims := make(chan undying, 1)
		go func() {
			m, err := p.Claim(context.Background())
			if err != nil {
				t.Error(err)
			}
			claims <- m
		}()
		synctest.Wait()
		w.fill()
		m := <-claims
		p.Released(m)
		synctest.Wait()
		if now := runtime.NumGoroutine(); now > before {
			t.Errorf("%d goroutines where %d were", now, before)
		}
		if err := errors.Join(m.Close(), p.Close()); err != nil {
			t.Fatal(err)
		}
	})
}

func TestCloseEndsEverything(t *testing.T) {
	bubble(t, config(), func(t *testing.T, w *world, p *Pool[*fakeMachine]) {
		w.fill()
		a, b, c := claim(p), claim(p), claim(p)
		if c.done || w.making() == 0 {
			t.Fatal("want a waiting claim and makes under way")
		}
		w.machines[0].closeErr = errors.New("tap is busy") // leased: not the pool's to close
		w.mu.Lock()
		w.stubborn = true
		w.mu.Unlock()
		if err := p.Close(); err != nil {
			t.Fatalf("close: %v", err)
		}
		synctest.Wait()
		if !a.m.alive() || !b.m.alive() {
			t.Fatal("close touched a machine in use")
		}
		if !c.done || !errors.Is(c.err, ErrClosed) {
			t.Fatalf("waiting claim: done %v, error %v", c.done, c.err)
		}
		if _, err := p.Claim(context.Background()); !errors.Is(err, ErrClosed) {
			t.Fatalf("claim on a closed pool: %v", err)
		}
		if n := len(w.machines); n != 4 {
			t.Fatalf("%d machines were made, want the two in use and the two that came late", n)
		}
		give(p, a.m)
		give(p, b.m)
	})
}

func TestRefillWaitsNoLongerThanYield(t *testing.T) {
	bubble(t, config(), func(t *testing.T, w *world, p *Pool[*fakeMachine]) {
		w.fill()
		c := claim(p) // never settles
		time.Sleep(config().Yield)
		synctest.Wait()
		if w.making() != 1 {
			t.Fatalf("%d makes after the time to stand back, want 1", w.making())
		}
		w.fill()
		give(p, c.m)
	})
}

func TestOldMachinesGoEvenWithoutRoomForAReplacement(t *testing.T) {
	cfg := config()
	cfg.MaxReady, cfg.MaxMachines = 2, 2
	bubble(t, cfg, func(t *testing.T, w *world, p *Pool[*fakeMachine]) {
		w.fill()
		time.Sleep(cfg.MaxAge + time.Second)
		synctest.Wait()
		if s := p.Stats(); s.Expired != 2 || s.Making != 2 {
			t.Fatalf("%+v", s)
		}
		w.fill()
	})
}

func TestCloseReturnsWhatWentWrong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{maxMachines: 8, concurrency: 2}
		p, err := New(config(), w.make, quiet)
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		w.fill()
		w.machines[1].closeErr = errors.New("tap is busy")
		if err := p.Close(); err == nil || !strings.Contains(err.Error(), "tap is busy") {
			t.Fatalf("close: %v", err)
		}
		w.audit(t)
	})
}

func TestClaimWithEndedContext(t *testing.T) {
	bubble(t, config(), func(t *testing.T, w *world, p *Pool[*fakeMachine]) {
		w.fill()
		ctx, cancel := context.WithCancelCause(context.Background())
		why := errors.New("client went away")
		cancel(why)
		if _, err := p.Claim(ctx); !errors.Is(err, why) {
			t.Fatalf("got %v", err)
		}
		if s := p.Stats(); s.Ready != 2 {
			t.Fatalf("%+v", s)
		}
	})
}

func TestConfigValidate(t *testing.T) {
	for name, change := range map[string]func(*Config){
		"MIN_READY":          func(c *Config) { c.MinReady = -1 },
		"MAX_READY":          func(c *Config) { c.MaxReady = 1 },
		"MAX_MACHINES":       func(c *Config) { c.MaxMachines = 1 },
		"REFILL_CONCURRENCY": func(c *Config) { c.RefillConcurrency = 0 },
		"MAX_AGE":            func(c *Config) { c.MaxAge = -1 },
		"MAKE_TIMEOUT":       func(c *Config) { c.MakeTimeout = 0 },
		"YIELD":              func(c *Config) { c.Yield = -1 },
	} {
		cfg := config()
		change(&cfg)
		if err := cfg.Validate(); err == nil || !strings.Contains(err.Error(), "EPHEMERAL_POOL_"+name) {
			t.Errorf("%s: got %v", name, err)
		}
		if _, err := New(cfg, (&world{}).make); err == nil {
			t.Errorf("%s: a pool was opened", name)
		}
	}
	if err := config().Validate(); err != nil {
		t.Error(err)
	}
}

// slowClock runs at a thousandth of the system's speed: the pool must go by it alone.
type slowClock struct{ start time.Time }

func (c slowClock) Now() time.Time { return c.start.Add(time.Since(c.start) / 1000) }

func (c slowClock) AfterFunc(d time.Duration, f func()) func() bool {
	return time.AfterFunc(d*1000, f).Stop
}

func TestGoesByTheInjectedClock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{maxMachines: 8, concurrency: 2}
		p, err := New(config(), w.make, quiet, WithClock(slowClock{time.Now()}))
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		w.fill()
		time.Sleep(500 * time.Hour)
		if s := p.Stats(); s.Ready != 2 || s.OldestReady > 31*time.Minute || s.OldestReady < 29*time.Minute {
			t.Fatalf("%+v", s)
		}
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
		w.audit(t)
	})
}

func BenchmarkClaim(b *testing.B) {
	cfg := config()
	cfg.MinReady, cfg.MaxReady, cfg.MaxMachines, cfg.RefillConcurrency = 64, 64, 128, 8
	w := &world{maxMachines: 1 << 30, concurrency: 1 << 30}
	p, err := New(cfg, func(context.Context) (*fakeMachine, error) {
		return &fakeMachine{w: w, done: make(chan struct{})}, nil
	}, quiet)
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		b.StopTimer()
		for p.Stats().Ready == 0 {
			time.Sleep(time.Microsecond)
		}
		b.StartTimer()
		m, err := p.Claim(context.Background())
		b.StopTimer()
		if err != nil {
			b.Fatal(err)
		}
		p.Released(m)
		b.StartTimer()
	}
	b.StopTimer()
	if err := p.Close(); err != nil {
		b.Fatal(err)
	}
}
