package provision

import (
	"context"
	"errors"
	"testing"
)

// fakeClock is the clock of a fake machine.
type fakeClock struct {
	stage *stage
	ended chan struct{} // closed by Close
}

func (c *fakeClock) Set(ctx context.Context) error {
	c.stage.mu.Lock()
	c.stage.clocks++
	err, hang := c.stage.fail["set clock"], c.stage.hang["set clock"]
	c.stage.mu.Unlock()
	if !hang {
		return err
	}
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-c.ended:
		return errors.New("clock closed")
	}
}

func (c *fakeClock) Right() bool { return !c.stage.clocksWrong }

func (c *fakeClock) Close() error {
	close(c.ended)
	c.stage.add("clock", -1)
	return nil
}

// A machine is confirmed when its clock was set after it woke; one that rests running with a clock that is right needs nothing.
func TestWakingSetsTheClock(t *testing.T) {
	broken := errors.New("broken")
	for name, c := range map[string]struct {
		rest  Rest
		wrong bool
		fail  error
		sets  int
	}{
		"paused":                {RestPaused, false, nil, 1},
		"paused, fails":         {RestPaused, false, broken, 1},
		"running":               {RestRunning, false, broken, 0},
		"running, wrong":        {RestRunning, true, nil, 1},
		"running, wrong, fails": {RestRunning, true, broken, 1},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStage()
			s.clocksWrong = c.wrong
			if c.fail != nil {
				s.fail["set clock"] = c.fail
			}
			p, tmpl := preparing(t, s, c.rest)
			m, err := p.Create(t.Context(), tmpl)
			if err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(m.Rested(t.Context()), m.Wake(t.Context())); err != nil {
				t.Fatal(err)
			}
			want := c.fail
			if c.sets == 0 {
				want = nil
			}
			if err := m.Confirmed(t.Context()); !errors.Is(err, want) {
				t.Errorf("confirmed: %v, want %v", err, want)
			}
			if err := m.Close(); err != nil {
				t.Error(err)
			}
			if s.clocks != c.sets {
				t.Errorf("set %d times, want %d", s.clocks, c.sets)
			}
			if len(p.turns) != 0 {
				t.Errorf("%d turns are left", len(p.turns))
			}
			s.empty(t, p)
		})
	}
}

// A machine that does not answer is not confirmed, and can be closed meanwhile.
func TestWakingWithoutAnAnswer(t *testing.T) {
	for _, end := range []string{"context", "close"} {
		s := newStage()
		s.hang["set clock"] = true
		p, tmpl := preparing(t, s, RestPaused)
		m, err := p.Create(t.Context(), tmpl)
		if err != nil {
			t.Fatal(err)
		}
		gone := errors.New("caller left")
		ctx, cancel := context.WithCancelCause(t.Context())
		if err := errors.Join(m.Rested(ctx), m.Wake(ctx)); err != nil {
			t.Fatal(err)
		}
		if end == "context" {
			cancel(gone)
			if err := m.Confirmed(ctx); !errors.Is(err, gone) {
				t.Errorf("confirmed: %v", err)
			}
		}
		if err := m.Close(); err != nil {
			t.Error(err)
		}
		if end == "close" {
			if err := m.Confirmed(ctx); err == nil {
				t.Error("confirmed without an answer")
			}
		}
		cancel(nil)
		s.empty(t, p)
	}
}

// A machine that nobody has prepared is never confirmed.
func TestUnpreparedIsNotConfirmed(t *testing.T) {
	s := newStage()
	p, tmpl := made(t, s)
	m, err := p.Create(t.Context(), tmpl)
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Wake(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := m.Confirmed(t.Context()); !errors.Is(err, ErrUnprepared) {
		t.Errorf("confirmed: %v", err)
	}
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	s.empty(t, p)
}
