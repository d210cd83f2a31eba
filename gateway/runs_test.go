package gateway

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/run"
)

// refusedWith fails unless err is a problem with the code.
func refusedWith(t *testing.T, err error, code Code, fields ...string) {
	t.Helper()
	var p *client.Problem
	if !errors.As(err, &p) || p.Code != string(code) {
		t.Errorf("want %s, got %v", code, err)
		return
	}
	var got []string
	for _, f := range p.Errors {
		got = append(got, f.Field)
	}
	if len(fields) > 0 && strings.Join(got, ",") != strings.Join(fields, ",") {
		t.Errorf("fields %v, want %v", got, fields)
	}
}

func TestOneKeyOneRun(t *testing.T) {
	l := newLive(t, Config{})
	m := l.newMember("o", 1_000_000)
	bodies := []string{`{"command":"true","metadata":{"a":"1","b":"2"}}`, `{ "metadata": {"b":"2", "a":"1"}, "shell": true, "command": "true" }`}
	const n = 50
	ids, replayed := make([]string, n), make([]bool, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			c, err := m.CreateRunJSON(l.ctx, []byte(bodies[i%2]), client.CreateOptions{IdempotencyKey: "k1"})
			if err != nil {
				t.Error(err)
			}
			ids[i], replayed[i] = string(c.Run.ID), c.Replayed
		})
	}
	wg.Wait()
	fresh := 0
	for i := range n {
		if ids[i] != ids[0] {
			t.Errorf("post %d made %s, post 0 %s", i, ids[i], ids[0])
		}
		if !replayed[i] {
			fresh++
		}
	}
	a, err := m.Account(l.ctx)
	if err != nil || a.Held != 40_000 || a.Available != 960_000 || fresh != 1 {
		t.Errorf("%+v, %v, %d not replayed", a, err, fresh)
	}
	_, err = m.CreateRunJSON(l.ctx, []byte(`{"command":"false"}`), client.CreateOptions{IdempotencyKey: "k1"})
	refusedWith(t, err, CodeIdempotencyConflict, "Idempotency-Key")

	l.start(l.take())
	again := l.do(t, "POST", "/v1/runs", bodies[0], "Authorization", "Bearer "+m.secret, "Idempotency-Key", "k1")
	if again.StatusCode != 202 || again.Header.Get("Idempotency-Replayed") != "true" || !strings.Contains(again.body, `"state":"running"`) {
		t.Errorf("a replay does not show the run as it is: %d %v %s", again.StatusCode, again.Header, again.body)
	}
	other := l.newMember("other", 1_000_000)
	if c, err := other.CreateRunJSON(l.ctx, []byte(bodies[0]), client.CreateOptions{IdempotencyKey: "k1"}); err != nil || c.Replayed || string(c.Run.ID) == ids[0] {
		t.Errorf("the key of another organisation counts: %+v, %v", c, err)
	}
	for range 2 {
		a := l.do(t, "POST", "/v1/runs", bodies[0], "Authorization", "Bearer "+m.secret)
		if a.StatusCode != 202 || a.Header.Get("Idempotency-Replayed") != "" || strings.Contains(a.body, ids[0]) {
			t.Errorf("without a key: %d %s", a.StatusCode, a.body)
		}
	}
}

func TestCreatedRunIsAsAsked(t *testing.T) {
	l := newLive(t, Config{})
	m := l.newMember("o", 1_000_000)
	a := l.do(t, "POST", "/v1/runs", `{"prompt":"hi","files":[{"path":"a","content":"b"}],"metadata":{"k":"v"}}`, "Authorization", "Bearer "+m.secret)
	if a.StatusCode != http.StatusAccepted || a.Header.Get("Content-Type") != "application/json" {
		t.Fatalf("%d %s", a.StatusCode, a.body)
	}
	id := strings.TrimPrefix(a.Header.Get("Location"), "/v1/runs/")
	got, err := m.Run(l.ctx, run.ID(id))
	l.must(err)
	want := &run.Spec{Prompt: "hi", Model: "replay/proof", Shell: true, TimeoutSeconds: 120, MaxCostMicros: 40_000,
		Files: []run.File{{Path: "a", Content: "b"}}, Metadata: map[string]string{"k": "v"}}
	if d := cmp.Diff(want, got.Request); d != "" || got.State != run.Queued || got.Org != "o" || got.Money.Reserved != 40_000 {
		t.Errorf("%s\n%+v", d, got)
	}
	if lease := l.take(); lease.Run != got.ID || cmp.Diff(*want, lease.Spec) != "" {
		t.Errorf("the node gets %+v", lease)
	}
}

