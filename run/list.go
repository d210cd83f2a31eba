package run

import (
	"context"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"
)

// Bounds of List.
const (
	defaultPage = 20
	maxPage     = 100
	maxScan     = 2000 // records looked at in one call when there is a filter
)

var (
	eraseScript = loadScript("erase")
	readScript  = loadLax("read")
)

// Page asks for a part of a list, newest first.
type Page struct {
	Cursor string // from the page before; empty: the first
	Limit  int    // 1..100; 0: 20
	State  State  // empty: all

	QueuedFrom time.Time         // only runs queued at this time or later; zero: all
	QueuedTo   time.Time         // only runs queued before this time; zero: all
	Metadata   map[string]string // only runs whose metadata has all of these
}

// filtered tells whether a look at the records decides which runs are on the page.
func (p Page) filtered() bool {
	return p.State != "" || !p.QueuedFrom.IsZero() || !p.QueuedTo.IsZero() || len(p.Metadata) > 0
}

// wants tells whether the run passes the filters.
func (p Page) wants(r *Run) bool {
	switch {
	case r == nil:
		return false
	case p.State != "" && r.State != p.State:
		return false
	case !p.QueuedFrom.IsZero() && r.QueuedAt.Before(p.QueuedFrom):
		return false
	case !p.QueuedTo.IsZero() && !r.QueuedAt.Before(p.QueuedTo):
		return false
	}
	for k, v := range p.Metadata {
		if had, ok := r.Request.Metadata[k]; !ok || had != v {
			return false
		}
	}
	return true
}

// clockSlack is by how much the time in a run's id and the time at which it was queued may differ.
const clockSlack = time.Minute

// bounds are the ends of the index between which the page's runs are: ids sort by the time they were made.
func (p Page) bounds() (from, to string) {
	from, to = "-", "+"
	if !p.QueuedFrom.IsZero() {
		from = "[" + idAt(p.QueuedFrom.Add(-clockSlack))
	}
	if !p.QueuedTo.IsZero() {
		to = "(" + idAt(p.QueuedTo.Add(clockSlack))
	}
	if p.Cursor != "" && (to == "+" || p.Cursor < to[1:]) {
		to = "(" + p.Cursor
	}
	return from, to
}

// idAt is the beginning of the ids made at t.
func idAt(t time.Time) string {
	return fmt.Sprintf("run_%012x", max(t.UnixMilli(), 0)&(1<<48-1))
}

// owner returns the organisation of a run. ErrNotFound when there is no such run or, with org given, it is another's.
func (s *Store) owner(ctx context.Context, org string, id ID) (string, error) {
	if _, err := ParseID(string(id)); err != nil {
		return "", err
	}
	owner, err := s.rdb.HGet(ctx, s.keys.run(string(id)), "org").Result()
	if missing(err) || (err == nil && org != "" && owner != org) {
		return "", fmt.Errorf("run %s: %w", id, ErrNotFound)
	}
	if err != nil {
		return "", fmt.Errorf("run %s: %w", id, unavailable(err))
	}
	return owner, nil
}

// Get returns a run with its request and results. ErrNotFound when there is no such run, it was kept long enough, or it
// belongs to another organisation than org; with org empty any run is found: for the host's side only.
//
// Script read.lua.
func (s *Store) Get(ctx context.Context, org string, id ID) (Run, error) {
	if _, err := ParseID(string(id)); err != nil {
		return Run{}, fmt.Errorf("get: %w", err)
	}
	if org == "" {
		var err error
		if org, err = s.owner(ctx, "", id); err != nil {
			return Run{}, fmt.Errorf("get: %w", err)
		}
	}
	k, rid := s.keys, string(id)
	r, err := s.evalShared(ctx, readScript, []string{k.run(rid), k.org(org), k.queue(org), k.parked(org), k.active(org), k.leases(), k.ring()},
		rid, org, s.micros(), s.cfg.Concurrency)
	if err != nil {
		return Run{}, fmt.Errorf("get %s: %w", id, err)
	}
	place, err := decodePlace(r, 2)
	if err != nil {
		return Run{}, fmt.Errorf("get %s: %w", id, err)
	}
	return s.whole(ctx, org, id, r.record(1), place, sameSpec{})
}

