package broker_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ephemeral-run/ephemeral/broker"
	"github.com/ephemeral-run/ephemeral/broker/openaitest"
	"github.com/ephemeral-run/ephemeral/run"
)

// direct asks the double itself, as the broker does.
func direct(t *testing.T, double *openaitest.Server, body string) string {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, double.BaseURL+"/chat/completions", strings.NewReader(body))
	if err != nil {
		t.Error(err)
		return ""
	}
	req.Header.Set("Authorization", "Bearer "+testKey)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Error(err)
		return ""
	}
	defer resp.Body.Close()
	defer http.DefaultClient.CloseIdleConnections()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Error(err)
		return ""
	}
	return string(data)
}

var toolAnswer = openaitest.Answer{
	Text:      "Ich schaue nach: äöü \\ \"x\" 😀",
	ToolCalls: []openaitest.ToolCall{openaitest.Shell("a", "echo 'héllo'"), openaitest.Shell("b", "pwd")},
	Usage:     &openaitest.Usage{Prompt: 120, Cached: 20, Completion: 30},
	Piece:     3,
}

// toolCost is what toolAnswer costs: 100 + 20/2 + 30*2.
const toolCost = 170

func TestAnswersAreIdenticalToDirectOnes(t *testing.T) {
	double := openaitest.New(t, testKey, toolAnswer)
	for name, body := range map[string]string{
		"whole":  plainBody,
		"stream": `{"model":"openai/double","stream":true,"stream_options":{"include_usage":true},"messages":[{"role":"user","content":"hello"}]}`,
	} {
		t.Run(name, func(t *testing.T) {
			l := newLedger(100_000)
			s := startSession(t, newProvider(t, double).Broker, l, &doubleSpec)
			want := direct(t, double, strings.Replace(body, "openai/double", "double", 1))
			got := s.post(t.Context(), body)
			if got.status != 200 || got.err != nil {
				t.Fatalf("reply %+v", got)
			}
			if d := cmp.Diff(want, got.body); d != "" {
				t.Errorf("answer differs (-direct +broker):\n%s", d)
			}
			if err := l.check(); err != nil || l.total() != toolCost {
				t.Errorf("charged %d, want %d; %v", l.total(), toolCost, err)
			}
			if u := s.handler.Usage(); u != (run.Usage{ModelCalls: 1, InputTokens: 120, OutputTokens: 30, TotalTokens: 150}) {
				t.Errorf("usage %+v", u)
			}
			ignoreTime := cmp.FilterPath(func(p cmp.Path) bool { return p.String() == "Duration" }, cmp.Ignore())
			want1 := []run.ModelData{{Model: "openai/double", Status: 200, InputTokens: 120, OutputTokens: 30, CachedTokens: 20, Charged: toolCost}}
			if d := cmp.Diff(want1, s.events(), ignoreTime); d != "" {
				t.Errorf("events:\n%s", d)
			}
		})
	}
}

func TestUsageIsAskedForAndKeptBack(t *testing.T) {
	double := openaitest.New(t, testKey, toolAnswer)
	l := newLedger(100_000)
	s := startSession(t, newProvider(t, double).Broker, l, &doubleSpec)
	got := s.post(t.Context(), streamBody)
	if got.status != 200 || got.header.Get("Content-Type") != "text/event-stream" {
		t.Fatalf("reply %+v", got)
	}
	if strings.Contains(got.body, "prompt_tokens") || !strings.HasSuffix(got.body, "data: [DONE]\n\n") {
		t.Errorf("stream:\n%s", got.body)
	}
	if !double.Requests()[0].StreamOptions.IncludeUsage {
		t.Error("usage was not asked for")
	}
	if l.total() != toolCost {
		t.Errorf("charged %d", l.total())
	}
}

