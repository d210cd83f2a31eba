// Package autoscale decides how many machines a pool keeps ready. It is pure: it has no goroutine, lock or clock, and the
// same calls give the same decisions, so that a simulator can drive the very code that runs.
//
// A pool that orders one machine for each one claimed is an (S-1, S) base-stock system: a claim finds none ready when S or
// more makes are outstanding. How many are outstanding is the number of claims during one refill time, by Palm's theorem
// (C. Palm 1938; G. Feeney, C. Sherbrooke, "The (s-1, s) inventory policy under compound Poisson demand", Management
// Science 12(5), 1966). So the target is the smallest S with P(outstanding >= S) <= target miss rate, where the number
// outstanding
//
//   - has the mean and variance of claims per refill time, estimated by exponentially weighted moving averages
//     (T. Finch, "Incremental calculation of weighted mean and variance", 2009), a slow one and a fast one; the fast one
//     counts when it is above what chance explains (the control chart of S. Roberts, "Control chart tests based on geometric
//     moving averages", Technometrics 1(3), 1959);
//   - is increased, where makers are few, by the makes that queue for one (the Allen-Cunneen approximation of G/G/m);
//   - follows the negative binomial distribution with these two moments, or Poisson where the variance is not above the
//     mean (C. Sherbrooke, "VARI-METRIC", Operations Research 34(2), 1986).
//
// The target is raised at once and lowered when fewer have sufficed for a while, as the stabilisation window of
// Kubernetes' horizontal pod autoscaler does it.
package autoscale

import (
	"errors"
	"fmt"
	"math"
	"time"
)

// Config is what an operator sets. The zero value leaves scaling off.
type Config struct {
	TargetMissRate float64       `env:"EPHEMERAL_POOL_TARGET_MISS_RATE" envDefault:"0" help:"share of claims that may find no machine ready (0.01: one in a hundred); above 0 the pool scales itself between its min and max ready"`
	IdleReady      int           `env:"EPHEMERAL_POOL_IDLE_READY" envDefault:"1" help:"where the pool scales itself: machines kept ready when there are no claims"`
	IdleAfter      time.Duration `env:"EPHEMERAL_POOL_IDLE_AFTER" envDefault:"15m" help:"where the pool scales itself: how long without a claim before that; 0: never"`
	HalfLife       time.Duration `env:"EPHEMERAL_POOL_HALF_LIFE" envDefault:"2m" help:"where the pool scales itself: age at which a claim counts half in the estimate of demand"`
	HoldDown       time.Duration `env:"EPHEMERAL_POOL_HOLD_DOWN" envDefault:"5m" help:"where the pool scales itself: how long fewer machines must have sufficed before some are given up"`
}

// Enabled tells whether the pool scales itself.
func (c Config) Enabled() bool { return c.TargetMissRate != 0 }

// Validate says what is wrong with the configuration, all of it at once.
func (c Config) Validate() error {
	if !c.Enabled() {
		return nil
	}
	var errs []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	check(c.TargetMissRate >= leastMissRate && c.TargetMissRate < 1, "EPHEMERAL_POOL_TARGET_MISS_RATE is %g, must be 0 or from %g to below 1", c.TargetMissRate, leastMissRate)
	check(c.IdleReady >= 0, "EPHEMERAL_POOL_IDLE_READY is %d, must not be negative", c.IdleReady)
	check(c.IdleAfter >= 0, "EPHEMERAL_POOL_IDLE_AFTER is %s, must not be negative", c.IdleAfter)
	check(c.HalfLife >= time.Second, "EPHEMERAL_POOL_HALF_LIFE is %s, must be at least 1s", c.HalfLife)
	check(c.HoldDown >= 0, "EPHEMERAL_POOL_HOLD_DOWN is %s, must not be negative", c.HoldDown)
	return errors.Join(errs...)
}

const (
	// leastMissRate is the smallest target: rarer misses cannot be estimated from the demand of a few half-lives.
	leastMissRate = 1e-6
	// fastShare is the half-life of the fast estimate as a share of the slow one's.
	fastShare = 8
	// prior is the time without claims that an estimate starts from, so that the first claims do not count for all.
	prior = 30 * time.Second
	// firstRefill is what making a machine is taken to last until one was made.
	firstRefill = time.Second
	// refillWeight is the weight of one make in the estimate of the refill time, once there were enough for it.
	refillWeight = 0.02
	// significant is how many standard errors the fast estimate must be above the slow one.
	significant = 3
	// leastWindow and mostWindow bound the window in which claims are counted, which is otherwise one refill time.
	leastWindow, mostWindow = 50 * time.Millisecond, time.Minute
	// mostLoad is the load of the makers up to which their queue is computed; it has no end at 1.
	mostLoad = 0.9
	// reviews is how often within HoldDown the target is looked at when nothing happens.
	reviews = 20
)

