package run

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"strings"
	"testing"
	"time"
)

// newUpload is an upload of organisation o within generous limits.
func newUpload() NewUpload {
	return NewUpload{Org: "o", Most: 1 << 20, Life: time.Hour, MostBytes: 1 << 30, MostCount: 100}
}

// upload stores an upload in two pieces.
func (f *fixture) upload(n NewUpload, content string) Upload {
	f.t.Helper()
	w, err := f.BeginUpload(f.ctx, n)
	f.must(err)
	half := len(content) / 2
	f.must(w.Write(f.ctx, []byte(content[:half])))
	f.must(w.Write(f.ctx, []byte(content[half:])))
	u, replayed, err := w.Commit(f.ctx)
	f.must(err)
	f.same(replayed, false)
	return u
}

// using is the admission of a run with these uploads.
func using(ids ...UploadID) Admission {
	a := Admission{Org: "o", Spec: Spec{Command: "true", MaxCostMicros: 100, TimeoutSeconds: 10}, UploadBytes: 1 << 20}
	for i, id := range ids {
		a.Spec.Files = append(a.Spec.Files, File{Path: strings.Repeat("x", i+1), Upload: id})
	}
	return a
}

// uploadKeys are the keys that tell of uploads.
func (f *fixture) uploadKeys() []string {
	f.t.Helper()
	keys := append(f.rdb.Keys(f.ctx, f.keys.at("upload", "*")).Val(), f.rdb.Keys(f.ctx, f.keys.at("uploads")).Val()...)
	return append(keys, f.rdb.Keys(f.ctx, f.keys.uploads("*")).Val()...)
}

// nothingLeft checks that nothing is left of any upload.
func (f *fixture) nothingLeft() {
	f.t.Helper()
	if keys := f.uploadKeys(); len(keys) > 0 {
		f.t.Errorf("left: %v", keys)
	}
	if n := f.rdb.Get(f.ctx, f.keys.uploadBytes("o")).Val(); n != "0" {
		f.t.Errorf("%s bytes are counted", n)
	}
}

func (f *fixture) read(l *Lease, id UploadID) string {
	f.t.Helper()
	r, err := f.OpenUpload(f.ctx, l, id)
	f.must(err)
	b, err := io.ReadAll(r)
	f.must(err)
	return string(b)
}

func TestUpload(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 10_000)
	for _, content := range []string{"", "x", "\x00", strings.Repeat("0123456789\x00", 70_000)} {
		u := f.upload(newUpload(), content)
		sum := sha256.Sum256([]byte(content))
		now := f.clock.now()
		f.same(u, Upload{ID: u.ID, Size: int64(len(content)), SHA256: hex.EncodeToString(sum[:]), CreatedAt: now, ExpiresAt: now.Add(time.Hour)})
		got, err := f.Upload(f.ctx, "o", u.ID)
		f.must(err)
		f.same(got, u)
		r, _, err := f.Admit(f.ctx, using(u.ID))
		f.must(err)
		f.same(r.Request.Files[0].Upload, u.ID)
		l := f.take()
		f.same(l.Spec.Files, []File{{Path: "x", Upload: u.ID}})
		f.same(f.read(l, u.ID) == content, true)
		for _, org := range []string{"p", "", "o:x"} {
			_, err = f.Upload(f.ctx, org, u.ID)
			f.want(err, ErrNotFound)
			f.want(f.DeleteUpload(f.ctx, org, u.ID), ErrNotFound)
		}
		f.want(f.DeleteUpload(f.ctx, "o", u.ID), ErrState) // the run has not got it
		f.must(f.FreeUploads(f.ctx, l))
		f.must(f.FreeUploads(f.ctx, l))
		f.must(f.DeleteUpload(f.ctx, "o", u.ID))
		f.want(f.DeleteUpload(f.ctx, "o", u.ID), ErrNotFound)
		_, err = f.OpenUpload(f.ctx, l, u.ID)
		f.want(err, ErrUpload)
		_, err = f.Settle(f.ctx, l, Outcome{State: Failed})
		f.must(err)
	}
	f.nothingLeft()
	f.balanced()
}

