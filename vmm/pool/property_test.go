package pool

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/ephemeral-run/ephemeral/vmm/pool/autoscale"
)

// TestPoolProperties drives a pool through random lives in virtual time: makes that end well, fail, hang or give dead
// machines; claims cancelled at every point; machines that die while ready, exercised or in use; time that passes; sizes
// that change; templates that are swapped. It checks from outside that no machine is leaked, handed out twice, dead, past
// its age or from an earlier template beside a later one, that waiting claims are served in order, that no limit is passed,
// and that the pool recovers once makes go well again.
func TestPoolProperties(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		// rapid ends a try by a panic, which has to cross from the bubble's goroutine to rapid's.
		var ended any
		synctest.Test(t, func(*testing.T) {
			defer func() { ended = recover() }()
			life(rt)
		})
		if ended != nil {
			panic(ended)
		}
	})
}

// host is the state of one life.
type host struct {
	*world
	t      *rapid.T
	p      *Pool[*fakeMachine]
	claims []*claimed // in order of arrival, neither answered nor cancelled
	leased []*fakeMachine
	cfg    Config

	template int // the current one
}

func life(t *rapid.T) {
	maxMachines := rapid.IntRange(1, 8).Draw(t, "max machines")
	minReady := rapid.IntRange(0, min(4, maxMachines)).Draw(t, "min ready")
	cfg := Config{
		MinReady: minReady, MaxReady: minReady + rapid.IntRange(0, 3).Draw(t, "spare"), MaxMachines: maxMachines,
		RefillConcurrency: rapid.IntRange(1, 3).Draw(t, "concurrency"),
		MaxAge:            rapid.SampledFrom([]time.Duration{0, time.Second, time.Minute}).Draw(t, "max age"),
		MakeTimeout:       5 * time.Second,
		Yield:             rapid.SampledFrom([]time.Duration{0, 100 * time.Millisecond}).Draw(t, "yield"),
	}
	if rapid.Bool().Draw(t, "scales itself") {
		cfg.Autoscale = autoscale.Config{TargetMissRate: 0.05, IdleReady: 1, IdleAfter: 2 * time.Minute, HalfLife: 10 * time.Second, HoldDown: 20 * time.Second}
	}
	w := &world{maxMachines: maxMachines, concurrency: cfg.RefillConcurrency, closeTime: 20 * time.Millisecond}
	w.stubborn = rapid.Bool().Draw(t, "stubborn")
	opts := []Option{quiet}
	if rapid.Bool().Draw(t, "keeps warm") {
		cfg.KeepWarm = rapid.SampledFrom([]time.Duration{100 * time.Millisecond, 10 * time.Second}).Draw(t, "every")
		opts = append(opts, WithKeepWarm(w.warm))
	}
	p, err := New(cfg, w.make, opts...)
	if err != nil {
		t.Fatal(err)
	}
	h := &host{world: w, t: t, p: p, cfg: cfg}
	defer h.end()
	synctest.Wait()
	t.Repeat(map[string]func(*rapid.T){
		"":              func(*rapid.T) { h.invariants() },
		"claim":         h.claim,
		"claim burst":   h.burst,
		"cancel":        h.cancelOne,
		"make ends":     h.makeEnds,
		"make, cancel":  h.makeEndsWhileClaimsEnd,
		"settle":        func(t *rapid.T) { p.Settled(h.lessee(t)) },
		"release":       h.release,
		"die ready":     h.dieReady,
		"die leased":    func(t *rapid.T) { h.lessee(t).die() },
		"time":          h.time,
		"resize":        h.resize,
		"recover":       h.recover,
		"swap":          h.swap,
		"exercises":     h.exercisesEnd,
		"stale release": func(t *rapid.T) { p.Released(rapid.SampledFrom(h.some(t)).Draw(t, "machine")) },
	})
	if rapid.Bool().Draw(t, "recovers at the end") {
		h.recover(t)
	}
}

// claim also holds what is handed out at once to the current template, where a machine of it was ready.
func (h *host) claim(t *rapid.T) {
	synctest.Wait()
	before := h.p.Stats()
	c := claim(h.p)
	h.claims = append(h.claims, c)
	if c.done && c.err == nil && before.Ready > before.Outdated && c.m.template != h.template {
		t.Fatalf("a machine of template %d was handed out beside %d of template %d", c.m.template, before.Ready-before.Outdated, h.template)
	}
}

// swap brings another template.
func (h *host) swap(*rapid.T) {
	h.template++
	h.p.Swap(h.maker(h.template))
}

