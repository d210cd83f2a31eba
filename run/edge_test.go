package run

import (
	"testing"
	"time"
)

func TestListFilters(t *testing.T) {
	f := newFixture(t, func(c *Config) { c.Concurrency = 1000 })
	f.clock.us.Store(time.Now().UnixMicro()) // ids are made by the host's clock
	f.newOrg("o", 0, 1_000_000)
	admit := func(team string, zdr bool) Run {
		spec := Spec{Command: "true", MaxCostMicros: 1, TimeoutSeconds: 10, ZeroDataRetention: zdr, Metadata: map[string]string{"team": team, "x": "1"}}
		r, _, err := f.Admit(f.ctx, Admission{Org: "o", Key: "key_0", Spec: spec})
		f.must(err)
		return r
	}
	var runs []Run
	for i := range 30 {
		runs = append(runs, admit([]string{"red", "blue", ""}[i%3], i == 28))
		f.clock.advance(time.Second)
	}
	_, err := f.Cancel(f.ctx, "o", runs[4].ID)
	f.must(err)
	list := func(p Page) (ids []ID) {
		t.Helper()
		for {
			page, next, err := f.List(f.ctx, "o", p)
			f.must(err)
			for _, r := range page {
				ids = append(ids, r.ID)
			}
			if p.Cursor = next; next == "" {
				return ids
			}
		}
	}
	pick := func(want func(i int) bool) (ids []ID) {
		for i := len(runs) - 1; i >= 0; i-- {
			if want(i) {
				ids = append(ids, runs[i].ID)
			}
		}
		return ids
	}
	for _, limit := range []int{1, 3, 100} {
		f.same(list(Page{Limit: limit, QueuedFrom: runs[10].QueuedAt}), pick(func(i int) bool { return i >= 10 }))
		f.same(list(Page{Limit: limit, QueuedTo: runs[10].QueuedAt}), pick(func(i int) bool { return i < 10 }))
		f.same(list(Page{Limit: limit, QueuedFrom: runs[5].QueuedAt, QueuedTo: runs[10].QueuedAt}), pick(func(i int) bool { return i >= 5 && i < 10 }))
		f.same(list(Page{Limit: limit, Metadata: map[string]string{"team": "blue"}}), pick(func(i int) bool { return i%3 == 1 && i != 28 }))
		f.same(list(Page{Limit: limit, Metadata: map[string]string{"team": ""}}), pick(func(i int) bool { return i%3 == 2 }))
		f.same(list(Page{Limit: limit, State: Cancelled, Metadata: map[string]string{"team": "blue", "x": "1"}}), []ID{runs[4].ID})
		f.same(len(list(Page{Limit: limit, Metadata: map[string]string{"nobody": ""}})), 0)
		f.same(len(list(Page{Limit: limit, QueuedTo: time.Unix(0, 0)})), 0)
		f.same(len(list(Page{Limit: limit, QueuedFrom: time.Now().Add(time.Hour)})), 0)
	}
}

func TestUsage(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 1_000_000)
	day := func(n int) time.Time { return f.clock.now().AddDate(0, 0, n) }
	empty, err := f.Usage(f.ctx, "o", day(0), day(0))
	f.must(err)
	f.same(empty, []DayUsage{{Day: "2026-10-07"}})
	var charged Micros
	for i := range 3 {
		f.admit("o", 100)
		l := f.take()
		f.begin(l)
		c := Call{ID: "c", Kind: KindCompute, Min: 7, Max: 7}
		_, err := f.Authorize(f.ctx, l, c)
		f.must(err)
		f.must(f.Capture(f.ctx, l, "c", 7))
		_, err = f.Settle(f.ctx, l, Outcome{At: f.clock.now(), State: Succeeded, Usage: Usage{ModelCalls: 2, InputTokens: 5, OutputTokens: 6, TotalTokens: 11, ShellCommands: 1}})
		f.must(err)
		charged += 7
		if i == 1 {
			f.clock.advance(24 * time.Hour)
		}
	}
	cancelled := f.admit("o", 100)
	_, err = f.Cancel(f.ctx, "o", cancelled.ID)
	f.must(err)
	got, err := f.Usage(f.ctx, "o", day(-2), day(0))
	f.must(err)
	f.same(got, []DayUsage{{Day: "2026-10-06"},
		{Day: "2026-10-07", Runs: 2, Charged: 14, Compute: 14, ModelCalls: 4, InputTokens: 10, OutputTokens: 12, TotalTokens: 22, ShellCommands: 2},
		{Day: "2026-10-08", Runs: 2, Charged: 7, Compute: 7, ModelCalls: 2, InputTokens: 5, OutputTokens: 6, TotalTokens: 11, ShellCommands: 1}})
	a, err := f.Account(f.ctx, "o")
	f.must(err)
	f.same(a.Charged, charged)
	_, err = f.Usage(f.ctx, "o", day(0), day(-1))
	f.want(err, ErrRange)
	_, err = f.Usage(f.ctx, "o", day(-366), day(0))
	f.want(err, ErrRange)
	_, err = f.Usage(f.ctx, "nobody", day(0), day(0))
	f.want(err, ErrNotFound)
	f.balanced()
}

