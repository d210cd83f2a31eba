package gateway

import (
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// metrics are the gateway's own. Labels have few values: no ids, no paths, no text of clients.
type metrics struct {
	requests  *prometheus.CounterVec
	durations *prometheus.HistogramVec
	refusals  *prometheus.CounterVec
	runs      *prometheus.CounterVec
	streams   *prometheus.CounterVec

	answers sync.Map // of answered by answerLabels: looking the labels up costs more than counting
}

// answerLabels are those of an answer.
type answerLabels struct {
	method, route string
	status        int
	streaming     bool
}

// answered counts and times one kind of answer.
type answered struct {
	requests  prometheus.Counter
	durations prometheus.Observer // nil: they are not timed
}

func newMetrics(reg prometheus.Registerer, h *hub) *metrics {
	f := promauto.With(reg)
	f.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "ephemeral_gateway_readers", Help: "Clients that follow or wait for a run now.",
	}, func() float64 { return float64(h.size()) })
	return &metrics{
		requests: f.NewCounterVec(prometheus.CounterOpts{
			Name: "ephemeral_gateway_requests_total", Help: "Requests answered.",
		}, []string{"method", "route", "status"}),
		durations: f.NewHistogramVec(prometheus.HistogramOpts{
			Name: "ephemeral_gateway_request_duration_seconds", Help: "Time from a request's arrival to its answer; streams excluded.",
			Buckets: []float64{.0005, .001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 30, 60},
		}, []string{"method", "route"}),
		refusals: f.NewCounterVec(prometheus.CounterOpts{
			Name: "ephemeral_gateway_refusals_total", Help: "Requests refused, by problem code.",
		}, []string{"code"}),
		runs: f.NewCounterVec(prometheus.CounterOpts{
			Name: "ephemeral_gateway_admissions_total", Help: "Runs admitted, and posts answered with a run that existed.",
		}, []string{"replayed"}),
		streams: f.NewCounterVec(prometheus.CounterOpts{
			Name: "ephemeral_gateway_streams_ended_total", Help: "Event streams ended, by reason.",
		}, []string{"end"}),
	}
}

func (m *metrics) request(k *call, status int, d time.Duration) {
	route, method := k.route, k.method
	if route == "" {
		route, method = "none", "any" // both are the client's choice
	}
	labels := answerLabels{method, route, status, k.streaming}
	known, ok := m.answers.Load(labels)
	if !ok {
		of := &answered{requests: m.requests.WithLabelValues(method, route, strconv.Itoa(status))}
		if !k.streaming {
			of.durations = m.durations.WithLabelValues(method, route)
		}
		known, _ = m.answers.LoadOrStore(labels, of)
	}
	of := known.(*answered)
	of.requests.Inc()
	if of.durations != nil {
		of.durations.Observe(d.Seconds())
	}
}

func (m *metrics) refused(code Code)      { m.refusals.WithLabelValues(string(code)).Inc() }
func (m *metrics) admitted(replayed bool) { m.runs.WithLabelValues(strconv.FormatBool(replayed)).Inc() }
func (m *metrics) streamEnded(end string) { m.streams.WithLabelValues(end).Inc() }
