package run

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"regexp"
	"time"
	"unicode/utf8"

	"github.com/redis/go-redis/v9"
)

// Key is an API key. Its secret is shown once, when it is made; the store keeps the SHA-256.
type Key struct {
	ID        string    `json:"id"`
	Org       string    `json:"org"`
	Name      string    `json:"name"`
	Role      Role      `json:"role"`
	Member    string    `json:"member,omitempty"` // whose key it is; removing the member revokes it
	CreatedAt time.Time `json:"created_at"`
	ExpiresAt time.Time `json:"expires_at,omitzero"` // from when on it is useless; zero: never
	RevokedAt time.Time `json:"revoked_at,omitzero"`
}

// KeyOption says more about a key that is made.
type KeyOption func(*Key)

// ExpiresAt ends a key's life at t, which must be in the future; zero: never.
func ExpiresAt(t time.Time) KeyOption { return func(k *Key) { k.ExpiresAt = t } }

// OfMember makes the key that of a member of its organisation.
func OfMember(id string) KeyOption { return func(k *Key) { k.Member = id } }

// Role is what a key may do.
type Role string

// The roles.
const (
	Member Role = "member" // runs and the account of its own organisation
	Admin  Role = "admin"  // organisations, keys, credits, pools; belongs to no organisation
)

// secretBytes is how much randomness a secret has.
const secretBytes = 32

var keyPattern = regexp.MustCompile(`^key_[0-9a-f]{16}$`)

var keyScript = loadScript("key")

// CreateKey makes an API key and returns it with its secret, "eph_" and 43 characters, which cannot be had again. A
// member key belongs to an organisation (ErrNotFound when there is no such, or no such member in it), an admin key to
// none; anything else is ErrRange.
//
// Script key.lua.
func (s *Store) CreateKey(ctx context.Context, org, name string, role Role, options ...KeyOption) (Key, string, error) {
	now := s.micros()
	k := Key{ID: "key_" + word(8), Org: org, Name: name, Role: role, CreatedAt: time.UnixMicro(now).UTC()}
	for _, o := range options {
		o(&k)
	}
	k.ExpiresAt = k.ExpiresAt.UTC().Truncate(time.Microsecond)
	switch {
	case role != Member && role != Admin:
		return Key{}, "", fmt.Errorf("role %.20q: want member or admin: %w", role, ErrRange)
	case role == Admin && org != "":
		return Key{}, "", fmt.Errorf("an admin key belongs to no organisation: %w", ErrRange)
	case role == Member && !validOrg(org):
		return Key{}, "", fmt.Errorf("organisation %.64q: %w", org, ErrNotFound)
	case len(name) > maxNameBytes || !utf8.ValidString(name):
		return Key{}, "", fmt.Errorf("key name: want at most %d bytes of UTF-8: %w", maxNameBytes, ErrRange)
	case role == Admin && k.Member != "":
		return Key{}, "", fmt.Errorf("an admin key belongs to no member: %w", ErrRange)
	case k.Member != "" && !memberPattern.MatchString(k.Member):
		return Key{}, "", fmt.Errorf("member %.64q: %w", k.Member, ErrNotFound)
	case !k.ExpiresAt.IsZero() && !k.ExpiresAt.After(k.CreatedAt):
		return Key{}, "", fmt.Errorf("a key that has expired already: %w", ErrRange)
	}
	b := make([]byte, secretBytes)
	rand.Read(b) // never fails: the program ends when the system has no randomness
	secret := "eph_" + base64.RawURLEncoding.EncodeToString(b)
	sum, expires := digest(secret), int64(0)
	if !k.ExpiresAt.IsZero() {
		expires = k.ExpiresAt.UnixMicro()
	}
	r, err := s.eval(ctx, keyScript,
		[]string{s.keys.secret(sum), s.keys.key(k.ID), s.keys.orgKeys(org), s.keys.org(org), s.keys.members(org),
			s.keys.memberKeys(org, k.Member)},
		k.ID, org, name, string(role), now, sum, expires, k.Member)
	if err == nil {
		err = refused(r)
	}
	if err != nil {
		return Key{}, "", fmt.Errorf("create key for organisation %q: %w", org, err)
	}
	return k, secret, nil
}

// RevokeKey makes a key useless from now on; no process caches keys. Revoking again changes nothing. ErrNotFound when
// there is no such key.
func (s *Store) RevokeKey(ctx context.Context, id string) error {
	sum, err := s.secretOf(ctx, id)
	if err != nil {
		return fmt.Errorf("revoke: %w", err)
	}
	k, err := s.keyBySum(ctx, sum)
	if err != nil {
		return fmt.Errorf("revoke: %w", err)
	}
	err = s.durably(ctx, s.keys.secret(sum), func(p redis.Pipeliner) {
		p.HSetNX(ctx, s.keys.secret(sum), "revoked_us", s.micros())
		p.Publish(ctx, s.keys.revoked(), k.Org)
	})
	if err != nil {
		return fmt.Errorf("revoke key %s: %w", id, err)
	}
	return nil
}

