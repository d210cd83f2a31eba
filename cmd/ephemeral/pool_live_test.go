package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/node/control"
	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/pools"
	"github.com/ephemeral-run/ephemeral/run/redisserver"
	"github.com/ephemeral-run/ephemeral/vmm/pool"
	"github.com/ephemeral-run/ephemeral/vmm/pool/autoscale"
	"github.com/ephemeral-run/ephemeral/vmm/pool/trace"
)

// pretended is a machine of a node that pretends.
type pretended struct {
	once sync.Once
	done chan struct{}
}

func (m *pretended) Close() error {
	m.once.Do(func() { close(m.done) })
	return nil
}

func (m *pretended) Done() <-chan struct{} { return m.done }

// operated is a cell with one node whose machines are pretended, under control of operators.
type operated struct {
	t        *testing.T
	machines *pool.Pool[*pretended]
	store    *pools.Store
	mu       sync.Mutex
	takes    int // runs the node may take at once
	control  *control.Controller
}

func operate(t *testing.T, node string, url string) *operated {
	t.Helper()
	store, err := run.Open(t.Context(), run.Config{RedisURL: url})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = store.Close() })
	quiet := slog.New(slog.DiscardHandler)
	cfg := pool.Config{MinReady: 2, MaxReady: 8, MaxMachines: 16, RefillConcurrency: 4, MakeTimeout: time.Minute,
		Autoscale: autoscale.Config{HalfLife: time.Minute, HoldDown: time.Minute, IdleAfter: time.Hour}}
	o := &operated{t: t, store: pools.New(store)}
	o.machines, err = pool.New(cfg, func(context.Context) (*pretended, error) { return &pretended{done: make(chan struct{})}, nil }, pool.WithLogger(quiet))
	if err != nil {
		t.Fatal(err)
	}
	o.control = control.New(node, o.store, quiet, control.Subject{
		Name: "base-1x512", Pool: o.machines, Config: cfg, Image: func() string { return "sha256:00" }, Unready: func() error { return nil },
		Report: pools.Report{VCPUs: 1, MemoryMiB: 512, Rest: "paused"},
		Take: func(runs int) {
			o.mu.Lock()
			defer o.mu.Unlock()
			o.takes = runs
		},
	})
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); o.control.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		<-ended
		if err := o.machines.Close(); err != nil {
			t.Error(err)
		}
	})
	return o
}

// ephemeral runs a command as an operator would, from another process's point of view.
func (o *operated) ephemeral(args ...string) (string, error) {
	o.t.Helper()
	cmd := root()
	var out bytes.Buffer
	cmd.SetOut(&out)
	cmd.SetErr(&out)
	cmd.SetArgs(args)
	err := cmd.ExecuteContext(o.t.Context())
	return out.String(), err
}

func (o *operated) must(args ...string) pools.Pool {
	o.t.Helper()
	out, err := o.ephemeral(append(args, "--output", "json")...)
	if err != nil {
		o.t.Fatalf("%q: %v\n%s", args, err, out)
	}
	var p pools.Pool
	if err := json.Unmarshal([]byte(out), &p); err != nil {
		o.t.Fatalf("%q: %v\n%s", args, err, out)
	}
	return p
}

// eventually waits until the pool looks as wanted.
func (o *operated) eventually(what string, ok func(pool.Stats) bool) {
	o.t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(o.machines.Stats()); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			o.t.Fatalf("not %s: %+v", what, o.machines.Stats())
		}
	}
}

func (o *operated) taking() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.takes
}

func redisFor(t *testing.T) string {
	t.Helper()
	server, err := redisserver.Start(t.Context(), t.TempDir(), redisserver.Options{Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = server.Close() })
	t.Setenv("EPHEMERAL_REDIS_URL", server.URL())
	return server.URL()
}

