package gateway

import (
	"context"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/ephemeral-run/ephemeral/run"
)

// totalsTime bounds what a scrape asks of the store.
const totalsTime = 2 * time.Second

// totals shows the cell's numbers, asked of the store at each scrape. While the store does not answer they are absent.
type totals struct {
	ask  func(context.Context) (run.Totals, error)
	ping func(context.Context) error
	log  *slog.Logger
}

var (
	descWaiting = prometheus.NewDesc("ephemeral_queue_depth", "Runs that wait, of the whole cell.", nil, nil)
	descOldest  = prometheus.NewDesc("ephemeral_queue_age_seconds", "How long the first waiting run has waited.", nil, nil)
	descLeased  = prometheus.NewDesc("ephemeral_runs_leased", "Runs that nodes have, of the whole cell.", nil, nil)
	descHeld    = prometheus.NewDesc("ephemeral_held_micros", "Micro-dollars reserved by open holds, of the whole cell.", nil, nil)
	descCharged = prometheus.NewDesc("ephemeral_charged_micros_total", "Micro-dollars charged, of the whole cell.", nil, nil)
	descRedis   = prometheus.NewDesc("ephemeral_redis_round_trip_seconds", "How long Redis took to answer at this scrape.", nil, nil)
)

// Describe implements prometheus.Collector.
func (t totals) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descWaiting, descOldest, descLeased, descHeld, descCharged, descRedis} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (t totals) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), totalsTime)
	defer cancel()
	began := time.Now()
	err := t.ping(ctx)
	took := time.Since(began)
	var n run.Totals
	if err == nil {
		n, err = t.ask(ctx)
	}
	if err != nil {
		t.log.Debug("the cell's numbers cannot be shown", "error", err)
		return
	}
	gauge := func(d *prometheus.Desc, v float64) { ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v) }
	gauge(descRedis, took.Seconds())
	gauge(descWaiting, float64(n.Waiting))
	gauge(descOldest, n.Oldest.Seconds())
	gauge(descLeased, float64(n.Leased))
	gauge(descHeld, float64(n.Held))
	ch <- prometheus.MustNewConstMetric(descCharged, prometheus.CounterValue, float64(n.Charged))
}