func TestUploadRefusals(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 10_000)
	f.newOrg("p", 0, 10_000)
	whole := f.upload(newUpload(), strings.Repeat("x", 1000))
	n := newUpload()
	n.ZeroDataRetention = true
	hidden := f.upload(n, strings.Repeat("x", 1000))
	w, err := f.BeginUpload(f.ctx, newUpload())
	f.must(err)
	f.must(w.Write(f.ctx, []byte("part")))
	lost := f.upload(newUpload(), "lost")
	f.must(f.rdb.Del(f.ctx, f.keys.uploadContent(string(lost.ID))).Err())
	tests := map[string]struct {
		change func(*Admission)
		want   UploadError
	}{
		"unknown":                 {func(a *Admission) { a.Spec.Files[1].Upload = "upl_00000000000000000000000000000000" }, UploadError{File: 1}},
		"no id":                   {func(a *Admission) { a.Spec.Files[1].Upload = "upl_*" }, UploadError{File: 1}},
		"not whole":               {func(a *Admission) { a.Spec.Files[1].Upload = w.id }, UploadError{File: 1}},
		"content lost":            {func(a *Admission) { a.Spec.Files[1].Upload = lost.ID }, UploadError{File: 1}},
		"of another organisation": {func(a *Admission) { a.Org = "p" }, UploadError{File: 0}},
		"retained":                {func(a *Admission) { a.Spec.ZeroDataRetention = true }, UploadError{File: 0, Retained: true}},
		"retained, among others":  {func(a *Admission) { a.Spec.ZeroDataRetention, a.Spec.Files[0].Upload = true, hidden.ID }, UploadError{File: 1, Retained: true}},
		"too large together":      {func(a *Admission) { a.UploadBytes = 1999 }, UploadError{Total: 2000}},
		"after a file of the request": {func(a *Admission) {
			a.Spec.Files = []File{{Path: "a", Content: "a"}, {Path: "b", Upload: lost.ID}}
		}, UploadError{File: 1}},
	}
	for name, tt := range tests {
		a := using(whole.ID, whole.ID)
		tt.change(&a)
		_, _, err := f.Admit(f.ctx, a)
		var got *UploadError
		if !errors.As(err, &got) || *got != tt.want || !errors.Is(err, ErrUpload) {
			t.Errorf("%s: %v", name, err)
		}
	}
	f.clock.advance(time.Hour)
	_, _, err = f.Admit(f.ctx, using(whole.ID))
	f.want(err, ErrUpload) // expired
	f.same(f.account("o").Held, Micros(0))
	f.same(f.rdb.Exists(f.ctx, f.keys.holders(string(whole.ID))).Val(), int64(0))

	over, err := f.BeginUpload(f.ctx, NewUpload{Org: "o", Most: 4, Life: time.Hour, MostBytes: 1 << 30, MostCount: 100})
	f.must(err)
	f.must(over.Write(f.ctx, []byte("1234")))
	f.want(over.Write(f.ctx, []byte("5")), ErrRange)
	f.must(over.Abort(f.ctx))
	f.must(over.Abort(f.ctx))
	f.want(over.Write(f.ctx, []byte("")), nil)
	_, _, err = over.Commit(f.ctx)
	f.want(err, ErrNotFound)
	for _, change := range []func(*NewUpload){func(n *NewUpload) { n.Org = "none" }, func(n *NewUpload) { n.Org = "o:" }} {
		n := newUpload()
		change(&n)
		_, err := f.BeginUpload(f.ctx, n)
		f.want(err, ErrNotFound)
	}
	for _, change := range []func(*NewUpload){func(n *NewUpload) { n.Most = MaxUploadBytes + 1 }, func(n *NewUpload) { n.Life = 0 }, func(n *NewUpload) { n.Most = -1 }} {
		n := newUpload()
		change(&n)
		_, err := f.BeginUpload(f.ctx, n)
		f.want(err, ErrRange)
	}
}

