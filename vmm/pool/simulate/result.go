package simulate

import (
	"math"
	"slices"
	"time"

	"github.com/ephemeral-run/ephemeral/vmm/pool"
)

// Result is what a simulation measured, from the first moment of the workload (the pool filled) until its last claim was
// answered.
type Result struct {
	Arrivals        int     `json:"arrivals"`
	Served          int     `json:"served"`
	DurationSeconds float64 `json:"duration_seconds"`

	HitRate         float64 `json:"hit_rate"`         // share of arrivals that found a machine ready
	MissRate        float64 `json:"miss_rate"`        // the rest
	LossProbability float64 `json:"loss_probability"` // share that got none: given up, or refused
	WaitProbability float64 `json:"wait_probability"` // share of those served that waited at all

	WaitMean float64 `json:"wait_mean_seconds"`
	// WaitMeanError is half the width of the 95 percent confidence interval of the mean, by the method of batch means.
	WaitMeanError float64 `json:"wait_mean_error_seconds"`
	WaitP50       float64 `json:"wait_p50_seconds"`
	WaitP95       float64 `json:"wait_p95_seconds"`
	WaitP99       float64 `json:"wait_p99_seconds"`
	WaitMax       float64 `json:"wait_max_seconds"`

	MachineHours  float64 `json:"machine_hours"` // machines alive, in whatever state, times time
	ReadyHours    float64 `json:"ready_hours"`   // of these, ready and unused
	MemoryHours   float64 `json:"memory_gib_hours"`
	MeanReady     float64 `json:"mean_ready"`
	MeanTarget    float64 `json:"mean_target"`
	MeanLeased    float64 `json:"mean_leased"`
	PeakMachines  int     `json:"peak_machines"`
	PeakMemoryMiB int     `json:"peak_memory_mib"`

	Restores        int64 `json:"restores"`
	RestoreFailures int64 `json:"restore_failures"`
	Expired         int64 `json:"expired"`
	Surplus         int64 `json:"surplus"` // destroyed because there were too many ready

	// Reason is why the target is what it is at the end.
	Reason string   `json:"reason"`
	Series []Sample `json:"-"`
	waits  []int64
}

// Sample is the pool at one moment.
type Sample struct {
	At              time.Duration // since the start of the workload
	Target          int
	Counts          pool.Counts
	ArrivalsASecond float64 // since the sample before
}

// mostSamples bounds Result.Series; half as many are kept at the least.
const mostSamples = 600

const hour = float64(time.Hour)

// measure collects while a simulation runs.
type measure struct {
	before  pool.Totals
	waits   []int64 // nanoseconds, in order of service
	missed  int
	started time.Time

	alive, ready, leased, target, memory float64 // integrals over nanoseconds, whole numbers and so exact
	peak, peakMemory                     int

	series   []Sample
	spacing  time.Duration
	sampleAt time.Time
	arrivals int // at the last sample
}

func (m *measure) begin(s *simulation) {
	m.before = s.policy.Stats(s.now).Totals
	m.waits = make([]int64, 0, min(s.cfg.Workload.Count, 1<<20))
	m.spacing = time.Second / 4
	m.started, m.sampleAt = s.now, s.now
}

func (m *measure) lost()                     { m.missed++ }
func (m *measure) served(wait time.Duration) { m.waits = append(m.waits, int64(wait)) }

// pass accounts for the time until the next event, in which nothing changes.
func (m *measure) pass(s *simulation, until time.Time) {
	if m.started.IsZero() {
		return
	}
	c := s.policy.Counts()
	busy := c.Leased + c.Making + c.Destroying
	memory := busy*s.cfg.MemoryMiB + c.Ready*s.cfg.ReadyMemoryMiB
	span := float64(until.Sub(s.now))
	m.alive += float64(busy+c.Ready) * span
	m.ready += float64(c.Ready) * span
	m.leased += float64(c.Leased) * span
	m.memory += float64(memory) * span
	m.target += float64(s.policy.Target()) * span
	m.peak, m.peakMemory = max(m.peak, busy+c.Ready), max(m.peakMemory, memory)
	for ; m.sampleAt.Before(until); m.sampleAt = m.sampleAt.Add(m.spacing) {
		m.sample(s, c)
	}
}