// whole is the run with these fields in its record, contents added; queue is its place in line. Errors as for Get.
func (s *Store) whole(ctx context.Context, org string, id ID, f map[string]string, queue *Place, same sameSpec) (Run, error) {
	fail := func(err error) (Run, error) { return Run{}, fmt.Errorf("get %s: %w", id, err) }
	if len(f) == 0 || (org != "" && f["org"] != org) {
		return fail(ErrNotFound)
	}
	r, err := decodeRunWith(id, f, same)
	if err != nil {
		return Run{}, fmt.Errorf("get: %w", err)
	}
	if f["split"] == "1" || r.Result != nil {
		if err := s.readContents(ctx, &r); err != nil {
			return fail(err)
		}
	}
	r.Queue = queue
	return r, nil
}

// readContents reads what the record of a run does not hold itself. ErrNotFound: the run was erased meanwhile.
func (s *Store) readContents(ctx context.Context, r *Run) error {
	var record *redis.IntCmd
	var spec *redis.StringCmd
	var streams [3]*redis.StringCmd
	k := string(r.ID)
	err := s.pipelined(ctx, func(p redis.Pipeliner) {
		spec = p.Get(ctx, s.keys.spec(k))
		for i, name := range []string{s.keys.output(k), s.keys.stdout(k), s.keys.stderr(k)} {
			streams[i] = p.Get(ctx, name)
		}
		record = p.Exists(ctx, s.keys.run(k))
	})
	if err != nil {
		return err
	}
	if record.Val() == 0 {
		return ErrNotFound
	}
	return r.addContents(spec, streams)
}

// addContents puts in what the record does not hold itself. Of a request under zero data retention nothing is put in,
// also while it waits.
func (r *Run) addContents(spec *redis.StringCmd, streams [3]*redis.StringCmd) error {
	if raw := spec.Val(); raw != "" && !r.Request.ZeroDataRetention {
		whole, err := decodeSpec(raw)
		if err != nil {
			return err
		}
		r.Request = &whole
	}
	if r.Result == nil {
		return nil
	}
	r.Result.Output = streams[0].Val()
	fill := func(st *Stream, content string) *Stream {
		if st == nil {
			return nil
		}
		full := NewStream([]byte(content), st.Bytes)
		full.Truncated = st.Truncated || full.Truncated
		return full
	}
	r.Result.Stdout = fill(r.Result.Stdout, streams[1].Val())
	r.Result.Stderr = fill(r.Result.Stderr, streams[2].Val())
	return nil
}

// List returns runs of an organisation, newest first, and the cursor of the next page, empty at the end. Paging is
// stable: new runs come before the first page, ended ones stay where they are. It leaves out what can be large, the
// contents of files and the results: Get has them. With a filter a page may be short although more follows.
// ErrRange: a limit or cursor that cannot be.
func (s *Store) List(ctx context.Context, org string, p Page) (runs []Run, next string, err error) {
	if p.Limit == 0 {
		p.Limit = defaultPage
	}
	switch {
	case !validOrg(org):
		return nil, "", fmt.Errorf("list runs of %.64q: %w", org, ErrNotFound)
	case p.Limit < 1 || p.Limit > maxPage:
		return nil, "", fmt.Errorf("list runs: limit %d, want 1 to %d: %w", p.Limit, maxPage, ErrRange)
	case p.Cursor != "" && !validID(p.Cursor):
		return nil, "", fmt.Errorf("list runs: cursor %.64q: %w", p.Cursor, ErrRange)
	}
	runs = []Run{}
	cursor, batch := p.Cursor, p.Limit+1
	if p.filtered() {
		batch = maxPage
	}
	for scanned := 0; scanned < maxScan; {
		p.Cursor = cursor
		ids, err := s.idsBefore(ctx, org, p, batch)
		if err != nil {
			return nil, "", fmt.Errorf("list runs of %s: %w", org, err)
		}
		found, err := s.records(ctx, org, ids)
		if err != nil {
			return nil, "", fmt.Errorf("list runs of %s: %w", org, err)
		}
		for i, r := range found {
			if len(runs) == p.Limit {
				return runs, cursor, nil
			}
			cursor = ids[i]
			if p.wants(r) {
				runs = append(runs, *r)
			}
		}
		if len(ids) < batch {
			return runs, "", nil
		}
		scanned += len(ids)
	}
	return runs, cursor, nil
}

