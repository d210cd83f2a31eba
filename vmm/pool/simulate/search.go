package simulate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/ephemeral-run/ephemeral/vmm/pool"
	"github.com/ephemeral-run/ephemeral/vmm/pool/autoscale"
)

// Goal is what a policy has to reach. A negative value asks for nothing.
type Goal struct {
	MissRate float64       // at most this share of claims finds no machine ready
	Wait     time.Duration // at most this wait for the share of claims below
	Share    float64       // 0.95: the 95th percentile
	Memory   int           // MiB that all machines together may use at any moment; 0: as much as they want
}

// Validate says what is wrong with the goal.
func (g Goal) Validate() error {
	switch {
	case g.MissRate < 0 && g.Wait < 0:
		return errors.New("a goal needs a miss rate or a wait")
	case !(g.MissRate < 1):
		return fmt.Errorf("goal: a miss rate of %g, must be below 1", g.MissRate)
	case g.Wait >= 0 && !(g.Share > 0 && g.Share <= 1):
		return fmt.Errorf("goal: a wait of a share of %g of the claims, must be above 0 and at most 1", g.Share)
	case g.Memory < 0:
		return fmt.Errorf("goal: %d MiB of memory", g.Memory)
	}
	return nil
}

// met tells whether a result reaches the goal.
func (g Goal) met(r *Result) bool {
	return (g.MissRate < 0 || r.MissRate <= g.MissRate) &&
		(g.Wait < 0 || r.Wait(g.Share) <= g.Wait.Seconds()) &&
		(g.Memory == 0 || r.PeakMemoryMiB <= g.Memory) && r.LossProbability == 0
}

// Point is one policy and what it gave.
type Point struct {
	MinReady       int     `json:"min_ready"`
	MaxReady       int     `json:"max_ready"`
	MaxMachines    int     `json:"max_machines"`
	TargetMissRate float64 `json:"target_miss_rate"` // 0: the pool does not scale itself

	MissRate      float64 `json:"miss_rate"`
	WaitP50       float64 `json:"wait_p50_seconds"`
	WaitP95       float64 `json:"wait_p95_seconds"`
	WaitP99       float64 `json:"wait_p99_seconds"`
	MeanReady     float64 `json:"mean_ready"`
	MemoryHours   float64 `json:"memory_gib_hours"`
	PeakMemoryMiB int     `json:"peak_memory_mib"`
	Restores      int64   `json:"restores"`
	Met           bool    `json:"met"`

	pool pool.Config
}

// Config is the pool's configuration of this point.
func (p Point) Config() pool.Config { return p.pool }

// Recommendation is the policy that reaches the goal with the least memory over time, and the trade-off it was chosen from.
type Recommendation struct {
	Met    bool    `json:"met"`
	Reason string  `json:"reason"`
	Policy Point   `json:"policy"`
	Curve  []Point `json:"curve"` // fixed sizes by size, then those that scale themselves by target
}

// fixedSizes are the numbers of ready machines tried first; what lies between two of them is searched.
var fixedSizes = []int{0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024}

// scaledTargets are the target miss rates tried.
var scaledTargets = []float64{0.3, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001}

// Recommend searches the policy that reaches a goal on a workload. All policies meet the same claims and the limits of
// cfg.Pool; Goal.Memory lowers the number of machines to what fits.
func Recommend(ctx context.Context, cfg Config, g Goal) (Recommendation, error) {
	if err := errors.Join(cfg.Validate(), g.Validate()); err != nil {
		return Recommendation{}, fmt.Errorf("search a policy: %w", err)
	}
	if g.Memory > 0 {
		cfg.Pool.MaxMachines = min(cfg.Pool.MaxMachines, g.Memory/cfg.MemoryMiB)
		if cfg.Pool.MaxMachines == 0 {
			return Recommendation{}, fmt.Errorf("search a policy: a machine of %d MiB does not fit into %d MiB", cfg.MemoryMiB, g.Memory)
		}
	}
	s := search{cfg: cfg, goal: g}
	if err := s.fixed(ctx); err != nil {
		return Recommendation{}, err
	}
	if err := s.scaled(ctx); err != nil {
		return Recommendation{}, err
	}
	return s.choose(), nil
}

type search struct {
	cfg  Config
	goal Goal
	all  []Point
}