func TestRefusedPaymentHoldsNothing(t *testing.T) {
	l := newLive(t, Config{})
	m := l.newMember("o", 30_000)
	_, err := m.CreateRun(l.ctx, client.Request{Command: "true"}, client.CreateOptions{IdempotencyKey: "k"})
	refusedWith(t, err, CodeInsufficientFunds, "max_cost_micros")
	_, err = m.CreateRun(l.ctx, client.Request{Command: "true", MaxCostMicros: 199}, client.CreateOptions{})
	refusedWith(t, err, CodeBudgetTooSmall, "max_cost_micros")
	a, err := m.Account(l.ctx)
	if err != nil || a.Held != 0 || a.Available != 30_000 {
		t.Errorf("%+v, %v", a, err)
	}
	if runs, err := m.Runs(l.ctx, run.Page{}); err != nil || len(runs.Runs) != 0 {
		t.Errorf("%+v, %v", runs, err)
	}
	_, err = l.admin.Credit(l.ctx, "o", 10_000, "more")
	l.must(err)
	if c, err := m.CreateRun(l.ctx, client.Request{Command: "true"}, client.CreateOptions{IdempotencyKey: "k"}); err != nil || c.Replayed {
		t.Errorf("a refusal is remembered: %+v, %v", c, err)
	}
}

func TestOthersRunsDoNotExist(t *testing.T) {
	l := newLive(t, Config{})
	m, thief := l.newMember("o", 1_000_000), l.newMember("thief", 1_000_000)
	r := l.create(m)
	calls := map[string]func(id run.ID) error{
		"get":    func(id run.ID) error { _, err := thief.Run(l.ctx, id); return err },
		"wait":   func(id run.ID) error { _, err := thief.Wait(l.ctx, id); return err },
		"cancel": func(id run.ID) error { _, err := thief.Cancel(l.ctx, id); return err },
		"delete": func(id run.ID) error { return thief.Delete(l.ctx, id) },
		"stream": func(id run.ID) error {
			for _, err := range thief.Events(l.ctx, id, 0) {
				return err
			}
			return nil
		},
	}
	for name, call := range calls {
		t.Run(name, func(t *testing.T) {
			refusedWith(t, call(r.ID), CodeNotFound)
			refusedWith(t, call("run_00000000000000000000000000000000"), CodeNotFound)
		})
	}
	theirs := l.do(t, "GET", "/v1/runs/"+string(r.ID)+"/events", "", "Authorization", "Bearer "+thief.secret).problem(t)
	none := l.do(t, "GET", "/v1/runs/run_00000000000000000000000000000000/events", "", "Authorization", "Bearer "+thief.secret).problem(t)
	theirs.RequestID, none.RequestID = "", ""
	if theirs.Code != none.Code || theirs.Detail != none.Detail {
		t.Errorf("the answers tell apart what is another's and what is not there: %+v, %+v", theirs, none)
	}
	if runs, err := thief.Runs(l.ctx, run.Page{}); err != nil || len(runs.Runs) != 0 {
		t.Errorf("%+v, %v", runs, err)
	}
	if r, err := m.Run(l.ctx, r.ID); err != nil || r.State != run.Queued {
		t.Errorf("%+v, %v", r, err)
	}
}

func TestKeys(t *testing.T) {
	l := newLive(t, Config{})
	m := l.newMember("o", 0)
	k2, err := l.admin.CreateKey(l.ctx, "o", "second")
	l.must(err)
	if !strings.HasPrefix(k2.Secret, "eph_") || k2.Role != run.Member || k2.Org != "o" || k2.Name != "second" {
		t.Errorf("%+v", k2)
	}
	if _, err := l.as(k2.Secret).Account(l.ctx); err != nil {
		t.Error(err)
	}
	l.must(l.admin.RevokeKey(l.ctx, m.keyID))
	l.must(l.admin.RevokeKey(l.ctx, m.keyID))
	_, err = m.Account(l.ctx)
	refusedWith(t, err, CodeUnauthenticated)
	_, err = l.as("eph_" + strings.Repeat("a", 43)).Account(l.ctx)
	refusedWith(t, err, CodeUnauthenticated)
	_, err = l.as("").Account(l.ctx)
	refusedWith(t, err, CodeUnauthenticated)
	refusedWith(t, l.admin.RevokeKey(l.ctx, "key_none"), CodeNotFound)
	refusedWith(t, l.admin.RevokeKey(l.ctx, "../orgs"), CodeNotFound)
	keys, err := l.admin.Keys(l.ctx, "o")
	if err != nil || len(keys) != 2 || keys[0].RevokedAt.IsZero() || !keys[1].RevokedAt.IsZero() {
		t.Errorf("%+v, %v", keys, err)
	}
	list := l.do(t, "GET", "/v1/orgs/o/keys", "", "Authorization", "Bearer "+m.secret)
	if list.StatusCode != 401 || strings.Contains(l.log.String(), m.secret) || strings.Contains(l.log.String(), k2.Secret) {
		t.Errorf("%d, or a secret is in the log", list.StatusCode)
	}
}

