package replay

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ephemeral-run/ephemeral/broker/sse"
)

const sample = `
version: 1
steps:
  - text: I look.
    tool_calls:
      - {id: a, name: shell, arguments: {command: "echo \"<äö&>\" | sort", timeout_seconds: 5}}
      - {id: b, name: shell}
    usage: {input_tokens: 10, cached_input_tokens: 4, output_tokens: 3}
  - text: |-
      {{ $a := result "a" }}{{ $a.ExitCode }} {{ line 1 $a.Output }}|{{ line -1 $a.Output }}|{{ line 9 $a.Output }}|{{ match "^x" $a.Output }}|{{ contains "two" $a.Output }}|{{ len (lines $a.Output) }}|{{ trim (result "b").Text }}|{{ (result "b").ExitCode }}
    usage: {input_tokens: 20, output_tokens: 5}
`

func sampleConversation(t testing.TB) *Conversation {
	c, err := Parse("sample", []byte(sample))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func ask(t testing.TB, p *Player, body string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://replay.invalid/v1/chat/completions", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := p.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(data)
}

const firstRequest = `{"model":"sample","messages":[{"role":"user","content":"x"}]`

const secondRequest = `{"model":"sample","messages":[{"role":"user","content":"x"},{"role":"assistant"},
	{"role":"tool","tool_call_id":"a","content":"exit code 3 (timed out)\none\ntwo\r\nxyz\n"},
	{"role":"tool","tool_call_id":"b","content":[{"type":"text","text":" free "},{"type":"text","text":"form "}]}]`

type whole struct {
	Choices []struct {
		Message struct {
			Content   *string
			ToolCalls []struct {
				ID, Type string
				Function struct{ Name, Arguments string }
			} `json:"tool_calls"`
		}
		FinishReason string `json:"finish_reason"`
	}
	Usage struct {
		Prompt     int `json:"prompt_tokens"`
		Completion int `json:"completion_tokens"`
		Total      int `json:"total_tokens"`
		Details    struct {
			Cached int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	}
}

func TestPlay(t *testing.T) {
	p := NewPlayer(map[string]*Conversation{"sample": sampleConversation(t)})
	status, body := ask(t, p, firstRequest+"}")
	var a whole
	if err := json.Unmarshal([]byte(body), &a); err != nil || status != 200 {
		t.Fatalf("%d %s %v", status, body, err)
	}
	m := a.Choices[0].Message
	if *m.Content != "I look." || len(m.ToolCalls) != 2 || a.Choices[0].FinishReason != "tool_calls" {
		t.Errorf("answer %s", body)
	}
	if c := m.ToolCalls[0]; c.ID != "a" || c.Type != "function" || c.Function.Name != "shell" || c.Function.Arguments != `{"command":"echo \"<äö&>\" | sort","timeout_seconds":5}` {
		t.Errorf("call %+v", c)
	}
	if c := m.ToolCalls[1]; c.Function.Arguments != "{}" {
		t.Errorf("call %+v", c)
	}
	if u := a.Usage; u.Prompt != 10 || u.Completion != 3 || u.Total != 13 || u.Details.Cached != 4 {
		t.Errorf("usage %+v", u)
	}

	status, body = ask(t, p, secondRequest+"}")
	a = whole{}
	if err := json.Unmarshal([]byte(body), &a); err != nil || status != 200 {
		t.Fatalf("%d %s %v", status, body, err)
	}
	if got, want := *a.Choices[0].Message.Content, "3 one|xyz||xyz|true|3|free form|-1"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if a.Choices[0].FinishReason != "stop" {
		t.Errorf("answer %s", body)
	}
}

func TestStreamSaysTheSame(t *testing.T) {
	silent, err := Parse("silent", []byte("version: 1\nsteps:\n  - tool_calls: [{id: a, name: shell}]\n    usage: {input_tokens: 1, output_tokens: 1}\n  - {text: done, usage: {input_tokens: 1, output_tokens: 1}}\n"))
	if err != nil {
		t.Fatal(err)
	}
	p := NewPlayer(map[string]*Conversation{"sample": sampleConversation(t), "silent": silent})
	for _, request := range []string{firstRequest, secondRequest, strings.Replace(firstRequest, "sample", "silent", 1)} {
		for _, withUsage := range []bool{false, true} {
			_, body := ask(t, p, request+"}")
			var want whole
			if err := json.Unmarshal([]byte(body), &want); err != nil {
				t.Fatal(err)
			}
			request := request + `,"stream":true}`
			if withUsage {
				request = strings.TrimSuffix(request, "}") + `,"stream_options":{"include_usage":true}}`
			}
			_, stream := ask(t, p, request)
			got, hasUsage := assemble(t, stream)
			if hasUsage != withUsage {
				t.Errorf("usage in the stream: %v, want %v", hasUsage, withUsage)
			}
			if !withUsage {
				want.Usage = whole{}.Usage
			}
			if d := cmp.Diff(want, got); d != "" {
				t.Errorf("stream differs (-whole +stream):\n%s", d)
			}
		}
	}
}

// assemble puts a stream together as client libraries do: there is no content where no delta had any, which is not the same
// as an empty one.
func assemble(t *testing.T, stream string) (a whole, usage bool) {
	t.Helper()
	a.Choices = append(a.Choices, whole{}.Choices...)
	var content *string
	events := sse.NewReader(strings.NewReader(stream), 1<<20)
	a.Choices = make([]struct {
		Message struct {
			Content   *string
			ToolCalls []struct {
				ID, Type string
				Function struct{ Name, Arguments string }
			} `json:"tool_calls"`
		}
		FinishReason string `json:"finish_reason"`
	}, 1)
	for {
		e, err := events.Next()
		if err != nil {
			t.Fatal(err)
		}
		if string(e.Data) == "[DONE]" {
			a.Choices[0].Message.Content = content
			return a, usage
		}
		var c struct {
			Choices []struct {
				Delta struct {
					Content   *string
					ToolCalls []struct {
						Index    int
						ID, Type string
						Function struct{ Name, Arguments string }
					} `json:"tool_calls"`
				}
				FinishReason string `json:"finish_reason"`
			}
			Usage json.RawMessage
		}
		if err := json.Unmarshal(e.Data, &c); err != nil {
			t.Fatalf("%s: %v", e.Data, err)
		}
		if len(c.Choices) == 0 {
			usage = true
			if err := json.Unmarshal(c.Usage, &a.Usage); err != nil {
				t.Fatal(err)
			}
			continue
		}
		if piece := c.Choices[0].Delta.Content; piece != nil {
			if content == nil {
				content = new(string)
			}
			*content += *piece
		}
		if r := c.Choices[0].FinishReason; r != "" {
			a.Choices[0].FinishReason = r
		}
		m := &a.Choices[0].Message
		for _, d := range c.Choices[0].Delta.ToolCalls {
			if d.ID != "" {
				m.ToolCalls = append(m.ToolCalls, struct {
					ID, Type string
					Function struct{ Name, Arguments string }
				}{ID: d.ID, Type: d.Type, Function: d.Function})
				continue
			}
			m.ToolCalls[d.Index].Function.Arguments += d.Function.Arguments
		}
	}
}

func TestRequestsThatCannotBePlayed(t *testing.T) {
	endless, err := Parse("endless", []byte("version: 1\nsteps: [{text: '{{ range 10000000 }}0123456789{{ end }}'}]"))
	if err != nil {
		t.Fatal(err)
	}
	p := NewPlayer(map[string]*Conversation{"sample": sampleConversation(t), "endless": endless})
	for body, want := range map[string]string{
		`{`:                              "no chat-completions request",
		`{"model":"none","messages":[]}`: "no conversation",
		`{"model":"sample","messages":[{"role":"assistant"}]}`:                                                `no result of tool call \"a\"`,
		`{"model":"sample","messages":[{"role":"assistant"},{"role":"assistant"}]}`:                           "asks for step 3",
		`{"model":"sample","messages":[{"role":"assistant"},{"role":"tool","tool_call_id":"a","content":7}]}`: "neither text nor",
		`{"model":"endless","messages":[]}`:                                                                   "too much text",
	} {
		status, got := ask(t, p, body)
		if status < 400 || status >= 500 || !strings.Contains(got, want) || !json.Valid([]byte(got)) {
			t.Errorf("%s: %d %s, want %q", body, status, got, want)
		}
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://replay.invalid/v1/models", nil)
	if err != nil {
		t.Fatal(err)
	}
	if resp, err := p.RoundTrip(req); err != nil || resp.StatusCode != 404 {
		t.Errorf("GET /v1/models: %+v %v", resp, err)
	}
}

func TestParseRefuses(t *testing.T) {
	step := "steps: [{text: x}]"
	for text, want := range map[string]string{
		"steps: [{text: x}]":                               "version",
		"version: 2\n" + step:                              "version",
		"version: 1":                                       "steps",
		"version: 1\nsteps: [{}]":                          "neither text nor tool calls",
		"version: 1\n" + step + "\nx: 1":                   "x",
		"version: 1\nsteps: [{text: '{{ .x'}]":             "text",
		"version: 1\nsteps: [{text: '{{ exec \"ls\" }}'}]": "exec",
		"version: 1\nsteps: [{tool_calls: [{id: a, name: shell}, {id: a, name: shell}]}]":      "unique",
		"version: 1\nsteps: [{tool_calls: [{id: '', name: shell}]}]":                           "unique",
		"version: 1\nsteps: [{tool_calls: [{id: a, name: 'rm -rf'}]}]":                         "name",
		"version: 1\nsteps: [{text: x, usage: {input_tokens: -1}}]":                            "usage",
		"version: 1\nsteps: [{text: x, usage: {input_tokens: 1, cached_input_tokens: 2}}]":     "usage",
		"version: 1\nsteps: [{text: x, usage: {output_tokens: 99999999999}}]":                  "usage",
		"version: 1\nsteps: [" + strings.Repeat("{text: x},", 1001) + "]":                      "1001 steps",
		"version: 1\nsteps: [{tool_calls: [" + strings.Repeat("{id: a, name: b},", 33) + "]}]": "33 tool calls",
	} {
		if _, err := Parse("x", []byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.80s: error %v, want %q in it", text, err, want)
		}
	}
	if _, err := Parse("../x", []byte(sample)); err == nil {
		t.Error("a path is accepted as a name")
	}
}

func TestLoad(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"own.yaml":           sample,
		"sandbox-proof.json": `{"version": 1, "description": "mine", "steps": [{"text": "hello"}]}`,
		"README.md":          "not a conversation",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	all, err := Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	p := NewPlayer(all)
	if !p.Has("own") || !p.Has("sandbox-proof") || p.Has("README") || all["sandbox-proof"].Description != "mine" {
		t.Errorf("loaded %v", all)
	}
	if err := os.WriteFile(filepath.Join(dir, "bad.yaml"), []byte("version: 7"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(dir); err == nil || !strings.Contains(err.Error(), "bad.yaml") {
		t.Errorf("error %v, want one that names the file", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "bad.yaml"), bytes.Repeat([]byte("#"), maxFile+1), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(dir); err == nil || !strings.Contains(err.Error(), "at most") {
		t.Errorf("error %v, want one about the size", err)
	}
}

// FuzzResult gives the built-in conversation tool results of any content.
func FuzzResult(f *testing.F) {
	all, err := Load("")
	if err != nil {
		f.Fatal(err)
	}
	p := NewPlayer(all)
	f.Add("exit code 0\n/tmp\nworker\n", "exit code 6\ncurl: (6) Could not resolve host\n", "exit code 0\n2 3 5\n", "exit code 2\nno")
	f.Add("", "exit code 99999999999999999999\n", "exit code -1", "{{ .x }}")
	f.Fuzz(func(t *testing.T, identity, network, primes, proof string) {
		type m map[string]any
		body, err := json.Marshal(m{"model": "sandbox-proof", "messages": []m{
			{"role": "assistant"}, {"role": "assistant"},
			{"role": "tool", "tool_call_id": "call_identity", "content": identity},
			{"role": "tool", "tool_call_id": "call_network", "content": network},
			{"role": "tool", "tool_call_id": "call_primes", "content": primes},
			{"role": "tool", "tool_call_id": "call_proof", "content": proof},
		}})
		if err != nil {
			t.Fatal(err)
		}
		status, got := ask(t, p, string(body))
		if status != 200 && !strings.Contains(got, "too much text") {
			t.Fatalf("%d %s", status, got)
		}
		if !json.Valid([]byte(got)) {
			t.Fatalf("no JSON: %q", got)
		}
	})
}

// FuzzTemplate runs templates of any text.
func FuzzTemplate(f *testing.F) {
	f.Add(`{{ line 1 (result "a").Output }}{{ match "x" "y" }}`)
	f.Add(`{{ range lines (result "a").Text }}{{ trim . }}{{ end }}`)
	f.Add(`{{ line -9223372036854775808 "x" }}{{ index (lines "a") 5 }}`)
	f.Fuzz(func(t *testing.T, text string) {
		if strings.Contains(text, "range") || strings.Contains(text, "template") || strings.Contains(text, "define") {
			return // loops and recursion are the file's own business
		}
		tmpl, err := newTemplate(text)
		if err != nil {
			return
		}
		if out, err := (results{"a": "exit code 0\nx\ny\n"}).execute(tmpl); err == nil && len(out) > maxText {
			t.Fatalf("%d bytes of text", len(out))
		}
	})
}
