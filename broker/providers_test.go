package broker_test

import (
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/broker"
	"github.com/ephemeral-run/ephemeral/broker/openaitest"
	"github.com/ephemeral-run/ephemeral/run"
)

func providerFile(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "providers.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestSeveralProviders sends each model to the provider of its prefix, with that provider's own key, headers and fields.
func TestSeveralProviders(t *testing.T) {
	usage := &openaitest.Usage{Prompt: 10, Completion: 2}
	first := openaitest.New(t, testKey, openaitest.Answer{Text: "first", Usage: usage})
	second := openaitest.New(t, "second-key-MARKER", openaitest.Answer{Text: "second", Piece: 100, Usage: usage})
	p := newProvider(t, first, func(c *broker.Config) {
		c.PriceFile = priceFile(t, "  two/m: {input: 1000000, output: 2000000}")
		c.ProviderFile = providerFile(t, `providers:
  two:
    base_url: `+second.BaseURL+`
    api_key: second-key-MARKER
    headers: {x-team: hdr-MARKER-0123}
    limit_field: max_completion_tokens
    stream_usage: false
`)
	})
	if !p.HasModel("two/m") || p.HasModel("three/m") || p.HasModel("two/") {
		t.Error("models")
	}
	s := startSession(t, p.Broker, newLedger(1_000_000), &run.Spec{Prompt: "p", Model: "two/m"})
	got := s.post(t.Context(), `{"stream":true,"max_tokens":50,"messages":[{"role":"user","content":"hello"}]}`)
	if got.status != 200 || !strings.Contains(got.body, "second") || strings.Contains(strings.Join(guestText(got.body), ""), "MARKER") {
		t.Errorf("%+v", got)
	}
	r := second.Requests()[0]
	if r.Header.Get("X-Team") != "hdr-MARKER-0123" || r.MaxCompletionTokens != 50 || r.MaxTokens != 0 || r.StreamOptions.IncludeUsage || r.Model != "m" {
		t.Errorf("%+v", r)
	}
	if len(first.Requests()) != 0 {
		t.Error("the other provider was asked")
	}
	if strings.Contains(p.log.String(), "MARKER") {
		t.Error("the log shows a secret")
	}
}

func TestProviderFiles(t *testing.T) {
	for name, text := range map[string]string{
		"form": "providers: [MARKER]", "unknown field": "providers: {a: {base_url: http://x, MARKER: 1}}", "name": "providers: {A: {base_url: http://x}}", "replay": "providers: {replay: {base_url: http://x}}",
		"URL": "providers: {a: {base_url: 'http://u:MARKER@x'}}", "header": "providers: {a: {base_url: http://x, headers: {host: MARKER}}}", "limit": "providers: {a: {base_url: http://x, limit_field: n}}",
		"two keys": "providers: {a: {base_url: http://x, api_key: MARKER, api_key_file: /x}}", "no key": "providers: {a: {base_url: https://api.openai.com/v1}}", "break": "providers: {a: {base_url: http://x, api_key: \"MARKER\\nx\"}}",
		"key file": "providers: {a: {base_url: http://x, api_key_file: /does/not/exist}}",
	} {
		_, err := broker.New(broker.Config{ProviderFile: providerFile(t, text), Log: slog.New(slog.NewTextHandler(io.Discard, nil))})
		if err == nil || strings.Contains(err.Error(), "MARKER") {
			t.Errorf("%s: %v", name, err)
		}
	}
	open := providerFile(t, "providers: {a: {base_url: http://x, api_key: MARKER}}")
	if err := os.Chmod(open, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := broker.New(broker.Config{ProviderFile: open}); err == nil || strings.Contains(err.Error(), "MARKER") {
		t.Errorf("a file that others may read: %v", err)
	}
}

// TestCircuit leaves a provider alone after failures in a row, and only that one, and finds out when it works again.
func TestCircuit(t *testing.T) {
	works := false
	double := openaitest.NewFunc(t, testKey, func(int, *openaitest.Request) openaitest.Answer {
		if works {
			return good
		}
		return openaitest.Answer{Status: 503}
	})
	other := openaitest.New(t, testKey, good)
	p := newProvider(t, double, func(c *broker.Config) {
		c.Attempts, c.CircuitAfter, c.CircuitPause = 2, 4, 100*time.Millisecond
		c.PriceFile = priceFile(t, "  two/m: {input: 1000000, output: 2000000}")
		c.ProviderFile = providerFile(t, fmt.Sprintf("providers: {two: {base_url: %q, api_key: %q}}", other.BaseURL, testKey))
	})
	l := newLedger(1_000_000)
	s := startSession(t, p.Broker, l, &doubleSpec)
	for range 5 {
		if got := s.post(t.Context(), plainBody); got.status != 502 || got.code() != "model_error" {
			t.Errorf("%+v", got)
		}
	}
	if n := len(double.Requests()); n != 4 {
		t.Errorf("the failing provider was asked %d times, want 4", n)
	}
	if got := s.post(t.Context(), plainBody); !strings.Contains(got.body, "left alone") {
		t.Errorf("%+v", got)
	}
	o := startSession(t, p.Broker, newLedger(1_000_000), &run.Spec{Prompt: "p", Model: "two/m"})
	if got := o.post(t.Context(), `{"messages":[{"role":"user","content":"hello"}]}`); got.status != 200 {
		t.Errorf("the other provider: %+v", got)
	}
	works = true
	time.Sleep(120 * time.Millisecond)
	for range 3 {
		if got := s.post(t.Context(), plainBody); got.status != 200 {
			t.Errorf("after the pause: %+v", got)
		}
	}
	s.stop()
	if err := l.check(); err != nil {
		t.Error(err)
	}
}

// TestUsageFields reads cached and reasoning tokens in the ways in which providers give them.
func TestUsageFields(t *testing.T) {
	for usage, want := range map[string]run.ModelData{
		`{"prompt_tokens":100,"completion_tokens":50,"prompt_tokens_details":{"cached_tokens":40},"completion_tokens_details":{"reasoning_tokens":30}}`: {CachedTokens: 40, ReasoningTokens: 30, Charged: 60 + 20 + 100},
		`{"prompt_tokens":100,"completion_tokens":50,"prompt_cache_hit_tokens":40,"prompt_cache_miss_tokens":60}`:                                       {CachedTokens: 40, Charged: 60 + 20 + 100},
		`{"prompt_tokens":100,"completion_tokens":50,"prompt_tokens_details":null,"completion_tokens_details":{"reasoning_tokens":-5}}`:                 {Charged: 100 + 100},
		`{"prompt_tokens":100,"completion_tokens":50,"completion_tokens_details":{"reasoning_tokens":500}}`:                                             {ReasoningTokens: 50, Charged: 100 + 100},
	} {
		body := `{"choices":[{"index":0,"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}],"usage":` + usage + `}`
		for _, stream := range []bool{false, true} {
			a := openaitest.Answer{Raw: body, RawType: "application/json"}
			if stream {
				a = openaitest.Answer{Raw: "data: " + strings.Replace(body, "message", "delta", 1) + "\n\ndata: [DONE]\n\n", RawType: "text/event-stream"}
			}
			l := newLedger(100_000)
			s := startSession(t, newProvider(t, openaitest.New(t, testKey, a)).Broker, l, &doubleSpec)
			request := plainBody
			if stream {
				request = streamBody
			}
			if got := s.post(t.Context(), request); got.status != 200 {
				t.Errorf("%+v", got)
			}
			s.stop()
			d := s.events()[0]
			if d.InputTokens != 100 || d.OutputTokens != 50 || d.CachedTokens != want.CachedTokens || d.ReasoningTokens != want.ReasoningTokens || d.Charged != want.Charged || d.Estimated {
				t.Errorf("%s, stream %v: %+v", usage, stream, d)
			}
		}
	}
}

// TestParallelToolCalls passes several tool calls of one answer on, piece by piece.
func TestParallelToolCalls(t *testing.T) {
	calls := []openaitest.ToolCall{openaitest.Shell("a", "ls -l"), openaitest.Shell("b", "pwd"), openaitest.Shell("c", "date")}
	double := openaitest.New(t, testKey, openaitest.Answer{ToolCalls: calls, Piece: 3, Usage: &openaitest.Usage{Prompt: 10, Completion: 20}})
	s := startSession(t, newProvider(t, double).Broker, newLedger(100_000), &doubleSpec)
	body := `{"stream":true,"parallel_tool_calls":true,"tools":[{"type":"function","function":{"name":"shell"}}],"messages":[{"role":"user","content":"x"}]}`
	got := s.post(t.Context(), body)
	for _, id := range []string{`"id":"a"`, `"id":"b"`, `"id":"c"`, "[DONE]"} {
		if !strings.Contains(got.body, id) {
			t.Errorf("no %s in %s", id, got.body)
		}
	}
	if !strings.Contains(string(double.Requests()[0].Body), `"parallel_tool_calls":true`) {
		t.Error("the wish did not arrive")
	}
}