// Keys returns an organisation's keys, revoked ones too, oldest first; with org empty the admin keys.
func (s *Store) Keys(ctx context.Context, org string) ([]Key, error) {
	if org != "" {
		if _, err := s.Org(ctx, org); err != nil {
			return nil, fmt.Errorf("list keys: %w", err)
		}
	}
	ids, err := s.rdb.ZRange(ctx, s.keys.orgKeys(org), 0, -1).Result()
	if err != nil {
		return nil, fmt.Errorf("list keys of %q: %w", org, unavailable(err))
	}
	list := make([]Key, 0, len(ids))
	for _, id := range ids {
		sum, err := s.secretOf(ctx, id)
		if err != nil {
			return nil, fmt.Errorf("list keys: %w", err)
		}
		k, err := s.keyBySum(ctx, sum)
		if err != nil {
			return nil, fmt.Errorf("list keys: %w", err)
		}
		list = append(list, k)
	}
	return list, nil
}

// Authenticate returns the key that has this secret; ErrUnauthenticated when there is none, it was revoked or has
// expired. No process caches keys: what holds now holds for the next request. The
// secret is looked up by its SHA-256, so how long the look-up takes tells nothing about it.
func (s *Store) Authenticate(ctx context.Context, secret string) (Key, error) {
	if !validSecret(secret) {
		return Key{}, fmt.Errorf("API key has not the form of one: %w", ErrUnauthenticated)
	}
	k, err := s.keyBySum(ctx, digest(secret))
	if err != nil {
		return Key{}, fmt.Errorf("authenticate: %w", err)
	}
	if err := s.usable(k); err != nil {
		return Key{}, fmt.Errorf("authenticate: %w", err)
	}
	return k, nil
}

// CheckKey is nil while the key may be used: for what goes on after it was authenticated, as an event stream does.
// ErrUnauthenticated as for Authenticate; ErrNotFound.
func (s *Store) CheckKey(ctx context.Context, id string) error {
	sum, err := s.secretOf(ctx, id)
	if err != nil {
		return fmt.Errorf("check: %w", err)
	}
	k, err := s.keyBySum(ctx, sum)
	if err == nil {
		err = s.usable(k)
	}
	if err != nil {
		return fmt.Errorf("check key: %w", err)
	}
	return nil
}

// usable is nil unless the key was revoked or has expired.
func (s *Store) usable(k Key) error {
	switch {
	case !k.RevokedAt.IsZero():
		return fmt.Errorf("API key %s is revoked: %w", k.ID, ErrUnauthenticated)
	case !k.ExpiresAt.IsZero() && !s.now().Before(k.ExpiresAt):
		return fmt.Errorf("API key %s has expired: %w", k.ID, ErrUnauthenticated)
	}
	return nil
}

// secretOf is the SHA-256 of a key's secret.
func (s *Store) secretOf(ctx context.Context, id string) (string, error) {
	if !keyPattern.MatchString(id) {
		return "", fmt.Errorf("key %.64q: %w", id, ErrNotFound)
	}
	sum, err := s.rdb.Get(ctx, s.keys.key(id)).Result()
	if missing(err) {
		return "", fmt.Errorf("key %s: %w", id, ErrNotFound)
	}
	if err != nil {
		return "", fmt.Errorf("read key %s: %w", id, unavailable(err))
	}
	return sum, nil
}

func (s *Store) keyBySum(ctx context.Context, sum string) (Key, error) {
	f, err := s.batch.hgetall(ctx, s.keys.secret(sum))
	if err != nil {
		return Key{}, fmt.Errorf("read key: %w", unavailable(err))
	}
	return decodeKey(f)
}

// decodeKey reads what is stored of a key; nothing is ErrUnauthenticated.
func decodeKey(f map[string]string) (Key, error) {
	if len(f) == 0 {
		return Key{}, fmt.Errorf("API key is unknown: %w", ErrUnauthenticated)
	}
	d := decoder{f: f}
	k := Key{ID: f["id"], Org: f["org"], Name: f["name"], Role: Role(f["role"]), Member: f["member"], CreatedAt: d.time("created_us")}
	if t := d.optional("expires_us"); t != nil {
		k.ExpiresAt = *t
	}
	if t := d.optional("revoked_us"); t != nil {
		k.RevokedAt = *t
	}
	if d.err != nil {
		return Key{}, fmt.Errorf("key %s: %w", k.ID, d.err)
	}
	return k, nil
}

// digest is the SHA-256 of a secret, in hexadecimal digits.
func digest(secret string) string {
	sum := sha256.Sum256([]byte(secret))
	return hex.EncodeToString(sum[:])
}
