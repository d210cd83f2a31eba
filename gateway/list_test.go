package gateway

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/run"
)

// TestPagingWhileRunsComeAndGo pages through 10,000 runs, several times over, while 50 a second are created and end.
func TestPagingWhileRunsComeAndGo(t *testing.T) {
	const kept = 10_000
	l := newLive(t, Config{})
	m := l.newMember("o", 1_000_000_000)
	_, err := l.store.LimitOrg(l.ctx, "o", run.Limits{Concurrency: 100, Queue: 100_000})
	l.must(err)
	admit := func() (run.ID, error) {
		r, _, err := l.store.Admit(l.ctx, run.Admission{Org: "o", Key: m.keyID, Spec: run.Spec{Command: "true", MaxCostMicros: 200, TimeoutSeconds: 1}})
		return r.ID, err
	}
	before := make([]run.ID, kept)
	var fill sync.WaitGroup
	for part := range 8 {
		fill.Go(func() {
			for i := part; i < kept; i += 8 {
				var err error
				if before[i], err = admit(); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	fill.Wait()
	if t.Failed() {
		return
	}
	ctx, stop := context.WithCancel(l.ctx)
	defer stop()
	var churn sync.WaitGroup
	var created, ended atomic.Int64
	churn.Go(func() {
		tick := time.NewTicker(time.Second / 50)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			if _, err := admit(); err != nil {
				t.Error(err)
				return
			}
			created.Add(1)
			lease, err := l.store.Take(l.ctx, "n1")
			if err == nil {
				err = l.store.Start(l.ctx, lease, run.Start{At: time.Now(), Machine: "m1", Image: "base", Isolation: "emulated"})
			}
			if err == nil {
				_, err = l.store.Settle(l.ctx, lease, run.Outcome{At: time.Now(), State: run.Succeeded})
			}
			if err != nil {
				t.Error(err)
				return
			}
			ended.Add(1)
		}
	})
	transport := &http.Transport{}
	defer transport.CloseIdleConnections()
	plain, err := client.New(l.url, m.secret, client.WithTransport(transport))
	l.must(err)
	for _, limit := range []int{100, 37} {
		seen := map[run.ID]int{}
		p := run.Page{Limit: limit}
		pages := 0
		for {
			list, err := plain.Runs(l.ctx, p)
			l.must(err)
			pages++
			for i, r := range list.Runs {
				seen[r.ID]++
				if i > 0 && r.ID >= list.Runs[i-1].ID {
					t.Fatalf("%s comes after %s", r.ID, list.Runs[i-1].ID)
				}
			}
			if p.Cursor = list.NextCursor; p.Cursor == "" {
				break
			}
			time.Sleep(10 * time.Millisecond)
		}
		missing, twice := 0, 0
		for _, id := range before {
			if seen[id] == 0 {
				missing++
			}
		}
		for _, n := range seen {
			if n > 1 {
				twice++
			}
		}
		if missing+twice > 0 {
			t.Errorf("%d pages of %d: %d runs missing, %d shown twice", pages, limit, missing, twice)
		}
	}
	stop()
	churn.Wait()
	t.Logf("%d runs created and %d ended meanwhile", created.Load(), ended.Load())
	if created.Load() < 50 || ended.Load() < 50 {
		t.Errorf("only %d runs created and %d ended meanwhile", created.Load(), ended.Load())
	}
}

func TestListFilters(t *testing.T) {
	l := newLive(t, Config{})
	m := l.newMember("o", 10_000_000)
	create := func(team string) run.Run {
		c, err := m.CreateRun(l.ctx, client.Request{Command: "true", Metadata: map[string]string{"team": team, "a[b]": "c&d"}}, client.CreateOptions{})
		l.must(err)
		return c.Run
	}
	red, blue := create("red"), create("blue")
	ids := func(p run.Page) (ids []run.ID) {
		list, err := m.Runs(l.ctx, p)
		l.must(err)
		for _, r := range list.Runs {
			ids = append(ids, r.ID)
		}
		return ids
	}
	for name, tt := range map[string]struct {
		page run.Page
		want []run.ID
	}{
		"metadata": {run.Page{Metadata: map[string]string{"team": "red"}}, []run.ID{red.ID}},
		"two":      {run.Page{Metadata: map[string]string{"team": "blue", "a[b]": "c&d"}}, []run.ID{blue.ID}},
		"from":     {run.Page{QueuedFrom: blue.QueuedAt}, []run.ID{blue.ID}},
		"to":       {run.Page{QueuedTo: blue.QueuedAt}, []run.ID{red.ID}},
		"state":    {run.Page{State: run.Running}, nil},
		"all":      {run.Page{State: run.Queued}, []run.ID{blue.ID, red.ID}},
	} {
		if got := ids(tt.page); fmt.Sprint(got) != fmt.Sprint(tt.want) {
			t.Errorf("%s: %v, want %v", name, got, tt.want)
		}
	}
	a := l.do(t, "GET", "/v1/runs?limit=1&metadata[a%5Bb%5D]=c%26d", "", "Authorization", "Bearer "+m.secret)
	link := a.Header.Get("Link")
	next, ok := strings.CutSuffix(link, `>; rel="next"`)
	if u, err := url.Parse(strings.TrimPrefix(next, "<")); !ok || err != nil || u.Query().Get("metadata[a[b]]") != "c&d" || u.Query().Get("cursor") == "" {
		t.Fatalf("Link %q", link)
	}
	rest := l.do(t, "GET", strings.TrimPrefix(next, "<"), "", "Authorization", "Bearer "+m.secret)
	if rest.StatusCode != 200 || !strings.Contains(rest.body, string(red.ID)) || strings.Contains(rest.body, string(blue.ID)) || rest.Header.Get("Link") != "" {
		t.Errorf("next page: %d %s", rest.StatusCode, rest.body)
	}
	for query, field := range map[string]string{
		"queued_from=yesterday": "queued_from", "queued_to=2026": "queued_to", "metadata[]=x": "metadata[]", "metadata=x": "metadata",
		"state=queued&state=running": "state", "state=": "state", "limit=": "limit", "metadata[x=y": "metadata[x",
	} {
		p := l.do(t, "GET", "/v1/runs?"+query, "", "Authorization", "Bearer "+m.secret).problem(t)
		if p.Code != CodeInvalidParameter || len(p.Errors) != 1 || p.Errors[0].Field != field {
			t.Errorf("%s: %+v", query, p)
		}
	}
	if p := l.do(t, "GET", "/v1/runs?limit=%zz", "", "Authorization", "Bearer "+m.secret).problem(t); p.Code != CodeInvalidParameter {
		t.Errorf("%+v", p)
	}
}

func TestUsage(t *testing.T) {
	l := newLive(t, Config{})
	m := l.newMember("o", 10_000_000)
	_, err := m.Cancel(l.ctx, l.create(m).ID)
	l.must(err)
	now := time.Now()
	days, err := m.Usage(l.ctx, now.AddDate(0, 0, -6), now)
	l.must(err)
	if len(days) != 7 || days[6].Runs+days[5].Runs != 1 { // midnight may have passed
		t.Errorf("%+v", days)
	}
	ofOrg, err := l.admin.OrgUsage(l.ctx, "o", now.AddDate(0, 0, -6), now)
	l.must(err)
	if fmt.Sprint(ofOrg) != fmt.Sprint(days) {
		t.Errorf("%+v, want %+v", ofOrg, days)
	}
	if a := l.do(t, "GET", "/v1/usage", "", "Authorization", "Bearer "+m.secret); strings.Count(a.body, `"day"`) != usageDays {
		t.Errorf("by default: %s", a.body)
	}
	for query, field := range map[string]string{"from=x": "from", "to=2026-13-01": "to", "from=2020-01-01&to=2021-01-02": "from", "from=2026-01-02&to=2026-01-01": "from", "day=1": "day"} {
		p := l.do(t, "GET", "/v1/usage?"+query, "", "Authorization", "Bearer "+m.secret).problem(t)
		if p.Code != CodeInvalidParameter || len(p.Errors) != 1 || p.Errors[0].Field != field {
			t.Errorf("%s: %+v", query, p)
		}
	}
}

func TestMembersAndNodes(t *testing.T) {
	l := newLive(t, Config{})
	m := l.newMember("o", 0)
	ada, err := l.admin.AddMember(l.ctx, "o", "Ada")
	l.must(err)
	members, err := l.admin.Members(l.ctx, "o")
	l.must(err)
	key, err := l.admin.CreateKey(l.ctx, "o", "laptop", run.OfMember(ada.ID), run.ExpiresAt(time.Now().Add(2*time.Second)))
	l.must(err)
	if len(members) != 1 || members[0] != ada || key.Member != ada.ID || key.ExpiresAt.IsZero() {
		t.Errorf("%+v, %+v", members, key)
	}
	_, err = l.as(key.Secret).Account(l.ctx)
	l.must(err)
	_, err = l.admin.CreateKey(l.ctx, "o", "laptop", run.OfMember("mem_0123456789abcdef"))
	wantProblem(t, err, CodeInvalidRequest)
	_, err = l.admin.CreateKey(l.ctx, "o", "laptop", run.ExpiresAt(time.Now().Add(-time.Hour)))
	wantProblem(t, err, CodeInvalidRequest)
	l.must(l.admin.RemoveMember(l.ctx, "o", ada.ID))
	_, err = l.as(key.Secret).Account(l.ctx)
	wantProblem(t, err, CodeUnauthenticated)
	wantProblem(t, l.admin.RemoveMember(l.ctx, "o", ada.ID), CodeNotFound)
	_, err = m.Members(l.ctx, "o")
	wantProblem(t, err, CodeForbidden)

	short, err := l.admin.CreateKey(l.ctx, "o", "short", run.ExpiresAt(time.Now().Add(time.Second)))
	l.must(err)
	c := l.as(short.Secret)
	_, err = c.Account(l.ctx)
	l.must(err)
	eventually(t, "the key expired", func() bool { _, err := c.Account(l.ctx); return err != nil })

	l.must(l.store.Announce(l.ctx, run.Node{ID: "n1", Version: "dev", Hypervisor: "qemu 10", Isolation: "emulated", Image: "sha256:x", Slots: 4, StartedAt: time.Now()}))
	nodes, err := l.admin.Nodes(l.ctx)
	l.must(err)
	if len(nodes) != 1 || nodes[0].ID != "n1" || !nodes[0].Alive {
		t.Errorf("%+v", nodes)
	}
}

// wantProblem fails unless err is a problem of the code.
func wantProblem(t *testing.T, err error, code Code) {
	t.Helper()
	var p *client.Problem
	if !asProblem(err, &p) || p.Code != string(code) {
		t.Errorf("%v, want %s", err, code)
	}
}

// TestRevokedKeys counts how long a revoked key still works, at two gateways.
func TestRevokedKeys(t *testing.T) {
	a := newLive(t, Config{Heartbeat: time.Hour})
	m := a.newMember("o", 10_000_000)
	second := serve(t, Config{Heartbeat: time.Hour}, Deps{Store: a.store, FirstSlice: 200})
	r := a.create(m)
	status := func(s *served) int {
		return s.do(t, "GET", "/v1/account", "", "Authorization", "Bearer "+m.secret).StatusCode
	}
	if status(a.served) != 200 || status(second) != 200 {
		t.Fatal("the key does not work")
	}
	_, br := a.open(m, r.ID, "")
	waiting := make(chan answer, 1)
	go func() {
		waiting <- a.do(t, "GET", "/v1/runs/"+string(r.ID), "", "Authorization", "Bearer "+m.secret, "Prefer", "wait=2")
	}()
	eventually(t, "stream and wait are there", func() bool { return a.hub.size() == 2 })
	a.must(a.admin.RevokeKey(a.ctx, m.keyID))
	for range 500 {
		for _, s := range []*served{a.served, second} {
			if got := status(s); got != 401 {
				t.Fatalf("a revoked key got %d", got)
			}
		}
	}
	if got := <-waiting; got.StatusCode != 401 {
		t.Errorf("an answer that was waited for: %d", got.StatusCode)
	}
	if _, err := http.ReadResponse(br, nil); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the stream has ended", func() bool { return strings.Contains(a.log.String(), `"end":"key_revoked"`) })
}
