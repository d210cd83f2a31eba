package e2e

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/run"
)

// example is the request of one of the documented examples.
func example(t *testing.T, name string) client.Request {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("../../docs/examples", name, "request.json"))
	if err != nil {
		t.Fatal(err)
	}
	var r client.Request
	if err := json.Unmarshal(b, &r); err != nil {
		t.Fatal(err)
	}
	return r
}

// shape is the order of a run's events.
func shape(events []run.Event) string {
	var types []string
	for _, e := range events {
		types = append(types, string(e.Type))
	}
	return strings.Join(types, " ")
}

// TestExampleCSVAnalysis: the file of the request is read, a script is written and run, and the answer has its numbers.
func TestExampleCSVAnalysis(t *testing.T) {
	t.Parallel()
	n := shared.tenant(t, 1_000_000)
	r := n.finish(t, example(t, "csv-analysis"))
	if r.State != run.Succeeded || r.Result == nil {
		t.Fatalf("ended %s, error %+v, result %+v", r.State, r.Error, r.Result)
	}
	want := strings.Join([]string{
		"- Orders: 10", "- Best region: north 533.20", "- Lines that could not be read: 1007", "",
		"out/summary.csv:", "", "region,revenue", "north,533.20", "south,426.90", "east,216.00", "west,99.50", "Zürich,39.80",
	}, "\n")
	if r.Result.Output != want {
		t.Errorf("the answer is\n%s\nwant\n%s", r.Result.Output, want)
	}
	checkRecord(t, r)
	checkMoney(t, r, 40_000)
	if r.Usage.ModelCalls != 3 || r.Usage.TotalTokens != 6577 || r.Usage.ShellCommands != 2 || r.Money.Model != 353 {
		t.Errorf("usage %+v, money %+v, want 3 model calls, 6577 tokens, 2 commands, 353 for models", r.Usage, r.Money)
	}
	// Events of commands and of model calls come by different ways, so neighbours may change places.
	got := shape(n.events(t, r.ID))
	order := regexp.MustCompile(`^queued microvm\.ready worker\.started model( shell| model){4} files microvm\.destroyed succeeded worker\.destroyed$`)
	if !order.MatchString(got) || strings.Count(got, " model") != 3 {
		t.Errorf("events are %s", got)
	}
}

// TestExampleBudget: a run whose money ends says what it had done until then, and never costs more than it may.
func TestExampleBudget(t *testing.T) {
	t.Parallel()
	n := shared.tenant(t, 1_000_000)
	r := n.finish(t, example(t, "budget"))
	if r.State != run.BudgetExhausted || r.Result == nil || r.Error == nil || r.Error.Code != "budget_exhausted" {
		t.Fatalf("ended %s, error %+v, result %+v", r.State, r.Error, r.Result)
	}
	for _, want := range []string{
		`^The work ended without a final answer: `,
		`(?m)^The last words of the model:\n(I count the sums|Those are in two ways|Still two)`,
		`(?m)^Tool calls made: [0-9]+\n- \$ python3 -c .*: exit code 0`,
	} {
		if !regexp.MustCompile(want).MatchString(r.Result.Output) {
			t.Errorf("the answer lacks %s:\n%s", want, r.Result.Output)
		}
	}
	checkRecord(t, r)
	checkMoney(t, r, 5_000)
	// How many calls fit depends on the compute that the host takes; the 25th, which has the answer, never does.
	if r.Money.Model == 0 || r.Usage.ModelCalls < 1 || r.Usage.ModelCalls > 24 {
		t.Errorf("usage %+v, money %+v", r.Usage, r.Money)
	}
	want := regexp.MustCompile(`^queued microvm\.ready worker\.started( model)( model| shell)* microvm\.destroyed budget_exhausted worker\.destroyed$`)
	if got := shape(n.events(t, r.ID)); !want.MatchString(strings.ReplaceAll(got, " budget.warning", "")) {
		t.Errorf("events are %s", got)
	}
}

// TestFinalAnswerWhenComputeEnds: a run whose money ends while a command runs says what it had done.
func TestFinalAnswerWhenComputeEnds(t *testing.T) {
	t.Parallel()
	n := shared.tenant(t, 1_000_000)
	r := n.finish(t, client.Request{Prompt: "Wait.", Model: "replay/wait", MaxCostMicros: 2_000})
	if r.State != run.BudgetExhausted || r.Result == nil || !strings.Contains(r.Result.Output, "\nTool calls made: 1\n- $ sleep 600: exit code 137 (killed)") {
		t.Fatalf("ended %s, error %+v, result %+v", r.State, r.Error, r.Result)
	}
	checkRecord(t, r)
	checkMoney(t, r, 2_000)
}

// TestFinalAnswerWhenTimeEnds: a run that does not come to its end in time says what it had done.
func TestFinalAnswerWhenTimeEnds(t *testing.T) {
	t.Parallel()
	n := shared.tenant(t, 1_000_000)
	r := n.finish(t, client.Request{Prompt: "Wait.", Model: "replay/wait", TimeoutSeconds: 6})
	if r.State != run.TimedOut || r.Result == nil || r.Error == nil || r.Error.Code != "timed_out" {
		t.Fatalf("ended %s, error %+v, result %+v", r.State, r.Error, r.Result)
	}
	if want := "I had waited with exit code 137."; r.Result.Output != want {
		t.Errorf("the answer is %q, want %q", r.Result.Output, want)
	}
	checkRecord(t, r)
	checkMoney(t, r, r.Money.Reserved)
}
