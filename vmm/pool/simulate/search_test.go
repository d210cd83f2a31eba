package simulate

import (
	"context"
	"strings"
	"testing"
	"time"
)

func TestRecommendsTheSmallestThatSuffices(t *testing.T) {
	cfg := warm(0, 2)
	cfg.Workload.Count, cfg.Pool.MaxMachines, cfg.MemoryMiB, cfg.ReadyMemoryMiB = 20_000, 200, 100, 100
	r, err := Recommend(context.Background(), cfg, Goal{MissRate: 0.01, Wait: -1})
	if err != nil {
		t.Fatal(err)
	}
	if !r.Met || r.Policy.MissRate > 0.01 {
		t.Fatalf("%+v", r.Policy)
	}
	// Palm: 6 ready miss 1.66 percent, 7 miss 0.45.
	size := map[int]bool{}
	for i, p := range r.Curve {
		if p.TargetMissRate != 0 {
			continue
		}
		size[p.MinReady] = p.Met
		if i > 0 && p.MissRate > r.Curve[i-1].MissRate {
			t.Errorf("%d ready miss more than %d", p.MinReady, r.Curve[i-1].MinReady)
		}
		if p.Met && p.MemoryHours < r.Policy.MemoryHours {
			t.Errorf("%d ready meet the goal with less memory", p.MinReady)
		}
	}
	if met, tried := size[6]; met || !tried {
		t.Error("6 ready machines cannot be enough, and have to be tried")
	}
	if !size[7] {
		t.Error("7 ready machines are enough")
	}
}

func TestRecommendKeepsToTheMemory(t *testing.T) {
	cfg := warm(0, 2)
	cfg.Workload.Count, cfg.Pool.MaxMachines, cfg.MemoryMiB, cfg.ReadyMemoryMiB = 5_000, 200, 100, 50
	tight, err := Recommend(context.Background(), cfg, Goal{MissRate: 0.001, Wait: -1, Memory: 1500}) // 12 are in use or made on average
	if err != nil {
		t.Fatal(err)
	}
	if tight.Met || tight.Policy.MaxMachines != 15 || !strings.Contains(tight.Reason, "15 machines are not enough") {
		t.Fatalf("%+v", tight)
	}
	for _, p := range tight.Curve {
		if p.PeakMemoryMiB > 1500 {
			t.Errorf("%+v is above the limit", p)
		}
	}
	waits, err := Recommend(context.Background(), cfg, Goal{MissRate: -1, Wait: 500 * time.Millisecond, Share: 0.95, Memory: 8000})
	if err != nil {
		t.Fatal(err)
	}
	if !waits.Met || waits.Policy.WaitP95 > 0.5 {
		t.Fatalf("%+v", waits.Policy)
	}
}

func TestRecommendRefusesSenselessGoals(t *testing.T) {
	cfg := warm(0, 2)
	for _, g := range []Goal{
		{MissRate: -1, Wait: -1}, {MissRate: 1, Wait: -1}, {MissRate: -1, Wait: 1}, {MissRate: 0.1, Wait: -1, Memory: -1},
	} {
		if _, err := Recommend(context.Background(), cfg, g); err == nil {
			t.Errorf("%+v was accepted", g)
		}
	}
	cfg.MemoryMiB = 100
	if _, err := Recommend(context.Background(), cfg, Goal{MissRate: 0.1, Wait: -1, Memory: 99}); err == nil {
		t.Error("a machine larger than the memory was accepted")
	}
}