// Range is what the target keeps to.
type Range struct {
	Min, Max int
	Makers   int // machines made at once
}

// Scaler estimates demand and sets the target. Its methods are called one at a time, with times that do not go back.
type Scaler struct {
	cfg         Config
	fast, slow  average
	window      time.Duration // one refill time: claims are counted in it
	windowStart time.Time
	count       int // claims since windowStart
	lastArrival time.Time
	refills     int     // makes that ended
	refill      float64 // mean seconds a make takes
	refill2     float64 // mean of the squares
	recent      []need  // of the last HoldDown: times ascending, needs descending
	reviewed    time.Time
	last        Decision
}

// need is a number of machines that was needed at a time.
type need struct {
	at time.Time
	n  int
}

// New is a scaler that has seen nothing yet.
func New(cfg Config, now time.Time) *Scaler {
	s := &Scaler{window: firstRefill, windowStart: now, lastArrival: now}
	s.Configure(cfg)
	return s
}

// Configure changes the configuration and keeps what was learned.
func (s *Scaler) Configure(cfg Config) {
	s.cfg = cfg
	s.fast.configure(cfg.HalfLife / fastShare)
	s.slow.configure(cfg.HalfLife)
	s.reviewed = time.Time{}
}

// Arrived notes a claim.
func (s *Scaler) Arrived(now time.Time) {
	s.roll(now)
	s.count++
	s.lastArrival = now
}

// Refilled notes that making a machine took so long.
func (s *Scaler) Refilled(took time.Duration) {
	s.refills++
	x, weight := max(0, took.Seconds()), max(refillWeight, 1/float64(s.refills))
	s.refill += weight * (x - s.refill)
	s.refill2 += weight * (x*x - s.refill2)
}

// roll closes the windows that have ended.
func (s *Scaler) roll(now time.Time) {
	n := int64(now.Sub(s.windowStart) / s.window)
	if n <= 0 {
		return
	}
	for _, a := range []*average{&s.fast, &s.slow} {
		a.add(s.count, s.window)
		a.addEmpty(n-1, s.window)
	}
	s.count = 0
	s.windowStart = s.windowStart.Add(time.Duration(n) * s.window)
	s.reviewed = time.Time{}
	if s.refills == 0 {
		return
	}
	window := min(max(time.Duration(s.refill*float64(time.Second)), leastWindow), mostWindow)
	if ratio := float64(window) / float64(s.window); ratio > 1.1 || ratio < 0.9 {
		s.fast.rescale(ratio)
		s.slow.rescale(ratio)
		s.window = window
	}
}

// Decide says how many machines are to be ready from now on, and why.
func (s *Scaler) Decide(now time.Time, r Range) Decision {
	s.roll(now)
	idle := now.Sub(s.lastArrival)
	isIdle := s.cfg.IdleAfter > 0 && idle >= s.cfg.IdleAfter
	if s.last.Range == r && !s.reviewed.IsZero() && now.Sub(s.reviewed) < s.review() && isIdle == (s.last.Idle > 0) {
		return s.last
	}
	s.reviewed = now
	d := s.demand(r)
	d.At, d.Range, d.MissRate, d.HoldDown, d.Previous = now, r, s.cfg.TargetMissRate, s.cfg.HoldDown, s.last.Target
	if s.last.At.IsZero() {
		d.Previous = r.Min
	}
	if isIdle {
		d.Idle = idle
		d.Target = min(s.cfg.IdleReady, r.Min)
		s.recent = s.recent[:0]
		s.last = d
		return d
	}
	s.remember(now, d.Needed)
	highest := s.recent[0]
	d.Held, d.HeldAt = highest.n, highest.at
	d.Target = max(min(max(highest.n, r.Min), r.Max), 0)
	s.last = d
	return d
}

// Next is when Decide may say something new without a claim, after now where Decide was called with now; zero: never.
func (s *Scaler) Next(now time.Time) time.Time {
	switch {
	case s.count > 0:
		return s.windowStart.Add(s.window)
	case s.last.Idle > 0, s.last.At.IsZero():
		return time.Time{}
	case s.last.Target <= s.last.Range.Min: // the estimate can only fall: nothing to do until the pool is idle
		if s.cfg.IdleAfter == 0 || s.cfg.IdleReady >= s.last.Range.Min {
			return time.Time{}
		}
		return s.lastArrival.Add(s.cfg.IdleAfter)
	}
	return now.Add(s.review())
}

