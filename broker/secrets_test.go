package broker_test

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/url"
	"strings"
	"testing"

	"github.com/ephemeral-run/ephemeral/broker/openaitest"
	"github.com/ephemeral-run/ephemeral/run"
)

// guestText is every text that a guest can read out of a reply: its bytes, and the strings of a stream put together.
func guestText(body string) []string {
	all := []string{body}
	var content, arguments strings.Builder
	for line := range strings.SplitSeq(body, "\n") {
		var c struct {
			Choices []struct {
				Delta struct {
					Content   string
					ToolCalls []struct{ Function struct{ Arguments string } } `json:"tool_calls"`
				}
			}
		}
		if data, ok := strings.CutPrefix(line, "data: "); ok && json.Unmarshal([]byte(data), &c) == nil && len(c.Choices) > 0 {
			content.WriteString(c.Choices[0].Delta.Content)
			for _, t := range c.Choices[0].Delta.ToolCalls {
				arguments.WriteString(t.Function.Arguments)
			}
		}
	}
	return append(all, content.String(), arguments.String())
}

// shows tells whether any text shows the key, or all but a bit of it, in any form.
func shows(texts ...string) bool {
	for _, t := range texts {
		for _, f := range []string{testKey, testKey[:len(testKey)-2], url.QueryEscape(testKey), base64.StdEncoding.EncodeToString([]byte("Bearer " + testKey))[12:40], strings.ReplaceAll(testKey, "/", `\/`)} {
			if strings.Contains(t, f) {
				return true
			}
		}
		var doc any
		if json.Unmarshal([]byte(t), &doc) == nil && strings.Contains(fmt.Sprint(doc), testKey) {
			return true
		}
	}
	return false
}

// TestTheKeyStaysOutside lets the provider send its own key back in every way it can.
func TestTheKeyStaysOutside(t *testing.T) {
	escaped := `{"choices":[{"index":0,"message":{"role":"assistant","content":"` + strings.Replace(strings.ReplaceAll(testKey, "/", `\/`), "s", `\u0073`, 1) + `"},"finish_reason":"stop"}]}`
	use := &openaitest.Usage{Prompt: 10, Completion: 2}
	for name, a := range map[string]openaitest.Answer{
		"whole text":         {Text: "your key: ", Echo: true, Piece: 1000, Usage: use},
		"letter by letter":   {Text: "your key: ", Echo: true, Piece: 1, Usage: use},
		"in pieces":          {Text: "your key: ", Echo: true, Piece: 7, Usage: use},
		"arguments":          {ToolCalls: []openaitest.ToolCall{openaitest.Shell("a", "echo "+testKey)}, Piece: 3, Usage: use},
		"tool call id":       {ToolCalls: []openaitest.ToolCall{openaitest.Shell(testKey, "ls")}, Usage: use},
		"base64":             {Text: base64.StdEncoding.EncodeToString([]byte("Authorization: Bearer " + testKey + "\r\n")), Piece: 9, Usage: use},
		"URL":                {Text: "https://x/?k=" + url.QueryEscape(testKey), Piece: 4, Usage: use},
		"cut":                {Text: testKey, Piece: 2, CutAfter: 2500},
		"error":              {Status: 400, ErrorText: "your key: ", Echo: true},
		"error code":         {Status: 400, ErrorCode: testKey},
		"server error":       {Status: 500, ErrorText: "your key: ", Echo: true},
		"refused":            {Status: 401, ErrorText: "your key: ", Echo: true},
		"escaped":            {Raw: escaped, RawType: "application/json"},
		"escaped in a chunk": {Raw: "data: " + strings.Replace(escaped, "message", "delta", 1) + "\n\ndata: [DONE]\n\n", RawType: "text/event-stream"},
		"escaped error":      {Status: 400, ErrorText: "\x01" + testKey},
		"no JSON":            {Raw: testKey, RawType: "application/json"},
		"comment":            {Raw: ": " + testKey + "\nevent: " + testKey + "\ndata: {\"choices\":[{\"delta\":{\"content\":\"x\"},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n", RawType: "text/event-stream"},
		"data of two lines":  {Raw: "data: {\"choices\":\ndata: [{\"delta\":{\"content\":\"" + testKey + "\"},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n", RawType: "text/event-stream"},
	} {
		for _, body := range []string{plainBody, streamBody} {
			double := openaitest.New(t, testKey, a)
			p := newProvider(t, double)
			l := newLedger(100_000)
			s := startSession(t, p.Broker, l, &doubleSpec)
			got := s.post(t.Context(), body)
			if got.err != nil {
				t.Errorf("%s: %v", name, got.err)
			}
			events, err := json.Marshal(s.events())
			if err != nil {
				t.Fatal(err)
			}
			texts := append(guestText(got.body), fmt.Sprint(got.header), string(events), p.log.String())
			if shows(texts...) {
				t.Errorf("%s, stream %v: the key is shown: %q", name, body == streamBody, texts)
			}
			s.stop()
			if err := l.check(); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}

// TestMostOfTheKey ends a stream just before the key is complete.
func TestMostOfTheKey(t *testing.T) {
	double := openaitest.New(t, testKey, openaitest.Answer{Text: "key: " + testKey[:len(testKey)-1], Piece: 1, Usage: &openaitest.Usage{Prompt: 10, Completion: 2}})
	l := newLedger(100_000)
	s := startSession(t, newProvider(t, double).Broker, l, &doubleSpec)
	if got := s.post(t.Context(), streamBody); shows(guestText(got.body)...) || !strings.Contains(got.body, "holds a credential") {
		t.Errorf("got %+v", got)
	}
}

// TestInnocentAnswersPass makes sure that answers which only begin like the key are not held back or changed.
func TestInnocentAnswersPass(t *testing.T) {
	text := "sk-test-0123 is how such keys begin; sk-test-0123456789 too. \\ \" \u2028 😀"
	double := openaitest.New(t, testKey, openaitest.Answer{Text: text, Piece: 1, Usage: &openaitest.Usage{Prompt: 10, Completion: 2}})
	l := newLedger(100_000)
	s := startSession(t, newProvider(t, double).Broker, l, &run.Spec{Model: "openai/double"})
	if got := guestText(s.post(t.Context(), streamBody).body)[1]; got != text {
		t.Errorf("got %q, want %q", got, text)
	}
}
