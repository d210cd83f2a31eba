// Package control lets operators see and change the pools of a node while it runs: it follows the policies that were set,
// and reports what the pools look like.
package control

import (
	"context"
	"log/slog"
	"reflect"
	"sync"
	"time"

	"github.com/ephemeral-run/ephemeral/run/pools"
	"github.com/ephemeral-run/ephemeral/vmm/pool"
)

// Pool is what is asked of a pool.
type Pool interface {
	Resize(pool.Config) error
	Stats() pool.Stats
}

// Subject is a pool that operators control.
type Subject struct {
	Name   string
	Pool   Pool
	Config pool.Config  // as the node is configured
	Report pools.Report // what does not change: VCPUs, MemoryMiB, Rest
	Image  func() string
	// Latencies observe the pool; nil: none are reported.
	Latencies *Latencies
	// Unready says why no machine can be made at all; nil: one can. Until then the pool keeps none.
	Unready func() error
	// Take is told how many runs the node may take at once for this pool.
	Take func(runs int)
}

// Store keeps policies and reports; *pools.Store is one.
type Store interface {
	Desired(ctx context.Context, pool string) (pools.Desired, error)
	Changes(ctx context.Context, changed func(pool string))
	Report(ctx context.Context, r pools.Report) error
	Withdraw(ctx context.Context, pool, node string) error
	Used(ctx context.Context, pool string, uses []pools.Use) error
}

// How often a node looks by itself; a change of policy is followed at once.
const (
	lookEvery  = time.Second
	callTime   = 2 * time.Second
	mostUses   = 100_000          // that wait for a store that is away; further ones are dropped
	checkEvery = 30 * time.Second // between two looks at policies that nobody told of
)

// Controller controls the pools of one node.
type Controller struct {
	node     string
	store    Store
	log      *slog.Logger
	subjects []*subject
	changes  chan string // names; "": any
}

// subject is a pool under control. Its fields but uses belong to Run.
type subject struct {
	Subject
	desired  pools.Desired
	refused  string // why the newest policy is not in force
	applied  pool.Config
	ready    bool // machines can be made
	taking   int  // runs at once
	reported pools.Report
	history  pools.History
	at       time.Time // of the last report

	mu   sync.Mutex
	uses []pools.Use
}

// New makes a controller; Run starts it.
func New(node string, store Store, log *slog.Logger, subjects ...Subject) *Controller {
	c := &Controller{node: node, store: store, log: log, changes: make(chan string, 64)}
	for _, s := range subjects {
		c.subjects = append(c.subjects, &subject{Subject: s, applied: s.Config, taking: -1})
	}
	return c
}

// Used notes that a run had a machine of the pool. It never blocks.
func (c *Controller) Used(name string, queued time.Time, service time.Duration) {
	for _, s := range c.subjects {
		if s.Name == name {
			s.mu.Lock()
			if len(s.uses) < mostUses {
				s.uses = append(s.uses, pools.Use{Queued: queued, Service: service})
			}
			s.mu.Unlock()
		}
	}
}

// Refresh makes the controller look at once: something changed on the node.
func (c *Controller) Refresh() { c.tell("") }

func (c *Controller) tell(name string) {
	select {
	case c.changes <- name:
	default: // it looks anyway
	}
}

// Run follows and reports until ctx ends, and then withdraws the node's reports.
func (c *Controller) Run(ctx context.Context) {
	var following sync.WaitGroup
	following.Go(func() { c.store.Changes(ctx, c.tell) })
	defer following.Wait()
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for _, s := range c.subjects {
		c.follow(ctx, s)
	}
	checked := time.Now()
	for {
		c.reportAll(ctx)
		select {
		case <-ctx.Done():
			c.leave(context.WithoutCancel(ctx))
			return
		case name := <-c.changes:
			for _, s := range c.subjects {
				if name == "" || name == s.Name {
					c.follow(ctx, s)
				}
			}
		case <-tick.C:
			if time.Since(checked) < checkEvery {
				break
			}
			checked = time.Now()
			for _, s := range c.subjects {
				c.follow(ctx, s)
			}
		}
		for _, s := range c.subjects {
			c.apply(s)
		}
	}
}

// follow reads the policy and applies it. What cannot be read or followed leaves the one before in force.
func (c *Controller) follow(ctx context.Context, s *subject) {
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	d, err := c.store.Desired(ctx, s.Name)
	if err != nil {
		if ctx.Err() == nil {
			c.log.Warn("cannot read the policy of a pool", "pool", s.Name, "error", err)
		}
		return
	}
	if d.Revision == s.desired.Revision && s.refused == "" && !s.at.IsZero() {
		return
	}
	cfg, err := configure(s.Config, d.Policy)
	if err != nil {
		if s.refused != err.Error() {
			c.log.Warn("a pool does not follow its new policy", "pool", s.Name, "revision", d.Revision, "error", err)
		}
		s.refused = err.Error()
		return
	}
	s.refused = ""
	s.desired, s.applied = d, cfg
	c.enforce(s)
}