func (s *Scaler) review() time.Duration { return max(s.cfg.HoldDown/reviews, time.Second) }

// remember keeps what was needed within HoldDown, without what a later and higher need makes pointless.
func (s *Scaler) remember(now time.Time, n int) {
	for len(s.recent) > 0 && s.recent[len(s.recent)-1].n <= n {
		s.recent = s.recent[:len(s.recent)-1]
	}
	s.recent = append(s.recent, need{now, n})
	old := 0
	for old < len(s.recent)-1 && now.Sub(s.recent[old].at) >= s.cfg.HoldDown {
		old++
	}
	s.recent = s.recent[:copy(s.recent, s.recent[old:])]
}

// demand says how many machines the estimates ask for.
func (s *Scaler) demand(r Range) Decision {
	slow, variance := s.slow.moments()
	fast, _ := s.fast.moments()
	// A window without variance says nothing about chance; Poisson claims have that of their mean.
	weight := 1 - s.fast.keep(s.window)
	if fast > slow+significant*math.Sqrt(max(variance, slow)*weight/(2-weight)) {
		return s.demandOf(&s.fast, r)
	}
	return s.demandOf(&s.slow, r)
}

func (s *Scaler) demandOf(a *average, r Range) Decision {
	mean, variance := a.moments()
	d := Decision{Rate: mean / s.window.Seconds(), Refill: time.Duration(s.refill * float64(time.Second)), Mean: mean, Variance: variance}
	if s.refills == 0 {
		d.Refill = firstRefill
	}
	queued, queuedVariance := s.queue(&d, r.Makers)
	d.Needed = stock(mean+queued, variance+queuedVariance, s.cfg.TargetMissRate)
	return d
}

// queue is the mean and variance of the number of makes that wait for a maker.
func (s *Scaler) queue(d *Decision, makers int) (mean, variance float64) {
	if makers <= 0 || d.Mean <= 0 || float64(makers) > d.Mean+10*math.Sqrt(d.Mean)+10 {
		return 0, 0 // none waits, to many digits
	}
	load := d.Mean / float64(makers)
	if load > mostLoad {
		d.Saturated = true
		load = mostLoad
	}
	spread := 0.0 // squared coefficient of variation of a make
	if s.refill > 0 {
		spread = max(0, s.refill2/(s.refill*s.refill)-1)
	}
	scale := (max(1, d.Variance/d.Mean) + spread) / 2
	wait := ErlangC(makers, load*float64(makers))
	mean = wait * load / (1 - load)
	variance = wait*load*(1+load)/((1-load)*(1-load)) - mean*mean
	return mean * scale, variance * scale * scale
}

// average is an exponentially weighted mean and mean square of claims per window.
type average struct {
	halfLife     time.Duration
	mean, square float64
	weight       float64 // of all windows seen; below 1 at first
}

func (a *average) configure(halfLife time.Duration) {
	a.halfLife = halfLife
	if a.weight == 0 {
		a.weight = 1 - a.keep(prior)
	}
}

// keep is what is left of the weight of a window after so long.
func (a *average) keep(d time.Duration) float64 {
	return math.Exp2(-d.Seconds() / a.halfLife.Seconds())
}

func (a *average) add(count int, window time.Duration) {
	keep, x := a.keep(window), float64(count)
	a.mean = keep*a.mean + (1-keep)*x
	a.square = keep*a.square + (1-keep)*x*x
	a.weight = keep*a.weight + (1 - keep)
}

func (a *average) addEmpty(n int64, window time.Duration) {
	if n <= 0 {
		return
	}
	keep := math.Exp2(-float64(n) * window.Seconds() / a.halfLife.Seconds())
	a.mean *= keep
	a.square *= keep
	a.weight = keep*a.weight + (1 - keep)
}

// moments are the mean and variance of claims per window.
func (a *average) moments() (mean, variance float64) {
	mean = a.mean / a.weight
	return mean, max(0, a.square/a.weight-mean*mean)
}

// rescale changes the length of the window by a ratio, as if claims in different parts of a window had nothing to do with
// each other.
func (a *average) rescale(ratio float64) {
	mean, variance := a.moments()
	mean, variance = mean*ratio, variance*ratio
	a.mean, a.square = mean*a.weight, (variance+mean*mean)*a.weight
}
