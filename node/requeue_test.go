package node

import (
	"context"
	"io"
	"log/slog"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/broker"
	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/redisserver"
	"github.com/ephemeral-run/ephemeral/vmm/provision"
)

// emptyPool has no machine: a claim waits until its context ends.
type emptyPool struct{ Pool }

func (emptyPool) Claim(ctx context.Context, _ string) (*provision.Machine, error) {
	<-ctx.Done()
	return nil, context.Cause(ctx)
}

// leased makes a runner without machines on a store of its own, and a run that is leased to it.
func leased(t *testing.T) (*Runner, *redisserver.Server, *run.Lease) {
	t.Helper()
	quiet := slog.New(slog.NewTextHandler(io.Discard, nil))
	server, err := redisserver.Start(t.Context(), t.TempDir(), redisserver.Options{Log: quiet})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = server.Close() })
	store, err := run.Open(t.Context(), run.Config{RedisURL: server.URL(), Lease: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = store.Close() })
	b, err := broker.New(broker.Config{Log: quiet})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	org, err := store.CreateOrg(t.Context(), run.Org{Name: "one"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := store.Credit(t.Context(), org.ID, 1_000_000, "first"); err != nil {
		t.Fatal(err)
	}
	if _, _, err := store.Admit(t.Context(), run.Admission{Org: org.ID, FirstSlice: 200, Spec: run.Spec{
		Command: "true", Shell: true, TimeoutSeconds: 10, MaxCostMicros: 10_000,
	}}); err != nil {
		t.Fatal(err)
	}
	l, err := store.Take(t.Context(), "node-1")
	if err != nil {
		t.Fatal(err)
	}
	return &Runner{Store: store, Broker: b, Pool: emptyPool{}, Lease: time.Second, Log: quiet}, server, l
}

func TestARunThatWaitsForAMachineGoesBackWhenTheNodeStops(t *testing.T) {
	r, _, l := leased(t)
	ctx, stop := context.WithCancelCause(t.Context())
	time.AfterFunc(100*time.Millisecond, func() { stop(errShutdown) })
	r.Execute(ctx, l)
	got, err := r.Store.Get(t.Context(), l.Org, l.Run)
	if err != nil {
		t.Fatal(err)
	}
	if got.State != run.Queued {
		t.Errorf("the run is %s (%+v), want queued", got.State, got.Error)
	}
}

func TestANodeStopsThoughTheStoreIsGone(t *testing.T) {
	r, server, l := leased(t)
	if err := server.Close(); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancelCause(t.Context())
	stop(errShutdown)
	done := make(chan struct{})
	go func() { defer close(done); r.Execute(ctx, l) }()
	select {
	case <-done:
	case <-time.After(20 * time.Second):
		t.Fatal("the node still waits for a store that is gone")
	}
}

// A run goes back only if it has not started, whatever the node has heard of its start.
func TestARunThatHasStartedDoesNotGoBack(t *testing.T) {
	for name, started := range map[string]bool{"waits": false, "has started": true} {
		t.Run(name, func(t *testing.T) {
			r, _, l := leased(t)
			want := run.Queued
			if started {
				if err := r.Store.Start(t.Context(), l, run.Start{At: time.Now(), Machine: "m", Image: "base", Isolation: "tcg"}); err != nil {
					t.Fatal(err)
				}
				want = run.Running
			}
			x := &execution{Runner: r, stopping: t.Context(), lease: l}
			if closed := x.requeue(t.Context()); closed == started {
				t.Errorf("closed: %v", closed)
			}
			got, err := r.Store.Get(t.Context(), l.Org, l.Run)
			if err != nil {
				t.Fatal(err)
			}
			if got.State != want {
				t.Errorf("the run is %s, want %s", got.State, want)
			}
		})
	}
}
