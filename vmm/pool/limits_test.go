package pool

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"
)

// neighbours opens two pools of four MinReady each that share limits, and checks at the end that nothing is left.
func neighbours(t *testing.T, most Capacity, memory [2]int, f func(w [2]*world, p [2]*Pool[*fakeMachine])) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		l, err := NewLimits(most)
		if err != nil {
			t.Fatal(err)
		}
		cfg := config()
		cfg.MinReady, cfg.MaxReady, cfg.Yield = 4, 4, 0
		var ws [2]*world
		var ps [2]*Pool[*fakeMachine]
		for i := range ps {
			ws[i] = &world{maxMachines: cfg.MaxMachines, concurrency: cfg.RefillConcurrency}
			if ps[i], err = New(cfg, ws[i].make, quiet, WithLimits(l, memory[i])); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		f(ws, ps)
		for i := range ps {
			if err := ps[i].Close(); err != nil {
				t.Error(err)
			}
			ws[i].audit(t)
		}
		if used := l.Used(); used != (Capacity{}) {
			t.Errorf("at the end the limits count %+v", used)
		}
	})
}

func TestPoolsShareMakesAndMachines(t *testing.T) {
	neighbours(t, Capacity{Machines: 6, Makes: 3}, [2]int{}, func(w [2]*world, p [2]*Pool[*fakeMachine]) {
		if a, b := w[0].making(), w[1].making(); a != 2 || b != 1 {
			t.Fatalf("%d and %d makes under way, want 2 and 1", a, b)
		}
		for w[0].finish("ok") || w[1].finish("ok") {
		}
		a, b := p[0].Stats(), p[1].Stats()
		if a.Ready+b.Ready != 6 {
			t.Fatalf("%d and %d ready, want 6 together", a.Ready, b.Ready)
		}
	})
}

func TestReadyMachinesGiveWayToWaitingClaimsOfOtherPools(t *testing.T) {
	for name, tt := range map[string]struct {
		most   Capacity
		memory [2]int
		given  int // machines of the first pool that go for three of the second
	}{
		"machines": {Capacity{Machines: 4}, [2]int{}, 3},
		"memory":   {Capacity{MemoryMiB: 400}, [2]int{100, 100}, 3},
		"larger":   {Capacity{MemoryMiB: 400}, [2]int{50, 100}, 3}, // 200 are free at first, one of 100 is missing, then 50 remain
	} {
		t.Run(name, func(t *testing.T) {
			neighbours(t, tt.most, tt.memory, func(w [2]*world, p [2]*Pool[*fakeMachine]) {
				for w[0].finish("ok") {
				}
				for w[1].finish("ok") {
				}
				has := p[1].Stats().Ready
				var cs []*claimed
				for range has + 1 { // one more than the second pool has
					cs = append(cs, claim(p[1]))
				}
				time.Sleep(time.Second)
				synctest.Wait()
				for w[1].finish("ok") {
				}
				for i, c := range cs {
					if !c.done || c.err != nil {
						t.Fatalf("claim %d of %d: done %v, error %v; %+v", i+1, len(cs), c.done, c.err, p[0].Stats())
					}
				}
				if s := p[0].Stats(); s.Surplus == 0 {
					t.Errorf("the other pool gave nothing up: %+v", s)
				}
				for _, c := range cs {
					give(p[1], c.m)
				}
				time.Sleep(time.Second)
				synctest.Wait()
				for w[0].finish("ok") || w[1].finish("ok") {
				}
				if a, b := p[0].Stats(), p[1].Stats(); a.Ready == 0 || a.Ready+b.Ready < 4 {
					t.Errorf("afterwards %d and %d are ready", a.Ready, b.Ready)
				}
			})
		})
	}
}

func TestAMachineThatNeverFitsIsRefused(t *testing.T) {
	l, err := NewLimits(Capacity{MemoryMiB: 100})
	if err != nil {
		t.Fatal(err)
	}
	if p, err := New(config(), (&world{}).make, WithLimits(l, 101)); err == nil {
		t.Errorf("opened: %v", p.Close())
	}
	if _, err := NewLimits(Capacity{Makes: -1}); err == nil {
		t.Error("a negative limit was accepted")
	}
}

