package autoscale

import (
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

var start = time.Unix(1_800_000_000, 0)

func config() Config {
	return Config{TargetMissRate: 0.01, IdleReady: 1, IdleAfter: 15 * time.Minute, HalfLife: 2 * time.Minute, HoldDown: 5 * time.Minute}
}

var wide = Range{Min: 0, Max: 1000, Makers: 100}

// feed gives the scaler claims of a rate for a while and returns the time after.
func feed(s *Scaler, r *rand.Rand, now time.Time, perSecond float64, d time.Duration) time.Time {
	end := now.Add(d)
	for {
		next := now.Add(time.Duration(r.ExpFloat64() / perSecond * float64(time.Second)))
		if next.After(end) {
			return end
		}
		now = next
		s.Arrived(now)
	}
}

func TestErlangFormulas(t *testing.T) {
	for _, tt := range []struct {
		f    func(int, float64) float64
		c    int
		load float64
		want float64
	}{
		{ErlangC, 3, 2, 4.0 / 9},
		{ErlangC, 1, 0.8, 0.8},
		{ErlangC, 2, 2, 1},
		{ErlangB, 1, 1, 0.5},
		{ErlangB, 3, 2, 4.0 / 19},
		{ErlangB, 0, 2, 1},
	} {
		if got := tt.f(tt.c, tt.load); math.Abs(got-tt.want) > 1e-12 {
			t.Errorf("%d servers, %g Erlang: %g, want %g", tt.c, tt.load, got, tt.want)
		}
	}
}

// TestStockIsTheSmallestThatSuffices compares with sums of the distributions written out.
func TestStockIsTheSmallestThatSuffices(t *testing.T) {
	for _, tt := range []struct {
		mean, variance, miss float64
		want                 int
	}{
		{0, 0, 0.01, 0},
		{1, 1, 0.01, 5},      // P(N>=5) = 0.00366, P(N>=4) = 0.019
		{2, 2, 0.05, 6},      // P(N>=6) = 0.0166, P(N>=5) = 0.0527
		{0.1, 0.1, 0.1, 1},   // P(N>=1) = 0.0952
		{1, 2, 0.01, 7},      // geometric: P(N>=n) = 2^-n
		{100, 100, 0.5, 101}, // P(N>=100) = 0.513
		{400, 400, 0.0228, 440},
	} {
		if got := stock(tt.mean, tt.variance, tt.miss); got != tt.want {
			t.Errorf("mean %g, variance %g, miss rate %g: %d, want %d", tt.mean, tt.variance, tt.miss, got, tt.want)
		}
	}
}

func TestTargetOfSteadyDemandIsThatOfPoisson(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for _, tt := range []struct {
		rate   float64
		refill time.Duration
	}{{0.5, 200 * time.Millisecond}, {2, 500 * time.Millisecond}, {20, 200 * time.Millisecond}, {5, 2 * time.Second}} {
		s := New(config(), start)
		for range 20 {
			s.Refilled(tt.refill)
		}
		now := feed(s, r, start, tt.rate, 20*time.Minute)
		d := s.Decide(now, wide)
		mean := tt.rate * tt.refill.Seconds()
		want := stock(mean, mean, 0.01)
		if d.Needed < want || d.Needed > want+2+want/3 {
			t.Errorf("%g claims/s, refill %s: needs %d, Poisson asks for %d: %s", tt.rate, tt.refill, d.Needed, want, d.Reason())
		}
		if math.Abs(d.Rate-tt.rate) > tt.rate/2 {
			t.Errorf("estimated %g claims/s, want %g", d.Rate, tt.rate)
		}
	}
}

func TestFewMakersNeedMoreReady(t *testing.T) {
	s := New(config(), start)
	s.Refilled(time.Second)
	now := feed(s, rand.New(rand.NewPCG(1, 2)), start, 1.6, 20*time.Minute)
	many := s.Decide(now, wide)
	few := s.Decide(now, Range{Max: 1000, Makers: 2})
	if few.Needed <= many.Needed {
		t.Errorf("2 makers need %d, 100 need %d", few.Needed, many.Needed)
	}
	one := s.Decide(now, Range{Max: 1000, Makers: 1})
	if !one.Saturated || !strings.Contains(one.Reason(), "cannot be made as fast") {
		t.Errorf("one maker is not enough, and that is not said: %s", one.Reason())
	}
}

func TestRaisedAtOnceAndLoweredAfterHolding(t *testing.T) {
	cfg := config()
	r := Range{Min: 1, Max: 30, Makers: 100}
	s := New(cfg, start)
	s.Refilled(time.Second)
	if d := s.Decide(start, r); d.Target != 1 || !strings.Contains(d.Reason(), "the least") {
		t.Fatalf("at the start: %s", d.Reason())
	}
	now := start
	for range 40 { // a burst of ten seconds
		now = now.Add(250 * time.Millisecond)
		s.Arrived(now)
	}
	now = now.Add(time.Second)
	up := s.Decide(now, r)
	if up.Target < 4 || !strings.HasPrefix(up.Reason(), "Raised from ") {
		t.Fatalf("after the burst: %s", up.Reason())
	}
	if held := s.Decide(now.Add(4*time.Minute), r); held.Target < up.Target || !strings.Contains(held.Reason(), "held for 5m0s") {
		t.Fatalf("within the time to hold: %s", held.Reason())
	}
	if down := s.Decide(now.Add(6*time.Minute), r); down.Target >= up.Target || !strings.HasPrefix(down.Reason(), "Lowered from") {
		t.Fatalf("after it: %s", down.Reason())
	}
}

func TestFloorWhenIdle(t *testing.T) {
	r := Range{Min: 3, Max: 30, Makers: 2}
	s := New(config(), start)
	s.Arrived(start.Add(time.Second))
	s.Decide(start.Add(2*time.Second), r)
	next := s.Next(start.Add(2 * time.Second))
	if want := start.Add(time.Second + 15*time.Minute); !next.Equal(want) {
		t.Fatalf("looks again at %s, want %s", next, want)
	}
	d := s.Decide(next, r)
	if d.Target != 1 || d.Reason() != "Lowered from 3 to 1: no claim for 15m0s." {
		t.Fatalf("idle: %s", d.Reason())
	}
	if again := s.Next(next); !again.IsZero() {
		t.Fatalf("an idle scaler wants to be asked at %s", again)
	}
	s.Arrived(next.Add(time.Hour))
	if d := s.Decide(next.Add(time.Hour+time.Second), r); d.Target != 3 {
		t.Fatalf("after the next claim: %s", d.Reason())
	}
}

func TestLimitedToMax(t *testing.T) {
	s := New(config(), start)
	s.Refilled(time.Second)
	now := feed(s, rand.New(rand.NewPCG(1, 2)), start, 20, time.Minute)
	if d := s.Decide(now, Range{Min: 1, Max: 8, Makers: 100}); d.Target != 8 || !strings.Contains(d.Reason(), "8 are allowed") {
		t.Fatal(d.Reason())
	}
}

func TestValidate(t *testing.T) {
	for name, change := range map[string]func(*Config){
		"TARGET_MISS_RATE": func(c *Config) { c.TargetMissRate = 1 },
		"IDLE_READY":       func(c *Config) { c.IdleReady = -1 },
		"IDLE_AFTER":       func(c *Config) { c.IdleAfter = -1 },
		"HALF_LIFE":        func(c *Config) { c.HalfLife = 0 },
		"HOLD_DOWN":        func(c *Config) { c.HoldDown = -1 },
	} {
		cfg := config()
		change(&cfg)
		if err := cfg.Validate(); err == nil || !strings.Contains(err.Error(), "EPHEMERAL_POOL_"+name) {
			t.Errorf("%s: got %v", name, err)
		}
	}
	nan := config()
	nan.TargetMissRate = math.NaN()
	if nan.Validate() == nil {
		t.Error("NaN was accepted")
	}
	if err := (Config{}).Validate(); err != nil {
		t.Errorf("scaling off: %v", err)
	}
}

// TestDecisionsKeepToTheirRange holds every decision to its range, to the hold-down and to a reason, whatever happens.
func TestDecisionsKeepToTheirRange(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := config()
		cfg.TargetMissRate = rapid.Float64Range(leastMissRate, 0.99).Draw(t, "miss rate")
		cfg.HoldDown = rapid.SampledFrom([]time.Duration{0, time.Minute}).Draw(t, "hold down")
		s := New(cfg, start)
		now := start
		low := rapid.IntRange(0, 5).Draw(t, "min")
		r := Range{Min: low, Max: low + rapid.IntRange(0, 20).Draw(t, "spare"), Makers: rapid.IntRange(1, 4).Draw(t, "makers")}
		var lastAt time.Time
		last := -1
		for range rapid.IntRange(1, 100).Draw(t, "steps") {
			if next := s.Next(now); !next.IsZero() && rapid.Bool().Draw(t, "when it asks") {
				now = next
				s.Decide(now, r)
				if again := s.Next(now); !again.IsZero() && !again.After(now) {
					t.Fatalf("asked when it wanted, wants to be asked again at once: %s at %s", again, now)
				}
			}
			now = now.Add(time.Duration(rapid.Int64Range(0, int64(20*time.Minute)).Draw(t, "passes")) >> rapid.IntRange(0, 30).Draw(t, "shift"))
			switch rapid.IntRange(0, 2).Draw(t, "what") {
			case 0:
				for range rapid.IntRange(1, 50).Draw(t, "claims") {
					s.Arrived(now)
				}
			case 1:
				s.Refilled(time.Duration(rapid.Int64Range(0, int64(time.Minute)).Draw(t, "took")))
			}
			d := s.Decide(now, r)
			least := r.Min
			if d.Idle > 0 {
				least = min(cfg.IdleReady, r.Min)
			}
			if d.Target < least || d.Target > r.Max {
				t.Fatalf("target %d outside of %d to %d", d.Target, least, r.Max)
			}
			if d.Reason() == "" || strings.Contains(d.Reason(), "NaN") || strings.Contains(d.Reason(), "Inf") {
				t.Fatalf("reason %q", d.Reason())
			}
			if d.Idle == 0 && d.Target < last && now.Sub(lastAt) > 0 && cfg.HoldDown > 0 && now.Sub(d.HeldAt) > cfg.HoldDown {
				t.Fatalf("lowered on account of %s ago", now.Sub(d.HeldAt))
			}
			if next := s.Next(now); !next.IsZero() && !next.After(now) {
				t.Fatalf("wants to be asked at once, again: %s at %s", next, now)
			}
			last, lastAt = d.Target, now
		}
	})
}
