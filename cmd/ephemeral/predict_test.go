package main

import (
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/run/pools"
	"github.com/ephemeral-run/ephemeral/vmm/pool"
)

// A larger pool misses less and takes more memory.
func TestPredictor(t *testing.T) {
	s, err := load()
	if err != nil {
		t.Fatal(err)
	}
	predict := predictor(s.Pool)
	small, err := predict(t.Context(), pools.Sizing{MinReady: 1, MaxReady: 1, MaxMachines: 8, MemoryMiB: 512, ClaimsPerSecond: 2, ServiceSeconds: 1, RestoreSeconds: 0.5})
	if err != nil {
		t.Fatal(err)
	}
	large, err := predict(t.Context(), pools.Sizing{MinReady: 8, MaxReady: 16, MaxMachines: 32, MemoryMiB: 512, ClaimsPerSecond: 2, ServiceSeconds: 1, RestoreSeconds: 0.5})
	if err != nil {
		t.Fatal(err)
	}
	if small.Claims != predictedClaims || small.MissRate <= large.MissRate || small.WaitMean <= large.WaitMean || small.PeakMemoryMiB >= large.PeakMemoryMiB {
		t.Errorf("small %+v, large %+v", small, large)
	}
	if large.MissRate > 0.02 {
		t.Errorf("eight ready for two claims a second miss %g", large.MissRate)
	}
	for _, extreme := range []pools.Sizing{
		{MinReady: 541, MaxReady: 1215, MaxMachines: 1916, MemoryMiB: 512, ClaimsPerSecond: 0.001, ServiceSeconds: 3600, RestoreSeconds: 3600},
		{MinReady: 10_000, MaxReady: 10_000, MaxMachines: 10_000, MemoryMiB: 1 << 20, ClaimsPerSecond: 1000, ServiceSeconds: 0.001, RestoreSeconds: 0.001},
	} {
		if _, err := predict(t.Context(), extreme); err != nil {
			t.Errorf("%+v: %v", extreme, err)
		}
	}
	_, err = predictor(pool.Config{MakeTimeout: -time.Second})(t.Context(), pools.Sizing{})
	if err == nil {
		t.Error("no error for a size that cannot be")
	}
}
