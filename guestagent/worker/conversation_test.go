package worker

import (
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/iotest"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// TestShorten shortens conversations of any form: they stay whole for a provider (every result belongs to a call that is
// there, every call has its result), keep the prompt and the latest round, and are below the limit unless those are not.
func TestShorten(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := newConversation(Config{Prompt: "the prompt", Shell: true, MaxSteps: 5}, &permits{shell: true}, nil)
		base := c.size
		text := func(name string, most int) string {
			return strings.Repeat("ä", rapid.IntRange(0, most).Draw(t, name))
		}
		latest := 0
		for range rapid.IntRange(0, 12).Draw(t, "rounds") {
			a := &answer{text: text("text", 300)}
			for range rapid.IntRange(1, 3).Draw(t, "calls") {
				a.calls = append(a.calls, call{name: "shell", arguments: `{"command":"` + text("command", 500) + `"}`})
			}
			before := c.size
			c.addAssistant(a)
			for _, k := range a.calls {
				c.addResult(k.id, text("result", 6000))
			}
			latest = c.size - before
			if rapid.IntRange(0, 5).Draw(t, "user") == 0 {
				c.addUser(noAnswer)
			}
		}
		limit := rapid.IntRange(1000, 60_000).Draw(t, "limit")
		c.shorten(limit)
		size, open, prompt := 0, map[string]bool{}, false
		for _, m := range c.messages {
			size += m.size()
			prompt = prompt || m.Content != nil && *m.Content == "the prompt"
			switch m.Role {
			case "assistant":
				if len(open) > 0 {
					t.Fatalf("calls without results: %v", open)
				}
				for _, k := range m.ToolCalls {
					open[k.ID] = true
				}
			case "tool":
				if !open[m.ToolCallID] {
					t.Fatalf("a result of %s without its call", m.ToolCallID)
				}
				delete(open, m.ToolCallID)
			}
			if m.Content != nil && !utf8.ValidString(*m.Content) {
				t.Fatalf("a character was cut: %q", *m.Content)
			}
		}
		if len(open) > 0 || !prompt || size != c.size {
			t.Fatalf("calls without results %v, prompt there %v, size %d counted as %d", open, prompt, size, c.size)
		}
		if c.size > limit && c.size > base+latest+12*256 {
			t.Fatalf("size %d above the limit %d; prompt and latest round are %d", c.size, limit, base+latest)
		}
	})
}

func TestBound(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := rapid.String().Draw(t, "s") + strings.Repeat(rapid.SampledFrom([]string{"a", "é", "😀"}).Draw(t, "c"), rapid.IntRange(0, 400).Draw(t, "n"))
		limit := rapid.IntRange(100, 1000).Draw(t, "limit")
		got := bound(s, limit)
		if len(s) <= limit && got != s || len(got) > limit || utf8.ValidString(s) && !utf8.ValidString(got) {
			t.Fatalf("%q bounded to %d: %q", s, limit, got)
		}
		if head, rest, cut := strings.Cut(got, "\n[... "); cut {
			var n int
			if _, err := fmt.Sscanf(rest, "%d", &n); err != nil {
				t.Fatal(err)
			}
			_, tail, _ := strings.Cut(rest, "...]\n")
			if !strings.HasPrefix(s, head) || !strings.HasSuffix(s, tail) || len(head)+n+len(tail) != len(s) {
				t.Fatalf("%q is not what is left of %q", got, s)
			}
		}
	})
}

const delta = `data: {"choices":[{"index":0,"delta":%s,"finish_reason":%s}]}` + "\n\n"

