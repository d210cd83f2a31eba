package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/ephemeral-run/ephemeral/broker/openaitest"
)

// readFile and writeFile are a double of the machine's files.
func (m *machine) readFile(_ context.Context, path string, offset int64, limit int) (FilePart, error) {
	content, ok := m.files[path]
	if !ok {
		return FilePart{}, fmt.Errorf("open %s: no such file", path)
	}
	from := min(offset, int64(len(content)))
	to := min(from+int64(limit), int64(len(content)))
	return FilePart{Data: []byte(content[from:to]), Size: int64(len(content))}, nil
}

func (m *machine) writeFile(_ context.Context, path string, content []byte, add bool) error {
	if strings.HasPrefix(path, "/etc/") {
		return errors.New("permission denied")
	}
	if m.files == nil {
		m.files = map[string]string{}
	}
	if add {
		content = append([]byte(m.files[path]), content...)
	}
	m.files[path] = string(content)
	return nil
}

const someConnections = `{"connections": [
	{"name": "billing", "kind": "http", "description": "Invoices,\nread only", "methods": ["GET", "HEAD"], "paths": ["/v1/invoices/**"]},
	{"name": "warehouse", "kind": "postgres", "description": ""},
	{"name": "others", "kind": "http", "methods": ["GET"]},
	{"name": "pigeons", "kind": "avian"}]}`

// offered are the names of the tools in a request.
func offered(t *testing.T, r openaitest.Request) (names []string) {
	t.Helper()
	if r.Tools == nil {
		return nil
	}
	var tools []struct {
		Type     string
		Function struct {
			Name, Description string
			Parameters        struct {
				Type     string
				Required []string
			}
		}
	}
	if err := json.Unmarshal(r.Tools, &tools); err != nil {
		t.Fatal(err)
	}
	for _, tool := range tools {
		if f := tool.Function; tool.Type != "function" || f.Description == "" || f.Parameters.Type != "object" || len(f.Parameters.Required) == 0 {
			t.Errorf("tool %+v", tool)
		}
		names = append(names, tool.Function.Name)
	}
	return names
}

func TestToolsAreOfferedWhereTheRunAllowsThem(t *testing.T) {
	search := map[string]http.HandlerFunc{"GET /web/search": brokerSays(http.StatusMethodNotAllowed, "method_not_allowed", "POST")}
	lists := map[string]http.HandlerFunc{"GET /connections": brokerSays(http.StatusOK, "", someConnections)}
	for _, c := range []struct {
		name   string
		allow  Config
		routes map[string]http.HandlerFunc
		want   []string
		prompt []string
	}{
		{"nothing", Config{}, nil, nil, []string{"Shell: off.", "Files: off.", "Web: off.", "Connections: none.", "programs: off."}},
		{"shell", Config{Shell: true}, nil, []string{"shell", "read_file", "write_file"}, []string{"Shell: on.", "Files: on."}},
		{"files", Config{Files: true}, nil, []string{"read_file", "write_file"}, []string{"Shell: off.", "Files: on."}},
		{"web", Config{Web: true}, search, []string{"web_fetch", "web_search"}, []string{"Web: on.", "`web_search` finds them"}},
		{"web without search", Config{Web: true}, nil, []string{"web_fetch"}, []string{"gets pages."}},
		{"door", Config{Door: true}, nil, nil, []string{"programs: on, as an OpenAI-compatible API without a key at http://broker.local/v1"}},
		{"HTTP", Config{Connections: []string{"billing"}}, lists, []string{"connection_request"},
			[]string{"Connections: billing.\n  - `billing`: HTTP, for `connection_request`; methods GET, HEAD; paths /v1/invoices/**. Invoices, read only\n"}},
		{"database", Config{Connections: []string{"warehouse"}}, lists, []string{"sql_query"}, []string{"`warehouse`: a PostgreSQL database"}},
		{"both", Config{Connections: []string{"billing", "warehouse"}}, lists, []string{"connection_request", "sql_query"}, nil},
		{"a kind nobody knows", Config{Connections: []string{"pigeons"}}, lists, nil, []string{"Connections: pigeons.\n- "}},
		{"no list", Config{Connections: []string{"billing"}}, nil, nil, nil},
		{"a list that is none", Config{Connections: []string{"billing"}}, map[string]http.HandlerFunc{"GET /connections": brokerSays(http.StatusOK, "", "[")}, nil, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := &brokerDouble{provider: openaitest.New(t, "", openaitest.Answer{Text: "ok"}), routes: c.routes}
			cfg := b.start(t, &machine{})
			cfg.Shell, cfg.Files, cfg.Web, cfg.Door, cfg.Connections = c.allow.Shell, c.allow.Files, c.allow.Web, c.allow.Door, c.allow.Connections
			if got := runFast(t.Context(), cfg); !got.OK {
				t.Fatalf("%+v", got)
			}
			r := b.provider.Requests()[0]
			if d := cmp.Diff(c.want, offered(t, r)); d != "" {
				t.Error(d)
			}
			for _, want := range c.prompt {
				if !strings.Contains(r.Messages[0].Text(), want) {
					t.Errorf("no %q in:\n%s", want, r.Messages[0].Text())
				}
			}
		})
	}
}

