package pools

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/ephemeral-run/ephemeral/run"
)

// Store keeps pools in a cell. It is safe for concurrent use.
type Store struct {
	rdb redis.UniversalClient
	key func(parts ...string) string
}

// New is the pools of a store's cell. Its errors are those of package run: run.ErrNotFound, run.ErrUnavailable.
func New(s *run.Store) *Store {
	rdb, key := s.Cell()
	return &Store{rdb, key}
}

// Keys, all of them in the cell's slot.
func (s *Store) names() string                   { return s.key("pools") }                    // zset: names by the time of the last report
func (s *Store) policies() string                { return s.key("pools", "policies") }        // hash: Desired by name
func (s *Store) changes() string                 { return s.key("pools", "changes") }         // channel: names
func (s *Store) nodes(pool string) string        { return s.key("pool", pool, "nodes") }      // set: nodes that have reported
func (s *Store) history(pool string) string      { return s.key("pool", pool, "history") }    // stream: uses
func (s *Store) report(pool, node string) string { return s.key("pool", pool, "node", node) } // string: Report, expires

// setScript sets a policy.
// KEYS: 1 policies, 2 names. ARGV: 1 name, 2 policy as JSON, 3 now (RFC 3339), 4 channel, 5 the revision it replaces (”: any)
// Returns {'OK', desired} | {'NOTFOUND'} | {'STALE', revision}. Safe to repeat with the same policy: only the revision counts on.
var setScript = redis.NewScript(`
local old = redis.call('HGET', KEYS[1], ARGV[1])
if not old and not redis.call('ZSCORE', KEYS[2], ARGV[1]) then return {'NOTFOUND'} end
local revision = 0
if old then revision = cjson.decode(old).revision end
if ARGV[5] ~= '' and tonumber(ARGV[5]) ~= revision then return {'STALE', tostring(revision)} end
local head = '{"revision":' .. string.format('%.0f', revision + 1) .. ',"set_at":"' .. ARGV[3] .. '"'
local rest = string.sub(ARGV[2], 2)
if rest ~= '}' then head = head .. ',' end
local desired = head .. rest
redis.call('HSET', KEYS[1], ARGV[1], desired)
redis.call('PUBLISH', ARGV[4], ARGV[1])
return {'OK', desired}
`)

// Set makes a policy the one that every node with the pool follows, at once; it replaces the earlier one as a whole. With
// replaces >= 0 only a policy of that revision is replaced, else run.ErrState. run.ErrNotFound: no node has had such a pool
// lately, and none was set up before. ErrInvalid: see Policy.Problems.
func (s *Store) Set(ctx context.Context, pool string, p Policy, replaces int64) (Desired, error) {
	if !ValidName(pool) {
		return Desired{}, fmt.Errorf("pool %.64q: %w", pool, run.ErrNotFound)
	}
	if wrong := p.Problems(); len(wrong) > 0 {
		return Desired{}, fmt.Errorf("set pool %s: %w: %s %s", pool, ErrInvalid, wrong[0].Member, wrong[0].Detail)
	}
	raw, err := json.Marshal(p)
	if err != nil {
		return Desired{}, fmt.Errorf("set pool %s: %w", pool, err)
	}
	old := ""
	if replaces >= 0 {
		old = strconv.FormatInt(replaces, 10)
	}
	answer, err := setScript.Run(ctx, s.rdb, []string{s.policies(), s.names()}, pool, string(raw),
		time.Now().UTC().Format(time.RFC3339Nano), s.changes(), old).StringSlice()
	if err != nil {
		return Desired{}, fmt.Errorf("set pool %s: %w", pool, run.Unavailable(err))
	}
	switch answer[0] {
	case "NOTFOUND":
		return Desired{}, fmt.Errorf("pool %s: %w", pool, run.ErrNotFound)
	case "STALE":
		return Desired{}, fmt.Errorf("set pool %s: its policy has revision %s, not %s: %w", pool, answer[1], old, run.ErrState)
	}
	var d Desired
	if err := json.Unmarshal([]byte(answer[1]), &d); err != nil {
		return Desired{}, fmt.Errorf("set pool %s: stored policy: %w", pool, err)
	}
	return d, nil
}

// Desired is the policy that was set; its revision is 0 when none was.
func (s *Store) Desired(ctx context.Context, pool string) (Desired, error) {
	var d Desired
	raw, err := s.rdb.HGet(ctx, s.policies(), pool).Result()
	if errors.Is(err, redis.Nil) {
		return d, nil
	}
	if err != nil {
		return d, fmt.Errorf("policy of pool %s: %w", pool, run.Unavailable(err))
	}
	if err := json.Unmarshal([]byte(raw), &d); err != nil {
		return d, fmt.Errorf("policy of pool %s: %w", pool, err)
	}
	return d, nil
}

