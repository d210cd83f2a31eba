package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/pools"
)

func poolSetCommand() *cobra.Command {
	var output outputFormat
	var minReady, maxReady, maxMachines, concurrency int
	var maxAge time.Duration
	var scaleTo share
	var reset bool
	cmd := &cobra.Command{
		Use:   "set NAME",
		Short: "Change the size of a pool on every node, at once",
		Long: `Changes the policy of a pool: what is given replaces what was set before, the rest stays. Every node follows at once. Machines in
use are never touched: a smaller pool gives up ready ones.`,
		Example: `  ephemeral pool set base-1x512 --min-ready 4 --max-ready 12
  ephemeral pool set base-1x512 --scale-to 1%
  ephemeral pool set base-1x512 --reset    # back to the configuration of each node`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			set := cmd.Flags().Changed
			change := func(p *pools.Policy) {
				if reset {
					*p = pools.Policy{}
				}
				for flag, to := range map[string]struct {
					field **int
					value int
				}{
					"min-ready": {&p.MinReady, minReady}, "max-ready": {&p.MaxReady, maxReady},
					"max-machines": {&p.MaxMachines, maxMachines}, "refill-concurrency": {&p.RefillConcurrency, concurrency},
				} {
					if set(flag) {
						*to.field = &to.value
					}
				}
				if set("max-age") {
					s := maxAge.Seconds()
					p.MaxAgeSeconds = &s
				}
				if set("scale-to") {
					s := float64(scaleTo)
					p.TargetMissRate = &s
				}
			}
			return withPools(cmd, func(ctx context.Context, s *pools.Store) error {
				p, err := changePolicy(ctx, s, args[0], change)
				if err != nil {
					return err
				}
				if err := output.print(cmd, p, func(w io.Writer) { writePool(w, p) }); err != nil {
					return err
				}
				return unfollowed(p)
			})
		},
	}
	flags := cmd.Flags()
	flags.IntVar(&minReady, "min-ready", 0, "machines kept ready")
	flags.IntVar(&maxReady, "max-ready", 0, "ready machines above this number are destroyed")
	flags.IntVar(&maxMachines, "max-machines", 0, "machines alive at once, and runs at once")
	flags.IntVar(&concurrency, "refill-concurrency", 0, "machines made at once")
	flags.DurationVar(&maxAge, "max-age", 0, "how long a machine may wait ready before it is replaced; 0: for ever")
	flags.Var(&scaleTo, "scale-to", "target miss rate of a pool that scales itself, as 1% or 0.01; 0: it does not")
	flags.BoolVar(&reset, "reset", false, "forget what was set before")
	cmd.MarkFlagsOneRequired("min-ready", "max-ready", "max-machines", "refill-concurrency", "max-age", "scale-to", "reset")
	output.flag(cmd)
	return cmd
}

func poolDrainCommand() *cobra.Command {
	var output outputFormat
	var nodes []string
	var undo bool
	var wait time.Duration
	cmd := &cobra.Command{
		Use:   "drain NAME",
		Short: "Keep no machine ready and take no run, on every node or on some",
		Long: `Drains a pool: its ready machines are destroyed, none is made and no run is taken. Machines in use go on to the end of their runs.
Runs wait in the queue, or go to the nodes that are not drained.`,
		Example: `  ephemeral pool drain base-1x512 --node node-1f2e3d4c --wait 10m    # before maintenance of a host
  ephemeral pool drain base-1x512 --node node-1f2e3d4c --undo
  ephemeral pool drain base-1x512`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			change := func(p *pools.Policy) {
				if len(nodes) == 0 {
					p.Drained = !undo
					if undo {
						p.DrainedNodes = nil
					}
				}
				for _, n := range nodes {
					p.DrainedNodes = slices.DeleteFunc(p.DrainedNodes, func(o string) bool { return o == n })
					if !undo {
						p.DrainedNodes = append(p.DrainedNodes, n)
					}
				}
			}
			return withPools(cmd, func(ctx context.Context, s *pools.Store) error {
				p, err := changePolicy(ctx, s, args[0], change)
				if err == nil && !undo && wait > 0 {
					p, err = await(ctx, s, args[0], wait, drained)
				}
				if err != nil {
					return err
				}
				if err := output.print(cmd, p, func(w io.Writer) { writePool(w, p) }); err != nil {
					return err
				}
				if !undo && wait > 0 && !drained(p) {
					return fmt.Errorf("machines are still in use after %s; they go on to the end of their runs", wait)
				}
				return unfollowed(p)
			})
		},
	}
	cmd.Flags().StringSliceVar(&nodes, "node", nil, "drain this node only (may be repeated)")
	cmd.Flags().BoolVar(&undo, "undo", false, "fill it again and take runs")
	cmd.Flags().DurationVar(&wait, "wait", 0, "wait so long for the last machine to be gone")
	output.flag(cmd)
	return cmd
}

// drained tells whether nothing is left where the pool is to be drained.
func drained(p pools.Pool) bool {
	return !slices.ContainsFunc(p.Nodes, func(n pools.Report) bool { return p.Policy.Drains(n.Node) && n.State != "drained" })
}

// unfollowed is the error of nodes that do not follow the policy.
func unfollowed(p pools.Pool) error {
	var errs []error
	for _, n := range p.Nodes {
		switch {
		case n.Error != "":
			errs = append(errs, fmt.Errorf("node %s does not follow: %s", n.Node, n.Error))
		case n.Revision < p.Policy.Revision:
			errs = append(errs, fmt.Errorf("node %s has not followed yet", n.Node))
		}
	}
	return errors.Join(errs...)
}

// changePolicy changes what is set, whatever others change at the same time, and waits for the nodes to follow.
func changePolicy(ctx context.Context, s *pools.Store, name string, change func(*pools.Policy)) (pools.Pool, error) {
	for range 10 {
		p, err := s.Get(ctx, name)
		if err != nil {
			return p, err
		}
		policy := p.Policy.Policy
		change(&policy)
		d, err := s.Set(ctx, name, policy, p.Policy.Revision)
		if errors.Is(err, run.ErrState) {
			continue // somebody else was faster
		}
		if err != nil {
			return p, err
		}
		return followed(ctx, s, name, d.Revision)
	}
	return pools.Pool{}, fmt.Errorf("pool %s is being changed by others all the time: %w", name, run.ErrState)
}
