package gateway

import (
	"context"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ephemeral-run/ephemeral/run"
)

// TestHubSubscribesForReadersOnly: the first reader brings the subscription up, and it outlives the last one by a while.
func TestHubSubscribesForReadersOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var subscribed atomic.Int64
		events := make(chan run.Event)
		h := newHub(&fakeStore{subscribe: func(ctx context.Context) (<-chan run.Event, <-chan struct{}, error) {
			time.Sleep(10 * time.Millisecond)
			subscribed.Add(1)
			context.AfterFunc(ctx, func() { subscribed.Add(-1) })
			return events, make(chan struct{}), nil
		}}, slog.New(slog.DiscardHandler))
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go h.run(ctx)
		count := func(when string, want int64) {
			t.Helper()
			synctest.Wait()
			if got := subscribed.Load(); got != want {
				t.Fatalf("%s: %d subscriptions, want %d", when, got, want)
			}
		}
		time.Sleep(time.Minute)
		count("without readers", 0)
		for range 2 {
			began := time.Now()
			r := h.join("o", testRun)
			h.ready(ctx, r)
			if took := time.Since(began); took != 10*time.Millisecond {
				t.Errorf("ready after %v", took)
			}
			count("with a reader", 1)
			if r.take().gap {
				t.Error("a reader that waited is told of a gap")
			}
			second := h.join("o", testRun)
			h.ready(ctx, second) // at once
			events <- run.Event{Run: testRun, Seq: 1, Type: run.EventShell}
			synctest.Wait()
			if a, b := r.take(), second.take(); len(a.frames) != 1 || len(b.frames) != 1 {
				t.Errorf("frames %d and %d, want 1 each", len(a.frames), len(b.frames))
			}
			time.Sleep(time.Hour)
			h.leave(second)
			count("after an hour", 1)
			h.leave(r)
			time.Sleep(lingers - time.Second)
			count("shortly after the last reader", 1)
			time.Sleep(2 * lingers)
			count("long after the last reader", 0)
		}
	})
}