func (m *measure) sample(s *simulation, c pool.Counts) {
	if len(m.series) == mostSamples { // keep every other one, with the arrivals of both
		for i := range mostSamples / 2 {
			m.series[i] = m.series[2*i+1]
			m.series[i].ArrivalsASecond = (m.series[2*i].ArrivalsASecond + m.series[2*i+1].ArrivalsASecond) / 2
		}
		m.series = m.series[:mostSamples/2]
		m.spacing *= 2
	}
	m.series = append(m.series, Sample{
		At: m.sampleAt.Sub(m.started), Target: s.policy.Target(), Counts: c,
		ArrivalsASecond: float64(s.arrived-m.arrivals) / m.spacing.Seconds(),
	})
	m.arrivals = s.arrived
}

func (m *measure) result(s *simulation) Result {
	stats := s.policy.Stats(s.now)
	span := s.now.Sub(m.started)
	r := Result{
		Arrivals: s.arrived, Served: len(m.waits), DurationSeconds: span.Seconds(),
		MachineHours: m.alive / hour, ReadyHours: m.ready / hour, MemoryHours: m.memory / 1024 / hour,
		PeakMachines: m.peak, PeakMemoryMiB: m.peakMemory,
		Restores: stats.Made - m.before.Made, RestoreFailures: stats.MakeFailures - m.before.MakeFailures,
		Expired: stats.Expired - m.before.Expired, Surplus: stats.Surplus - m.before.Surplus,
		Reason: stats.Reason, Series: m.series, waits: m.waits,
	}
	if total := float64(span); total > 0 {
		r.MeanReady, r.MeanTarget, r.MeanLeased = m.ready/total, m.target/total, m.leased/total
	}
	if s.arrived > 0 {
		r.HitRate = float64(stats.Hits-m.before.Hits) / float64(s.arrived)
		r.MissRate = 1 - r.HitRate
		r.LossProbability = float64(m.missed) / float64(s.arrived)
	}
	r.measureWaits()
	return r
}

func (r *Result) measureWaits() {
	if len(r.waits) == 0 {
		return
	}
	sum, waited := 0.0, 0
	for _, w := range r.waits {
		sum += float64(w)
		if w > 0 {
			waited++
		}
	}
	n := float64(len(r.waits))
	r.WaitMean = sum / n / 1e9
	r.WaitProbability = float64(waited) / n
	r.WaitMeanError = batchError(r.waits)
	slices.Sort(r.waits)
	r.WaitP50, r.WaitP95, r.WaitP99, r.WaitMax = r.Wait(0.50), r.Wait(0.95), r.Wait(0.99), r.Wait(1)
}

// Wait is the wait in seconds that this share of the claims did not exceed (nearest rank).
func (r *Result) Wait(share float64) float64 {
	if len(r.waits) == 0 {
		return 0
	}
	i := int(math.Ceil(share*float64(len(r.waits)))) - 1
	return float64(r.waits[min(max(i, 0), len(r.waits)-1)]) / 1e9
}

const (
	batches = 30
	// studentT is the 97.5 percent quantile of Student's t with batches-1 degrees of freedom.
	studentT = 2.045
)

// batchError is half the 95 percent confidence interval of a mean of values that depend on those before them
// (A. Law, W. Kelton, "Simulation Modeling and Analysis", batch means). It is 0 where there are too few.
func batchError(waits []int64) float64 {
	size := len(waits) / batches
	if size == 0 {
		return 0
	}
	var sum, squares float64
	for b := range batches {
		mean := 0.0
		for _, w := range waits[b*size : (b+1)*size] {
			mean += float64(w)
		}
		mean /= float64(size) * 1e9
		sum += mean
		squares += mean * mean
	}
	mean := sum / batches
	variance := max(0, squares/batches-mean*mean) * batches / (batches - 1)
	return studentT * math.Sqrt(variance/batches)
}
