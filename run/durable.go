package run

import (
	"context"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	maxReplicas = 16
	waitTimeout = time.Second // for replicas to have a change
)

// durably sends the commands that f queues and, where replicas are configured, returns only when that many of them have
// what the commands did. All go over one connection: after a fail-over between the commands and WAIT the new primary would
// vouch for what it never had. ErrUnavailable: Redis or its replicas did not answer in time; the change may have happened,
// and can be repeated.
func (s *Store) durably(ctx context.Context, key string, f func(redis.Pipeliner)) error {
	if s.cfg.Replicas == 0 {
		return s.pipelined(ctx, f)
	}
	rdb, err := s.primary(ctx, key)
	if err != nil {
		return err
	}
	var have *redis.Cmd
	cmds, err := rdb.Pipelined(ctx, func(p redis.Pipeliner) error {
		f(p)
		// WAIT is about what its connection wrote last. A repetition writes nothing, and yet must wait for the first time.
		p.Set(ctx, s.keys.fence(), "1", 0)
		have = p.Do(ctx, "WAIT", s.cfg.Replicas, waitTimeout.Milliseconds())
		return nil
	})
	for _, c := range cmds {
		if e := c.Err(); e != nil && !missing(e) {
			return s.relocated(ctx, e)
		}
	}
	if err != nil && !missing(err) {
		return unavailable(err)
	}
	n, err := have.Int64()
	if err != nil {
		return fmt.Errorf("answer of WAIT: %w", err)
	}
	if n < int64(s.cfg.Replicas) {
		return fmt.Errorf("%d of %d replicas have the change: %w", n, s.cfg.Replicas, ErrUnavailable)
	}
	return nil
}

// evalDurably runs a script as eval does, durably.
func (s *Store) evalDurably(ctx context.Context, sc *script, keys []string, args []any) ([]any, error) {
	for attempt := 0; ; attempt++ {
		var cmd *redis.Cmd
		err := s.durably(ctx, keys[0], func(p redis.Pipeliner) { cmd = sc.EvalSha(ctx, p, keys, args...) })
		if redis.HasErrorPrefix(err, "NOSCRIPT") && attempt == 0 {
			if err := sc.Load(ctx, s.rdb).Err(); err != nil {
				return nil, unavailable(err)
			}
			continue
		}
		if err != nil {
			return nil, err
		}
		return cmd.Slice()
	}
}

// pipeliner sends commands over one connection.
type pipeliner interface {
	Pipelined(ctx context.Context, f func(redis.Pipeliner) error) ([]redis.Cmder, error)
}

// primary is the server that may write the key. A cluster's client would send WAIT, which has no key, anywhere.
func (s *Store) primary(ctx context.Context, key string) (pipeliner, error) {
	c, ok := s.rdb.(*redis.ClusterClient)
	if !ok {
		return s.rdb, nil
	}
	p, err := c.MasterForKey(ctx, key)
	if err != nil {
		return nil, fmt.Errorf("find the primary: %w: %w", ErrUnavailable, err)
	}
	return p, nil
}

// relocated is the error of a command. A cluster that has moved the cell meanwhile is looked at anew, for the repetition.
func (s *Store) relocated(ctx context.Context, err error) error {
	if c, ok := s.rdb.(*redis.ClusterClient); ok && (redis.HasErrorPrefix(err, "MOVED") || redis.HasErrorPrefix(err, "ASK")) {
		c.ReloadState(ctx)
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	return unavailable(err)
}
