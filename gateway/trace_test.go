package gateway

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/tracing"
	"github.com/ephemeral-run/ephemeral/run/tracing/tracingtest"
)

// TestTraces: one trace per run, in the client's where it has one; the node that takes the run is told, also under zero
// data retention; a repeated request makes no second one; a refused one makes none.
func TestTraces(t *testing.T) {
	c := tracingtest.New(t)
	tracer, err := tracing.Open(t.Context(), tracing.Config{Endpoint: c.URL}, "v1", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	l := newLive(t, Config{})
	traced := serve(t, Config{}, Deps{Store: l.store, FirstSlice: 200, Traces: tracer})
	m := l.newMember("org_a", 1_000_000)
	post := func(body string, header ...string) answer {
		return traced.do(t, http.MethodPost, "/v1/runs", body, append([]string{"Authorization", "Bearer " + m.secret}, header...)...)
	}
	const client = "4bf92f3577b34da6a3ce929d0e0e4736"
	traceparent := "00-" + client + "-00f067aa0ba902b7-01"
	for _, try := range []struct {
		body   string
		header []string
		status int
	}{
		{`{"command":"a"}`, nil, 202},
		{`{"command":"b","zero_data_retention":true}`, []string{"traceparent", traceparent}, 202},
		{`{"command":"c"}`, []string{"Idempotency-Key", `"k"`}, 202},
		{`{"command":"c"}`, []string{"Idempotency-Key", `"k"`}, 202},
		{`{"command":""}`, []string{"traceparent", traceparent}, 400},
	} {
		if a := post(try.body, try.header...); a.StatusCode != try.status {
			t.Fatalf("%s: %d %s", try.body, a.StatusCode, a.body)
		}
	}
	var ids []run.ID
	for range 3 {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		lease, err := l.store.Take(ctx, "node")
		cancel()
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, lease.Run)
		record := tracer.Run()
		done, err := l.store.Settle(t.Context(), lease, run.Outcome{State: run.Failed, Error: &run.Error{Code: "prepare_failed"}})
		if err != nil {
			t.Fatal(err)
		}
		record.Send(done, lease.Spec.Traceparent)
	}
	traced.stop()
	if err := tracer.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	wants := map[string]int{strings.TrimPrefix(string(ids[0]), "run_"): 1, client: 1, strings.TrimPrefix(string(ids[2]), "run_"): 2}
	all := 0
	for trace, requests := range wants {
		spans := c.Spans(trace)
		all += len(spans)
		under := map[string]string{}
		for _, s := range spans {
			under[s.ID] = s.Name
		}
		for _, s := range spans {
			if s.Name == "POST /v1/runs" {
				requests--
			}
			if s.Name == "run" && under[s.Parent] != "POST /v1/runs" {
				t.Errorf("run is under %q", s.Parent)
			}
			if s.Name == "queue" && under[s.Parent] != "run" {
				t.Errorf("queue is under %q", s.Parent)
			}
		}
		if requests != 0 {
			t.Errorf("trace %s has %d spans of requests too few: %v", trace, requests, under)
		}
	}
	if n := len(c.Spans("")); n != all || n == 0 {
		t.Errorf("%d spans, %d of them in the runs' traces", n, all)
	}
}

// TestTracesOfRunsOnNoNode: a run that is cancelled in the queue, also under zero data retention, or whose node is gone has a
// trace of its request, itself and its stages, in its client's trace where it named one.
func TestTracesOfRunsOnNoNode(t *testing.T) {
	c := tracingtest.New(t)
	tracer, err := tracing.Open(t.Context(), tracing.Config{Endpoint: c.URL}, "v1", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	l := newLive(t, Config{}, run.WithEnded(tracer.Ended))
	traced := serve(t, Config{}, Deps{Store: l.store, FirstSlice: 200, Traces: tracer})
	m := l.newMember("org_a", 1_000_000)
	ask := func(method, path, body string, header ...string) (r run.Run) {
		t.Helper()
		a := traced.do(t, method, path, body, append([]string{"Authorization", "Bearer " + m.secret}, header...)...)
		if err := json.Unmarshal([]byte(a.body), &r); err != nil || a.StatusCode >= 300 {
			t.Fatalf("%s %s: %d %s, %v", method, path, a.StatusCode, a.body, err)
		}
		return r
	}
	const client = "4bf92f3577b34da6a3ce929d0e0e4736"
	lost := ask("POST", "/v1/runs", `{"command":"a"}`)
	lease := l.take()
	l.start(lease)
	if _, _, err := l.store.Reap(t.Context(), lease.Node); err != nil {
		t.Fatal(err)
	}
	cancelled := map[string]run.Run{"": ask("POST", "/v1/runs", `{"command":"b"}`),
		client: ask("POST", "/v1/runs", `{"command":"c","zero_data_retention":true}`, "traceparent", "00-"+client+"-00f067aa0ba902b7-01")}
	for range 2 {
		for _, r := range cancelled {
			ask("POST", "/v1/runs/"+string(r.ID)+"/cancel", "")
		}
	}
	traced.stop()
	if err := tracer.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	of := func(r run.Run) string { return strings.TrimPrefix(string(r.ID), "run_") }
	for trace, status := range map[string]string{of(lost): "node_lost", of(cancelled[""]): "", client: ""} {
		byName := map[string]tracingtest.Span{}
		for _, s := range c.Spans(trace) {
			if _, twice := byName[s.Name]; twice {
				t.Errorf("trace %s has two spans %s", trace, s.Name)
			}
			byName[s.Name] = s
		}
		for name, parent := range map[string]string{"run": "POST /v1/runs", "queue": "run", "settle": "run"} {
			if s, ok := byName[name]; !ok || s.Parent != byName[parent].ID || s.EndTimeUnixNano < s.StartTimeUnixNano {
				t.Errorf("trace %s: %s is %+v, want it under %s", trace, name, s, parent)
			}
		}
		if len(byName) != 4 || byName["run"].Status.GetMessage() != status {
			t.Errorf("trace %s: %d spans, status %v", trace, len(byName), byName["run"].Status)
		}
	}
}
