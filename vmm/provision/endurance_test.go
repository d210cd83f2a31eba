package provision_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"os"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/pool"
	"github.com/ephemeral-run/ephemeral/vmm/pool/simulate"
	"github.com/ephemeral-run/ephemeral/vmm/pool/workload"
	"github.com/ephemeral-run/ephemeral/vmm/provision"
)

// number is a scale of a test that a variable of the environment makes longer.
func number(t *testing.T, variable string, otherwise int) int {
	t.Helper()
	text := os.Getenv(variable)
	if text == "" {
		return otherwise
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		t.Fatalf("%s=%q: want a positive number", variable, text)
	}
	return n
}

// TestManyRestores makes machines one after the other, and twelve at once, with spares in hand. None may be lost, what the
// node takes must not grow, and nothing may be left. It runs where EPHEMERAL_TEST_RESTORES says how many; 300 is the whole of it.
func TestManyRestores(t *testing.T) {
	if os.Getenv("EPHEMERAL_TEST_RESTORES") == "" {
		t.Skip("set EPHEMERAL_TEST_RESTORES, to 300 for the whole of it")
	}
	rounds := number(t, "EPHEMERAL_TEST_RESTORES", 300)
	dir := reachable(t)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	c := realConfig(dir)
	c.Spares = 1
	p, tmpl, end := openWith(ctx, t, c)
	once := func() error {
		m, err := p.Create(ctx, tmpl)
		if err != nil {
			return err
		}
		return m.Close()
	}
	for range 5 { // what is made once and kept
		if err := once(); err != nil {
			t.Fatal(err)
		}
	}
	before := heap()
	began := time.Now()
	for i := range rounds {
		if err := once(); err != nil {
			t.Fatalf("restore %d of %d: %v", i+1, rounds, err)
		}
	}
	after := heap()
	t.Logf("%d restores in %.1f s, none lost; heap %d KiB before, %d KiB after", rounds, time.Since(began).Seconds(), before>>10, after>>10)
	if after > before+(1<<20)+uint64(rounds)*1024 {
		t.Errorf("the heap grew from %d to %d bytes over %d restores", before, after, rounds)
	}
	const atOnce = 12
	var all sync.WaitGroup
	machines, errs := make([]*provision.Machine, atOnce), make([]error, atOnce)
	began = time.Now()
	for i := range atOnce {
		all.Go(func() { machines[i], errs[i] = p.Create(ctx, tmpl) })
	}
	all.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d at once in %.1f s", atOnce, time.Since(began).Seconds())
	for _, m := range machines {
		all.Go(func() {
			if err := m.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if err := end(); err != nil {
		t.Error(err)
	}
	nothingLeft(t, dir)
}

// heap is what this process has in use after a collection.
func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// openWith opens a provisioner of the configuration with its template.
func openWith(ctx context.Context, t *testing.T, c provision.Config) (*provision.Provisioner, vmm.Template, func() error) {
	t.Helper()
	img, err := realImage()
	if err != nil {
		t.Fatal(err)
	}
	driver, err := realDriver()
	if err != nil {
		t.Fatal(err)
	}
	p, err := provision.New(ctx, c, driver, realAgent())
	if err != nil {
		t.Fatal(err)
	}
	end := func() error { return errors.Join(p.Close(), driver.Close()) }
	tmpl, err := p.Template(ctx, img, c.Shape(), nil)
	if err != nil {
		t.Fatal(errors.Join(err, end()))
	}
	return p, tmpl, end
}

// TestSimulatorPredictsThisHost replays a trace against a pool of real machines and against the simulator, which is given how
// long making and destroying machines took meanwhile. Other work on the host between the makes of the one and
// the other would be taken for an error of the simulator, so it runs where it is asked for.
func TestSimulatorPredictsThisHost(t *testing.T) {
	if os.Getenv("EPHEMERAL_TEST_ARRIVALS") == "" {
		t.Skip("it needs a host that does nothing else: set EPHEMERAL_TEST_ARRIVALS, to 60 or more")
	}
	arrivals := number(t, "EPHEMERAL_TEST_ARRIVALS", 60)
	dir := reachable(t)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	p, tmpl, end := openWith(ctx, t, realConfig(dir))
	defer func() {
		if err := end(); err != nil {
			t.Error(err)
		}
	}()
	var mu sync.Mutex
	var makes, destroys []time.Duration
	note := func(to *[]time.Duration, d time.Duration) {
		mu.Lock()
		defer mu.Unlock()
		*to = append(*to, d)
	}
	cfg := pool.Config{MinReady: 1, MaxReady: 2, MaxMachines: 6, RefillConcurrency: 1, MakeTimeout: time.Minute}
	machines, err := pool.New(cfg, func(ctx context.Context) (*provision.Machine, error) {
		began := time.Now()
		m, err := p.Create(ctx, tmpl)
		note(&makes, time.Since(began))
		return m, err
	}, pool.WithLogger(slog.New(slog.NewTextHandler(io.Discard, nil))))
	if err != nil {
		t.Fatal(err)
	}
	for machines.Stats().Ready < 1 {
		time.Sleep(10 * time.Millisecond)
	}
	first := makes[0]
	process := workload.Poisson(0.7 / first.Seconds()) // so that the maker has much to do, as in a burst
	trace := workload.Workload{Process: process, Service: workload.Const(300 * time.Millisecond), Count: arrivals, Seed: 7}
	var given []workload.Arrival
	for next := trace.Start(); ; {
		a, ok := next()
		if !ok {
			break
		}
		given = append(given, a)
	}
	var waits []float64
	var runs sync.WaitGroup
	began := time.Now()
	for _, a := range given {
		time.Sleep(time.Until(began.Add(a.At)))
		runs.Go(func() {
			from := time.Now()
			m, err := machines.Claim(ctx)
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			waits = append(waits, time.Since(from).Seconds())
			mu.Unlock()
			machines.Settled(m)
			time.Sleep(a.Service)
			from = time.Now()
			if err := m.Close(); err != nil {
				t.Error(err)
			}
			note(&destroys, time.Since(from))
			machines.Released(m)
		})
	}
	runs.Wait()
	stats := machines.Stats()
	if err := machines.Close(); err != nil {
		t.Error(err)
	}
	want := predicted(ctx, t, cfg, given, makes[1:], destroys)
	missed := 1 - float64(stats.Hits)/float64(len(waits))
	slices.Sort(waits)
	p95 := waits[len(waits)*95/100]
	said := fmt.Sprintf("%d arrivals, a make takes %s: missed %.3f, predicted %.3f; p95 of the waits %.3f s, predicted %.3f s",
		arrivals, first.Round(time.Millisecond), missed, want.MissRate, p95, want.WaitP95)
	t.Log(said)
	if math.Abs(missed-want.MissRate) > 0.2*missed+1/float64(arrivals) || math.Abs(p95-want.WaitP95) > 0.3*p95+0.02 {
		t.Error("not within 20 percent of the misses and 30 percent of the wait: ", said)
	}
}

// predicted is what the simulator says of the trace.
func predicted(ctx context.Context, t *testing.T, cfg pool.Config, given []workload.Arrival, makes, destroys []time.Duration) simulate.Result {
	t.Helper()
	restore, err := workload.Empirical("makes", makes)
	if err != nil {
		t.Fatal(err)
	}
	destroy, err := workload.Empirical("destroys", destroys)
	if err != nil {
		t.Fatal(err)
	}
	r, err := simulate.Run(ctx, simulate.Config{
		Pool: cfg, Restore: restore, Destroy: destroy, Settle: workload.Const(0), MaxWait: -1, MemoryMiB: 512, ReadyMemoryMiB: 512,
		Workload: workload.Workload{Given: given, ServiceGiven: true, Count: len(given), Seed: 1},
	})
	if err != nil {
		t.Fatal(err)
	}
	return r
}
