package run

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"regexp"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// Timeouts towards Redis: a server that is slow by a second is still served, one that is gone is noticed within the
// deadline of a request.
const (
	dialTimeout  = 2 * time.Second
	readTimeout  = 3 * time.Second
	writeTimeout = 3 * time.Second
	poolTimeout  = 3 * time.Second
	protocol     = 2 // of RESP: the third looks for messages pushed by Redis before each answer, and there are none
	maxRetries   = 2 // of commands that failed on the network; harmless, since every script may be repeated
)

// Defaults for a Config that was not read from the environment.
const (
	defaultCell        = "c0"
	defaultLease       = 10 * time.Second
	defaultRetention   = 720 * time.Hour
	defaultConcurrency = 20
	defaultQueueLimit  = 10_000
)

var cellPattern = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,31}$`)

// complete fills in defaults and checks the rest.
func (c *Config) complete() error {
	if c.Cell == "" {
		c.Cell = defaultCell
	}
	if c.Lease == 0 {
		c.Lease = defaultLease
	}
	if c.Retention == 0 {
		c.Retention = defaultRetention
	}
	if c.Concurrency == 0 {
		c.Concurrency = defaultConcurrency
	}
	if c.QueueLimit == 0 {
		c.QueueLimit = defaultQueueLimit
	}
	switch {
	case c.RedisURL == "":
		return errors.New("EPHEMERAL_REDIS_URL is empty: give redis://, rediss:// or unix://")
	case c.Replicas < 0 || c.Replicas > maxReplicas:
		return fmt.Errorf("EPHEMERAL_REDIS_WAIT is %d: want 0 to %d replicas", c.Replicas, maxReplicas)
	case !cellPattern.MatchString(c.Cell):
		return fmt.Errorf("EPHEMERAL_CELL %q: want 1 to 32 of a-z, 0-9 and -", c.Cell)
	case c.Lease < 100*time.Millisecond || c.Lease > time.Hour:
		return fmt.Errorf("EPHEMERAL_LEASE %v: want 100ms to 1h", c.Lease)
	case c.Retention < idempotencyTTL:
		return fmt.Errorf("EPHEMERAL_RETENTION %v: want at least %v, the life of an idempotency key", c.Retention, idempotencyTTL)
	case c.Concurrency < 0:
		return fmt.Errorf("EPHEMERAL_ORG_CONCURRENCY %d: want a positive number", c.Concurrency)
	case c.QueueLimit < 0:
		return fmt.Errorf("EPHEMERAL_QUEUE_LIMIT %d: want a positive number", c.QueueLimit)
	}
	return nil
}

// Option changes how a store works.
type Option func(*Store)

// WithClock makes the store take the time from now instead of time.Now. Redis is never asked for the time.
func WithClock(now func() time.Time) Option { return func(s *Store) { s.now = now } }

// WithRoom makes the store ask room before it admits a run or gives one to a node: while that is not nil, new admissions are refused
// with ErrStorageFull and what room says, and nodes get no run. Runs that are under way go on.
func WithRoom(room func() error) Option { return func(s *Store) { s.room = room } }

// Full is nil while there is room for runs, as far as is known, and an ErrStorageFull otherwise.
func (s *Store) Full() error {
	if s.room == nil {
		return nil
	}
	if err := s.room(); err != nil {
		return fmt.Errorf("%w: %w: %w", ErrUnavailable, ErrStorageFull, err)
	}
	return nil
}

// Open connects to Redis, checks the version of what it holds and loads the scripts. The store is ready when it
// returns. Zero fields of cfg mean their defaults. Errors: ErrUnavailable, or what is wrong with cfg.
func Open(ctx context.Context, cfg Config, opts ...Option) (*Store, error) {
	if err := cfg.complete(); err != nil {
		return nil, fmt.Errorf("open store: %w", err)
	}
	quiet()
	rdb, err := dial(cfg.RedisURL)
	if err != nil {
		return nil, fmt.Errorf("open store: %w", err)
	}
	s := &Store{rdb: rdb, cfg: cfg, keys: keys{cfg.Cell}, now: time.Now}
	s.life, s.end = context.WithCancel(context.Background())
	s.batch = batcher{send: s.pipeline, life: s.life, routines: &s.routines}
	for _, o := range opts {
		o(s)
	}
	if err := s.prepare(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("open store: %w", err), s.Close())
	}
	return s, nil
}

// quiet sends what the Redis client says about its connections to the debug log: whoever is concerned gets the error.
var quiet = sync.OnceFunc(func() { redis.SetLogger(clientLog{}) })

type clientLog struct{}

func (clientLog) Printf(ctx context.Context, format string, v ...any) {
	slog.DebugContext(ctx, "redis client", "message", fmt.Sprintf(format, v...))
}

// dial makes the client that the URL asks for: redis://, rediss:// or unix:// for one server; with ?master_name=NAME the
// address is a Sentinel's (more with &addr=HOST:PORT); with scheme redis+cluster:// or rediss+cluster:// a node of a
// Redis Cluster.
func dial(raw string) (redis.UniversalClient, error) {
	u, err := url.Parse(raw)
	if err != nil {
		return nil, errors.New("EPHEMERAL_REDIS_URL is not a URL") // url.Error would show its password
	}
	if base, ok := strings.CutSuffix(u.Scheme, "+cluster"); ok {
		u.Scheme = base
		o, err := redis.ParseClusterURL(u.String())
		if err != nil {
			return nil, fmt.Errorf("EPHEMERAL_REDIS_URL of a cluster: %w", err)
		}
		o.DialTimeout, o.ReadTimeout, o.WriteTimeout, o.PoolTimeout = dialTimeout, readTimeout, writeTimeout, poolTimeout
		o.ContextTimeoutEnabled, o.DisableIdentity, o.Protocol = true, true, protocol
		return redis.NewClusterClient(o), nil
	}
	if u.Query().Get("master_name") != "" {
		o, err := redis.ParseFailoverURL(raw)
		if err != nil {
			return nil, fmt.Errorf("EPHEMERAL_REDIS_URL of Sentinels: %w", err)
		}
		o.DialTimeout, o.ReadTimeout, o.WriteTimeout, o.PoolTimeout = dialTimeout, readTimeout, writeTimeout, poolTimeout
		o.MaxRetries, o.ContextTimeoutEnabled, o.DisableIdentity, o.Protocol = maxRetries, true, true, protocol
		return redis.NewFailoverClient(o), nil
	}
	o, err := redis.ParseURL(raw)
	if err != nil {
		return nil, fmt.Errorf("EPHEMERAL_REDIS_URL: %w", err)
	}
	o.DialTimeout, o.ReadTimeout, o.WriteTimeout, o.PoolTimeout = dialTimeout, readTimeout, writeTimeout, poolTimeout
	o.MaxRetries, o.ContextTimeoutEnabled, o.DisableIdentity, o.Protocol = maxRetries, true, true, protocol
	restarted := &restarts{dialer: redis.NewDialer(o)} // where there are replicas, one of them takes over instead
	o.DialerRetries, o.Dialer = 1, restarted.dial
	return redis.NewClient(o), nil
}

// prepare checks the schema and loads the scripts.
func (s *Store) prepare(ctx context.Context) error {
	if err := s.rdb.SetNX(ctx, s.keys.schema(), schema, 0).Err(); err != nil {
		return fmt.Errorf("reach Redis: %w", unavailable(err))
	}
	found, err := s.rdb.Get(ctx, s.keys.schema()).Result()
	if err != nil {
		return fmt.Errorf("read schema version: %w", unavailable(err))
	}
	if found != schema {
		return fmt.Errorf("cell %q was written with schema version %.20q, this program knows %q: use the matching release", s.cfg.Cell, found, schema)
	}
	for _, sc := range scripts {
		if err := sc.Load(ctx, s.rdb).Err(); err != nil {
			return fmt.Errorf("load script %s: %w", sc.name, unavailable(err))
		}
	}
	return nil
}

// Close ends what the store has running and closes its connections.
func (s *Store) Close() error {
	s.end()
	s.batch.barrier()
	s.routines.Wait()
	return s.rdb.Close()
}

// Ping checks that Redis answers. Its error is ErrUnavailable.
func (s *Store) Ping(ctx context.Context) error {
	if err := s.rdb.Ping(ctx).Err(); err != nil {
		return fmt.Errorf("ping: %w", unavailable(err))
	}
	return nil
}

// LeaseTime is how long a lease lives without being renewed.
func (s *Store) LeaseTime() time.Duration { return s.cfg.Lease }

// micros is the store's clock in whole microseconds.
func (s *Store) micros() int64 { return s.now().UnixMicro() }

// refusing are the beginnings of errors by which a Redis that runs says that it cannot serve now.
var refusing = []string{"LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "OOM", "MISCONF", "BUSY",
	"NOREPLICAS", "UNKILLABLE", "ERR max number of clients"}

// noSpace is in the refusals of a Redis that could not append for want of space.
const noSpace = "No space left on device"

// unavailable adds ErrUnavailable to an error of the connection, and to one by which Redis says that it cannot serve.
func unavailable(err error) error {
	if err == nil {
		return nil
	}
	var answer redis.Error
	if !errors.As(err, &answer) {
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	for _, r := range refusing {
		if redis.HasErrorPrefix(err, r) || strings.Contains(err.Error(), r+" ") {
			if strings.Contains(err.Error(), noSpace) {
				err = fmt.Errorf("%w: %w", ErrStorageFull, err)
			}
			return fmt.Errorf("%w: %w%s", ErrUnavailable, err, remedy(err))
		}
	}
	return err
}

// remedy is what operators can do about Redis's refusal to serve; empty: nothing is known.
func remedy(err error) string {
	switch text := err.Error(); {
	case strings.Contains(text, noSpace):
		return "; free space on the disk of Redis's data: the file system of EPHEMERAL_DATA_DIR, unless EPHEMERAL_REDIS_URL is set"
	case strings.Contains(text, "OOM "):
		return "; raise maxmemory of Redis"
	}
	return ""
}

// pipelined sends the commands that f queues in one round trip. A missing key is no error; any other of any command is.
func (s *Store) pipelined(ctx context.Context, f func(redis.Pipeliner)) error {
	cmds, err := s.rdb.Pipelined(ctx, func(p redis.Pipeliner) error {
		f(p)
		return nil
	})
	for _, c := range cmds {
		if e := c.Err(); e != nil && !missing(e) {
			return unavailable(e)
		}
	}
	if err != nil && !missing(err) {
		return unavailable(err)
	}
	return nil
}

// word returns n random bytes as lower-case hexadecimal digits.
func word(n int) string {
	b := make([]byte, n)
	rand.Read(b) // never fails: the program ends when the system has no randomness
	return fmt.Sprintf("%x", b)
}
