package main

import (
	"context"
	"fmt"
	"path/filepath"

	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/redisserver"
)

// redisConfig is about the private redis-server.
type redisConfig struct {
	Fsync string `env:"EPHEMERAL_REDIS_FSYNC" envDefault:"always" help:"when the private redis-server syncs to disk: always, before it answers, or everysec, which can lose what it acknowledged in the last two seconds when it is killed or the host crashes"`
}

// redisDir is where the private redis-server of this data directory lives.
func redisDir(s settings) string { return filepath.Join(s.Provision.DataDir, "redis") }

// openStore opens the cell's Redis: the one that is configured, or the private one of a running server.
func openStore(ctx context.Context, s settings, options ...run.Option) (*run.Store, error) {
	if s.Run.RedisURL == "" {
		url, err := redisserver.Find(redisDir(s))
		if err != nil {
			return nil, fmt.Errorf("%w: start \"ephemeral serve\" with this EPHEMERAL_DATA_DIR (%s), or set EPHEMERAL_REDIS_URL", err, s.Provision.DataDir)
		}
		s.Run.RedisURL = url
	}
	store, err := run.Open(ctx, s.Run, options...)
	if err != nil {
		return nil, fmt.Errorf("open the store: %w", err)
	}
	return store, nil
}
