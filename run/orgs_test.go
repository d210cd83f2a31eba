package run

import (
	"strings"
	"testing"
	"time"
)

func TestOrgs(t *testing.T) {
	f := newFixture(t)
	o, err := f.CreateOrg(f.ctx, Org{Name: "Acme ☃"})
	f.must(err)
	f.same(o, Org{ID: o.ID, Name: "Acme ☃", CreatedAt: f.clock.now()})
	f.clock.advance(time.Second)
	p, err := f.CreateOrg(f.ctx, Org{ID: "p", Name: "P", Concurrency: 3})
	f.must(err)
	again, err := f.CreateOrg(f.ctx, Org{ID: "p", Name: "P", Concurrency: 3})
	f.must(err)
	f.same(again, p)
	_, err = f.CreateOrg(f.ctx, Org{ID: "p", Name: "Q"})
	f.want(err, ErrExists)
	all, err := f.Orgs(f.ctx)
	f.must(err)
	f.same(all, []Org{o, p})
	for _, bad := range []Org{{ID: "A"}, {ID: "a:b"}, {ID: "{x}"}, {ID: strings.Repeat("a", 64)}, {ID: "a", Name: "\xff"},
		{ID: "a", Name: strings.Repeat("x", 201)}, {ID: "a", Concurrency: -1}, {ID: "a", Concurrency: 1e6}} {
		_, err := f.CreateOrg(f.ctx, bad)
		f.want(err, ErrRange)
	}
	for _, id := range []string{"", "nobody", "a:b"} {
		_, err := f.Org(f.ctx, id)
		f.want(err, ErrNotFound)
		_, err = f.Account(f.ctx, id)
		f.want(err, ErrNotFound)
		_, err = f.Credit(f.ctx, id, 1, "")
		f.want(err, ErrNotFound)
	}
}

func TestCredit(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 0)
	credit := func(amount Micros, ref string, balance Micros) {
		t.Helper()
		a, err := f.Credit(f.ctx, "o", amount, ref)
		f.must(err)
		f.same(a.Balance, balance)
	}
	credit(1000, "invoice-1", 1000)
	credit(1000, "invoice-1", 1000) // again
	credit(5, "", 1005)
	credit(5, "", 1010) // without a reference each is one
	_, err := f.Credit(f.ctx, "o", 999, "invoice-1")
	f.want(err, ErrIdempotencyConflict)
	f.admit("o", 600)
	credit(-400, "correction", 610)
	credit(-400, "correction", 610)
	_, err = f.Credit(f.ctx, "o", -11, "too much")
	f.want(err, ErrRange) // a reference has no spaces
	_, err = f.Credit(f.ctx, "o", -11, "too-much")
	f.want(err, ErrInsufficientFunds)
	for _, bad := range []Micros{0, maxMicros + 1, -maxMicros - 1} {
		_, err = f.Credit(f.ctx, "o", bad, "")
		f.want(err, ErrRange)
	}
	_, err = f.Credit(f.ctx, "o", maxMicros, "")
	f.want(err, ErrRange)
	f.balanced()
}

func TestKeys(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 0)
	k, secret, err := f.CreateKey(f.ctx, "o", "laptop", Member)
	f.must(err)
	f.same(k, Key{ID: k.ID, Org: "o", Name: "laptop", Role: Member, CreatedAt: f.clock.now()})
	got, err := f.Authenticate(f.ctx, secret)
	f.must(err)
	f.same(got, k)
	admin, adminSecret, err := f.CreateKey(f.ctx, "", "root", Admin)
	f.must(err)
	if secret == adminSecret || !validSecret(secret) {
		t.Fatalf("secrets %q and %q", secret, adminSecret)
	}
	got, err = f.Authenticate(f.ctx, adminSecret)
	f.must(err)
	f.same(got, admin)

	f.clock.advance(time.Second)
	f.must(f.RevokeKey(f.ctx, k.ID))
	f.clock.advance(time.Second)
	f.must(f.RevokeKey(f.ctx, k.ID)) // again: the first time stays
	_, err = f.open().Authenticate(f.ctx, secret)
	f.want(err, ErrUnauthenticated)
	list, err := f.Keys(f.ctx, "o")
	f.must(err)
	k.RevokedAt = f.clock.now().Add(-time.Second)
	f.same(list, []Key{k})
	list, err = f.Keys(f.ctx, "")
	f.must(err)
	f.same(list, []Key{admin})

	for _, s := range []string{"", "eph_", secret[:46], secret + "x", strings.ToUpper(secret), "eph_" + strings.Repeat("A", 43)} {
		_, err := f.Authenticate(f.ctx, s)
		f.want(err, ErrUnauthenticated)
		if s != "" && len(s) > 10 && strings.Contains(err.Error(), s) {
			t.Errorf("the error shows the key: %v", err)
		}
	}
	for _, id := range []string{"", "key_0", "key_0123456789abcdef", digest(secret)} {
		f.want(f.RevokeKey(f.ctx, id), ErrNotFound)
	}
	_, _, err = f.CreateKey(f.ctx, "nobody", "", Member)
	f.want(err, ErrNotFound)
	_, err = f.Keys(f.ctx, "nobody")
	f.want(err, ErrNotFound)
	for _, bad := range []struct {
		org, name string
		role      Role
	}{{"o", "", Admin}, {"o", "", ""}, {"o", "\xff", Member}, {"o", strings.Repeat("x", 201), Member}} {
		_, _, err := f.CreateKey(f.ctx, bad.org, bad.name, bad.role)
		f.want(err, ErrRange)
	}
	if strings.Contains(f.dump(), secret[4:]) {
		t.Error("the secret is stored")
	}
}
