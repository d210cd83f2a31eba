package gateway

import (
	"testing"

	"github.com/ephemeral-run/ephemeral/run/pools"
)

func TestPools(t *testing.T) {
	l := newLive(t, Config{})
	store := pools.New(l.store)
	if all, err := l.admin.Pools(l.ctx); err != nil || len(all) != 0 {
		t.Errorf("%v, %v", all, err)
	}
	a := l.do(t, "GET", "/v1/pools/base-1x512", "", "Authorization", "Bearer "+l.newMember("o", 0).secret)
	if p := a.problem(t); p.Code != CodeForbidden {
		t.Errorf("a member sees pools: %+v", p)
	}
	_, err := l.admin.Pool(l.ctx, "base-1x512")
	refusedWith(t, err, CodeNotFound)
	five := 5
	_, err = l.admin.SetPool(l.ctx, "base-1x512", pools.Policy{MinReady: &five}, -1)
	refusedWith(t, err, CodeNotFound)

	l.must(store.Report(l.ctx, pools.Report{
		Pool: "base-1x512", Node: "n1", Image: "sha256:00", VCPUs: 1, MemoryMiB: 512, Rest: "paused", State: "serving", Ready: 2, Leased: 3,
		Target: 2, Reason: "because", Circuit: "closed", Decisions: []pools.Decision{},
	}))
	got, err := l.admin.Pool(l.ctx, "base-1x512")
	l.must(err)
	if got.Ready != 2 || got.Leased != 3 || got.Policy.Revision != 0 || got.Nodes[0].Reason != "because" {
		t.Errorf("%+v", got)
	}
	set, err := l.admin.SetPool(l.ctx, "base-1x512", pools.Policy{MinReady: &five, DrainedNodes: []string{"n2"}}, 0)
	l.must(err)
	if set.Policy.Revision != 1 || *set.Policy.MinReady != 5 || set.Policy.MaxReady != nil || !set.Policy.Drains("n2") || set.Policy.Drains("n1") {
		t.Errorf("%+v", set.Policy)
	}
	_, err = l.admin.SetPool(l.ctx, "base-1x512", pools.Policy{}, 0)
	refusedWith(t, err, CodeConflict)
	if all, err := l.admin.Pools(l.ctx); err != nil || len(all) != 1 || all[0].Policy.Revision != 1 {
		t.Errorf("%+v, %v", all, err)
	}
	secret := l.adminSecret(t)
	for body, field := range map[string]string{
		`{"min_ready": -1}`:                         "min_ready",
		`{"min_ready": 3, "max_ready": 2}`:          "max_ready",
		`{"max_machines": 0}`:                       "max_machines",
		`{"target_miss_rate": 1}`:                   "target_miss_rate",
		`{"max_age_seconds": "1h"}`:                 "max_age_seconds",
		`{"refill_concurrency": 1.5}`:               "refill_concurrency",
		`{"drained_nodes": ["a b"]}`:                "drained_nodes",
		`{"ready": 5}`:                              "ready",
		`{"drained": 1}`:                            "drained",
		`{"min_ready": 99999999999999999999}`:       "min_ready",
		`{"target_miss_rate": 1e999}`:               "target_miss_rate",
		`{"drained_nodes": "everything"}`:           "drained_nodes",
		`{"max_age_seconds": -1, "drained": false}`: "max_age_seconds",
	} {
		a := l.do(t, "PUT", "/v1/pools/base-1x512", body, "Authorization", "Bearer "+secret)
		if p := a.problem(t); p.Code != CodeInvalidRequest || len(p.Errors) == 0 || p.Errors[0].Field != field {
			t.Errorf("%s: %+v", body, p)
		}
	}
}
