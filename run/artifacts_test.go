package run

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// readAll reads an artifact in small pieces.
func (f *fixture) readAll(id ID, a Artifact) []byte {
	f.t.Helper()
	var all []byte
	for {
		b, err := f.ReadArtifact(f.ctx, id, a, int64(len(all)), 7_777)
		f.must(err)
		if len(b) == 0 {
			return all
		}
		all = append(all, b...)
	}
}

func TestArtifacts(t *testing.T) {
	f := newFixture(t)
	l := f.started(10_000)
	large := bytes.Repeat([]byte("0123456789\x00"), 300_000) // some pieces
	content := map[string][]byte{"z": []byte("last"), "empty": {}, "nul": {0}, "a/ü \"\n.txt": large, "b": large[:pieceBytes]}
	w := f.Artifacts(l)
	for _, name := range []string{"z", "empty", "nul", "a/ü \"\n.txt", "b"} {
		f.must(w.Begin(name, 0o640))
		for rest := content[name]; len(rest) > 0; {
			n := min(len(rest), 100_000)
			f.must(w.Write(f.ctx, rest[:n]))
			rest = rest[n:]
		}
	}
	list, err := w.Commit(f.ctx)
	f.must(err)
	got, err := f.ListArtifacts(f.ctx, "o", l.Run)
	f.must(err)
	f.same(len(got), 0) // not before the end
	_, err = f.Settle(f.ctx, l, Outcome{State: Succeeded, Files: &Files{Count: len(list), Bytes: 1}})
	f.must(err)
	got, err = f.ListArtifacts(f.ctx, "o", l.Run)
	f.must(err)
	if len(got) != len(content) {
		t.Fatalf("%d artifacts", len(got))
	}
	before := ""
	for i, a := range got {
		sum := sha256.Sum256(content[a.Path])
		f.same(Artifact{a.Path, a.Size, a.SHA256, a.Mode, a.Offset}, Artifact{a.Path, int64(len(content[a.Path])), hex.EncodeToString(sum[:]), "0640", a.Offset})
		f.same(list[i].SHA256, a.SHA256)
		if !bytes.Equal(f.readAll(l.Run, a), content[a.Path]) {
			t.Errorf("%q differs", a.Path)
		}
		if a.Path <= before {
			t.Errorf("%q after %q", a.Path, before)
		}
		before = a.Path
	}
	for _, key := range []string{f.keys.left(string(l.Run)), f.keys.content(string(l.Run))} {
		if ttl := f.rdb.PTTL(f.ctx, key).Val(); ttl < 719*time.Hour || ttl > 720*time.Hour {
			t.Errorf("%s lives %v", key, ttl)
		}
	}
	_, err = f.ListArtifacts(f.ctx, "other", l.Run)
	f.want(err, ErrNotFound)
	f.want(f.Artifacts(l).Begin("late", 0), nil)
	late := f.Artifacts(l)
	f.must(late.Begin("late", 0))
	_, err = late.Commit(f.ctx)
	f.want(err, ErrLeaseLost)
	f.balanced()
}

// A run that its node lost has no artifacts, also when some were on their way.
func TestArtifactsOfLostRun(t *testing.T) {
	f := newFixture(t)
	l := f.started(10_000)
	w := f.Artifacts(l)
	f.must(w.Begin("a", 0o644))
	f.must(w.Write(f.ctx, []byte("x")))
	_, err := w.Commit(f.ctx)
	f.must(err)
	_, lost, err := f.Reap(f.ctx, "n1")
	f.must(err)
	f.same(lost, 1)
	got, err := f.ListArtifacts(f.ctx, "o", l.Run)
	f.must(err)
	f.same(len(got), 0)
}

func TestArtifactPaths(t *testing.T) {
	f := newFixture(t)
	l := f.started(10_000)
	for _, bad := range []string{"", ".", "..", "/a", "a/", "a//b", "./a", "../a", "a/../b", "a/..", "\xff", "a\x00b", strings.Repeat("a", MaxArtifactPath+1), strings.Repeat("d/", 33) + "f"} {
		f.want(f.Artifacts(l).Begin(bad, 0o644), ErrRange)
	}
	w := f.Artifacts(l)
	for _, good := range []string{"a", "...", "-rf", "a\nb", `C:\x`, "%2e%2e", "a/b/c", strings.Repeat("a", MaxArtifactPath), "..a", " "} {
		f.must(w.Begin(good, 0o644))
	}
	f.want(w.Begin("a/b/c", 0o644), ErrRange)
	hidden := *l
	hidden.Spec.ZeroDataRetention = true
	f.want(f.Artifacts(&hidden).Begin("a", 0o644), ErrRange)
	f.want(f.Artifacts(l).Write(f.ctx, []byte("x")), ErrRange)
}

func TestArtifactPathProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := rapid.String().Draw(t, "path")
		if artifactPath(p) && (filepath.IsAbs(p) || !filepath.IsLocal(p) || filepath.Clean(p) != p) {
			t.Fatalf("%q leads elsewhere", p)
		}
	})
}

// Content goes when the shorter of the request's and the organisation's retention is over; the record of the money stays.
func TestRetention(t *testing.T) {
	for name, c := range map[string]struct {
		request, org int
		keep         time.Duration // 0: as long as the record
	}{
		"neither": {0, 0, 0}, "request": {3600, 0, time.Hour}, "organisation": {0, 7200, 2 * time.Hour},
		"shorter request": {3600, 7200, time.Hour}, "shorter organisation": {7200, 3600, time.Hour},
		"longer than the record": {100 * 86400, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			f.newOrg("o", 0, 10_000)
			o, err := f.RetainOrg(f.ctx, "o", c.org)
			f.must(err)
			f.same(o.Retention, c.org)
			canary := "canary-" + word(8)
			r, _, err := f.Admit(f.ctx, Admission{Org: "o", Spec: Spec{Command: canary, MaxCostMicros: 1000, RetentionSeconds: c.request}})
			f.must(err)
			l := f.take()
			f.begin(l)
			w := f.Artifacts(l)
			f.must(w.Begin(canary, 0o644))
			_, err = w.Commit(f.ctx)
			f.must(err)
			done, err := f.Settle(f.ctx, l, Outcome{State: Succeeded, Files: &Files{Count: 1}})
			f.must(err)
			if c.keep == 0 {
				f.same(done.ContentUntil == nil, true)
				f.clock.advance(100 * 24 * time.Hour)
				_, _, err = f.Reap(f.ctx, "")
				f.must(err)
				f.same(f.get(r.ID).Request.Command, canary)
				return
			}
			f.same(*done.ContentUntil, done.EndedAt.Add(c.keep))
			f.clock.advance(c.keep - time.Second)
			_, _, err = f.Reap(f.ctx, "")
			f.must(err)
			f.same(f.get(r.ID).Request.Command, canary)
			f.clock.advance(2 * time.Second)
			_, _, err = f.Reap(f.ctx, "")
			f.must(err)
			if strings.Contains(f.dump(), canary) {
				t.Error("content is left")
			}
			got := f.get(r.ID)
			f.same(got.Erased, true)
			f.same(got.Money, done.Money)
			f.same(f.rdb.ZCard(f.ctx, f.keys.due()).Val(), int64(0))
			f.balanced()
		})
	}
}

func TestRetentionRange(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 10_000)
	_, err := f.RetainOrg(f.ctx, "o", -1)
	f.want(err, ErrRange)
	_, err = f.RetainOrg(f.ctx, "nobody", 1)
	f.want(err, ErrNotFound)
	_, _, err = f.Admit(f.ctx, Admission{Org: "o", Spec: Spec{Command: "x", MaxCostMicros: 1000, RetentionSeconds: maxRetentionSeconds + 1}})
	f.want(err, ErrRange)
}

// What was erased leaves the files of Redis, what expired by itself within a day.
func TestErasedContentLeavesTheDisk(t *testing.T) {
	f, own := ownServer(t)
	f.newOrg("o", 0, 10_000)
	dir := filepath.Dir(own.Addr())
	canary := "canary-" + word(8)
	id := f.withCanary(canary, false)
	wait := func(what string, ok func() bool) {
		t.Helper()
		for end := time.Now().Add(15 * time.Second); !ok(); time.Sleep(20 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("not within 15 s: %s", what)
			}
		}
	}
	reap := func() {
		t.Helper()
		f.must(f.rdb.Del(f.ctx, f.keys.scrub()).Err()) // do not wait for the interval
		_, _, err := f.Reap(f.ctx, "")
		f.must(err)
	}
	wait("content in the append-only file", func() bool { return onDisk(t, dir, canary) })
	reap()
	if !onDisk(t, dir, canary) {
		t.Fatal("a reap alone removed it")
	}
	f.must(f.Delete(f.ctx, "o", id))
	wait("erased content gone", func() bool { reap(); return !onDisk(t, dir, canary) })

	expired := "canary-" + word(8)
	f.must(f.rdb.Set(f.ctx, f.keys.at("expiring"), expired, 10*time.Millisecond).Err())
	wait("in the append-only file", func() bool { return onDisk(t, dir, expired) })
	wait("expired", func() bool { return f.rdb.Exists(f.ctx, f.keys.at("expiring")).Val() == 0 })
	f.clock.advance(forgetEvery)
	wait("expired content gone", func() bool { reap(); return !onDisk(t, dir, expired) })
}
