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
func onDisk(t testing.TB, text string) bool {
	t.Helper()
	found := false
	err := filepath.WalkDir(testDir, func(path string, d fs.DirEntry, err error) error {
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
	for end := time.Now().Add(10 * time.Second); !onDisk(f.t, mark); time.Sleep(20 * time.Millisecond) {
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
	events, _, err := f.Subscribe(f.ctx)
	f.must(err)
	canary := "canary-" + word(8)
	id := f.withCanary(canary, true)
	if strings.Contains(f.dump(), canary) {
		t.Error("content in Redis")
	}
	f.flushed()
	if onDisk(t, canary) {
		t.Error("content in a file")
	}
	r := f.get(id)
	f.same(r.Request, &Spec{Model: "replay/x", Shell: true, TimeoutSeconds: 7, MaxCostMicros: 1000, ZeroDataRetention: true})
	exit := 4
	f.same(r.Result, &Result{ExitCode: &exit})
	f.same(r.Error, &Error{Code: "model_error"})
	stored, err := f.Events(f.ctx, "o", id, 0)
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
	if onDisk(t, spec.Prompt) {
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
	if onDisk(t, spec.Prompt) {
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