func TestWhatTheProviderGets(t *testing.T) {
	double := openaitest.New(t, testKey, toolAnswer)
	s := startSession(t, newProvider(t, double).Broker, newLedger(100_000), &doubleSpec)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://broker/v1/chat/completions",
		strings.NewReader(`{"messages":[{"role":"user","content":"<b>&"}],"temperature":0.10,"max_completion_tokens":500,"max_tokens":77,"tools":[{"type":"function","function":{"name":"shell"}}],"model":"openai/other","model":"openai/double"}`))
	if err != nil {
		t.Fatal(err)
	}
	for k, v := range map[string]string{"Authorization": "Bearer guest", "OpenAI-Organization": "x", "X-Forwarded-For": "1.2.3.4", "Cookie": "a=b", "User-Agent": "guest"} {
		req.Header.Set(k, v)
	}
	resp, err := s.client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	got := double.Requests()[0]
	want := `{"max_tokens":77,"messages":[{"content":"<b>&","role":"user"}],"model":"double","temperature":0.10,"tools":[{"function":{"name":"shell"},"type":"function"}]}`
	if string(got.Body) != want {
		t.Errorf("body\n%s, want\n%s", got.Body, want)
	}
	header := http.Header{
		"Authorization": {"Bearer " + testKey}, "Content-Type": {"application/json"}, "Accept": {"application/json"},
		"User-Agent": {"ephemeral"}, "Content-Length": {fmt.Sprint(len(want))},
	}
	if d := cmp.Diff(header, got.Header); d != "" {
		t.Errorf("header (-want +got):\n%s", d)
	}
}

func TestOnlyWhatTheRunAllowsExists(t *testing.T) {
	double := openaitest.New(t, testKey, toolAnswer)
	b := newProvider(t, double).Broker
	for _, c := range []struct {
		name, method, path, body string
		spec                     run.Spec
		status                   int
		code                     string
	}{
		{"another model", "POST", "/v1/chat/completions", `{"model":"openai/gpt-5","messages":[{"role":"user","content":"x"}]}`, doubleSpec, 403, "model_not_allowed"},
		{"the model without its provider", "POST", "/v1/chat/completions", `{"model":"double","messages":[{"role":"user","content":"x"}]}`, doubleSpec, 403, "model_not_allowed"},
		{"a model that is gone", "POST", "/v1/chat/completions", `{"messages":[{"role":"user","content":"x"}]}`, run.Spec{Model: "gone/double"}, 404, "not_found"},
		{"a command has no model", "POST", "/v1/chat/completions", plainBody, run.Spec{Command: "true"}, 404, "not_found"},
		{"web fetch", "POST", "/web/fetch", `{}`, doubleSpec, 404, "not_found"},
		{"web search", "GET", "/web/search?q=x", ``, doubleSpec, 404, "not_found"},
		{"connections", "GET", "/connections/billing/", ``, doubleSpec, 404, "not_found"},
		{"other API", "POST", "/v1/responses", plainBody, doubleSpec, 404, "not_found"},
		{"path tricks", "POST", "/v1/../v1/chat/completions", plainBody, doubleSpec, 404, "not_found"},
		{"double slash", "POST", "//v1/chat/completions", plainBody, doubleSpec, 404, "not_found"},
		{"root", "GET", "/", ``, doubleSpec, 404, "not_found"},
		{"method", "GET", "/v1/chat/completions", ``, doubleSpec, 405, "method_not_allowed"},
		{"too large", "POST", "/v1/chat/completions", `{"messages":[{"role":"user","content":"` + strings.Repeat("x", 4<<20) + `"}]}`, doubleSpec, 413, "request_too_large"},
		{"no JSON", "POST", "/v1/chat/completions", `hello`, doubleSpec, 400, "invalid_request"},
		{"empty", "POST", "/v1/chat/completions", ``, doubleSpec, 400, "invalid_request"},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := newLedger(100_000)
			s := startSession(t, b, l, &c.spec)
			got := s.send(t.Context(), c.method, c.path, c.body)
			if got.status != c.status || got.code() != c.code || got.header.Get("Content-Type") != "application/json" {
				t.Errorf("reply %+v, want %d %s", got, c.status, c.code)
			}
			if len(l.asked) > 0 || len(s.events()) > 0 {
				t.Errorf("asked for money: %+v", l.asked)
			}
		})
	}
	if n := len(double.Requests()); n != 0 {
		t.Errorf("the provider was asked %d times", n)
	}
}