// calls makes tool calls in one answer and returns their results.
func calls(t *testing.T, c func(b *brokerDouble) Config, b *brokerDouble, calls ...openaitest.ToolCall) []string {
	t.Helper()
	for i := range calls {
		calls[i].ID = fmt.Sprint("c", i)
	}
	b.provider = openaitest.New(t, "", openaitest.Answer{ToolCalls: calls, Piece: 100}, openaitest.Answer{Text: "done"})
	if got := runFast(t.Context(), c(b)); !got.OK || got.Output != "done" {
		t.Fatalf("%+v", got)
	}
	texts := results(b.provider.Requests()[1])
	for i := range texts {
		texts[i] = strings.TrimPrefix(texts[i], fmt.Sprintf("c%d: ", i))
		if !utf8.ValidString(texts[i]) || len(texts[i]) > maxResult+8<<10 {
			t.Errorf("result of %d bytes", len(texts[i]))
		}
	}
	return texts
}

func TestFileTools(t *testing.T) {
	m := &machine{files: map[string]string{"a.csv": "x,y\n1,ä\n", "odd": "a\x00\xffb", "empty": "", "long": strings.Repeat("é", 20_000)}}
	got := calls(t, func(b *brokerDouble) Config {
		c := b.start(t, m)
		c.Files = true
		return c
	}, &brokerDouble{},
		openaitest.ToolCall{Name: "read_file", Arguments: `{"path": "a.csv"}`},
		openaitest.ToolCall{Name: "read_file", Arguments: `{"path": "a.csv", "offset": 4, "limit": 3}`},
		openaitest.ToolCall{Name: "read_file", Arguments: `{"path": "a.csv", "offset": 7}`},
		openaitest.ToolCall{Name: "read_file", Arguments: `{"path": "odd"}`},
		openaitest.ToolCall{Name: "read_file", Arguments: `{"path": "empty"}`},
		openaitest.ToolCall{Name: "read_file", Arguments: `{"path": "nowhere"}`},
		openaitest.ToolCall{Name: "read_file", Arguments: `{"path": "long", "limit": 1000000}`},
		openaitest.ToolCall{Name: "read_file", Arguments: `{"path": "a.csv", "offset": -1}`},
		openaitest.ToolCall{Name: "read_file", Arguments: `{"path": "a.csv", "limit": "ten"}`},
		openaitest.ToolCall{Name: "read_file", Arguments: `{"path": "a\u0000b"}`},
		openaitest.ToolCall{Name: "read_file", Arguments: `{}`},
		openaitest.ToolCall{Name: "write_file", Arguments: `{"path": "new.txt", "content": "häß"}`},
		openaitest.ToolCall{Name: "write_file", Arguments: `{"path": "new.txt", "content": "!", "append": true}`},
		openaitest.ToolCall{Name: "write_file", Arguments: `{"path": "void", "content": ""}`},
		openaitest.ToolCall{Name: "write_file", Arguments: `{"path": "/etc/passwd", "content": "x"}`},
		openaitest.ToolCall{Name: "write_file", Arguments: `{"path": "new.txt"}`},
		openaitest.ToolCall{Name: "write_file", Arguments: `["new.txt"]`},
		openaitest.Shell("", "ls"),
	)
	want := []string{
		"bytes 0 to 8 of 9\nx,y\n1,ä\n", "bytes 4 to 5 of 9\n1,", "bytes 8 to 8 of 9\n\n", "bytes 0 to 3 of 4 (not all of it is text)\na\uFFFD\uFFFDb",
		"nothing from byte 0 of 0", "error: open nowhere: no such file", "", `error: "offset" must be a whole number that is not negative`,
		"error: the arguments are not", "error: a path cannot hold NUL bytes", `error: the arguments have no "path"`,
		"5 bytes written", "1 bytes written", "0 bytes written", "error: permission denied", `error: the arguments have no "content"`, "error: the arguments are not",
		`error: there is no tool "shell". The tools of this task: read_file, write_file.`,
	}
	for i := range want {
		if i != 6 && !strings.HasPrefix(got[i], want[i]) {
			t.Errorf("call %d: %.200q, want %q", i, got[i], want[i])
		}
	}
	if long := got[6]; !strings.HasPrefix(long, fmt.Sprintf("bytes 0 to %d of 40000\n", maxResult-1)) || strings.ContainsRune(long, utf8.RuneError) {
		t.Errorf("long: %.100q", long)
	}
	if m.files["new.txt"] != "häß!" || m.files["void"] != "" {
		t.Errorf("files %+v", m.files)
	}
}

