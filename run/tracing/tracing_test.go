package tracing

import (
	"context"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.opentelemetry.io/proto/otlp/trace/v1"

	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/tracing/tracingtest"
)

const (
	testRun  = run.ID("run_0192f0c1d2e37a4b8c5d6e7f80910a2b")
	ofClient = "4bf92f3577b34da6a3ce929d0e0e4736"
)

var queued = time.Date(2026, 10, 7, 12, 0, 0, 0, time.UTC)

// open opens a tracer on a fresh collector; sent closes it and returns what was received, by name.
func open(t *testing.T) (tr *Tracer, c *tracingtest.Collector, sent func() map[string]tracingtest.Span) {
	t.Helper()
	c = tracingtest.New(t)
	tr, err := Open(t.Context(), Config{Endpoint: c.URL, Headers: "authorization=Bearer%20abc, x=y"}, "v1", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return tr, c, func() map[string]tracingtest.Span {
		t.Helper()
		if err := tr.Close(context.Background()); err != nil {
			t.Fatal(err)
		}
		spans := map[string]tracingtest.Span{}
		for _, s := range c.Spans("") {
			if _, twice := spans[s.Name]; twice {
				t.Errorf("two spans %s", s.Name)
			}
			spans[s.Name] = s
		}
		return spans
	}
}

// ended is a run that took a millisecond for each stage, and events that tell what it did.
func ended() (run.Run, []run.NewEvent) {
	end := queued.Add(4 * time.Millisecond)
	r := run.Run{ID: testRun, Org: "org_a", State: run.Failed, QueuedAt: queued, EndedAt: &end, Error: &run.Error{Code: "model_error", Detail: "secret words"}}
	for _, name := range []string{"queue", "claim", "worker", "settle"} {
		r.Stages = append(r.Stages, run.Stage{Name: name, Ms: 1})
	}
	at := queued.Add(2500 * time.Microsecond)
	return r, []run.NewEvent{
		{Type: run.EventWorkerStarted, At: at, Data: run.WorkerStartedData{}},
		{Type: run.EventShell, At: at, Data: run.ShellData{Command: "secret words", Output: "secret words", Outcome: "exited", Duration: 0.25}},
		{Type: run.EventModel, At: at, Data: run.ModelData{Model: "replay/x", Status: 200, Duration: 0.25, Error: "secret words"}},
		{Type: run.EventConnection, At: at, Data: run.CallData{Kind: "http", Target: "secret words", Method: "secret", Duration: 0.25, Error: "secret words"}},
	}
}

func TestTraceOfARun(t *testing.T) {
	for _, c := range []struct{ name, traceparent, trace, parent string }{
		{"of its own", "", strings.TrimPrefix(string(testRun), "run_"), ""},
		{"of the client", "00-" + ofClient + "-00f067aa0ba902b7-01", ofClient, "00f067aa0ba902b7"},
		{"nonsense", "00-zz-1-01", strings.TrimPrefix(string(testRun), "run_"), ""},
		{"all zero", "00-00000000000000000000000000000000-0000000000000000-01", strings.TrimPrefix(string(testRun), "run_"), ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			tr, received, sent := open(t)
			request := tr.Request(queued.Add(-time.Millisecond), c.traceparent, testRun)
			done, events := ended()
			request.Admitted(done, false)
			record := tr.Run()
			for _, e := range events {
				record.Event(e)
			}
			record.Send(done, request.Traceparent())
			request.End(202)
			spans := sent()
			for name, parent := range map[string]string{"run": "POST /v1/runs", "queue": "run", "claim": "run", "worker": "run",
				"settle": "run", "shell": "worker", "model": "worker", "connection": "worker"} {
				if s, ok := spans[name]; !ok || s.Parent != spans[parent].ID || s.Trace != c.trace {
					t.Errorf("%s is %+v, want it under %s in trace %s", name, s, parent, c.trace)
				}
			}
			if s := spans["POST /v1/runs"]; s.Parent != c.parent || s.Trace != c.trace || len(spans) != 9 {
				t.Errorf("%d spans, the request's is %+v", len(spans), s)
			}
			if strings.Contains(string(received.Bytes()), "secret") {
				t.Error("content was sent")
			}
			if h := received.Headers()[0]; h.Get("Authorization") != "Bearer abc" || h.Get("X") != "y" {
				t.Errorf("headers %v", h)
			}
			times := map[string][2]time.Duration{"run": {0, 4}, "queue": {0, 1}, "claim": {1, 2}, "worker": {2, 3}, "settle": {3, 4}}
			for name, w := range times {
				from, to := queued.Add(w[0]*time.Millisecond), queued.Add(w[1]*time.Millisecond)
				if s := spans[name]; s.StartTimeUnixNano != uint64(from.UnixNano()) || s.EndTimeUnixNano != uint64(to.UnixNano()) {
					t.Errorf("%s from %d to %d, want %s to %s", name, s.StartTimeUnixNano, s.EndTimeUnixNano, from, to)
				}
			}
			if s := spans["shell"]; s.EndTimeUnixNano-s.StartTimeUnixNano != uint64(250*time.Microsecond) {
				t.Errorf("shell took %d ns", s.EndTimeUnixNano-s.StartTimeUnixNano)
			}
			if s := spans["run"]; s.Status.GetCode() != v1.Status_STATUS_CODE_ERROR || s.Status.GetMessage() != "model_error" {
				t.Errorf("status %v", s.Status)
			}
		})
	}
}

