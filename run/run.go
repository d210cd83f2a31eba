// Package run says what a run is: its spec, states, events and money, and keeps it all in Redis, one Lua script per
// transition. It knows nothing of machines.
package run

import (
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"
)

// ID names a run: "run_" and 32 lower-case hexadecimal digits, a UUIDv7 (RFC 9562) without dashes, so that ids sort by
// the time they were made.
type ID string

// NewID returns a fresh run id. It fails only when the system's randomness cannot be read.
func NewID() (ID, error) {
	u, err := uuid.NewV7FromReader(rand.Reader)
	if err != nil {
		return "", fmt.Errorf("make run id: %w", err)
	}
	return ID("run_" + strings.ReplaceAll(u.String(), "-", "")), nil
}

// ParseID checks that s has the form of a run id. It returns ErrNotFound otherwise, since no run can have such an id.
func ParseID(s string) (ID, error) {
	if !validID(s) {
		return "", fmt.Errorf("run id %.64q: %w", s, ErrNotFound)
	}
	return ID(s), nil
}

// Micros is an amount of money in micro-dollars: 1,000,000 are one US dollar. Money is never a float.
type Micros int64

// String writes the amount as dollars with up to six decimals and at least two, e.g. "$0.04" or "$0.00353".
func (m Micros) String() string {
	sign, v := "", int64(m)
	if v < 0 {
		sign, v = "-", -v
	}
	frac := fmt.Sprintf("%06d", v%1_000_000)
	for len(frac) > 2 && frac[len(frac)-1] == '0' {
		frac = frac[:len(frac)-1]
	}
	return fmt.Sprintf("%s$%d.%s", sign, v/1_000_000, frac)
}

// State is where a run stands in its life. A terminal state is final.
type State string

// The states of a run.
const (
	Queued          State = "queued"           // admitted and paid for in advance, waiting for a node
	Starting        State = "starting"         // taken by a node, machine not yet confirmed
	Running         State = "running"          // a machine works on it
	Succeeded       State = "succeeded"        // the worker ended by itself; for a command: whatever its exit code
	Failed          State = "failed"           // see Error.Code
	Cancelled       State = "cancelled"        // ended by request
	TimedOut        State = "timed_out"        // timeout_seconds passed
	BudgetExhausted State = "budget_exhausted" // the hold could not pay for what came next
)

// Spec is what a client asks for, as accepted: defaults filled in.
type Spec struct {
	Prompt            string            `json:"prompt,omitempty"`
	Command           string            `json:"command,omitempty"`
	Model             string            `json:"model,omitempty"` // "provider/model"; empty for a command
	Image             string            `json:"image,omitempty"` // what its machine boots from; empty: DefaultImage
	Web               bool              `json:"web"`
	Shell             bool              `json:"shell"`
	Files             []File            `json:"files,omitempty"`
	Connections       []string          `json:"connections,omitempty"`
	ExposeBroker      bool              `json:"expose_broker,omitempty"` // programs of the machine reach the broker too
	TimeoutSeconds    int               `json:"timeout_seconds"`         // counted from microvm.ready; time in the queue does not count
	MaxCostMicros     Micros            `json:"max_cost_micros"`         // the hard cap; reserved in full at admission
	ZeroDataRetention bool              `json:"zero_data_retention"`
	RetentionSeconds  int               `json:"retention_seconds,omitempty"` // content is erased so long after the end; 0: no sooner than the rest
	Metadata          map[string]string `json:"metadata,omitempty"`
	Traceparent       string            `json:"traceparent,omitempty"` // span that the run's belong under (W3C Trace Context); empty: no trace was on
}

// DefaultImage is the image of a run that names none.
const DefaultImage = "base"

// ImageName is the name of the image that the run's machine boots from.
func (sp Spec) ImageName() string {
	if sp.Image == "" {
		return DefaultImage
	}
	return sp.Image
}

// File is one file that the run finds in its working directory. What is in it comes with the request or was uploaded before.
type File struct {
	Path     string `json:"path"`               // relative, no "..", slashes
	Content  string `json:"content,omitempty"`  // text, or base64 (RFC 4648) when Encoding says so
	Encoding string `json:"encoding,omitempty"` // "" (UTF-8 text) or "base64"
	Mode     string `json:"mode,omitempty"`     // permission bits, octal, e.g. "0755"; empty: "0644"

	Upload UploadID `json:"upload,omitempty"` // what was uploaded; empty: the content is here
}

// Run is the record of one run. Fields that carry content are empty under zero data retention.
type Run struct {
	ID        ID         `json:"id"`
	Org       string     `json:"org"`
	State     State      `json:"state"`
	QueuedAt  time.Time  `json:"queued_at"`
	StartedAt *time.Time `json:"started_at,omitempty"` // microvm.ready
	EndedAt   *time.Time `json:"ended_at,omitempty"`
	Queue     *Place     `json:"queue,omitempty"` // while it waits
	Request   *Spec      `json:"request,omitempty"`
	Node      string     `json:"node,omitempty"`
	Machine   string     `json:"machine,omitempty"`
	Image     string     `json:"image,omitempty"`
	Isolation string     `json:"isolation,omitempty"` // "kvm" or "emulated"; emulated is no security boundary
	Money     Money      `json:"money"`
	Usage     Usage      `json:"usage"`
	Stages    []Stage    `json:"stages,omitempty"` // in order; their sum is the run's wall time
	Egress    Egress     `json:"egress"`

	EgressAttempts *EgressAttempts `json:"egress_attempts,omitempty"` // nil: none

	Result *Result `json:"result,omitempty"`
	Files  *Files  `json:"files,omitempty"` // what the run left in out/; nil: nothing
	Error  *Error  `json:"error,omitempty"`

	ContentUntil *time.Time `json:"content_until,omitempty"` // when the content is erased, where that is sooner than the record
	Erased       bool       `json:"erased,omitempty"`        // the content was erased
}

