package run

import (
	"fmt"
	"slices"
	"strings"
)

// StateInfo says what a state means.
type StateInfo struct {
	State    State
	Terminal bool // final: nothing leaves it
	Meaning  string
}

// States lists every state of a run, in the order of its life.
var States = []StateInfo{
	{Queued, false, "admitted and paid for in advance; waiting for a node"},
	{Starting, false, "leased to a node; no machine is confirmed yet"},
	{Running, false, "a confirmed machine works on it"},
	{Succeeded, true, "the worker ended by itself; for a command: whatever its exit code"},
	{Failed, true, "it could not be carried out to its end; `error.code` says why"},
	{Cancelled, true, "ended by request"},
	{TimedOut, true, "`timeout_seconds` passed since the machine was confirmed"},
	{BudgetExhausted, true, "the hold could not pay for what came next"},
}

// Actor is who may take an edge.
type Actor string

// The actors.
const (
	ByClient   Actor = "client"    // the organisation, through a gateway
	ByAnyNode  Actor = "any node"  // a node, about a run that no node owns (any more)
	ByItsOwner Actor = "the owner" // the node that holds the run's lease, proved by its token
)

// Edge is one legal change of state. Whatever is not in Edges is refused, with a TransitionError or ErrLeaseLost.
type Edge struct {
	From State // "": there was no run before
	To   State
	By   Actor
	Call string // the method of Store, and with it the script, that takes the edge
	When string
}

// Edges are the legal changes of state. The scripts get this table, so that what it says is what Redis enforces.
var Edges = []Edge{
	{"", Queued, ByClient, "Admit", "the account can pay the hold and the queue has room"},
	{Queued, Starting, ByAnyNode, "Take", "it is the organisation's turn, and the run is its oldest that may start"},
	{Queued, Failed, ByAnyNode, "Take", "zero data retention: the request was in memory only and is gone (`content_lost`)"},
	{Queued, Cancelled, ByClient, "Cancel", ""},
	{Starting, Running, ByItsOwner, "Start", "the machine is confirmed"},
	{Starting, Queued, ByItsOwner, "Requeue", "it never started; costs nothing, keeps its place"},
	{Starting, Cancelled, ByItsOwner, "Requeue", "a cancellation was asked for meanwhile"},
	{Starting, Failed, ByItsOwner, "Settle", "no machine could be had or confirmed"},
	{Starting, Cancelled, ByItsOwner, "Settle", "a cancellation was asked for"},
	{Starting, BudgetExhausted, ByItsOwner, "Settle", "the first slice of compute cannot be paid"},
	{Starting, Queued, ByAnyNode, "Reap", "its node is gone; costs nothing, keeps its place"},
	{Starting, Cancelled, ByAnyNode, "Reap", "its node is gone, and a cancellation was asked for"},
	{Starting, Failed, ByAnyNode, "Reap", "its node is gone, for the fifth time or with the only copy of the request (`node_lost`); costs nothing"},
	{Running, Succeeded, ByItsOwner, "Settle", ""},
	{Running, Failed, ByItsOwner, "Settle", ""},
	{Running, Cancelled, ByItsOwner, "Settle", ""},
	{Running, TimedOut, ByItsOwner, "Settle", ""},
	{Running, BudgetExhausted, ByItsOwner, "Settle", ""},
	{Running, Failed, ByAnyNode, "Reap", "its node is gone (`node_lost`); charged what was captured"},
}

// Terminal tells whether the state is final.
func (s State) Terminal() bool {
	i := slices.IndexFunc(States, func(info StateInfo) bool { return info.State == s })
	return i >= 0 && States[i].Terminal
}

// TransitionError is a refused change of state; nothing was changed. errors.Is(err, ErrState) holds.
type TransitionError struct {
	Run      ID
	From, To State
}

func (e *TransitionError) Error() string {
	return fmt.Sprintf("run %s is %s and cannot become %s: %v", e.Run, e.From, e.To, ErrState)
}

// Unwrap returns ErrState.
func (e *TransitionError) Unwrap() error { return ErrState }

// moved is the error of a reply to a change of state.
func moved(r reply, id ID, to State, others ...string) error {
	if r.code() == "STATE" {
		return &TransitionError{Run: id, From: State(r.text(1)), To: to}
	}
	return refused(r, others...)
}

// stateTable is the tables above for the scripts: which states are terminal, and legal[from][to]. With them goes readshown, which
// reads what of a run's record is shown before the end.
func stateTable() string {
	var b strings.Builder
	b.WriteString("local terminal = {")
	for _, s := range States {
		if s.Terminal {
			fmt.Fprintf(&b, "%s = true, ", s.State)
		}
	}
	b.WriteString("}\nlocal legal = {")
	for _, s := range States {
		fmt.Fprintf(&b, "%s = {", s.State)
		for _, e := range Edges {
			if e.From == s.State {
				fmt.Fprintf(&b, "%s = true, ", e.To)
			}
		}
		b.WriteString("}, ")
	}
	b.WriteString("}\n")
	fmt.Fprintf(&b, "local function readshown(run) return redis.call('HMGET', run, '%s') end\n", strings.Join(shownFields[:], "', '"))
	return b.String()
}
