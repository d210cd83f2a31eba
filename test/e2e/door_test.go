package e2e

import (
	"os"
	"strings"
	"testing"

	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/run"
)

// doorScript does what programs do that were written for a provider: curl, and a client in Python.
const doorScript = `getent hosts broker.local | tr -s ' '
curl -sS -w '%{stderr}%{time_total}' http://broker.local/v1/models | jq -r '.data[].id'
curl -sS http://broker.local/v1/chat/completions -H "Authorization: Bearer sk-none" -H "Content-Type: application/json" \
  -d '{"messages": [{"role": "user", "content": "hi"}]}' | jq -r '.choices[0].message.content'
OPENAI_BASE_URL=http://broker.local/v1 OPENAI_API_KEY=sk-none MODEL=replay/hello python3 client.py
curl -sS -o answer.json -w '%{http_code} ' http://broker.local/v1/chat/completions -d '{"model": "replay/wait", "messages": [{"role": "user", "content": "hi"}]}'
jq -r .error.code answer.json
for path in /web/fetch /connections/billing/x /metrics; do curl -sS -o /dev/null -w '%{http_code} ' -X POST http://broker.local$path; done
curl -sS https://example.com 2>&1`

// TestProgramsReachTheBroker: programs reach the run's model through the local door, without a credential, and nothing else; the run pays.
func TestProgramsReachTheBroker(t *testing.T) {
	t.Parallel()
	n := shared.tenant(t, 1_000_000)
	python, err := os.ReadFile("testdata/openai_client.py")
	if err != nil {
		t.Fatal(err)
	}
	r := n.finish(t, client.Request{
		Command: doorScript, ExposeBroker: true, Model: "replay/hello", TimeoutSeconds: 60,
		Files: []run.File{{Path: "client.py", Content: string(python)}},
	})
	if r.State != run.Succeeded || r.Result == nil || r.Result.Stdout == nil {
		t.Fatalf("ended %s, error %+v, result %+v", r.State, r.Error, r.Result)
	}
	want := `127.0.0.1 broker.local
replay/hello
Hello, Zürich.
200 Hello, Zürich. 25
200 Hello, Zürich. True True
403 model_not_allowed
404 404 404 curl: (6) Could not resolve host: example.com
`
	if got := r.Result.Stdout.Content; got != want {
		t.Errorf("the programs saw\n%s\nwant\n%s\nstandard error: %s", got, want, r.Result.Stderr.Content)
	}
	checkRecord(t, r)
	checkMoney(t, r, r.Money.Reserved)
	if r.Usage.ModelCalls != 3 || r.Usage.TotalTokens != 75 || r.Money.Model != 9 {
		t.Errorf("usage %+v, money %+v, want 3 calls of 25 tokens for 3 micro-dollars each", r.Usage, r.Money)
	}
	if got := count(n.events(t, r.ID), run.EventModel); got < 3 {
		t.Errorf("%d model events", got)
	}
}

// TestProgramsOfAPrompt: the worker and its programs share the run's model and its money.
func TestProgramsOfAPrompt(t *testing.T) {
	t.Parallel()
	n := shared.tenant(t, 1_000_000)
	r := n.finish(t, client.Request{Prompt: "Ask.", Model: "replay/door", ExposeBroker: true})
	if r.State != run.Succeeded || r.Result == nil || r.Result.Output != "The program was told: a word for a program" {
		t.Fatalf("ended %s, error %+v, result %+v", r.State, r.Error, r.Result)
	}
	if r.Usage.ModelCalls != 3 || r.Usage.TotalTokens != 285 {
		t.Errorf("usage %+v", r.Usage)
	}
}

// TestNoDoor: a run that did not ask for it has no name and no listener.
func TestNoDoor(t *testing.T) {
	t.Parallel()
	n := shared.tenant(t, 1_000_000)
	r := n.finish(t, client.Request{Command: `getent hosts broker.local; echo $?; curl -sS http://broker.local/ 2>&1; echo; curl -sS http://127.0.0.1/ 2>&1
cat /proc/net/tcp /proc/net/udp | grep -c ': '`})
	if r.State != run.Succeeded || r.Result == nil || r.Result.Stdout == nil {
		t.Fatalf("ended %s, error %+v, result %+v", r.State, r.Error, r.Result)
	}
	got := strings.Split(r.Result.Stdout.Content, "\n")
	if len(got) < 5 || got[0] != "2" || got[1] != "curl: (6) Could not resolve host: broker.local" || !strings.HasPrefix(got[3], "curl: (7) Failed to connect to 127.0.0.1 port 80") || got[4] != "0" {
		t.Errorf("%q", got)
	}
}
