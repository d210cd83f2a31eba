package worker

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/ephemeral-run/ephemeral/broker/openaitest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// machine is a double of what runs commands: it answers with what is written for the command, and keeps what was asked.
type machine struct {
	out      map[string]Output
	files    map[string]string
	commands []string
	timeouts []time.Duration
}

func (m *machine) exec(_ context.Context, c Command) Output {
	command := c.Text
	m.commands = append(m.commands, command)
	m.timeouts = append(m.timeouts, c.Timeout)
	if o, ok := m.out[command]; ok {
		return o
	}
	text := "ran " + command + "\n"
	return Output{Outcome: "exited", Output: []byte(text), Bytes: int64(len(text))}
}

// config is a piece of work whose broker is the double.
func config(t testing.TB, double *openaitest.Server, m *machine) Config {
	address := strings.TrimSuffix(strings.TrimPrefix(double.BaseURL, "http://"), "/v1")
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", address)
	}}
	t.Cleanup(transport.CloseIdleConnections)
	return Config{Prompt: "do it", Model: "openai/double", Shell: true, HTTP: &http.Client{Transport: transport}, Exec: m.exec}
}

func results(r openaitest.Request) (texts []string) {
	for _, m := range r.Messages {
		if m.Role == "tool" {
			texts = append(texts, m.ToolCallID+": "+m.Text())
		}
	}
	return texts
}

func TestLoop(t *testing.T) {
	double := openaitest.New(t, "",
		openaitest.Answer{Text: "I look.", ToolCalls: []openaitest.ToolCall{openaitest.Shell("a", "pwd; whoami"), openaitest.Shell("b", "echo 'häß' && ls")}, Piece: 1},
		openaitest.Answer{ToolCalls: []openaitest.ToolCall{{ID: "c", Name: "shell", Arguments: `{"command":"sleep 9","timeout_seconds":2}`}}},
		openaitest.Answer{Text: "All done: ä.", Piece: 1},
	)
	m := &machine{out: map[string]Output{
		"sleep 9": {Outcome: "timed_out", ExitCode: 137, Output: []byte("partial"), Bytes: 7},
	}}
	got := Run(t.Context(), config(t, double, m))
	if d := cmp.Diff(Result{OK: true, Output: "All done: ä."}, got); d != "" {
		t.Fatal(d)
	}
	if d := cmp.Diff([]string{"pwd; whoami", "echo 'häß' && ls", "sleep 9"}, m.commands); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff([]time.Duration{time.Minute, time.Minute, 2 * time.Second}, m.timeouts); d != "" {
		t.Error(d)
	}
	requests := double.Requests()
	want := []string{"a: exit code 0\nran pwd; whoami\n", "b: exit code 0\nran echo 'häß' && ls\n", "c: exit code 137 (ended after its time limit of 2s)\npartial"}
	if d := cmp.Diff(want, results(requests[2])); d != "" {
		t.Error(d)
	}
	first := requests[0]
	if !first.Stream || !first.StreamOptions.IncludeUsage || first.Model != "openai/double" || !strings.Contains(string(first.Tools), `"shell"`) {
		t.Errorf("request %s", first.Body)
	}
	roles := ""
	for _, m := range requests[2].Messages {
		roles += m.Role + " "
	}
	if roles != "system user assistant tool tool assistant tool " {
		t.Errorf("roles %s", roles)
	}
	if a := requests[1].Messages[2]; a.Text() != "I look." || len(a.ToolCalls) != 2 || a.ToolCalls[1].Function.Arguments != `{"command":"echo 'häß' \u0026\u0026 ls"}` && a.ToolCalls[1].Function.Arguments != `{"command":"echo 'häß' && ls"}` {
		t.Errorf("assistant message %+v", a)
	}
}

func TestSystemPromptStatesThePermissions(t *testing.T) {
	for _, c := range []struct {
		c    Config
		want []string
	}{
		{Config{Shell: true, MaxSteps: 7}, []string{"Shell: on.", "Web: off.", "Connections: none.", "limit of 7 model calls"}},
		{Config{Web: true, Connections: []string{"billing", "crm"}, MaxSteps: 9}, []string{"Shell: off.", "Web: on.", "Connections: billing, crm."}},
	} {
		got := permissions(c.c, &permits{shell: c.c.Shell, files: c.c.Shell, web: c.c.Web})
		for _, w := range c.want {
			if !strings.Contains(got, w) {
				t.Errorf("no %q in:\n%s", w, got)
			}
		}
		if strings.Contains(got, "{{") {
			t.Errorf("not filled in:\n%s", got)
		}
	}
}

