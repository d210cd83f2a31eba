package run

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/ephemeral-run/ephemeral/run/redisserver"
)

// server is the Redis of all tests of this package; each test has a cell of its own in it.
var (
	server  *redisserver.Server
	cells   atomic.Int64
	testDir string
)

func TestMain(m *testing.M) { os.Exit(withServer(m)) }

func withServer(m *testing.M) int {
	dir, err := os.MkdirTemp("", "ephemeral-run-test-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	testDir = dir
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	server, err = redisserver.Start(ctx, dir, redisserver.Options{Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer server.Close()
	return m.Run()
}

// clock is a clock that moves when told to.
type clock struct{ us atomic.Int64 }

func (c *clock) now() time.Time          { return time.UnixMicro(c.us.Load()).UTC() }
func (c *clock) advance(d time.Duration) { c.us.Add(d.Microseconds()) }

type fixture struct {
	*Store
	t     testing.TB
	ctx   context.Context
	clock *clock
}

// newFixture opens a store on a fresh cell with a clock that stands still.
func newFixture(t testing.TB, change ...func(*Config)) *fixture {
	t.Helper()
	c := &clock{}
	c.us.Store(time.Date(2026, 10, 7, 12, 0, 0, 0, time.UTC).UnixMicro())
	cfg := Config{RedisURL: server.URL(), Cell: fmt.Sprintf("t%d", cells.Add(1))}
	for _, f := range change {
		f(&cfg)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	t.Cleanup(cancel)
	s, err := Open(ctx, cfg, WithClock(c.now))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return &fixture{Store: s, t: t, ctx: ctx, clock: c}
}

// open opens another store on the same cell, as another process would.
func (f *fixture) open() *Store {
	f.t.Helper()
	s, err := Open(f.ctx, f.cfg, WithClock(f.clock.now))
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { s.Close() })
	return s
}

// org makes an organisation with money.
func (f *fixture) newOrg(id string, concurrency int, money Micros) {
	f.t.Helper()
	if _, err := f.CreateOrg(f.ctx, Org{ID: id, Name: id, Concurrency: concurrency}); err != nil {
		f.t.Fatal(err)
	}
	if money > 0 {
		if _, err := f.Credit(f.ctx, id, money, "start"); err != nil {
			f.t.Fatal(err)
		}
	}
}

func (f *fixture) admit(org string, cost Micros) Run {
	f.t.Helper()
	r, replayed, err := f.Admit(f.ctx, Admission{Org: org, Key: "key_0", Spec: Spec{Command: "true", MaxCostMicros: cost, TimeoutSeconds: 10}})
	if err != nil {
		f.t.Fatal(err)
	}
	if replayed {
		f.t.Fatal("a run without idempotency key is said to be a replay")
	}
	return r
}

func (f *fixture) take() *Lease {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(f.ctx, 5*time.Second)
	defer cancel()
	l, err := f.Take(ctx, "n1")
	if err != nil {
		f.t.Fatal(err)
	}
	return l
}

// started is a run of a fresh organisation "o" that has a machine.
func (f *fixture) started(cost Micros) *Lease {
	f.t.Helper()
	f.newOrg("o", 0, 1_000_000)
	f.admit("o", cost)
	l := f.take()
	f.must(f.Start(f.ctx, l, Start{At: f.clock.now(), Machine: "m1", Image: "base", Isolation: "emulated"}))
	return l
}

// begin confirms a machine for the run.
func (f *fixture) begin(l *Lease) {
	f.t.Helper()
	f.must(f.Start(f.ctx, l, Start{At: f.clock.now(), Machine: "m-" + string(l.Run), Image: "base", Isolation: "emulated"}))
}

func (f *fixture) must(err error) {
	f.t.Helper()
	if err != nil {
		f.t.Fatal(err)
	}
}

func (f *fixture) want(err, target error) {
	f.t.Helper()
	if !errors.Is(err, target) {
		f.t.Fatalf("error %v, want %v", err, target)
	}
}

func (f *fixture) get(id ID) Run {
	f.t.Helper()
	r, err := f.Get(f.ctx, "", id)
	f.must(err)
	return r
}

func (f *fixture) account(org string) Account {
	f.t.Helper()
	a, err := f.Account(f.ctx, org)
	f.must(err)
	return a
}

// balanced fails unless the audit finds nothing.
func (f *fixture) balanced() AuditReport {
	f.t.Helper()
	rep, err := f.Audit(f.ctx)
	f.must(err)
	f.must(rep.Err())
	return rep
}

func (f *fixture) types(id ID) (types []EventType) {
	f.t.Helper()
	events, _, err := f.Events(f.ctx, "", id, 0)
	f.must(err)
	for _, e := range events {
		types = append(types, e.Type)
	}
	return types
}

func (f *fixture) same(got, want any) {
	f.t.Helper()
	if d := cmp.Diff(want, got); d != "" {
		f.t.Fatalf("differs (-want +got):\n%s", d)
	}
}

func TestWholeRun(t *testing.T) {
	f := newFixture(t)
	f.newOrg("acme", 0, 1_000_000)
	exit := 3
	spec := Spec{Command: "python3 main.py", Shell: true, Files: []File{{Path: "main.py", Content: "print(1)"}}, TimeoutSeconds: 10,
		MaxCostMicros: 40_000, Metadata: map[string]string{"a": "b"}}
	r, _, err := f.Admit(f.ctx, Admission{Org: "acme", Key: "key_1", Spec: spec, FirstSlice: 200})
	f.must(err)
	f.same(r.State, Queued)
	f.same(f.account("acme"), Account{Org: "acme", Balance: 1_000_000, Held: 40_000, Available: 960_000, Deposits: 1_000_000})
	f.same(f.get(r.ID), r)

	f.clock.advance(1500 * time.Microsecond)
	l := f.take()
	f.same(*l, Lease{Run: r.ID, Org: "acme", Node: "n1", Token: 1, QueuedAt: r.QueuedAt, Reserved: 40_000, Spec: spec})
	f.clock.advance(920 * time.Microsecond)
	f.must(f.Start(f.ctx, l, Start{At: f.clock.now(), Machine: "m1", Image: "base", Isolation: "emulated"}))
	granted, err := f.Authorize(f.ctx, l, Call{ID: "compute-1", Kind: KindCompute, Min: 200, Max: 3200})
	f.must(err)
	f.same(granted, Micros(3200))
	f.must(f.Capture(f.ctx, l, "compute-1", 3200))
	_, err = f.Authorize(f.ctx, l, Call{ID: "model-1", Kind: KindModel, Min: 1, Max: 500})
	f.must(err)
	f.must(f.Capture(f.ctx, l, "model-1", 330))
	f.must(f.Append(f.ctx, l, NewEvent{Type: EventWorkerStarted, At: f.clock.now(), Data: WorkerStartedData{Shell: true}},
		NewEvent{Type: EventShell, At: f.clock.now().Add(time.Millisecond), Data: ShellData{Command: "ls", Outcome: "exited", Output: "x\n", Bytes: 2}}))
	f.clock.advance(10 * time.Millisecond)
	f.must(f.Append(f.ctx, l, NewEvent{Type: EventMicroVMDestroyed, At: f.clock.now(), Data: MicroVMDestroyedData{Egress: Egress{2, 120}}}))
	stdout, stderr := []byte("caf\xc3\xa9\x00\xff"), bytes.Repeat([]byte("e\n"), 3<<20)
	done, err := f.Settle(f.ctx, l, Outcome{At: f.clock.now(), State: Succeeded, Usage: Usage{ModelCalls: 1, TotalTokens: 30},
		Stages: []Stage{{"queue", 1.5}, {"prepare", 0.92}, {"worker", 9.9}}, Egress: Egress{2, 120},
		Result: &Result{Output: "done", ExitCode: &exit, Stdout: NewStream(stdout, 7), Stderr: NewStream(stderr, int64(len(stderr))+5)}})
	f.must(err)
	got := f.get(r.ID)
	f.same(got, done)
	f.same(got.Money, Money{Reserved: 40_000, Charged: 3530, Released: 36_470, Model: 330, Compute: 3200})
	f.same(got.Stages, []Stage{{"queue", 1.5}, {"prepare", 0.92}, {"worker", 9.9}, {"settle", 0.1}})
	f.same(got.Result.Stdout.Encoding, "base64")
	f.same(got.Result.Stderr.Truncated, true)
	f.same(f.account("acme"), Account{Org: "acme", Balance: 996_470, Available: 996_470, Deposits: 1_000_000, Charged: 3530})
	f.same(f.types(r.ID), []EventType{EventQueued, EventMicroVMReady, EventWorkerStarted, EventShell, EventMicroVMDestroyed, "succeeded", EventWorkerDestroyed})
	again, err := f.Settle(f.ctx, l, Outcome{State: Failed})
	f.must(err)
	f.same(again, got)
	f.balanced()
}
