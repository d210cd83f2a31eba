package gateway

import (
	"encoding/csv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/run"
)

func TestStatement(t *testing.T) {
	l := newLive(t, Config{})
	m, other := l.newMember("o", 1_000_000), l.newMember("p", 500)
	r := l.create(m)
	lease := l.take()
	l.start(lease)
	_, err := l.store.Authorize(l.ctx, lease, run.Call{ID: "c", Kind: run.KindCompute, Max: 200})
	l.must(err)
	l.must(l.store.Capture(l.ctx, lease, "c", 200))
	l.settle(lease)
	_, err = l.admin.Credit(l.ctx, "o", -1000, "mistake")
	l.must(err)
	collect := func(c *client.Client, org string, after int64) (all []run.Entry) {
		t.Helper()
		entries := c.Statement(l.ctx, after)
		if org != "" {
			entries = c.OrgStatement(l.ctx, org, after)
		}
		for e, err := range entries {
			l.must(err)
			all = append(all, e)
		}
		return all
	}
	mine := collect(m.Client, "", 0)
	charged := mine[1]
	if len(mine) != 3 || charged.Kind != run.EntryCharge || charged.Run != r.ID || charged.Amount >= 0 || mine[2].Kind != run.EntryCorrection ||
		mine[2].Balance != mine[0].Amount+charged.Amount-1000 {
		t.Fatalf("%+v", mine)
	}
	if d := cmp.Diff(mine, collect(l.admin, "o", 0)); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff(mine[2:], collect(m.Client, "", 2)); d != "" {
		t.Error(d)
	}
	if got := collect(other.Client, "", 0); len(got) != 1 || got[0].Amount != 500 {
		t.Errorf("another organisation sees %+v", got)
	}

	a := l.do(t, "GET", "/v1/account/statement?limit=2", "", "Authorization", "Bearer "+m.secret, "Accept", "text/csv")
	rows, err := csv.NewReader(strings.NewReader(a.body)).ReadAll()
	if err != nil || len(rows) != 3 || rows[0][0] != "number" || rows[2][4] != string(r.ID) || !strings.HasPrefix(a.Header.Get("Content-Type"), "text/csv") {
		t.Errorf("%s %q %v", a.Header.Get("Content-Type"), a.body, err)
	}
	next, found := strings.CutPrefix(a.Header.Get("Link"), "<")
	next, _, _ = strings.Cut(next, ">")
	a = l.do(t, "GET", next, "", "Authorization", "Bearer "+m.secret, "Accept", "text/csv")
	if rows, err := csv.NewReader(strings.NewReader(a.body)).ReadAll(); !found || err != nil || len(rows) != 2 || rows[1][0] != "3" || a.Header.Get("Link") != "" {
		t.Errorf("%q: %q %v", next, a.body, err)
	}
	for query, code := range map[string]int{"?after=-1": 400, "?after=x": 400, "?limit=0": 400, "?limit=1001": 400, "?before=1": 400, "?after=99": 200} {
		if a := l.do(t, "GET", "/v1/account/statement"+query, "", "Authorization", "Bearer "+m.secret); a.StatusCode != code {
			t.Errorf("%s: %d %s", query, a.StatusCode, a.body)
		}
	}
	if a := l.do(t, "GET", "/v1/orgs/p/statement", "", "Authorization", "Bearer "+m.secret); a.StatusCode != 403 {
		t.Errorf("a member reads another organisation's statement: %d", a.StatusCode)
	}
}

func TestLimitsOverHTTP(t *testing.T) {
	l := newLive(t, Config{})
	m := l.newMember("o", 1_000_000)
	got, err := m.Limits(l.ctx)
	l.must(err)
	if got != (client.OwnLimits{}) {
		t.Errorf("without any: %+v", got)
	}
	org, key := run.Limits{Concurrency: 7, Queue: 3}, run.Limits{Concurrency: 1, Queue: 2}
	set, err := l.admin.LimitOrg(l.ctx, "o", org)
	if err != nil || set != org {
		t.Errorf("%+v, %v", set, err)
	}
	if set, err = l.admin.LimitKey(l.ctx, m.keyID, key); err != nil || set != key {
		t.Errorf("%+v, %v", set, err)
	}
	if set, err = l.admin.OrgLimits(l.ctx, "o"); err != nil || set != org {
		t.Errorf("%+v, %v", set, err)
	}
	if set, err = l.admin.KeyLimits(l.ctx, m.keyID); err != nil || set != key {
		t.Errorf("%+v, %v", set, err)
	}
	if got, err = m.Limits(l.ctx); err != nil || got != (client.OwnLimits{Org: org, Key: key}) {
		t.Errorf("%+v, %v", got, err)
	}
	l.create(m)
	l.create(m)
	if a := l.do(t, "POST", "/v1/runs", `{"command":"true"}`, "Authorization", "Bearer "+m.secret); a.StatusCode != 429 {
		t.Errorf("a third run beside the key's limit: %d %s", a.StatusCode, a.body)
	}
	for _, body := range []string{`{"concurrency":1}`, `{"concurrency":-1,"queue":0}`, `{"concurrency":1,"queue":1000001}`, `{"concurrency":1,"queue":1,"x":1}`,
		`{"concurrency":"1","queue":1}`, `[]`} {
		for _, path := range []string{"/v1/orgs/o/limits", "/v1/keys/" + m.keyID + "/limits"} {
			if a := l.do(t, "PUT", path, body, "Authorization", "Bearer "+l.rootSecret); a.StatusCode != 400 {
				t.Errorf("PUT %s %s: %d %s", path, body, a.StatusCode, a.body)
			}
		}
	}
	for _, path := range []string{"/v1/orgs/nobody/limits", "/v1/keys/key_0000000000000000/limits", "/v1/keys/%3A/limits"} {
		if a := l.do(t, "GET", path, "", "Authorization", "Bearer "+l.rootSecret); a.StatusCode != 404 {
			t.Errorf("GET %s: %d", path, a.StatusCode)
		}
	}
	if a := l.do(t, "PUT", "/v1/orgs/o/limits", `{"concurrency":0,"queue":0}`, "Authorization", "Bearer "+m.secret); a.StatusCode != 403 {
		t.Errorf("a member lifts its own limits: %d", a.StatusCode)
	}
}
