package main

import (
	"context"
	"fmt"
	"time"

	"github.com/ephemeral-run/ephemeral/run/pools"
	"github.com/ephemeral-run/ephemeral/vmm/pool"
	"github.com/ephemeral-run/ephemeral/vmm/pool/simulate"
	"github.com/ephemeral-run/ephemeral/vmm/pool/workload"
)

// predictedClaims is how many claims a prediction simulates: enough for the 99th percentile, and done in a moment.
const predictedClaims = 5000

// predictor answers an operator who asks what a size would do, by the simulator that runs the pool's own policy.
func predictor(base pool.Config) func(context.Context, pools.Sizing) (pools.Prediction, error) {
	return func(ctx context.Context, s pools.Sizing) (pools.Prediction, error) {
		base := base
		base.MinReady, base.MaxReady, base.MaxMachines = s.MinReady, s.MaxReady, s.MaxMachines
		exponential := func(seconds float64) workload.Dist { return workload.Exp(seconds * float64(time.Second)) }
		moment := workload.Const(50 * time.Millisecond)
		r, err := simulate.Run(ctx, simulate.Config{
			Pool:     base,
			Workload: workload.Workload{Process: workload.Poisson(s.ClaimsPerSecond), Service: exponential(s.ServiceSeconds), Count: predictedClaims, Seed: 1},
			Restore:  exponential(s.RestoreSeconds), Settle: moment, Destroy: moment, MaxWait: time.Minute, MemoryMiB: s.MemoryMiB, ReadyMemoryMiB: s.MemoryMiB,
		})
		if err != nil {
			return pools.Prediction{}, fmt.Errorf("simulate the pool: %w", err)
		}
		return pools.Prediction{
			Claims: r.Arrivals, MissRate: r.MissRate, LostShare: r.LossProbability, WaitMean: r.WaitMean, WaitP50: r.WaitP50, WaitP95: r.WaitP95,
			WaitP99: r.WaitP99, MeanReady: r.MeanReady, MeanLeased: r.MeanLeased, PeakMachines: r.PeakMachines, PeakMemoryMiB: r.PeakMemoryMiB,
		}, nil
	}
}
