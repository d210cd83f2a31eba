package jail

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/ephemeral-run/ephemeral/vmm"
)

// Namespace runs functions, one at a time, on a thread that lives in the network namespace that programs are to be in and
// that lives longer than they: *network.Network is one. The thread must not be the first one of the process.
type Namespace interface {
	Do(func() error) error
}

// Options of a cell.
type Options struct {
	MemoryMiB int       // the guest's memory; the cgroup's limit is that plus Config.OverheadMiB
	Netns     Namespace // of the node
}

func (o Options) validate() error {
	if o.MemoryMiB < 1 || o.MemoryMiB > 1<<24 {
		return fmt.Errorf("memory of %d MiB", o.MemoryMiB)
	}
	if o.Netns == nil {
		return errors.New("no network namespace")
	}
	return nil
}

// Cell is the jail of one machine. It implements vmm.Launcher. Its methods are safe for concurrent use.
type Cell struct {
	jail   *Jail
	id     string
	netns  Namespace
	uid    int
	cgroup group
	limit  int // MiB

	mu       sync.Mutex
	launches sync.WaitGroup // that are under way
	running  map[*process]struct{}
	closed   bool
	close    func() error
}

var _ vmm.Launcher = (*Cell)(nil)

func (c *Cell) make(o Options) (err error) {
	if c.uid, err = c.jail.uids.take(); err != nil {
		return err
	}
	cfg := c.jail.config
	c.limit = o.MemoryMiB + cfg.OverheadMiB
	c.cgroup, err = c.jail.cgroups.create(c.id, limits{
		memory: int64(c.limit) << 20,
		pids:   int64(cfg.Pids),
		weight: uint64(cfg.CPUWeight),
	})
	if err != nil {
		return errors.Join(fmt.Errorf("cgroup: %w", err), c.jail.uids.give(c.uid))
	}
	return nil
}

// UID is the user id, and the group id, that the machine's programs run under. Nobody else on this host has it, so what
// belongs to it with mode 0600 or 0700 is the machine's alone.
func (c *Cell) UID() int { return c.uid }

// urgentWeight is the most that a cgroup can weigh.
const urgentWeight = 10000

// SetUrgent gives the cell's programs the CPU before those of other cells, or takes that back. It must be taken back before
// anything untrusted runs.
func (c *Cell) SetUrgent(urgent bool) error {
	weight := uint64(c.jail.config.CPUWeight)
	if urgent {
		weight = urgentWeight
	}
	if err := c.cgroup.weigh(weight); err != nil {
		return fmt.Errorf("set the CPU weight of machine %s: %w", c.id, err)
	}
	return nil
}

// Close kills every program of the cell, waits until they have ended, removes the cgroup and gives the user id back. A user
// id whose processes do not end is not given back. It is idempotent.
func (c *Cell) Close() error { return c.close() }

func (c *Cell) shut() error {
	ctx, cancel := context.WithTimeout(context.Background(), endLimit)
	defer cancel()
	c.mu.Lock()
	c.closed = true
	running := make([]*process, 0, len(c.running))
	for p := range c.running {
		running = append(running, p)
	}
	c.mu.Unlock()
	var errs []error
	for _, p := range running {
		errs = append(errs, p.Kill())
	}
	c.launches.Wait() // those see that the cell is closed and end what they started
	for _, p := range running {
		select {
		case <-p.Done():
		case <-ctx.Done():
			errs = append(errs, fmt.Errorf("process %d does not end", p.Pid()))
		}
	}
	if _, err := empty(ctx, c.cgroup); err != nil {
		errs = append(errs, fmt.Errorf("remove cgroup: %w", err)) // RemoveStale tries again
	} else {
		errs = append(errs, c.jail.uids.give(c.uid))
	}
	c.jail.forget(c)
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("close cell %s: %w", c.id, err)
	}
	return nil
}

// begin says that a launch is under way; c.launches.Done ends it.
func (c *Cell) begin() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return ErrClosed
	}
	c.launches.Add(1)
	return nil
}

// keep makes a started program one that Close ends. ErrClosed: the cell was closed meanwhile, it is the caller's to end.
func (c *Cell) keep(p *process) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return ErrClosed
	}
	select {
	case <-p.done: // it was quick
	default:
		c.running[p] = struct{}{}
	}
	return nil
}

func (c *Cell) drop(p *process) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.running, p)
}
