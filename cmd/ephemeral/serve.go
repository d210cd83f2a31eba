package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/ephemeral-run/ephemeral/broker"
	"github.com/ephemeral-run/ephemeral/cmd/ephemeral/logging"
	"github.com/ephemeral-run/ephemeral/gateway"
	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/connection"
	"github.com/ephemeral-run/ephemeral/run/pools"
	"github.com/ephemeral-run/ephemeral/run/redisserver"
	"github.com/ephemeral-run/ephemeral/run/tracing"
)

// logConfig says what is logged to standard error.
type logConfig struct {
	Level  slog.Level `env:"EPHEMERAL_LOG_LEVEL" envDefault:"info" help:"debug, info, warn or error"`
	Format string     `env:"EPHEMERAL_LOG_FORMAT" envDefault:"text" help:"text or json"`
}

func (c logConfig) handler(w io.Writer) slog.Handler {
	o := &slog.HandlerOptions{Level: c.Level}
	if c.Format == "json" {
		return slog.NewJSONHandler(w, o)
	}
	return slog.NewTextHandler(w, o)
}

func serveCommand() *cobra.Command {
	var init bool
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Serve everything on this host: gateway, node and, unless configured otherwise, a private Redis",
		Long: `Serves everything on this host: gateway, node and, unless EPHEMERAL_REDIS_URL names another, a private redis-server
with append-only persistence in the data directory. It needs root, and an image ("ephemeral image build").

It ends on SIGTERM or SIGINT: answers in flight are finished, runs are given EPHEMERAL_NODE_DRAIN to end, machines are
destroyed.`,
		Args: arguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return withCell(cmd.Context(), true, true, func(ctx context.Context, c *cell) error {
				if init {
					if err := initialise(ctx, c, cmd.OutOrStdout()); err != nil {
						return err
					}
				}
				return c.serve(ctx, true, true)
			})
		},
	}
	cmd.Flags().BoolVar(&init, "init", false, "on first start create an organisation with credit and keys, and print them once")
	return cmd
}

func gatewayCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "gateway",
		Short: "Serve the HTTP API only; nodes of the same Redis carry out the runs",
		Args:  arguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return withCell(cmd.Context(), false, false, func(ctx context.Context, c *cell) error { return c.serve(ctx, true, false) })
		},
	}
}

func nodeCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "node",
		Short: "Carry out runs on this host; gateways of the same Redis take the requests",
		Args:  arguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return withCell(cmd.Context(), false, true, func(ctx context.Context, c *cell) error { return c.serve(ctx, false, true) })
		},
	}
	cmd.AddCommand(nodeReconcileCommand())
	return cmd
}

// cell is what the parts of one process share.
type cell struct {
	settings
	log    *slog.Logger
	screen *console
	store  *run.Store
	broker *broker.Broker
	traces *tracing.Tracer // nil: none are sent
	room   func() error    // of the private redis-server; nil: there is none

	sealing *connection.Keyring
}

// withCell opens what a server needs, runs f, and closes it again, in reverse order. private starts a private
// redis-server where none is configured; machines says that the process will make some.
func withCell(ctx context.Context, private, machines bool, f func(context.Context, *cell) error) (err error) {
	s, err := load()
	if err != nil {
		return err
	}
	if err := keepSecrets(); err != nil {
		return err
	}
	screen := &console{out: os.Stderr}
	lines := logging.NewWriter(screen)
	defer func() { err = errors.Join(err, lines.Close()) }()
	c := &cell{settings: s, screen: screen, log: slog.New(lines.Handler(s.Log.handler(lines)))}
	slog.SetDefault(c.log)
	for _, name := range misspelt(os.Environ()) {
		c.log.Warn("there is no such setting; \"ephemeral config\" lists them all", "variable", name)
	}
	if err := s.Gateway.Validate(); err != nil {
		return fmt.Errorf("settings: %w", err)
	}
	if machines {
		if os.Geteuid() != 0 {
			return errors.New("machines need root: run this as root (a gateway alone does not: \"ephemeral gateway\")")
		}
		if err := errors.Join(s.Provision.Validate(), s.Pool.Validate(), s.Artifacts.Check()); err != nil {
			return fmt.Errorf("settings: %w", err)
		}
	}
	if s.Run.RedisURL == "" {
		if !private {
			return errors.New("EPHEMERAL_REDIS_URL is not set: gateways and nodes need one Redis that all of them reach")
		}
		server, err := redisserver.Start(ctx, redisDir(s), redisserver.Options{Fsync: s.Redis.Fsync, Log: c.log})
		if errors.Is(err, redisserver.ErrInUse) {
			return fmt.Errorf("another \"ephemeral serve\" uses this EPHEMERAL_DATA_DIR (%s): %w", s.Provision.DataDir, err)
		}
		if err != nil {
			return fmt.Errorf("start the private Redis: %w", err)
		}
		defer func() { err = errors.Join(err, server.Close()) }()
		s.Run.RedisURL = server.URL()
		c.room = server.Full
	}
	if c.traces, err = tracing.Open(ctx, s.Tracing, version, c.log); err != nil {
		return fmt.Errorf("settings: %w", err)
	}
	defer c.closeTraces()
	c.store, err = run.Open(ctx, s.Run, c.options()...)
	if err != nil {
		return fmt.Errorf("open the store: %w", err)
	}
	defer func() { err = errors.Join(err, c.store.Close()) }()
	if err := c.prepareBroker(ctx, private, machines); err != nil {
		return err
	}
	c.broker, err = broker.New(c.Broker)
	if err != nil {
		return fmt.Errorf("open the broker: %w", err)
	}
	defer c.broker.Close()
	return f(ctx, c)
}

