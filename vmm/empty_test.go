package vmm

import (
	"context"
	"errors"
	"testing"
	"time"
)

// waiting is a machine whose process serves and has no guest.
type waiting struct {
	Machine
	done   chan struct{}
	err    error
	closed int
}

func (w *waiting) ID() string            { return "w" }
func (w *waiting) Done() <-chan struct{} { return w.done }
func (w *waiting) Err() error            { return w.err }
func (w *waiting) Close() error {
	if w.closed++; w.closed == 1 {
		close(w.done)
	}
	return nil
}

func TestEmpty(t *testing.T) {
	refused := errors.New("refused")
	fails := func(context.Context) error { return refused }
	works := func(context.Context) error { return nil }
	for name, c := range map[string]struct {
		load   func(context.Context) error
		before func(e Empty, w *waiting)
		want   error
		closed int // how often the machine was closed when the empty one was as well
	}{
		"loaded":       {works, func(Empty, *waiting) {}, nil, 0},
		"fails":        {fails, func(Empty, *waiting) {}, refused, 0},
		"loaded twice": {works, func(e Empty, _ *waiting) { _, _ = e.Load(t.Context()) }, ErrState, 0},
		"closed":       {works, func(e Empty, _ *waiting) { _ = e.Close() }, ErrClosed, 2},
		"ended":        {works, func(_ Empty, w *waiting) { w.err = ErrVMM; close(w.done); w.closed = 1 }, ErrVMM, 2},
	} {
		t.Run(name, func(t *testing.T) {
			w := &waiting{done: make(chan struct{})}
			e := NewEmpty(w, c.load)
			c.before(e, w)
			m, err := e.Load(t.Context())
			if !errors.Is(err, c.want) || (err == nil) != (m == Machine(w)) {
				t.Errorf("loaded %v, %v", m, err)
			}
			if err := e.Close(); err != nil {
				t.Error(err)
			}
			if w.closed != c.closed {
				t.Errorf("the machine was closed %d times, want %d", w.closed, c.closed)
			}
		})
	}
}

// TestEmptyLoadOrClose: of a load and a close at the same time one wins, and the process is never loaded and closed.
func TestEmptyLoadOrClose(t *testing.T) {
	for range 200 {
		w := &waiting{done: make(chan struct{})}
		loaded := make(chan bool, 1)
		e := NewEmpty(w, func(context.Context) error { loaded <- true; return nil })
		go func() { _ = e.Close() }()
		_, err := e.Load(t.Context())
		switch {
		case err == nil:
			select {
			case <-w.done:
				t.Fatal("loaded and closed")
			case <-time.After(time.Millisecond):
			}
		case !errors.Is(err, ErrClosed) || len(loaded) != 0:
			t.Fatal(err)
		}
	}
}