func TestWithoutShellThereIsNoTool(t *testing.T) {
	double := openaitest.New(t, "", openaitest.Answer{ToolCalls: []openaitest.ToolCall{openaitest.Shell("a", "ls")}}, openaitest.Answer{Text: "no"})
	m := &machine{}
	c := config(t, double, m)
	c.Shell = false
	if got := Run(t.Context(), c); !got.OK || got.Output != "no" || len(m.commands) != 0 {
		t.Errorf("%+v, commands %q", got, m.commands)
	}
	r := double.Requests()
	if r[0].Tools != nil || !strings.Contains(results(r[1])[0], "no tools in this task") {
		t.Errorf("tools %s, results %q", r[0].Tools, results(r[1]))
	}
}

func TestOddToolCallsAreAnswered(t *testing.T) {
	calls := []openaitest.ToolCall{
		{ID: "1", Name: "shell", Arguments: `{"command": "ls`},
		{ID: "2", Name: "shell", Arguments: `[]`},
		{ID: "3", Name: "shell", Arguments: `{"command": 7}`},
		{ID: "4", Name: "shell", Arguments: `{}`},
		{ID: "5", Name: "shell", Arguments: `{"command": "  "}`},
		{ID: "6", Name: "shell", Arguments: `{"command": "a\u0000b"}`},
		{ID: "7", Name: "shell", Arguments: `{"command": "ls", "timeout_seconds": -1}`},
		{ID: "8", Name: "python", Arguments: `{}`},
		{ID: "9", Name: "", Arguments: ``},
		{ID: "10", Name: "shell", Arguments: ``},
		{ID: "11", Name: "rm -rf /\x00é", Arguments: `{}`},
		{ID: "12", Name: "shell", Arguments: `{"command": "ok", "timeout_seconds": "1e9"}`},
		{ID: "12", Name: "shell", Arguments: `{"command": "same id"}`},
		{ID: "", Name: "shell", Arguments: `{"command": "no id"}`},
	}
	double := openaitest.New(t, "", openaitest.Answer{ToolCalls: calls, Piece: 100}, openaitest.Answer{Text: "ok"})
	m := &machine{}
	if got := Run(t.Context(), config(t, double, m)); !got.OK {
		t.Fatalf("%+v", got)
	}
	if d := cmp.Diff([]string{"ok", "same id", "no id"}, m.commands); d != "" {
		t.Error(d)
	}
	if m.timeouts[0] != maxTimeout {
		t.Errorf("timeout %v", m.timeouts[0])
	}
	r := double.Requests()[1]
	got := results(r)
	if len(got) != len(calls) {
		t.Fatalf("%d results: %q", len(got), got)
	}
	for i, text := range got[:11] {
		if !strings.Contains(text, "error: ") {
			t.Errorf("call %d: %s", i+1, text)
		}
	}
	ids := map[string]bool{}
	for i, c := range r.Messages[2].ToolCalls {
		if c.ID == "" || ids[c.ID] || !strings.HasPrefix(got[i], c.ID+": ") {
			t.Errorf("id %q is empty, used twice or not that of its result %q", c.ID, got[i])
		}
		ids[c.ID] = true
		if !isObject(c.Function.Arguments) || !isName(c.Function.Name) {
			t.Errorf("a provider could not read back %q with %q", c.Function.Name, c.Function.Arguments)
		}
	}
}