// idsBefore returns up to n ids of an organisation's runs that come after the cursor in the list.
func (s *Store) idsBefore(ctx context.Context, org string, p Page, n int) ([]string, error) {
	from, to := p.bounds()
	ids, err := s.rdb.ZRevRangeByLex(ctx, s.keys.runs(org), &redis.ZRangeBy{Min: from, Max: to, Count: int64(n)}).Result()
	return ids, unavailable(err)
}

// records reads the records of runs; nil where one has expired.
func (s *Store) records(ctx context.Context, org string, ids []string) ([]*Run, error) {
	if len(ids) == 0 {
		return nil, nil
	}
	cmds := make([]*redis.MapStringStringCmd, len(ids))
	err := s.pipelined(ctx, func(p redis.Pipeliner) {
		for i, id := range ids {
			cmds[i] = p.HGetAll(ctx, s.keys.run(id))
		}
	})
	if err != nil {
		return nil, err
	}
	runs := make([]*Run, len(ids))
	for i, c := range cmds {
		f := c.Val()
		if len(f) == 0 || f["org"] != org {
			continue
		}
		r, err := decodeRun(ID(ids[i]), f)
		if err != nil {
			return nil, err
		}
		r.Result = nil
		runs[i] = &r
	}
	return runs, nil
}

// Delete erases the content of an ended run for good: prompt, command, files, metadata, outputs and event text. States,
// times and money stay, since the account rests on them, until retention ends. Files of Redis forget it when a node has
// had them rewritten, see Reap. Again changes nothing. ErrState before
// the run has ended; ErrNotFound as for Get.
//
// Script erase.lua.
func (s *Store) Delete(ctx context.Context, org string, id ID) error {
	for attempt := 0; ; attempt++ {
		again, err := s.erase(ctx, org, id)
		if err != nil {
			return fmt.Errorf("delete %s: %w", id, err)
		}
		if !again {
			return nil
		}
		if attempt == 3 {
			return fmt.Errorf("delete %s: its events keep changing: %w", id, ErrState)
		}
	}
}

func (s *Store) erase(ctx context.Context, org string, id ID) (again bool, err error) {
	owner, err := s.owner(ctx, org, id)
	if err != nil {
		return false, err
	}
	f, err := s.rdb.HGetAll(ctx, s.keys.run(string(id))).Result()
	if err != nil {
		return false, unavailable(err)
	}
	r, err := decodeRun(id, f)
	if err != nil {
		return false, err
	}
	if !r.State.Terminal() {
		return false, fmt.Errorf("state %s: %w", r.State, ErrState)
	}
	kept, err := bareOutcome(f["outcome"])
	if err != nil {
		return false, err
	}
	args := []any{string(id), owner, mustEncode(r.Request.bare()), kept}
	for last, more := int64(0), true; more; {
		var events []Event
		if events, more, err = s.Events(ctx, owner, id, last); err != nil {
			return false, err
		}
		for _, e := range events {
			e.Data = bareData(e.Data)
			args = append(args, mustEncode(e))
			last = e.Seq
		}
	}
	k := string(id)
	rep, err := s.eval(ctx, eraseScript, []string{s.keys.run(k), s.keys.runEvents(k), s.keys.spec(k), s.keys.output(k), s.keys.stdout(k), s.keys.stderr(k),
		s.keys.left(k), s.keys.content(k), s.keys.due(), s.keys.stain()}, args...)
	if err != nil {
		return false, err
	}
	return rep.code() == "AGAIN", refused(rep, "AGAIN")
}
