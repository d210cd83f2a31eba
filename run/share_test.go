package run

import (
	"strings"
	"testing"
	"time"
)

func TestShare(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 1_000_000)
	f.newOrg("p", 0, 1_000_000)
	id := f.admit("o", 100).ID

	sh, token, err := f.CreateShare(f.ctx, "o", id, time.Hour)
	f.must(err)
	if sh.Run != id || sh.ExpiresAt.Sub(sh.CreatedAt) != time.Hour || !tokenPattern.MatchString(token) {
		t.Fatalf("%+v %q", sh, token)
	}
	org, shared, err := f.Shared(f.ctx, token)
	f.must(err)
	f.same([]string{org, string(shared)}, []string{"o", string(id)})
	_, err = f.Authenticate(f.ctx, token)
	f.want(err, ErrUnauthenticated) // it opens one run and is no key

	list, err := f.Shares(f.ctx, "o", id)
	f.must(err)
	f.same(list, []Share{sh})

	for _, foreign := range []error{
		func() error { _, _, err := f.CreateShare(f.ctx, "p", id, time.Hour); return err }(),
		func() error { _, err := f.Shares(f.ctx, "p", id); return err }(),
		f.RevokeShare(f.ctx, "p", id, sh.ID),
		f.RevokeShare(f.ctx, "o", f.admit("o", 100).ID, sh.ID),
		f.RevokeShare(f.ctx, "o", id, "share_0000000000000000"),
		f.RevokeShare(f.ctx, "o", id, "x"),
	} {
		f.want(foreign, ErrNotFound)
	}
	for _, life := range []time.Duration{0, -time.Hour, MinShare - 1, MaxShare + 1} {
		_, _, err := f.CreateShare(f.ctx, "o", id, life)
		f.want(err, ErrRange)
	}

	f.must(f.RevokeShare(f.ctx, "o", id, sh.ID))
	_, _, err = f.Shared(f.ctx, token)
	f.want(err, ErrUnauthenticated)
	f.want(f.RevokeShare(f.ctx, "o", id, sh.ID), ErrNotFound)
	for _, bad := range []string{"", "eph_share_", token[:len(token)-1], token + "x", strings.Replace(token, "share", "shore", 1)} {
		_, _, err := f.Shared(f.ctx, bad)
		f.want(err, ErrUnauthenticated)
	}
}

func TestShareExpires(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 1_000_000)
	id := f.admit("o", 100).ID
	_, short, err := f.CreateShare(f.ctx, "o", id, time.Minute)
	f.must(err)
	_, long, err := f.CreateShare(f.ctx, "o", id, time.Hour)
	f.must(err)
	f.clock.us.Add(time.Minute.Microseconds())
	_, _, err = f.Shared(f.ctx, short)
	f.want(err, ErrUnauthenticated)
	_, _, err = f.Shared(f.ctx, long)
	f.must(err)
	list, err := f.Shares(f.ctx, "o", id)
	f.must(err)
	f.same(len(list), 1)
	ttl, err := f.rdb.PTTL(f.ctx, f.keys.share(digest(long))).Result()
	f.must(err)
	if ttl <= 50*time.Minute || ttl > time.Hour {
		t.Errorf("the token is kept for %s", ttl)
	}

	for range MaxShares - 1 { // expired ones do not count
		_, _, err := f.CreateShare(f.ctx, "o", id, time.Hour)
		f.must(err)
	}
	_, _, err = f.CreateShare(f.ctx, "o", id, time.Hour)
	f.want(err, ErrQueueFull)
}

func TestShareKeepsZeroDataRetention(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 1_000_000)
	r, _, err := f.Admit(f.ctx, Admission{Org: "o", Key: "key_0", Spec: Spec{Command: "true", MaxCostMicros: 10, TimeoutSeconds: 10, ZeroDataRetention: true}})
	f.must(err)
	_, _, err = f.CreateShare(f.ctx, "o", r.ID, time.Hour)
	f.want(err, ErrState)
}
