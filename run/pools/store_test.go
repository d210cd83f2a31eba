package pools

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/redisserver"
)

func open(t *testing.T) *Store {
	t.Helper()
	server, err := redisserver.Start(t.Context(), t.TempDir(), redisserver.Options{Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = server.Close() })
	store, err := run.Open(t.Context(), run.Config{RedisURL: server.URL()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = store.Close() })
	return New(store)
}

func ptr[T any](v T) *T { return &v }

// Of many who change a policy of the same revision one wins, and the others are told.
func TestOnePolicyReplacesARevision(t *testing.T) {
	s := open(t)
	if err := s.Report(t.Context(), Report{Pool: "p", Node: "n"}); err != nil {
		t.Fatal(err)
	}
	errs := make(chan error, 20)
	for i := range 20 {
		go func() {
			_, err := s.Set(t.Context(), "p", Policy{MinReady: &i}, 0)
			errs <- err
		}()
	}
	won := 0
	for range 20 {
		switch err := <-errs; {
		case err == nil:
			won++
		case !errors.Is(err, run.ErrState):
			t.Error(err)
		}
	}
	d, err := s.Desired(t.Context(), "p")
	if won != 1 || err != nil || d.Revision != 1 || d.MinReady == nil {
		t.Errorf("%d won: %+v, %v", won, d, err)
	}
	if d, err = s.Set(t.Context(), "p", Policy{}, -1); err != nil || d.Revision != 2 || d.MinReady != nil || d.SetAt.IsZero() {
		t.Errorf("%+v, %v", d, err)
	}
	if _, err := s.Set(t.Context(), "q", Policy{}, -1); !errors.Is(err, run.ErrNotFound) {
		t.Errorf("a pool that nobody knows: %v", err)
	}
	if _, err := s.Set(t.Context(), "p", Policy{MinReady: ptr(5), MaxReady: ptr(4)}, -1); !errors.Is(err, ErrInvalid) {
		t.Errorf("a policy that contradicts itself: %v", err)
	}
}

func TestReportsComeAndGo(t *testing.T) {
	s := open(t)
	for _, n := range []string{"b", "a"} {
		if err := s.Report(t.Context(), Report{Pool: "p", Node: n, Ready: 2, Decisions: make([]Decision, 100)}); err != nil {
			t.Fatal(err)
		}
	}
	p, err := s.Get(t.Context(), "p")
	if err != nil || len(p.Nodes) != 2 || p.Nodes[0].Node != "a" || p.Ready != 4 || len(p.Nodes[0].Decisions) != maxDecisions {
		t.Fatalf("%+v, %v", p, err)
	}
	if ttl := s.rdb.PTTL(t.Context(), s.report("p", "a")).Val(); ttl <= 0 || ttl > reportLife {
		t.Errorf("a report of a node that dies stays for %v", ttl)
	}
	s.rdb.Del(t.Context(), s.report("p", "a")) // as when it expires
	if err := s.Withdraw(t.Context(), "p", "b"); err != nil {
		t.Fatal(err)
	}
	if p, err = s.Get(t.Context(), "p"); err != nil || len(p.Nodes) != 0 {
		t.Errorf("%+v, %v", p, err)
	}
	if n := s.rdb.SCard(t.Context(), s.nodes("p")).Val(); n != 0 {
		t.Errorf("%d nodes are remembered", n)
	}
	if err := s.Report(t.Context(), Report{Pool: "p q", Node: "n"}); !errors.Is(err, run.ErrRange) {
		t.Errorf("a pool with a space: %v", err)
	}
}

// Whatever is used, in whatever order, is in the history once, by the time it was queued, and the history stays small.
func TestHistory(t *testing.T) {
	s := open(t)
	n := 0
	rapid.Check(t, func(rt *rapid.T) {
		n++
		name := fmt.Sprintf("p%d", n)
		base := time.UnixMilli(1_790_000_000_000).UTC()
		uses := rapid.SliceOfN(rapid.Custom(func(rt *rapid.T) Use {
			return Use{
				Queued:  base.Add(time.Duration(rapid.Int64Range(-1e6, 1e9).Draw(rt, "at")) * time.Millisecond),
				Service: time.Duration(rapid.Int64Range(0, 1e8).Draw(rt, "service")) * time.Millisecond,
			}
		}), 1, 300).Draw(rt, "uses")
		for part := range slices.Chunk(uses, 70) {
			if err := s.Used(t.Context(), name, part); err != nil {
				rt.Fatal(err)
			}
		}
		got, err := s.History(t.Context(), name, time.Time{})
		if err != nil {
			rt.Fatal(err)
		}
		order := func(a, b Use) int {
			if c := a.Queued.Compare(b.Queued); c != 0 {
				return c
			}
			return int(a.Service - b.Service)
		}
		slices.SortFunc(uses, order)
		slices.SortFunc(got, order)
		if !slices.Equal(got, uses) {
			rt.Fatalf("%d uses in, %d out", len(uses), len(got))
		}
		if bytes := s.rdb.MemoryUsage(t.Context(), s.history(name)).Val(); len(uses) > 100 && bytes > int64(50*len(uses)+4096) {
			rt.Fatalf("%d uses take %d bytes", len(uses), bytes)
		}
	})
}
