package run

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/base64"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// Share lets whoever has its token read one run, without a key, until it expires or is revoked. The token is shown once,
// when it is made; the store keeps its SHA-256.
type Share struct {
	ID        string    `json:"id"`
	Run       ID        `json:"run"`
	CreatedAt time.Time `json:"created_at"`
	ExpiresAt time.Time `json:"expires_at"`
}

// Bounds of sharing.
const (
	MinShare  = time.Minute         // the shortest life of a share
	MaxShare  = 30 * 24 * time.Hour // the longest
	MaxShares = 20                  // of one run at once
)

var (
	sharePattern = regexp.MustCompile(`^share_[0-9a-f]{16}$`)
	tokenPattern = regexp.MustCompile(`^eph_share_[A-Za-z0-9_-]{43}$`)
)

var shareScript = loadScript("share")

// CreateShare shares a run for so long and returns the share with its token, "eph_share_" and 43 characters, which cannot
// be had again. ErrNotFound as for Get; ErrRange: life is not between MinShare and MaxShare; ErrState: the run has zero data
// retention, and nobody but those who follow it may see its content; ErrQueueFull: it has MaxShares.
//
// Script share.lua.
func (s *Store) CreateShare(ctx context.Context, org string, id ID, life time.Duration) (Share, string, error) {
	if _, err := ParseID(string(id)); err != nil {
		return Share{}, "", fmt.Errorf("share: %w", err)
	}
	if life < MinShare || life > MaxShare {
		return Share{}, "", fmt.Errorf("share for %s: want %s to %s: %w", life, MinShare, MaxShare, ErrRange)
	}
	b := make([]byte, secretBytes)
	rand.Read(b) // never fails: the program ends when the system has no randomness
	token := "eph_share_" + base64.RawURLEncoding.EncodeToString(b)
	now := s.micros()
	expiry := now + life.Microseconds()
	sh := Share{ID: "share_" + word(8), Run: id, CreatedAt: time.UnixMicro(now).UTC(), ExpiresAt: time.UnixMicro(expiry).UTC()}
	sum := digest(token)
	r, err := s.eval(ctx, shareScript, []string{s.keys.run(string(id)), s.keys.shares(string(id)), s.keys.share(sum)},
		string(id), org, sh.ID, sum, now, expiry, MaxShares)
	if err == nil {
		err = refused(r)
	}
	if err != nil {
		return Share{}, "", fmt.Errorf("share %s: %w", id, err)
	}
	return sh, token, nil
}

// Shares returns the shares of a run that have not expired, oldest first. ErrNotFound as for Get.
func (s *Store) Shares(ctx context.Context, org string, id ID) ([]Share, error) {
	if _, err := s.owner(ctx, org, id); err != nil {
		return nil, fmt.Errorf("shares: %w", err)
	}
	f, err := s.rdb.HGetAll(ctx, s.keys.shares(string(id))).Result()
	if err != nil {
		return nil, fmt.Errorf("shares of %s: %w", id, unavailable(err))
	}
	now := s.now()
	list := make([]Share, 0, len(f))
	for name, value := range f {
		sh, _, err := decodeShare(id, name, value)
		if err != nil {
			return nil, err
		}
		if sh.ExpiresAt.After(now) {
			list = append(list, sh)
		}
	}
	slices.SortFunc(list, func(a, b Share) int {
		return cmp.Or(a.CreatedAt.Compare(b.CreatedAt), cmp.Compare(a.ID, b.ID))
	})
	return list, nil
}

// RevokeShare makes a share's token useless from now on. ErrNotFound: there is no such share of the run.
func (s *Store) RevokeShare(ctx context.Context, org string, id ID, share string) error {
	if _, err := s.owner(ctx, org, id); err != nil {
		return fmt.Errorf("revoke share: %w", err)
	}
	if !sharePattern.MatchString(share) {
		return fmt.Errorf("share %.64q: %w", share, ErrNotFound)
	}
	value, err := s.rdb.HGet(ctx, s.keys.shares(string(id)), share).Result()
	if missing(err) {
		return fmt.Errorf("share %s of %s: %w", share, id, ErrNotFound)
	}
	if err != nil {
		return fmt.Errorf("read share %s: %w", share, unavailable(err))
	}
	_, sum, err := decodeShare(id, share, value)
	if err != nil {
		return err
	}
	// The token first: what the list still names after a broken connection can be revoked again.
	err = s.durably(ctx, s.keys.share(sum), func(p redis.Pipeliner) {
		p.Del(ctx, s.keys.share(sum))
		p.HDel(ctx, s.keys.shares(string(id)), share)
		p.Publish(ctx, s.keys.revoked(), org)
	})
	if err != nil {
		return fmt.Errorf("revoke share %s: %w", share, err)
	}
	return nil
}

// Shared returns the run that a token lets read, and the organisation that shared it. ErrUnauthenticated: the token is
// unknown, revoked or expired.
func (s *Store) Shared(ctx context.Context, token string) (org string, id ID, err error) {
	if !tokenPattern.MatchString(token) {
		return "", "", fmt.Errorf("share token has not the form of one: %w", ErrUnauthenticated)
	}
	f, err := s.rdb.HGetAll(ctx, s.keys.share(digest(token))).Result()
	if err != nil {
		return "", "", fmt.Errorf("read share: %w", unavailable(err))
	}
	expiry, err := strconv.ParseInt(f["expires_us"], 10, 64)
	if len(f) == 0 || err != nil || expiry <= s.micros() {
		return "", "", fmt.Errorf("share token is unknown or expired: %w", ErrUnauthenticated)
	}
	return f["org"], ID(f["run"]), nil
}

// decodeShare reads one entry of a run's shares: "SHA-256 created expires".
func decodeShare(run ID, id, value string) (Share, string, error) {
	parts := strings.Fields(value)
	if len(parts) != 3 {
		return Share{}, "", fmt.Errorf("share %s of %s: damaged entry", id, run)
	}
	created, err := strconv.ParseInt(parts[1], 10, 64)
	if err != nil {
		return Share{}, "", fmt.Errorf("share %s of %s: %w", id, run, err)
	}
	expiry, err := strconv.ParseInt(parts[2], 10, 64)
	if err != nil {
		return Share{}, "", fmt.Errorf("share %s of %s: %w", id, run, err)
	}
	return Share{ID: id, Run: run, CreatedAt: time.UnixMicro(created).UTC(), ExpiresAt: time.UnixMicro(expiry).UTC()}, parts[0], nil
}
