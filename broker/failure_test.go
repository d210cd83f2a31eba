package broker_test

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/broker"
	"github.com/ephemeral-run/ephemeral/broker/openaitest"
	"github.com/ephemeral-run/ephemeral/run"
)

var good = openaitest.Answer{Text: "hello", Usage: &openaitest.Usage{Prompt: 10, Completion: 2}}

// goodCost is what good costs: 10 + 2*2.
const goodCost = 14

func TestFailedCallsAreTriedAgain(t *testing.T) {
	for _, c := range []struct {
		name   string
		bad    openaitest.Answer
		stream bool
		least  time.Duration // of the wait
	}{
		{"429", openaitest.Answer{Status: 429}, false, 250 * time.Millisecond},
		{"429 with Retry-After", openaitest.Answer{Status: 429, RetryAfter: "7"}, true, 7 * time.Second},
		{"429 with a date", openaitest.Answer{Status: 429, RetryAfter: time.Now().Add(30 * time.Second).UTC().Format(http.TimeFormat)}, true, 20 * time.Second},
		{"500", openaitest.Answer{Status: 500}, true, 250 * time.Millisecond},
		{"503", openaitest.Answer{Status: 503, RetryAfter: "nonsense"}, false, 250 * time.Millisecond},
		{"529", openaitest.Answer{Status: 529}, false, 250 * time.Millisecond},
		{"connection cut", openaitest.Answer{Refuse: true}, false, 250 * time.Millisecond},
		{"cut before the first event", openaitest.Answer{Text: "x", CutAfter: 10}, true, 250 * time.Millisecond},
		{"cut document", openaitest.Answer{Text: "x", CutAfter: 10}, false, 250 * time.Millisecond},
		{"nonsense", openaitest.Answer{Raw: "<html>", RawType: "application/json"}, false, 250 * time.Millisecond},
		{"no choices", openaitest.Answer{Raw: "{}", RawType: "application/json"}, false, 250 * time.Millisecond},
		{"nonsense stream", openaitest.Answer{Raw: "data: <html>\n\n", RawType: "text/event-stream"}, true, 250 * time.Millisecond},
		{"empty stream", openaitest.Answer{Raw: "data: [DONE]\n\n", RawType: "text/event-stream"}, true, 250 * time.Millisecond},
		{"error as the first event", openaitest.Answer{Raw: "data: {\"error\":{\"message\":\"x\"}}\n\n", RawType: "text/event-stream"}, true, 250 * time.Millisecond},
	} {
		t.Run(c.name, func(t *testing.T) {
			double := openaitest.New(t, testKey, c.bad, good)
			p := newProvider(t, double)
			l := newLedger(100_000)
			s := startSession(t, p.Broker, l, &doubleSpec)
			body := plainBody
			if c.stream {
				body = streamBody
			}
			got := s.post(t.Context(), body)
			if got.status != 200 || !strings.Contains(got.body, "hel") {
				t.Fatalf("reply %+v", got)
			}
			if w := p.waited(); len(w) != 1 || w[0] < c.least || w[0] > c.least+30*time.Second {
				t.Errorf("waited %v, want at least %v", w, c.least)
			}
			if err := l.check(); err != nil || l.total() != goodCost || len(l.asked) != 1 {
				t.Errorf("charged %d, asked %d times; %v", l.total(), len(l.asked), err)
			}
			if e := s.events(); len(e) != 1 || e[0].Error != "" || e[0].Charged != goodCost {
				t.Errorf("events %+v", e)
			}
		})
	}
}