// An operator's changes take effect on the nodes, at once, and machines in use are not touched.
func TestOperatorsChangePools(t *testing.T) {
	o := operate(t, "n1", redisFor(t))
	o.eventually("filled", func(s pool.Stats) bool { return s.Ready == 2 })
	var leased []*pretended
	for range 5 {
		m, err := o.machines.Claim(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		o.machines.Settled(m)
		leased = append(leased, m)
	}
	began := time.Now()
	p := o.must("pool", "set", "base-1x512", "--min-ready", "6")
	took := time.Since(began)
	if p.Policy.Revision != 1 || p.Nodes[0].Revision != 1 || p.Nodes[0].Settings.MinReady != 6 || p.Nodes[0].Settings.MaxReady != 8 {
		t.Errorf("set: %+v", p)
	}
	if took > 900*time.Millisecond { // the node would have looked by itself after some time, too
		t.Errorf("the node followed after %v", took)
	}
	o.eventually("grown", func(s pool.Stats) bool { return s.Ready == 6 && s.Leased == 5 })
	p = o.must("pool", "set", "base-1x512", "--min-ready", "1", "--max-ready", "1")
	o.eventually("shrunk", func(s pool.Stats) bool { return s.Ready == 1 && s.Leased == 5 && s.Destroying == 0 })
	for i, m := range leased {
		select {
		case <-m.Done():
			t.Errorf("machine %d in use was destroyed by the resize", i)
		default:
		}
	}
	if p.Nodes[0].Settings.RefillConcurrency != 4 {
		t.Errorf("what was not set has changed: %+v", p.Nodes[0].Settings)
	}
	shown, err := await(t.Context(), o.store, "base-1x512", 10*time.Second, func(p pools.Pool) bool { return p.Ready == 1 })
	if got := o.must("pool", "show", "base-1x512"); err != nil || got.Leased != 5 || got.Ready != 1 || got.Nodes[0].State != "serving" {
		t.Errorf("show: %+v after %+v, %v", got, shown, err)
	}

	o.must("pool", "drain", "base-1x512")
	if o.taking() != 0 {
		t.Errorf("a drained node takes %d runs", o.taking())
	}
	o.eventually("drained", func(s pool.Stats) bool { return s.Ready == 0 && s.Leased == 5 })
	if out, err := o.ephemeral("pool", "drain", "base-1x512", "--wait", "100ms"); err == nil || !strings.Contains(err.Error(), "still in use") {
		t.Errorf("drain --wait with machines in use: %v\n%s", err, out)
	}
	for _, m := range leased {
		_ = m.Close()
		o.machines.Released(m)
	}
	if got := o.must("pool", "drain", "base-1x512", "--wait", "10s"); got.Nodes[0].State != "drained" {
		t.Errorf("drained: %+v", got)
	}
	o.must("pool", "drain", "base-1x512", "--undo")
	o.eventually("filled again", func(s pool.Stats) bool { return s.Ready == 1 })
	o.must("pool", "set", "base-1x512", "--reset")
	o.eventually("as configured", func(s pool.Stats) bool { return s.Ready == 2 })
	if o.taking() != 16 {
		t.Errorf("the node takes %d runs, want 16", o.taking())
	}
}

// One node of two is drained; the other goes on.
func TestOperatorsDrainOneNode(t *testing.T) {
	url := redisFor(t)
	one, two := operate(t, "n1", url), operate(t, "n2", url)
	one.eventually("filled", func(s pool.Stats) bool { return s.Ready == 2 })
	two.eventually("filled", func(s pool.Stats) bool { return s.Ready == 2 })
	await(t.Context(), one.store, "base-1x512", 10*time.Second, func(p pools.Pool) bool { return len(p.Nodes) == 2 })
	p := one.must("pool", "drain", "base-1x512", "--node", "n1", "--wait", "10s")
	if len(p.Nodes) != 2 || p.Nodes[0].State != "drained" || p.Nodes[1].State != "serving" {
		t.Errorf("%+v", p)
	}
	if two.taking() != 16 || one.taking() != 0 {
		t.Errorf("the nodes take %d and %d runs", one.taking(), two.taking())
	}
	p = one.must("pool", "set", "base-1x512", "--min-ready", "3")
	if !p.Policy.Drains("n1") || p.Ready > 3 {
		t.Errorf("a change of size filled the drained node: %+v", p)
	}
}

// A policy that a node cannot follow leaves the one before in force, and says so.
func TestPolicyThatCannotBeFollowed(t *testing.T) {
	o := operate(t, "n1", redisFor(t))
	o.eventually("filled", func(s pool.Stats) bool { return s.Ready == 2 })
	out, err := o.ephemeral("pool", "set", "base-1x512", "--min-ready", "17")
	if err == nil || !strings.Contains(err.Error(), "n1 does not follow") || !strings.Contains(out, "not followed") {
		t.Errorf("%v\n%s", err, out)
	}
	if s := o.machines.Stats(); s.Target != 2 {
		t.Errorf("target %d", s.Target)
	}
	for _, args := range [][]string{
		{"pool", "set", "base-1x512"}, {"pool", "set", "base-1x512", "--min-ready", "-1"}, {"pool", "set", "other", "--min-ready", "1"},
		{"pool", "show", "other"}, {"pool", "drain", "x y"}, {"pool", "set", "base-1x512", "--scale-to", "200%"}, {"pool", "record"},
		{"pool", "top", "--interval", "1ms"},
	} {
		if out, err := o.ephemeral(args...); err == nil {
			t.Errorf("%q is accepted: %s", args, out)
		}
	}
}

// What operators look at: tables and JSON, and the decisions with their reasons.
func TestOperatorsSeePools(t *testing.T) {
	o := operate(t, "n1", redisFor(t))
	o.eventually("filled", func(s pool.Stats) bool { return s.Ready == 2 })
	o.must("pool", "set", "base-1x512", "--scale-to", "1%", "--max-age", "30m")
	out, err := o.ephemeral("pool", "show")
	if err != nil || !strings.Contains(out, "base-1x512  n1") {
		t.Errorf("%v\n%s", err, out)
	}
	out, err = o.ephemeral("pool", "show", "base-1x512")
	for _, want := range []string{"revision 1", "scale-to 0.01", "max-age 30m0s", "resized: To keep", "circuit"} {
		if err != nil || !strings.Contains(out, want) {
			t.Errorf("%q is missing: %v\n%s", want, err, out)
		}
	}
	out, err = o.ephemeral("pool", "top", "--times", "2", "--interval", (pools.ReportEvery + time.Second).String()) // a rate needs another report
	if err != nil || strings.Count(out, "base-1x512") != 2 || !strings.Contains(out, "0.00") {
		t.Errorf("%v\n%s", err, out)
	}
	out, err = o.ephemeral("pool", "top", "--times", "1", "--output", "json")
	var all []pools.Pool
	if err != nil || json.Unmarshal([]byte(out), &all) != nil || len(all) != 1 {
		t.Errorf("%v\n%s", err, out)
	}
	for _, sub := range []string{"show", "set", "drain", "top", "record", "simulate"} {
		if out, err := o.ephemeral("pool", sub, "--help"); err != nil || !strings.Contains(out, "ephemeral pool "+sub) || !strings.Contains(out, "--output") {
			t.Errorf("help of %s: %v\n%s", sub, err, out)
		}
	}
}

// A history is recorded as a trace that the simulator reads.
func TestOperatorsRecordATrace(t *testing.T) {
	o := operate(t, "n1", redisFor(t))
	o.eventually("filled", func(s pool.Stats) bool { return s.Ready == 2 })
	start := time.Now().Add(-time.Minute).Truncate(time.Millisecond)
	const uses = 1234
	for i := range uses { // told out of order, as runs end
		at := (i * 7) % uses
		o.control.Used("base-1x512", start.Add(time.Duration(at)*10*time.Millisecond), time.Duration(at)*time.Millisecond)
	}
	file := t.TempDir() + "/arrivals.csv"
	var out string
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		var err error
		out, err = o.ephemeral("pool", "record", "--file", file, "--output", "json")
		if err == nil && strings.Contains(out, fmt.Sprintf(`"arrivals": %d`, uses)) {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	text, err := o.ephemeral("pool", "record", "--since", "1h")
	if err != nil {
		t.Fatal(err)
	}
	got, err := trace.Read(strings.NewReader(text))
	if err != nil || len(got.Arrivals) != uses || !got.Service {
		t.Fatalf("%d arrivals, %v", len(got.Arrivals), err)
	}
	for i, a := range got.Arrivals {
		if a.At != time.Duration(i)*10*time.Millisecond || a.Service != time.Duration(i)*time.Millisecond {
			t.Fatalf("arrival %d: %+v", i, a)
		}
	}
	if out, err := o.ephemeral("pool", "simulate", "--trace", file, "--output", "json"); err != nil || !strings.Contains(out, fmt.Sprintf(`"arrivals": %d`, uses)) {
		t.Errorf("simulate: %v\n%s", err, out)
	}
}
