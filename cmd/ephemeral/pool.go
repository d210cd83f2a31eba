package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/pools"
)

func poolCommand() *cobra.Command {
	return group("pool", "See, change and size the pools of ready machines",
		`All but simulate work on the cell's Redis: EPHEMERAL_REDIS_URL, or the private one of a running "ephemeral serve" with the same
EPHEMERAL_DATA_DIR. Nodes follow at once. The API has the same under /v1/pools.`,
		poolShowCommand(), poolSetCommand(), poolDrainCommand(), poolTopCommand(), poolRecordCommand(), poolSimulateCommand())
}

// withPools opens the cell's pools for one command.
func withPools(cmd *cobra.Command, f func(context.Context, *pools.Store) error) error {
	return withStore(cmd, func(ctx context.Context, s *run.Store) error { return f(ctx, pools.New(s)) })
}

// thePool is the pool of that name, or the only one when none is named.
func thePool(ctx context.Context, s *pools.Store, args []string) (pools.Pool, error) {
	if len(args) > 0 {
		return s.Get(ctx, args[0])
	}
	all, err := s.List(ctx)
	if err != nil {
		return pools.Pool{}, err
	}
	switch len(all) {
	case 0:
		return pools.Pool{}, errors.New("there is no pool: no node of this cell has reported one")
	case 1:
		return all[0], nil
	}
	return pools.Pool{}, fmt.Errorf("there are %d pools: name one (\"ephemeral pool show\" lists them)", len(all))
}

// followTime is how long a command waits for nodes to follow a policy. They are told at once; a busy one answers later.
const followTime = 5 * time.Second

// followed waits until every node that reports the pool follows the policy or says why not, but not for ever.
func followed(ctx context.Context, s *pools.Store, name string, revision int64) (pools.Pool, error) {
	return await(ctx, s, name, followTime, func(p pools.Pool) bool {
		for _, n := range p.Nodes {
			if n.Revision < revision && n.Error == "" {
				return false
			}
		}
		return true
	})
}

// await reads the pool until done says so or the time is over, and returns it as it is then.
func await(ctx context.Context, s *pools.Store, name string, limit time.Duration, done func(pools.Pool) bool) (pools.Pool, error) {
	deadline := time.Now().Add(limit)
	for {
		p, err := s.Get(ctx, name)
		if err != nil || done(p) || time.Now().After(deadline) {
			return p, err
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return p, context.Cause(ctx)
		}
	}
}
