package pool

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ephemeral-run/ephemeral/vmm/pool/autoscale"
)

// scaling is a configuration of a pool that scales itself between 1 and 12.
func scaling() Config {
	cfg := config()
	cfg.MinReady, cfg.MaxReady, cfg.MaxMachines, cfg.RefillConcurrency, cfg.Yield = 1, 12, 40, 8, 0
	cfg.Autoscale = autoscale.Config{TargetMissRate: 0.01, IdleReady: 0, IdleAfter: 10 * time.Minute, HalfLife: time.Minute, HoldDown: 2 * time.Minute}
	return cfg
}

func TestPoolScalesItselfWithDemandAndSaysWhy(t *testing.T) {
	bubble(t, scaling(), func(t *testing.T, w *world, p *Pool[*fakeMachine]) {
		w.fill()
		if s := p.Stats(); s.Target != 1 || s.Ready != 1 || !strings.Contains(s.Reason, "1 are the least") {
			t.Fatalf("at the start: %+v", s)
		}
		for range 120 { // two claims a second, each machine made in half a second
			c := claim(p)
			time.Sleep(500 * time.Millisecond)
			w.fill()
			give(p, c.m)
		}
		busy := p.Stats()
		if busy.Target < 3 || busy.Ready != busy.Target || !strings.Contains(busy.Reason, " to make a machine are 0.7 claims per refill") {
			t.Fatalf("under load: %+v", busy)
		}
		time.Sleep(5 * time.Minute) // nothing but timers wakes the pool
		synctest.Wait()
		if s := p.Stats(); s.Target >= busy.Target || s.Ready != s.Target || s.Surplus == 0 {
			t.Fatalf("after the load: %+v", s)
		}
		time.Sleep(6 * time.Minute)
		synctest.Wait()
		if s := p.Stats(); s.Target != 0 || s.Ready != 0 || s.Reason != "Lowered from 1 to 0: no claim for 10m0s." {
			t.Fatalf("idle: %+v", s)
		}
	})
}

func TestResizeSwitchesScalingOnAndOff(t *testing.T) {
	cfg := scaling()
	bubble(t, cfg, func(t *testing.T, w *world, p *Pool[*fakeMachine]) {
		w.fill()
		off := cfg
		off.Autoscale, off.MinReady = autoscale.Config{}, 4
		for _, step := range []struct {
			cfg    Config
			target int
			reason string
		}{{off, 4, "does not scale itself"}, {cfg, 1, "are the least"}} {
			if err := p.Resize(step.cfg); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			w.fill()
			time.Sleep(time.Second)
			synctest.Wait()
			if s := p.Stats(); s.Target != step.target || s.Ready != step.target || !strings.Contains(s.Reason, step.reason) {
				t.Fatalf("%+v", s)
			}
		}
	})
}

func TestWaitOfRefillForABurstCountsAsRefillTime(t *testing.T) {
	cfg := scaling()
	cfg.Yield = 300 * time.Millisecond
	now := time.Unix(1000, 0)
	p := filled(cfg, &world{}, 1, now)
	p.plan(now)
	if s, err := p.claim(now); s == nil || err != nil {
		t.Fatalf("claim: %v, %v", s, err)
	}
	if pl := p.plan(now); pl.makes != 0 {
		t.Fatal("refill does not stand back")
	}
	pl := p.plan(now.Add(cfg.Yield))
	if pl.makes != 1 || !pl.ticket.since.Equal(now) {
		t.Fatalf("makes %d, since %s, want 1 since %s", pl.makes, pl.ticket.since, now)
	}
}
