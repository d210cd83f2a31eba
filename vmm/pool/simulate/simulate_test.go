package simulate

import (
	"context"
	"math"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/vmm/pool"
	"github.com/ephemeral-run/ephemeral/vmm/pool/autoscale"
	"github.com/ephemeral-run/ephemeral/vmm/pool/workload"
)

// queue is a system of c machines without a pool, whose restores take no time: a textbook queue.
func queue(c int, rate float64, service workload.Dist, maxWait time.Duration) Config {
	zero := workload.Const(0)
	return Config{
		Pool:     pool.Config{MaxMachines: c, RefillConcurrency: c, MakeTimeout: time.Minute},
		Workload: workload.Workload{Process: workload.Poisson(rate), Service: service, Count: 150_000, Seed: 1},
		Restore:  zero, Settle: zero, Destroy: zero, MaxWait: maxWait, MemoryMiB: 1,
	}
}

func run(t testing.TB, cfg Config) Result {
	t.Helper()
	r, err := Run(context.Background(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// near fails the test unless got is within a relative error of want.
func near(t *testing.T, what string, got, want, within float64) {
	t.Helper()
	if math.Abs(got-want) > within*want {
		t.Errorf("%s: %.5f, the closed form says %.5f: off by %.2f%%, allowed %.1f%%", what, got, want, math.Abs(got/want-1)*100, within*100)
	}
}

// TestDelaySystemsAgreeWithClosedForms: M/M/c by Erlang C, M/G/1 and M/D/1 by Pollaczek and Khinchine.
func TestDelaySystemsAgreeWithClosedForms(t *testing.T) {
	second := time.Second
	pollaczek := func(load, cv2 float64) float64 { return load / (1 - load) * (1 + cv2) / 2 }
	for _, tt := range []struct {
		name    string
		c       int
		rate    float64
		service workload.Dist
		wait    float64 // mean, seconds
		waits   float64 // probability
		within  float64
	}{
		{"M/M/1 at 0.5", 1, 0.5, workload.Exp(second), 1, 0.5, 0.05},
		{"M/M/3 at 2/3", 3, 2, workload.Exp(second), 4.0 / 9, 4.0 / 9, 0.04},
		{"M/M/10 at 0.8", 10, 8, workload.Exp(second), autoscale.ErlangC(10, 8) / 2, autoscale.ErlangC(10, 8), 0.06},
		{"M/D/1 at 0.6", 1, 0.6, workload.Const(second), pollaczek(0.6, 0), 0.6, 0.04},
		{"M/G/1, uniform, at 0.7", 1, 0.7, workload.Uniform{Low: 0, High: 2 * second}, pollaczek(0.7, 1.0/3), 0.7, 0.05},
		{"M/G/1, log-normal, at 0.5", 1, 0.5, workload.LogNormal(second, 1.5), pollaczek(0.5, 2.25), 0.5, 0.08},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := run(t, queue(tt.c, tt.rate, tt.service, -1))
			near(t, "mean wait", r.WaitMean, tt.wait, tt.within)
			near(t, "probability of a wait", r.WaitProbability, tt.waits, 0.03)
			if math.Abs(r.WaitMean-tt.wait) > 2*r.WaitMeanError {
				t.Errorf("mean wait %.5f with a stated error of %.5f, the closed form says %.5f", r.WaitMean, r.WaitMeanError, tt.wait)
			}
			if load := tt.rate * tt.service.Mean().Seconds(); math.Abs(r.MeanLeased-load) > 0.02*load {
				t.Errorf("%.4f machines in use, want %.4f", r.MeanLeased, load)
			}
		})
	}
}

// TestLossSystemsAgreeWithErlangB: what is lost depends on the mean of the service time only.
func TestLossSystemsAgreeWithErlangB(t *testing.T) {
	second := time.Second
	for _, tt := range []struct {
		name    string
		c       int
		rate    float64
		service workload.Dist
	}{
		{"M/M/3/3", 3, 2, workload.Exp(second)},
		{"M/M/10/10", 10, 8, workload.Exp(second)},
		{"M/D/3/3", 3, 2, workload.Const(second)},
		{"M/G/5/5, log-normal", 5, 4, workload.LogNormal(second, 2)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cfg := queue(tt.c, tt.rate, tt.service, 0)
			cfg.Workload.Count = 80_000
			r := run(t, cfg)
			near(t, "loss", r.LossProbability, autoscale.ErlangB(tt.c, tt.rate*tt.service.Mean().Seconds()), 0.05)
			if r.WaitMax != 0 || r.Served+int(r.LossProbability*float64(r.Arrivals)+0.5) != r.Arrivals {
				t.Errorf("%+v", r)
			}
		})
	}
}

// warm is a pool of n ready machines with as many makers as it can use.
func warm(n int, rate float64) Config {
	cfg := queue(10_000, rate, workload.Exp(5*time.Second), -1)
	cfg.Pool.MinReady, cfg.Pool.MaxReady = n, n
	cfg.Restore = workload.Exp(time.Second)
	cfg.Workload.Count = 40_000
	cfg.ReadyMemoryMiB = 1
	return cfg
}

// TestPoolMissesAsPalmSays: a pool that orders a machine for each one claimed misses when n or more claims came within a
// refill time, which is Poisson, whatever the distribution of the refill time.
func TestPoolMissesAsPalmSays(t *testing.T) {
	for _, restore := range []workload.Dist{workload.Exp(time.Second), workload.Const(time.Second), workload.LogNormal(time.Second, 1)} {
		for _, n := range []int{1, 2, 4} {
			cfg := warm(n, 2)
			cfg.Restore = restore
			r := run(t, cfg)
			hit, term := 0.0, math.Exp(-2)
			for k := range n {
				hit += term
				term *= 2 / float64(k+1)
			}
			near(t, restore.String()+": miss rate", r.MissRate, 1-hit, 0.06)
		}
	}
}

func TestScalerKeepsItsMissRate(t *testing.T) {
	for _, tt := range []struct {
		name    string
		process workload.Process
		target  float64
		makers  int
		most    float64 // of the miss rate, as a multiple of the target
		ready   float64 // mean ready at most
	}{
		{"steady", workload.Poisson(2), 0.01, 100, 1.2, 9},
		{"steady and rare misses", workload.Poisson(10), 0.001, 100, 1.5, 32},
		{"few makers", workload.Poisson(2), 0.01, 3, 1.5, 22},
		{"a day", workload.Diurnal{Low: 0.1, High: 10, Period: 24 * time.Hour}, 0.01, 100, 1.3, 18},
		{"bursts", workload.Bursty{Low: 0.5, High: 8, On: 30 * time.Second, Off: 5 * time.Minute}, 0.02, 100, 2, 20},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cfg := warm(0, 1)
			cfg.Workload.Process = tt.process
			cfg.Pool.MaxReady, cfg.Pool.RefillConcurrency = 100, tt.makers
			cfg.Pool.Autoscale = autoscale.Config{TargetMissRate: tt.target, HalfLife: 2 * time.Minute, HoldDown: 5 * time.Minute}
			r := run(t, cfg)
			t.Logf("miss rate %.4f, mean ready %.2f, target %.2f: %s", r.MissRate, r.MeanReady, r.MeanTarget, r.Reason)
			if r.MissRate > tt.most*tt.target || r.MeanReady > tt.ready {
				t.Errorf("miss rate %.4f (target %g), mean ready %.2f (want at most %g)", r.MissRate, tt.target, r.MeanReady, tt.ready)
			}
		})
	}
}
