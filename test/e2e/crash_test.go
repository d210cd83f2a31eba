package e2e

import (
	"context"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/vmm/provision"
)

// startOwn starts a server for one test, on the template of the shared one, and ends it with the test: nothing may be left
// then.
func startOwn(t *testing.T, env ...string) *server {
	t.Helper()
	data, err := os.MkdirTemp(binaries.dir, "own-")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(data, 0o711); err != nil {
		t.Fatal(err)
	}
	if err := linkTree(filepath.Join(shared.data, "templates"), filepath.Join(data, "templates")); err != nil {
		t.Fatal(err)
	}
	s, err := start(data, env...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.stop(); err != nil {
			t.Error(err)
		}
		residue, err := s.residue()
		if err != nil || residue.Total() > 0 {
			t.Errorf("left behind: %+v, %v", residue, err)
		}
		if err := os.RemoveAll(data); err != nil {
			t.Error(err)
		}
	})
	return s
}

// linkTree makes the directory to with the files of from, the very same ones: a copy's times and modes would be others, and
// a template with those is not used.
func linkTree(from, to string) error {
	return filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		if d.IsDir() {
			return os.Mkdir(filepath.Join(to, rel), 0o711)
		}
		return os.Link(path, filepath.Join(to, rel))
	})
}

// TestKilledServer kills the server in the middle of runs and starts it again: nothing is left of the machines, each run
// has its end, and the money is settled.
func TestKilledServer(t *testing.T) {
	s := startOwn(t, "EPHEMERAL_LEASE=4s", "EPHEMERAL_POOL_MAX_MACHINES=2")
	n := s.tenant(t, 1_000_000)
	ctx, cancel := context.WithTimeout(t.Context(), runLimit)
	defer cancel()
	started, err := n.CreateRun(ctx, client.Request{Command: "sleep 1000"}, client.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	n.until(t, started.Run.ID, run.EventWorkerStarted)
	var queued []run.ID // more than there are machines: they have not started
	for range 3 {
		c, err := n.CreateRun(ctx, client.Request{Command: "true"}, client.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		queued = append(queued, c.Run.ID)
	}
	time.Sleep(100 * time.Millisecond)
	s.kill()
	eventually(t, 20*time.Second, "machines die with the server", func() bool {
		residue, err := s.residue()
		if err != nil {
			t.Fatal(err)
		}
		return residue.Processes == 0
	})
	if err := s.launch(); err != nil {
		t.Fatal(err)
	}
	r := n.ended(t, started.Run.ID)
	if r.State != run.Failed || r.Error == nil || r.Error.Code != "node_lost" {
		t.Errorf("the started run ended %s, %+v; want failed: node_lost", r.State, r.Error)
	}
	checkMoney(t, r, r.Money.Reserved)
	if r.Money.Compute == 0 {
		t.Error("the started run was not charged for what it had begun")
	}
	if left := s.leftOf(t, r.Machine); len(left) > 0 {
		t.Errorf("left of machine %s: %v", r.Machine, left)
	}
	for _, id := range queued {
		r := n.ended(t, id)
		// One of them may have started before the kill.
		if r.State != run.Succeeded && (r.State != run.Failed || r.Error.Code != "node_lost") {
			t.Errorf("a queued run ended %s, %+v", r.State, r.Error)
		}
		checkMoney(t, r, r.Money.Reserved)
	}
	account, err := n.Account(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if account.Held != 0 {
		t.Errorf("%d micro-dollars are still held", account.Held)
	}
	if out, errs, err := s.cli(ctx, nil, "orgs", "audit"); err != nil {
		t.Errorf("audit: %v\n%s%s", err, out, errs)
	}
}

// eventually waits until a condition holds.
func eventually(t *testing.T, limit time.Duration, what string, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(limit); !holds(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Errorf("not within %s: %s", limit, what)
			return
		}
	}
}

// TestNodeReconcile kills a server with a machine at work, and has the command remove what is left; while the server runs
// it is refused.
func TestNodeReconcile(t *testing.T) {
	s := startOwn(t, "EPHEMERAL_POOL_MAX_MACHINES=2")
	n := s.tenant(t, 1_000_000)
	if out, errs, err := s.cli(t.Context(), nil, "node", "reconcile"); err == nil || !strings.Contains(errs, "the node runs") {
		t.Errorf("while it runs: %v\n%s%s", err, out, errs)
	}
	created, err := n.CreateRun(t.Context(), client.Request{Command: "sleep 1000"}, client.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	n.until(t, created.Run.ID, run.EventWorkerStarted)
	s.kill()
	var done struct{ Removed, Left provision.Residue }
	s.json(t, &done, "node", "reconcile")
	if done.Removed.Namespaces != 1 || done.Removed.Dirs < 1 || done.Left.Total() != 0 {
		t.Errorf("%+v", done)
	}
	done.Removed = provision.Residue{}
	s.json(t, &done, "node", "reconcile")
	if done.Removed.Total() != 0 || done.Left.Total() != 0 {
		t.Errorf("again: %+v", done)
	}
	if err := s.launch(); err != nil {
		t.Fatal(err)
	}
	if r := n.ended(t, created.Run.ID); r.State != run.Failed || r.Error.Code != "node_lost" {
		t.Errorf("ended %s, %+v", r.State, r.Error)
	}
}
