// Package gateway is the HTTP edge: it authenticates, validates, admits runs, shows them and their events, and answers
// every refusal with problem details. It knows runs and nothing of machines.
package gateway

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gofiber/fiber/v2"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"

	"github.com/ephemeral-run/ephemeral/gateway/web"
	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/connection"
	"github.com/ephemeral-run/ephemeral/run/pools"
	"github.com/ephemeral-run/ephemeral/run/tracing"
)

// Store is what the gateway asks of the run store; *run.Store has it. Errors are those of package run.
type Store interface {
	Ping(ctx context.Context) error
	Full() error
	AuthenticateAt(ctx context.Context, secret string, rate run.Rate) (run.Key, run.Allowance, error)
	CheckKey(ctx context.Context, id string) error

	Admit(ctx context.Context, a run.Admission) (r run.Run, replayed bool, err error)
	Get(ctx context.Context, org string, id run.ID) (run.Run, error)
	List(ctx context.Context, org string, p run.Page) (runs []run.Run, next string, err error)
	Events(ctx context.Context, org string, id run.ID, after int64) (events []run.Event, more bool, err error)
	ListArtifacts(ctx context.Context, org string, id run.ID) ([]run.Artifact, error)
	ReadArtifact(ctx context.Context, id run.ID, a run.Artifact, at int64, n int) ([]byte, error)
	BeginUpload(ctx context.Context, n run.NewUpload) (*run.UploadWriter, error)
	Upload(ctx context.Context, org string, id run.UploadID) (run.Upload, error)
	DeleteUpload(ctx context.Context, org string, id run.UploadID) error
	Cancel(ctx context.Context, org string, id run.ID) (run.Run, error)
	Delete(ctx context.Context, org string, id run.ID) error
	CreateShare(ctx context.Context, org string, id run.ID, life time.Duration) (run.Share, string, error)
	Shares(ctx context.Context, org string, id run.ID) ([]run.Share, error)
	RevokeShare(ctx context.Context, org string, id run.ID, share string) error
	Shared(ctx context.Context, token string) (org string, id run.ID, err error)
	Subscribe(ctx context.Context, wanted func(run.ID) bool) (events <-chan run.Event, gap <-chan struct{}, err error)

	CreateOrg(ctx context.Context, o run.Org) (run.Org, error)
	Org(ctx context.Context, id string) (run.Org, error)
	Orgs(ctx context.Context) ([]run.Org, error)
	Account(ctx context.Context, org string) (run.Account, error)
	Credit(ctx context.Context, org string, amount run.Micros, ref string) (run.Account, error)
	CreateKey(ctx context.Context, org, name string, role run.Role, options ...run.KeyOption) (run.Key, string, error)
	RevokeKey(ctx context.Context, id string) error
	Revocations(ctx context.Context) (<-chan string, error)
	Keys(ctx context.Context, org string) ([]run.Key, error)
	Usage(ctx context.Context, org string, first, last time.Time) ([]run.DayUsage, error)
	AddMember(ctx context.Context, org, name string) (run.OrgMember, error)
	Members(ctx context.Context, org string) ([]run.OrgMember, error)
	RemoveMember(ctx context.Context, org, id string) error
	Nodes(ctx context.Context) ([]run.Node, error)
	Queues(ctx context.Context, limit int) (queues []run.OrgQueue, total int, err error)
	SignUp(ctx context.Context, name string, address netip.Addr, idempotency string, t run.Trial) (run.Org, run.Key, string, error)
	TrialGiven(ctx context.Context) (run.Micros, error)
	ledgerStore

	Connections(ctx context.Context, org string) ([]connection.Sealed, error)
	Connection(ctx context.Context, org, name string) (connection.Sealed, error)
	UpdateConnection(ctx context.Context, org, name string, change func(old *connection.Sealed) (connection.Sealed, error)) (connection.Sealed, error)
	DeleteConnection(ctx context.Context, org, name string) error
	ReceiptKeys(ctx context.Context) ([]run.ReceiptKey, error)
}

var _ Store = (*run.Store)(nil)

// Deps is what a gateway works with.
type Deps struct {
	Store        Store
	HasModel     func(model string) bool // nil: no model exists
	DefaultModel string                  // for a prompt that names none
	FirstSlice   run.Micros              // what the first slice of compute costs
	Sealing      *connection.Keyring     // seals credentials of connections; nil: only connections without one can be made
	Pools        Pools                   // nil: there are none
	Ready        func() error            // what else must work besides the store; nil: nothing

	// Predict simulates a pool of another size; nil: this gateway cannot.
	Predict func(ctx context.Context, size pools.Sizing) (pools.Prediction, error)

	Traces   *tracing.Tracer      // nil: none are sent
	Registry *prometheus.Registry // metrics shown on the admin listener; nil: the gateway's own only
	Log      *slog.Logger         // nil: slog.Default
}