// exercisesEnd says how exercises end from now on.
func (h *host) exercisesEnd(t *rapid.T) {
	fails := rapid.Bool().Draw(t, "fail")
	h.mu.Lock()
	defer h.mu.Unlock()
	h.warmth = nil
	if fails {
		h.warmth = func(*fakeMachine) error { return errors.New("no answer") }
	}
}

func (h *host) burst(t *rapid.T) {
	for range rapid.IntRange(2, 12).Draw(t, "size") {
		h.claim(t)
	}
}

func (h *host) cancelOne(t *rapid.T) {
	if len(h.claims) == 0 {
		t.Skip("no claim waits")
	}
	h.claims[rapid.IntRange(0, len(h.claims)-1).Draw(t, "claim")].cancel()
}

var outcomes = []string{"ok", "ok", "ok", "fail", "dead"}

func (h *host) makeEnds(t *rapid.T) {
	if !h.finish(rapid.SampledFrom(outcomes).Draw(t, "outcome")) {
		t.Skip("nothing is being made")
	}
}

// makeEndsWhileClaimsEnd lets a machine, its death and the ends of claims come at the same moment, in no order.
func (h *host) makeEndsWhileClaimsEnd(t *rapid.T) {
	if h.making() == 0 || len(h.claims) == 0 {
		t.Skip("needs a make and a claim")
	}
	h.mu.Lock()
	o := h.pending[0]
	h.mu.Unlock()
	o.outcome <- rapid.SampledFrom(outcomes).Draw(t, "outcome")
	if rapid.Bool().Draw(t, "made first") {
		<-o.ended
	}
	for _, c := range h.claims[:rapid.IntRange(1, len(h.claims)).Draw(t, "cancelled")] {
		c.cancel()
	}
	dies := rapid.Bool().Draw(t, "dies")
	h.mu.Lock()
	var last *fakeMachine
	if n := len(h.machines); dies && n > 0 && !h.machines[n-1].claimed {
		last = h.machines[n-1]
		last.raced = true
	}
	h.mu.Unlock()
	if last != nil {
		last.die()
	}
}

func (h *host) lessee(t *rapid.T) *fakeMachine {
	if len(h.leased) == 0 {
		t.Skip("no machine is in use")
	}
	return h.leased[rapid.IntRange(0, len(h.leased)-1).Draw(t, "machine")]
}

func (h *host) some(t *rapid.T) []*fakeMachine {
	var ms []*fakeMachine
	for _, m := range h.all() {
		if m.closes > 0 || !m.claimed { // a lessee that lies about its machine is not modelled
			ms = append(ms, m)
		}
	}
	if len(ms) == 0 {
		t.Skip("no such machine")
	}
	return ms
}

func (h *host) release(t *rapid.T) {
	m := h.lessee(t)
	for i := range h.leased {
		if h.leased[i] == m {
			h.leased = append(h.leased[:i], h.leased[i+1:]...)
			break
		}
	}
	give(h.p, m)
}

func (h *host) dieReady(t *rapid.T) {
	for _, m := range h.all() {
		if !m.claimed && m.alive() {
			m.die()
			return
		}
	}
	t.Skip("no machine is ready")
}

func (h *host) time(t *rapid.T) {
	time.Sleep(rapid.SampledFrom([]time.Duration{
		time.Millisecond, 20 * time.Millisecond, 100 * time.Millisecond, 900 * time.Millisecond, 5 * time.Second, time.Minute,
	}).Draw(t, "passes"))
}

// resize changes the pool's size; the limits only grow, since what is alive already may be above smaller ones.
func (h *host) resize(t *rapid.T) {
	h.cfg.MaxMachines += rapid.IntRange(0, 1).Draw(t, "more machines")
	h.cfg.MinReady = rapid.IntRange(0, min(4, h.cfg.MaxMachines)).Draw(t, "min ready")
	h.cfg.MaxReady = h.cfg.MinReady + rapid.IntRange(0, 3).Draw(t, "spare")
	h.mu.Lock()
	h.maxMachines = h.cfg.MaxMachines
	h.mu.Unlock()
	if err := h.p.Resize(h.cfg); err != nil {
		t.Fatal(err)
	}
}