func TestWebTools(t *testing.T) {
	b := &brokerDouble{routes: map[string]http.HandlerFunc{
		"GET /web/search":  brokerSays(http.StatusMethodNotAllowed, "method_not_allowed", "POST"),
		"POST /web/search": brokerSays(http.StatusOK, "", `{"query": "q", "results": [{"title": "T", "url": "https://a.example", "snippet": "S"}]}`),
		"POST /web/fetch":  brokerSays(http.StatusOK, "", `{"url": "https://b.example", "status": 404, "content_type": "text/html", "title": "Gone", "text": "`+strings.Repeat("ü", 30_000)+`", "bytes": 60000, "truncated": true}`),
	}}
	web := func(b *brokerDouble) Config {
		c := b.start(t, &machine{})
		c.Web = true
		return c
	}
	got := calls(t, web, b,
		openaitest.ToolCall{Name: "web_search", Arguments: `{"query": "q", "count": 500}`},
		openaitest.ToolCall{Name: "web_fetch", Arguments: `{"url": "https://b.example", "format": "raw"}`},
		openaitest.ToolCall{Name: "web_search", Arguments: `{"query": " "}`},
		openaitest.ToolCall{Name: "web_fetch", Arguments: `{}`},
	)
	if got[0] != "1. T\n   https://a.example\n   S\n" {
		t.Errorf("search %q", got[0])
	}
	if head := "status 404, text/html, 60000 bytes, https://b.example\ntitle: Gone\n(only the beginning was received)\nü"; !strings.HasPrefix(got[1], head) || !strings.Contains(got[1], "bytes left out") {
		t.Errorf("fetch %.200q", got[1])
	}
	if !strings.HasPrefix(got[2], "error: ") || !strings.HasPrefix(got[3], "error: ") {
		t.Errorf("%q", got[2:])
	}
	want := []asked{{"GET", "/web/search", "", nil}, {"POST", "/web/search", `{"count":20,"query":"q"}`, nil}, {"POST", "/web/fetch", `{"format":"raw","url":"https://b.example"}`, nil}}
	for i := range b.asked {
		b.asked[i].Header = nil
	}
	if d := cmp.Diff(want, b.asked); d != "" {
		t.Error(d)
	}
	for code, status := range map[string]int{"address_not_allowed": 403, "budget_exhausted": 402, "upstream_error": 502, "unavailable": 503} {
		b.routes["POST /web/fetch"] = brokerSays(status, code, "why")
		if got := calls(t, web, b, openaitest.ToolCall{Name: "web_fetch", Arguments: `{"url": "http://10.0.0.1"}`}); got[0] != "error: "+code+": why" {
			t.Errorf("%s: %q", code, got[0])
		}
	}
}

