package machine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/broker"
	"github.com/ephemeral-run/ephemeral/node"
	"github.com/ephemeral-run/ephemeral/node/guest"
	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/redisserver"
	"github.com/ephemeral-run/ephemeral/vmm/provision"
)

// spoiled is a pool of machines to which something happened before they were prepared. It gives them away nevertheless.
type spoiled struct {
	h        *host
	how      string // a command of root
	prepared bool   // whether that lets the machine be prepared
	machine  *provision.Machine
	settled  atomic.Bool
	released atomic.Bool
}

func (p *spoiled) Claim(ctx context.Context, _ string) (*provision.Machine, error) {
	m, err := p.h.clone(ctx)
	if err != nil {
		return nil, err
	}
	p.machine = m.Machine
	if _, err = m.ask(ctx, warming("root", "sh", "-c", p.how)); err != nil {
		return m.Machine, err
	}
	clock, err := guest.PrepareClone(ctx, m.Machine)
	if err == nil {
		err = clock.Close()
	}
	if p.prepared != (err == nil) || err != nil && !errors.Is(err, guest.ErrNotPrepared) {
		return m.Machine, fmt.Errorf("prepared: %w", err)
	}
	return m.Machine, nil
}

func (p *spoiled) Settled(*provision.Machine)  { p.settled.Store(true) }
func (p *spoiled) Released(*provision.Machine) { p.released.Store(true) }

// testStore is a store in a Redis of its own, with an organisation that has money.
func testStore(t *testing.T) *run.Store {
	t.Helper()
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	server, err := redisserver.Start(t.Context(), t.TempDir(), redisserver.Options{Log: log})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Close(); err != nil {
			t.Error(err)
		}
	})
	store, err := run.Open(t.Context(), run.Config{
		RedisURL: server.URL(), Cell: "c0", Lease: 30 * time.Second, Retention: 24 * time.Hour, Concurrency: 10, QueueLimit: 10,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := store.Close(); err != nil {
			t.Error(err)
		}
	})
	if _, err := store.CreateOrg(t.Context(), run.Org{ID: "o", Name: "o"}); err != nil {
		t.Fatal(err)
	}
	if _, err := store.Credit(t.Context(), "o", 1_000_000, "deposit"); err != nil {
		t.Fatal(err)
	}
	return store
}

// TestUnpreparedMachineIsNotUsed: a machine whose agent cannot confirm that it reseeded runs nothing and is destroyed. The run
// gets another one; when the third is no better it fails and says why, and the money is settled.
func TestUnpreparedMachineIsNotUsed(t *testing.T) {
	t.Parallel()
	h, store := commonHost(t), testStore(t)
	b, err := broker.New(broker.Config{Log: slog.New(slog.NewTextHandler(io.Discard, nil))})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	for _, c := range []struct {
		name, how string
		state     run.State
		code      string
		machines  int
	}{
		{"as it is", "true", run.Succeeded, "", 1}, // the control
		{"device away", "rm /dev/urandom && mkdir /dev/urandom", run.Failed, "prepare_failed", 3},
		{"device false", "rm /dev/urandom && touch /dev/urandom", run.Failed, "prepare_failed", 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), createLimit)
			defer cancel()
			admitted, _, err := store.Admit(ctx, run.Admission{Org: "o", Key: "k", FirstSlice: 200, Spec: run.Spec{
				Command: "echo used", Shell: true, TimeoutSeconds: 60, MaxCostMicros: 40_000,
			}})
			if err != nil {
				t.Fatal(err)
			}
			pool := &spoiled{h: h, how: c.how, prepared: c.state == run.Succeeded}
			runner := &node.Runner{
				Store: store, Broker: b, Pool: pool, Isolation: string(h.driver.Isolation()), Lease: store.LeaseTime(),
				Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
			}
			var got run.Run
			for n := 1; ; n++ {
				lease, err := store.Take(ctx, "n")
				if err != nil || lease == nil {
					t.Fatalf("take: %v, %v", lease, err)
				}
				runner.Execute(ctx, lease)
				if got, err = store.Get(ctx, "o", admitted.ID); err != nil {
					t.Fatal(err)
				}
				if ended := got.State != run.Queued; ended != (n == c.machines) || !ended && got.Money.Charged != 0 {
					t.Fatalf("with machine %d the run is %s, charged %d", n, got.State, got.Money.Charged)
				} else if ended {
					break
				}
			}
			code := ""
			if got.Error != nil {
				code = got.Error.Code
			}
			if got.State != c.state || code != c.code {
				t.Errorf("the run is %s, %+v, want %s, %s", got.State, got.Error, c.state, c.code)
			}
			if used := got.Result != nil && got.Result.Stdout != nil; used != (c.state == run.Succeeded) || (got.StartedAt != nil) != used {
				t.Errorf("result %+v, started at %v", got.Result, got.StartedAt)
			}
			if !pool.released.Load() || pool.settled.Load() != (c.state == run.Succeeded) {
				t.Errorf("released %v, settled %v", pool.released.Load(), pool.settled.Load())
			}
			select {
			case <-pool.machine.Done():
			default:
				t.Error("the machine lives")
			}
			if m := got.Money; m.Charged+m.Released != 40_000 {
				t.Errorf("money %+v", m)
			}
		})
	}
}
