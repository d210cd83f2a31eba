package run

import (
	"context"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"
)

// Totals are a cell's numbers for its operator.
type Totals struct {
	Waiting int64         // runs that wait for a node or for others of their key
	Oldest  time.Duration // how long the first of those in the queues has waited; 0: none waits
	Leased  int64         // runs that nodes have
	Held    Micros        // reserved for runs that have not ended
	Charged Micros        // in all
}

// Totals sums up all organisations, in two round trips.
func (s *Store) Totals(ctx context.Context) (Totals, error) {
	orgs, err := s.rdb.ZRange(ctx, s.keys.orgs(), 0, -1).Result()
	if err != nil {
		return Totals{}, fmt.Errorf("totals: %w", unavailable(err))
	}
	queued, parked := make([]*redis.IntCmd, len(orgs)), make([]*redis.IntCmd, len(orgs))
	first, money := make([]*redis.ZSliceCmd, len(orgs)), make([]*redis.SliceCmd, len(orgs))
	var leased *redis.IntCmd
	err = s.pipelined(ctx, func(p redis.Pipeliner) {
		leased = p.ZCard(ctx, s.keys.leases())
		for i, o := range orgs {
			queued[i], parked[i] = p.ZCard(ctx, s.keys.queue(o)), p.ZCard(ctx, s.keys.parked(o))
			first[i] = p.ZRangeWithScores(ctx, s.keys.queue(o), 0, 0)
			money[i] = p.HMGet(ctx, s.keys.org(o), "held", "charged")
		}
	})
	if err != nil {
		return Totals{}, fmt.Errorf("totals: %w", err)
	}
	t, now := Totals{Leased: leased.Val()}, s.micros()
	for i := range orgs {
		t.Waiting += queued[i].Val() + parked[i].Val()
		if z := first[i].Val(); len(z) == 1 {
			t.Oldest = max(t.Oldest, time.Duration(now-int64(z[0].Score))*time.Microsecond)
		}
		d := decoder{f: map[string]string{}}
		for j, name := range []string{"held", "charged"} {
			d.f[name], _ = money[i].Val()[j].(string)
		}
		t.Held, t.Charged = t.Held+d.money("held"), t.Charged+d.money("charged")
		if d.err != nil {
			return Totals{}, fmt.Errorf("totals of %s: %w", orgs[i], d.err)
		}
	}
	return t, nil
}