// Money is what a run reserved and what became of it: Charged = Model + Web + Compute, and once the run is settled
// Charged + Released = Reserved.
type Money struct {
	Reserved Micros `json:"reserved_micros"`
	Charged  Micros `json:"charged_micros"`
	Released Micros `json:"released_micros"`
	Model    Micros `json:"model_micros"`
	Web      Micros `json:"web_micros"`
	Compute  Micros `json:"compute_micros"`
}

// Usage counts what the run did.
type Usage struct {
	ModelCalls    int64 `json:"model_calls"`
	InputTokens   int64 `json:"input_tokens"`
	OutputTokens  int64 `json:"output_tokens"`
	TotalTokens   int64 `json:"total_tokens"`
	ShellCommands int64 `json:"shell_commands"`
}

// Stage is one named part of a run's wall time.
type Stage struct {
	Name string  `json:"name"` // queue, claim, resume, prepare, files, worker, destroy, settle
	Ms   float64 `json:"ms"`
}

// Egress counts what the machine tried to send to the network. All of it was dropped.
type Egress struct {
	DroppedPackets int64 `json:"dropped_packets"`
	DroppedBytes   int64 `json:"dropped_bytes"`
}

// EgressAttempt is whom the machine tried to reach, as its packets said.
type EgressAttempt struct {
	Protocol string `json:"protocol"`          // tcp, udp, icmp, icmpv6, igmp, arp, ip-<number> or ethernet-<type>
	Address  string `json:"address,omitempty"` // of the destination, where the protocol has one
	Port     int    `json:"port,omitempty"`
	Name     string `json:"name,omitempty"` // that a name server was asked for
	Packets  int    `json:"packets"`
}

// EgressAttempts are the first attempts of a machine, the most frequent first; at most 32. They are content.
type EgressAttempts struct {
	List []EgressAttempt `json:"list"`
	More bool            `json:"more,omitempty"` // there were others than these
}

// Result is what the run left. Output is the worker's final answer; ExitCode, Stdout and Stderr belong to a command.
type Result struct {
	Output   string  `json:"output,omitempty"`
	ExitCode *int    `json:"exit_code,omitempty"`
	Stdout   *Stream `json:"stdout,omitempty"`
	Stderr   *Stream `json:"stderr,omitempty"`
}

// Stream is the output of a command, byte for byte.
type Stream struct {
	Content   string `json:"content"`            // text, or base64 when Encoding says so
	Encoding  string `json:"encoding,omitempty"` // "" (UTF-8 text) or "base64"
	Bytes     int64  `json:"bytes"`              // how many the command wrote
	Truncated bool   `json:"truncated"`          // Content holds fewer than Bytes
}

// Error is why a run failed: a stable code and a sentence for people.
type Error struct {
	Code   string `json:"code"` // e.g. node_lost, machine_lost, model_error, prepare_failed
	Detail string `json:"detail"`
}

// What a store refuses, for callers to decide on with errors.Is.
var (
	// ErrNotFound: no such run, organisation or key, or it belongs to another organisation.
	ErrNotFound = errors.New("not found")
	// ErrUnauthenticated: the API key is unknown, revoked or expired.
	ErrUnauthenticated = errors.New("unauthenticated")
	// ErrIdempotencyConflict: the idempotency key was used with another request body.
	ErrIdempotencyConflict = errors.New("idempotency key reused with another request")
	// ErrInsufficientFunds: the account's available balance cannot pay the hold.
	ErrInsufficientFunds = errors.New("insufficient funds")
	// ErrBudget: the hold cannot pay the worst case of the next call.
	ErrBudget = errors.New("budget exhausted")
	// ErrQueueFull: the organisation, or its API key, has as many runs waiting as it may.
	ErrQueueFull = errors.New("queue full")
	// ErrImage: the organisation may not use the image.
	ErrImage = errors.New("image not allowed")
	// ErrUploadsFull: the organisation has as many uploads, or bytes of them, as it may.
	ErrUploadsFull = errors.New("too many uploads")
	// ErrUpload: an upload is not in the store any more, or what is there is not what was uploaded.
	ErrUpload = errors.New("upload is gone or damaged")
	// ErrRateLimited: the API key is used more often than it may.
	ErrRateLimited = errors.New("rate limited")
	// ErrExists: an organisation with that id exists and is another one.
	ErrExists = errors.New("exists already")
	// ErrChanged: what was to be replaced has changed since it was read; read it again.
	ErrChanged = errors.New("changed since it was read")
	// ErrRange: an amount or a size is outside what is allowed.
	ErrRange = errors.New("out of range")
	// ErrLeaseLost: the run is not, or no longer, leased to the caller; it must stop and destroy the machine.
	ErrLeaseLost = errors.New("lease lost")
	// ErrState: the run's state does not allow the transition.
	ErrState = errors.New("transition not allowed in this state")
	// ErrUnavailable: Redis did not answer; nothing may be assumed about the effect, every call may be repeated.
	ErrUnavailable = errors.New("store unavailable")
	// ErrStorageFull: the disk of Redis's data is full; comes with ErrUnavailable.
	ErrStorageFull = errors.New("no room on the disk of the store")
)
