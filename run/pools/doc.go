// Package pools is what operators and nodes tell each other about pools of machines, kept in the cell's Redis: operators
// say what they want of a pool, nodes say what theirs look like, why, and when runs came and went. It decides nothing.
package pools

import (
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"
	"time"
)

// ErrInvalid: a policy that no pool can have.
var ErrInvalid = errors.New("invalid policy")

// Limits of what is stored.
const (
	maxMachines   = 100_000
	maxNodes      = 1000 // drained ones of a policy
	maxDecisions  = 32
	reportLife    = 15 * time.Second
	ReportEvery   = 5 * time.Second // at least so often a node reports, changed or not
	reportedKept  = 24 * time.Hour  // a pool that no node has is forgotten after this time
	historyKept   = 7 * 24 * time.Hour
	historyChunks = 4000 // entries of the history of a pool
	maxChunk      = 100  // uses in an entry
)

var namePattern = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{0,62}$`)

// ValidName tells whether a pool, or a node, may have that name.
func ValidName(name string) bool { return namePattern.MatchString(name) }

// Policy is what an operator wants of a pool on every node that has it. What is nil stays as the node is configured.
type Policy struct {
	MinReady          *int     `json:"min_ready,omitempty"`
	MaxReady          *int     `json:"max_ready,omitempty"`
	MaxMachines       *int     `json:"max_machines,omitempty"`
	RefillConcurrency *int     `json:"refill_concurrency,omitempty"`
	MaxAgeSeconds     *float64 `json:"max_age_seconds,omitempty"`  // 0: for ever
	TargetMissRate    *float64 `json:"target_miss_rate,omitempty"` // 0: the pool does not scale itself
	// Drained: no machine is kept ready and no run is taken; machines in use go on.
	Drained bool `json:"drained,omitempty"`
	// DrainedNodes are drained, whatever Drained says of all.
	DrainedNodes []string `json:"drained_nodes,omitempty"`
}

// Problem is one member of a policy that is wrong.
type Problem struct{ Member, Detail string }

// Problems lists what is wrong with a policy by itself. Whether a node can follow it depends on the node too: see
// Report.Error.
func (p Policy) Problems() []Problem {
	var all []Problem
	check := func(ok bool, member, format string, args ...any) {
		if !ok {
			all = append(all, Problem{member, fmt.Sprintf(format, args...)})
		}
	}
	number := func(n *int, member string, least int) {
		check(n == nil || *n >= least && *n <= maxMachines, member, "must be %d to %d", least, maxMachines)
	}
	number(p.MinReady, "min_ready", 0)
	number(p.MaxReady, "max_ready", 0)
	number(p.MaxMachines, "max_machines", 1)
	number(p.RefillConcurrency, "refill_concurrency", 1)
	if age := p.MaxAgeSeconds; age != nil {
		check(*age >= 0 && *age <= (365*24*time.Hour).Seconds(), "max_age_seconds", "must be 0 (for ever) to a year")
	}
	if rate := p.TargetMissRate; rate != nil {
		check(*rate == 0 || *rate >= 1e-6 && *rate < 1 && !math.IsNaN(*rate), "target_miss_rate", "must be 0 (off) or 0.000001 to below 1")
	}
	if p.MinReady != nil && p.MaxReady != nil {
		check(*p.MaxReady >= *p.MinReady, "max_ready", "must not be below min_ready")
	}
	if p.MinReady != nil && p.MaxMachines != nil {
		check(*p.MaxMachines >= *p.MinReady, "max_machines", "must not be below min_ready")
	}
	check(len(p.DrainedNodes) <= maxNodes, "drained_nodes", "must be at most %d", maxNodes)
	for _, n := range p.DrainedNodes {
		check(ValidName(n), "drained_nodes", "%.64q is no node's name", n)
	}
	return all
}

// Drains tells whether the policy drains the pool on a node.
func (p Policy) Drains(node string) bool { return p.Drained || slices.Contains(p.DrainedNodes, node) }

// Desired is a policy as it was set.
type Desired struct {
	Policy
	Revision int64     `json:"revision"` // 0: none was set; each change counts one up
	SetAt    time.Time `json:"set_at,omitzero"`
}

// Settings are a pool's settings in force on a node.
type Settings struct {
	MinReady          int     `json:"min_ready"`
	MaxReady          int     `json:"max_ready"`
	MaxMachines       int     `json:"max_machines"`
	RefillConcurrency int     `json:"refill_concurrency"`
	MaxAgeSeconds     float64 `json:"max_age_seconds"`
	TargetMissRate    float64 `json:"target_miss_rate"`
}

// Report is what a pool looks like on one node.
type Report struct {
	Pool      string    `json:"pool"`
	Node      string    `json:"node"`
	At        time.Time `json:"at"`
	Image     string    `json:"image"` // digest
	VCPUs     int       `json:"vcpus"`
	MemoryMiB int       `json:"memory_mib"`
	Rest      string    `json:"rest"`            // paused or running
	State     string    `json:"state"`           // filling, serving, draining, drained, failing
	Revision  int64     `json:"revision"`        // of the policy in force; 0: the node's own configuration
	Error     string    `json:"error,omitempty"` // why a newer policy is not in force
	Settings  Settings  `json:"settings"`

	Ready      int    `json:"ready"`
	Leased     int    `json:"leased"`
	Refilling  int    `json:"refilling"`
	Destroying int    `json:"destroying"`
	Waiting    int    `json:"waiting"` // claims without a machine
	Target     int    `json:"target"`
	Reason     string `json:"reason"` // of the target

	Circuit       string     `json:"circuit"` // closed, open, half-open
	CircuitReason string     `json:"circuit_reason,omitempty"`
	RetryAt       *time.Time `json:"retry_at,omitempty"`  // when the next machine may be made
	Admission     string     `json:"admission,omitempty"` // why the last make was put off

	OldestReadySeconds float64 `json:"oldest_ready_seconds"`
	LongestWaitSeconds float64 `json:"longest_wait_seconds"`
	Claims             int64   `json:"claims_total"`
	Misses             int64   `json:"misses_total"` // claims that waited
	WaitSeconds        float64 `json:"wait_seconds_total"`
	Made               int64   `json:"made_total"`
	MakeFailures       int64   `json:"make_failures_total"`

	ClaimLatency   *Latency `json:"claim_latency,omitempty"`   // of the last claims; nil: there were none
	RestoreLatency *Latency `json:"restore_latency,omitempty"` // of the last machines made: restored, tried and put to rest

	History   *History   `json:"history,omitempty"` // nil: nobody has looked yet
	Decisions []Decision `json:"decisions"`         // the last ones, oldest first
}

// Latency is how long the last Count of something took, in seconds, by nearest rank.
type Latency struct {
	Count int     `json:"count"`
	P50   float64 `json:"p50_seconds"`
	P95   float64 `json:"p95_seconds"`
	P99   float64 `json:"p99_seconds"`
	Max   float64 `json:"max_seconds"`
}

// Decision is a change that a pool made by itself or was told to make.
type Decision struct {
	At     time.Time `json:"at"`
	What   string    `json:"what"`
	Reason string    `json:"reason"`
}

// Pool is one pool over all nodes that have it.
type Pool struct {
	Name   string   `json:"name"`
	Policy Desired  `json:"policy"`
	Nodes  []Report `json:"nodes"` // that have reported lately, by name

	Ready     int `json:"ready"`
	Leased    int `json:"leased"`
	Refilling int `json:"refilling"`
	Waiting   int `json:"waiting"`
	Target    int `json:"target"`
}

// total sums the nodes up.
func (p *Pool) total() {
	for _, n := range p.Nodes {
		p.Ready += n.Ready
		p.Leased += n.Leased
		p.Refilling += n.Refilling
		p.Waiting += n.Waiting
		p.Target += n.Target
	}
}

// Use is one use of a machine: when the run was queued, and how long it had its machine.
type Use struct {
	Queued  time.Time
	Service time.Duration
}
