package pool

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"
)

func TestReady(t *testing.T) {
	gate := make(chan struct{})
	made := make(chan error, 16)
	p, err := New(Config{MinReady: 2, MaxReady: 2, MaxMachines: 4, RefillConcurrency: 1, MakeTimeout: time.Minute},
		func(ctx context.Context) (*still, error) {
			select {
			case <-gate:
			case <-ctx.Done():
				return nil, ctx.Err()
			}
			if err := <-made; err != nil {
				return nil, err
			}
			return &still{done: make(chan struct{})}, nil
		})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if err := p.Ready(); !errors.Is(err, ErrFilling) {
		t.Errorf("before the first machine: %v, want ErrFilling", err)
	}
	made <- nil
	gate <- struct{}{}
	made <- nil
	gate <- struct{}{}
	for deadline := time.Now().Add(10 * time.Second); p.Ready() != nil; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("filled, and not ready: %v", p.Ready())
		}
	}
	close(gate)
	for range 8 {
		made <- errors.New("no kernel")
	}
	for range 2 { // the pool is empty then, and cannot fill up again
		m, err := p.Claim(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		_ = m.Close()
		p.Released(m)
	}
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		if err := p.Ready(); err != nil && strings.Contains(err.Error(), "no kernel") {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("making machines fails, and Ready says %v", p.Ready())
		}
	}
}

// doomed is a machine that knows why it ended.
type doomed struct {
	*fakeMachine
	why error
}

func (d doomed) Err() error { return d.why }

func TestDeathIsTold(t *testing.T) {
	why := errors.New("not reseeded")
	s := &slot[doomed]{m: doomed{why: why}}
	if err := s.death(); !errors.Is(err, errDead) || !errors.Is(err, why) {
		t.Errorf("died of %v", err)
	}
	if err := (&slot[*fakeMachine]{m: &fakeMachine{}}).death(); err != errDead {
		t.Errorf("died of %v", err)
	}
}

// still is a machine that does nothing.
type still struct{ done chan struct{} }

func (s *still) Close() error          { return nil }
func (s *still) Done() <-chan struct{} { return s.done }