func TestAdministration(t *testing.T) {
	l := newLive(t, Config{})
	m := l.newMember("o", 0)
	if _, err := l.admin.CreateOrg(l.ctx, run.Org{ID: "o", Name: "o"}); err != nil {
		t.Errorf("repeated: %v", err)
	}
	_, err := l.admin.CreateOrg(l.ctx, run.Org{ID: "o", Name: "another"})
	refusedWith(t, err, CodeConflict)
	made, err := l.admin.CreateOrg(l.ctx, run.Org{Name: "Made & Co", Concurrency: 3})
	if err != nil || !strings.HasPrefix(made.ID, "org_") || made.Concurrency != 3 {
		t.Errorf("%+v, %v", made, err)
	}
	if got, err := l.admin.Org(l.ctx, made.ID); err != nil || got.Name != "Made & Co" {
		t.Errorf("%+v, %v", got, err)
	}
	if orgs, err := l.admin.Orgs(l.ctx); err != nil || len(orgs) != 2 {
		t.Errorf("%+v, %v", orgs, err)
	}
	for range 2 {
		if a, err := l.admin.Credit(l.ctx, "o", 500, "r1"); err != nil || a.Balance != 500 {
			t.Errorf("%+v, %v", a, err)
		}
	}
	_, err = l.admin.Credit(l.ctx, "o", 501, "r1")
	refusedWith(t, err, CodeIdempotencyConflict, "ref")
	_, err = l.admin.Credit(l.ctx, "o", -501, "r2")
	refusedWith(t, err, CodeInsufficientFunds, "amount_micros")
	if a, err := l.admin.Credit(l.ctx, "o", -100, "r3"); err != nil || a.Available != 400 {
		t.Errorf("%+v, %v", a, err)
	}
	if a, err := l.admin.OrgAccount(l.ctx, "o"); err != nil || a.Balance != 400 {
		t.Errorf("%+v, %v", a, err)
	}
	bad := map[string]struct {
		path, body string
		code       Code
		field      string
	}{
		"name":        {"/v1/orgs", `{"name":" "}`, CodeInvalidRequest, "name"},
		"no name":     {"/v1/orgs", `{}`, CodeInvalidRequest, "name"},
		"id":          {"/v1/orgs", `{"name":"x","id":"A B"}`, CodeInvalidRequest, "id"},
		"concurrency": {"/v1/orgs", `{"name":"x","concurrency":-1}`, CodeInvalidRequest, "concurrency"},
		"unknown":     {"/v1/orgs", `{"name":"x","plan":"gold"}`, CodeInvalidRequest, "plan"},
		"amount":      {"/v1/orgs/o/credits", `{"amount_micros":0,"ref":"x"}`, CodeInvalidRequest, "amount_micros"},
		"much":        {"/v1/orgs/o/credits", `{"amount_micros":9007199254740991,"ref":"x"}`, CodeInvalidRequest, "amount_micros"},
		"fraction":    {"/v1/orgs/o/credits", `{"amount_micros":0.5,"ref":"x"}`, CodeInvalidRequest, "amount_micros"},
		"no ref":      {"/v1/orgs/o/credits", `{"amount_micros":1}`, CodeInvalidRequest, "ref"},
		"ref":         {"/v1/orgs/o/credits", `{"amount_micros":1,"ref":"a b"}`, CodeInvalidRequest, "ref"},
		"role":        {"/v1/orgs/o/keys", `{"name":"x","role":"admin"}`, CodeInvalidRequest, "role"},
		"no org":      {"/v1/orgs/none/keys", `{"name":"x"}`, CodeNotFound, ""},
		"odd org":     {"/v1/orgs/%2e%2e/credits", `{"amount_micros":1,"ref":"x"}`, CodeNotFound, ""},
	}
	secret := l.adminSecret(t)
	for name, tt := range bad {
		t.Run(name, func(t *testing.T) {
			p := l.do(t, "POST", tt.path, tt.body, "Authorization", "Bearer "+secret).problem(t)
			if p.Code != tt.code || (tt.field != "" && (len(p.Errors) != 1 || p.Errors[0].Field != tt.field)) {
				t.Errorf("%+v", p)
			}
		})
	}
	_, err = m.Orgs(l.ctx)
	refusedWith(t, err, CodeForbidden)
	_, err = m.Credit(l.ctx, "o", 1_000_000, "gift")
	refusedWith(t, err, CodeForbidden)
	_, err = l.admin.Account(l.ctx)
	refusedWith(t, err, CodeForbidden)
}