func TestFailedCallsCostNothing(t *testing.T) {
	for _, c := range []struct {
		name    string
		bad     openaitest.Answer
		stream  bool
		tries   int
		status  int
		code    string
		message string
	}{
		{"429", openaitest.Answer{Status: 429}, true, 4, 502, "model_error", "status 429"},
		{"429 for too long", openaitest.Answer{Status: 429, RetryAfter: "3600"}, true, 1, 502, "model_error", "status 429"},
		{"no quota", openaitest.Answer{Status: 429, ErrorCode: "insufficient_quota"}, true, 1, 502, "model_error", "status 429"},
		{"500", openaitest.Answer{Status: 500, ErrorText: "stack trace"}, false, 4, 502, "model_error", "status 500"},
		{"401", openaitest.Answer{Status: 401, ErrorText: "Incorrect API key " + testKey}, false, 1, 502, "model_error", "status 401"},
		{"404", openaitest.Answer{Status: 404}, false, 1, 502, "model_error", "status 404"},
		{"redirect", openaitest.Answer{Status: 302}, false, 1, 502, "model_error", "status 302"},
		{"204", openaitest.Answer{Status: 204}, false, 1, 502, "model_error", "status 204"},
		{"cut", openaitest.Answer{Refuse: true}, false, 4, 502, "model_error", "could not be reached"},
		{"400", openaitest.Answer{Status: 400, ErrorCode: "context_length_exceeded", ErrorText: "too many tokens"}, true, 1, 400, "context_length_exceeded", "too many tokens"},
		{"400 without a word", openaitest.Answer{Status: 400, ErrorCode: "ODD CODE"}, true, 1, 400, "invalid_request", "refused the request"},
		{"document instead of a stream", openaitest.Answer{Raw: "{}", RawType: "application/json"}, true, 1, 502, "model_error", "another form"},
		{"stream instead of a document", openaitest.Answer{Raw: "data: {}\n\n", RawType: "text/event-stream"}, false, 1, 502, "model_error", "another form"},
		{"long line", openaitest.Answer{Raw: "data: " + strings.Repeat("x", 2<<20), RawType: "text/event-stream"}, true, 1, 502, "model_error", "too long"},
		{"long document", openaitest.Answer{Raw: `{"x":"` + strings.Repeat("x", 17<<20) + `"}`, RawType: "application/json"}, false, 1, 502, "model_error", "too long"},
	} {
		t.Run(c.name, func(t *testing.T) {
			double := openaitest.New(t, testKey, c.bad)
			p := newProvider(t, double)
			l := newLedger(100_000)
			s := startSession(t, p.Broker, l, &doubleSpec)
			body := plainBody
			if c.stream {
				body = streamBody
			}
			got := s.post(t.Context(), body)
			if got.status != c.status || got.code() != c.code || !strings.Contains(got.body, c.message) {
				t.Errorf("reply %+v", got)
			}
			if strings.Contains(got.body, "stack trace") || strings.Contains(got.body, testKey) {
				t.Errorf("the provider's own words reach the guest: %s", got.body)
			}
			if n := len(double.Requests()); n != c.tries {
				t.Errorf("tried %d times, want %d", n, c.tries)
			}
			if err := l.check(); err != nil || l.total() != 0 || len(l.asked) != 1 {
				t.Errorf("charged %d, asked %d times; %v", l.total(), len(l.asked), err)
			}
			e := s.events()
			if len(e) != 1 || e[0].Error == "" || e[0].Charged != 0 || c.bad.Status > 0 && e[0].Status != c.bad.Status {
				t.Errorf("events %+v", e)
			}
			if u := s.handler.Usage(); u != (run.Usage{}) {
				t.Errorf("usage %+v", u)
			}
		})
	}
}

func TestRetriesStayWithinTheDeadline(t *testing.T) {
	double := openaitest.New(t, testKey, openaitest.Answer{Status: 503, RetryAfter: "20"})
	p := newProvider(t, double, func(c *broker.Config) { c.CallTimeout = 10 * time.Second })
	s := startSession(t, p.Broker, newLedger(100_000), &doubleSpec)
	if got := s.post(t.Context(), plainBody); got.status != 502 || len(double.Requests()) != 1 || len(p.waited()) != 0 {
		t.Errorf("reply %+v after %d tries and waits %v", got, len(double.Requests()), p.waited())
	}
}

// estimated is the input of a body in the worst case, in tokens.
func estimated(double *openaitest.Server) int64 {
	r := double.Requests()
	return int64(len(r[len(r)-1].Body)) + 256
}

func TestUnknownUsageIsEstimated(t *testing.T) {
	text := strings.Repeat("ä", 50) // 100 bytes
	for _, c := range []struct {
		name   string
		answer openaitest.Answer
		stream bool
		output int64
	}{
		{"whole", openaitest.Answer{Text: text}, false, 100},
		{"stream", openaitest.Answer{Text: text}, true, 100},
		{"stream without an end mark", openaitest.Answer{RawType: "text/event-stream", Raw: "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"12345\"},\"finish_reason\":\"stop\"}]}\n\n"}, true, 5},
		{"negative usage", openaitest.Answer{Text: text, Usage: &openaitest.Usage{Prompt: -5, Completion: 2}}, true, 100},
		{"more cached than read", openaitest.Answer{Text: text, Usage: &openaitest.Usage{Prompt: 5, Cached: 6}}, false, 100},
		{"absurd usage", openaitest.Answer{Text: text, Usage: &openaitest.Usage{Prompt: 5, Completion: 1 << 62}}, false, 100},
		{"more text than the limit", openaitest.Answer{Text: strings.Repeat("x", 3000), Piece: 1000}, true, 1000},
	} {
		t.Run(c.name, func(t *testing.T) {
			double := openaitest.New(t, testKey, c.answer)
			l := newLedger(100_000)
			s := startSession(t, newProvider(t, double).Broker, l, &doubleSpec)
			body := plainBody
			if c.stream {
				body = streamBody
			}
			if got := s.post(t.Context(), body); got.status != 200 {
				t.Fatalf("reply %+v", got)
			}
			want := run.Micros(estimated(double) + 2*c.output)
			e := s.events()
			if len(e) != 1 || !e[0].Estimated || e[0].Charged != want || e[0].InputTokens != estimated(double) || e[0].OutputTokens != c.output {
				t.Errorf("events %+v, want %d micros", e, want)
			}
			if err := l.check(); err != nil || l.total() != want {
				t.Errorf("charged %d, want %d; %v", l.total(), want, err)
			}
		})
	}
}

