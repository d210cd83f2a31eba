package run

import "github.com/redis/go-redis/v9"

// Cell is the connection to the cell's Redis, and what makes keys of the cell: for packages that keep something beside runs
// there. The connection is the store's to close.
func (s *Store) Cell() (redis.UniversalClient, func(parts ...string) string) { return s.rdb, s.keys.at }

// Unavailable adds ErrUnavailable to an error of the connection to Redis, and to one by which Redis says that it cannot
// serve.
func Unavailable(err error) error { return unavailable(err) }
