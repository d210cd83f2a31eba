// Package node takes runs from the queue and carries each one out: it claims a machine, prepares it, starts the worker,
// relays its events, meters compute, destroys the machine and settles the money.
package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/ephemeral-run/ephemeral/run"
)

// Config says how a node works.
type Config struct {
	Concurrency int           `env:"EPHEMERAL_NODE_CONCURRENCY" envDefault:"0" help:"runs at once on this node (0: as many as the pool may have machines)"`
	Drain       time.Duration `env:"EPHEMERAL_NODE_DRAIN" envDefault:"30s" help:"how long a stopping node lets its runs go on before it ends them"`
	Grace       time.Duration `env:"EPHEMERAL_BUDGET_GRACE" envDefault:"2s" help:"how long a run may write its results when its budget pays for nothing else (whole seconds, at most 10s and an eighth of the budget)"`
}

// Executor carries out one run: it must bring the leased run to a terminal state or give it back, and return only when
// nothing of it is left on the node. ctx ends when the node must be gone; the cause says why.
type Executor interface {
	Execute(ctx context.Context, l *run.Lease)
}

// errShutdown ends the runs of a node that stops.
var errShutdown = errors.New("node stopped")

// Node takes runs for an executor. Its zero value is not usable; see New.
type Node struct {
	name  string
	cfg   Config
	lease time.Duration
	store *run.Store
	exec  Executor
	slots *slots
	able  func() []string // images that it has machines of; nil: all
	log   *slog.Logger
}

// New makes a node of the given name; Run starts it. Concurrency must be at least 1. lease is how long the store lets a
// node own a run without renewing.
func New(name string, cfg Config, lease time.Duration, store *run.Store, exec Executor, log *slog.Logger) (*Node, error) {
	if cfg.Concurrency < 1 {
		return nil, fmt.Errorf("node concurrency is %d: it must be at least 1", cfg.Concurrency)
	}
	return &Node{name: name, cfg: cfg, lease: lease, store: store, exec: exec, slots: newSlots(cfg.Concurrency), log: log}, nil
}

// SetConcurrency changes how many runs the node carries out at once, from now on. Runs at work go on, also those above it.
// With 0 the node takes none.
func (n *Node) SetConcurrency(runs int) {
	n.slots.resize(runs)
}

// SetImages has the node take only runs of the images that able names, which it asks with every look at the queue. It is called
// before Run; without it the node takes runs of all images.
func (n *Node) SetImages(able func() []string) { n.able = able }

// Concurrency is how many runs the node carries out at once, now.
func (n *Node) Concurrency() int { return n.slots.now() }

// Run first recovers what an earlier life of this node left in the queue, then takes runs until ctx ends, and returns
// when every run it took has ended. Runs still going after Config.Drain are ended as failed: node_lost.
func (n *Node) Run(ctx context.Context) error {
	requeued, lost, err := n.store.Reap(ctx, n.name)
	if err != nil {
		return fmt.Errorf("recover the runs of node %s: %w", n.name, err)
	}
	if requeued+lost > 0 {
		n.log.Info("recovered runs of an earlier life", "requeued", requeued, "lost", lost)
	}
	var workers sync.WaitGroup
	work, stop := context.WithCancelCause(context.WithoutCancel(ctx))
	defer stop(nil)
	workers.Go(func() { n.reap(ctx) })
	n.take(ctx, work, &workers)

	drained := make(chan struct{})
	go func() { workers.Wait(); close(drained) }()
	select {
	case <-drained:
	case <-time.After(n.cfg.Drain):
		n.log.Warn("ending runs that are still going", "after", n.cfg.Drain)
		stop(errShutdown)
		<-drained
	}
	return nil
}

// take hands each run it gets to the executor, as many at once as there are slots.
func (n *Node) take(ctx, work context.Context, workers *sync.WaitGroup) {
	for {
		taking, taken, free, err := n.slots.acquire(ctx)
		if err != nil {
			return
		}
		lease, err := n.store.TakeOf(taking, n.name, n.able)
		fewer := errors.Is(context.Cause(taking), errFewer)
		taken()
		if err != nil {
			free()
			if ctx.Err() != nil {
				return
			}
			if !fewer {
				n.log.Warn("cannot take a run", "error", err)
				sleepUntil(ctx, time.Now().Add(500*time.Millisecond))
			}
			continue
		}
		workers.Go(func() {
			defer free()
			n.exec.Execute(work, lease)
		})
	}
}

// reap recovers runs whose node is gone: any node does it for all, as often as half a lease.
func (n *Node) reap(ctx context.Context) {
	for sleepUntil(ctx, time.Now().Add(n.lease/2)) {
		requeued, lost, err := n.store.Reap(ctx, "")
		if err != nil {
			if ctx.Err() == nil {
				n.log.Warn("cannot reap expired leases", "error", err)
			}
			continue
		}
		if requeued+lost > 0 {
			n.log.Info("reaped expired leases", "requeued", requeued, "lost", lost)
		}
	}
}