func TestConnectionTools(t *testing.T) {
	b := &brokerDouble{routes: map[string]http.HandlerFunc{
		"GET /connections": brokerSays(http.StatusOK, "", someConnections),
		"POST /connections/billing/v1/invoices/7": func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/plain")
			w.Header().Set("ETag", "e7")
			w.WriteHeader(http.StatusTeapot) // the upstream's
			_, _ = fmt.Fprintf(w, "%s %s", r.URL.RawQuery, r.Header.Get("Content-Type"))
		},
		"GET /connections/billing/binary": func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte{0xff, 0xfe, 0}) },
		"GET /connections/billing/secret": brokerSays(http.StatusForbidden, "path_not_allowed", "not that"),
		"POST /connections/warehouse/sql": brokerSays(http.StatusOK, "", `{"columns": [{"name": "id", "type": "int8"}], "rows": [[1], [null]], "row_count": 2, "truncated": true}`),
	}}
	got := calls(t, func(b *brokerDouble) Config {
		c := b.start(t, &machine{})
		c.Connections = []string{"billing", "warehouse"}
		return c
	}, b,
		openaitest.ToolCall{Name: "connection_request", Arguments: `{"connection": "billing", "method": "POST", "path": "/v1/invoices/7?a=b%20c", "headers": {"Content-Type": "text/x"}, "body": "hi"}`},
		openaitest.ToolCall{Name: "connection_request", Arguments: `{"connection": "billing", "path": "/binary"}`},
		openaitest.ToolCall{Name: "connection_request", Arguments: `{"connection": "billing", "path": "/secret"}`},
		openaitest.ToolCall{Name: "connection_request", Arguments: `{"connection": "warehouse", "path": "/"}`},
		openaitest.ToolCall{Name: "connection_request", Arguments: `{"connection": "others", "path": "/"}`},
		openaitest.ToolCall{Name: "connection_request", Arguments: `{"connection": "billing", "path": "//evil.example/x"}`},
		openaitest.ToolCall{Name: "connection_request", Arguments: `{"connection": "billing", "path": "v1"}`},
		openaitest.ToolCall{Name: "connection_request", Arguments: `{"connection": "billing", "path": "/x", "method": "G T"}`},
		openaitest.ToolCall{Name: "connection_request", Arguments: `{"connection": "billing", "path": "/x", "headers": {"A": "b\r\nc"}}`},
		openaitest.ToolCall{Name: "sql_query", Arguments: `{"connection": "warehouse", "sql": "select $1", "params": [1, null], "max_rows": 2}`},
		openaitest.ToolCall{Name: "sql_query", Arguments: `{"connection": "billing", "sql": "select 1"}`},
		openaitest.ToolCall{Name: "sql_query", Arguments: `{"connection": "warehouse", "sql": ""}`},
	)
	want := []string{
		"status 418\nContent-Type: text/plain\nETag: e7\n\na=b%20c text/x", "status 200\n", "error: path_not_allowed: not that",
		`error: there is no connection "warehouse" for this tool, only billing`, `error: there is no connection "others" for this tool`,
		"error: ", "error: ", "error: this is no request", "error: the request failed", "2 rows (there are more)\ncolumns: [{\"name\": \"id\", \"type\": \"int8\"}]\n[1]\n[null]\n",
		`error: there is no connection "billing" for this tool, only warehouse`, "error: want",
	}
	for i := range want {
		if !strings.HasPrefix(got[i], want[i]) {
			t.Errorf("call %d: %.200q, want %q", i, got[i], want[i])
		}
	}
	if !strings.HasSuffix(got[1], "(3 bytes that are no text)") {
		t.Errorf("binary %q", got[1])
	}
	for _, a := range b.asked {
		if strings.Contains(a.Path, "others") || strings.Contains(a.Path, "evil") {
			t.Errorf("asked %+v", a)
		}
	}
	if i := slices.IndexFunc(b.asked, func(a asked) bool { return strings.HasSuffix(a.Path, "/sql") }); b.asked[i].Body != `{"max_rows":2,"params":[1,null],"sql":"select $1"}` {
		t.Errorf("SQL %+v", b.asked[i])
	}
}

// TestPausesWhenCrowded: what the broker could not take is asked again, and given up in the end.
func TestPausesWhenCrowded(t *testing.T) {
	n := 0
	b := &brokerDouble{provider: openaitest.New(t, "", openaitest.Answer{ToolCalls: []openaitest.ToolCall{{ID: "a", Name: "web_fetch", Arguments: `{"url": "https://a.example"}`}}}, openaitest.Answer{Text: "ok"}),
		routes: map[string]http.HandlerFunc{"POST /web/fetch": func(w http.ResponseWriter, r *http.Request) {
			if n++; n < 3 {
				brokerSays(http.StatusTooManyRequests, "rate_limited", "wait")(w, r)
				return
			}
			brokerSays(http.StatusOK, "", `{"status": 200, "text": "there"}`)(w, r)
		}}}
	c := b.start(t, &machine{})
	c.Web = true
	if got := runFast(t.Context(), c); !got.OK || !strings.HasSuffix(results(b.provider.Requests()[1])[0], "there") {
		t.Errorf("%+v, %q", got, results(b.provider.Requests()[1]))
	}
}

