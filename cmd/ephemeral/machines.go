package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/ephemeral-run/ephemeral/images"
	"github.com/ephemeral-run/ephemeral/node"
	"github.com/ephemeral-run/ephemeral/node/control"
	"github.com/ephemeral-run/ephemeral/node/guest"
	"github.com/ephemeral-run/ephemeral/node/poolmetrics"
	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/pools"
	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/pool"
	"github.com/ephemeral-run/ephemeral/vmm/provision"
)

// reconcileTime bounds the removal of what an earlier life of the node left.
const reconcileTime = time.Minute

// runNode carries out runs until ctx ends: what an earlier life left is removed, the pool filled as soon as there is a
// template to make machines of. It returns when no machine is left.
func (c *cell) runNode(ctx context.Context, ready *readiness, registry *prometheus.Registry) (err error) {
	dir := filepath.Join(imageDir(c.settings), c.Image.Name)
	image, err := images.Open(dir)
	if err != nil {
		return fmt.Errorf("open the image: %w", err)
	}
	driver, err := openDriver(c.settings, c.log)
	if err != nil {
		return fmt.Errorf("open the hypervisor: %w", err)
	}
	defer func() { err = errors.Join(err, driver.Close()) }()
	parts, err := provision.New(ctx, c.Provision, driver, provision.Agent{Probe: guest.Probe, Warm: guest.Warm, Rehearse: guest.Rehearse})
	if err != nil {
		return fmt.Errorf("open the host's parts: %w", err)
	}
	defer func() { err = errors.Join(err, parts.Close()) }()
	name := poolName(c.Image.Name, c.Provision.Shape())
	observer, err := poolmetrics.New(registry, name)
	if err != nil {
		return err
	}
	parts.Observe(observer)
	if err := c.reconcile(ctx, parts); err != nil {
		return err
	}
	s := &stand{cell: c, parts: parts, driver: driver, name: name, observer: observer, registry: registry}
	open := func() (images.Image, error) { return images.Open(dir) }
	progress := func(line string) { c.log.Info("template", "step", line) }
	s.keeper = parts.Keeper(open, c.Provision.Shape(), progress, func(t vmm.Template) { s.renewed(t) })
	if err := s.openPool(); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.machines.Close()) }()
	ready.set(s.ready)
	c.log.Info("node starts", "node", parts.Node(), "driver", driver.Name(), "version", driver.Version(),
		"isolation", driver.Isolation(), "image", image.Digest, "pool", name)
	return s.run(ctx)
}

// stand is a node with its pool.
type stand struct {
	*cell
	parts    *provision.Provisioner
	driver   vmm.Driver
	name     string // of the pool
	observer *poolmetrics.Metrics
	registry *prometheus.Registry
	keeper   *provision.Keeper
	machines *pool.Pool[*provision.Machine]
	control  *control.Controller
}

// poolName is that of the pool of an image and a shape.
func poolName(image string, s vmm.Shape) string {
	return fmt.Sprintf("%s-%dx%d", image, s.VCPUs, s.MemoryMiB)
}

// openPool opens the pool, with no machine in it: the controller gives it its size, as soon as there is a template.
func (s *stand) openPool() (err error) {
	options := []pool.Option{pool.WithLogger(s.log), pool.WithAdmission(s.parts.Admit), pool.WithObserver(s.observer), pool.WithPatience(vmm.Patience)}
	if s.parts.Rest() == provision.RestRunning { // idle guests lose their pages
		options = append(options, pool.WithKeepWarm(func(ctx context.Context, m *provision.Machine) error { return guest.Exercise(ctx, m) }))
	}
	empty := s.Pool
	empty.MinReady, empty.MaxReady = 0, 0
	if s.machines, err = pool.New(empty, s.keeper.Create, options...); err != nil {
		return fmt.Errorf("open the pool: %w", err)
	}
	return poolmetrics.Watch(s.registry, s.name, s.machines)
}

