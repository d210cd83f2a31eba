package run

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/redis/go-redis/v9"
)

// Org is an organisation.
type Org struct {
	ID          string    `json:"id"`
	Name        string    `json:"name"`
	Concurrency int       `json:"concurrency"`                // runs at once; 0: the default
	QueueLimit  int       `json:"queue_limit,omitzero"`       // runs that may wait; 0: the default; set by LimitOrg
	Retention   int       `json:"retention_seconds,omitzero"` // content is erased so long after a run's end; 0: with the record; set by RetainOrg
	Images      []string  `json:"images,omitzero"`            // that its runs may use; none: any; set by AllowImages
	CreatedAt   time.Time `json:"created_at"`
}

// Account is an organisation's money. Available = Balance - Held, never below zero.
type Account struct {
	Org       string `json:"org"`
	Balance   Micros `json:"balance_micros"` // deposits - charges
	Held      Micros `json:"held_micros"`    // sum of open holds
	Available Micros `json:"available_micros"`
	Deposits  Micros `json:"deposits_micros"`
	Charged   Micros `json:"charged_micros"`
}

// Bounds of what an organisation may be given.
const (
	maxMicros      Micros = 1<<53 - 1 // the largest amount that Redis scripts hold exactly
	maxNameBytes          = 200
	maxConcurrency        = 100_000
)

var refPattern = regexp.MustCompile(`^[!-~]{1,200}$`) // visible ASCII

var orgScript, creditScript = loadScript("org"), loadScript("credit")

// CreateOrg makes an organisation with an empty account. An empty ID is replaced by a fresh one. Making the same
// organisation again returns it; another one with its id is ErrExists; a bad id, name or limit is ErrRange.
//
// Script org.lua.
func (s *Store) CreateOrg(ctx context.Context, o Org) (Org, error) {
	if o.ID == "" {
		o.ID = "org_" + word(8)
	}
	switch {
	case !validOrg(o.ID):
		return Org{}, fmt.Errorf("organisation id %.64q: want 1 to 63 of a-z, 0-9, _ and -: %w", o.ID, ErrRange)
	case len(o.Name) > maxNameBytes || !utf8.ValidString(o.Name):
		return Org{}, fmt.Errorf("organisation name: want at most %d bytes of UTF-8: %w", maxNameBytes, ErrRange)
	case o.Concurrency < 0 || o.Concurrency > maxConcurrency:
		return Org{}, fmt.Errorf("concurrency %d: want 0 to %d: %w", o.Concurrency, maxConcurrency, ErrRange)
	}
	r, err := s.eval(ctx, orgScript, []string{s.keys.org(o.ID), s.keys.orgs(), s.keys.turn()},
		o.ID, o.Name, o.Concurrency, s.micros())
	if err == nil {
		err = refused(r)
	}
	if err != nil {
		return Org{}, fmt.Errorf("create organisation %s: %w", o.ID, err)
	}
	return s.Org(ctx, o.ID)
}

// Org returns an organisation, or ErrNotFound.
func (s *Store) Org(ctx context.Context, id string) (Org, error) {
	if !validOrg(id) {
		return Org{}, fmt.Errorf("organisation %.64q: %w", id, ErrNotFound)
	}
	f, err := s.rdb.HGetAll(ctx, s.keys.org(id)).Result()
	if err != nil {
		return Org{}, fmt.Errorf("read organisation %s: %w", id, unavailable(err))
	}
	if len(f) == 0 {
		return Org{}, fmt.Errorf("organisation %s: %w", id, ErrNotFound)
	}
	d := decoder{f: f}
	o := Org{ID: id, Name: f["name"], Concurrency: int(d.int("concurrency")), CreatedAt: d.time("created_us")}
	if f["retention_ms"] != "" {
		o.Retention = int(d.int("retention_ms") / 1000)
	}
	if f["queue_limit"] != "" {
		o.QueueLimit = int(d.int("queue_limit"))
	}
	if f["images"] != "" {
		o.Images = strings.Split(f["images"], ",")
	}
	if d.err != nil {
		return Org{}, fmt.Errorf("organisation %s: %w", id, d.err)
	}
	return o, nil
}

