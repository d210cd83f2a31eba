package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/ephemeral-run/ephemeral/images"
	"github.com/ephemeral-run/ephemeral/node"
	"github.com/ephemeral-run/ephemeral/node/control"
	"github.com/ephemeral-run/ephemeral/node/guest"
	"github.com/ephemeral-run/ephemeral/node/imagepool"
	"github.com/ephemeral-run/ephemeral/node/poolmetrics"
	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/pools"
	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/pool"
	"github.com/ephemeral-run/ephemeral/vmm/provision"
)

// reconcileTime bounds the removal of what an earlier life of the node left.
const reconcileTime = time.Minute

// runNode carries out runs until ctx ends: what an earlier life left is removed, the pools filled as soon as there are
// templates to make machines of. It returns when no machine is left.
func (c *cell) runNode(ctx context.Context, ready *readiness, registry *prometheus.Registry) (err error) {
	wanted, err := imagepool.Parse(c.Image.Names)
	if err != nil {
		return fmt.Errorf("settings: %w", err)
	}
	for _, w := range wanted {
		image, err := images.Open(c.imagePath(w.Image))
		if err != nil {
			return fmt.Errorf("open image %s: %w", w.Image, err)
		}
		variable, memory := "EPHEMERAL_IMAGES", w.MemoryMiB
		if memory == 0 {
			variable, memory = "EPHEMERAL_MACHINE_MEMORY_MIB", c.Provision.MemoryMiB
		}
		if err := image.CheckMemory(memory); err != nil {
			return fmt.Errorf("settings: %s: %w", variable, err)
		}
	}
	driver, err := openDriver(c.settings, c.log)
	if err != nil {
		return fmt.Errorf("open the hypervisor: %w", err)
	}
	defer func() { err = errors.Join(err, driver.Close()) }()
	parts, err := provision.New(ctx, c.Provision, driver, provision.Agent{Probe: guest.Probe, Warm: guest.Warm, Prepare: guest.PrepareClone})
	if err != nil {
		return fmt.Errorf("open the host's parts: %w", err)
	}
	defer func() { err = errors.Join(err, parts.Close()) }()
	if err := c.reconcile(ctx, parts); err != nil {
		return err
	}
	s := &stand{cell: c, parts: parts, driver: driver, registry: registry, set: imagepool.New()}
	defer func() { err = errors.Join(err, s.close()) }()
	if err := s.openPools(wanted); err != nil {
		return err
	}
	ready.set(s.set.Ready)
	c.log.Info("node starts", "node", parts.Node(), "driver", driver.Name(), "version", driver.Version(),
		"isolation", driver.Isolation(), "images", s.images())
	return s.run(ctx)
}

// imagePath is where an image is.
func (c *cell) imagePath(name string) string { return filepath.Join(imageDir(c.settings), name) }

// stand is a node with its pools.
type stand struct {
	*cell
	parts    *provision.Provisioner
	driver   vmm.Driver
	registry *prometheus.Registry
	set      *imagepool.Set
	pools    []*imagePool // in the order of the configuration
	control  *control.Controller
}

// imagePool is the pool of one image.
type imagePool struct {
	image    string
	name     string
	keeper   *provision.Keeper
	machines *pool.Pool[*provision.Machine]
	latency  *control.Latencies
}

// poolName is that of the pool of an image and a shape.
func poolName(image string, s vmm.Shape) string {
	return fmt.Sprintf("%s-%dx%d", image, s.VCPUs, s.MemoryMiB)
}

// openPools opens the pools. Several share what the node is configured with.
func (s *stand) openPools(wanted []imagepool.Wanted) error {
	var shared *pool.Limits
	if len(wanted) > 1 || s.Image.MemoryMiB > 0 {
		capacity := pool.Capacity{MemoryMiB: s.Image.MemoryMiB}
		if len(wanted) > 1 {
			capacity.Machines, capacity.Makes = s.Pool.MaxMachines, s.Pool.RefillConcurrency
		}
		var err error
		if shared, err = pool.NewLimits(capacity); err != nil {
			return fmt.Errorf("settings: %w", err)
		}
	}
	for _, w := range wanted {
		if err := s.openPool(w, shared); err != nil {
			return err
		}
	}
	return nil
}

// openPool opens the pool of an image, with no machine in it: the controller gives it its size, as soon as there is a template.
func (s *stand) openPool(w imagepool.Wanted, shared *pool.Limits) error {
	shape := s.Provision.Shape()
	if w.MemoryMiB > 0 {
		shape.MemoryMiB = w.MemoryMiB
	}
	p := &imagePool{image: w.Image, name: poolName(w.Image, shape)}
	observer, err := poolmetrics.New(s.registry, p.name)
	if err != nil {
		return err
	}
	open := func() (*images.Held, error) { return images.Hold(s.imagePath(w.Image)) }
	progress := func(line string) {
		s.log.Info("template", "pool", p.name, "step", line)
		s.screen.template(p.name, line)
	}
	p.keeper = s.parts.Keeper(open, shape, progress, func(t vmm.Template) { s.renewed(p, t) })
	p.keeper.Observe(observer)
	p.latency = &control.Latencies{Next: observer}
	options := []pool.Option{pool.WithLogger(s.log), pool.WithAdmission(p.keeper.Admit), pool.WithObserver(p.latency), pool.WithPatience(vmm.Patience)}
	if shared != nil {
		options = append(options, pool.WithLimits(shared, shape.MemoryMiB))
	}
	if s.parts.Rest() == provision.RestRunning { // idle guests lose their pages
		options = append(options, pool.WithKeepWarm(func(ctx context.Context, m *provision.Machine) error { return m.Exercise(ctx) }))
	}
	empty := s.Pool
	empty.MinReady, empty.MaxReady = 0, 0
	if p.machines, err = pool.New(empty, p.keeper.Create, options...); err != nil {
		return fmt.Errorf("open the pool of image %s: %w", w.Image, err)
	}
	s.pools = append(s.pools, p)
	s.set.Add(w.Image, p.keeper, p.machines)
	return poolmetrics.Watch(s.registry, p.name, p.machines)
}