// recover lets makes go well and machines be given back until every claim is served and the pool is full.
func (h *host) recover(t *rapid.T) {
	h.mu.Lock()
	h.warmth = nil
	h.mu.Unlock()
	for range 1000 {
		h.invariants()
		s := h.p.Stats()
		if s.Outdated == 0 && s.Waiting == 0 && s.Ready+s.Warming >= s.Target && s.Ready <= h.cfg.MaxReady && s.Destroying == 0 && s.Leased == 0 {
			return
		}
		for _, m := range h.leased {
			give(h.p, m)
		}
		h.leased = nil
		if !h.finish("ok") {
			time.Sleep(50 * time.Millisecond)
			if s.Circuit == CircuitOpen {
				time.Sleep(time.Until(s.CircuitUntil))
			}
		}
		synctest.Wait()
	}
	t.Fatalf("the pool did not recover: %+v", h.p.Stats())
}

// invariants waits until nothing moves and checks everything that must hold then.
func (h *host) invariants() {
	synctest.Wait()
	h.collect()
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, f := range h.faults {
		h.t.Fatal(f)
	}
	s := h.p.Stats()
	if s.Waiting != len(h.claims) {
		h.t.Fatalf("%d claims wait, the pool says %d", len(h.claims), s.Waiting)
	}
	if s.Waiting > 0 && s.Ready > 0 {
		h.t.Fatalf("%d claims wait beside %d ready machines", s.Waiting, s.Ready)
	}
	if s.Target > h.cfg.MaxReady || s.Reason == "" {
		h.t.Fatalf("target %d above %d, or without a reason: %q", s.Target, h.cfg.MaxReady, s.Reason)
	}
	if s.Ready > h.cfg.MaxReady {
		h.t.Fatalf("%d ready, more than %d", s.Ready, h.cfg.MaxReady)
	}
	if n := s.Ready + s.Warming + s.Leased + s.Making + s.Destroying; n > h.cfg.MaxMachines {
		h.t.Fatalf("%d machines, more than %d: %+v", n, h.cfg.MaxMachines, s)
	}
	unused := 0
	for _, m := range h.machines {
		if !m.claimed && m.closes == 0 {
			unused++
		}
	}
	if unused != s.Ready+s.Warming+s.Destroying {
		h.t.Fatalf("%d machines are the pool's, it counts %d ready, %d exercised and %d to destroy", unused, s.Ready, s.Warming, s.Destroying)
	}
	alive := 0
	for _, m := range h.leased {
		if !m.dead {
			alive++
		}
	}
	if alive != s.Leased || s.Making != len(h.pending) {
		h.t.Fatalf("%d in use and %d being made, the pool says %d and %d", alive, len(h.pending), s.Leased, s.Making)
	}
}

// collect takes the answers that came since the last time and checks each machine that was handed out.
func (h *host) collect() {
	var waiting []*claimed
	for _, c := range h.claims {
		switch {
		case !c.done:
			waiting = append(waiting, c)
		case c.err == nil:
			if len(waiting) > 0 {
				h.t.Fatal("a claim was served before an earlier one")
			}
			h.handedOut(c)
		case !errors.Is(c.err, ErrCircuitOpen) && !errors.Is(c.err, context.Canceled):
			h.t.Fatalf("claim failed: %v", c.err)
		}
	}
	h.claims = waiting
}

func (h *host) handedOut(c *claimed) {
	m := c.m
	if c.dead && !m.raced {
		h.t.Fatalf("machine %d was handed out dead", m.id)
	}
	if age := c.at.Sub(m.madeAt); h.cfg.MaxAge > 0 && age >= h.cfg.MaxAge {
		h.t.Fatalf("machine %d was handed out %s old", m.id, age)
	}
	if m.claimed {
		h.t.Fatalf("machine %d was handed out twice", m.id)
	}
	m.claimed = true
	h.leased = append(h.leased, m)
	if m.closes > 0 {
		h.t.Fatalf("machine %d was handed out after it was destroyed", m.id)
	}
}

// end closes the pool in whatever state the life left it and looks for leaks.
func (h *host) end() {
	for i, c := range h.claims {
		if i%2 == 0 {
			c.cancel()
		}
	}
	if err := h.p.Close(); err != nil {
		panic(fmt.Sprintf("close: %v", err))
	}
	synctest.Wait()
	for _, c := range h.claims {
		if !c.done {
			panic("a claim outlived the pool")
		}
		if c.err == nil {
			h.leased = append(h.leased, c.m)
		}
	}
	for _, m := range h.leased {
		give(h.p, m)
	}
	for _, m := range h.all() {
		if m.closes == 0 {
			panic(fmt.Sprintf("machine %d was leaked", m.id))
		}
	}
	if h.making() != 0 {
		panic("a make outlived the pool")
	}
}
