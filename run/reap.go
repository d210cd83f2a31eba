package run

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/redis/go-redis/v9"
)

const (
	maxLost   = 5   // a run whose nodes die this often is not tried again
	reapBatch = 200 // leases looked at in one step
)

var reapScript = loadScript("reap")

// Reap ends the ownership of nodes that are gone: runs whose lease has expired and, with deadNode, all runs of that node,
// whose life the caller knows to be over. What never started costs nothing and goes back to the queue, at its old place (or
// ends cancelled when that was asked for); what had started ends failed, "node_lost", settled with what was captured. A run
// that never started ends so too, costing nothing, under zero data retention, since only its node had the content, and when
// it has lost five nodes. It returns how many were
// requeued and how many ended. Any node may call it at any time, many at once; clocks of a cell must agree to within a
// fraction of a lease. It also erases content whose retention is over, and has snapshots replaced that hold content which may not be kept.
//
// Script reap.lua.
func (s *Store) Reap(ctx context.Context, deadNode string) (requeued, lost int, err error) {
	limit := &redis.ZRangeBy{Min: "-inf", Max: "(" + strconv.FormatInt(s.micros(), 10)}
	if deadNode != "" {
		limit.Max = "+inf"
	}
	ids, err := s.rdb.ZRangeByScore(ctx, s.keys.leases(), limit).Result()
	if err != nil {
		return 0, 0, fmt.Errorf("reap: read leases: %w", unavailable(err))
	}
	var errs []error
	for len(ids) > 0 {
		n := min(len(ids), reapBatch)
		r, l, err := s.reapBatch(ctx, ids[:n], deadNode)
		requeued, lost, ids = requeued+r, lost+l, ids[n:]
		if errors.Is(err, ErrUnavailable) {
			return requeued, lost, fmt.Errorf("reap: %w", err)
		}
		errs = append(errs, err) // one damaged run must not keep the others
	}
	errs = append(errs, s.eraseDue(ctx), s.scrub(ctx))
	if err := errors.Join(errs...); err != nil {
		return requeued, lost, fmt.Errorf("reap: %w", err)
	}
	return requeued, lost, nil
}

func (s *Store) reapBatch(ctx context.Context, ids []string, deadNode string) (requeued, lost int, err error) {
	cmds := make([]*redis.SliceCmd, len(ids))
	err = s.pipelined(ctx, func(p redis.Pipeliner) {
		for i, id := range ids {
			cmds[i] = p.HMGet(ctx, s.keys.run(id), "org", "token", "node", "lease_us")
		}
	})
	if err != nil {
		return 0, 0, fmt.Errorf("read leased runs: %w", err)
	}
	now := s.micros()
	var errs []error
	for i, id := range ids {
		v := make([]string, 4)
		for j, f := range cmds[i].Val() {
			v[j], _ = f.(string)
		}
		end, _ := strconv.ParseInt(v[3], 10, 64) // unreadable: expired; the script decides
		if end >= now && (deadNode == "" || v[2] != deadNode) {
			continue
		}
		code, err := s.reapOne(ctx, ID(id), v[0], v[1], deadNode)
		switch {
		case errors.Is(err, ErrUnavailable):
			return requeued, lost, err
		case err != nil:
			errs = append(errs, err)
		case code == "REQUEUED":
			requeued++
		case code == "LOST", code == "CANCELLED":
			lost++
		}
	}
	return requeued, lost, errors.Join(errs...)
}

func (s *Store) reapOne(ctx context.Context, id ID, org, token, deadNode string) (code string, err error) {
	usage, err := s.usage(ctx, id)
	if err != nil {
		return "", fmt.Errorf("%s: %w", id, err)
	}
	ended := closingFor(&Error{Code: "node_lost", Detail: "the node that worked on the run is gone"}, usage)
	r, err := s.eval(ctx, reapScript, s.keys.closing(org, string(id)),
		s.keys.events(), s.keys.work(), string(id), token, s.micros(), deadNode, maxLost, s.cfg.Retention.Milliseconds(),
		s.cfg.Concurrency, ended.data, ended.outcome, endedCancelled.data, endedCancelled.outcome)
	if err == nil {
		err = refused(r, "REQUEUED", "LOST", "CANCELLED", "SKIP")
	}
	if err != nil {
		return "", fmt.Errorf("%s: %w", id, err)
	}
	if code := r.code(); code == "LOST" || code == "CANCELLED" {
		s.endedHere(ctx, org, id)
	}
	return r.code(), nil
}

// usage counts from the events what a run did whose node cannot tell any more.
func (s *Store) usage(ctx context.Context, id ID) (u Usage, err error) {
	raw, err := s.rdb.LRange(ctx, s.keys.runEvents(string(id)), 0, -1).Result()
	if err != nil {
		return Usage{}, fmt.Errorf("read events: %w", unavailable(err))
	}
	for _, line := range raw {
		e, err := decodeEvent(line)
		if err != nil {
			return Usage{}, err
		}
		switch d := e.Data.(type) {
		case ModelData:
			u.ModelCalls++
			u.InputTokens += d.InputTokens
			u.OutputTokens += d.OutputTokens
		case ShellData:
			u.ShellCommands++
		}
	}
	u.TotalTokens = u.InputTokens + u.OutputTokens
	return u, nil
}