func TestOverReportedUsageIsCapped(t *testing.T) {
	double := openaitest.New(t, testKey, openaitest.Answer{Text: "hi", Usage: &openaitest.Usage{Prompt: 1 << 29, Completion: 1 << 29}})
	l := newLedger(3_000)
	s := startSession(t, newProvider(t, double).Broker, l, &doubleSpec)
	if got := s.post(t.Context(), plainBody); got.status != 200 {
		t.Fatalf("reply %+v", got)
	}
	if err := l.check(); err != nil || l.total() != min(3000, l.asked[0].Max) {
		t.Errorf("charged %d of %d; %v", l.total(), l.asked[0].Max, err)
	}
}

// TestCutAtEveryByte cuts the provider's answer after each byte: nothing that came is charged twice or above what was
// authorised, and a stream that broke off says so.
func TestCutAtEveryByte(t *testing.T) {
	answer := openaitest.Answer{Text: "äx", ToolCalls: []openaitest.ToolCall{openaitest.Shell("a", "ls")}, Usage: &openaitest.Usage{Prompt: 10, Completion: 2}, Piece: 8}
	for _, body := range []string{plainBody, streamBody} {
		probe := openaitest.New(t, testKey, answer)
		size := len(direct(t, probe, strings.NewReplacer("openai/double", "double", `"stream":true`, `"stream":true,"stream_options":{"include_usage":true}`).Replace(body)))
		double := openaitest.NewFunc(t, testKey, func(n int, _ *openaitest.Request) openaitest.Answer {
			a := answer
			a.CutAfter = n + 1
			return a
		})
		p := newProvider(t, double, func(c *broker.Config) { c.Attempts, c.MaxCalls = 1, 10_000 })
		l := newLedger(10_000_000)
		s := startSession(t, p.Broker, l, &doubleSpec)
		var relayed, refused int
		for n := range size {
			before := l.total()
			got := s.post(t.Context(), body)
			charged := l.total() - before
			switch {
			case got.status == 502 && charged == 0 && got.code() == "model_error":
				refused++
			case got.status == 200 && body == streamBody:
				relayed++
				broken := !strings.HasSuffix(got.body, "data: [DONE]\n\n")
				if broken && !strings.Contains(got.body, `"code":"model_error"`) {
					t.Fatalf("cut after %d bytes: the stream does not say that it broke:\n%s", n+1, got.body)
				}
				if charged == 0 || charged > l.asked[len(l.asked)-1].Max {
					t.Fatalf("cut after %d bytes: charged %d", n+1, charged)
				}
			default:
				t.Fatalf("cut after %d bytes: charged %d, reply %+v", n+1, charged, got)
			}
		}
		if refused == 0 || body == streamBody && relayed == 0 {
			t.Errorf("%d refused, %d relayed", refused, relayed)
		}
		if err := l.check(); err != nil {
			t.Error(err)
		}
		s.stop()
	}
}

func TestErrorInTheMiddleOfAStream(t *testing.T) {
	double := openaitest.New(t, testKey, openaitest.Answer{Text: "hello", ErrorCode: "x", ErrorText: "secret detail"})
	l := newLedger(100_000)
	s := startSession(t, newProvider(t, double).Broker, l, &doubleSpec)
	got := s.post(t.Context(), streamBody)
	if got.status != 200 || strings.Contains(got.body, "[DONE]") || strings.Contains(got.body, "secret detail") || !strings.Contains(got.body, `"code":"model_error"`) {
		t.Errorf("reply %+v", got)
	}
	if e := s.events(); len(e) != 1 || !e[0].Estimated || e[0].OutputTokens != 5 || e[0].Error == "" || len(double.Requests()) != 1 {
		t.Errorf("events %+v", e)
	}
}

func TestEndlessStreamIsCut(t *testing.T) {
	double := openaitest.New(t, testKey, openaitest.Answer{Text: strings.Repeat("more ", 1000), Piece: 5000, Endless: true})
	l := newLedger(100_000)
	s := startSession(t, newProvider(t, double).Broker, l, &doubleSpec)
	got := s.post(t.Context(), streamBody)
	if got.status != 200 || !strings.Contains(got.body, "output limit") || len(got.body) > 1<<20 {
		t.Errorf("reply %d, %d bytes", got.status, len(got.body))
	}
	if err := l.check(); err != nil || l.total() != l.asked[0].Max {
		t.Errorf("charged %d of %d; %v", l.total(), l.asked[0].Max, err)
	}
}