// close closes the pools.
func (s *stand) close() error {
	errs := make([]error, len(s.pools))
	var closing sync.WaitGroup
	for i, p := range s.pools {
		closing.Go(func() { errs[i] = p.machines.Close() })
	}
	closing.Wait()
	return errors.Join(errs...)
}

// renewed has a pool make its machines of another template from now on.
func (s *stand) renewed(p *imagePool, t vmm.Template) {
	s.log.Info("machines are made of a new template", "pool", p.name, "image", t.Image.Digest, "template", t.Key)
	p.machines.Swap(p.keeper.Create)
	s.control.Refresh()
}

// digest is that of the image that the pool's machines are made of; empty: none is.
func (p *imagePool) digest() string {
	t, _ := p.keeper.Template()
	return t.Image.Digest
}

// images are the names of the images that the node serves.
func (s *stand) images() []string {
	names := make([]string, len(s.pools))
	for i, p := range s.pools {
		names[i] = p.image
	}
	return names
}

// readyMachines is how many machines wait for a run.
func (s *stand) readyMachines() int {
	n := 0
	for _, p := range s.pools {
		n += p.machines.Stats().Ready
	}
	return n
}

// subjects are the pools as operators control them.
func (s *stand) subjects() []control.Subject {
	all := make([]control.Subject, len(s.pools))
	for i, p := range s.pools {
		shape := p.keeper.Shape()
		all[i] = control.Subject{
			Name: p.name, Pool: p.machines, Config: s.Pool, Image: p.digest, Unready: p.keeper.Ready, Latencies: p.latency,
			Report: pools.Report{VCPUs: shape.VCPUs, MemoryMiB: shape.MemoryMiB, Rest: string(s.parts.Rest())},
			Take:   func(runs int) { s.set.Take(p.image, runs) },
		}
	}
	return all
}

// together is how many runs the node carries out at once, at most; 0: as many as its pool allows.
func (s *stand) together() int {
	if s.Node.Concurrency == 0 && len(s.pools) > 1 {
		return s.Pool.MaxMachines
	}
	return s.Node.Concurrency
}

// used notes that a run had a machine of an image.
func (s *stand) used(image string, queued time.Time, service time.Duration) {
	for _, p := range s.pools {
		if p.image == image {
			s.control.Used(p.name, queued, service)
		}
	}
}

// run takes runs until ctx ends.
func (s *stand) run(ctx context.Context) error {
	metrics, err := node.NewMetrics(s.registry)
	if err != nil {
		return fmt.Errorf("register metrics: %w", err)
	}
	runner := &node.Runner{
		Store: s.store, Broker: s.broker, Pool: s.set, Isolation: string(s.driver.Isolation()),
		Lease: s.Run.Lease, Grace: s.Node.Grace, Artifacts: s.Artifacts, Metrics: metrics, Traces: s.traces, Log: s.log, Used: s.used,
	}
	cfg := s.Node
	if cfg.Concurrency == 0 {
		cfg.Concurrency = s.Pool.MaxMachines
	}
	n, err := node.New(s.parts.Node(), cfg, s.Run.Lease, s.store, runner, s.log)
	if err != nil {
		return err
	}
	n.SetImages(s.set.Able)
	s.set.Limit(s.together(), n.SetConcurrency) // 0 until there are machines
	s.control = control.New(s.parts.Node(), pools.New(s.store), s.log, s.subjects()...)
	if s.driver.Isolation() == vmm.Emulated {
		s.log.Warn("machines are emulated on this host: that is slow, and no security boundary; \"ephemeral doctor\" says what KVM needs")
	}
	started := time.Now().UTC()
	beside, stop := context.WithCancel(context.WithoutCancel(ctx))
	var group errgroup.Group
	for _, p := range s.pools {
		group.Go(func() error { p.keeper.Run(ctx); return nil })
	}
	group.Go(func() error { s.control.Run(beside); return nil })
	group.Go(func() error { s.parts.Tidy(ctx, s.tidied); return nil })
	group.Go(func() error { return runner.Watch(beside) })
	group.Go(func() error {
		node.Announce(beside, s.store, func() run.Node {
			slots := n.Concurrency()
			return run.Node{
				ID: s.parts.Node(), Version: version, Hypervisor: s.driver.Name() + " " + s.driver.Version(),
				Isolation: string(s.driver.Isolation()), Image: s.pools[0].digest(), Images: s.images(), Able: s.set.Able(), Slots: slots, StartedAt: started,
				Running: runner.Running(), Ready: s.readyMachines(), Draining: slots == 0 || ctx.Err() != nil,
			}
		}, s.log)
		return nil
	})
	err = n.Run(ctx)
	stop()
	return errors.Join(err, group.Wait())
}

// tidied tells what became of a try to remove what could not be removed before.
func (s *stand) tidied(removed provision.Residue, err error) {
	if err != nil {
		s.log.Warn("what machines left cannot be removed yet", "error", err)
		return
	}
	s.log.Info("removed what machines had left", "processes", removed.Processes, "taps", removed.Taps, "directories", removed.Dirs,
		"cgroups", removed.Cgroups, "templates", removed.Templates)
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
