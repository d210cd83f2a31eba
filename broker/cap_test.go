package broker_test

import (
	"flag"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/ephemeral-run/ephemeral/broker"
	"github.com/ephemeral-run/ephemeral/broker/openaitest"
	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/connection"
)

// TestParallelStreams compares 200 streams at once, of four runs, with direct ones: every byte is the same.
func TestParallelStreams(t *testing.T) {
	const together = 100 // of 200 that may be
	enough := make(chan struct{})
	double := openaitest.NewFunc(t, testKey, func(n int, r *openaitest.Request) openaitest.Answer {
		if n == together-1 {
			close(enough)
		}
		select {
		case <-enough: // no answer ends before so many are asked for
		case <-time.After(30 * time.Second):
		}
		said := r.Messages[0].Text()
		return openaitest.Answer{Text: strings.Repeat(said+" äöü 😀 ", 20), ToolCalls: []openaitest.ToolCall{openaitest.Shell("a", "echo "+said)},
			Usage: &openaitest.Usage{Prompt: 50, Completion: 200}, Piece: 7, Pause: time.Millisecond}
	})
	p := newProvider(t, double, func(c *broker.Config) { c.MaxConcurrent = 50 })
	body := func(model string, n int) string {
		return fmt.Sprintf(`{"model":"%s","stream":true,"stream_options":{"include_usage":true},"messages":[{"role":"user","content":"stream %d"}]}`, model, n)
	}
	var sessions []*session
	ledgers := []*memoryLedger{newLedger(10_000_000), newLedger(10_000_000), newLedger(10_000_000), newLedger(10_000_000)}
	for _, l := range ledgers {
		sessions = append(sessions, startSession(t, p.Broker, l, &doubleSpec))
	}
	var wg sync.WaitGroup
	got := make([]reply, 200)
	for i := range got {
		wg.Go(func() { got[i] = sessions[i%4].post(t.Context(), body("openai/double", i)) })
	}
	wg.Wait()
	if n := double.MostAtOnce(); n < together {
		t.Errorf("only %d streams at once", n)
	}
	want := make([]string, len(got))
	for i := range want {
		wg.Go(func() { want[i] = direct(t, double, body("double", i)) })
	}
	wg.Wait()
	for i, g := range got {
		if g.status != http.StatusOK || g.err != nil || g.body != want[i] || want[i] == "" {
			t.Fatalf("stream %d: %d, %v\n%s", i, g.status, g.err, cmp.Diff(want[i], g.body))
		}
	}
	for i, l := range ledgers {
		sessions[i].stop()
		if err := l.check(); err != nil {
			t.Error(err)
		}
	}
}

// TestHardCapProperty: whatever providers, upstreams and guests do, what is charged is never more than the hold, every call
// is settled once, and the run's books are even. It tries 25 times, each with a provider of its own; -rapid.checks changes that.
func TestHardCapProperty(t *testing.T) {
	if f := flag.Lookup("rapid.checks"); f.Value.String() == f.DefValue {
		if err := flag.Set(f.Name, "25"); err != nil {
			t.Fatal(err)
		}
		defer flag.Set(f.Name, f.DefValue)
	}
	rapid.Check(t, func(r *rapid.T) {
		// The provider's misbehaviour by the number of the request.
		answers := rapid.SliceOfN(rapid.Custom(func(r *rapid.T) openaitest.Answer {
			a := openaitest.Answer{Text: rapid.StringN(0, 50, 100).Draw(r, "text"), Piece: 3}
			if rapid.Bool().Draw(r, "usage") {
				a.Usage = &openaitest.Usage{Prompt: rapid.Int64Range(-5, 1<<31).Draw(r, "prompt"), Cached: rapid.Int64Range(-5, 1<<20).Draw(r, "cached"), Completion: rapid.Int64Range(-5, 1<<31).Draw(r, "completion")}
			}
			switch rapid.IntRange(0, 7).Draw(r, "fault") {
			case 0:
				a.CutAfter = rapid.IntRange(1, 900).Draw(r, "cut")
			case 1:
				a.Refuse = true
			case 2:
				a.Status = rapid.SampledFrom([]int{400, 401, 404, 429, 500, 503}).Draw(r, "status")
			case 3:
				a.Raw, a.RawType = rapid.SampledFrom([]string{"", "{}", "data: x\n\n", "data: [DONE]\n\n", "data: {\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\n\n"}).Draw(r, "raw"), rapid.SampledFrom([]string{"application/json", "text/event-stream"}).Draw(r, "type")
			case 4:
				a.Text, a.Endless = a.Text+"more", true // an endless answer of nothing is a silent provider: the idle timeout ends it
			}
			return a
		}), 1, 6).Draw(r, "answers")
		hold := run.Micros(rapid.Int64Range(1, 8000).Draw(r, "hold"))
		calls := rapid.SliceOfN(rapid.IntRange(0, 3), 1, 16).Draw(r, "calls")
		double := openaitest.New(t, testKey, answers...)
		defer double.Close()
		u := newUpstream(t, echo)
		defer u.Close()
		store := newConnections(t)
		store.put(t, "o", connection.Connection{Name: "api", BaseURL: u.URL, RatePerMinute: 1_000_000}, "")
		p := newProvider(t, double, func(c *broker.Config) {
			c.IdleTimeout = 2 * time.Second
			c.Connections, c.ConnectionAllow, c.PriceFile, c.CircuitAfter = store, []string{"127.0.0.0/8"}, priceFile(t, "calls: {connection: 333}"), 1000
		})
		l := newLedger(hold)
		s := startSession(t, p.Broker, l, &run.Spec{Prompt: "p", Model: "openai/double", Connections: []string{"api"}})
		var wg sync.WaitGroup
		for _, kind := range calls {
			wg.Go(func() {
				switch kind {
				case 0:
					s.post(t.Context(), plainBody)
				case 1, 2:
					s.post(t.Context(), streamBody)
				case 3:
					s.get("/connections/api/x")
				}
			})
		}
		wg.Wait()
		s.stop()
		if err := l.check(); err != nil {
			r.Fatalf("hold %d: %v", hold, err)
		}
		var told run.Micros
		for _, d := range s.events() {
			told += d.Charged
		}
		for _, d := range s.calls() {
			told += d.Charged
		}
		if told != l.total() || l.total() > hold {
			r.Fatalf("hold %d, charged %d, events tell of %d", hold, l.total(), told)
		}
	})
}
