package run

import (
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"
)

var someone = netip.MustParseAddr("198.51.100.7")

func TestSignUp(t *testing.T) {
	f := newFixture(t)
	trial := Trial{Credit: 250_000, Pot: 1_000_000, Concurrency: 2, PerDay: 2}
	org, key, secret, err := f.SignUp(f.ctx, "Somebody", someone, "", trial)
	f.must(err)
	got, err := f.Authenticate(f.ctx, secret)
	f.must(err)
	f.same(got, key)
	stored, err := f.Org(f.ctx, org.ID)
	f.must(err)
	f.same(stored, org)
	f.same(f.account(org.ID), Account{Org: org.ID, Balance: 250_000, Available: 250_000, Deposits: 250_000})
	keys, err := f.Keys(f.ctx, org.ID)
	f.must(err)
	f.same(keys, []Key{key})
	r := f.admit(org.ID, 200_000) // the account is one like all others
	f.same(r.State, Queued)

	// The address, and its neighbours, come too often; others do not.
	_, _, _, err = f.SignUp(f.ctx, "Second", someone, "", trial)
	f.must(err)
	var limit *SignUpLimitError
	_, _, _, err = f.SignUp(f.ctx, "Third", someone, "", trial)
	if f.want(err, ErrRateLimited); !errors.As(err, &limit) || limit.Wait < 11*time.Hour || limit.Wait > 12*time.Hour {
		t.Errorf("wait %v", limit)
	}
	_, _, _, err = f.SignUp(f.ctx, "Mapped", netip.MustParseAddr("::ffff:198.51.100.7"), "", trial)
	f.want(err, ErrRateLimited)
	for i, c := range []struct {
		address string
		want    error
	}{{"2001:db8::1", nil}, {"2001:db8::ffff:1", nil}, {"2001:db8::2", ErrRateLimited}, {"2001:db8:0:1::1", ErrTrialExhausted}} {
		if _, _, _, err := f.SignUp(f.ctx, "IPv6", netip.MustParseAddr(c.address), "", trial); !errors.Is(err, c.want) {
			t.Errorf("%d: %s: %v", i, c.address, err)
		}
	}
	given, err := f.TrialGiven(f.ctx)
	f.must(err)
	f.same(given, trial.Pot)
	f.balanced()

	for name, bad := range map[string]Trial{
		"no credit": {Pot: 1, PerDay: 1}, "negative pot": {Credit: 1, Pot: -1, PerDay: 1}, "no sign-ups": {Credit: 1, Pot: 1},
		"too much": {Credit: maxMicros + 1, Pot: maxMicros, PerDay: 1}, "concurrency": {Credit: 1, Pot: 1, PerDay: 1, Concurrency: -1},
	} {
		if _, _, _, err := f.SignUp(f.ctx, "x", someone, "", bad); !errors.Is(err, ErrRange) {
			t.Errorf("%s: %v", name, err)
		}
	}
	_, _, _, err = f.SignUp(f.ctx, " ", someone, "", trial)
	f.want(err, ErrRange)
	_, err = f.Credit(f.ctx, org.ID, 5, trialRef)
	f.want(err, ErrRange)
}

// TestSignUpRepeated: an answer of Redis that got lost is asked for again, and the pot pays once.
func TestSignUpRepeated(t *testing.T) {
	f := newFixture(t)
	k := f.keys
	args := []any{"org_x", "x", 0, 1, 100, 150, "key_0123456789abcdef", "sum", "first key", trialRef, 1, 10, "name", 1000}
	keys := []string{k.pot(), k.signUps("a"), k.org("org_x"), k.orgs(), k.turn(), k.ledger("org_x"), k.entries("org_x"), k.secret("sum"),
		k.key("key_0123456789abcdef"), k.orgKeys("org_x"), k.signUp("key")}
	for range 3 {
		r, err := f.eval(f.ctx, signUpScript, keys, args...)
		f.must(err)
		f.same(r.code(), "OK")
	}
	args[6] = "key_1123456789abcdef"
	r, err := f.eval(f.ctx, signUpScript, keys, args...)
	f.must(err)
	f.same(r.code(), "EXISTS")
	args[0], keys[2] = "org_y", k.org("org_y") // made anew, by the same idempotency key
	r, err = f.eval(f.ctx, signUpScript, keys, args...)
	f.must(err)
	f.same(r.code(), "SIGNEDUP")
	given, err := f.TrialGiven(f.ctx)
	f.must(err)
	f.same(given, Micros(100))
	f.balanced()
}

