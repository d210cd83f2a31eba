package run

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"
)

// OrgQueue is what one organisation has waiting and at work.
type OrgQueue struct {
	Org    string  `json:"org"`
	Name   string  `json:"name"`
	Queued int64   `json:"queued"`         // runs that wait for a node
	Parked int64   `json:"parked"`         // runs that wait for others of their API key to end
	Leased int64   `json:"leased"`         // runs that nodes have
	Oldest float64 `json:"oldest_seconds"` // how long the first of the queued ones has waited; 0: none waits
}

// Queues returns the organisations that have runs waiting or at work, the longest queues first, limit of them at most; and
// how many there are. It takes two round trips.
func (s *Store) Queues(ctx context.Context, limit int) ([]OrgQueue, int, error) {
	orgs, err := s.rdb.ZRange(ctx, s.keys.orgs(), 0, -1).Result()
	if err != nil {
		return nil, 0, fmt.Errorf("queues: %w", unavailable(err))
	}
	type asked struct {
		queued, parked, leased *redis.IntCmd
		first                  *redis.ZSliceCmd
		name                   *redis.StringCmd
	}
	all := make([]asked, len(orgs))
	err = s.pipelined(ctx, func(p redis.Pipeliner) {
		for i, o := range orgs {
			all[i] = asked{p.ZCard(ctx, s.keys.queue(o)), p.ZCard(ctx, s.keys.parked(o)), p.SCard(ctx, s.keys.active(o)),
				p.ZRangeWithScores(ctx, s.keys.queue(o), 0, 0), p.HGet(ctx, s.keys.org(o), "name")}
		}
	})
	if err != nil {
		return nil, 0, fmt.Errorf("queues: %w", err)
	}
	now, busy := s.micros(), []OrgQueue{}
	for i, a := range all {
		q := OrgQueue{Org: orgs[i], Name: a.name.Val(), Queued: a.queued.Val(), Parked: a.parked.Val(), Leased: a.leased.Val()}
		if z := a.first.Val(); len(z) == 1 {
			q.Oldest = max(0, time.Duration(now-int64(z[0].Score))*time.Microsecond).Seconds()
		}
		if q.Queued+q.Parked+q.Leased > 0 {
			busy = append(busy, q)
		}
	}
	slices.SortFunc(busy, func(a, b OrgQueue) int {
		return cmp.Or(cmp.Compare(b.Queued+b.Parked, a.Queued+a.Parked), cmp.Compare(b.Leased, a.Leased), cmp.Compare(a.Org, b.Org))
	})
	return busy[:min(limit, len(busy))], len(busy), nil
}
