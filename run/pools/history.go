package pools

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/ephemeral-run/ephemeral/run"
)

// Used adds uses to a pool's history. The history is small: about 20 bytes a use, the last 400,000 of the last week at most.
func (s *Store) Used(ctx context.Context, pool string, uses []Use) error {
	_, err := s.rdb.Pipelined(ctx, func(p redis.Pipeliner) error {
		for chunk := range slices.Chunk(uses, maxChunk) {
			p.XAdd(ctx, &redis.XAddArgs{
				Stream: s.history(pool), MaxLen: historyChunks, Approx: true, Values: []any{"u", encodeUses(chunk)},
			})
		}
		p.Expire(ctx, s.history(pool), historyKept)
		return nil
	})
	if err != nil {
		return fmt.Errorf("history of pool %s: %w", pool, run.Unavailable(err))
	}
	return nil
}

// encodeUses writes milliseconds: the time of the first use, then of each how much later it was queued than the one before,
// and how long it had its machine.
func encodeUses(uses []Use) string {
	uses = slices.Clone(uses)
	slices.SortFunc(uses, func(a, b Use) int { return a.Queued.Compare(b.Queued) })
	var b strings.Builder
	last := int64(0)
	for i, u := range uses {
		if i > 0 {
			b.WriteByte(' ')
		}
		at := u.Queued.UnixMilli()
		fmt.Fprintf(&b, "%d,%d", at-last, u.Service.Milliseconds())
		last = at
	}
	return b.String()
}

func decodeUses(text string) ([]Use, error) {
	var uses []Use
	last := int64(0)
	for part := range strings.SplitSeq(text, " ") {
		a, b, ok := strings.Cut(part, ",")
		at, err1 := strconv.ParseInt(a, 10, 64)
		service, err2 := strconv.ParseInt(b, 10, 64)
		if !ok || err1 != nil || err2 != nil {
			return nil, fmt.Errorf("stored use %.40q", part)
		}
		last += at
		uses = append(uses, Use{time.UnixMilli(last).UTC(), time.Duration(service) * time.Millisecond})
	}
	return uses, nil
}

// History is a pool's uses since a time, by the time they were queued.
func (s *Store) History(ctx context.Context, pool string, since time.Time) ([]Use, error) {
	const page = 500
	start := "-"
	if !since.IsZero() { // an entry is written after its uses were queued
		start = strconv.FormatInt(since.UnixMilli(), 10)
	}
	var all []Use
	for {
		entries, err := s.rdb.XRangeN(ctx, s.history(pool), start, "+", page).Result()
		if err != nil {
			return nil, fmt.Errorf("history of pool %s: %w", pool, run.Unavailable(err))
		}
		for _, e := range entries {
			text, _ := e.Values["u"].(string)
			uses, err := decodeUses(text)
			if err != nil {
				return nil, fmt.Errorf("history of pool %s, entry %s: %w", pool, e.ID, err)
			}
			all = append(all, uses...)
		}
		if len(entries) < page {
			break
		}
		start = "(" + entries[len(entries)-1].ID
	}
	all = slices.DeleteFunc(all, func(u Use) bool { return u.Queued.Before(since) })
	slices.SortStableFunc(all, func(a, b Use) int { return a.Queued.Compare(b.Queued) })
	return all, nil
}