// apply looks whether machines can be made by now, or no more.
func (c *Controller) apply(s *subject) {
	if ready := s.Unready() == nil; ready != s.ready {
		c.enforce(s)
	} else if s.refused == "" {
		c.take(s)
	}
}

// take tells the node how many runs to take for the pool. While making machines fails those are no more than there are
// machines, and one to try with when its time has come: others wait in the queue, where another node finds them.
func (c *Controller) take(s *subject) {
	runs, st := s.applied.MaxMachines, s.Pool.Stats()
	if st.Circuit == pool.CircuitOpen || st.Circuit == pool.CircuitHalfOpen {
		there := st.Leased + st.Ready + st.Warming
		if st.CircuitUntil.IsZero() {
			there++
		}
		runs = min(runs, there)
	}
	if !s.ready || s.desired.Drains(c.node) {
		runs = 0
	}
	if runs != s.taking {
		s.taking = runs
		s.Take(runs)
	}
}

// enforce gives pool and node their numbers.
func (c *Controller) enforce(s *subject) {
	s.ready = s.Unready() == nil
	cfg := s.applied
	drained := s.desired.Drains(c.node)
	if drained || !s.ready {
		cfg.MinReady, cfg.MaxReady = 0, 0
	}
	if err := s.Pool.Resize(cfg); err != nil {
		s.refused = err.Error()
		c.log.Warn("a pool cannot be resized", "pool", s.Name, "error", err)
		return
	}
	c.take(s)
	if s.desired.Revision > 0 {
		c.log.Info("pool follows its policy", "pool", s.Name, "revision", s.desired.Revision, "min_ready", cfg.MinReady, "max_ready", cfg.MaxReady,
			"max_machines", cfg.MaxMachines, "drained", drained)
	}
}

// configure is a node's configuration with a policy in front of it.
func configure(cfg pool.Config, p pools.Policy) (pool.Config, error) {
	set := func(to *int, from *int) {
		if from != nil {
			*to = *from
		}
	}
	set(&cfg.MaxMachines, p.MaxMachines)
	set(&cfg.RefillConcurrency, p.RefillConcurrency)
	if p.MaxMachines != nil { // what the node is configured with must not make the policy impossible
		cfg.MinReady, cfg.MaxReady = min(cfg.MinReady, cfg.MaxMachines), min(cfg.MaxReady, cfg.MaxMachines)
	}
	if p.MinReady != nil {
		cfg.MinReady, cfg.MaxReady = *p.MinReady, max(cfg.MaxReady, *p.MinReady)
	}
	if p.MaxReady != nil {
		cfg.MaxReady = *p.MaxReady
		if p.MinReady == nil {
			cfg.MinReady = min(cfg.MinReady, cfg.MaxReady)
		}
	}
	if p.MaxAgeSeconds != nil {
		cfg.MaxAge = time.Duration(*p.MaxAgeSeconds * float64(time.Second))
	}
	if p.TargetMissRate != nil {
		cfg.Autoscale.TargetMissRate = *p.TargetMissRate
	}
	return cfg, cfg.Validate()
}

// reportAll stores what changed, and everything once in a while.
func (c *Controller) reportAll(ctx context.Context) {
	for _, s := range c.subjects {
		c.flush(ctx, s)
		r := c.look(s)
		s.history.Add(r)
		history := s.history
		r.History = &history
		if time.Since(s.at) < pools.ReportEvery && same(r, s.reported) {
			continue
		}
		call, cancel := context.WithTimeout(ctx, callTime)
		err := c.store.Report(call, r)
		cancel()
		if err != nil {
			if ctx.Err() == nil {
				c.log.Debug("cannot report a pool", "pool", s.Name, "error", err)
			}
			continue
		}
		s.reported, s.at = r, time.Now()
	}
}

// same tells whether two reports differ in nothing but time.
func same(a, b pools.Report) bool {
	for _, r := range []*pools.Report{&a, &b} {
		r.At, r.OldestReadySeconds, r.LongestWaitSeconds, r.Reason, r.History = time.Time{}, 0, 0, "", nil
	}
	return reflect.DeepEqual(a, b)
}

// flush stores the uses since the last time.
func (c *Controller) flush(ctx context.Context, s *subject) {
	s.mu.Lock()
	uses := s.uses
	s.uses = nil
	s.mu.Unlock()
	if len(uses) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	if err := c.store.Used(ctx, s.Name, uses); err != nil { // again with the next; a lost answer can store some twice
		s.mu.Lock()
		s.uses = append(uses, s.uses...)
		s.mu.Unlock()
	}
}

// leave withdraws what the node has reported.
func (c *Controller) leave(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	for _, s := range c.subjects {
		c.flush(ctx, s)
		if err := c.store.Withdraw(ctx, s.Name, c.node); err != nil {
			c.log.Debug("cannot withdraw a pool", "pool", s.Name, "error", err)
		}
	}
}