func TestSilentProvider(t *testing.T) {
	for name, answer := range map[string]openaitest.Answer{"before": {Delay: time.Minute}, "between": {Text: "a long story", Pause: time.Minute}} {
		t.Run(name, func(t *testing.T) {
			double := openaitest.New(t, testKey, answer)
			p := newProvider(t, double, func(c *broker.Config) { c.IdleTimeout, c.Attempts = 100*time.Millisecond, 2 })
			l := newLedger(100_000)
			s := startSession(t, p.Broker, l, &doubleSpec)
			got := s.post(t.Context(), streamBody)
			if got.status != 502 || !strings.Contains(got.body, "silent") || len(double.Requests()) != 2 {
				t.Errorf("reply %+v after %d tries", got, len(double.Requests()))
			}
			if err := l.check(); err != nil || l.total() != 0 {
				t.Errorf("charged %d; %v", l.total(), err)
			}
		})
	}
}

// TestGuestLeaves lets the guest hang up in the middle: the call is still charged.
func TestGuestLeaves(t *testing.T) {
	double := openaitest.New(t, testKey, openaitest.Answer{Text: "hello there", Pause: 50 * time.Millisecond, Usage: &openaitest.Usage{Prompt: 10, Completion: 2}})
	l := newLedger(100_000)
	s := startSession(t, newProvider(t, double).Broker, l, &doubleSpec)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if got := s.post(ctx, streamBody); got.err == nil {
		t.Fatalf("reply %+v", got)
	}
	waitFor(t, func() bool { return l.total() > 0 })
	if err := l.check(); err != nil || l.total() != goodCost {
		t.Errorf("charged %d, want the %d that the provider reports; %v", l.total(), goodCost, err)
	}
}

// TestRunEndsInTheMiddle ends the run while the provider works: Serve returns when the call is charged.
func TestRunEndsInTheMiddle(t *testing.T) {
	for name, answer := range map[string]openaitest.Answer{"before": {Delay: time.Minute}, "between": {Text: strings.Repeat("x", 200), Piece: 1, Pause: 20 * time.Millisecond}} {
		t.Run(name, func(t *testing.T) {
			double := openaitest.New(t, testKey, answer)
			l := newLedger(100_000)
			s := startSession(t, newProvider(t, double).Broker, l, &doubleSpec)
			done := make(chan reply, 1)
			go func() { done <- s.post(context.Background(), streamBody) }()
			waitFor(t, func() bool { return len(double.Requests()) == 1 })
			time.Sleep(100 * time.Millisecond)
			began := time.Now()
			s.stop()
			if d := time.Since(began); d > 2*time.Second {
				t.Errorf("ending took %v", d)
			}
			if err := l.check(); err != nil || l.total() < run.Micros(estimated(double)) || l.total() > l.asked[0].Max {
				t.Errorf("charged %d; %v", l.total(), err)
			}
			if e := s.events(); len(e) != 1 || !e[0].Estimated || e[0].Charged != l.total() {
				t.Errorf("events %+v", e)
			}
			<-done
		})
	}
}

func waitFor(t testing.TB, true func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); !true(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("it did not happen within 10 s")
		}
	}
}

func TestStoreIsAwayForAWhile(t *testing.T) {
	double := openaitest.New(t, testKey, good)
	away := fmt.Errorf("redis: %w", run.ErrUnavailable)
	l := newLedger(100_000)
	l.faults = []error{away, away, nil, away, away} // twice before the authorisation, twice before the capture
	s := startSession(t, newProvider(t, double).Broker, l, &doubleSpec)
	if got := s.post(t.Context(), plainBody); got.status != 200 {
		t.Fatalf("reply %+v", got)
	}
	if err := l.check(); err != nil || l.total() != goodCost || len(l.faults) != 0 {
		t.Errorf("charged %d; %v", l.total(), err)
	}
}

// failingLedger authorises and then loses the store for good.
type failingLedger struct{ *memoryLedger }

func (failingLedger) Capture(context.Context, string, run.Micros) error { return run.ErrState }

func TestChargeThatCannotBeRecorded(t *testing.T) {
	double := openaitest.New(t, testKey, good)
	p := newProvider(t, double)
	s := startSession(t, p.Broker, failingLedger{newLedger(100_000)}, &doubleSpec)
	if got := s.post(t.Context(), plainBody); got.status != 200 {
		t.Fatalf("reply %+v", got)
	}
	if e := s.events(); len(e) != 1 || e[0].Charged != 0 || e[0].Error == "" {
		t.Errorf("events %+v", e)
	}
	if !strings.Contains(p.log.String(), "not captured") {
		t.Errorf("log: %s", p.log.String())
	}
}
