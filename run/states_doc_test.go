package run

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

// runsPage is what docs/runs.md must say.
func runsPage() string {
	var b strings.Builder
	b.WriteString(`# Runs

This page is made from the code: the tables of states and edges are the ones that the Redis scripts are given.

A run is one request's life. Every change of its state is one script in Redis that compares the state and the lease before it
changes them and appends the event in the same step, so no two writers can both win, and a repeated call changes nothing.

## States

| state | final | meaning |
|---|---|---|
`)
	for _, s := range States {
		final := ""
		if s.Terminal {
			final = "yes"
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", s.State, final, s.Meaning)
	}
	b.WriteString(`
## Changes of state

Whatever is not in this table is refused and changes nothing: a wrong state with "transition not allowed in this state", a
lease that is over with "lease lost". A terminal state is never left. The owner is the node that holds the lease.

| from | to | by | call | when |
|---|---|---|---|---|
`)
	for _, e := range Edges {
		from := "(none)"
		if e.From != "" {
			from = "`" + string(e.From) + "`"
		}
		fmt.Fprintf(&b, "| %s | `%s` | %s | `%s` | %s |\n", from, e.To, e.By, e.Call, e.When)
	}
	fmt.Fprintf(&b, `
Who asks to cancel a run that a node holds does not end it: the node is told, and its next write of the state decides. Cancel and
completion race in one script; whichever comes first is what happened.

## Leases

A node owns a run by a lease, %s by default (`+"`EPHEMERAL_LEASE`"+`), which it renews. The lease has a token that grows with every take:
what a node writes with an older token is refused, also when the node was stopped for a while and knows nothing of it. Any node
reaps the leases of nodes that are gone. A run that had not started goes back to its place in the queue and costs nothing; after
%d lost nodes it ends as `+"`failed`"+`. A run whose machine failed before it started goes back as well, for another machine, and ends as
`+"`failed` (`machine_lost`, `prepare_failed`, `agent_lost`)"+` when that happens the third time it is taken. A run that the
store left without an answer before it started goes back, however often. A run that had started is never executed again.

The clocks of a cell's hosts must agree to within a fraction of a lease. The clock of Redis is not used.

## The queue

Nodes take runs from the organisations in turn: the one that was served longest ago first, the oldest run first inside one. Limits:

| limit | of an organisation | of an API key | effect |
|---|---|---|---|
| runs at once | `+"`ephemeral orgs limit --concurrency`"+`; else `+"`EPHEMERAL_ORG_CONCURRENCY`"+` | `+"`ephemeral orgs limit --key --concurrency`"+`; else none | further runs wait; those of other keys pass them |
| runs waiting | `+"`ephemeral orgs limit --queue`"+`; else `+"`EPHEMERAL_QUEUE_LIMIT`"+` | `+"`ephemeral orgs limit --key --queue`"+`; else none | further requests are refused and leave nothing |

A limit that is lowered holds for runs admitted from then on; runs that are waiting already keep their places.

## Events

| type | appended by |
|---|---|
`, defaultLease, maxLost)
	for _, e := range eventPage {
		fmt.Fprintf(&b, "| `%s` | %s |\n", e.t, e.by)
	}
	b.WriteString(`
` + "`seq`" + ` counts from 1 without gaps; ` + "`at_ms`" + ` is milliseconds since the run was queued and never goes back. ` + "`worker.destroyed`" + ` is the last
event of every run.
`)
	return b.String()
}

var eventPage = []struct {
	t  EventType
	by string
}{
	{EventQueued, "admission"},
	{EventMicroVMReady, "the start"},
	{EventWorkerStarted, "the node"},
	{EventModel, "the broker, for each model call"},
	{EventShell, "the node, for each command"},
	{EventWeb, "the broker, for each web request"},
	{EventConnection, "the broker, for each request to a connection"},
	{EventBudgetWarning, "the capture that makes the charges 90 percent of the hold, once; see [money](money.md)"},
	{EventFiles, "the node, where the run left something in `out/`; see [files](files.md)"},
	{EventMicroVMDestroyed, "the node"},
	{"succeeded, failed, cancelled, timed_out, budget_exhausted", "whatever ended the run, with the state of that name"},
	{EventWorkerDestroyed, "the settlement, with the money"},
}

// TestRunsPage keeps the page equal to the code. With EPHEMERAL_UPDATE_DOCS=1 it writes the page.
func TestRunsPage(t *testing.T) {
	const path = "../docs/runs.md"
	want := runsPage()
	if os.Getenv("EPHEMERAL_UPDATE_DOCS") == "1" {
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != want {
		t.Errorf("%s does not say what the code says: run EPHEMERAL_UPDATE_DOCS=1 go test ./run -run RunsPage", path)
	}
}