// TestSharedLimitsProperties drives two or three pools under shared limits through random lives: everything that holds for
// one pool holds for each, the limits are never passed, and every claim is served once makes go well and machines come back.
func TestSharedLimitsProperties(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		var ended any
		synctest.Test(t, func(*testing.T) {
			defer func() { ended = recover() }()
			sharedLife(rt)
		})
		if ended != nil {
			panic(ended)
		}
	})
}

type street struct {
	limits *Limits
	most   Capacity
	memory []int
	hosts  []*host
}

func sharedLife(t *rapid.T) {
	s := &street{most: Capacity{Machines: rapid.IntRange(1, 8).Draw(t, "machines"), Makes: rapid.IntRange(1, 3).Draw(t, "makes")}}
	if rapid.Bool().Draw(t, "memory counts") {
		s.most.MemoryMiB = rapid.IntRange(300, 800).Draw(t, "memory")
	}
	var err error
	if s.limits, err = NewLimits(s.most); err != nil {
		t.Fatal(err)
	}
	defer func() {
		for _, h := range s.hosts {
			h.end()
		}
		if used := s.limits.Used(); used != (Capacity{}) {
			panic(fmt.Sprintf("at the end the limits count %+v", used))
		}
	}()
	for i := range rapid.IntRange(2, 3).Draw(t, "pools") {
		cfg := config()
		cfg.MinReady = rapid.IntRange(0, 3).Draw(t, "min ready")
		cfg.MaxAge, cfg.MakeTimeout = rapid.SampledFrom([]time.Duration{0, time.Minute}).Draw(t, "max age"), 5*time.Second
		w := &world{maxMachines: cfg.MaxMachines, concurrency: cfg.RefillConcurrency, closeTime: 20 * time.Millisecond}
		s.memory = append(s.memory, 100*(i+1))
		p, err := New(cfg, w.make, quiet, WithLimits(s.limits, s.memory[i]))
		if err != nil {
			t.Fatal(err)
		}
		s.hosts = append(s.hosts, &host{world: w, t: t, p: p, cfg: cfg})
	}
	one := func(t *rapid.T) *host { return rapid.SampledFrom(s.hosts).Draw(t, "pool") }
	t.Repeat(map[string]func(*rapid.T){
		"":           func(t *rapid.T) { s.invariants(t) },
		"claim":      func(t *rapid.T) { one(t).claim(t) },
		"burst":      func(t *rapid.T) { one(t).burst(t) },
		"cancel":     func(t *rapid.T) { one(t).cancelOne(t) },
		"make ends":  func(t *rapid.T) { one(t).makeEnds(t) },
		"release":    func(t *rapid.T) { one(t).release(t) },
		"die ready":  func(t *rapid.T) { one(t).dieReady(t) },
		"die leased": func(t *rapid.T) { h := one(t); h.lessee(t).die() },
		"time":       func(t *rapid.T) { one(t).time(t) },
		"swap":       func(t *rapid.T) { one(t).swap(t) },
	})
	s.recover(t)
}

func (s *street) invariants(t *rapid.T) {
	var counted Capacity
	for i, h := range s.hosts {
		h.invariants()
		st := h.p.Stats()
		n := st.Ready + st.Warming + st.Leased + st.Making + st.Destroying
		counted.Machines += n
		counted.MemoryMiB += n * s.memory[i]
		counted.Makes += st.Making
	}
	used := s.limits.Used()
	if used != counted {
		t.Fatalf("the limits count %+v, the pools have %+v", used, counted)
	}
	if used.Machines > s.most.Machines || used.Makes > s.most.Makes || s.most.MemoryMiB > 0 && used.MemoryMiB > s.most.MemoryMiB {
		t.Fatalf("%+v used of %+v", used, s.most)
	}
}

func (s *street) recover(t *rapid.T) {
	for range 2000 {
		s.invariants(t)
		waiting := 0
		for _, h := range s.hosts {
			for _, m := range h.leased {
				give(h.p, m)
			}
			h.leased = nil
			st := h.p.Stats()
			waiting += st.Waiting + st.Destroying + st.Making
			if !h.finish("ok") {
				time.Sleep(50 * time.Millisecond)
				if st.Circuit == CircuitOpen {
					time.Sleep(time.Until(st.CircuitUntil))
				}
			}
		}
		if waiting == 0 {
			return
		}
	}
	for _, h := range s.hosts {
		t.Logf("%+v", h.p.Stats())
	}
	t.Fatalf("the pools did not recover")
}