func TestRequestsThatAreRefused(t *testing.T) {
	double := openaitest.New(t, testKey, toolAnswer)
	s := startSession(t, newProvider(t, double).Broker, newLedger(100_000), &doubleSpec)
	for fields, param := range map[string]string{
		`"messages":[]`:                            "messages",
		`"messages":"x"`:                           "messages",
		`"messages":[7]`:                           "messages[0]",
		`"messages":[{"role":"root"}]`:             "messages[0].role",
		`"messages":[{"role":["user"]}]`:           "messages[0].role",
		`"messages":[{"role":"user","content":7}]`: "messages[0].content",
		`"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"image_url","image_url":{"url":"http://169.254.169.254/"}}]}]`: "messages[0].content[1].type",
		`"messages":[{"role":"user","content":[{"type":"input_audio"}]}]`:                                                                        "messages[0].content[0].type",
		`"messages":[{"role":"user","content":["x"]}]`:                                                                                           "messages[0].content[0].type",
		`"messages":[{"role":"assistant","audio":{"id":"x"}}]`:                                                                                   "messages[0].audio",
		`"messages":[{"role":"user"}],"web_search_options":{}`:                                                                                   "web_search_options",
		`"messages":[{"role":"user"}],"service_tier":"priority"`:                                                                                 "service_tier",
		`"messages":[{"role":"user"}],"n":2`:                                                                                                     "n",
		`"messages":[{"role":"user"}],"max_tokens":0`:                                                                                            "max_tokens",
		`"messages":[{"role":"user"}],"max_tokens":1.5`:                                                                                          "max_tokens",
		`"messages":[{"role":"user"}],"max_tokens":99999999999999999999`:                                                                         "max_tokens",
		`"messages":[{"role":"user"}],"max_completion_tokens":"5"`:                                                                               "max_completion_tokens",
		`"messages":[{"role":"user"}],"stream":"yes"`:                                                                                            "stream",
		`"messages":[{"role":"user"}],"stream_options":[]`:                                                                                       "stream_options",
		`"messages":[{"role":"user"}],"stream_options":{"x":1}`:                                                                                  "stream_options.x",
		`"messages":[{"role":"user"}],"stream_options":{"include_usage":1}`:                                                                      "stream_options.include_usage",
		`"messages":[{"role":"user"}],"tools":[{"type":"web_search"}]`:                                                                           "tools[0].type",
		`"messages":[{"role":"user"}],"tools":{}`:                                                                                                "tools",
		`"messages":[{"role":"user"}],"model":7`:                                                                                                 "model",
		`"messages":[{"role":"user"}],"` + strings.Repeat("é", 200) + `":1`:                                                                      strings.Repeat("é", 32) + "...",
	} {
		got := s.post(t.Context(), "{"+fields+"}")
		var doc struct {
			Error struct{ Code, Param string }
		}
		if err := json.Unmarshal([]byte(got.body), &doc); err != nil || got.status != 400 || doc.Error.Code != "invalid_request" || doc.Error.Param != param {
			t.Errorf("%.120s: %d %s, want param %q", fields, got.status, got.body, param)
		}
	}
	for _, body := range []string{`null`, `[]`, `{"messages":`, plainBody + "{}", strings.Repeat("[", 100_000)} {
		if got := s.post(t.Context(), body); got.status != 400 {
			t.Errorf("%.40s: %d", body, got.status)
		}
	}
	if n := len(double.Requests()); n != 0 {
		t.Errorf("the provider was asked %d times", n)
	}
}

func TestModels(t *testing.T) {
	double := openaitest.New(t, testKey)
	with := newProvider(t, double)
	without := newBroker(t, broker.Config{})
	for id, want := range map[string][2]bool{
		"replay/sandbox-proof": {true, true}, "replay/none": {false, false}, "openai/double": {true, false}, "openai/gpt-5-mini": {true, false},
		"openai/unpriced": {false, false}, "openai/": {false, false}, "double": {false, false}, "": {false, false}, "/": {false, false}, "replay/*": {false, false},
		"openai/*": {false, false}, "openai/" + strings.Repeat("x", 300): {false, false},
	} {
		if got := [2]bool{with.HasModel(id), without.HasModel(id)}; got != want {
			t.Errorf("%q: %v, want %v", id, got, want)
		}
	}
	if with.Prices().ComputePerSecond != 200 || with.DefaultModel() != "replay/sandbox-proof" {
		t.Errorf("prices %+v, default model %q", with.Prices(), with.DefaultModel())
	}
}

