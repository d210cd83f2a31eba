package run

import (
	"context"
	"errors"
	"fmt"

	"github.com/redis/go-redis/v9"
)

// Persistence is what a Redis does for what it acknowledged; fields are empty where it does not tell its clients.
type Persistence struct {
	AppendOnly string // "yes" or "no"
	Fsync      string // "always", "everysec" or "no"
	Eviction   string // maxmemory-policy
}

// AskPersistence asks the Redis at url, as EPHEMERAL_REDIS_URL names it, how it keeps its data. A cluster answers with what
// one of its nodes says. ErrUnavailable: nobody answers.
func AskPersistence(ctx context.Context, url string) (p Persistence, err error) {
	quiet()
	rdb, err := dial(url)
	if err != nil {
		return p, err
	}
	defer rdb.Close()
	if err := rdb.Ping(ctx).Err(); err != nil {
		return p, fmt.Errorf("reach Redis: %w", unavailable(err))
	}
	for name, into := range map[string]*string{"appendonly": &p.AppendOnly, "appendfsync": &p.Fsync, "maxmemory-policy": &p.Eviction} {
		values, err := rdb.ConfigGet(ctx, name).Result()
		var refusal redis.Error
		if err != nil && !errors.As(err, &refusal) {
			return p, fmt.Errorf("ask Redis for %s: %w", name, unavailable(err))
		}
		*into = values[name]
	}
	return p, nil
}