func (l *live) adminSecret(t *testing.T) string {
	t.Helper()
	_, secret, err := l.store.CreateKey(l.ctx, "", "second", run.Admin)
	l.must(err)
	return secret
}

func TestPreferWait(t *testing.T) {
	l := newLive(t, Config{MaxWait: 3 * time.Second})
	m := l.newMember("o", 1_000_000)
	t.Run("the run ends in time", func(t *testing.T) {
		go func() {
			lease := l.take()
			l.start(lease)
			time.Sleep(100 * time.Millisecond)
			l.settle(lease)
		}()
		a := l.do(t, "POST", "/v1/runs", `{"command":"true"}`, "Authorization", "Bearer "+m.secret, "Prefer", "wait=30", "Idempotency-Key", "k")
		if a.StatusCode != 200 || !strings.Contains(a.body, `"state":"succeeded"`) || a.Header.Get("Preference-Applied") != "wait=3" ||
			!strings.HasPrefix(a.Header.Get("Location"), "/v1/runs/run_") {
			t.Errorf("%d %v %s", a.StatusCode, a.Header, a.body)
		}
		again := l.do(t, "POST", "/v1/runs", `{"command":"true"}`, "Authorization", "Bearer "+m.secret, "Prefer", "wait=30", "Idempotency-Key", "k")
		if again.StatusCode != 200 || again.Header.Get("Idempotency-Replayed") != "true" {
			t.Errorf("%d %v", again.StatusCode, again.Header)
		}
	})
	t.Run("the run does not end in time", func(t *testing.T) {
		start := time.Now()
		a := l.do(t, "POST", "/v1/runs", `{"command":"true"}`, "Authorization", "Bearer "+m.secret, "Prefer", "wait=1")
		if d := time.Since(start); a.StatusCode != 202 || d < time.Second || d > 3*time.Second {
			t.Errorf("%d after %v", a.StatusCode, d)
		}
	})
	t.Run("no wish", func(t *testing.T) {
		start := time.Now()
		a := l.do(t, "POST", "/v1/runs", `{"command":"true"}`, "Authorization", "Bearer "+m.secret, "Prefer", "respond-async")
		if a.StatusCode != 202 || a.Header.Get("Preference-Applied") != "" || time.Since(start) > time.Second {
			t.Errorf("%d %v", a.StatusCode, a.Header)
		}
	})
	t.Run("cancelled while waiting", func(t *testing.T) {
		r := l.create(m)
		go func() {
			time.Sleep(50 * time.Millisecond)
			if _, err := m.Cancel(l.ctx, r.ID); err != nil {
				t.Error(err)
			}
		}()
		if got, err := m.Wait(l.ctx, r.ID); err != nil || got.State != run.Cancelled {
			t.Errorf("%+v, %v", got, err)
		}
	})
	if n := l.hub.size(); n != 0 {
		t.Errorf("%d readers left", n)
	}
}

