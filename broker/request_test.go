package broker

import (
	"encoding/json"
	"errors"
	"log/slog"
	"reflect"
	"strings"
	"testing"

	"github.com/caarlos0/env/v11"
)

// FuzzRequest checks that whatever is accepted goes upstream as one JSON object with the host's own model, limit and
// usage option, no longer than the bound for its tokens, and reads the same again.
func FuzzRequest(f *testing.F) {
	f.Add([]byte(`{"model":"a/b","messages":[{"role":"user","content":"x"}],"stream":true,"max_tokens":5}`))
	f.Add([]byte(`{"messages":[{"role":"user","content":[{"type":"text","text":"\ud800<&>"}]}],"stream_options":{"include_usage":true},"n":1}`))
	f.Add([]byte(`{"messages":[{"role":"user"}],"messages":[{"role":"tool"}],"tools":[{"type":"function"}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := parseRequest(data)
		if err != nil {
			var p *problem
			if !errors.As(err, &p) || p.status != 400 || !json.Valid(p.body()) {
				t.Fatalf("error %v", err)
			}
			return
		}
		body, err := r.body("name", &provider{limitField: fieldMaxTokens, streamUsage: true}, 7)
		if err != nil {
			t.Fatal(err)
		}
		var sent struct {
			Model     string          `json:"model"`
			MaxTokens int64           `json:"max_tokens"`
			Other     json.RawMessage `json:"max_completion_tokens"`
			Options   json.RawMessage `json:"stream_options"`
		}
		if err := json.Unmarshal([]byte(body), &sent); err != nil {
			t.Fatal(err)
		}
		if sent.Model != "name" || sent.MaxTokens != 7 || sent.Other != nil || (string(sent.Options) == `{"include_usage":true}`) != r.stream {
			t.Fatalf("sent %s", body)
		}
		again, err := parseRequest([]byte(body))
		if err != nil {
			t.Fatalf("what was sent is refused: %v: %s", err, body)
		}
		if second, err := again.body("name", &provider{limitField: fieldMaxTokens, streamUsage: true}, 7); err != nil || second != body {
			t.Fatalf("%s, then %s (%v)", body, second, err)
		}
		if n := textBytes(again.fields["messages"]); n > len(body) {
			t.Fatalf("%d bytes of text in a body of %d", n, len(body))
		}
	})
}

func textBytes(v any) int {
	n := 0
	switch v := v.(type) {
	case string:
		n = len(v)
	case []any:
		for _, e := range v {
			n += textBytes(e)
		}
	case map[string]any:
		for k, e := range v {
			n += len(k) + textBytes(e)
		}
	}
	return n
}

// FuzzChunk measures chunks of any content.
func FuzzChunk(f *testing.F) {
	f.Add([]byte(`{"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":2}}`))
	f.Add([]byte(`{"choices":[{"index":-1,"delta":{"tool_calls":[{"index":99,"function":{"arguments":"x"}}]}}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		var c completion
		if json.Unmarshal(data, &c) != nil {
			return
		}
		var m meter
		m.addChunk(&c)
		if m.textBytes < 0 || m.textBytes > int64(3*len(data)) || m.usage != nil && !m.usage.sane() {
			t.Fatalf("meter %+v of %q", m, data)
		}
	})
}

func TestBackOff(t *testing.T) {
	for n := 1; n < 100; n++ {
		d := backOff(n, firstPause, mostPause)
		full := mostPause
		if n < 6 {
			full = min(firstPause<<(n-1), mostPause)
		}
		if d < full/2 || d > full {
			t.Errorf("attempt %d: %v, want between %v and %v", n, d, full/2, full)
		}
	}
}

// TestDefaults compares the defaults of a Config made by hand with those of the environment.
func TestDefaults(t *testing.T) {
	fromEnv, err := env.ParseAsWithOptions[Config](env.Options{Environment: map[string]string{"EPHEMERAL_OPENAI_API_KEY": "sk-123"}})
	if err != nil {
		t.Fatal(err)
	}
	if string(fromEnv.OpenAIAPIKey) != "sk-123" {
		t.Errorf("key %d bytes long", len(fromEnv.OpenAIAPIKey))
	}
	fromEnv.Log = slog.Default()
	if byHand := (Config{OpenAIAPIKey: "sk-123"}).withDefaults(); !reflect.DeepEqual(byHand, fromEnv) {
		t.Errorf("by hand %+v, from the environment %+v", byHand, fromEnv)
	}
}

func TestClip(t *testing.T) {
	if got := clip(strings.Repeat("é", 33)); got != strings.Repeat("é", 32)+"..." {
		t.Errorf("got %q", got)
	}
}
