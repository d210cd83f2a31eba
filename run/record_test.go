package run

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// TestReplayOfAWaitingRun: it is the run that Get shows, whatever was asked for, and also after a node gave it back.
func TestReplayOfAWaitingRun(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 1_000_000)
	for name, spec := range map[string]Spec{
		"command":  {Command: "true", MaxCostMicros: 1000, TimeoutSeconds: 10, Metadata: map[string]string{"a": "b"}},
		"files":    {Prompt: "p", MaxCostMicros: 1000, Files: []File{{Path: "a", Content: "b", Mode: "0755"}}},
		"no trace": {Prompt: "p", Command: "", MaxCostMicros: 1000, ZeroDataRetention: true, RetentionSeconds: 100},
		"traced":   {Command: "true", MaxCostMicros: 1000, Traceparent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
	} {
		a := Admission{Org: "o", Spec: spec, IdempotencyKey: name, Fingerprint: "f"}
		r, _, err := f.Admit(f.ctx, a)
		f.must(err)
		same := func(when string) {
			t.Helper()
			got, replayed, err := f.Admit(f.ctx, a)
			f.must(err)
			f.same(replayed, true)
			want, err := f.Get(f.ctx, "o", r.ID)
			f.must(err)
			if d := cmp.Diff(want, got); d != "" {
				t.Errorf("%s, %s: %s", name, when, d)
			}
		}
		same("waiting")
		if spec.Traceparent != "" {
			a.Spec.Traceparent = "00-0af7651916cd43dd8448eb211c80319c-00f067aa0ba902b7-01"
			same("asked for in another trace")
		}
		l, err := f.tryTake(f.ctx, "n1")
		f.must(err)
		same("taken")
		f.must(f.Requeue(f.ctx, l))
		same("given back")
		l, err = f.tryTake(f.ctx, "n1")
		f.must(err)
		f.must(f.Start(f.ctx, l, Start{At: time.Now(), Machine: "m"}))
		f.must(second(f.Settle(f.ctx, l, Outcome{At: time.Now(), State: Succeeded})))
		same("ended")
	}
	f.balanced()
}

// TestShownFields: what is read of a run that has not ended is all that its whole record says.
func TestShownFields(t *testing.T) {
	if len(shownFields)%2 == 0 {
		t.Fatal("an even number of fields cannot be told from names and values")
	}
	f := newFixture(t)
	f.newOrg("o", 0, 1_000_000)
	for _, spec := range []Spec{
		{Command: "true", MaxCostMicros: 1000, TimeoutSeconds: 10, Metadata: map[string]string{"a": "b"}},
		{Prompt: "p", MaxCostMicros: 1000, Files: []File{{Path: "a", Content: "b"}}},
		{Prompt: "p", MaxCostMicros: 1000, ZeroDataRetention: true, RetentionSeconds: 100},
	} {
		r, _, err := f.Admit(f.ctx, Admission{Org: "o", Spec: spec})
		f.must(err)
		whole := func(when string) {
			t.Helper()
			fields, err := f.rdb.HGetAll(f.ctx, f.keys.run(string(r.ID))).Result()
			f.must(err)
			want, err := f.whole(f.ctx, "o", r.ID, fields, nil, sameSpec{})
			f.must(err)
			got, err := f.Get(f.ctx, "o", r.ID)
			f.must(err)
			got.Queue = nil
			if d := cmp.Diff(want, got); d != "" {
				t.Errorf("%s: %s", when, d)
			}
		}
		whole("queued")
		l, err := f.tryTake(f.ctx, "n1")
		f.must(err)
		whole("starting")
		f.must(f.Start(f.ctx, l, Start{At: time.Now(), Machine: "m", Image: "base", Isolation: "kvm"}))
		whole("running")
		f.must(second(f.Authorize(f.ctx, l, Call{ID: "c", Kind: KindWeb, Min: 7, Max: 7})))
		f.must(f.Capture(f.ctx, l, "c", 7))
		whole("charged")
		f.must(second(f.Settle(f.ctx, l, Outcome{At: time.Now(), State: Succeeded})))
		whole("settled")
	}
}