func TestKeysExpire(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 0)
	k, secret, err := f.CreateKey(f.ctx, "o", "short", Member, ExpiresAt(f.clock.now().Add(time.Hour)))
	f.must(err)
	for _, wait := range []time.Duration{0, time.Hour - time.Microsecond} {
		f.clock.advance(wait)
		got, err := f.Authenticate(f.ctx, secret)
		f.must(err)
		f.same(got, k)
		got, _, err = f.AuthenticateAt(f.ctx, secret, Rate{10, 10})
		f.must(err)
		f.same(got, k)
		f.must(f.CheckKey(f.ctx, k.ID))
	}
	f.clock.advance(time.Microsecond)
	_, err = f.Authenticate(f.ctx, secret)
	f.want(err, ErrUnauthenticated)
	_, _, err = f.AuthenticateAt(f.ctx, secret, Rate{10, 10})
	f.want(err, ErrUnauthenticated)
	f.want(f.CheckKey(f.ctx, k.ID), ErrUnauthenticated)
	_, _, err = f.CreateKey(f.ctx, "o", "late", Member, ExpiresAt(f.clock.now()))
	f.want(err, ErrRange)
}

func TestMembers(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 0)
	f.newOrg("p", 0, 0)
	m, err := f.AddMember(f.ctx, "o", "Ada")
	f.must(err)
	f.clock.advance(time.Second)
	other, err := f.AddMember(f.ctx, "o", "Grace")
	f.must(err)
	list, err := f.Members(f.ctx, "o")
	f.must(err)
	f.same(list, []OrgMember{m, other})
	var secrets []string
	for _, id := range []string{m.ID, m.ID, other.ID, ""} {
		k, secret, err := f.CreateKey(f.ctx, "o", "k", Member, OfMember(id))
		f.must(err)
		f.same(k.Member, id)
		secrets = append(secrets, secret)
	}
	_, _, err = f.CreateKey(f.ctx, "p", "k", Member, OfMember(m.ID))
	f.want(err, ErrNotFound)
	_, _, err = f.CreateKey(f.ctx, "", "k", Admin, OfMember(m.ID))
	f.want(err, ErrRange)
	f.want(f.RemoveMember(f.ctx, "p", m.ID), ErrNotFound)
	f.must(f.RemoveMember(f.ctx, "o", m.ID))
	f.want(f.RemoveMember(f.ctx, "o", m.ID), ErrNotFound)
	for i, secret := range secrets {
		_, err := f.Authenticate(f.ctx, secret)
		if gone := i < 2; gone {
			f.want(err, ErrUnauthenticated)
		} else {
			f.must(err)
		}
	}
	_, _, err = f.CreateKey(f.ctx, "o", "k", Member, OfMember(m.ID))
	f.want(err, ErrNotFound)
	_, err = f.AddMember(f.ctx, "nobody", "x")
	f.want(err, ErrNotFound)
	_, err = f.AddMember(f.ctx, "o", "\xff")
	f.want(err, ErrRange)
}

func TestNodes(t *testing.T) {
	f := newFixture(t)
	for _, id := range []string{"b", "a"} {
		f.must(f.Announce(f.ctx, Node{ID: id, Slots: 2, StartedAt: f.clock.now()}))
	}
	f.clock.advance(nodeSilence)
	f.must(f.Announce(f.ctx, Node{ID: "a", Slots: 3, StartedAt: f.clock.now()}))
	nodes, err := f.Nodes(f.ctx)
	f.must(err)
	f.same([]any{len(nodes), nodes[0].ID, nodes[0].Alive, nodes[0].Slots, nodes[1].ID, nodes[1].Alive}, []any{2, "a", true, 3, "b", false})
	f.clock.advance(nodeKept + time.Second)
	f.must(f.Announce(f.ctx, Node{ID: "c"}))
	f.must(f.Announce(f.ctx, Node{ID: "d"}))
	f.must(f.Retire(f.ctx, "d"))
	for range 2 {
		nodes, err = f.Nodes(f.ctx)
		f.must(err)
		f.same(len(nodes), 1)
	}
}

func TestRate(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 0)
	k, secret, err := f.CreateKey(f.ctx, "o", "k", Member)
	f.must(err)
	_, other, err := f.CreateKey(f.ctx, "o", "k", Member)
	f.must(err)
	rate := Rate{PerSecond: 2, Burst: 5}
	stores := []*Store{f.Store, f.open()}
	for i := range 5 { // shared by all gateways
		got, a, err := stores[i%2].AuthenticateAt(f.ctx, secret, rate)
		f.must(err)
		f.same(got, k)
		if a.Remaining != 4-i || a.Full <= 0 || a.Full > 2500*time.Millisecond {
			t.Errorf("request %d: %+v", i, a)
		}
	}
	got, a, err := f.AuthenticateAt(f.ctx, secret, rate)
	f.want(err, ErrRateLimited)
	f.same(got.ID, k.ID)
	if a.Remaining != 0 || a.Wait <= 0 || a.Wait > 500*time.Millisecond {
		t.Errorf("refused: %+v", a)
	}
	_, _, err = f.AuthenticateAt(f.ctx, other, rate)
	f.must(err)
	time.Sleep(a.Wait)
	_, _, err = f.AuthenticateAt(f.ctx, secret, rate)
	f.must(err)
	_, _, err = f.AuthenticateAt(f.ctx, secret, Rate{})
	f.must(err)
	f.must(f.RevokeKey(f.ctx, k.ID))
	_, _, err = f.AuthenticateAt(f.ctx, secret, rate) // also while it is limited
	f.want(err, ErrUnauthenticated)
	_, _, err = f.AuthenticateAt(f.ctx, "eph_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA", rate)
	f.want(err, ErrUnauthenticated)
	for _, bad := range []Rate{{-1, 1}, {1, 0}, {1, maxRate + 1}, {maxRate + 1, 1}} {
		_, _, err = f.AuthenticateAt(f.ctx, other, bad)
		f.want(err, ErrRange)
	}
}
