package e2e

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/run"
)

func TestOneKeyIsOneRun(t *testing.T) {
	t.Parallel()
	n := shared.tenant(t, 1_000_000)
	const body = `{"command": "sleep 1", "max_cost_micros": 10000}`
	key := map[string]string{"Idempotency-Key": `"4c1a7c1e-one-key"`}
	var mu sync.Mutex
	ids, replayed := map[string]int{}, 0
	var posts sync.WaitGroup
	for range 50 {
		posts.Go(func() {
			status, header, answer := n.post(t, body, key)
			if status != http.StatusAccepted {
				t.Errorf("status %d: %v", status, answer)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			ids[fmt.Sprint(answer["id"])]++
			if header.Get("Idempotency-Replayed") == "true" {
				replayed++
			}
		})
	}
	posts.Wait()
	if len(ids) != 1 || replayed != 49 {
		t.Errorf("50 posts with one key made runs %v, %d replayed", ids, replayed)
	}
	account, err := n.Account(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if account.Held != 10_000 && account.Charged == 0 {
		t.Errorf("held %d, want one hold of 10000", account.Held)
	}
	status, _, answer := n.post(t, `{"command": "sleep 2", "max_cost_micros": 10000}`, key)
	if status != http.StatusUnprocessableEntity || answer["code"] != "idempotency_conflict" {
		t.Errorf("another body: status %d, %v", status, answer)
	}
	for id := range ids {
		r := n.ended(t, run.ID(id))
		checkMoney(t, r, 10_000)
		status, header, answer := n.post(t, body, key)
		if status != http.StatusAccepted && status != http.StatusOK || header.Get("Idempotency-Replayed") != "true" ||
			answer["id"] != id || answer["state"] != string(run.Succeeded) {
			t.Errorf("replay after the end: status %d, %v", status, answer)
		}
		events := n.events(t, r.ID)
		if ready := count(events, run.EventMicroVMReady); ready != 1 {
			t.Errorf("%d machines for one run", ready)
		}
	}
	list, err := n.Runs(t.Context(), run.Page{})
	if err != nil || len(list.Runs) != 1 {
		t.Errorf("%d runs, %v; want one", len(list.Runs), err)
	}
	a, _, first := n.post(t, `{"command": "true"}`, nil)
	b, _, second := n.post(t, `{"command": "true"}`, nil)
	if a != http.StatusAccepted || b != http.StatusAccepted || first["id"] == second["id"] {
		t.Errorf("two posts without a key: %d %v, %d %v", a, first["id"], b, second["id"])
	}
	n.ended(t, run.ID(fmt.Sprint(first["id"])))
	n.ended(t, run.ID(fmt.Sprint(second["id"])))
}

func count(events []run.Event, typ run.EventType) (n int) {
	for _, e := range events {
		if e.Type == typ {
			n++
		}
	}
	return n
}

func TestRefusedForMoney(t *testing.T) {
	t.Parallel()
	poor := shared.tenant(t, 9_999)
	rich := shared.tenant(t, 1_000_000)
	tests := map[string]struct {
		n          *tenant
		body, code string
	}{
		"account cannot pay":           {poor, `{"command": "true", "max_cost_micros": 10000}`, "insufficient_funds"},
		"budget below the first slice": {rich, `{"command": "true", "max_cost_micros": 199}`, "budget_too_small"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			status, header, answer := tt.n.post(t, tt.body, map[string]string{"Idempotency-Key": "k"})
			if status != http.StatusPaymentRequired || answer["code"] != tt.code || !strings.HasPrefix(header.Get("Content-Type"), "application/problem+json") {
				t.Errorf("status %d, %v, %v", status, header, answer)
			}
			account, err := tt.n.Account(t.Context())
			if err != nil || account.Held != 0 || account.Charged != 0 {
				t.Errorf("account %+v, %v; want nothing held", account, err)
			}
			if list, err := tt.n.Runs(t.Context(), run.Page{}); err != nil || len(list.Runs) != 0 {
				t.Errorf("runs %+v, %v; want none", list.Runs, err)
			}
		})
	}
}

// TestBadInput posts what must never reach a machine, and looks for the field that the answer names.
func TestBadInput(t *testing.T) {
	t.Parallel()
	n := shared.tenant(t, 1_000_000)
	file := func(path string) string {
		return fmt.Sprintf(`{"command":"true","files":[{"path":%q,"content":""}]}`, path)
	}
	many := strings.Repeat(`{"path":"x","content":""},`, 101)
	for i := range 101 {
		many = strings.Replace(many, `"x"`, fmt.Sprintf(`"f%d"`, i), 1)
	}
	tests := map[string]struct {
		body, field string
	}{
		"not JSON":            {`{"command":`, ""},
		"unknown field":       {`{"command":"true","gpu":true}`, "gpu"},
		"unknown file field":  {`{"command":"true","files":[{"path":"a","content":"","owner":"root"}]}`, "files[0].owner"},
		"both":                {`{"command":"true","prompt":"hi"}`, "prompt"},
		"neither":             {`{}`, "prompt"},
		"wrong type":          {`{"command":7}`, "command"},
		"wrong type of files": {`{"command":"true","files":{}}`, "files"},
		"fraction of a micro": {`{"command":"true","max_cost_micros":0.5}`, "max_cost_micros"},
		"empty prompt":        {`{"prompt":""}`, "prompt"},
		"blank prompt":        {`{"prompt":" \n "}`, "prompt"},
		"huge prompt":         {`{"prompt":"` + strings.Repeat("a", 1<<20) + `"}`, "prompt"},
		"absolute path":       {file("/etc/passwd"), "files[0].path"},
		"path upwards":        {file("a/../../b"), "files[0].path"},
		"duplicate path":      {`{"command":"true","files":[{"path":"a","content":""},{"path":"a","content":""}]}`, "files[1].path"},
		"too many files":      {`{"command":"true","files":[` + strings.TrimSuffix(many, ",") + `]}`, "files"},
		"too large files": {`{"command":"true","files":[{"path":"a","encoding":"base64","content":"` +
			base64.StdEncoding.EncodeToString(make([]byte, 9<<20)) + `"}]}`, "files"},
		"bad base64":         {`{"command":"true","files":[{"path":"a","content":"?","encoding":"base64"}]}`, "files[0].content"},
		"timeout zero":       {`{"command":"true","timeout_seconds":0}`, "timeout_seconds"},
		"timeout negative":   {`{"command":"true","timeout_seconds":-1}`, "timeout_seconds"},
		"timeout huge":       {`{"command":"true","timeout_seconds":1000000}`, "timeout_seconds"},
		"budget zero":        {`{"command":"true","max_cost_micros":0}`, "max_cost_micros"},
		"budget huge":        {`{"command":"true","max_cost_micros":9223372036854775807}`, "max_cost_micros"},
		"unknown model":      {`{"prompt":"hi","model":"nobody/nothing"}`, "model"},
		"unknown connection": {`{"prompt":"hi","connections":["billing"]}`, "connections[0]"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			status, header, answer := n.post(t, tt.body, nil)
			if status != http.StatusBadRequest || answer["code"] == nil || !strings.HasPrefix(header.Get("Content-Type"), "application/problem+json") {
				t.Fatalf("status %d, want 400: %v", status, answer)
			}
			b, _ := json.Marshal(answer["errors"])
			if tt.field != "" && !strings.Contains(string(b), fmt.Sprintf("%q", tt.field)) {
				t.Errorf("the answer does not name %s: %v", tt.field, answer)
			}
		})
	}
	if list, err := n.Runs(t.Context(), run.Page{}); err != nil || len(list.Runs) != 0 {
		t.Errorf("runs %+v, %v; want none", list.Runs, err)
	}
}

