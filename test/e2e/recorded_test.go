package e2e

import (
	"encoding/json"
	"math"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/run"
)

// recorded is the recorded request.
func recorded(t *testing.T) client.Request {
	t.Helper()
	b, err := os.ReadFile("../../docs/examples/sandbox-proof/request.json")
	if err != nil {
		t.Fatal(err)
	}
	var r client.Request
	if err := json.Unmarshal(b, &r); err != nil {
		t.Fatal(err)
	}
	return r
}

func TestRecordedRun(t *testing.T) {
	t.Parallel()
	n := shared.tenant(t, 1_000_000)
	r := n.finish(t, recorded(t))
	if r.State != run.Succeeded || r.Result == nil {
		t.Fatalf("ended %s, error %+v, result %+v", r.State, r.Error, r.Result)
	}
	answers := []string{
		`(?m)^1\. Prime script output: 2 3 5 7 11 13 17 19 23 29 31 37 41 43 47$`,
		`(?m)^2\. whoami: worker; pwd: /tmp/ephemeral-run-[A-Za-z0-9]{6}/scratch$`,
		`(?m)^3\. curl error: curl: \(6\) Could not resolve host: example\.com$`,
		`(?m)^4\. /tmp/proof\.txt created; ls -l: -rw-r--r-- 1 worker worker 14 \w{3} +\d+ \d\d:\d\d /tmp/proof\.txt$`,
		`The network call did not succeed\.`,
	}
	for _, want := range answers {
		if !regexp.MustCompile(want).MatchString(r.Result.Output) {
			t.Errorf("the answer lacks %s:\n%s", want, r.Result.Output)
		}
	}
	checkRecord(t, r)
	checkMoney(t, r, 40_000)
	if r.Money.Model == 0 || r.Money.Compute == 0 || r.Money.Web != 0 {
		t.Errorf("money %+v, want model and compute charged, no web", r.Money)
	}
	if r.Usage.ModelCalls != 3 || r.Usage.TotalTokens != 5214 || r.Usage.ShellCommands != 4 {
		t.Errorf("usage %+v, want 3 model calls, 5214 tokens, 4 commands", r.Usage)
	}
	checkTimeline(t, n.events(t, r.ID), r)
	if left := n.server.leftOf(t, r.Machine); len(left) > 0 {
		t.Errorf("left of machine %s: %v", r.Machine, left)
	}
}

// TestAnswerFollowsTheMachine has a conversation with another number of primes: the answer changes with what the machine
// prints.
func TestAnswerFollowsTheMachine(t *testing.T) {
	t.Parallel()
	n := shared.tenant(t, 1_000_000)
	r := n.finish(t, client.Request{Prompt: "Primes.", Model: "replay/few-primes"})
	if r.State != run.Succeeded || r.Result == nil || !strings.Contains(r.Result.Output, "output: 2 3 5 7 11") {
		t.Fatalf("ended %s, error %+v, result %+v", r.State, r.Error, r.Result)
	}
}

// checkRecord says what the record of any ended run that had a machine must be.
func checkRecord(t *testing.T, r run.Run) {
	t.Helper()
	if r.StartedAt == nil || r.EndedAt == nil || r.Machine == "" || r.Image == "" || r.Isolation == "" || r.Node == "" {
		t.Errorf("record incomplete: %+v", r)
		return
	}
	sum := 0.0
	for _, s := range r.Stages {
		if s.Ms < 0 {
			t.Errorf("stage %s took %v ms", s.Name, s.Ms)
		}
		sum += s.Ms
	}
	if wall := float64(r.EndedAt.Sub(r.QueuedAt).Microseconds()) / 1000; math.Abs(sum-wall) > 0.001 {
		t.Errorf("stages sum to %.3f ms, the wall time is %.3f ms: %+v", sum, wall, r.Stages)
	}
}

// checkMoney says what the money of any settled run must be.
func checkMoney(t *testing.T, r run.Run, reserved run.Micros) {
	t.Helper()
	m := r.Money
	if m.Reserved != reserved || m.Charged+m.Released != m.Reserved || m.Charged != m.Model+m.Web+m.Compute || m.Charged < 0 {
		t.Errorf("money does not add up: %+v, reserved should be %d", m, reserved)
	}
}

// checkTimeline checks order, numbers, times and fields of the recorded run's events.
func checkTimeline(t *testing.T, events []run.Event, r run.Run) {
	t.Helper()
	var types []string
	last := 0.0
	for i, e := range events {
		if e.Seq != int64(i+1) || e.Run != r.ID {
			t.Errorf("event %d has number %d and run %s", i+1, e.Seq, e.Run)
		}
		if e.At < last {
			t.Errorf("time goes back from %v to %v at %s", last, e.At, e.Type)
		}
		last = e.At
		types = append(types, string(e.Type))
		checkData(t, e, r)
	}
	want := regexp.MustCompile(`^queued microvm\.ready worker\.started( model| shell)+ microvm\.destroyed succeeded worker\.destroyed$`)
	if got := strings.Join(types, " "); !want.MatchString(got) {
		t.Errorf("events are %s", got)
	}
	if wall := float64(r.EndedAt.Sub(r.QueuedAt).Microseconds()) / 1000; math.Abs(last-wall) > 0.001 {
		t.Errorf("the last event is at %v ms, the run's wall time is %v ms", last, wall)
	}
}

func checkData(t *testing.T, e run.Event, r run.Run) {
	t.Helper()
	switch d := e.Data.(type) {
	case run.QueuedData:
		if e.At != 0 || d.Reserved != 40_000 {
			t.Errorf("queued at %v with %+v", e.At, d)
		}
	case run.MicroVMReadyData:
		if d.Machine != r.Machine || d.Isolation != r.Isolation {
			t.Errorf("microvm.ready %+v", d)
		}
	case run.WorkerStartedData:
		if !d.Shell || d.Web {
			t.Errorf("worker.started %+v, want shell on, web off", d)
		}
	case run.ModelData:
		if d.Model != "replay/sandbox-proof" || d.InputTokens <= 0 || d.OutputTokens <= 0 || d.Charged <= 0 {
			t.Errorf("model %+v", d)
		}
	case run.ShellData:
		if d.Command == "" || d.Outcome != "exited" || d.Duration <= 0 || d.Output == "" {
			t.Errorf("shell %+v", d)
		}
	case run.EndedData:
		if d.ModelCalls != 3 || d.Tokens != 5214 || d.Output != r.Result.Output {
			t.Errorf("succeeded %+v", d)
		}
	case run.Money:
		if d != r.Money {
			t.Errorf("worker.destroyed %+v, the record says %+v", d, r.Money)
		}
	case run.MicroVMDestroyedData:
	default:
		t.Errorf("event %s has data %T", e.Type, e.Data)
	}
}