func TestLimitsAndFailures(t *testing.T) {
	tool := openaitest.Answer{Text: "Let me see.", ToolCalls: []openaitest.ToolCall{openaitest.Shell("a", "ls -l")}}
	for _, c := range []struct {
		name    string
		answers []openaitest.Answer
		steps   int
		want    Result // Output and ErrorDetail are parts
		asked   int
	}{
		{"budget", []openaitest.Answer{tool, {Status: 402, ErrorCode: "budget_exhausted", ErrorText: "no money left"}}, 0,
			Result{false, "Let me see.", CodeBudget, "no money left"}, 2},
		{"budget at once", []openaitest.Answer{{Status: 402, ErrorCode: "budget_exhausted", ErrorText: "no money left"}}, 0,
			Result{false, "Nothing was done.", CodeBudget, "no money left"}, 1},
		{"model error", []openaitest.Answer{tool, {Status: 502, ErrorCode: "model_error", ErrorText: "status 500"}}, 0,
			Result{false, "- $ ls -l: exit code 0", CodeModel, "status 500"}, 2},
		{"run ended", []openaitest.Answer{{Status: 410, ErrorCode: "run_ended", ErrorText: "the run has ended"}}, 0,
			Result{false, "the run has ended", CodeWorker, "the run has ended"}, 1},
		{"answer without a document", []openaitest.Answer{{Raw: "<html>", RawType: "text/html"}}, 0,
			Result{false, "Nothing was done", CodeModel, "broke off"}, tries},
		{"unavailable, then fine", []openaitest.Answer{{Status: 503, ErrorCode: "unavailable", RetryAfter: "1"}, {Text: "fine"}}, 0,
			Result{true, "fine", "", ""}, 2},
		{"crowded, then fine", []openaitest.Answer{{Status: 429, ErrorCode: "too_many_requests"}, {Text: "fine"}}, 0,
			Result{true, "fine", "", ""}, 2},
		{"call limit", []openaitest.Answer{{Status: 429, ErrorCode: "call_limit", ErrorText: "1000 calls"}}, 0,
			Result{false, "", CodeModel, "1000 calls"}, 1},
		{"broken, then fine", []openaitest.Answer{{Text: "half an answer", CutAfter: 400}, {Text: "fine"}}, 0,
			Result{true, "fine", "", ""}, 2},
		{"error in the stream, then fine", []openaitest.Answer{{Text: "half", ErrorCode: "model_error", ErrorText: "x"}, {Text: "fine"}}, 0,
			Result{true, "fine", "", ""}, 2},
		{"always broken", []openaitest.Answer{{Text: "half", ErrorCode: "model_error", ErrorText: "it broke"}}, 0,
			Result{false, "", CodeModel, "it broke"}, tries},
		{"steps", []openaitest.Answer{tool}, 3,
			Result{false, "Tool calls made: 2", CodeSteps, "within 3 model calls"}, 3},
		{"steps, with an answer", []openaitest.Answer{tool, tool, {Text: "this far"}}, 3,
			Result{false, "this far", CodeSteps, "within 3 model calls"}, 3},
		{"one step", []openaitest.Answer{{Text: "at once"}}, 1, Result{true, "at once", "", ""}, 1},
		{"empty, then fine", []openaitest.Answer{{}, {Text: "fine"}}, 0, Result{true, "fine", "", ""}, 2},
		{"always empty", []openaitest.Answer{{}}, 0, Result{false, "Nothing was done", CodeModel, "empty answers"}, 2},
		{"cut off", []openaitest.Answer{{Text: "a long", Finish: "length"}}, 0, Result{true, "a long" + cutAnswer, "", ""}, 1},
		{"refusal of the request", []openaitest.Answer{{Status: 400, ErrorCode: "invalid_request", ErrorText: "no"}}, 0, Result{false, "", CodeModel, "no"}, 1},
		{"too long even for nothing", []openaitest.Answer{{Status: 400, ErrorCode: "context_length_exceeded", ErrorText: "too long"}}, 0, Result{false, "", CodeModel, "too long"}, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			double := openaitest.New(t, "", c.answers...)
			cfg := config(t, double, &machine{})
			cfg.MaxSteps = c.steps
			got := runFast(t.Context(), cfg)
			if got.OK != c.want.OK || got.ErrorCode != c.want.ErrorCode || !strings.Contains(got.Output, c.want.Output) || !strings.Contains(got.ErrorDetail, c.want.ErrorDetail) || got.Output == "" {
				t.Errorf("%+v, want %+v", got, c.want)
			}
			if n := len(double.Requests()); n != c.asked {
				t.Errorf("asked %d times, want %d", n, c.asked)
			}
		})
	}
}

// runFast is Run without the pauses between tries.
func runFast(ctx context.Context, c Config) Result {
	if c.MaxSteps == 0 {
		c.MaxSteps = DefaultSteps
	}
	return newWorker(c, func(ctx context.Context, _ time.Duration) error { return ctx.Err() }).run(ctx)
}

func TestNoBroker(t *testing.T) {
	double := openaitest.New(t, "")
	c := config(t, double, &machine{})
	double.Close()
	if got := runFast(t.Context(), c); got.OK || got.ErrorCode != CodeModel || got.Output == "" {
		t.Errorf("%+v", got)
	}
}