// Server is one gateway.
type Server struct {
	cfg       Config
	deps      Deps
	log       *slog.Logger
	app       *fiber.App // the public API
	admin     *fiber.App // metrics and health
	site      *web.Site  // the pages for people
	hub       *hub
	metrics   *metrics
	cors      cors
	rate      run.Rate            // of each key
	policy    string              // the rate as a header
	images    servedImages        // by the cell's nodes
	bodies    *semaphore.Weighted // bytes of request bodies in memory
	answers   *semaphore.Weighted // bytes of large answers in memory
	receiving *semaphore.Weighted // uploads at once
	base      context.Context     // of everything done for a request; ends when the drain is over
	deadlines deadlines
	stop      context.CancelFunc
	draining  atomic.Bool
	streams   sync.WaitGroup // event streams, which the HTTP server has handed over
}

// New makes a gateway. It serves nothing yet. It panics on a configuration that Validate refuses, and on embedded pages
// that cannot be rendered, which are errors of the program.
func New(cfg Config, deps Deps) *Server {
	cfg, err := cfg.withDefaults()
	if err != nil {
		panic(err)
	}
	site, err := web.Load()
	if err != nil {
		panic(err)
	}
	if deps.Log == nil {
		deps.Log = slog.Default()
	}
	if deps.Registry == nil {
		deps.Registry = prometheus.NewRegistry()
	}
	s := &Server{
		cfg:     cfg,
		deps:    deps,
		log:     deps.Log.With("part", "gateway"),
		site:    site,
		bodies:  semaphore.NewWeighted(int64(cfg.BodyMemory)),
		answers: semaphore.NewWeighted(int64(cfg.BodyMemory)),

		receiving: semaphore.NewWeighted(int64(cfg.Uploads.Concurrency)),
	}
	if s.cors, err = newCORS(cfg.CORSOrigins); err != nil {
		panic(err)
	}
	if s.rate = cfg.rate(); s.rate.PerSecond > 0 {
		s.policy = ratePolicy(s.rate)
	}
	s.base, s.stop = context.WithCancel(context.Background())
	s.deadlines = deadlines{base: s.base, life: cfg.StoreTimeout}
	s.hub = newHub(deps.Store, s.log)
	s.metrics = newMetrics(deps.Registry, s.hub)
	if cell, ok := deps.Store.(interface {
		Totals(context.Context) (run.Totals, error)
	}); ok {
		deps.Registry.MustRegister(totals{ask: cell.Totals, ping: deps.Store.Ping, log: s.log})
	}
	s.app = s.newApp(append(s.publicRoutes(), s.siteRoutes()...))
	s.admin = s.newApp(s.adminRoutes())
	return s
}

// connectionSlack lets the HTTP server have more connections than the listener lets in: those that end are counted out by
// the listener first, and the HTTP server's own refusal is no problem document.
const connectionSlack = 1024

// newApp makes a Fiber application that serves the routes.
func (s *Server) newApp(routes []route) *fiber.App {
	app := fiber.New(fiber.Config{
		AppName:                      "ephemeral",
		BodyLimit:                    max(s.cfg.BodyLimit, int(s.cfg.Uploads.Limit)), // each handler has its own
		Concurrency:                  s.cfg.MaxConnections + connectionSlack,
		DisableStartupMessage:        true,
		DisablePreParseMultipartForm: true,
		StreamRequestBody:            true, // read after authentication, see readBody
		Immutable:                    true, // strings taken from a request outlive its buffers
		CaseSensitive:                true,
		StrictRouting:                true,
		UnescapePath:                 false,
		ReadTimeout:                  s.cfg.ReadTimeout,
		IdleTimeout:                  s.cfg.IdleTimeout,
		ReadBufferSize:               s.cfg.HeaderLimit,
		ErrorHandler:                 s.serverError,
	})
	app.Use(s.edge)
	for _, r := range routes {
		app.Add(r.method, r.path, s.named(r.path, r.handler))
	}
	server := app.Server()
	server.CloseOnShutdown = true
	server.SecureErrorLogMessage = true
	server.Logger = serverLog{s.log}
	server.Handler = s.knownMethod(app, server.Handler)
	return app
}

// serverLog takes the HTTP server's own messages, all of which are about single connections.
type serverLog struct{ log *slog.Logger }

func (l serverLog) Printf(format string, args ...any) {
	l.log.Debug("connection", "message", fmt.Sprintf(format, args...))
}

