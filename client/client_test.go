package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/ephemeral-run/ephemeral/run"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const testID = run.ID("run_00000000000000000000000000000001")

// fatal is what testing.T and rapid.T share.
type fatal interface {
	Helper()
	Fatal(...any)
	Cleanup(func())
}

// against makes a client of a server with the handler.
func against(t fatal, h http.HandlerFunc, o ...Option) *Client {
	t.Helper()
	s := httptest.NewServer(h)
	transport := &http.Transport{}
	t.Cleanup(func() {
		transport.CloseIdleConnections()
		s.Close()
	})
	c, err := New(s.URL+"/", "eph_test", append([]Option{WithTransport(transport)}, o...)...)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func refuse(w http.ResponseWriter, status int, code string) {
	w.Header().Set("Content-Type", "application/problem+json")
	w.WriteHeader(status)
	fmt.Fprintf(w, `{"status":%d,"code":%q,"detail":"No.","errors":[{"field":"a","detail":"is bad"}],"request_id":"r1"}`, status, code)
}

func TestNewRefusesBadInput(t *testing.T) {
	for _, u := range []string{"", "localhost:8080", "ftp://x", "http://", "http://u:p@x", "http://x?a=b", "://"} {
		if _, err := New(u, "eph_x"); err == nil {
			t.Errorf("%q was taken", u)
		}
	}
	if _, err := New("http://x", "eph_x\r\nX: y"); err == nil {
		t.Error("a key with a line break was taken")
	}
}

func TestCreateRunKeepsItsKey(t *testing.T) {
	var mu sync.Mutex
	var keys, bodies []string
	n := 0
	c := against(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		mu.Lock()
		defer mu.Unlock()
		keys, bodies = append(keys, r.Header.Get("Idempotency-Key")), append(bodies, string(body))
		n++
		switch n {
		case 1: // the answer is lost
			panic(http.ErrAbortHandler)
		case 2:
			refuse(w, 503, "unavailable")
		case 3: // cut in the middle
			w.Header().Set("Content-Length", "100")
			fmt.Fprint(w, `{"id":`)
		case 4:
			w.WriteHeader(502)
		default:
			if r.Method != "POST" || r.URL.Path != "/v1/runs" || r.Header.Get("Authorization") != "Bearer eph_test" || r.Header.Get("Prefer") != "wait=2" {
				t.Errorf("%s %s %v", r.Method, r.URL, r.Header)
			}
			w.Header().Set("Idempotency-Replayed", "true")
			w.WriteHeader(202)
			fmt.Fprintf(w, `{"id":%q,"state":"queued"}`, testID)
		}
	})
	got, err := c.CreateRun(t.Context(), Request{Command: "true"}, CreateOptions{Wait: 1500 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	if got.Run.ID != testID || !got.Replayed || len(got.IdempotencyKey) < 20 {
		t.Errorf("%+v", got)
	}
	for i := range keys {
		if keys[i] != `"`+got.IdempotencyKey+`"` || bodies[i] != `{"command":"true"}` {
			t.Errorf("attempt %d: key %s, body %s", i, keys[i], bodies[i])
		}
	}
	if n != 5 {
		t.Errorf("%d attempts", n)
	}
	first := got.IdempotencyKey
	if got, err = c.CreateRun(t.Context(), Request{Command: "true"}, CreateOptions{Wait: 1500 * time.Millisecond}); err != nil || got.IdempotencyKey == first {
		t.Errorf("two runs with one key: %v", err)
	}
}

func TestProblems(t *testing.T) {
	tests := map[string]struct {
		answer func(w http.ResponseWriter)
		want   Problem
		text   string
	}{
		"of the server": {func(w http.ResponseWriter) { refuse(w, 402, "insufficient_funds") },
			Problem{Status: 402, Code: "insufficient_funds", Detail: "No.", Errors: []FieldError{{"a", "is bad"}}, RequestID: "r1"},
			"insufficient_funds: No. a is bad (request r1)"},
		"of a proxy": {func(w http.ResponseWriter) { w.WriteHeader(403); fmt.Fprint(w, "<html>") },
			Problem{Status: 403, Title: "Forbidden", Detail: "the server answered 403 Forbidden"}, "the server answered 403 Forbidden"},
		"redirect": {func(w http.ResponseWriter) { w.Header().Set("Location", "http://192.0.2.1/"); w.WriteHeader(307) },
			Problem{Status: 307, Title: "Temporary Redirect", Detail: "the server answered 307 Temporary Redirect"}, "the server answered 307 Temporary Redirect"},
		"endless": {func(w http.ResponseWriter) {
			w.Header().Set("Content-Type", "application/problem+json")
			w.WriteHeader(400)
			_, _ = w.Write(bytes.Repeat([]byte(" "), 1<<20))
		}, Problem{Status: 400, Title: "Bad Request", Detail: "the server answered 400 Bad Request"}, "the server answered 400 Bad Request"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			var n atomic.Int64
			c := against(t, func(w http.ResponseWriter, _ *http.Request) { n.Add(1); tt.answer(w) })
			_, err := c.Run(t.Context(), testID)
			var p *Problem
			if !errors.As(err, &p) {
				t.Fatal(err)
			}
			if d := cmp.Diff(tt.want, *p); d != "" {
				t.Error(d)
			}
			if !strings.HasSuffix(err.Error(), tt.text) || n.Load() != 1 {
				t.Errorf("%d attempts, %q", n.Load(), err)
			}
		})
	}
}

func TestRetryHonoursRetryAfter(t *testing.T) {
	var n atomic.Int64
	c := against(t, func(w http.ResponseWriter, _ *http.Request) {
		if n.Add(1) == 1 {
			w.Header().Set("Retry-After", "1")
			refuse(w, 429, "queue_full")
			return
		}
		fmt.Fprint(w, `{"org":"o"}`)
	})
	start := time.Now()
	if a, err := c.Account(t.Context()); err != nil || a.Org != "o" {
		t.Fatal(a, err)
	}
	if d := time.Since(start); d < time.Second || n.Load() != 2 {
		t.Errorf("%d attempts in %v", n.Load(), d)
	}
}

func TestRetryEnds(t *testing.T) {
	var n atomic.Int64
	unavailable := func(w http.ResponseWriter, _ *http.Request) { n.Add(1); refuse(w, 503, "unavailable") }
	start := time.Now()
	var p *Problem
	if _, err := against(t, unavailable, WithMaxOutage(300*time.Millisecond)).Account(t.Context()); !errors.As(err, &p) || p.Status != 503 {
		t.Error(err)
	}
	if d := time.Since(start); d > 2*time.Second || n.Load() < 2 {
		t.Errorf("%d attempts in %v", n.Load(), d)
	}
	n.Store(0)
	if err := against(t, unavailable, WithMaxOutage(0)).Delete(t.Context(), testID); err == nil || n.Load() != 1 {
		t.Errorf("%d attempts, %v", n.Load(), err)
	}
	n.Store(0)
	if _, err := against(t, unavailable).CreateKey(t.Context(), "o", "n"); err == nil || n.Load() != 1 {
		t.Errorf("a call that must not be repeated: %d attempts, %v", n.Load(), err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	start = time.Now()
	if _, err := against(t, unavailable).Account(ctx); !errors.Is(err, context.DeadlineExceeded) || time.Since(start) > 2*time.Second {
		t.Errorf("after %v: %v", time.Since(start), err)
	}
}

func TestWait(t *testing.T) {
	var n atomic.Int64
	c := against(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Prefer") != "wait=30" {
			t.Errorf("Prefer %q", r.Header.Get("Prefer"))
		}
		switch n.Add(1) {
		case 1:
			fmt.Fprint(w, `{"state":"running"}`)
		case 2:
			refuse(w, 503, "unavailable")
		default:
			fmt.Fprint(w, `{"state":"failed"}`)
		}
	})
	if r, err := c.Wait(t.Context(), testID); err != nil || r.State != run.Failed || n.Load() != 3 {
		t.Error(r, err, n.Load())
	}
}

func TestRequestsAreAsTheServerTakesThem(t *testing.T) {
	var got []string
	c := against(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		got = append(got, r.Method+" "+r.URL.RequestURI()+" "+string(body))
		if r.Method == "DELETE" {
			w.WriteHeader(204)
			return
		}
		fmt.Fprint(w, `{}`)
	})
	ctx := t.Context()
	shell := false
	calls := []func() error{
		func() error {
			_, err := c.CreateRun(ctx, Request{Prompt: "x", Shell: &shell}, CreateOptions{})
			return err
		},
		func() error { _, err := c.Runs(ctx, run.Page{Cursor: "a&b", Limit: 5, State: run.Running}); return err },
		func() error { _, err := c.Cancel(ctx, testID); return err },
		func() error { return c.Delete(ctx, testID) },
		func() error { _, err := c.Run(ctx, "../orgs"); return err },
		func() error { _, err := c.CreateOrg(ctx, run.Org{Name: "n", Concurrency: 2}); return err },
		func() error { _, err := c.Orgs(ctx); return err },
		func() error { _, err := c.Org(ctx, "o"); return err },
		func() error { _, err := c.Credit(ctx, "o", 5, "ref"); return err },
		func() error { _, err := c.OrgAccount(ctx, "o"); return err },
		func() error { _, err := c.CreateKey(ctx, "o", "n"); return err },
		func() error { _, err := c.Keys(ctx, "o"); return err },
		func() error { return c.RevokeKey(ctx, "k") },
		func() error { return c.Ready(ctx) },
	}
	for i, call := range calls {
		if err := call(); err != nil {
			t.Errorf("call %d: %v", i, err)
		}
	}
	id := string(testID)
	want := []string{
		`POST /v1/runs {"prompt":"x","shell":false}`,
		`GET /v1/runs?cursor=a%26b&limit=5&state=running `,
		`POST /v1/runs/` + id + `/cancel `,
		`DELETE /v1/runs/` + id + ` `,
		`GET /v1/runs/..%2Forgs `,
		`POST /v1/orgs {"name":"n","concurrency":2}`,
		`GET /v1/orgs `,
		`GET /v1/orgs/o `,
		`POST /v1/orgs/o/credits {"amount_micros":5,"ref":"ref"}`,
		`GET /v1/orgs/o/account `,
		`POST /v1/orgs/o/keys {"name":"n"}`,
		`GET /v1/orgs/o/keys `,
		`DELETE /v1/keys/k `,
		`GET /readyz `,
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

// log makes the stored events of a run and the text of its stream.
func log(n int) (events []run.Event, frames []string) {
	for i := 1; i <= n; i++ {
		e := run.Event{Seq: int64(i), Run: testID, Type: run.EventShell, At: float64(i), Data: run.ShellData{Command: strings.Repeat("é", i%7), Outcome: "exited"}}
		if i == n {
			e.Type, e.Data = run.EventWorkerDestroyed, run.Money{Reserved: 5}
		}
		data, err := json.Marshal(e)
		if err != nil {
			panic(err)
		}
		events = append(events, e)
		frames = append(frames, fmt.Sprintf("id: %d\nevent: %s\ndata: %s\n\n", i, e.Type, data))
	}
	return events, frames
}

// TestEventsSurviveAnyCut cuts the stream after any byte, any number of times.
func TestEventsSurviveAnyCut(t *testing.T) {
	events, frames := log(12)
	rapid.Check(t, func(t *rapid.T) {
		cuts := rapid.SliceOfN(rapid.IntRange(0, 400), 0, 4).Draw(t, "cuts")
		var n atomic.Int64
		c := against(t, func(w http.ResponseWriter, r *http.Request) {
			from := 0
			if id := r.Header.Get("Last-Event-ID"); id != "" {
				if _, err := fmt.Sscan(id, &from); err != nil {
					panic(err)
				}
			}
			if from == len(events) {
				w.WriteHeader(204)
				return
			}
			text := "retry: 1000\n\n: heartbeat\n\n" + strings.Join(frames[from:], "")
			w.Header().Set("Content-Type", "text/event-stream")
			if i := int(n.Add(1)) - 1; i < len(cuts) && cuts[i] < len(text) {
				fmt.Fprint(w, text[:cuts[i]])
				w.(http.Flusher).Flush()
				panic(http.ErrAbortHandler)
			}
			fmt.Fprint(w, text)
		})
		c.delay = 2 * time.Millisecond
		var got []run.Event
		for e, err := range c.Events(context.Background(), testID, 0) {
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, e)
		}
		if d := cmp.Diff(events, got); d != "" {
			t.Fatal(d)
		}
	})
}

func TestEventsEnd(t *testing.T) {
	_, frames := log(3)
	stream := func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprint(w, frames[0], frames[0], frames[1]) // one of them twice
		w.(http.Flusher).Flush()
		time.Sleep(50 * time.Millisecond)
	}
	t.Run("when the caller has enough", func(t *testing.T) {
		n := 0
		for range against(t, stream).Events(t.Context(), testID, 0) {
			if n++; n == 2 {
				break
			}
		}
	})
	t.Run("with ctx", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		var seqs []int64
		var last error
		for e, err := range against(t, stream).Events(ctx, testID, 0) {
			if last = err; err == nil {
				seqs = append(seqs, e.Seq)
			}
		}
		if !errors.Is(last, context.DeadlineExceeded) || fmt.Sprint(seqs) != "[1 2]" {
			t.Errorf("%v, %v", seqs, last)
		}
	})
	bad := map[string]http.HandlerFunc{
		"with a refusal": func(w http.ResponseWriter, _ *http.Request) { refuse(w, 404, "not_found") },
		"with JSON":      func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{}`) },
		"with nonsense": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			fmt.Fprint(w, "data: nonsense\n\n")
		},
	}
	for name, h := range bad {
		t.Run(name, func(t *testing.T) {
			n := 0
			for _, err := range against(t, h).Events(t.Context(), testID, 0) {
				if n++; err == nil {
					t.Error("no error")
				}
			}
			if n != 1 {
				t.Errorf("%d pairs", n)
			}
		})
	}
}

func TestScanner(t *testing.T) {
	read := func(text string) (got []string, err error) {
		s := newScanner(strings.NewReader(text), func() {})
		for {
			m, err := s.next()
			if err != nil {
				return got, err
			}
			got = append(got, m.id+"|"+m.event+"|"+string(m.data))
		}
	}
	got, err := read("\ufeffid: 1\nevent: a\ndata: x\ndata:  y\n\n: comment\n\nid: 2\n\ndata\n\ndata:z\r\n\r\ndata: q\r\rfoo: bar\ndata: w\n\ndata: cut")
	want := []string{"1|a|x\n y", "||", "||z", "||q", "||w"}
	if d := cmp.Diff(want, got); d != "" || !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Error(d, err)
	}
}

func FuzzScanner(f *testing.F) {
	f.Add("id: 1\nevent: a\ndata: x\r\n\r\n: c\n\n")
	f.Fuzz(func(t *testing.T, text string) {
		s := newScanner(strings.NewReader(text), func() {})
		for {
			m, err := s.next()
			if err != nil {
				return
			}
			if strings.ContainsAny(m.id+m.event, "\r\n") || len(m.data) > len(text) {
				t.Fatalf("%+v from %q", m, text)
			}
		}
	})
}

func TestScannerIsBounded(t *testing.T) {
	for name, text := range map[string]string{"one line": "x", "many lines": "data: x\n", "ignored lines": "foo: x\n"} {
		s := newScanner(io.MultiReader(strings.NewReader("data: "), &repeat{text: text}), func() {})
		s.limit = 1 << 20
		if _, err := s.next(); !errors.Is(err, errMessageTooLarge) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// repeat reads as its text without end.
type repeat struct {
	text string
	at   int
}

func (r *repeat) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = r.text[r.at%len(r.text)]
		r.at++
	}
	return len(p), nil
}