// try simulates one policy.
func (s *search) try(ctx context.Context, minReady, maxReady int, scale autoscale.Config) (Point, error) {
	cfg := s.cfg
	cfg.Pool.MinReady, cfg.Pool.MaxReady, cfg.Pool.Autoscale = minReady, maxReady, scale
	r, err := Run(ctx, cfg)
	if err != nil {
		return Point{}, err
	}
	p := Point{
		MinReady: minReady, MaxReady: maxReady, MaxMachines: cfg.Pool.MaxMachines, TargetMissRate: scale.TargetMissRate,
		MissRate: r.MissRate, WaitP50: r.WaitP50, WaitP95: r.WaitP95, WaitP99: r.WaitP99, MeanReady: r.MeanReady,
		MemoryHours: r.MemoryHours, PeakMemoryMiB: r.PeakMemoryMiB, Restores: r.Restores, Met: s.goal.met(&r), pool: cfg.Pool,
	}
	s.all = append(s.all, p)
	return p, nil
}

// fixed tries fixed sizes until two have met the goal or one keeps every machine ready, then what lies below the first
// that met it. More ready machines never make more misses, so that halving finds the smallest.
func (s *search) fixed(ctx context.Context) error {
	most := s.cfg.Pool.MaxMachines
	sizes := append(slices.DeleteFunc(slices.Clone(fixedSizes), func(n int) bool { return n >= most }), most)
	low, high, met := -1, -1, 0
	for _, n := range sizes {
		p, err := s.try(ctx, n, n, autoscale.Config{})
		if err != nil {
			return err
		}
		if !p.Met {
			low = n
			continue
		}
		if met++; met == 1 {
			high = n
		}
		if met == 2 {
			break
		}
	}
	if met == 0 || low > high {
		return nil
	}
	for high-low > 1 {
		n := (low + high) / 2
		p, err := s.try(ctx, n, n, autoscale.Config{})
		if err != nil {
			return err
		}
		if p.Met {
			high = n
		} else {
			low = n
		}
	}
	return nil
}

// scaled tries pools that scale themselves, until two have met the goal.
func (s *search) scaled(ctx context.Context) error {
	scale := s.cfg.Pool.Autoscale
	if !scale.Enabled() {
		scale.IdleReady, scale.IdleAfter, scale.HalfLife, scale.HoldDown = 1, 15*time.Minute, 2*time.Minute, 5*time.Minute
	}
	met := 0
	for _, target := range scaledTargets {
		scale.TargetMissRate = target
		p, err := s.try(ctx, min(1, s.cfg.Pool.MaxMachines), s.cfg.Pool.MaxMachines, scale)
		if err != nil {
			return err
		}
		if p.Met {
			met++
		}
		if met == 2 {
			break
		}
	}
	return nil
}

// choose takes the cheapest point that meets the goal or, where none does, the one with the fewest misses.
func (s *search) choose() Recommendation {
	cheapest := func(a, b Point) int {
		return cmp.Or(cmp.Compare(a.MemoryHours, b.MemoryHours), cmp.Compare(a.MeanReady, b.MeanReady), cmp.Compare(a.MissRate, b.MissRate))
	}
	slices.SortStableFunc(s.all, func(a, b Point) int {
		return cmp.Or(cmp.Compare(b.TargetMissRate, a.TargetMissRate), cmp.Compare(a.MinReady, b.MinReady))
	})
	fixed := slices.IndexFunc(s.all, func(p Point) bool { return p.TargetMissRate == 0 })
	curve := append(slices.Clone(s.all[fixed:]), s.all[:fixed]...)
	r := Recommendation{Curve: curve}
	var met []Point
	for _, p := range curve {
		if p.Met {
			met = append(met, p)
		}
	}
	if r.Met = len(met) > 0; r.Met {
		r.Policy = slices.MinFunc(met, cheapest)
		r.Reason = fmt.Sprintf("It meets the goal with the least memory over time of the %d policies tried that do (%d tried).", len(met), len(curve))
		return r
	}
	r.Policy = slices.MinFunc(curve, func(a, b Point) int {
		return cmp.Or(cmp.Compare(a.MissRate, b.MissRate), cmp.Compare(a.WaitP95, b.WaitP95), cheapest(a, b))
	})
	r.Reason = fmt.Sprintf("None of the %d policies tried meets the goal: %d machines are not enough, or %d made at once are not. This one has the fewest misses.",
		len(curve), s.cfg.Pool.MaxMachines, s.cfg.Pool.RefillConcurrency)
	return r
}
