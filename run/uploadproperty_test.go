package run

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"pgregory.net/rapid"
)

// TestUploadBooks has uploads come, be used, erased and expire in any order. All the time what is counted to the organisation is what
// it has, what a waiting run holds is there, and when all is over nothing is left.
func TestUploadBooks(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		f := newFixture(t)
		f.newOrg("o", 0, 1_000_000)
		f.newOrg("p", 0, 0)
		var open []*UploadWriter
		var whole []Upload
		var leases []*Lease
		var ended []ID
		held := map[ID][]UploadID{} // by runs that wait, or have not got them
		let := func(id ID) { delete(held, id) }
		pick := func(n int) int { return rapid.IntRange(0, n-1).Draw(rt, "which") }
		must := func(err error, allowed ...error) bool {
			for _, a := range allowed {
				if errors.Is(err, a) {
					return false
				}
			}
			if err != nil {
				rt.Fatal(err)
			}
			return true
		}
		rt.Repeat(map[string]func(*rapid.T){
			"begin": func(rt *rapid.T) {
				n := NewUpload{Org: "o", Most: 50, Life: time.Hour, MostBytes: 200, MostCount: 5, ZeroDataRetention: rapid.Bool().Draw(rt, "zdr"),
					IdempotencyKey: rapid.SampledFrom([]string{"", "k"}).Draw(rt, "key")}
				if w, err := f.BeginUpload(f.ctx, n); must(err, ErrUploadsFull) {
					open = append(open, w)
				}
			},
			"write": func(rt *rapid.T) {
				if len(open) > 0 {
					must(open[pick(len(open))].Write(f.ctx, []byte(strings.Repeat("x", rapid.IntRange(1, 30).Draw(rt, "bytes")))), ErrRange, ErrNotFound)
				}
			},
			"commit": func(rt *rapid.T) {
				if len(open) == 0 {
					return
				}
				i := pick(len(open))
				u, replayed, err := open[i].Commit(f.ctx)
				if must(err, ErrNotFound, ErrIdempotencyConflict, ErrUpload) && !replayed {
					whole = append(whole, u)
				}
				open = append(open[:i], open[i+1:]...)
			},
			"abort": func(*rapid.T) {
				if len(open) > 0 {
					i := pick(len(open))
					must(open[i].Abort(f.ctx))
					open = append(open[:i], open[i+1:]...)
				}
			},
			"admit": func(rt *rapid.T) {
				if len(whole) == 0 {
					return
				}
				a := using(whole[pick(len(whole))].ID, whole[pick(len(whole))].ID)
				a.Spec.ZeroDataRetention = rapid.Bool().Draw(rt, "zdr")
				if r, _, err := f.Admit(f.ctx, a); must(err, ErrUpload) {
					held[r.ID] = []UploadID{a.Spec.Files[0].Upload, a.Spec.Files[1].Upload}
				}
			},
			"take": func(*rapid.T) {
				l, err := f.tryTake(f.ctx, "n1")
				if must(err); l != nil {
					f.begin(l)
					leases = append(leases, l)
				}
			},
			"free": func(*rapid.T) {
				if len(leases) > 0 {
					l := leases[pick(len(leases))]
					must(f.FreeUploads(f.ctx, l))
					let(l.Run)
				}
			},
			"settle": func(*rapid.T) {
				if len(leases) > 0 {
					i := pick(len(leases))
					_, err := f.Settle(f.ctx, leases[i], Outcome{State: Failed})
					must(err)
					let(leases[i].Run)
					ended = append(ended, leases[i].Run)
					leases = append(leases[:i], leases[i+1:]...)
				}
			},
			"erase": func(*rapid.T) {
				if len(ended) > 0 {
					must(f.Delete(f.ctx, "o", ended[pick(len(ended))]))
				}
			},
			"delete": func(*rapid.T) {
				if len(whole) > 0 {
					must(f.DeleteUpload(f.ctx, "o", whole[pick(len(whole))].ID), ErrNotFound, ErrState)
				}
			},
			"time passes": func(*rapid.T) { f.uploadTime(rt, 40*time.Minute) },
			"": func(*rapid.T) {
				f.booksOfUploads(rt)
				for id, uploads := range held {
					for _, u := range uploads {
						if _, err := f.Upload(f.ctx, "o", u); err != nil {
							rt.Fatalf("%s waits for an upload: %v", id, err)
						}
					}
				}
			},
		})
		for {
			l, err := f.tryTake(f.ctx, "n1")
			if must(err); l == nil {
				break
			}
			leases = append(leases, l)
		}
		for _, l := range leases {
			_, err := f.Settle(f.ctx, l, Outcome{State: Failed})
			must(err)
		}
		f.uploadTime(rt, 3*time.Hour)
		w, err := f.BeginUpload(f.ctx, NewUpload{Org: "o", Most: 1, Life: time.Hour, MostBytes: 1, MostCount: 1}) // there is room
		must(err)
		must(w.Abort(f.ctx))
		if n := f.rdb.Get(f.ctx, f.keys.uploadBytes("o")).Val(); n != "0" {
			rt.Fatalf("%s bytes are counted in the end", n)
		}
		for _, key := range f.rdb.Keys(f.ctx, f.keys.at("upload", "*")).Val() {
			rt.Fatalf("%s is left", key)
		}
		f.balanced()
	})
}

// uploadTime lets time pass, and has expire by the clock of the test what Redis would have expire by its own.
func (f *fixture) uploadTime(t fataler, d time.Duration) {
	f.clock.advance(d)
	for _, key := range f.rdb.Keys(f.ctx, f.keys.at("upload", "upl_*")).Val() {
		ttl := f.rdb.PTTL(f.ctx, key).Val()
		switch {
		case ttl < 0: // held, or gone
		case ttl <= d:
			f.rdb.Del(f.ctx, key)
		default:
			f.rdb.PExpire(f.ctx, key, ttl-d)
		}
	}
}

// fataler is what testing.T and rapid.T share.
type fataler interface{ Fatalf(string, ...any) }

// booksOfUploads checks that the bytes counted are those listed, and that every upload that is there is listed.
func (f *fixture) booksOfUploads(t fataler) {
	sum, listed := int64(0), map[string]bool{}
	for _, m := range f.rdb.ZRange(f.ctx, f.keys.uploads("o"), 0, -1).Val() {
		id, size, _ := strings.Cut(m, " ")
		n, err := strconv.ParseInt(size, 10, 64)
		if err != nil || listed[id] {
			t.Fatalf("listed %q: %v", m, err)
		}
		sum, listed[id] = sum+n, true
	}
	counted, err := f.rdb.Get(f.ctx, f.keys.uploadBytes("o")).Int64()
	if err != nil && !errors.Is(err, redis.Nil) || counted != sum {
		t.Fatalf("%d bytes are counted, %d listed, %v", counted, sum, err)
	}
	for _, key := range f.rdb.Keys(f.ctx, f.keys.at("upload", "upl_*")).Val() {
		if id := strings.Split(strings.TrimPrefix(key, fmt.Sprintf("{%s}:upload:", f.cfg.Cell)), ":")[0]; !listed[id] {
			t.Fatalf("%s is not listed", key)
		}
	}
}
