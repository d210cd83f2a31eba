package pool

import (
	"context"
	"fmt"
	"time"
)

// warmTime is how long an exercise may take: it is a tiny command, and a machine that cannot do it is of no use.
const warmTime = 10 * time.Second

// exercise plans the exercise of the machine that has rested longest, once it has for Config.KeepWarm. Claims go first.
func (p *policy[M]) exercise(now time.Time, pl *plan[M]) {
	if !p.keepsWarm || p.cfg.KeepWarm <= 0 || p.warming > 0 || p.closed || p.waiters.Len() > 0 {
		return
	}
	var coldest *slot[M]
	for el := p.ready.Front(); el != nil; el = el.Next() {
		if s := el.Value.(*slot[M]); coldest == nil || s.warmAt.Before(coldest.warmAt) {
			coldest = s
		}
	}
	switch {
	case coldest == nil:
	case now.Before(coldest.warmAt.Add(p.cfg.KeepWarm)):
		pl.at(coldest.warmAt.Add(p.cfg.KeepWarm))
	case p.yields(now):
		pl.at(p.yieldUntil)
	default:
		p.unready(coldest)
		coldest.state = slotWarming
		p.warming++
		pl.warms = append(pl.warms, coldest)
	}
}

// warmed puts a machine back that was exercised, or retires it because it failed.
func (p *policy[M]) warmed(s *slot[M], now time.Time, err error) {
	p.warming--
	s.warmAt = now
	if err == nil || s.dead() {
		p.offer(s, now)
		return
	}
	p.retire(s)
	p.lost(now, fmt.Errorf("machine failed its exercise in the pool: %w", err))
}

// exercise runs one exercise.
func (p *Pool[M]) exercise(s *slot[M]) {
	defer p.wake()
	ctx, cancel := context.WithCancelCause(p.ctx)
	defer cancel(nil)
	limit := p.patient(warmTime)
	stop := p.clock.AfterFunc(limit, func() {
		cancel(fmt.Errorf("not done within %s: %w", limit, context.DeadlineExceeded))
	})
	defer stop()
	err := p.warm(ctx, s.m)
	p.mu.Lock()
	p.policy.warmed(s, p.clock.Now(), err)
	closed := p.policy.closed
	p.mu.Unlock()
	if err != nil && !closed {
		p.log.Warn("exercising a machine failed", "error", err)
	}
}
