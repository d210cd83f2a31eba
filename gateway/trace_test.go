package gateway

import (
	"context"
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
