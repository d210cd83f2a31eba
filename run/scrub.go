package run

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	// scrubEvery is the shortest time between two snapshots that are made to get rid of content.
	scrubEvery = 30 * time.Second
	// forgetEvery is the longest time between two: what expired by itself leaves the files by then.
	forgetEvery = 24 * time.Hour
	// eraseBatch is how many runs are erased in one step.
	eraseBatch = 100
)

// eraseDue erases the content of runs whose own retention, or that of their organisation, is over.
func (s *Store) eraseDue(ctx context.Context) error {
	ids, err := s.rdb.ZRangeByScore(ctx, s.keys.due(), &redis.ZRangeBy{
		Min: "-inf", Max: strconv.FormatInt(s.now().UnixMilli(), 10), Count: eraseBatch,
	}).Result()
	if err != nil {
		return fmt.Errorf("look for content to erase: %w", unavailable(err))
	}
	var errs []error
	for _, id := range ids {
		err := s.Delete(ctx, "", ID(id))
		if errors.Is(err, ErrNotFound) { // the record is gone as well
			err = unavailable(s.rdb.ZRem(ctx, s.keys.due(), id).Err())
		}
		if errors.Is(err, ErrUnavailable) {
			return err
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// scrub has Redis forget on the disk what is no longer in its memory. Content under zero data retention is there where
// Redis made a snapshot (a rewrite of the append-only file, an RDB file) while it waited for a node; erased content is in
// the append-only file anyway. The scripts left a stain, and Redis is asked for a new snapshot that replaces the old ones:
// at once, but every 30 seconds at the most. Content that expired by itself leaves no stain; it is gone within a day. Redis services that do not let their clients do that keep theirs as long as they say.
func (s *Store) scrub(ctx context.Context) error {
	if err := s.forget(ctx); err != nil {
		return err
	}
	if err := s.forgetUploads(ctx); err != nil {
		return err
	}
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

// forget leaves a stain once in forgetEvery.
func (s *Store) forget(ctx context.Context) error {
	now := s.micros()
	first, err := s.rdb.SetNX(ctx, s.keys.forget(), now, 0).Result()
	if err != nil || first {
		return unavailable(err)
	}
	last, err := s.rdb.Get(ctx, s.keys.forget()).Int64()
	if err != nil || time.Duration(now-last)*time.Microsecond < forgetEvery {
		return unavailable(err)
	}
	return s.pipelined(ctx, func(p redis.Pipeliner) {
		p.Set(ctx, s.keys.stain(), "1", 0)
		p.Set(ctx, s.keys.forget(), now, 0)
	})
}

// forgetUploads leaves a stain for uploads under zero data retention that expired before a run took them.
func (s *Store) forgetUploads(ctx context.Context) error {
	n, err := s.rdb.ZRemRangeByScore(ctx, s.keys.hiddenUploads(), "-inf", strconv.FormatInt(s.now().UnixMilli(), 10)).Result()
	if err != nil || n == 0 {
		return unavailable(err)
	}
	return unavailable(s.rdb.Set(ctx, s.keys.stain(), "1", 0).Err())
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
