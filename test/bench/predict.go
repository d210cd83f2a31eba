package main

import (
	"context"
	"time"

	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/pool/replay"
	"github.com/ephemeral-run/ephemeral/vmm/provision"
)

// predictedArrivals is how many claims the simulator has to predict.
const predictedArrivals = 60

// predictions plays a workload on a pool of real machines and on the simulator.
func predictions(ctx context.Context, t vmm.Template, parts *provision.Provisioner) ([]row, error) {
	say("simulator beside a pool: %d arrivals", predictedArrivals)
	o, err := replay.Run(ctx, func(ctx context.Context) (*provision.Machine, error) { return parts.Create(ctx, t) },
		predictedArrivals, 300*time.Millisecond)
	if err != nil {
		return nil, err
	}
	say("%s", o)
	one := func(name, unit string, v float64) row {
		return row{Name: name, Unit: unit, Value: v, P95: v, Samples: o.Arrivals}
	}
	misses, wait := one("pool.misses_predicted", "%", 100*o.Predicted), one("pool.wait_p95_predicted", "ms", o.PredictedBy.Seconds()*1000)
	misses.Baseline, misses.leastRatio, misses.mostRatio = "pool.misses", 0.8, 1.2
	wait.Baseline, wait.leastRatio, wait.mostRatio = "pool.wait_p95", 0.7, 1.3
	return []row{one("pool.misses", "%", 100*o.Missed), misses, one("pool.wait_p95", "ms", o.WaitP95.Seconds()*1000), wait}, nil
}
