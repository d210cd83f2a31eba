package e2e

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/broker/openaitest"
	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/run"
)

// attackCalls is how many model calls the machine of TestHardCapUnderAttack makes at once.
const attackCalls = 64

// attacked starts a server with a double of a provider that reports too much, reports nothing, breaks off or reports zero,
// by turns, at 10 micro-dollars an input token and 20 an output token.
func attacked(t *testing.T) (n *tenant, asked *atomic.Int64) {
	t.Helper()
	prices := filepath.Join(t.TempDir(), "prices.yaml")
	if err := os.WriteFile(prices, []byte("models: {openai/attacked: {input: 10000000, output: 20000000}}"), 0o600); err != nil {
		t.Fatal(err)
	}
	asked = new(atomic.Int64)
	provider := openaitest.NewFunc(t, marker, func(n int, _ *openaitest.Request) openaitest.Answer {
		asked.Add(1)
		return []openaitest.Answer{
			{Text: "hi", Usage: &openaitest.Usage{Prompt: 1 << 29, Completion: 1 << 29}, Delay: 50 * time.Millisecond},
			{Text: "hi", Delay: 20 * time.Millisecond}, {Text: "hello hello", CutAfter: 300}, {Text: "hi", Usage: &openaitest.Usage{}},
		}[n%4]
	})
	s := startOwn(t, "EPHEMERAL_OPENAI_BASE_URL="+provider.BaseURL, "EPHEMERAL_OPENAI_API_KEY="+marker, "EPHEMERAL_PRICES="+prices)
	return s.tenant(t, 1_000_000), asked
}

// watchMoney looks at a run and its account until the context ends: at no time is more charged than reserved, or more
// held and spent than there is.
func (n *tenant) watchMoney(ctx context.Context, t *testing.T, id run.ID) (looks int) {
	for ctx.Err() == nil {
		r, err := n.Run(ctx, id)
		if err == nil && (r.Money.Charged < 0 || r.Money.Charged > r.Money.Reserved) {
			t.Errorf("money %+v while it runs", r.Money)
		}
		a, err2 := n.Account(ctx)
		if err2 == nil && (a.Deposits != a.Balance+a.Charged || a.Available != a.Balance-a.Held || a.Available < 0 || a.Held < 0) {
			t.Errorf("account %+v while it runs", a)
		}
		if err == nil && err2 == nil {
			looks++
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
		}
	}
	return looks
}

// TestHardCapUnderAttack lets a machine make 64 model calls at once on a hold that pays for about ten, of a provider that
// lies about usage or breaks off. Never is more charged than reserved; what is past the hold is refused before it is made;
// every micro-dollar is accounted for.
func TestHardCapUnderAttack(t *testing.T) {
	n, asked := attacked(t)
	const reserved = 50_000
	script, err := os.ReadFile("testdata/attack.py")
	if err != nil {
		t.Fatal(err)
	}
	created, err := n.CreateRun(t.Context(), client.Request{
		Model: "openai/attacked", ExposeBroker: true, MaxCostMicros: reserved, TimeoutSeconds: 80,
		Command: "python3 attack.py", Files: []run.File{{Path: "attack.py", Content: string(script)}},
	}, client.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	looks := make(chan int, 1)
	go func() { looks <- n.watchMoney(ctx, t, created.Run.ID) }()
	r := n.ended(t, created.Run.ID)
	cancel()
	if got := <-looks; got < 3 {
		t.Errorf("the money was looked at %d times while the run ran", got)
	}
	// The calls may leave too little for compute; then the machine ends before the last of them.
	if r.State != run.Succeeded && r.State != run.BudgetExhausted || r.Result == nil || r.Result.Stdout == nil {
		t.Fatalf("ended %s, %+v, %+v\n%s", r.State, r.Error, r.Result, n.server.cmd.Stderr)
	}
	codes := map[string]int{}
	for code := range strings.FieldsSeq(r.Result.Stdout.Content) {
		codes[code]++
	}
	if all := codes["200"] + codes["402"] + codes["502"] + codes["429"]; r.State == run.Succeeded && (all != attackCalls || codes["402"] == 0) {
		t.Errorf("answers %v", codes)
	}
	n.checkAttack(t, r, int(asked.Load()))
	checkMoney(t, r, reserved)
	if out, errs, err := n.server.cli(t.Context(), nil, "orgs", "audit"); err != nil || !strings.Contains(out, "conserved") {
		t.Errorf("%v\n%s%s", err, out, errs)
	}
	a, err := n.Account(t.Context())
	if err != nil || a.Held != 0 || a.Balance != a.Deposits-r.Money.Charged || a.Charged != r.Money.Charged {
		t.Errorf("account %+v after a run that cost %d, %v", a, r.Money.Charged, err)
	}
	t.Logf("%s: answers %v, provider asked %d times, charged %s of %s", r.State, codes, asked.Load(), r.Money.Charged, r.Money.Reserved)
}

// checkAttack compares the events of the calls with the money and with what the provider saw.
func (n *tenant) checkAttack(t *testing.T, r run.Run, asked int) {
	t.Helper()
	var made, refused int
	var charged run.Micros
	for _, e := range n.events(t, r.ID) {
		d, ok := e.Data.(run.ModelData)
		if !ok {
			continue
		}
		charged += d.Charged
		switch {
		case d.Error != "budget_exhausted":
			made++
		case d.Charged != 0 || d.Status != 0:
			t.Errorf("refused, and yet %+v", d)
		default:
			refused++
		}
	}
	// A call costs at least its message as input, so the hold does not even pay for twenty.
	if made < 3 || made >= 20 || refused == 0 || made+refused > attackCalls || asked < made {
		t.Errorf("%d calls were made and %d refused; the provider was asked %d times", made, refused, asked)
	}
	if charged != r.Money.Model || r.Money.Charged > r.Money.Reserved {
		t.Errorf("the calls' events sum to %d, the money is %+v", charged, r.Money)
	}
}
