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

	"golang.org/x/net/netutil"

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

	mu      sync.Mutex
	closed  bool
	active  sync.WaitGroup
	calls   int
	waiting int
	usage   run.Usage
}

// Handler returns the handler of a run. Close it when the machine is gone.
func (b *Broker) Handler(s Session) *Handler {
	h := &Handler{b: b, s: s, log: b.log.With("run", string(s.Run)), slots: make(chan struct{}, b.cfg.MaxConcurrent)}
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
	}
	stop := context.AfterFunc(ctx, func() { _ = server.Close() }) // what the guest still has open is cut
	defer stop()
	err := server.Serve(netutil.LimitListener(ln, maxConnections))
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

// ServeHTTP answers one request of the guest.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !h.begin() {
		(&problem{status: http.StatusGone, code: codeRunEnded, message: "the run has ended"}).write(w)
		return
	}
	defer h.active.Done()
	if err := h.route(w, r); err != nil {
		var p *problem
		if !errors.As(err, &p) {
			h.log.Error("broker request failed", "error", err)
			p = &problem{status: http.StatusInternalServerError, code: codeUnavailable, message: "the broker failed"}
		}
		p.write(w)
	}
}

// route finds what the request is for. What the run does not allow does not exist.
func (h *Handler) route(w http.ResponseWriter, r *http.Request) error {
	if r.URL.Path != "/v1/chat/completions" || h.s.Spec.Model == "" {
		return &problem{status: http.StatusNotFound, code: codeNotFound, message: "there is nothing here for this run"}
	}
	if r.Method != http.MethodPost {
		w.Header().Set("Allow", http.MethodPost)
		return &problem{status: http.StatusMethodNotAllowed, code: codeMethod, message: "want POST"}
	}
	release, err := h.admit(r.Context())
	if err != nil {
		return err
	}
	defer release()
	return h.chat(w, r)
}

// admit waits for one of the run's slots, and keeps the run within the calls it may make.
func (h *Handler) admit(ctx context.Context) (release func(), err error) {
	h.mu.Lock()
	h.calls++
	calls, crowded := h.calls, h.waiting >= maxWaiting
	if calls <= h.b.cfg.MaxCalls && !crowded {
		h.waiting++
	}
	h.mu.Unlock()
	switch {
	case calls > h.b.cfg.MaxCalls:
		return nil, &problem{status: http.StatusTooManyRequests, code: codeCallLimit, message: fmt.Sprintf("a run may make %d calls", h.b.cfg.MaxCalls)}
	case crowded:
		return nil, &problem{status: http.StatusTooManyRequests, code: codeTooMany, message: "too many calls at once"}
	}
	defer func() {
		h.mu.Lock()
		h.waiting--
		h.mu.Unlock()
	}()
	select {
	case h.slots <- struct{}{}:
		return func() { <-h.slots }, nil
	case <-ctx.Done():
		return nil, errAbandoned
	case <-h.ctx.Done():
		return nil, errAbandoned
	}
}

// errAbandoned: nobody waits for the answer any more.
var errAbandoned = &problem{status: http.StatusGone, code: codeRunEnded, message: "the call was abandoned"}
