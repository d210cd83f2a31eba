package simulate

import (
	"context"
	"io"
	"log/slog"
	"math"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ephemeral-run/ephemeral/vmm/pool"
	"github.com/ephemeral-run/ephemeral/vmm/pool/autoscale"
	"github.com/ephemeral-run/ephemeral/vmm/pool/workload"
)

// replay plays a workload against a pool with its goroutines and timers, and returns the waits.
func replay(t *testing.T, cfg Config) (waits []time.Duration, stats pool.Stats) {
	t.Helper()
	restore := cfg.Restore.(workload.Const)
	p, err := pool.New(cfg.Pool, func(ctx context.Context) (*machine, error) {
		select {
		case <-time.After(time.Duration(restore)):
			return &machine{}, nil
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}, pool.WithLogger(slog.New(slog.NewTextHandler(io.Discard, nil))))
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(time.Minute) // filled
	synctest.Wait()
	var runs sync.WaitGroup
	var mu sync.Mutex
	next, began := cfg.Workload.Start(), time.Now()
	for a, ok := next(); ok; a, ok = next() {
		time.Sleep(time.Until(began.Add(a.At)))
		runs.Go(func() {
			from := time.Now()
			m, err := p.Claim(context.Background())
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			waits = append(waits, time.Since(from))
			mu.Unlock()
			p.Settled(m)
			time.Sleep(a.Service)
			p.Released(m)
		})
	}
	runs.Wait()
	stats = p.Stats()
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	slices.Sort(waits)
	return waits, stats
}

// TestAgreesWithAPool plays the same workload against a simulated pool and one with goroutines, timers and waiting callers.
func TestAgreesWithAPool(t *testing.T) {
	base := func() Config {
		cfg := warm(3, 1.5)
		cfg.Workload.Count, cfg.Restore = 3000, workload.Const(time.Second)
		cfg.Pool.MaxReady, cfg.Pool.MaxMachines, cfg.Pool.RefillConcurrency, cfg.Pool.MakeTimeout = 8, 14, 2, time.Minute
		return cfg
	}
	scaled := base()
	scaled.Pool.MinReady = 1
	scaled.Pool.Autoscale = autoscale.Config{TargetMissRate: 0.05, HalfLife: time.Minute, HoldDown: 2 * time.Minute}
	bursts := base()
	bursts.Workload.Process = workload.Bursty{Low: 0.2, High: 4, On: 20 * time.Second, Off: time.Minute}
	bursts.Pool.MaxMachines, bursts.Pool.MaxAge = 40, time.Minute
	for name, cfg := range map[string]Config{"fixed": base(), "scales itself": scaled, "bursts": bursts} {
		t.Run(name, func(t *testing.T) {
			want := run(t, cfg)
			synctest.Test(t, func(t *testing.T) {
				waits, stats := replay(t, cfg)
				missed := 1 - float64(stats.Hits)/float64(len(waits))
				p95 := waits[len(waits)*95/100].Seconds()
				t.Logf("missed %.4f, simulated %.4f; p95 %.3f s, simulated %.3f s", missed, want.MissRate, p95, want.WaitP95)
				if math.Abs(missed-want.MissRate) > 0.02*want.MissRate || want.MissRate < 0.01 {
					t.Errorf("the pool missed %.4f of its claims, the simulator %.4f", missed, want.MissRate)
				}
				if math.Abs(p95-want.WaitP95) > 0.02*want.WaitP95+0.001 {
					t.Errorf("p95 of the waits is %.3f s, simulated %.3f s", p95, want.WaitP95)
				}
			})
		})
	}
}
