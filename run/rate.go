package run

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"
)

// Rate is how often an API key may be used: PerSecond times a second on average, and Burst times at once. A PerSecond of
// 0 is no limit.
type Rate struct{ PerSecond, Burst int }

// maxRate is the highest rate that is counted, in requests a second: one a microsecond.
const maxRate = 1_000_000

// interval is the time between two requests at the full rate.
func (r Rate) interval() time.Duration {
	return max(time.Second/time.Duration(r.PerSecond), time.Microsecond)
}

func (r Rate) check() error {
	if r.PerSecond < 0 || r.PerSecond > maxRate || r.PerSecond > 0 && (r.Burst < 1 || r.Burst > maxRate) {
		return fmt.Errorf("rate %+v: want at most %d a second, and at once 1 to %d: %w", r, maxRate, maxRate, ErrRange)
	}
	return nil
}

// Allowance is what a key may do now: Remaining requests at once, and all of its burst again after Full. A request that
// was refused may come again after Wait.
type Allowance struct {
	Remaining  int
	Full, Wait time.Duration
}

var authenticateScript = loadLax("authenticate")

// AuthenticateAt is Authenticate, and counts the use against the key's rate, in one round trip. With ErrRateLimited the
// key and its allowance are returned as well; the request was not counted.
//
// Script authenticate.lua.
func (s *Store) AuthenticateAt(ctx context.Context, secret string, rate Rate) (Key, Allowance, error) {
	if err := rate.check(); err != nil {
		return Key{}, Allowance{}, fmt.Errorf("authenticate: %w", err)
	}
	if rate.PerSecond == 0 {
		k, err := s.Authenticate(ctx, secret)
		return k, Allowance{}, err
	}
	if !validSecret(secret) {
		return Key{}, Allowance{}, fmt.Errorf("API key has not the form of one: %w", ErrUnauthenticated)
	}
	sum, every := digest(secret), rate.interval()
	most := every * time.Duration(rate.Burst)
	u, turn, err := s.countUse(ctx, sum, every, most)
	if err == nil {
		err = s.usable(u.key)
	}
	if err != nil {
		return Key{}, Allowance{}, fmt.Errorf("authenticate: %w", err)
	}
	ahead := time.Duration(u.before)*time.Microsecond + every*time.Duration(min(int64(turn), u.granted))
	if int64(turn) <= u.granted {
		return u.key, Allowance{Remaining: int((most - ahead) / every), Full: ahead}, nil
	}
	return u.key, Allowance{Full: ahead, Wait: ahead + every - most}, fmt.Errorf("API key %s: %w", u.key.ID, ErrRateLimited)
}

// uses is what authenticate.lua says: the key, how many of the uses are granted, and by how many microseconds those before
// ran ahead of the rate.
type uses struct {
	key             Key
	granted, before int64
}

// decodeUses reads an answer of authenticate.lua. ErrUnauthenticated: there is no such key.
func decodeUses(r reply) (u uses, err error) {
	if u.key, err = decodeKey(r.fields(1)); err != nil {
		return uses{}, err
	}
	if u.granted, err = r.int(2); err != nil {
		return uses{}, err
	}
	if u.before, err = r.int(3); err != nil {
		return uses{}, err
	}
	return u, refused(r)
}

// countUse reads the key with this digest and counts uses of it: those who ask before it is asked for are counted together,
// in turns.
func (s *Store) countUse(ctx context.Context, sum string, every, most time.Duration) (u uses, turn int, err error) {
	keys := []string{s.keys.secret(sum), s.keys.rate(sum)}
	p, turn, err := s.batch.share(ctx, "use "+strconv.FormatInt(every.Microseconds(), 10)+" "+strconv.FormatInt(most.Microseconds(), 10)+" "+sum, func(callers int) redis.Cmder {
		return authenticateScript.call(context.WithoutCancel(ctx), keys, []any{every.Microseconds(), most.Microseconds(), callers})
	})
	if redis.HasErrorPrefix(err, "NOSCRIPT") { // for this caller alone
		r, err := s.eval(ctx, authenticateScript, keys, every.Microseconds(), most.Microseconds(), 1)
		if err != nil {
			return uses{}, 0, err
		}
		u, err := decodeUses(r)
		return u, 1, err
	}
	if err != nil {
		return uses{}, 0, fmt.Errorf("%s: %w", authenticateScript.name, unavailable(err))
	}
	value, err := p.reading(func(cmd redis.Cmder) (any, error) { return decodeUses(cmd.(*redis.SliceCmd).Val()) })
	if err != nil {
		return uses{}, 0, err
	}
	return value.(uses), turn, nil
}
