package control

import (
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/ephemeral-run/ephemeral/run/pools"
)

// told counts what a pool's next observer hears.
type told struct{ claims, makes int }

func (t *told) Claimed(time.Duration, time.Duration, bool) { t.claims++ }
func (t *told) Made(time.Duration, error)                  { t.makes++ }

func TestLatencies(t *testing.T) {
	next := &told{}
	l := &Latencies{Next: next}
	if claim, restore := l.report(); claim != nil || restore != nil {
		t.Errorf("before anything happened: %v, %v", claim, restore)
	}
	for i := range 100 {
		l.Claimed(time.Duration(i+1)*time.Millisecond, time.Second, true)
	}
	l.Made(time.Second, nil)
	l.Made(time.Hour, errors.New("broken"))
	claim, restore := l.report()
	if d := cmp.Diff(&pools.Latency{Count: 100, P50: .05, P95: .095, P99: .099, Max: .1}, claim); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff(&pools.Latency{Count: 1, P50: 1, P95: 1, P99: 1, Max: 1}, restore); d != "" {
		t.Error(d)
	}
	if *next != (told{100, 2}) {
		t.Errorf("the next observer was told %+v", *next)
	}
	for range lately { // what happened long ago counts no more
		l.Claimed(time.Microsecond, 0, false)
	}
	if claim, _ := l.report(); claim.Count != lately || claim.Max != 1e-6 {
		t.Errorf("after %d others: %+v", lately, claim)
	}
}
