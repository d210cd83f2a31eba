package run

import (
	"strings"
	"testing"
	"time"
)

func TestListPages(t *testing.T) {
	f := newFixture(t, func(c *Config) { c.Concurrency = 1000 })
	f.newOrg("o", 0, 1_000_000)
	f.newOrg("p", 0, 1_000_000)
	var ids []ID
	for i := range 250 {
		id := f.admit("o", 1).ID
		ids = append([]ID{id}, ids...)
		if i%50 == 0 {
			_, err := f.Cancel(f.ctx, "o", id)
			f.must(err)
			f.admit("p", 1)
		}
	}
	for _, limit := range []int{0, 1, 7, 100} {
		var got []ID
		var newer ID
		cursor := ""
		for {
			runs, next, err := f.List(f.ctx, "o", Page{Cursor: cursor, Limit: limit})
			f.must(err)
			for _, r := range runs {
				got = append(got, r.ID)
			}
			if newer == "" {
				newer = f.admit("o", 1).ID // moves nothing: it belongs before the first page
			}
			if cursor = next; cursor == "" {
				break
			}
		}
		f.same(got, ids)
		ids = append([]ID{newer}, ids...)
	}
	runs, next, err := f.List(f.ctx, "o", Page{State: Cancelled, Limit: 2})
	f.must(err)
	f.same(len(runs), 2)
	rest, next, err := f.List(f.ctx, "o", Page{State: Cancelled, Limit: 100, Cursor: next})
	f.must(err)
	f.same(next, "")
	f.same(len(rest), 3)
	for _, p := range []Page{{Limit: -1}, {Limit: 101}, {Cursor: "x"}} {
		_, _, err := f.List(f.ctx, "o", p)
		f.want(err, ErrRange)
	}
	_, _, err = f.List(f.ctx, "", Page{})
	f.want(err, ErrNotFound)
}

func TestRunsOfOthersAreNotFound(t *testing.T) {
	f := newFixture(t)
	f.newOrg("p", 0, 1000)
	l := f.started(1000)
	for _, id := range []ID{l.Run, "run_x", "", ID("run_" + strings.Repeat("0", 32)), "org:o"} {
		_, err := f.Get(f.ctx, "p", id)
		f.want(err, ErrNotFound)
		_, _, err = f.Events(f.ctx, "p", id, 0)
		f.want(err, ErrNotFound)
		_, err = f.Cancel(f.ctx, "p", id)
		f.want(err, ErrNotFound)
		f.want(f.Delete(f.ctx, "p", id), ErrNotFound)
	}
	f.get(l.Run) // the host sees it
}

func TestEventsAfter(t *testing.T) {
	f := newFixture(t)
	l := f.started(1000)
	for after, want := range map[int64]int{-5: 2, 0: 2, 1: 1, 2: 0, 99: 0} {
		events, _, err := f.Events(f.ctx, "o", l.Run, after)
		f.must(err)
		f.same(len(events), want)
	}
}

// dump is everything that Redis holds of the cell, as text.
func (f *fixture) dump() string {
	f.t.Helper()
	var b strings.Builder
	for _, key := range f.rdb.Keys(f.ctx, f.keys.at("*")).Val() {
		raw, err := f.rdb.Dump(f.ctx, key).Result()
		f.must(err)
		b.WriteString(key + " " + raw + "\n")
		switch f.rdb.Type(f.ctx, key).Val() { // DUMP may compress
		case "string":
			b.WriteString(f.rdb.Get(f.ctx, key).Val())
		case "hash":
			for k, v := range f.rdb.HGetAll(f.ctx, key).Val() {
				b.WriteString(k + " " + v + "\n")
			}
		case "list":
			b.WriteString(strings.Join(f.rdb.LRange(f.ctx, key, 0, -1).Val(), "\n"))
		case "set":
			b.WriteString(strings.Join(f.rdb.SMembers(f.ctx, key).Val(), "\n"))
		case "zset":
			b.WriteString(strings.Join(f.rdb.ZRange(f.ctx, key, 0, -1).Val(), "\n"))
		}
	}
	return b.String()
}

// withCanary runs a run whose every piece of content is the canary.
func (f *fixture) withCanary(canary string, zdr bool) ID {
	f.t.Helper()
	r, _, err := f.Admit(f.ctx, Admission{Org: "o", IdempotencyKey: canary, Fingerprint: "f", Spec: Spec{Prompt: canary, Command: canary,
		Files: []File{{Path: canary, Content: canary}}, Connections: []string{canary}, Metadata: map[string]string{canary: canary},
		MaxCostMicros: 1000, TimeoutSeconds: 7, Model: "replay/x", Shell: true, ZeroDataRetention: zdr}})
	f.must(err)
	l := f.take()
	f.same(l.Spec.Prompt, canary)
	f.must(f.Start(f.ctx, l, Start{At: f.clock.now(), Machine: "m"}))
	at := f.clock.now()
	f.must(f.Append(f.ctx, l,
		NewEvent{Type: EventShell, At: at, Data: ShellData{Command: canary, Output: canary, Outcome: "exited"}},
		NewEvent{Type: EventShell, At: at, Data: &ShellData{Command: canary, Output: canary, ExitCode: 1}, Redacted: ShellData{ExitCode: 1}},
		NewEvent{Type: EventModel, At: at, Data: ModelData{Error: canary, Status: 500}},
		NewEvent{Type: EventWeb, At: at, Data: CallData{Target: canary, Error: canary, Status: 200}}))
	var left *Files
	if !zdr {
		left = &Files{Count: 1, Bytes: int64(len(canary))}
		w := f.Artifacts(l)
		f.must(w.Begin(canary, 0o644))
		f.must(w.Write(f.ctx, []byte(canary)))
		names, err := w.Commit(f.ctx)
		f.must(err)
		f.must(f.Append(f.ctx, l, NewEvent{Type: EventFiles, At: at, Data: FilesData{Files: *left, Names: names}}))
	}
	exit := 4
	done, err := f.Settle(f.ctx, l, Outcome{At: at, State: Failed, Files: left, Error: &Error{Code: "model_error", Detail: canary},
		Result: &Result{Output: canary, ExitCode: &exit, Stdout: NewStream([]byte(canary), 99), Stderr: NewStream([]byte(canary+"\xff"), 99)}})
	f.must(err)
	if zdr {
		f.same(f.get(r.ID), done)
	}
	return r.ID
}

func TestDeleteErasesContent(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 10_000)
	canary := "canary-" + word(8)
	id := f.withCanary(canary, false)
	if !strings.Contains(f.dump(), canary) {
		t.Fatal("the search finds nothing")
	}
	before := f.types(id)
	f.must(f.Delete(f.ctx, "o", id))
	f.must(f.Delete(f.ctx, "o", id)) // again
	if strings.Contains(f.dump(), canary) {
		t.Error("content is left")
	}
	r := f.get(id)
	f.same(r.Request, &Spec{Model: "replay/x", Shell: true, TimeoutSeconds: 7, MaxCostMicros: 1000})
	f.same(*r.Result.ExitCode, 4)
	f.same(r.Error, &Error{Code: "model_error"})
	f.same(f.types(id), before)
	f.same(r.Erased, true)
	f.same(r.Files, &Files{Count: 1, Bytes: int64(len(canary))})
	list, err := f.ListArtifacts(f.ctx, "o", id)
	f.must(err)
	f.same(len(list), 0)
	if ttl := f.rdb.PTTL(f.ctx, f.keys.runEvents(string(id))).Val(); ttl < 719*time.Hour {
		t.Errorf("events live %v", ttl)
	}
	f.balanced()
}
