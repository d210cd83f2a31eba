package broker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/ephemeral-run/ephemeral/run"
)

// The bounds of what one machine may keep open.
const (
	maxConnections = 128
	maxWaiting     = 64
	maxHeader      = 16 << 10
	headerTimeout  = 10 * time.Second
	idleTimeout    = 5 * time.Minute
)

// Session is one run at the broker.
type Session struct {
	Run    run.ID
	Org    string
	Spec   *run.Spec // what the run allows; not changed while the handler lives
	Ledger Ledger
	// Emit takes the run's events, from several goroutines at once. It should not block for long.
	Emit func(run.NewEvent)
}

// Handler serves one run's requests. Every connection that it is given belongs to that run's machine.
type Handler struct {
	b   *Broker
	s   Session
	log *slog.Logger

	ctx   context.Context // ends with Close
	end   context.CancelFunc
	slots chan struct{}
	rate  *rate.Limiter

	mu      sync.Mutex
	closed  bool
	active  sync.WaitGroup
	calls   int
	waiting int
	usage   run.Usage
	receipt int64            // number of the last receipt
	named   map[string]bool  // ids that the guest gave its calls
	refused map[string]int64 // refusals by code
}

// Handler returns the handler of a run. Close it when the machine is gone.
func (b *Broker) Handler(s Session) *Handler {
	h := &Handler{b: b, s: s, log: b.log.With("run", string(s.Run)), slots: make(chan struct{}, b.cfg.MaxConcurrent),
		rate: rate.NewLimiter(rate.Limit(b.cfg.CallRate), 2*b.cfg.CallRate), named: map[string]bool{}, refused: map[string]int64{}}
	h.ctx, h.end = context.WithCancel(context.Background())
	return h
}

// Serve answers on the listener until ctx ends or the listener fails, and then closes listener and handler: when it
// returns, every call has been paid or given back. It returns nil when ctx ended.
func (h *Handler) Serve(ctx context.Context, ln net.Listener) error {
	defer h.Close()
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	server := &http.Server{
		Handler:                      h,
		Protocols:                    &protocols,
		ReadHeaderTimeout:            headerTimeout,
		IdleTimeout:                  idleTimeout,
		MaxHeaderBytes:               maxHeader,
		DisableGeneralOptionsHandler: true,
		ErrorLog:                     slog.NewLogLogger(h.log.Handler(), slog.LevelDebug),
		BaseContext:                  func(net.Listener) context.Context { return ctx },
		ConnContext:                  func(ctx context.Context, c net.Conn) context.Context { return context.WithValue(ctx, connKey{}, c) },
	}
	stop := context.AfterFunc(ctx, func() { _ = server.Close() }) // what the guest still has open is cut
	defer stop()
	err := server.Serve(h.watch(ln))
	_ = server.Close()
	if ctx.Err() != nil || errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return fmt.Errorf("broker: serve run %s: %w", h.s.Run, err)
}

// Close refuses further requests, ends those in flight, and returns when each has been paid or given back. It may be
// called more than once.
func (h *Handler) Close() {
	h.mu.Lock()
	h.closed = true
	h.mu.Unlock()
	h.end()
	h.active.Wait()
}

// Usage counts the model calls that were answered, and their tokens. ShellCommands is zero: the broker sees none.
func (h *Handler) Usage() run.Usage {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.usage
}

func (h *Handler) count(input, output int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.usage.ModelCalls++
	h.usage.InputTokens += input
	h.usage.OutputTokens += output
	h.usage.TotalTokens += input + output
}

// begin enters one piece of work that Close waits for. It refuses when the handler is closed.
func (h *Handler) begin() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return false
	}
	h.active.Add(1)
	return true
}