// What an organisation has is bounded in number and bytes; what expires, is deleted or aborted makes room.
func TestUploadsAreBounded(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 10_000)
	n := NewUpload{Org: "o", Most: 100, Life: time.Hour, MostBytes: 300, MostCount: 4}
	full := func() {
		t.Helper()
		_, err := f.BeginUpload(f.ctx, n)
		f.want(err, ErrUploadsFull)
	}
	f.upload(n, strings.Repeat("x", 100))
	second := f.upload(n, strings.Repeat("x", 50))
	w, err := f.BeginUpload(f.ctx, n) // takes 100
	f.must(err)
	full()
	var e *UploadsFullError
	if _, err := f.BeginUpload(f.ctx, n); !errors.As(err, &e) || e.RetryAfter != uploadPause {
		t.Errorf("%v, %+v", err, e)
	}
	f.must(w.Abort(f.ctx))
	f.upload(n, strings.Repeat("x", 100))
	full()
	f.must(f.DeleteUpload(f.ctx, "o", second.ID))
	f.upload(n, "") // of which there are three now
	f.upload(n, "")
	n.MostBytes = 1000
	full() // by number
	f.clock.advance(time.Hour)
	f.upload(n, "y")
	f.same(f.rdb.Get(f.ctx, f.keys.uploadBytes("o")).Val(), "1")
	f.same(f.rdb.ZCard(f.ctx, f.keys.uploads("o")).Val(), int64(1))
}

// A run that waits keeps its uploads beyond their time; then they go, at once where their time is over.
func TestRunsHoldUploads(t *testing.T) {
	ends := map[string]func(f *fixture, id ID){
		"it has them":  func(f *fixture, _ ID) { l := f.take(); f.begin(l); f.must(f.FreeUploads(f.ctx, l)) },
		"cancelled":    func(f *fixture, id ID) { _, err := f.Cancel(f.ctx, "o", id); f.must(err) },
		"it fails":     func(f *fixture, _ ID) { _, err := f.Settle(f.ctx, f.take(), Outcome{State: Failed}); f.must(err) },
		"node is lost": func(f *fixture, _ ID) { f.begin(f.take()); _, _, err := f.Reap(f.ctx, "n1"); f.must(err) },
	}
	for name, end := range ends {
		for _, expired := range []bool{false, true} {
			t.Run(name, func(t *testing.T) {
				f := newFixture(t)
				f.newOrg("o", 0, 10_000)
				u := f.upload(newUpload(), "content")
				content := f.keys.uploadContent(string(u.ID))
				r, _, err := f.Admit(f.ctx, using(u.ID, u.ID))
				f.must(err)
				for _, key := range []string{content, f.keys.upload(string(u.ID))} {
					f.same(f.rdb.PTTL(f.ctx, key).Val(), time.Duration(-1)) // for ever
				}
				if expired {
					f.clock.advance(2 * time.Hour)
					_, _, err := f.Admit(f.ctx, using(u.ID))
					f.want(err, ErrUpload)
				} else {
					f.clock.advance(time.Minute)
				}
				l := f.take()
				f.same(f.read(l, u.ID), "content")
				f.must(f.Requeue(f.ctx, l))
				end(f, r.ID)
				if expired {
					f.nothingLeft()
				} else if ttl := f.rdb.PTTL(f.ctx, content).Val(); ttl < 58*time.Minute || ttl > 59*time.Minute {
					t.Errorf("lives on for %v", ttl)
				}
				f.balanced()
			})
		}
	}
}

// One upload serves many runs; erasing one of them removes it when no other waits for it.
func TestErasedRunsTakeTheirUploadsAlong(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 10_000)
	u := f.upload(newUpload(), "canary-"+word(8))
	first, _, err := f.Admit(f.ctx, using(u.ID))
	f.must(err)
	second, _, err := f.Admit(f.ctx, using(u.ID))
	f.must(err)
	_, err = f.Settle(f.ctx, f.take(), Outcome{State: Failed})
	f.must(err)
	f.must(f.Delete(f.ctx, "o", first.ID))
	l := f.take()
	f.same(l.Run, second.ID)
	f.same(len(f.read(l, u.ID)), 23)
	f.must(f.FreeUploads(f.ctx, l))
	f.nothingLeft()

	u = f.upload(newUpload(), "x")
	third, _, err := f.Admit(f.ctx, using(u.ID))
	f.must(err)
	_, err = f.Cancel(f.ctx, "o", third.ID)
	f.must(err)
	_, err = f.Upload(f.ctx, "o", u.ID)
	f.must(err)
	f.must(f.rdb.Del(f.ctx, f.keys.stain()).Err())
	f.must(f.Delete(f.ctx, "o", third.ID))
	f.nothingLeft()
	f.same(f.rdb.Exists(f.ctx, f.keys.stain()).Val(), int64(1))
}