// TestTimeRunsOut: before the deadline the model is asked for its final answer, and told why; a command is shortened for
// it. A model that does not answer in time is answered for.
func TestTimeRunsOut(t *testing.T) {
	shell := openaitest.Answer{Text: "Let me see.", ToolCalls: []openaitest.ToolCall{openaitest.Shell("a", "work")}}
	for _, c := range []struct {
		name    string
		answers func(n int) openaitest.Answer
		output  string
		asked   string // for the last time
	}{
		{"with an answer", func(n int) openaitest.Answer {
			if n == 0 {
				return shell
			}
			return openaitest.Answer{Text: "this far"}
		}, "this far", lastTime},
		{"without", func(int) openaitest.Answer { return shell }, "- $ work: exit code 137", lastTime},
		{"slow model", func(n int) openaitest.Answer {
			if n == 0 {
				return shell
			}
			return openaitest.Answer{Delay: time.Minute}
		}, "The last words of the model:\nLet me see.", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			double := openaitest.NewFunc(t, "", func(n int, _ *openaitest.Request) openaitest.Answer { return c.answers(n) })
			cfg := config(t, double, &machine{})
			cfg.Deadline = time.Now().Add(2 * time.Second)
			var limits []time.Duration
			cfg.Exec = func(ctx context.Context, command Command) Output {
				limits = append(limits, command.Timeout)
				select {
				case <-time.After(command.Timeout):
				case <-ctx.Done():
				}
				return Output{Outcome: "timed_out", ExitCode: 137}
			}
			got := runFast(t.Context(), cfg)
			if got.OK || got.ErrorCode != CodeTime || !strings.Contains(got.Output, c.output) {
				t.Errorf("%+v", got)
			}
			if len(limits) == 0 || limits[0] > 1600*time.Millisecond || limits[0] < time.Second {
				t.Errorf("time limits of commands %v", limits)
			}
			requests := double.Requests()
			last := requests[len(requests)-1]
			if c.asked != "" && last.Messages[len(last.Messages)-1].Text() != c.asked {
				t.Errorf("last request %s", last.Body)
			}
		})
	}
}

// TestConcluded: whoever ends the work from outside says why, and gets what was done.
func TestConcluded(t *testing.T) {
	for _, code := range []string{CodeBudget, CodeTime} {
		double := openaitest.New(t, "", openaitest.Answer{ToolCalls: []openaitest.ToolCall{openaitest.Shell("a", "work")}})
		c := config(t, double, &machine{})
		ctx, end := context.WithCancelCause(t.Context())
		c.Exec = func(ctx context.Context, _ Command) Output {
			end(&EndError{code})
			<-ctx.Done()
			return Output{Outcome: "killed", ExitCode: 137}
		}
		if got := Run(ctx, c); got.OK || got.ErrorCode != code || !strings.Contains(got.Output, "- $ work: exit code 137 (killed)") {
			t.Errorf("%+v", got)
		}
	}
}

func TestDescribe(t *testing.T) {
	for want, o := range map[string]Output{
		"exit code 0":          {Outcome: "exited"},
		"exit code 9 (killed)": {Outcome: "killed", ExitCode: 9},
		"exit code 137 (out of memory: the limit is 1000 bytes)":                       {Outcome: "out_of_memory", ExitCode: 137, MemoryLimit: 1000},
		"exit code 0 (out of memory: the limit is 1000 bytes)":                         {Outcome: "exited", MemoryLimit: 1000},
		"exit code 1 (no space left on /tmp, /)":                                       {Outcome: "exited", ExitCode: 1, FullMounts: []string{"/tmp", "/"}},
		"exit code 127 (not found) (no such directory)":                                {Outcome: "not_found", ExitCode: 127, Detail: "no such\ndirectory"},
		"exit code 0 (the first 2 of 9 bytes of output were kept)":                     {Output: []byte("ab"), Bytes: 9, Truncated: true},
		"exit code 137 (ended after its time limit of 1s) (no space left on /dev/shm)": {Outcome: "timed_out", ExitCode: 137, FullMounts: []string{"/dev/shm"}},
	} {
		if got := describe(o, time.Second); got != want {
			t.Errorf("%+v: %q, want %q", o, got, want)
		}
	}
}
