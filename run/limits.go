package run

import (
	"context"
	"fmt"
)

// maxQueueLimit bounds the queue limits that can be set.
const maxQueueLimit = 1_000_000

var limitOrgScript, limitKeyScript, retainOrgScript = loadScript("limitorg"), loadScript("limitkey"), loadScript("retainorg")

// Limits are how many runs may be at work at once and how many may wait. 0: the default for an organisation, none for an
// API key, whose organisation's limits hold in any case.
type Limits struct {
	Concurrency int `json:"concurrency"`
	Queue       int `json:"queue"`
}

func (l Limits) check() error {
	if l.Concurrency < 0 || l.Concurrency > maxConcurrency || l.Queue < 0 || l.Queue > maxQueueLimit {
		return fmt.Errorf("limits %+v: want 0 to %d at once and 0 to %d waiting: %w", l, maxConcurrency, maxQueueLimit, ErrRange)
	}
	return nil
}

// LimitOrg sets the limits of an organisation and returns it. Runs at work go on; a lower limit on waiting runs refuses new
// ones only. ErrNotFound, ErrRange.
//
// Script limitorg.lua.
func (s *Store) LimitOrg(ctx context.Context, org string, l Limits) (Org, error) {
	if !validOrg(org) {
		return Org{}, fmt.Errorf("limit organisation %.64q: %w", org, ErrNotFound)
	}
	if err := l.check(); err != nil {
		return Org{}, fmt.Errorf("limit organisation %s: %w", org, err)
	}
	r, err := s.eval(ctx, limitOrgScript, []string{s.keys.org(org), s.keys.queue(org), s.keys.active(org), s.keys.ring()},
		org, l.Concurrency, l.Queue, s.cfg.Concurrency, s.keys.work())
	if err == nil {
		err = refused(r)
	}
	if err != nil {
		return Org{}, fmt.Errorf("limit organisation %s: %w", org, err)
	}
	return s.Org(ctx, org)
}

// RetainOrg sets how many seconds after the end of a run its content is erased: of runs that end from now on, where they do
// not ask for less themselves. 0: content stays as long as the record. ErrNotFound, ErrRange.
//
// Script retainorg.lua.
func (s *Store) RetainOrg(ctx context.Context, org string, seconds int) (Org, error) {
	switch {
	case !validOrg(org):
		return Org{}, fmt.Errorf("retention of organisation %.64q: %w", org, ErrNotFound)
	case seconds < 0 || seconds > maxRetentionSeconds:
		return Org{}, fmt.Errorf("retention of %d seconds, want 0 to %d: %w", seconds, maxRetentionSeconds, ErrRange)
	}
	r, err := s.eval(ctx, retainOrgScript, []string{s.keys.org(org)}, int64(seconds)*1000)
	if err == nil {
		err = refused(r)
	}
	if err != nil {
		return Org{}, fmt.Errorf("retention of organisation %s: %w", org, err)
	}
	return s.Org(ctx, org)
}

// LimitKey sets the limits of a member's API key. A limit counts the runs admitted with the key since it has one: runs that
// it was given before go on, and runs that may start already keep that when the limit is lowered. ErrNotFound: no such key,
// or an admin's; ErrRange.
//
// Script limitkey.lua.
func (s *Store) LimitKey(ctx context.Context, id string, l Limits) error {
	if err := l.check(); err != nil {
		return fmt.Errorf("limit key %.64q: %w", id, err)
	}
	org, err := s.orgOfKey(ctx, id)
	if err != nil {
		return fmt.Errorf("limit key: %w", err)
	}
	r, err := s.eval(ctx, limitKeyScript, []string{s.keys.limits(id), s.keys.keyParked(id), s.keys.parked(org), s.keys.org(org),
		s.keys.queue(org), s.keys.active(org), s.keys.ring()},
		org, l.Concurrency, l.Queue, s.cfg.Concurrency, s.keys.work())
	if err == nil {
		err = refused(r)
	}
	if err != nil {
		return fmt.Errorf("limit key %s: %w", id, err)
	}
	return nil
}

// KeyLimits returns the limits of a member's API key. ErrNotFound: no such key, or an admin's.
func (s *Store) KeyLimits(ctx context.Context, id string) (Limits, error) {
	if _, err := s.orgOfKey(ctx, id); err != nil {
		return Limits{}, fmt.Errorf("limits of key: %w", err)
	}
	f, err := s.rdb.HGetAll(ctx, s.keys.limits(id)).Result()
	if err != nil {
		return Limits{}, fmt.Errorf("limits of key %s: %w", id, unavailable(err))
	}
	if len(f) == 0 {
		return Limits{}, nil
	}
	d := decoder{f: f}
	l := Limits{Concurrency: int(d.int("concurrency")), Queue: int(d.int("queue"))}
	if d.err != nil {
		return Limits{}, fmt.Errorf("limits of key %s: %w", id, d.err)
	}
	return l, nil
}

// orgOfKey is the organisation of a member's key.
func (s *Store) orgOfKey(ctx context.Context, id string) (string, error) {
	sum, err := s.secretOf(ctx, id)
	if err != nil {
		return "", err
	}
	k, err := s.keyBySum(ctx, sum)
	if err != nil {
		return "", err
	}
	if k.Org == "" {
		return "", fmt.Errorf("key %s belongs to no organisation: %w", id, ErrNotFound)
	}
	return k.Org, nil
}