// ListenAndServe opens both listeners of the configuration and serves until ctx ends; see Serve.
func (s *Server) ListenAndServe(ctx context.Context) error {
	var lc net.ListenConfig
	public, err := lc.Listen(ctx, "tcp", s.cfg.Listen)
	if err != nil {
		return fmt.Errorf("listen on %s (EPHEMERAL_LISTEN): %w", s.cfg.Listen, err)
	}
	admin, err := lc.Listen(ctx, "tcp", s.cfg.AdminListen)
	if err != nil {
		return errors.Join(fmt.Errorf("listen on %s (EPHEMERAL_ADMIN_LISTEN): %w", s.cfg.AdminListen, err), public.Close())
	}
	defer raiseHeap()()
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return s.Serve(ctx, public) })
	g.Go(func() error { return s.ServeAdmin(ctx, admin) })
	return g.Wait()
}

// Serve answers the public API on ln until ctx ends, then drains: no new connection, event streams are told to
// reconnect, waiting requests are answered with what is known, answers in flight get DrainTimeout. It closes ln, returns
// nil after a drain, whole or not, and may be called once.
func (s *Server) Serve(ctx context.Context, ln net.Listener) error {
	defer s.stop()
	var secure *tls.Config
	if s.cfg.TLSCert != "" {
		cert, err := openCertificate(s.cfg.TLSCert, s.cfg.TLSKey, s.log)
		if err != nil {
			return errors.Join(err, closeListener(ln))
		}
		secure = cert.config()
	}
	hubCtx, stopHub := context.WithCancel(context.WithoutCancel(ctx))
	var following sync.WaitGroup
	following.Go(func() { s.hub.run(hubCtx) })
	following.Go(func() { s.hub.runRevocations(hubCtx) })
	err := s.serve(ctx, s.app, ln, secure, func() {
		s.draining.Store(true)
		s.hub.drain()
	})
	stopHub()
	following.Wait()
	return err
}

// ServeAdmin answers metrics and detailed health on ln until ctx ends. It closes ln.
func (s *Server) ServeAdmin(ctx context.Context, ln net.Listener) error {
	return s.serve(ctx, s.admin, ln, nil, func() {})
}

// serve runs one application on one listener, over TLS with secure, until ctx ends and drains it then. onDrain is called
// first.
func (s *Server) serve(ctx context.Context, app *fiber.App, ln net.Listener, secure *tls.Config, onDrain func()) error {
	refusal := s.overflow
	if secure != nil {
		refusal = nil // an answer would need a handshake
	}
	conns := newConns(ln, s.cfg.WriteTimeout, s.cfg.MaxConnections, refusal)
	serving := net.Listener(conns)
	if secure != nil {
		serving = tlsConns{tls.NewListener(conns, secure)}
	}
	failed := make(chan error, 1)
	go func() { failed <- app.Listener(serving) }()
	select {
	case err := <-failed:
		return errors.Join(fmt.Errorf("serve on %s: %w", ln.Addr(), err), closeListener(conns))
	case <-ctx.Done():
	}
	onDrain()
	drain, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.cfg.DrainTimeout)
	defer cancel()
	shut := app.Server().ShutdownWithContext(drain)
	if app == s.app {
		shut = errors.Join(shut, s.streamsEnd(drain))
	}
	if err := shut; err != nil {
		s.log.Warn("drain is not complete, closing the connections left", "listener", ln.Addr().String(), "error", err)
		s.stop()
	}
	err := closeListener(conns) // also when the server had not begun to accept
	conns.closeAll()
	<-failed
	conns.told.Wait()
	if app == s.app {
		s.streams.Wait() // their connections are closed
	}
	return err
}

// streamsEnd waits for the end of all event streams, which the drain has told to end, or of ctx.
func (s *Server) streamsEnd(ctx context.Context) error {
	ended := make(chan struct{})
	go func() {
		s.streams.Wait()
		close(ended)
	}()
	select {
	case <-ended:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("event streams: %w", ctx.Err())
	}
}

// overflow is the answer to a connection beyond MaxConnections, which is not read.
func (s *Server) overflow() []byte {
	p := problem(CodeTooManyConnections, "")
	k := &call{id: rand.Text(), start: time.Now(), code: p.Code}
	p.RequestID = k.id
	s.metrics.refused(p.Code)
	body, err := json.Marshal(p)
	if err != nil {
		s.log.Error("answer failed", "error", err)
		return nil
	}
	s.observe(k, p.Status, len(body), "")
	return fmt.Appendf(nil, "HTTP/1.1 %d %s\r\nContent-Type: application/problem+json\r\nContent-Length: %d\r\nConnection: close\r\n"+
		"Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nRetry-After: %d\r\n%s: %s\r\n\r\n%s", p.Status, http.StatusText(p.Status), len(body),
		catalogue[p.Code].RetryAfter, headerRequestID, k.id, body)
}

// closeListener closes ln; one that is closed already is fine.
func closeListener(ln net.Listener) error {
	if err := ln.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		return fmt.Errorf("close listener %s: %w", ln.Addr(), err)
	}
	return nil
}