// TestRunOfALostNode: the trace of a run that no node settled has what its record and its stored events tell.
func TestRunOfALostNode(t *testing.T) {
	tr, received, sent := open(t)
	request := tr.Request(queued, "", testRun)
	end := queued.Add(4 * time.Millisecond)
	done := run.Run{ID: testRun, State: run.Failed, QueuedAt: queued, EndedAt: &end, Error: &run.Error{Code: "node_lost"},
		Stages: []run.Stage{{Name: "queue", Ms: 1}, {Name: "settle", Ms: 3}}, Request: &run.Spec{Traceparent: request.Traceparent()}}
	request.Admitted(done, false)
	request.End(202)
	tr.Ended(done, []run.Event{{Type: run.EventQueued, Data: run.QueuedData{}},
		{Type: run.EventShell, At: 2.5, Data: run.ShellData{Command: "secret words", Outcome: "exited", Duration: 0.25}}})
	spans := sent()
	for name, parent := range map[string]string{"run": "POST /v1/runs", "queue": "run", "settle": "run", "shell": "run"} {
		if s, ok := spans[name]; !ok || s.Parent != spans[parent].ID || s.Trace != strings.TrimPrefix(string(testRun), "run_") {
			t.Errorf("%s is %+v, want it under %s", name, s, parent)
		}
	}
	if s := spans["shell"]; s.EndTimeUnixNano != uint64(queued.Add(2500*time.Microsecond).UnixNano()) || s.EndTimeUnixNano-s.StartTimeUnixNano != 250_000 {
		t.Errorf("shell from %d to %d", s.StartTimeUnixNano, s.EndTimeUnixNano)
	}
	if s := spans["run"]; s.Status.GetMessage() != "node_lost" || len(spans) != 5 || strings.Contains(string(received.Bytes()), "secret") {
		t.Errorf("%d spans, status %v", len(spans), s.Status)
	}
}

func TestClientThatDoesNotSample(t *testing.T) {
	tr, _, sent := open(t)
	request := tr.Request(queued, "00-"+ofClient+"-00f067aa0ba902b7-00", testRun)
	done, events := ended()
	request.Admitted(done, false)
	record := tr.Run()
	record.Event(events[1])
	record.Send(done, request.Traceparent())
	request.End(202)
	if spans := sent(); len(spans) != 0 {
		t.Errorf("sent %v", spans)
	}
}

