package e2e

import (
	"strings"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/tracing/tracingtest"
)

// checkTrace waits for the one trace of an ended run and holds it against the run's record: its spans are the request, the
// run, the stages with their times, and what the worker did, each under the right one.
func checkTrace(t *testing.T, c *tracingtest.Collector, r run.Run) {
	t.Helper()
	id := strings.TrimPrefix(string(r.ID), "run_")
	want := 2 + len(r.Stages) + int(r.Usage.ModelCalls+r.Usage.ShellCommands)
	var spans []tracingtest.Span
	for end := time.Now().Add(10 * time.Second); len(spans) < want && time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		spans = c.Spans(id)
	}
	ids, count := map[string]string{}, map[string]int64{}
	for _, s := range spans {
		ids[s.Name] = s.ID
		count[s.Name]++
	}
	parents := map[string]string{"POST /v1/runs": "", "run": ids["POST /v1/runs"], "model": ids["worker"], "shell": ids["worker"]}
	stages := map[string]float64{}
	for _, stage := range r.Stages {
		parents[stage.Name], stages[stage.Name] = ids["run"], stage.Ms
	}
	for _, s := range spans {
		if parent, known := parents[s.Name]; !known || s.Parent != parent {
			t.Errorf("span %s is under %q, want %q", s.Name, s.Parent, parent)
		}
		took := float64(s.EndTimeUnixNano-s.StartTimeUnixNano) / 1e6
		if ms, ok := stages[s.Name]; ok && (took-ms > 0.001 || ms-took > 0.001) {
			t.Errorf("span %s took %v ms, the record says %v", s.Name, took, ms)
		}
	}
	if len(spans) != want || count["model"] != r.Usage.ModelCalls || count["shell"] != r.Usage.ShellCommands || count["run"] != 1 {
		t.Errorf("%d spans in trace %s, want %d: %v", len(spans), id, want, count)
	}
}