// renewed has the pool make its machines of another template from now on.
func (s *stand) renewed(t vmm.Template) {
	s.log.Info("machines are made of a new template", "pool", s.name, "image", t.Image.Digest, "template", t.Key)
	s.machines.Swap(s.keeper.Create)
	s.control.Refresh()
}

// ready tells whether runs can be started.
func (s *stand) ready() error {
	if err := s.keeper.Ready(); err != nil {
		return err
	}
	return s.machines.Ready()
}

// image is the digest of the image that machines are made of; empty: none is.
func (s *stand) image() string {
	t, _ := s.keeper.Template()
	return t.Image.Digest
}

// run takes runs until ctx ends.
func (s *stand) run(ctx context.Context) error {
	metrics, err := node.NewMetrics(s.registry)
	if err != nil {
		return fmt.Errorf("register metrics: %w", err)
	}
	runner := &node.Runner{
		Store: s.store, Broker: s.broker, Pool: s.machines, Isolation: string(s.driver.Isolation()),
		Lease: s.Run.Lease, Grace: s.Node.Grace, Artifacts: s.Artifacts, Metrics: metrics, Traces: s.traces, Log: s.log,
		Used: func(queued time.Time, service time.Duration) { s.control.Used(s.name, queued, service) },
	}
	cfg := s.Node
	if cfg.Concurrency == 0 {
		cfg.Concurrency = s.Pool.MaxMachines
	}
	n, err := node.New(s.parts.Node(), cfg, s.Run.Lease, s.store, runner, s.log)
	if err != nil {
		return err
	}
	n.SetConcurrency(0) // until there are machines
	shape := s.Provision.Shape()
	s.control = control.New(s.parts.Node(), pools.New(s.store), s.log, control.Subject{
		Name: s.name, Pool: s.machines, Config: s.Pool, Image: s.image, Unready: s.keeper.Ready,
		Report: pools.Report{VCPUs: shape.VCPUs, MemoryMiB: shape.MemoryMiB, Rest: string(s.parts.Rest())},
		Take: func(runs int) {
			if s.Node.Concurrency > 0 {
				runs = min(runs, s.Node.Concurrency)
			}
			n.SetConcurrency(runs)
		},
	})
	if s.driver.Isolation() == vmm.Emulated {
		s.log.Warn("machines are emulated on this host: that is slow, and no security boundary; \"ephemeral doctor\" says what KVM needs")
	}
	started := time.Now().UTC()
	beside, stop := context.WithCancel(context.WithoutCancel(ctx))
	var group errgroup.Group
	group.Go(func() error { s.keeper.Run(ctx); return nil })
	group.Go(func() error { s.control.Run(beside); return nil })
	group.Go(func() error { return runner.Watch(beside) })
	group.Go(func() error {
		node.Announce(beside, s.store, func() run.Node {
			slots := n.Concurrency()
			return run.Node{
				ID: s.parts.Node(), Version: version, Hypervisor: s.driver.Name() + " " + s.driver.Version(),
				Isolation: string(s.driver.Isolation()), Image: s.image(), Slots: slots, StartedAt: started,
				Running: runner.Running(), Ready: s.machines.Stats().Ready, Draining: slots == 0 || ctx.Err() != nil,
			}
		}, s.log)
		return nil
	})
	err = n.Run(ctx)
	stop()
	return errors.Join(err, group.Wait())
}

// reconcile removes what an earlier life of this node left, and says so.
func (c *cell) reconcile(ctx context.Context, parts *provision.Provisioner) error {
	ctx, cancel := context.WithTimeout(ctx, reconcileTime)
	defer cancel()
	residue, err := parts.Reconcile(ctx)
	if residue.Total() > 0 {
		c.log.Info("removed what an earlier life of this node left", "processes", residue.Processes, "taps", residue.Taps,
			"namespaces", residue.Namespaces, "directories", residue.Dirs, "cgroups", residue.Cgroups, "templates", residue.Templates)
	}
	if err != nil {
		return fmt.Errorf("remove what an earlier life of this node left: %w", err)
	}
	return nil
}
