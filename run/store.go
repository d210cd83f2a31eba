package run

import (
	"context"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// Config is how a process reaches its cell's Redis.
type Config struct {
	RedisURL  string        `env:"EPHEMERAL_REDIS_URL" help:"Redis to use: redis://, rediss:// or unix:// (empty: serve starts a private redis-server)"`
	Replicas  int           `env:"EPHEMERAL_REDIS_WAIT" envDefault:"0" help:"replicas of Redis that must have a change of state or money before it is acknowledged (0: none; such changes can be lost in a fail-over)"`
	Cell      string        `env:"EPHEMERAL_CELL" envDefault:"c0" help:"name of the cell; hash tag of every key"`
	Lease     time.Duration `env:"EPHEMERAL_LEASE" envDefault:"10s" help:"how long a node owns a run without renewing"`
	Retention time.Duration `env:"EPHEMERAL_RETENTION" envDefault:"720h" help:"how long records of ended runs are kept"`

	Concurrency int `env:"EPHEMERAL_ORG_CONCURRENCY" envDefault:"20" help:"runs at once of an organisation that has no limit of its own"`
	QueueLimit  int `env:"EPHEMERAL_QUEUE_LIMIT" envDefault:"10000" help:"runs that an organisation may have waiting"`
}

// Store keeps runs, accounts and keys in one Redis. It is safe for concurrent use.
type Store struct {
	rdb  redis.UniversalClient
	cfg  Config
	keys keys
	now  func() time.Time

	life     context.Context // ends with Close
	end      context.CancelFunc
	routines sync.WaitGroup
	waker    waker
	batch    batcher

	unanswered unanswered
	onEnded    func(Run, []Event) // see WithEnded
	room       func() error       // see WithRoom
}

// Admission is one accepted request on its way into the queue.
type Admission struct {
	ID             ID // of the run that is made; empty: a fresh one
	Org            string
	Key            string // id of the API key, whose limits hold
	Spec           Spec
	Encoded        string // Spec as JSON, where the caller has it; empty: it is encoded
	IdempotencyKey string // empty: every call is a run
	Fingerprint    string // of the canonical request body; compared when IdempotencyKey is set
	FirstSlice     Micros // what the first compute slice costs; MaxCostMicros below it is ErrBudget
	UploadBytes    int64  // how many bytes the uploads among its files may have together
}

// Lease is a node's right to write to one run until it expires. Token fences: a later lease of the same run has a
// greater one, and calls with an older one fail with ErrLeaseLost.
type Lease struct {
	Run      ID
	Org      string
	Node     string
	Token    int64
	QueuedAt time.Time
	Reserved Micros
	Spec     Spec
}

// Kind says which part of the money a call belongs to.
type Kind string

// The kinds of paid calls.
const (
	KindModel   Kind = "model"
	KindWeb     Kind = "web"
	KindCompute Kind = "compute"
)

// Call is one paid call to authorise: the store grants as much as the hold has free, at most Max and, where Min allows
// it, with Leave left over; it refuses with ErrBudget when the hold has less free than Min. ID makes repetition harmless.
type Call struct {
	ID       string
	Kind     Kind
	Min, Max Micros
	Leave    Micros
}

// Start is what a node knows once the machine is confirmed.
type Start struct {
	At        time.Time
	Machine   string
	Image     string
	Isolation string
}

// Outcome is how a run ended.
type Outcome struct {
	At       time.Time // when the terminal state was reached; worker.destroyed follows at the time of settlement
	State    State
	Usage    Usage
	Stages   []Stage // without the last, "settle", which the store adds so that the sum is the wall time
	Egress   Egress
	Attempts *EgressAttempts
	Result   *Result
	Files    *Files
	Error    *Error
}

// NewEvent is an event to append. Content marks data that zero data retention must not store: such an event reaches
// live subscribers whole and is stored with Redacted instead.
type NewEvent struct {
	Type     EventType
	At       time.Time
	Data     any
	Redacted any // what to store under zero data retention; nil stores Data
}