// Orgs returns all organisations, oldest first.
func (s *Store) Orgs(ctx context.Context) ([]Org, error) {
	ids, err := s.rdb.ZRange(ctx, s.keys.orgs(), 0, -1).Result()
	if err != nil {
		return nil, fmt.Errorf("list organisations: %w", unavailable(err))
	}
	orgs := make([]Org, 0, len(ids))
	for _, id := range ids {
		o, err := s.Org(ctx, id)
		if err != nil {
			return nil, err
		}
		orgs = append(orgs, o)
	}
	return orgs, nil
}

// Credit adds a deposit to the account, or a correction when amount is negative, and returns the account. ref names the
// entry: the same ref and amount again changes nothing, with another amount it is ErrIdempotencyConflict. An empty ref
// makes every call an entry of its own. A correction below what is held is ErrInsufficientFunds; an amount of 0, a
// balance above 2^53-1 or a ref that is not 1 to 200 visible ASCII characters is ErrRange.
//
// Script credit.lua.
func (s *Store) Credit(ctx context.Context, org string, amount Micros, ref string) (Account, error) {
	if ref == "" {
		ref = "once-" + word(12)
	}
	switch {
	case !validOrg(org):
		return Account{}, fmt.Errorf("credit %.64q: %w", org, ErrNotFound)
	case amount == 0 || amount > maxMicros || amount < -maxMicros:
		return Account{}, fmt.Errorf("credit %s with %d micro-dollars: %w", org, amount, ErrRange)
	case strings.HasPrefix(ref, reservedRefs):
		return Account{}, fmt.Errorf("reference of a credit: those with %q are the store's own: %w", reservedRefs, ErrRange)
	case !refPattern.MatchString(ref):
		return Account{}, fmt.Errorf("reference of a credit: want 1 to 200 visible ASCII characters: %w", ErrRange)
	}
	r, err := s.eval(ctx, creditScript, []string{s.keys.org(org), s.keys.ledger(org), s.keys.entries(org)},
		int64(amount), ref, s.micros(), int64(maxMicros))
	if err == nil {
		err = refused(r)
	}
	if err != nil {
		return Account{}, fmt.Errorf("credit %s with %s, reference %q: %w", org, amount, ref, err)
	}
	return s.Account(ctx, org)
}

// Account returns an organisation's account, or ErrNotFound.
func (s *Store) Account(ctx context.Context, org string) (Account, error) {
	if !validOrg(org) {
		return Account{}, fmt.Errorf("account %.64q: %w", org, ErrNotFound)
	}
	v, err := s.rdb.HMGet(ctx, s.keys.org(org), "balance", "held", "deposits", "charged").Result()
	if err != nil {
		return Account{}, fmt.Errorf("read account %s: %w", org, unavailable(err))
	}
	if v[0] == nil {
		return Account{}, fmt.Errorf("account %s: %w", org, ErrNotFound)
	}
	d := decoder{f: map[string]string{}}
	for i, name := range []string{"balance", "held", "deposits", "charged"} {
		d.f[name], _ = v[i].(string)
	}
	a := Account{Org: org, Balance: d.money("balance"), Held: d.money("held"), Deposits: d.money("deposits"), Charged: d.money("charged")}
	a.Available = a.Balance - a.Held
	if d.err != nil {
		return Account{}, fmt.Errorf("account %s: %w", org, d.err)
	}
	return a, nil
}

// decoder reads the fields of a hash and keeps the first error.
type decoder struct {
	f   map[string]string
	err error
}

func (d *decoder) int(name string) int64 {
	n, err := strconv.ParseInt(d.f[name], 10, 64)
	if err != nil && d.err == nil {
		d.err = fmt.Errorf("stored field %s: %w", name, errors.Unwrap(err))
	}
	return n
}

func (d *decoder) money(name string) Micros { return Micros(d.int(name)) }

func (d *decoder) time(name string) time.Time { return time.UnixMicro(d.int(name)).UTC() }

// optional is the time in a field that may be missing.
func (d *decoder) optional(name string) *time.Time {
	if d.f[name] == "" {
		return nil
	}
	t := d.time(name)
	return &t
}

// missing tells whether err is Redis's way of saying that there is no such key.
func missing(err error) bool { return errors.Is(err, redis.Nil) }
