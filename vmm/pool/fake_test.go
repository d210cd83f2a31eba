package pool

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

var quiet = WithLogger(slog.New(slog.NewTextHandler(io.Discard, nil)))

// fakeMachine is a machine that takes closeTime to close.
type fakeMachine struct {
	w         *world
	id        int
	template  int
	madeAt    time.Time
	closeTime time.Duration
	closeErr  error

	// Under w.mu.
	done    chan struct{}
	dead    bool
	closes  int // calls that ended
	claimed bool
	raced   bool // died while it was being handed out
	warming bool // an exercise is under way
}

func (m *fakeMachine) Done() <-chan struct{} { return m.done }

func (m *fakeMachine) Close() error {
	time.Sleep(m.closeTime)
	m.die()
	m.w.mu.Lock()
	defer m.w.mu.Unlock()
	if m.warming {
		m.w.fault("a machine was destroyed while it was exercised")
	}
	m.closes++
	return m.closeErr
}

func (m *fakeMachine) die() {
	m.w.mu.Lock()
	defer m.w.mu.Unlock()
	if !m.dead {
		m.dead = true
		close(m.done)
	}
}

func (m *fakeMachine) alive() bool {
	m.w.mu.Lock()
	defer m.w.mu.Unlock()
	return !m.dead
}

// order is one make under way; how it ends is told on outcome.
type order struct {
	ctx     context.Context
	outcome chan string
	ended   chan struct{}
}

// world makes fake machines by hand and watches the limits from outside of the pool.
type world struct {
	mu       sync.Mutex
	machines []*fakeMachine
	pending  []*order
	faults   []string

	maxMachines, concurrency int
	closeTime                time.Duration
	stubborn                 bool                     // makes whose context ends give a machine all the same
	warmth                   func(*fakeMachine) error // how an exercise ends; nil: well
	exercises                int
}

var errMade = errors.New("no such kernel")

func (w *world) fault(s string) { w.faults = append(w.faults, s) }

// make is the injected maker. Outcomes: ok, fail, dead; a hang lasts until the context ends.
func (w *world) make(ctx context.Context) (*fakeMachine, error) { return w.makeOf(ctx, 0) }

// maker makes machines of another template.
func (w *world) maker(template int) func(context.Context) (*fakeMachine, error) {
	return func(ctx context.Context) (*fakeMachine, error) { return w.makeOf(ctx, template) }
}

// warm is the injected exercise. It takes 20 ms, and fails a machine that has died.
func (w *world) warm(ctx context.Context, m *fakeMachine) error {
	w.mu.Lock()
	if m.warming || m.claimed || m.closes > 0 {
		w.fault("a machine was exercised twice at once, or after the pool gave it away")
	}
	m.warming = true
	w.exercises++
	warmth := w.warmth
	w.mu.Unlock()
	select {
	case <-time.After(20 * time.Millisecond):
	case <-ctx.Done():
	}
	w.mu.Lock()
	m.warming = false
	dead := m.dead
	w.mu.Unlock()
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case dead:
		return errors.New("no answer")
	case warmth != nil:
		return warmth(m)
	}
	return nil
}

// warmUndying is an exercise for machines of another kind.
func (w *world) warmUndying(context.Context, undying) error { return nil }

func (w *world) makeOf(ctx context.Context, template int) (*fakeMachine, error) {
	o := &order{ctx: ctx, outcome: make(chan string, 1), ended: make(chan struct{})}
	defer close(o.ended)
	w.mu.Lock()
	w.pending = append(w.pending, o)
	w.check()
	w.mu.Unlock()
	outcome := ""
	select {
	case outcome = <-o.outcome:
	case <-ctx.Done():
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if outcome == "" && w.stubborn {
		outcome = "ok"
	}
	for i := range w.pending {
		if w.pending[i] == o {
			w.pending = append(w.pending[:i], w.pending[i+1:]...)
			break
		}
	}
	switch outcome {
	case "fail":
		return nil, errMade
	case "":
		return nil, ctx.Err()
	}
	m := &fakeMachine{w: w, id: len(w.machines), template: template, madeAt: time.Now(), done: make(chan struct{}), closeTime: w.closeTime}
	w.machines = append(w.machines, m)
	if outcome == "dead" {
		m.dead = true
		close(m.done)
	}
	w.check()
	return m, nil
}

// check compares what is alive with the limits.
func (w *world) check() {
	alive := len(w.pending)
	for _, m := range w.machines {
		if !m.dead {
			alive++
		}
	}
	if alive > w.maxMachines {
		w.fault("more machines alive and in the making than MaxMachines")
	}
	if len(w.pending) > w.concurrency {
		w.fault("more makes at once than RefillConcurrency")
	}
}

// finish ends the oldest make under way.
func (w *world) finish(outcome string) bool {
	w.mu.Lock()
	if len(w.pending) == 0 {
		w.mu.Unlock()
		return false
	}
	o := w.pending[0]
	w.mu.Unlock()
	o.outcome <- outcome
	<-o.ended
	synctest.Wait()
	return true
}

// fill ends makes well until none is left.
func (w *world) fill() {
	for w.finish("ok") {
	}
}

func (w *world) all() []*fakeMachine {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.machines)
}

func (w *world) making() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.pending)
}

// audit fails the test when a machine was left alive or unclosed, or a limit was passed.
func (w *world) audit(t testing.TB) {
	t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, f := range w.faults {
		t.Error(f)
	}
	for _, m := range w.machines {
		if m.closes == 0 {
			t.Errorf("machine %d was never closed (claimed %v)", m.id, m.claimed)
		}
	}
	if len(w.pending) != 0 {
		t.Errorf("%d makes still under way", len(w.pending))
	}
}

// bubble runs f in virtual time with a pool over a world, and checks afterwards that nothing is left.
func bubble(t *testing.T, cfg Config, f func(t *testing.T, w *world, p *Pool[*fakeMachine]), opts ...Option) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := &world{maxMachines: cfg.MaxMachines, concurrency: cfg.RefillConcurrency, closeTime: 10 * time.Millisecond}
		p, err := New(cfg, w.make, append([]Option{quiet}, opts...)...)
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close() // when f gives up
		synctest.Wait()
		f(t, w, p)
		if err := p.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
		w.audit(t)
	})
}

// claimed is the end of a claim that runs beside the test.
type claimed struct {
	m      *fakeMachine
	err    error
	cancel context.CancelFunc
	done   bool
	at     time.Time // of the answer
	dead   bool      // the machine, at that time
}

// claim starts a claim and waits until it has its answer or waits in line.
func claim(p *Pool[*fakeMachine]) *claimed {
	ctx, cancel := context.WithCancel(context.Background())
	c := &claimed{cancel: cancel}
	go func() {
		defer cancel()
		c.m, c.err = p.Claim(ctx)
		c.done, c.at, c.dead = true, time.Now(), c.err == nil && !c.m.alive()
	}()
	synctest.Wait()
	return c
}

// give closes a claimed machine and tells the pool.
func give(p *Pool[*fakeMachine], m *fakeMachine) {
	_ = m.Close()
	p.Released(m)
	synctest.Wait()
}

func config() Config {
	return Config{
		MinReady: 2, MaxReady: 4, MaxMachines: 8, RefillConcurrency: 2,
		MaxAge: time.Hour, MakeTimeout: 30 * time.Second, Yield: 250 * time.Millisecond,
	}
}