// Changes calls changed with the name of each pool whose policy is set, and with "" when some may have been missed, until
// ctx ends.
func (s *Store) Changes(ctx context.Context, changed func(pool string)) {
	sub := s.rdb.Subscribe(ctx, s.changes())
	// The end of ctx does not end a Receive that waits.
	closed := context.AfterFunc(ctx, func() { _ = sub.Close() }) // nothing is written to it
	defer func() {
		closed()
		_ = sub.Close()
	}()
	pause := 50 * time.Millisecond
	for ctx.Err() == nil {
		m, err := sub.Receive(ctx)
		switch m := m.(type) {
		case *redis.Message:
			changed(m.Payload)
		case *redis.Subscription:
			changed("") // what was published before this moment is not seen
		}
		if err == nil {
			pause = 50 * time.Millisecond
			continue
		}
		select { // the client connects and subscribes again by itself
		case <-ctx.Done():
		case <-time.After(pause):
			pause = min(2*pause, 2*time.Second)
		}
	}
}

// Report stores what a pool looks like on a node, for reportLife.
func (s *Store) Report(ctx context.Context, r Report) error {
	if !ValidName(r.Pool) || !ValidName(r.Node) {
		return fmt.Errorf("report of pool %.64q on node %.64q: %w", r.Pool, r.Node, run.ErrRange)
	}
	if n := len(r.Decisions); n > maxDecisions {
		r.Decisions = r.Decisions[n-maxDecisions:]
	}
	raw, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("report of pool %s: %w", r.Pool, err)
	}
	now := time.Now()
	_, err = s.rdb.Pipelined(ctx, func(p redis.Pipeliner) error {
		p.Set(ctx, s.report(r.Pool, r.Node), raw, reportLife)
		p.SAdd(ctx, s.nodes(r.Pool), r.Node)
		p.Expire(ctx, s.nodes(r.Pool), reportedKept)
		p.ZAdd(ctx, s.names(), redis.Z{Score: float64(now.UnixMilli()), Member: r.Pool})
		p.ZRemRangeByScore(ctx, s.names(), "-inf", strconv.FormatInt(now.Add(-reportedKept).UnixMilli(), 10))
		return nil
	})
	if err != nil {
		return fmt.Errorf("report of pool %s: %w", r.Pool, run.Unavailable(err))
	}
	return nil
}

// Withdraw removes the report of a node that goes.
func (s *Store) Withdraw(ctx context.Context, pool, node string) error {
	_, err := s.rdb.Pipelined(ctx, func(p redis.Pipeliner) error {
		p.Del(ctx, s.report(pool, node))
		p.SRem(ctx, s.nodes(pool), node)
		return nil
	})
	if err != nil {
		return fmt.Errorf("withdraw pool %s of node %s: %w", pool, node, run.Unavailable(err))
	}
	return nil
}

// List is every pool that a node has, or that has a policy, by name.
func (s *Store) List(ctx context.Context) ([]Pool, error) {
	reported, err := s.rdb.ZRange(ctx, s.names(), 0, -1).Result()
	if err != nil {
		return nil, fmt.Errorf("list pools: %w", run.Unavailable(err))
	}
	set, err := s.rdb.HKeys(ctx, s.policies()).Result()
	if err != nil {
		return nil, fmt.Errorf("list pools: %w", run.Unavailable(err))
	}
	names := append(reported, set...)
	slices.Sort(names)
	all := []Pool{}
	for _, name := range slices.Compact(names) {
		p, err := s.read(ctx, name)
		if err != nil {
			return nil, err
		}
		all = append(all, p)
	}
	return all, nil
}

// Get is one pool. run.ErrNotFound: no node has it and none was set up.
func (s *Store) Get(ctx context.Context, name string) (Pool, error) {
	if !ValidName(name) {
		return Pool{}, fmt.Errorf("pool %.64q: %w", name, run.ErrNotFound)
	}
	p, err := s.read(ctx, name)
	if err != nil {
		return Pool{}, err
	}
	if p.Policy.Revision == 0 && len(p.Nodes) == 0 {
		if _, err := s.rdb.ZScore(ctx, s.names(), name).Result(); errors.Is(err, redis.Nil) {
			return Pool{}, fmt.Errorf("pool %s: %w", name, run.ErrNotFound)
		} else if err != nil {
			return Pool{}, fmt.Errorf("pool %s: %w", name, run.Unavailable(err))
		}
	}
	return p, nil
}

func (s *Store) read(ctx context.Context, name string) (Pool, error) {
	p := Pool{Name: name, Nodes: []Report{}}
	var err error
	if p.Policy, err = s.Desired(ctx, name); err != nil {
		return p, err
	}
	nodes, err := s.rdb.SMembers(ctx, s.nodes(name)).Result()
	if err != nil {
		return p, fmt.Errorf("nodes of pool %s: %w", name, run.Unavailable(err))
	}
	var gone []any
	for _, node := range nodes {
		raw, err := s.rdb.Get(ctx, s.report(name, node)).Result()
		if errors.Is(err, redis.Nil) {
			gone = append(gone, node)
			continue
		}
		if err != nil {
			return p, fmt.Errorf("report of pool %s: %w", name, run.Unavailable(err))
		}
		var r Report
		if err := json.Unmarshal([]byte(raw), &r); err != nil {
			return p, fmt.Errorf("report of pool %s by node %s: %w", name, node, err)
		}
		p.Nodes = append(p.Nodes, r)
	}
	if len(gone) > 0 { // a node that comes back adds itself again
		_ = s.rdb.SRem(ctx, s.nodes(name), gone...).Err()
	}
	slices.SortFunc(p.Nodes, func(a, b Report) int { return strings.Compare(a.Node, b.Node) })
	p.total()
	return p, nil
}