func TestBadConfiguration(t *testing.T) {
	for name, cfg := range map[string]broker.Config{
		"base URL with a password": {OpenAIBaseURL: "http://user:hunter22@host/v1"},
		"base URL without host":    {OpenAIBaseURL: "/v1"},
		"base URL of another kind": {OpenAIBaseURL: "file:///etc/passwd"},
		"base URL that is none":    {OpenAIBaseURL: "http://hunter22:\x00@/"},
		"key with a line break":    {OpenAIAPIKey: "hunter22\r\nX: y"},
		"limit field":              {OpenAIAPIKey: "x", OpenAILimit: "tokens"},
		"default model":            {DefaultModel: "replay/none"},
		"price file":               {PriceFile: "/does/not/exist"},
		"replay directory":         {ReplayDir: "/does/not/exist"},
		"attempts":                 {Attempts: -1},
		"timeout":                  {CallTimeout: -1},
	} {
		b, err := broker.New(cfg)
		if err == nil {
			b.Close()
			t.Errorf("%s: accepted", name)
		} else if strings.Contains(err.Error(), "hunter22") {
			t.Errorf("%s: the error shows a secret: %v", name, err)
		}
	}
	if out := fmt.Sprintf("%v %+v %#v", broker.Config{OpenAIAPIKey: "hunter22"}, broker.Config{OpenAIAPIKey: "hunter22"}, broker.Config{OpenAIAPIKey: "hunter22"}); strings.Contains(out, "hunter22") {
		t.Errorf("the configuration shows a secret: %s", out)
	}
}

func TestBudget(t *testing.T) {
	double := openaitest.New(t, testKey, openaitest.Answer{Text: "hi", Usage: &openaitest.Usage{Prompt: 10, Completion: 2}})
	b := newProvider(t, double).Broker
	// The request as it goes upstream, and the margin.
	sent := `{"max_tokens":1000,"messages":[{"content":"hello","role":"user"}],"model":"double"}`
	input := run.Micros(len(sent) + 256)
	for _, c := range []struct {
		name   string
		hold   run.Micros
		limit  int64 // that the provider is given; 0: it is not asked
		status int
	}{
		{"plenty", 1_000_000, 1000, 200},
		{"exact", input + 2000, 1000, 200},
		{"one less", input + 1999, 999, 200},
		{"little", input + 128, 64, 200},
		{"too little", input + 127, 0, 402},
		{"nothing", 0, 0, 402},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := newLedger(c.hold)
			s := startSession(t, b, l, &doubleSpec)
			before := len(double.Requests())
			got := s.post(t.Context(), plainBody)
			if got.status != c.status {
				t.Fatalf("reply %+v", got)
			}
			requests := double.Requests()[before:]
			if c.limit == 0 {
				if got.code() != "budget_exhausted" || len(requests) != 0 || l.total() != 0 {
					t.Errorf("code %q, asked %d times, charged %d", got.code(), len(requests), l.total())
				}
				if e := s.events(); len(e) != 1 || e[0].Error != "budget_exhausted" || e[0].Status != 0 {
					t.Errorf("events %+v", e)
				}
			} else if len(requests) != 1 || requests[0].MaxTokens != c.limit || l.total() != 14 {
				t.Errorf("limit %d, want %d; charged %d", requests[0].MaxTokens, c.limit, l.total())
			}
			if err := l.check(); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestRunEnded(t *testing.T) {
	double := openaitest.New(t, testKey, toolAnswer)
	b := newProvider(t, double).Broker
	for _, fault := range []error{run.ErrLeaseLost, run.ErrState} {
		l := newLedger(100_000)
		l.faults = []error{fmt.Errorf("authorise: %w", fault)}
		s := startSession(t, b, l, &doubleSpec)
		if got := s.post(t.Context(), plainBody); got.status != 410 || got.code() != "run_ended" {
			t.Errorf("%v: %+v", fault, got)
		}
	}
	h := b.Handler(broker.Session{Run: "run_0", Spec: &doubleSpec, Ledger: newLedger(1)})
	h.Close()
	h.Close()
	s := &session{t: t, handler: h, ln: newPipeListener()}
	s.transport = &http.Transport{DialContext: s.ln.dial, DisableKeepAlives: true}
	server := &http.Server{Handler: h}
	go func() { _ = server.Serve(s.ln) }()
	if got := s.post(t.Context(), plainBody); got.status != 410 {
		t.Errorf("after Close: %+v", got)
	}
	if err := server.Shutdown(context.Background()); err != nil {
		t.Error(err)
	}
	if n := len(double.Requests()); n != 0 {
		t.Errorf("the provider was asked %d times", n)
	}
}
