package e2e

import (
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/redisserver"
)

// TestAudit has a server of its own, since it doctors the books. Its leases are renewed every few minutes only, so a
// cancelled run shows that cancelling does not wait for that.
func TestAudit(t *testing.T) {
	s := startOwn(t, "EPHEMERAL_LEASE=20m")
	n := s.tenant(t, 1_000_000)
	n.finish(t, client.Request{Command: "true"})
	long, err := n.CreateRun(t.Context(), client.Request{Command: "sleep 1000", TimeoutSeconds: 3600, MaxCostMicros: 800_000}, client.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	n.until(t, long.Run.ID, run.EventWorkerStarted)
	if _, err := n.Cancel(t.Context(), long.Run.ID); err != nil {
		t.Fatal(err)
	}
	if r := n.ended(t, long.Run.ID); r.State != run.Cancelled {
		t.Errorf("ended %s, %+v; want cancelled", r.State, r.Error)
	}
	out, errs, err := s.cli(t.Context(), nil, "orgs", "audit")
	if err != nil || !strings.Contains(out, "conserved") || !strings.Contains(out, "$1.00") {
		t.Fatalf("audit of sound books: %v\n%s%s", err, out, errs)
	}

	url, err := redisserver.Find(s.data + "/redis")
	if err != nil {
		t.Fatal(err)
	}
	o, err := redis.ParseURL(url)
	if err != nil {
		t.Fatal(err)
	}
	rdb := redis.NewClient(o)
	defer rdb.Close()
	var account string
	for keys := rdb.Scan(t.Context(), 0, "*"+n.org+"*", 100).Iterator(); keys.Next(t.Context()); {
		if v, err := rdb.HGet(t.Context(), keys.Val(), "balance").Result(); err == nil && v != "" {
			account = keys.Val()
		}
	}
	if account == "" {
		t.Fatal("no account found to doctor")
	}
	if err := rdb.HIncrBy(t.Context(), account, "balance", 1).Err(); err != nil {
		t.Fatal(err)
	}
	out, errs, err = s.cli(t.Context(), nil, "orgs", "audit")
	if err == nil || !strings.Contains(out, "NOT CONSERVED") || !strings.Contains(out, n.org) {
		t.Errorf("audit of doctored books: %v\n%s%s", err, out, errs)
	}
}
