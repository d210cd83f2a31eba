package broker_test

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/ephemeral-run/ephemeral/broker"
	"github.com/ephemeral-run/ephemeral/broker/openaitest"
	"github.com/ephemeral-run/ephemeral/run"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// logBuffer collects what was logged.
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

func newBroker(t testing.TB, cfg broker.Config) *broker.Broker {
	t.Helper()
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.NewTextHandler(io.Discard, nil))
	}
	b, err := broker.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	return b
}

// pipeListener accepts in-memory connections without any buffer.
type pipeListener struct {
	conns chan net.Conn
	once  sync.Once
	done  chan struct{}
}

func newPipeListener() *pipeListener {
	return &pipeListener{conns: make(chan net.Conn), done: make(chan struct{})}
}

func (l *pipeListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *pipeListener) Close() error {
	l.once.Do(func() { close(l.done) })
	return nil
}

func (l *pipeListener) Addr() net.Addr { return &net.UnixAddr{Name: "pipe", Net: "unix"} }

func (l *pipeListener) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	here, there := net.Pipe()
	select {
	case l.conns <- there:
		return here, nil
	case <-l.done:
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// testKey is the provider's API key in tests.
const testKey = "sk-test-0123456789/abc+DEFGHIJKLMN"

// provider is a broker in front of a double of a provider, with the model openai/double at prices that are easy to reckon
// with: 1 micro-dollar an input token, 0.5 a cached one, 2 an output token. Waiting is recorded instead of done.
type provider struct {
	*broker.Broker
	log logBuffer

	mu    sync.Mutex
	waits []time.Duration
}

func newProvider(t testing.TB, double *openaitest.Server, change ...func(*broker.Config)) *provider {
	t.Helper()
	prices := priceFile(t, "")
	p := &provider{}
	cfg := broker.Config{
		CallRate: 1 << 20, PriceFile: prices, OpenAIBaseURL: double.BaseURL, OpenAIAPIKey: testKey,
		Log: slog.New(slog.NewTextHandler(&p.log, &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
	for _, f := range change {
		f(&cfg)
	}
	p.Broker = newBroker(t, cfg)
	p.SetSleep(func(ctx context.Context, d time.Duration) error {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.waits = append(p.waits, d)
		return ctx.Err()
	})
	return p
}

func (p *provider) waited() []time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]time.Duration(nil), p.waits...)
}

var doubleSpec = run.Spec{Prompt: "p", Model: "openai/double", Shell: true}

// reply is an answer as the guest got it.
type reply struct {
	status int
	header http.Header
	body   string
	err    error // reading the body
}

// code is the code of the error in the reply, if it is one.
func (r reply) code() string {
	var doc struct {
		Error struct {
			Code string `json:"code"`
		} `json:"error"`
	}
	if json.Unmarshal([]byte(r.body), &doc) != nil {
		return ""
	}
	return doc.Error.Code
}

func (s *session) post(ctx context.Context, body string) reply {
	s.t.Helper()
	return s.send(ctx, http.MethodPost, "/v1/chat/completions", body)
}

func (s *session) send(ctx context.Context, method, path, body string) reply {
	s.t.Helper()
	req, err := http.NewRequestWithContext(ctx, method, "http://broker"+path, strings.NewReader(body))
	if err != nil {
		s.t.Fatal(err)
	}
	resp, err := s.client().Do(req)
	if err != nil {
		return reply{err: err}
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	return reply{status: resp.StatusCode, header: resp.Header, body: string(data), err: err}
}

const (
	plainBody  = `{"model":"openai/double","messages":[{"role":"user","content":"hello"}]}`
	streamBody = `{"model":"openai/double","stream":true,"messages":[{"role":"user","content":"hello"}]}`
)

// session is a run at the broker, served over pipes.
type session struct {
	t         testing.TB
	handler   *broker.Handler
	ln        *pipeListener
	transport *http.Transport
	stop      func() // ends the run; when it returns the money is settled

	mu       sync.Mutex
	all      []run.NewEvent
	models   []run.ModelData
	outward  []run.CallData
	refusals map[string]int64
}

const sessionRun = run.ID("run_0123456789abcdef0123456789abcdef")

func startSession(t testing.TB, b *broker.Broker, l broker.Ledger, spec *run.Spec) *session {
	t.Helper()
	s := &session{t: t, ln: newPipeListener(), refusals: map[string]int64{}}
	s.handler = b.Handler(broker.Session{Run: sessionRun, Org: "o", Spec: spec, Ledger: l, Emit: s.emit})
	s.transport = &http.Transport{DialContext: s.ln.dial, MaxIdleConnsPerHost: 64}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- s.handler.Serve(ctx, s.ln) }()
	var once sync.Once
	s.stop = func() {
		once.Do(func() {
			cancel()
			if err := <-served; err != nil {
				t.Errorf("serve: %v", err)
			}
			s.transport.CloseIdleConnections()
		})
	}
	t.Cleanup(s.stop)
	return s
}

func (s *session) client() *http.Client { return &http.Client{Transport: s.transport} }

func (s *session) emit(e run.NewEvent) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = append(s.all, e)
	switch d := e.Data.(type) {
	case run.ModelData:
		s.models = append(s.models, d)
		if e.Type == run.EventModel && !e.At.IsZero() {
			return
		}
	case run.CallData:
		s.outward = append(s.outward, d)
		if (e.Type == run.EventConnection || e.Type == run.EventWeb) && !e.At.IsZero() {
			return
		}
	case run.RefusedData:
		s.refusals[d.Code] = d.Count
		if e.Type == run.EventRefused && !e.At.IsZero() {
			return
		}
	}
	s.t.Errorf("odd event %+v", e)
}

// refused is how often a code was refused, as far as events tell.
func (s *session) refused(code string) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.refusals[code]
}

// calls are the events of connections and the web.
func (s *session) calls() []run.CallData {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]run.CallData(nil), s.outward...)
}

// timeline is every event, as a store would number them.
func (s *session) timeline() []run.Event {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []run.Event
	for i, e := range s.all {
		all = append(all, run.Event{Seq: int64(i + 1), Run: sessionRun, Type: e.Type, Data: e.Data})
	}
	return all
}

func (s *session) events() []run.ModelData {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]run.ModelData(nil), s.models...)
}

// priceFile is a file of prices: the double's, and what is given.
func priceFile(t testing.TB, more string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "prices.yaml")
	text := "models:\n  openai/double: {input: 1000000, cached_input: 500000, output: 2000000, max_output_tokens: 1000}\n" + more
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}