// options have the store ask the private redis-server for room, and the runs traced that no node settles, where traces are on.
func (c *cell) options() (o []run.Option) {
	if c.room != nil {
		o = append(o, run.WithRoom(c.room))
	}
	if c.traces != nil {
		o = append(o, run.WithEnded(c.traces.Ended))
	}
	return o
}

// lastTraces is how long the end of a process may wait for a collector.
const lastTraces = 3 * time.Second

// closeTraces sends the traces that are left. That a collector is away is no failure of the server.
func (c *cell) closeTraces() {
	ctx, cancel := context.WithTimeout(context.Background(), lastTraces)
	defer cancel()
	if err := c.traces.Close(ctx); err != nil {
		c.log.Warn("traces are lost", "error", err)
	}
}

// serve runs gateway and node until ctx ends or one of them fails. The gateway listens first, so that a client sees
// "not ready" and not a refused connection while the template is made; it stops last, so that clients see their runs end.
func (c *cell) serve(ctx context.Context, withGateway, withNode bool) error {
	group, ctx := errgroup.WithContext(ctx)
	context.AfterFunc(ctx, func() {
		c.log.Info("stopping: runs may go on for a while, a second signal ends all at once", "limit", c.Node.Drain)
	})
	if strings.HasPrefix(c.broker.DefaultModel(), "replay/") {
		c.log.Info("a prompt that names no model plays a recorded conversation; EPHEMERAL_DEFAULT_MODEL names another", "model", c.broker.DefaultModel())
	}
	nodeDone := make(chan struct{})
	var ready readiness
	registry := prometheus.NewRegistry()
	if withNode {
		ready.set(func() error { return errors.New("the template of machines is being made") })
		group.Go(func() error {
			defer close(nodeDone)
			return c.runNode(ctx, &ready, registry)
		})
	} else {
		close(nodeDone)
	}
	if withGateway || c.Listen.Node != "" {
		server := gateway.New(c.Gateway, gateway.Deps{
			Store: c.store, HasModel: c.broker.HasModel, DefaultModel: c.broker.DefaultModel(), Pools: pools.New(c.store), Predict: predictor(c.Pool),
			FirstSlice: c.broker.Prices().ComputePerSecond, Ready: ready.get, Traces: c.traces, Registry: registry, Log: c.log,
			Sealing: c.sealing,
		})
		group.Go(func() error {
			serving, stop := context.WithCancel(context.WithoutCancel(ctx))
			defer stop()
			go func() { <-ctx.Done(); <-nodeDone; stop() }()
			if !withGateway {
				return c.serveNode(serving, server)
			}
			c.log.Info("listening", "api", c.Gateway.Address(), "admin", "http://"+c.Gateway.AdminListen)
			return server.ListenAndServe(serving)
		})
	}
	return group.Wait()
}

// nodeListen is about a node without a gateway in its process.
type nodeListen struct {
	Node string `env:"EPHEMERAL_NODE_LISTEN" help:"address of a node's own metrics and detailed health, where it runs without a gateway; keep it private (empty: none)"`
}

// serveNode answers metrics and health of a node.
func (c *cell) serveNode(ctx context.Context, server *gateway.Server) error {
	var lc net.ListenConfig
	ln, err := lc.Listen(ctx, "tcp", c.Listen.Node)
	if err != nil {
		return fmt.Errorf("listen on %s (EPHEMERAL_NODE_LISTEN): %w", c.Listen.Node, err)
	}
	c.log.Info("listening", "admin", "http://"+c.Listen.Node)
	return server.ServeAdmin(ctx, ln)
}

// readiness asks whoever knows why the process is not ready; nil: it is.
type readiness struct {
	mu  sync.Mutex
	ask func() error
}

func (r *readiness) set(ask func() error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ask = ask
}

func (r *readiness) get() error {
	r.mu.Lock()
	ask := r.ask
	r.mu.Unlock()
	if ask == nil {
		return nil
	}
	return ask()
}