func TestTimeEnds(t *testing.T) {
	for name, answer := range map[string]openaitest.Answer{
		"while the model thinks": {Delay: time.Minute},
		"while the model writes": {Text: "a long story", Pause: time.Minute},
		"while a command runs":   {ToolCalls: []openaitest.ToolCall{openaitest.Shell("a", "slow"), openaitest.Shell("b", "never")}},
	} {
		t.Run(name, func(t *testing.T) {
			double := openaitest.New(t, "", answer)
			c := config(t, double, &machine{})
			var commands []string
			c.Exec = func(ctx context.Context, command Command) Output {
				commands = append(commands, command.Text)
				<-ctx.Done()
				return Output{Outcome: "killed", ExitCode: 137}
			}
			ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
			defer cancel()
			got := Run(ctx, c)
			if got.OK || got.ErrorCode != CodeWorker || got.Output == "" || !strings.Contains(got.ErrorDetail, "ended from outside") {
				t.Errorf("%+v", got)
			}
			if name == "while a command runs" && (len(commands) != 1 || !strings.Contains(got.Output, "- $ slow: exit code 137 (killed)")) {
				t.Errorf("commands %q, output %s", commands, got.Output)
			}
		})
	}
}

func TestPanicIsAnError(t *testing.T) {
	double := openaitest.New(t, "", openaitest.Answer{ToolCalls: []openaitest.ToolCall{openaitest.Shell("a", "x")}})
	c := config(t, double, &machine{})
	c.Exec = func(context.Context, Command) Output { panic("boom") }
	if got := Run(t.Context(), c); got.OK || got.ErrorCode != CodeWorker || got.Output == "" {
		t.Errorf("%+v", got)
	}
}

func TestOutputIsBoundedForTheModel(t *testing.T) {
	long := strings.Repeat("äöü😀", 40_000)
	double := openaitest.New(t, "",
		openaitest.Answer{ToolCalls: []openaitest.ToolCall{openaitest.Shell("a", "long"), openaitest.Shell("b", "odd"), openaitest.Shell("c", "kept")}},
		openaitest.Answer{Text: strings.Repeat("é", 200_000), Piece: 4000})
	m := &machine{out: map[string]Output{
		"long": {Outcome: "exited", Output: []byte(long), Bytes: int64(len(long))},
		"odd":  {Outcome: "out_of_memory", ExitCode: 137, Output: []byte("a\xff\x00\xc3"), Bytes: 4},
		"kept": {Outcome: "exited", Output: []byte("xy"), Bytes: 1 << 30, Truncated: true},
	}}
	got := Run(t.Context(), config(t, double, m))
	if !got.OK || len(got.Output) > maxFinal || !utf8.ValidString(got.Output) || !strings.Contains(got.Output, "bytes left out") {
		t.Errorf("final answer of %d bytes, %v", len(got.Output), got.OK)
	}
	texts := results(double.Requests()[1])
	if n := len(texts[0]); n > maxResult+100 || n < maxResult-200 || strings.ContainsRune(texts[0], utf8.RuneError) || !strings.HasPrefix(texts[0], "a: exit code 0\näöü") || !strings.HasSuffix(texts[0], "ü😀") || !strings.Contains(texts[0], "bytes left out") {
		t.Errorf("long result of %d bytes: %.100q", n, texts[0])
	}
	if texts[1] != "b: exit code 137 (out of memory)\na\uFFFD\uFFFD\uFFFD" && texts[1] != "b: exit code 137 (out of memory)\na\uFFFD\uFFFD" {
		t.Errorf("odd result %q", texts[1])
	}
	if texts[2] != "c: exit code 0 (the first 2 of 1073741824 bytes of output were kept)\nxy" {
		t.Errorf("cut result %q", texts[2])
	}
}

func TestAModelThatTakesLittle(t *testing.T) {
	const most = 40 << 10
	double := openaitest.NewFunc(t, "", func(n int, r *openaitest.Request) openaitest.Answer {
		rounds := 0
		for _, m := range r.Messages {
			if m.Role == "assistant" {
				rounds++
			}
		}
		switch {
		case len(r.Body) > most:
			return openaitest.Answer{Status: 400, ErrorCode: "context_length_exceeded", ErrorText: "too long"}
		case n > 60:
			return openaitest.Answer{Text: fmt.Sprintf("after %d", rounds)}
		}
		return openaitest.Answer{ToolCalls: []openaitest.ToolCall{openaitest.Shell(fmt.Sprint("call", n), "long")}}
	})
	long := strings.Repeat("x", 15<<10)
	c := config(t, double, &machine{out: map[string]Output{"long": {Output: []byte(long), Bytes: int64(len(long))}}})
	c.MaxSteps = 100
	if got := Run(t.Context(), c); !got.OK || !strings.HasPrefix(got.Output, "after ") {
		t.Errorf("%+v", got)
	}
	last := double.Requests()
	var doc json.RawMessage
	if err := json.Unmarshal(last[len(last)-1].Body, &doc); err != nil || !strings.Contains(string(doc), "bytes left out") {
		t.Errorf("nothing was shortened: %v", err)
	}
}
