package broker_test

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/ephemeral-run/ephemeral/broker"
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

// session is a run at the broker, served over pipes.
type session struct {
	t         testing.TB
	handler   *broker.Handler
	ln        *pipeListener
	transport *http.Transport
	stop      func() // ends the run; when it returns the money is settled

	mu     sync.Mutex
	models []run.ModelData
}

func startSession(t testing.TB, b *broker.Broker, l broker.Ledger, spec *run.Spec) *session {
	t.Helper()
	s := &session{t: t, ln: newPipeListener()}
	s.handler = b.Handler(broker.Session{Run: "run_0123456789abcdef0123456789abcdef", Org: "o", Spec: spec, Ledger: l, Emit: s.emit})
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
	d, ok := e.Data.(run.ModelData)
	if !ok || e.Type != run.EventModel || e.At.IsZero() {
		s.t.Errorf("odd event %+v", e)
	}
	s.models = append(s.models, d)
}

func (s *session) events() []run.ModelData {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]run.ModelData(nil), s.models...)
}
