package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/ephemeral-run/ephemeral/images"
	"github.com/ephemeral-run/ephemeral/node"
	"github.com/ephemeral-run/ephemeral/node/guest"
	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/pool"
	"github.com/ephemeral-run/ephemeral/vmm/provision"
)

// reconcileTime bounds the removal of what an earlier life of the node left.
const reconcileTime = time.Minute

// runNode carries out runs until ctx ends: what an earlier life left is removed, the template made, the pool filled.
// It returns when no machine is left.
func (c *cell) runNode(ctx context.Context, ready *readiness, registry *prometheus.Registry) (err error) {
	image, err := images.Open(filepath.Join(imageDir(c.settings), c.Image.Name))
	if err != nil {
		return fmt.Errorf("open the image: %w", err)
	}
	driver, err := openDriver(c.settings, c.log)
	if err != nil {
		return fmt.Errorf("open the hypervisor: %w", err)
	}
	defer func() { err = errors.Join(err, driver.Close()) }()
	parts, err := provision.New(ctx, c.Provision, driver, provision.Agent{Probe: guest.Probe, Warm: guest.Warm})
	if err != nil {
		return fmt.Errorf("open the host's parts: %w", err)
	}
	defer func() { err = errors.Join(err, parts.Close()) }()
	if err := c.reconcile(ctx, parts); err != nil {
		return err
	}
	source := parts.Source(image, c.Provision.Shape(), func(line string) { c.log.Info("template", "step", line) })
	template, err := source.Template(ctx)
	if err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return fmt.Errorf("make the template: %w", err)
	}
	options := []pool.Option{pool.WithLogger(c.log), pool.WithAdmission(parts.Admit)}
	if parts.Rest() == provision.RestRunning { // idle guests lose their pages
		options = append(options, pool.WithKeepWarm(func(ctx context.Context, m *provision.Machine) error { return guest.Probe(ctx, m) }))
	}
	machines, err := pool.New(c.Pool, source.Create, options...)
	if err != nil {
		return fmt.Errorf("open the pool: %w", err)
	}
	defer func() { err = errors.Join(err, machines.Close()) }()
	ready.set(machines.Ready)

	metrics, err := node.NewMetrics(registry)
	if err != nil {
		return fmt.Errorf("register metrics: %w", err)
	}
	runner := &node.Runner{
		Store: c.store, Broker: c.broker, Pool: machines, Image: image.Digest, Isolation: string(driver.Isolation()),
		Lease: c.Run.Lease, Grace: c.Node.Grace, Artifacts: c.Artifacts, Metrics: metrics, Log: c.log,
	}
	cfg := c.Node
	if cfg.Concurrency == 0 {
		cfg.Concurrency = c.Pool.MaxMachines
	}
	n, err := node.New(parts.Node(), cfg, c.Run.Lease, c.store, runner, c.log)
	if err != nil {
		return err
	}
	if driver.Isolation() == vmm.Emulated {
		c.log.Warn("machines are emulated on this host: that is slow, and no security boundary; \"ephemeral doctor\" says what KVM needs")
	}
	c.log.Info("node is ready", "node", parts.Node(), "driver", driver.Name(), "version", driver.Version(),
		"isolation", driver.Isolation(), "image", image.Digest, "template", template.Key)
	self := run.Node{ID: parts.Node(), Version: version, Hypervisor: driver.Name() + " " + driver.Version(),
		Isolation: string(driver.Isolation()), Image: image.Digest, Slots: cfg.Concurrency, StartedAt: time.Now().UTC()}
	watching, stop := context.WithCancel(context.WithoutCancel(ctx))
	watched := make(chan error, 1)
	go func() { watched <- runner.Watch(watching) }()
	announced := make(chan struct{})
	go func() {
		defer close(announced)
		node.Announce(watching, c.store, func() run.Node {
			now := self
			now.Running, now.Ready, now.Draining = runner.Running(), machines.Stats().Ready, ctx.Err() != nil
			return now
		}, c.log)
	}()
	err = n.Run(ctx)
	stop()
	<-announced
	return errors.Join(err, <-watched)
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
