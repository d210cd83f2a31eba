package gateway

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/ephemeral-run/ephemeral/run"
)

func TestMain(m *testing.M) {
	code := withRedis(m)
	err := goleak.Find(
		goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.updateServerDate.func1"),    // one a process, for ever
		goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.(*workerPool).Start.func2"), // sleeps out its last 10 s after a stop
	)
	if err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, "goroutines left:", err)
		code = 1
	}
	os.Exit(code)
}

// The keys that fakeStore knows.
const (
	memberSecret = "eph_member_canary"
	adminSecret  = "eph_admin_canary"
)

// fakeStore stands in where a test is about the edge and not about the store. What a test does not set panics.
type fakeStore struct {
	Store
	admit     func(run.Admission) (run.Run, bool, error)
	get       func(run.ID) (run.Run, error)
	events    func(after int64) ([]run.Event, error)
	account   func() (run.Account, error)
	ping      func() error
	full      error
	subscribe func(ctx context.Context) (<-chan run.Event, <-chan struct{}, error)
}

func (f *fakeStore) AuthenticateAt(_ context.Context, secret string, _ run.Rate) (run.Key, run.Allowance, error) {
	switch secret {
	case memberSecret:
		return run.Key{ID: "key_m", Org: "org_1", Role: run.Member}, run.Allowance{Remaining: 7, Full: time.Second}, nil
	case adminSecret:
		return run.Key{ID: "key_a", Role: run.Admin}, run.Allowance{}, nil
	}
	return run.Key{}, run.Allowance{}, run.ErrUnauthenticated
}

// ServedImages: no node has said anything.
func (f *fakeStore) ServedImages(context.Context) ([]string, bool, error) { return nil, false, nil }

func (f *fakeStore) Revocations(ctx context.Context) (<-chan string, error) {
	orgs := make(chan string)
	context.AfterFunc(ctx, func() { close(orgs) })
	return orgs, nil
}

func (f *fakeStore) CheckKey(context.Context, string) error { return nil }
func (f *fakeStore) Full() error                            { return f.full }

func (f *fakeStore) Admit(_ context.Context, a run.Admission) (run.Run, bool, error) {
	return f.admit(a)
}
func (f *fakeStore) Get(_ context.Context, _ string, id run.ID) (run.Run, error) { return f.get(id) }
func (f *fakeStore) Events(_ context.Context, _ string, _ run.ID, after int64) ([]run.Event, bool, error) {
	events, err := f.events(after)
	return events, false, err
}
func (f *fakeStore) Account(context.Context, string) (run.Account, error) { return f.account() }
func (f *fakeStore) Ping(context.Context) error                           { return f.ping() }

func (f *fakeStore) Subscribe(ctx context.Context, _ func(run.ID) bool) (<-chan run.Event, <-chan struct{}, error) {
	if f.subscribe != nil {
		return f.subscribe(ctx)
	}
	events := make(chan run.Event)
	context.AfterFunc(ctx, func() { close(events) })
	return events, make(chan struct{}), nil
}

// logBuffer collects the log.
type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// served is a gateway that serves on loopback for one test.
type served struct {
	*Server
	addr, url, adminURL string
	log                 *logBuffer
	client              *http.Client
	stop                func() // drains; may be called again
}

// serve starts a gateway on loopback. It is drained when the test ends.
func serve(t *testing.T, cfg Config, deps Deps) *served {
	t.Helper()
	logs := &logBuffer{}
	deps.Log = slog.New(slog.NewJSONHandler(logs, &slog.HandlerOptions{Level: slog.LevelDebug}))
	if deps.HasModel == nil {
		deps.HasModel = testRules.hasModel
		deps.DefaultModel = testRules.defaultModel
	}
	ln, adminLn := listen(t), listen(t)
	ctx, cancel := context.WithCancel(context.Background())
	s := &served{
		Server: New(cfg, deps), addr: ln.Addr().String(), url: "http://" + ln.Addr().String(), adminURL: "http://" + adminLn.Addr().String(),
		log: logs,
	}
	transport := &http.Transport{}
	s.client = &http.Client{Transport: described{t, transport}}
	var wg sync.WaitGroup
	for l, serve := range map[net.Listener]func(context.Context, net.Listener) error{ln: s.Serve, adminLn: s.ServeAdmin} {
		wg.Go(func() {
			if err := serve(ctx, l); err != nil {
				t.Errorf("serve: %v", err)
			}
		})
	}
	s.stop = func() {
		cancel()
		wg.Wait()
		transport.CloseIdleConnections()
	}
	t.Cleanup(s.stop)
	return s
}

func listen(t *testing.T) net.Listener {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return ln
}

// answer is one response, read whole.
type answer struct {
	*http.Response
	body string
}

// problem reads the body as a problem and checks its form.
func (a answer) problem(t *testing.T) Problem {
	t.Helper()
	var p Problem
	d := json.NewDecoder(strings.NewReader(a.body))
	d.DisallowUnknownFields()
	if err := d.Decode(&p); err != nil {
		t.Fatalf("not a problem document: %v: %d %q", err, a.StatusCode, a.body)
	}
	if ct := a.Header.Get("Content-Type"); ct != "application/problem+json" {
		t.Errorf("content type %q", ct)
	}
	e, ok := catalogue[p.Code]
	if !ok || p.Status != e.Status || a.StatusCode != e.Status || p.Title != e.Title || p.Type != typeBase+string(p.Code) || p.Remediation != e.Remediation {
		t.Errorf("does not fit the catalogue: status %d, %+v", a.StatusCode, p)
	}
	if p.Detail == "" || p.RequestID == "" || p.RequestID != a.Header.Get("X-Request-Id") {
		t.Errorf("detail or request id: %+v, header %q", p, a.Header.Get("X-Request-Id"))
	}
	if (a.Header.Get("Retry-After") != "") != (e.RetryAfter > 0) {
		t.Errorf("Retry-After %q with %s", a.Header.Get("Retry-After"), p.Code)
	}
	return p
}

// do sends one request; header holds pairs of name and value.
func (s *served) do(t *testing.T, method, path, body string, header ...string) answer {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, s.url+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := s.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	return read(t, resp)
}

func read(t *testing.T, resp *http.Response) answer {
	t.Helper()
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer{resp, string(b)}
}
