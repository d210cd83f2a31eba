package run

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"
	"unicode/utf8"
)

// Trial is what an operator gives to those who sign up by themselves.
type Trial struct {
	Credit      Micros // of each, above 0
	Pot         Micros // of all together, ever; never more is given
	Concurrency int    // runs at once of each; 0: the default
	PerDay      int    // sign-ups of one address a day
}

// ErrTrialExhausted: what is left in the pot of trial credit is less than one sign-up gets.
var ErrTrialExhausted = errors.New("the trial credit is used up")

// ErrSignedUp: the idempotency key has made an account already, whose secret cannot be had again.
var ErrSignedUp = errors.New("this sign-up has made its account already")

// SignUpLimitError says when an address may sign up again. It is ErrRateLimited.
type SignUpLimitError struct{ Wait time.Duration }

// Error makes it an error.
func (e *SignUpLimitError) Error() string {
	return fmt.Sprintf("too many sign-ups of this address, the next may come in %s", e.Wait.Round(time.Second))
}

// Unwrap gives ErrRateLimited.
func (e *SignUpLimitError) Unwrap() error { return ErrRateLimited }

// reservedRefs begins the references of entries that the store makes itself; nobody else may use them.
const reservedRefs = "store:"

// trialRef is the reference of the trial credit in a ledger.
const trialRef = reservedRefs + "trial"

// maxPerDay bounds Trial.PerDay.
const maxPerDay = 1_000_000

var signUpScript = loadScript("signup")

// SignUp makes an organisation of that name with trial credit, and a member key of it, which is returned with its secret;
// the secret cannot be had again. address is who asks: IPv4 addresses count alone, those of IPv6 by their first 64 bits. All
// of it happens at once or not at all. An idempotency key makes one account in 24 hours: the same again is ErrSignedUp, and
// with another name ErrIdempotencyConflict; an empty one makes an account each time. ErrTrialExhausted, *SignUpLimitError; a bad
// name or trial is ErrRange.
//
// Script signup.lua.
func (s *Store) SignUp(ctx context.Context, name string, address netip.Addr, idempotency string, t Trial) (Org, Key, string, error) {
	fail := func(err error) (Org, Key, string, error) { return Org{}, Key{}, "", fmt.Errorf("sign up: %w", err) }
	switch {
	case strings.TrimSpace(name) == "" || len(name) > maxNameBytes || !utf8.ValidString(name):
		return fail(fmt.Errorf("name: want 1 to %d bytes of UTF-8: %w", maxNameBytes, ErrRange))
	case t.Credit < 1 || t.Credit > maxMicros || t.Pot < 0 || t.Pot > maxMicros:
		return fail(fmt.Errorf("credit %d of a pot of %d: %w", t.Credit, t.Pot, ErrRange))
	case t.Concurrency < 0 || t.Concurrency > maxConcurrency || t.PerDay < 1 || t.PerDay > maxPerDay:
		return fail(fmt.Errorf("concurrency %d, %d sign-ups a day: %w", t.Concurrency, t.PerDay, ErrRange))
	}
	b := make([]byte, secretBytes)
	rand.Read(b) // never fails: the program ends when the system has no randomness
	secret, now := "eph_"+base64.RawURLEncoding.EncodeToString(b), s.micros()
	k := Key{ID: "key_" + word(8), Org: "org_" + word(8), Name: "first key", Role: Member, CreatedAt: time.UnixMicro(now).UTC()}
	sum, day := digest(secret), (24 * time.Hour).Microseconds()
	fingerprint := ""
	if idempotency != "" {
		fingerprint = digest(name)
	}
	r, err := s.eval(ctx, signUpScript, []string{s.keys.pot(), s.keys.signUps(neighbourhood(address)), s.keys.org(k.Org), s.keys.orgs(), s.keys.turn(),
		s.keys.ledger(k.Org), s.keys.entries(k.Org), s.keys.secret(sum), s.keys.key(k.ID), s.keys.orgKeys(k.Org), s.keys.signUp(digest(idempotency))},
		k.Org, name, t.Concurrency, now, int64(t.Credit), int64(t.Pot), k.ID, sum, k.Name, trialRef, day/int64(t.PerDay), day,
		fingerprint, idempotencyTTL.Milliseconds())
	if err != nil {
		return fail(err)
	}
	switch r.code() {
	case "SIGNEDUP":
		return fail(ErrSignedUp)
	case "EXHAUSTED":
		return fail(ErrTrialExhausted)
	case "LIMITED":
		wait, err := r.int(1)
		if err != nil {
			return fail(err)
		}
		return fail(&SignUpLimitError{time.Duration(wait) * time.Microsecond})
	}
	if err := refused(r); err != nil {
		return fail(err)
	}
	return Org{ID: k.Org, Name: name, Concurrency: t.Concurrency, CreatedAt: k.CreatedAt}, k, secret, nil
}

// TrialGiven is how much trial credit was given so far, over all time.
func (s *Store) TrialGiven(ctx context.Context) (Micros, error) {
	v, err := s.rdb.HGet(ctx, s.keys.pot(), "given").Result()
	if missing(err) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("read the pot of trial credit: %w", unavailable(err))
	}
	d := decoder{f: map[string]string{"given": v}}
	return d.money("given"), d.err
}

// neighbourhood is what an address counts as.
func neighbourhood(a netip.Addr) string {
	a = a.Unmap().WithZone("")
	if a.Is6() {
		if p, err := a.Prefix(64); err == nil {
			return digest(p.String())
		}
	}
	return digest(a.String())
}
