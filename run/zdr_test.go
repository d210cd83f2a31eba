package run

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// onDisk tells whether a file of the Redis directory holds the text.
func onDisk(t testing.TB, dir, text string) bool {
	t.Helper()
	found := false
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return nil // a rewrite removes files meanwhile
		}
		raw, err := os.ReadFile(path)
		if err == nil && strings.Contains(string(raw), text) {
			t.Logf("found in %s", filepath.Base(path))
			found = true
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// flushed waits until what was written is in the append-only file.
func (f *fixture) flushed() {
	f.t.Helper()
	mark := "mark-" + word(8)
	f.must(f.rdb.Set(f.ctx, f.keys.at("mark"), mark, 0).Err())
	for end := time.Now().Add(10 * time.Second); !onDisk(f.t, testDir, mark); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			f.t.Fatal("the append-only file does not grow")
		}
	}
}

// Under zero data retention no content is in Redis or in a file of it after the run, also none that was there for a
// while; live subscribers get it whole.
func TestZeroDataRetention(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 10_000)
	events, _, err := f.Subscribe(f.ctx, nil)
	f.must(err)
	canary := "canary-" + word(8)
	id := f.withCanary(canary, true)
	if strings.Contains(f.dump(), canary) {
		t.Error("content in Redis")
	}
	f.flushed()
	if onDisk(t, testDir, canary) {
		t.Error("content in a file")
	}
	r := f.get(id)
	f.same(r.Request, &Spec{Model: "replay/x", Shell: true, TimeoutSeconds: 7, MaxCostMicros: 1000, ZeroDataRetention: true})
	exit := 4
	f.same(r.Result, &Result{ExitCode: &exit})
	f.same(r.Error, &Error{Code: "model_error"})
	stored, _, err := f.Events(f.ctx, "o", id, 0)
	f.must(err)
	f.same(stored[2].Data, ShellData{Outcome: "exited"})
	f.same(stored[3].Data, ShellData{ExitCode: 1})
	for i, s := range stored {
		select {
		case e := <-events:
			f.same(e.Seq, s.Seq)
			if i == 2 {
				f.same(e.Data, ShellData{Command: canary, Output: canary, Outcome: "exited"})
			}
			if e.Type == "failed" {
				f.same(e.Data.(EndedData).Output, canary)
			}
		case <-time.After(5 * time.Second):
			t.Fatalf("live event %d missing", s.Seq)
		}
	}
	f.balanced()
}

func TestQueuedContentUnderZeroDataRetention(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 10_000)
	canary := "canary-" + word(8)
	spec := Spec{Prompt: canary, MaxCostMicros: 1000, ZeroDataRetention: true}
	r, _, err := f.Admit(f.ctx, Admission{Org: "o", Spec: spec})
	f.must(err)
	f.same(f.get(r.ID).Request, &Spec{MaxCostMicros: 1000, ZeroDataRetention: true})
	f.flushed()
	if onDisk(t, testDir, spec.Prompt) {
		t.Error("waiting content in a file")
	}
	l := f.take()
	f.same(l.Spec, spec)
	if strings.Contains(f.dump(), canary) {
		t.Error("content is left after take")
	}
	f.must(f.Requeue(f.ctx, l)) // its node still has the content
	l = f.take()
	f.same(l.Spec, spec)
	f.must(f.Requeue(f.ctx, l))
	_, err = f.Cancel(f.ctx, "o", r.ID)
	f.must(err)
	if strings.Contains(f.dump(), canary) {
		t.Error("content is left after cancel")
	}
	f.flushed()
	if onDisk(t, testDir, spec.Prompt) {
		t.Error("content in a file")
	}
	f.balanced()
}

// A restart of Redis loses what was kept in memory only: the run ends, says why, and costs nothing.
func TestLostContent(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 10_000)
	spec := Spec{Prompt: "p", MaxCostMicros: 1000, ZeroDataRetention: true}
	r, _, err := f.Admit(f.ctx, Admission{Org: "o", Spec: spec})
	f.must(err)
	other := f.admit("o", 1000)
	f.must(f.rdb.Del(f.ctx, f.keys.spec(string(r.ID))).Err())
	f.same(f.take().Run, other.ID)
	got := f.get(r.ID)
	f.same(got.State, Failed)
	f.same(got.Error.Code, "content_lost")
	f.same(got.Money, Money{Reserved: 1000, Released: 1000})
	f.balanced()
}

// A dead node had the only copy: the run ends.
func TestReapUnderZeroDataRetention(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 10_000)
	r, _, err := f.Admit(f.ctx, Admission{Org: "o", Spec: Spec{Prompt: "p", MaxCostMicros: 1000, ZeroDataRetention: true}})
	f.must(err)
	f.take()
	requeued, lost, err := f.Reap(f.ctx, "n1")
	f.must(err)
	f.same([2]int{requeued, lost}, [2]int{0, 1})
	f.same(f.get(r.ID).Error.Code, "node_lost")
	f.balanced()
}

// A snapshot that Redis made while content waited is replaced.
func TestSnapshotWithContentIsReplaced(t *testing.T) {
	f, own := ownServer(t)
	f.newOrg("o", 0, 10_000)
	dir := filepath.Dir(own.Addr())
	canary := "canary-" + word(8)
	_, _, err := f.Admit(f.ctx, Admission{Org: "o", Spec: Spec{Prompt: canary, MaxCostMicros: 1000, ZeroDataRetention: true}})
	f.must(err)
	f.must(f.rdb.BgRewriteAOF(f.ctx).Err())
	f.must(f.rdb.Do(f.ctx, "BGSAVE", "SCHEDULE").Err())
	wait := func(what string, ok func() bool) {
		t.Helper()
		for end := time.Now().Add(15 * time.Second); !ok(); time.Sleep(20 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("not within 15 s: %s", what)
			}
		}
	}
	wait("content in the snapshots", func() bool { return onDisk(t, dir, canary) })
	l := f.take()
	f.begin(l)
	_, err = f.Settle(f.ctx, l, Outcome{State: Succeeded})
	f.must(err)
	wait("content gone from the disk", func() bool {
		f.must(f.rdb.Del(f.ctx, f.keys.scrub()).Err()) // do not wait for the interval
		if _, _, err := f.Reap(f.ctx, ""); err != nil {
			t.Fatal(err)
		}
		return !onDisk(t, dir, canary)
	})
	wait("no more snapshots than needed", func() bool {
		_, _, err := f.Reap(f.ctx, "")
		f.must(err)
		return f.rdb.Exists(f.ctx, f.keys.stain()).Val() == 0
	})
	f.balanced()
}
