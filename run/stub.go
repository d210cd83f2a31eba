package run

import (
	"context"
	"time"
)

// Org is an organisation.
type Org struct {
	ID          string    `json:"id"`
	Name        string    `json:"name"`
	Concurrency int       `json:"concurrency"` // runs at once; 0: the default
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

// Key is an API key. Its secret is shown once, when it is made; the store keeps the SHA-256.
type Key struct {
	ID        string    `json:"id"`
	Org       string    `json:"org"`
	Name      string    `json:"name"`
	Role      Role      `json:"role"`
	CreatedAt time.Time `json:"created_at"`
	RevokedAt time.Time `json:"revoked_at,omitzero"`
}

// Role is what a key may do.
type Role string

// The roles.
const (
	Member Role = "member" // runs and the account of its own organisation
	Admin  Role = "admin"  // organisations, keys, credits, pools; belongs to no organisation
)

// Page asks for a part of a list, newest first.
type Page struct {
	Cursor string // from the page before; empty: the first
	Limit  int    // 1..100; 0: 20
	State  State  // empty: all
}

// AuditReport is what Audit found. Err names the first difference.
type AuditReport struct {
	Orgs, Runs, OpenHolds                         int
	Deposits, Balance, Held, Charged, OpenHoldSum Micros
	Accounts                                      []Account
	Differences                                   []string // empty: conservation holds
}

// Open connects to Redis and loads the scripts. The store is ready when it returns.
func Open(ctx context.Context, cfg Config) (*Store, error) { panic("not built") }

func (s *Store) Close() error { panic("not built") }

func (s *Store) Ping(ctx context.Context) error { panic("not built") }

// o.ID empty: made
func (s *Store) CreateOrg(ctx context.Context, o Org) (Org, error) { panic("not built") }

// ErrNotFound
func (s *Store) Org(ctx context.Context, id string) (Org, error) { panic("not built") }

func (s *Store) Orgs(ctx context.Context) ([]Org, error) { panic("not built") }

// idempotent by ref
func (s *Store) Credit(ctx context.Context, org string, amount Micros, ref string) (Account, error) {
	panic("not built")
}

func (s *Store) Account(ctx context.Context, org string) (Account, error) { panic("not built") }

// the secret: eph_...
func (s *Store) CreateKey(ctx context.Context, org, name string, role Role) (Key, string, error) {
	panic("not built")
}

func (s *Store) RevokeKey(ctx context.Context, id string) error { panic("not built") }

func (s *Store) Keys(ctx context.Context, org string) ([]Key, error) { panic("not built") }

// ErrUnauthenticated
func (s *Store) Authenticate(ctx context.Context, secret string) (Key, error) { panic("not built") }

// ErrIdempotencyConflict, ErrInsufficientFunds, ErrBudget, ErrQueueFull
func (s *Store) Admit(ctx context.Context, a Admission) (r Run, replayed bool, err error) {
	panic("not built")
}

// ErrNotFound also for another org; org "" is any (host side only)
func (s *Store) Get(ctx context.Context, org string, id ID) (Run, error) { panic("not built") }

func (s *Store) List(ctx context.Context, org string, p Page) (runs []Run, next string, err error) {
	panic("not built")
}

// stored events with Seq > after
func (s *Store) Events(ctx context.Context, org string, id ID, after int64) ([]Event, error) {
	panic("not built")
}

// queued: terminal at once; else a request to the node
func (s *Store) Cancel(ctx context.Context, org string, id ID) (Run, error) { panic("not built") }

// erases content; ErrState before the end
func (s *Store) Delete(ctx context.Context, org string, id ID) error { panic("not built") }

// Subscribe returns every event of every run of the cell as it happens, whole, also under zero data retention.
// One per gateway. The channel closes when ctx ends; gap reports that events may have been missed and readers must
// re-read with Events.
func (s *Store) Subscribe(ctx context.Context) (events <-chan Event, gap <-chan struct{}, err error) {
	panic("not built")
}

// blocks until there is work for this node or ctx ends
func (s *Store) Take(ctx context.Context, node string) (*Lease, error) { panic("not built") }

// ErrLeaseLost
func (s *Store) Renew(ctx context.Context, l *Lease) (cancelled bool, err error) { panic("not built") }

// ids of runs asked to cancel, as it happens; Renew tells too
func (s *Store) Cancels(ctx context.Context) (<-chan ID, error) { panic("not built") }

// starting -> running, event microvm.ready
func (s *Store) Start(ctx context.Context, l *Lease, st Start) error { panic("not built") }

func (s *Store) Append(ctx context.Context, l *Lease, events ...NewEvent) error { panic("not built") }

// ErrBudget
func (s *Store) Authorize(ctx context.Context, l *Lease, c Call) (granted Micros, err error) {
	panic("not built")
}

// never above what was granted
func (s *Store) Capture(ctx context.Context, l *Lease, callID string, amount Micros) error {
	panic("not built")
}

func (s *Store) Void(ctx context.Context, l *Lease, callID string) error { panic("not built") }

// events <state> and worker.destroyed; repeated: the settled run
func (s *Store) Settle(ctx context.Context, l *Lease, o Outcome) (Run, error) { panic("not built") }

// only from starting
func (s *Store) Requeue(ctx context.Context, l *Lease) error { panic("not built") }

// expired leases; with deadNode also all of that node's, expired or not
func (s *Store) Reap(ctx context.Context, deadNode string) (requeued, lost int, err error) {
	panic("not built")
}

func (s *Store) Audit(ctx context.Context) (AuditReport, error) { panic("not built") }
