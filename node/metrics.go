package node

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/ephemeral-run/ephemeral/run"
)

// Metrics counts what a node does. Nil counts nothing.
type Metrics struct {
	stages *prometheus.HistogramVec
	ended  *prometheus.CounterVec
}

// NewMetrics registers a node's metrics: ephemeral_run_stage_seconds by stage, and ephemeral_runs_ended_total by state.
func NewMetrics(r prometheus.Registerer) (*Metrics, error) {
	m := &Metrics{
		stages: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "ephemeral_run_stage_seconds", Help: "How long each stage of a run took.",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300, 3600},
		}, []string{"stage"}),
		ended: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "ephemeral_runs_ended_total", Help: "Runs that this node brought to an end.",
		}, []string{"state"}),
	}
	for _, c := range []prometheus.Collector{m.stages, m.ended} {
		if err := r.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

func (m *Metrics) observe(o run.Outcome) {
	if m == nil {
		return
	}
	for _, s := range o.Stages {
		m.stages.WithLabelValues(s.Name).Observe(s.Ms / 1000)
	}
	m.ended.WithLabelValues(string(o.State)).Inc()
}