func TestReadStream(t *testing.T) {
	d := func(parts ...string) string {
		var b strings.Builder
		for i, p := range parts {
			finish := "null"
			if i == len(parts)-1 {
				finish = `"stop"`
			}
			fmt.Fprintf(&b, delta, p, finish)
		}
		return b.String()
	}
	for _, c := range []struct {
		name, in string
		want     *answer
	}{
		{"text", d(`{"content":"a"}`, `{"content":"b"}`, `{}`) + "data: [DONE]\n\n", &answer{text: "ab"}},
		{"no end mark", d(`{"content":"a"}`), &answer{text: "a"}},
		{"CRLF and comments", ": hi\r\n\r\n" + strings.ReplaceAll(d(`{"content":"a"}`), "\n", "\r\n"), &answer{text: "a"}},
		{"refusal", d(`{"content":null,"refusal":"no"}`), &answer{text: "no"}},
		{"interleaved calls", d(`{"tool_calls":[{"index":1,"id":"y","function":{"name":"g","arguments":""}}]}`, `{"tool_calls":[{"index":0,"id":"x","function":{"name":"f","arguments":"{"}},{"index":1,"function":{"arguments":"[1"}}]}`, `{"tool_calls":[{"index":0,"function":{"arguments":"}"}},{"index":1,"function":{"arguments":"]"}}]}`),
			&answer{calls: []call{{"y", "g", "[1]"}, {"x", "f", "{}"}}}},
		{"all calls numbered 0", d(`{"tool_calls":[{"index":0,"id":"x","function":{"name":"f","arguments":"{}"}},{"index":0,"id":"y","function":{"name":"f","arguments":"{}"}}]}`),
			&answer{calls: []call{{"x", "f", "{}"}, {"y", "f", "{}"}}}},
		{"negative index", d(`{"tool_calls":[{"index":-3,"id":"x","function":{"name":"f"}}]}`), &answer{calls: []call{{"x", "f", ""}}}},
		{"usage behind", d(`{"content":"a"}`) + `data: {"choices":[],"usage":{}}` + "\n\ndata: [DONE]\n\n", &answer{text: "a"}},
		{"empty", "", nil},
		{"only the end mark", "data: [DONE]\n\n", nil},
		{"cut", d(`{"content":"a"}`)[:30], nil},
		{"no end", fmt.Sprintf(delta, `{"content":"a"}`, "null"), nil},
		{"error", `data: {"error":{"message":"x"}}` + "\n\n", nil},
		{"long line", "data: " + strings.Repeat("x", maxLine+1), nil},
		{"long text", strings.Repeat(fmt.Sprintf(delta, `{"content":"`+strings.Repeat("x", 1<<19)+`"}`, "null"), 3), nil},
		{"many calls", d(manyCalls()), nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, r := range []io.Reader{strings.NewReader(c.in), iotest.HalfReader(strings.NewReader(c.in))} {
				got, err := readStream(r)
				if (err == nil) != (c.want != nil) {
					t.Fatalf("got %+v, error %v", got, err)
				}
				if d := cmp.Diff(c.want, got, cmp.AllowUnexported(answer{}, call{})); c.want != nil && d != "" {
					t.Error(d)
				}
			}
		})
	}
}

func manyCalls() string {
	var b strings.Builder
	for i := range maxCalls + 1 {
		fmt.Fprintf(&b, `,{"index":%d,"id":"c%d","function":{"name":"f"}}`, i, i)
	}
	return `{"tool_calls":[` + b.String()[1:] + `]}`
}

func FuzzReadStream(f *testing.F) {
	f.Add([]byte(fmt.Sprintf(delta, `{"content":"a","tool_calls":[{"index":0,"id":"x","function":{"name":"f","arguments":"{}"}}]}`, `"stop"`) + "data: [DONE]\n\n"))
	f.Add([]byte("data: {}\n\ndata: null\n\ndata: {\"error\":null}\n"))
	f.Fuzz(func(t *testing.T, in []byte) {
		a, err := readStream(strings.NewReader(string(in)))
		if err == nil && (len(a.text) > maxText || len(a.calls) > maxCalls) || err != nil && a != nil {
			t.Fatalf("%+v %v", a, err)
		}
	})
}