func TestUploadIdempotency(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 10_000)
	n := newUpload()
	n.IdempotencyKey = "key of any text \x00"
	first := f.upload(n, "content")
	again := func(content string) (Upload, bool, error) {
		w, err := f.BeginUpload(f.ctx, n)
		f.must(err)
		f.must(w.Write(f.ctx, []byte(content)))
		return w.Commit(f.ctx)
	}
	u, replayed, err := again("content")
	f.must(err)
	f.same(replayed, true)
	f.same(u, first)
	_, _, err = again("contenu")
	f.want(err, ErrIdempotencyConflict)
	f.same(f.rdb.ZCard(f.ctx, f.keys.uploads("o")).Val(), int64(1))
	f.same(f.rdb.Get(f.ctx, f.keys.uploadBytes("o")).Val(), "7")
	f.must(f.DeleteUpload(f.ctx, "o", first.ID))
	u, replayed, err = again("contenu") // what the key made is gone
	f.must(err)
	f.same(replayed, false)
	f.must(f.DeleteUpload(f.ctx, "o", u.ID))
	f.nothingLeft()
}

// Under zero data retention an upload is nowhere but in memory, and gone when the runs that it was for have it.
func TestUploadUnderZeroDataRetention(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 10_000)
	n := newUpload()
	n.ZeroDataRetention = true
	canary := "canary-" + word(8)
	u := f.upload(n, canary)
	a := using(u.ID)
	a.Spec.ZeroDataRetention = true
	for range 2 {
		_, _, err := f.Admit(f.ctx, a)
		f.must(err)
	}
	for range 2 {
		l := f.take()
		f.begin(l)
		f.same(f.read(l, u.ID), canary)
		f.must(f.FreeUploads(f.ctx, l))
	}
	f.nothingLeft()
	if strings.Contains(f.dump(), canary) {
		t.Error("in Redis")
	}
	f.flushed()
	if onDisk(t, testDir, canary) {
		t.Error("in a file")
	}

	// A snapshot that Redis makes meanwhile has it, and is replaced: of one that was used, and of one that expires.
	f.upload(n, canary)
	f.must(f.rdb.BgRewriteAOF(f.ctx).Err())
	eventuallyTrue(t, "snapshot with the content", func() bool {
		return !strings.Contains(f.rdb.Info(f.ctx, "persistence").Val(), "_in_progress:1") && onDisk(t, testDir, canary)
	})
	f.clock.advance(2 * time.Hour)
	for _, key := range f.uploadKeys() { // as Redis does by itself
		if !strings.Contains(key, ":org:") && key != f.keys.hiddenUploads() {
			f.must(f.rdb.Del(f.ctx, key).Err())
		}
	}
	_, _, err := f.Reap(f.ctx, "")
	f.must(err)
	eventuallyTrue(t, "content is gone from the disk", func() bool { return !onDisk(t, testDir, canary) })
}

func eventuallyTrue(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !is(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal(what + ": not within 20 s")
		}
	}
}

// What is in the store is checked against what was uploaded before anybody takes it for whole.
func TestDamagedUpload(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 10_000)
	content := strings.Repeat("x", 600_000)
	for name, damage := range map[string]func(key string) error{
		"changed": func(key string) error { return f.rdb.SetRange(f.ctx, key, 300_000, "y").Err() },
		"shorter": func(key string) error { return f.rdb.Set(f.ctx, key, content[:599_999], 0).Err() },
		"gone":    func(key string) error { return f.rdb.Del(f.ctx, key).Err() },
	} {
		u := f.upload(newUpload(), content)
		_, _, err := f.Admit(f.ctx, using(u.ID))
		f.must(err)
		l := f.take()
		r, err := f.OpenUpload(f.ctx, l, u.ID)
		f.must(err)
		first := make([]byte, 1000)
		_, err = io.ReadFull(r, first)
		f.must(err)
		f.must(damage(f.keys.uploadContent(string(u.ID))))
		var rest bytes.Buffer
		if _, err := rest.ReadFrom(r); !errors.Is(err, ErrUpload) {
			t.Errorf("%s: %v after %d bytes", name, err, rest.Len())
		}
		_, err = f.Settle(f.ctx, l, Outcome{State: Failed})
		f.must(err)
	}
}
