// Package poolmetrics shows a pool of machines, and how they are made and removed, as Prometheus metrics.
package poolmetrics

import (
	"errors"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/ephemeral-run/ephemeral/vmm/pool"
	"github.com/ephemeral-run/ephemeral/vmm/provision"
)

// Metrics is told what happens in one pool and in its provisioner: it is a pool.Observer and a provision.Observer.
type Metrics struct {
	waits    *prometheus.HistogramVec
	ages     prometheus.Histogram
	steps    *prometheus.HistogramVec
	failures *prometheus.CounterVec
	destroys *prometheus.HistogramVec
}

var (
	_ pool.Observer      = (*Metrics)(nil)
	_ provision.Observer = (*Metrics)(nil)
)

// New registers the metrics of a pool; each has the label pool. Watch adds what is read of the pool when it is asked for.
func New(r prometheus.Registerer, name string) (*Metrics, error) {
	r = labelled(r, name)
	m := &Metrics{
		waits: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "ephemeral_pool_claim_wait_seconds", Help: "How long claims waited for a machine; those with ready=\"true\" found one.",
			Buckets: []float64{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60},
		}, []string{"ready"}),
		ages: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "ephemeral_pool_machine_age_seconds", Help: "How old machines were when they were claimed.",
			Buckets: []float64{.1, 1, 5, 15, 60, 300, 900, 1800, 3600, 7200, 21600},
		}),
		steps: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "ephemeral_machine_step_seconds", Help: "How long each step of making a machine took.",
			Buckets: []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30},
		}, []string{"step"}),
		failures: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "ephemeral_machine_failures_total", Help: "Machines that could not be made, by reason: a step, template, timeout, memory, cancelled.",
		}, []string{"reason"}),
		destroys: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "ephemeral_machine_destroy_seconds", Help: "How long it took to remove machines with all that belonged to them.",
			Buckets: []float64{.0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60},
		}, []string{"clean"}),
	}
	for _, c := range []prometheus.Collector{m.waits, m.ages, m.steps, m.failures, m.destroys} {
		if err := r.Register(c); err != nil {
			return nil, fmt.Errorf("register metrics of pool %s: %w", name, err)
		}
	}
	for _, found := range []string{"true", "false"} { // so that a rate has something to start from
		m.waits.WithLabelValues(found)
	}
	return m, nil
}

func labelled(r prometheus.Registerer, name string) prometheus.Registerer {
	return prometheus.WrapRegistererWith(prometheus.Labels{"pool": name}, r)
}

// Claimed implements pool.Observer.
func (m *Metrics) Claimed(wait, age time.Duration, ready bool) {
	m.waits.WithLabelValues(fmt.Sprint(ready)).Observe(wait.Seconds())
	m.ages.Observe(age.Seconds())
}

// Made implements pool.Observer. What failed before it came to a creation is counted here, the rest by CreateFailed.
func (m *Metrics) Made(_ time.Duration, err error) {
	var counted *provision.CreateError
	if err != nil && !errors.As(err, &counted) {
		m.failures.WithLabelValues(provision.FailureReason(err)).Inc()
	}
}

// Created implements provision.Observer.
func (m *Metrics) Created(steps []provision.Step) {
	for _, s := range steps {
		m.steps.WithLabelValues(s.Name).Observe(s.Duration.Seconds())
	}
}

// Rested implements provision.Observer.
func (m *Metrics) Rested(steps []provision.Step) { m.Created(steps) }

// CreateFailed implements provision.Observer.
func (m *Metrics) CreateFailed(_ string, err error) {
	m.failures.WithLabelValues(provision.FailureReason(err)).Inc()
}

// Closed implements provision.Observer.
func (m *Metrics) Closed(took time.Duration, err error) {
	m.destroys.WithLabelValues(fmt.Sprint(err == nil)).Observe(took.Seconds())
}

// Pool is what is asked of a pool.
type Pool interface {
	Stats() pool.Stats
	Config() pool.Config
}

// Watch registers what is read of the pool whenever somebody asks.
func Watch(r prometheus.Registerer, name string, p Pool) error {
	if err := labelled(r, name).Register(&collector{p}); err != nil {
		return fmt.Errorf("register metrics of pool %s: %w", name, err)
	}
	return nil
}

type collector struct{ pool Pool }

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("ephemeral_pool_"+name, help, labels, nil)
}

var (
	machines   = desc("machines", "Machines by what they do: ready, leased, refilling, destroying.", "state")
	target     = desc("target_machines", "Machines that should be ready.")
	minReady   = desc("min_ready_machines", "The least that is kept ready.")
	maxReady   = desc("max_ready_machines", "The most that is kept ready.")
	most       = desc("max_machines", "Machines alive at once, at most.")
	waiting    = desc("waiting_claims", "Claims without a machine.")
	longest    = desc("longest_wait_seconds", "How long the first of the waiting claims has waited.")
	oldest     = desc("oldest_ready_seconds", "How long the oldest ready machine has waited in the pool.")
	circuit    = desc("circuit_state", "1 for the state that the circuit is in: closed, open, half-open.", "state")
	refused    = desc("admission_refused", "1 while making machines is put off for want of memory.")
	generation = desc("template_swaps_total", "How often machines were made from another template from then on.")
	claims     = desc("claims_total", "Claims that got a machine.")
	misses     = desc("misses_total", "Claims that got a machine and found none ready.")
	cancelled  = desc("claims_cancelled_total", "Claims that gave up waiting.")
	turnedAway = desc("claims_refused_total", "Claims refused because making machines fails, or the pool was closed.")
	made       = desc("made_total", "Machines made.")
	makeFails  = desc("make_failures_total", "Machines that could not be made.")
	ended      = desc("retired_total", "Machines that were never claimed, by why they were destroyed: died, expired, surplus.", "reason")
)

func (c *collector) Describe(to chan<- *prometheus.Desc) { prometheus.DescribeByCollect(c, to) }

func (c *collector) Collect(to chan<- prometheus.Metric) {
	s, cfg := c.pool.Stats(), c.pool.Config()
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		to <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	counter := func(d *prometheus.Desc, v int64, labels ...string) {
		to <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	for state, n := range map[string]int{"ready": s.Ready + s.Warming, "leased": s.Leased, "refilling": s.Making, "destroying": s.Destroying} {
		gauge(machines, float64(n), state)
	}
	gauge(target, float64(s.Target))
	gauge(minReady, float64(cfg.MinReady))
	gauge(maxReady, float64(cfg.MaxReady))
	gauge(most, float64(cfg.MaxMachines))
	gauge(waiting, float64(s.Waiting))
	gauge(longest, s.LongestWait.Seconds())
	gauge(oldest, s.OldestReady.Seconds())
	for _, state := range []pool.CircuitState{pool.CircuitClosed, pool.CircuitOpen, pool.CircuitHalfOpen} {
		gauge(circuit, one(s.Circuit == state), string(state))
	}
	gauge(refused, one(s.Admission != ""))
	counter(generation, int64(s.Generation))
	counter(claims, s.Claims)
	counter(misses, s.Claims-s.Hits)
	counter(cancelled, s.Cancelled)
	counter(turnedAway, s.Refused)
	counter(made, s.Made)
	counter(makeFails, s.MakeFailures)
	counter(ended, s.Died, "died")
	counter(ended, s.Expired, "expired")
	counter(ended, s.Surplus, "surplus")
}

func one(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