func TestKeysAndOtherOrganisations(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), runLimit)
	defer cancel()
	n, other := shared.tenant(t, 1_000_000), shared.tenant(t, 1_000_000)
	created, err := n.CreateRun(ctx, client.Request{Command: "true"}, client.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	refused := func(what string, err error, status int) {
		t.Helper()
		if p := problem(err); p == nil || p.Status != status {
			t.Errorf("%s: %v, want status %d", what, err, status)
		}
	}
	_, err = other.Run(ctx, created.Run.ID)
	refused("another organisation's run", err, http.StatusNotFound)
	_, err = other.Cancel(ctx, created.Run.ID)
	refused("cancel of it", err, http.StatusNotFound)
	refused("delete of it", other.Delete(ctx, created.Run.ID), http.StatusNotFound)
	for _, err := range other.Events(ctx, created.Run.ID, 0) {
		refused("events of it", err, http.StatusNotFound)
	}
	n.ended(t, created.Run.ID)

	for name, key := range map[string]string{"no key": "", "a wrong key": "eph_" + strings.Repeat("x", 43)} {
		c, err := client.New("http://"+shared.listen, key)
		if err != nil {
			t.Fatal(err)
		}
		_, err = c.CreateRun(ctx, client.Request{Command: "true"}, client.CreateOptions{})
		refused(name, err, http.StatusUnauthorized)
	}
	var key client.NewKey
	shared.json(t, &key, "keys", "create", "--org", n.org)
	c, err := client.New("http://"+shared.listen, key.Secret)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Account(ctx); err != nil {
		t.Fatal(err)
	}
	if _, errs, err := shared.cli(ctx, nil, "keys", "revoke", key.ID); err != nil {
		t.Fatalf("%v\n%s", err, errs)
	}
	_, err = c.Account(ctx)
	refused("a revoked key", err, http.StatusUnauthorized)
}
