package run

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// scrubEvery is the shortest time between two snapshots that are made to get rid of content.
const scrubEvery = 30 * time.Second

// scrub keeps the promise of zero data retention where Redis made a snapshot of its memory (a rewrite of the append-only
// file, an RDB file) while such content waited for a node: the scripts left a stain, and Redis is asked for a new snapshot
// that replaces the old one. Redis services that do not let their clients do that keep theirs as long as they say.
func (s *Store) scrub(ctx context.Context) error {
	n, err := s.rdb.Exists(ctx, s.keys.stain()).Result()
	if err != nil {
		return fmt.Errorf("look for content in snapshots: %w", unavailable(err))
	}
	if n == 0 {
		return nil
	}
	mine, err := s.rdb.SetNX(ctx, s.keys.scrub(), "1", scrubEvery).Result()
	if err != nil || !mine {
		return unavailable(err)
	}
	// The stain goes first: one that comes while the snapshot is made needs another.
	if err := s.rdb.Del(ctx, s.keys.stain()).Err(); err != nil {
		return unavailable(err)
	}
	if err := s.resnapshot(ctx); err != nil {
		if strings.Contains(err.Error(), "in progress") {
			return unavailable(s.rdb.Set(ctx, s.keys.stain(), "1", 0).Err())
		}
		if err := unavailable(err); !strings.Contains(err.Error(), "unknown command") && !strings.Contains(err.Error(), "NOPERM") {
			return fmt.Errorf("replace snapshot: %w", err)
		}
		slog.WarnContext(ctx, "Redis does not allow its snapshots to be replaced; content under zero data retention stays in one until Redis makes the next", "error", err)
	}
	return nil
}

// resnapshot has the server that holds the cell replace the snapshots that it makes.
func (s *Store) resnapshot(ctx context.Context) error {
	var rdb interface {
		redis.Cmdable
		Do(ctx context.Context, args ...any) *redis.Cmd
	} = s.rdb
	if c, ok := s.rdb.(*redis.ClusterClient); ok {
		master, err := c.MasterForKey(ctx, s.keys.stain())
		if err != nil {
			return err
		}
		rdb = master
	}
	info, err := rdb.Info(ctx, "persistence").Result()
	if err != nil {
		return err
	}
	if strings.Contains(info, "aof_enabled:1") {
		if err := rdb.BgRewriteAOF(ctx).Err(); err != nil {
			return err
		}
	}
	if strings.Contains(info, "aof_enabled:0") || !strings.Contains(info, "rdb_saves:0") {
		return rdb.Do(ctx, "BGSAVE", "SCHEDULE").Err()
	}
	return nil
}
