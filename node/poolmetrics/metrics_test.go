package poolmetrics

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/VictoriaMetrics/metricsql"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/pool"
	"github.com/ephemeral-run/ephemeral/vmm/provision"
)

type machine struct{ done chan struct{} }

func (m *machine) Close() error          { return nil }
func (m *machine) Done() <-chan struct{} { return m.done }

// shown is a registry of a pool in which everything has happened that can be counted.
func shown(t *testing.T) *prometheus.Registry {
	t.Helper()
	r := prometheus.NewRegistry()
	m, err := New(r, "base-1x512")
	if err != nil {
		t.Fatal(err)
	}
	fail := true
	p, err := pool.New(pool.Config{MinReady: 1, MaxReady: 2, MaxMachines: 4, RefillConcurrency: 1, MakeTimeout: time.Minute},
		func(context.Context) (*machine, error) {
			if fail {
				fail = false
				return nil, fmt.Errorf("restore: %w", vmm.ErrTemplate)
			}
			return &machine{make(chan struct{})}, nil
		}, pool.WithObserver(m), pool.WithLogger(slog.New(slog.NewTextHandler(io.Discard, nil))))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	if err := Watch(r, "base-1x512", p); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if _, err := p.Claim(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	m.Created([]provision.Step{{Name: provision.StepLoad, Duration: time.Second}, {Name: provision.StepProbe, Duration: time.Second}})
	m.CreateFailed(provision.StepProbe, &provision.CreateError{ID: "x", Step: provision.StepProbe, Err: errors.New("no answer")})
	m.CreateFailed(provision.StepLoad, &provision.CreateError{ID: "x", Step: provision.StepLoad, Err: context.DeadlineExceeded})
	m.Closed(time.Second, nil)
	m.Closed(time.Second, errors.New("busy"))
	return r
}

func TestMetricsTellWhatHappened(t *testing.T) {
	r := shown(t)
	if problems, err := testutil.GatherAndLint(r); err != nil || len(problems) > 0 {
		t.Errorf("against the conventions: %v, %v", problems, err)
	}
	got := map[string]float64{}
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.Metric {
			name := f.GetName()
			for _, l := range m.Label {
				if l.GetName() == "pool" {
					if l.GetValue() != "base-1x512" {
						t.Errorf("%s of pool %s", name, l.GetValue())
					}
					continue
				}
				name += " " + l.GetValue()
			}
			switch {
			case m.Counter != nil:
				got[name] = m.Counter.GetValue()
			case m.Gauge != nil:
				got[name] = m.Gauge.GetValue()
			case m.Histogram != nil:
				got[name] = float64(m.Histogram.GetSampleCount())
			}
		}
	}
	for name, want := range map[string]float64{
		"ephemeral_pool_claims_total": 2, "ephemeral_pool_machines leased": 2, "ephemeral_pool_target_machines": 1,
		"ephemeral_pool_max_machines": 4, "ephemeral_pool_circuit_state closed": 1, "ephemeral_pool_circuit_state open": 0,
		"ephemeral_machine_failures_total template": 1, "ephemeral_machine_failures_total probe": 1, "ephemeral_machine_failures_total timeout": 1,
		"ephemeral_machine_step_seconds load": 1, "ephemeral_machine_destroy_seconds true": 1, "ephemeral_machine_destroy_seconds false": 1,
		"ephemeral_pool_machine_age_seconds": 2, "ephemeral_pool_make_failures_total": 1,
	} {
		if v, ok := got[name]; !ok || v != want {
			t.Errorf("%s is %v (there: %t), want %v", name, v, ok, want)
		}
	}
	if n := got["ephemeral_pool_claim_wait_seconds true"] + got["ephemeral_pool_claim_wait_seconds false"]; n != 2 {
		t.Errorf("%v waits for two claims", n)
	}
}

// series are the names and labels that a registry shows, as Prometheus stores them.
func series(t *testing.T, r *prometheus.Registry) map[string][]string {
	t.Helper()
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	all := map[string][]string{}
	for _, f := range families {
		labels := []string{"instance", "job"} // given by Prometheus
		for _, l := range f.Metric[0].Label {
			labels = append(labels, l.GetName())
		}
		if f.Metric[0].Histogram == nil {
			all[f.GetName()] = labels
			continue
		}
		all[f.GetName()+"_bucket"], all[f.GetName()+"_sum"], all[f.GetName()+"_count"] = append(labels, "le"), labels, labels
	}
	return all
}

// TestDashboards holds every query of the dashboards to the metrics and labels that are exported.
func TestDashboards(t *testing.T) {
	exported := series(t, shown(t))
	paths, err := filepath.Glob("../../deploy/grafana/*.json")
	if err != nil || len(paths) == 0 {
		t.Fatalf("%q, %v", paths, err)
	}
	used := map[string]bool{}
	for _, path := range paths {
		raw, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var d struct {
			Panels []struct {
				Title   string
				Targets []struct{ Expr string }
			}
		}
		if err := json.Unmarshal(raw, &d); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		for _, p := range d.Panels {
			for _, target := range p.Targets {
				for _, wrong := range judge(target.Expr, exported, used) {
					t.Errorf("%s, %q: %s: %s", filepath.Base(path), p.Title, target.Expr, wrong)
				}
			}
		}
	}
	for name := range exported { // a metric that nobody looks at is no use, or missing in the dashboard
		base := strings.TrimSuffix(strings.TrimSuffix(strings.TrimSuffix(name, "_bucket"), "_sum"), "_count")
		if !used[name] && !used[base+"_bucket"] && !used[base+"_count"] {
			t.Logf("not on a dashboard: %s", name)
		}
	}
	for query, wrong := range map[string]bool{ // the judge itself
		`sum(rate(ephemeral_pool_claims_total{pool="a"}[5m]))`: false, `ephemeral_pool_claim_total`: true, `sum by (state`: true,
		`ephemeral_pool_machines{stat="ready"}`: true, `sum by (nobody) (ephemeral_pool_machines)`: true, `1 + 1`: true,
	} {
		if got := judge(query, exported, map[string]bool{}); (len(got) > 0) != wrong {
			t.Errorf("%s is judged %q", query, got)
		}
	}
}

// judge says what is wrong with a query.
func judge(query string, exported map[string][]string, used map[string]bool) (wrong []string) {
	query = strings.ReplaceAll(query, "$__rate_interval", "5m") // Grafana's
	e, err := metricsql.Parse(query)
	if err != nil {
		return []string{err.Error()}
	}
	found := 0
	var labels []string
	metricsql.VisitAll(e, func(e metricsql.Expr) {
		m, ok := e.(*metricsql.MetricExpr)
		if !ok {
			return
		}
		for _, filters := range m.LabelFilterss {
			for _, f := range filters {
				if f.Label != "__name__" {
					continue
				}
				found++
				known, ok := exported[f.Value]
				if !ok {
					wrong = append(wrong, "no metric "+f.Value)
				}
				used[f.Value] = true
				labels = append(labels, known...)
			}
			for _, f := range filters {
				if f.Label != "__name__" && !slices.Contains(labels, f.Label) {
					wrong = append(wrong, "no label "+f.Label)
				}
			}
		}
	})
	metricsql.VisitAll(e, func(e metricsql.Expr) {
		if a, ok := e.(*metricsql.AggrFuncExpr); ok {
			for _, l := range a.Modifier.Args {
				if !slices.Contains(labels, l) {
					wrong = append(wrong, "no label "+l)
				}
			}
		}
	})
	if found == 0 {
		wrong = append(wrong, "no metric in it")
	}
	return wrong
}