func TestReplaysAndRefusals(t *testing.T) {
	tr, _, sent := open(t)
	refused := tr.Request(queued, "", testRun)
	refused.End(400)
	first := tr.Request(queued, "", testRun) // not ended here: another gateway's
	replay := tr.Request(queued, "", run.ID("run_00000000000070008000000000000001"))
	replay.Admitted(run.Run{ID: testRun, Request: &run.Spec{Traceparent: first.Traceparent()}}, true)
	replay.End(202)
	spans := sent()
	if s := spans["POST /v1/runs"]; len(spans) != 1 || s.Trace != strings.TrimPrefix(string(testRun), "run_") || !strings.Contains(first.Traceparent(), s.Parent) || s.Parent == "" {
		t.Errorf("%v", spans)
	}
}

func TestManyDeeds(t *testing.T) {
	tr, c, _ := open(t)
	done, events := ended()
	record := tr.Run()
	for range maxDeeds + 5 {
		record.Event(events[1])
	}
	record.Send(done, "")
	if err := tr.Close(context.Background()); err != nil {
		t.Fatal(err)
	}
	shells := 0
	for _, s := range c.Spans("") {
		switch s.Name {
		case "shell":
			shells++
		case "run":
			if !strings.Contains(s.String(), "ephemeral.omitted_spans") {
				t.Errorf("%v does not say that spans are left out", s)
			}
		}
	}
	if shells != maxDeeds {
		t.Errorf("%d spans, want %d", shells, maxDeeds)
	}
}

// TestOff: without an endpoint nothing is made, and nothing allocated.
func TestOff(t *testing.T) {
	for _, cfg := range []Config{{}, {Endpoint: "http://127.0.0.1:1", Disabled: true}} {
		tr, err := Open(t.Context(), cfg, "v1", slog.New(slog.DiscardHandler))
		if tr != nil || err != nil {
			t.Fatalf("%v, %v", tr, err)
		}
		done, events := ended()
		allocations := testing.AllocsPerRun(100, func() {
			request := tr.Request(queued, "", testRun)
			request.Admitted(done, false)
			record := tr.Run()
			record.Event(events[1])
			record.Send(done, request.Traceparent())
			tr.Ended(done, nil)
			request.End(202)
		})
		if allocations != 0 {
			t.Errorf("%v allocations", allocations)
		}
		if err := tr.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}
}

func TestConfig(t *testing.T) {
	for _, cfg := range []Config{
		{Endpoint: "collector:4318"}, {Endpoint: "ftp://secret@x"}, {Endpoint: "http://"}, {Endpoint: "http://x:y:z"},
		{Endpoint: "http://x", Headers: "secret"}, {Endpoint: "http://x", Headers: "=secret"}, {Endpoint: "http://x", Headers: "a=%zzsecret"},
	} {
		tr, err := Open(t.Context(), cfg, "v1", slog.New(slog.DiscardHandler))
		if err == nil || !strings.HasPrefix(err.Error(), "OTEL_EXPORTER_OTLP_") || strings.Contains(err.Error(), "secret") {
			t.Errorf("%+v: %v, %v", cfg, tr, err)
		}
	}
}

// TestCollectorAway: a collector that does not answer holds up nobody, and the log says that traces are lost.
func TestCollectorAway(t *testing.T) {
	var told atomic.Int64
	log := slog.New(slog.NewTextHandler(counter{&told}, nil))
	tr, err := Open(t.Context(), Config{Endpoint: "http://127.0.0.1:1"}, "v1", log)
	if err != nil {
		t.Fatal(err)
	}
	done, _ := ended()
	for range 5000 {
		tr.Run().Send(done, "")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := tr.Close(ctx); err == nil && told.Load() == 0 {
		t.Error("nobody was told")
	}
}

// counter counts what is written.
type counter struct{ n *atomic.Int64 }

func (c counter) Write(p []byte) (int, error) { c.n.Add(1); return len(p), nil }