func TestListCancelDelete(t *testing.T) {
	l := newLive(t, Config{})
	m := l.newMember("o", 10_000_000)
	var made []run.ID
	for range 25 {
		made = append(made, l.create(m).ID)
	}
	var seen []run.ID
	cursor := ""
	for pages := 0; pages < 10; pages++ {
		page, err := m.Runs(l.ctx, run.Page{Cursor: cursor, Limit: 10})
		l.must(err)
		for _, r := range page.Runs {
			seen = append(seen, r.ID)
		}
		if cursor = page.NextCursor; cursor == "" {
			break
		}
	}
	for i, id := range seen {
		if id != made[len(made)-1-i] {
			t.Fatalf("place %d: %s", i, id)
		}
	}
	if len(seen) != len(made) {
		t.Fatalf("%d of %d", len(seen), len(made))
	}
	_, err := m.Runs(l.ctx, run.Page{Cursor: "nonsense"})
	refusedWith(t, err, CodeInvalidParameter, "cursor")

	refusedWith(t, m.Delete(l.ctx, made[0]), CodeRunNotFinished)
	queued := l.do(t, "POST", "/v1/runs/"+string(made[1])+"/cancel", "", "Authorization", "Bearer "+m.secret)
	again := l.do(t, "POST", "/v1/runs/"+string(made[1])+"/cancel", "", "Authorization", "Bearer "+m.secret)
	if queued.StatusCode != 200 || again.StatusCode != 200 || queued.body != again.body || !strings.Contains(queued.body, `"state":"cancelled"`) {
		t.Errorf("%d %s\n%d %s", queued.StatusCode, queued.body, again.StatusCode, again.body)
	}
	lease := l.take() // the oldest
	l.start(lease)
	if a := l.do(t, "POST", "/v1/runs/"+string(made[0])+"/cancel", "", "Authorization", "Bearer "+m.secret); a.StatusCode != 202 || !strings.Contains(a.body, `"state":"running"`) {
		t.Errorf("%d %s", a.StatusCode, a.body)
	}
	if cancelled, err := l.store.Renew(l.ctx, lease); err != nil || !cancelled {
		t.Errorf("the node is not told: %v, %v", cancelled, err)
	}
	l.settle(lease)
	page, err := m.Runs(l.ctx, run.Page{State: run.Cancelled})
	if err != nil || len(page.Runs) != 1 || page.Runs[0].ID != made[1] {
		t.Errorf("%+v, %v", page, err)
	}
	l.must(m.Delete(l.ctx, made[0]))
	l.must(m.Delete(l.ctx, made[0]))
	r, err := m.Run(l.ctx, made[0])
	if err != nil || r.Request == nil || r.Request.Command != "" || r.Money.Reserved != 40_000 {
		t.Errorf("%+v, %v", r, err)
	}
}

func TestMemberLimits(t *testing.T) {
	l := newLive(t, Config{})
	m := l.newMember("o", 1_000_000)
	wrong := map[string]string{
		`{"command":"x","connections":["billing"]}`: "connections",
		`{"prompt":"x","connections":["billing"]}`:  "connections[0]",
		`{"prompt":"x","model":"none/none"}`:        "model",
	}
	for body, field := range wrong {
		a := l.do(t, "POST", "/v1/runs", body, "Authorization", "Bearer "+m.secret)
		if p := a.problem(t); len(p.Errors) != 1 || p.Errors[0].Field != field {
			t.Errorf("%s: %+v", body, p)
		}
	}
	if a, err := m.Account(l.ctx); err != nil || a.Held != 0 {
		t.Errorf("%+v, %v", a, err)
	}
}

func TestQueueFull(t *testing.T) {
	store := &fakeStore{admit: func(run.Admission) (run.Run, bool, error) {
		return run.Run{}, false, fmt.Errorf("admit: %w", run.ErrQueueFull)
	}}
	s := serve(t, Config{}, Deps{Store: store})
	a := s.member(t, "POST", "/v1/runs", `{"prompt":"x"}`)
	if p := a.problem(t); p.Code != CodeQueueFull || a.StatusCode != 429 || a.Header.Get("Retry-After") == "" {
		t.Errorf("%d %v %+v", a.StatusCode, a.Header, p)
	}
}

// Where the store knows when there will be room, the header says so in whole seconds, rounded up.
func TestQueueFullTellsWhenThereIsRoom(t *testing.T) {
	store := &fakeStore{admit: func(run.Admission) (run.Run, bool, error) {
		return run.Run{}, false, fmt.Errorf("admit: %w", &run.QueueFullError{RetryAfter: 12_340 * time.Millisecond})
	}}
	s := serve(t, Config{}, Deps{Store: store})
	a := s.do(t, "POST", "/v1/runs", `{"command":"true"}`, "Authorization", "Bearer "+memberSecret)
	if p := a.problem(t); p.Code != CodeQueueFull || a.Header.Get("Retry-After") != "13" || !strings.Contains(p.Detail, "12.3s") {
		t.Errorf("%d, Retry-After %q, %+v", a.StatusCode, a.Header.Get("Retry-After"), p)
	}
}