// TestSignUpIdempotency: whoever does not get the answer and asks again, at once or later, gets no second account.
func TestSignUpIdempotency(t *testing.T) {
	f := newFixture(t)
	trial := Trial{Credit: 100, Pot: 1000, PerDay: maxPerDay}
	var wg sync.WaitGroup
	var made atomic.Int64
	for range 8 {
		wg.Go(func() {
			_, _, _, err := f.SignUp(f.ctx, "x", someone, "the same", trial)
			if err == nil {
				made.Add(1)
			} else if !errors.Is(err, ErrSignedUp) {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	f.same(made.Load(), int64(1))
	_, _, _, err := f.SignUp(f.ctx, "y", someone, "the same", trial)
	f.want(err, ErrIdempotencyConflict)
	_, _, _, err = f.SignUp(f.ctx, "x", someone, "another", trial)
	f.must(err)
	given, err := f.TrialGiven(f.ctx)
	f.must(err)
	f.same(given, Micros(200))
	f.balanced()
}

// TestSignUpPot: whoever signs up at the same time, with whatever credit and pot: never is more given than the pot has, what
// was given is what the accounts got, and the books balance.
func TestSignUpPot(t *testing.T) {
	n := 0
	rapid.Check(t, func(rt *rapid.T) {
		n++
		f := newFixture(t, func(c *Config) { c.Cell = fmt.Sprintf("pot%d", n) })
		trial := Trial{Credit: Micros(rapid.IntRange(1, 400).Draw(rt, "credit")), Pot: Micros(rapid.IntRange(0, 2000).Draw(rt, "pot")), PerDay: maxPerDay}
		var want Micros
		for range rapid.IntRange(1, 3).Draw(rt, "rounds") {
			var mu sync.Mutex
			var wg sync.WaitGroup
			var got Micros
			for range rapid.IntRange(1, 8).Draw(rt, "at once") {
				wg.Go(func() {
					_, _, _, err := f.SignUp(f.ctx, "x", someone, "", trial)
					mu.Lock()
					defer mu.Unlock()
					switch {
					case err == nil:
						got += trial.Credit
					case !errors.Is(err, ErrTrialExhausted):
						t.Error(err)
					}
				})
			}
			wg.Wait()
			want += got
			given, err := f.TrialGiven(f.ctx)
			if err != nil || given != want || got > 0 && given > trial.Pot {
				rt.Fatalf("%d given of %d, the accounts got %d: %v", given, trial.Pot, want, err)
			}
			if report, err := f.Audit(f.ctx); err != nil || report.Err() != nil || report.Deposits != want {
				rt.Fatalf("%+v, %v", report, err)
			}
			// The operator changes the terms.
			trial.Credit = Micros(rapid.IntRange(1, 400).Draw(rt, "new credit"))
			trial.Pot = Micros(rapid.IntRange(0, 2000).Draw(rt, "new pot"))
		}
	})
}

// TestAuditSeesThePot: trial credit that the pot does not know of is a difference.
func TestAuditSeesThePot(t *testing.T) {
	f := newFixture(t)
	_, _, _, err := f.SignUp(f.ctx, "x", someone, "", Trial{Credit: 5, Pot: 10, PerDay: 1})
	f.must(err)
	f.must(f.rdb.HSet(f.ctx, f.keys.pot(), "given", "4").Err())
	report, err := f.Audit(f.ctx)
	f.must(err)
	if report.Err() == nil {
		t.Error("nothing is found")
	}
}
