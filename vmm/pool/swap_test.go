package pool

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

func TestSwapLeavesNoGapAndHandsOutNothingOldBesideTheNew(t *testing.T) {
	cfg := config()
	cfg.MinReady, cfg.MaxReady = 3, 3
	bubble(t, cfg, func(t *testing.T, w *world, p *Pool[*fakeMachine]) {
		w.fill()
		p.Swap(w.maker(1))
		synctest.Wait()
		if s := p.Stats(); s.Ready != 3 || s.Outdated != 3 || s.Making != 2 || s.Generation != 1 {
			t.Fatalf("after the swap: %+v", s)
		}
		old := claim(p)
		if !old.done || old.m.template != 0 {
			t.Fatalf("before a new machine is ready, a claim got %+v", old)
		}
		p.Settled(old.m)
		w.finish("ok")
		if s := p.Stats(); s.Ready != 3 || s.Outdated != 2 {
			t.Fatalf("with one new machine: %+v", s)
		}
		fresh := claim(p)
		if !fresh.done || fresh.m.template != 1 {
			t.Fatalf("beside a new machine, a claim got one of template %d", fresh.m.template)
		}
		p.Settled(fresh.m)
		synctest.Wait()
		w.fill()
		if s := p.Stats(); s.Ready != 3 || s.Outdated != 0 || s.Circuit != CircuitClosed {
			t.Fatalf("at the end: %+v", s)
		}
		give(p, old.m)
		give(p, fresh.m)
		time.Sleep(time.Second)
		w.fill()
	})
}

func TestSwapMakesItsOwnRoomWhereThereIsNone(t *testing.T) {
	cfg := config()
	cfg.MinReady, cfg.MaxReady, cfg.MaxMachines = 2, 2, 2
	bubble(t, cfg, func(t *testing.T, w *world, p *Pool[*fakeMachine]) {
		w.fill()
		p.Swap(w.maker(1))
		for range 2 { // one after the other: the pool is never empty
			time.Sleep(time.Second)
			synctest.Wait()
			if s := p.Stats(); s.Ready != 1 || s.Making != 1 {
				t.Fatalf("%+v", s)
			}
			w.finish("ok")
		}
		if s := p.Stats(); s.Ready != 2 || s.Outdated != 0 {
			t.Fatalf("at the end: %+v", s)
		}
	})
}

func TestABadTemplateLeavesTheOldMachinesInServiceAndAnotherSwapHelps(t *testing.T) {
	bubble(t, config(), func(t *testing.T, w *world, p *Pool[*fakeMachine]) {
		w.fill()
		p.Swap(w.maker(1))
		synctest.Wait()
		for p.Stats().Circuit != CircuitOpen {
			if !w.finish("fail") {
				time.Sleep(100 * time.Millisecond)
				synctest.Wait()
			}
		}
		c := claim(p)
		if !c.done || c.err != nil {
			t.Fatalf("with old machines ready: %+v", c)
		}
		p.Settled(c.m)
		p.Swap(w.maker(2))
		synctest.Wait()
		w.fill()
		if s := p.Stats(); s.Circuit != CircuitClosed || s.Ready != 2 || s.Outdated != 0 {
			t.Fatalf("after the next swap: %+v", s)
		}
		give(p, c.m)
	})
}

func TestKeepsMachinesWarmAndDropsThoseThatFail(t *testing.T) {
	cfg := config()
	cfg.KeepWarm = time.Minute
	synctest.Test(t, func(t *testing.T) {
		w := &world{maxMachines: cfg.MaxMachines, concurrency: cfg.RefillConcurrency}
		p, err := New(cfg, w.make, quiet, WithKeepWarm(w.warm))
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		w.fill()
		time.Sleep(cfg.KeepWarm + 30*time.Millisecond)
		synctest.Wait()
		w.mu.Lock()
		exercises := w.exercises
		w.mu.Unlock()
		if s := p.Stats(); exercises != 2 || s.Warming != 1 || s.Ready != 1 {
			t.Fatalf("in the second exercise: %d so far, %+v", exercises, s)
		}
		if w.making() != 0 {
			t.Fatal("a machine being exercised is being replaced")
		}
		first, waits := claim(p), claim(p)
		if !first.done || p.Stats().Waiting != 1 {
			t.Fatal("a machine being exercised was handed out, or the other was not")
		}
		time.Sleep(15 * time.Millisecond)
		synctest.Wait()
		if !waits.done || waits.m == first.m {
			t.Fatal("the exercised machine was not given to the claim that waits")
		}
		w.fill()
		give(p, first.m)
		give(p, waits.m)
		time.Sleep(time.Second)
		w.fill()
		broken := errors.New("no answer")
		w.mu.Lock()
		w.warmth = func(*fakeMachine) error { return broken }
		w.mu.Unlock()
		before := p.Stats()
		time.Sleep(cfg.KeepWarm)
		synctest.Wait()
		if s := p.Stats(); s.Died <= before.Died || s.Destroyed <= before.Destroyed {
			t.Fatalf("after failed exercises: %+v", s)
		}
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
		w.audit(t)
	})
}

func TestKeepWarmOfOtherMachinesIsRefused(t *testing.T) {
	if p, err := New(config(), (&world{}).make, WithKeepWarm((&world{}).warmUndying)); err == nil {
		t.Errorf("opened: %v", p.Close())
	}
}

func TestCloseWaitsForTheExerciseAndDestroysItsMachine(t *testing.T) {
	cfg := config()
	cfg.KeepWarm, cfg.MinReady = time.Minute, 1
	synctest.Test(t, func(t *testing.T) {
		w := &world{maxMachines: cfg.MaxMachines, concurrency: cfg.RefillConcurrency}
		p, err := New(cfg, w.make, quiet, WithKeepWarm(w.warm))
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		w.fill()
		time.Sleep(cfg.KeepWarm + 10*time.Millisecond)
		synctest.Wait()
		if s := p.Stats(); s.Warming != 1 {
			t.Fatalf("%+v", s)
		}
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
		w.audit(t)
	})
}
