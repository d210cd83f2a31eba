package provision_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
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
// node takes must not grow, and nothing may be left. EPHEMERAL_TEST_RESTORES says how many; 300 and twelve at once is the
// whole of it.
func TestManyRestores(t *testing.T) {
	rounds, atOnce := number(t, "EPHEMERAL_TEST_RESTORES", 12), 6
	if rounds >= 100 {
		atOnce = 12
	}
	dir := lasting(t)
	ctx, cancel := context.WithTimeout(t.Context(), 15*time.Minute)
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
	for range 3 { // what is made once and kept
		if err := once(); err != nil {
			t.Fatal(err)
		}
	}
	before, files := heap(), descriptors(t)
	began := time.Now()
	for i := range rounds {
		if err := once(); err != nil {
			t.Fatalf("restore %d of %d: %v", i+1, rounds, err)
		}
	}
	after := heap()
	t.Logf("%d restores in %.1f s, none lost; heap %d KiB before, %d KiB after; open files %d before, %d after",
		rounds, time.Since(began).Seconds(), before>>10, after>>10, files, descriptors(t))
	if n := descriptors(t); n > files+8 { // a spare being launched has some
		t.Errorf("%d open files before, %d after", files, n)
	}
	if after > before+(1<<20)+uint64(rounds)*1024 {
		t.Errorf("the heap grew from %d to %d bytes over %d restores", before, after, rounds)
	}
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

// TestSimulatorPredictsThisHost replays a trace against a pool of real machines and against the simulator, which takes for
// each machine what making and destroying it took meanwhile: what else the host does hits both alike, and what is compared is
// what pool and policy make of it. EPHEMERAL_TEST_ARRIVALS makes it longer.
func TestSimulatorPredictsThisHost(t *testing.T) {
	arrivals := number(t, "EPHEMERAL_TEST_ARRIVALS", 20)
	dir := lasting(t)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	p, tmpl, end := openWith(ctx, t, realConfig(dir))
	defer func() {
		if err := end(); err != nil {
			t.Error(err)
		}
	}()
	cfg := pool.Config{MinReady: 1, MaxReady: 2, MaxMachines: 6, RefillConcurrency: 1, MakeTimeout: time.Minute}
	r := &replay{t: t, ctx: ctx, destroys: make([]time.Duration, arrivals)}
	machines, err := pool.New(cfg, func(ctx context.Context) (*provision.Machine, error) { return r.make(ctx, p, tmpl) },
		pool.WithLogger(slog.New(slog.DiscardHandler)))
	if err != nil {
		t.Fatal(err)
	}
	for machines.Stats().Ready < 1 {
		time.Sleep(10 * time.Millisecond)
	}
	first := r.makes[0]
	process := workload.Poisson(1 / first.Seconds()) // so that the maker has much to do, as in a burst
	trace := workload.Workload{Process: process, Service: workload.Const(300 * time.Millisecond), Count: arrivals, Seed: 7}
	var given []workload.Arrival
	next := trace.Start()
	for a, ok := next(); ok; a, ok = next() {
		given = append(given, a)
	}
	r.play(machines, given)
	stats := machines.Stats()
	if err := machines.Close(); err != nil {
		t.Error(err)
	}
	want := r.predicted(cfg, given)
	missed := 1 - float64(stats.Hits)/float64(arrivals)
	slices.Sort(r.waits)
	p95 := r.waits[(len(r.waits)*95+99)/100-1]
	said := fmt.Sprintf("%d arrivals, a make takes %s: missed %.3f, predicted %.3f; p95 of the waits %.3f s, predicted %.3f s",
		arrivals, first.Round(time.Millisecond), missed, want.MissRate, p95, want.WaitP95)
	t.Log(said)
	if missed == 0 || math.Abs(missed-want.MissRate) > 0.2*missed || math.Abs(p95-want.WaitP95) > 0.3*p95 {
		t.Error("not within 20 percent of the misses and 30 percent of the wait: ", said)
	}
}

// replay is a trace played on real machines, and how long those took.
type replay struct {
	t   *testing.T
	ctx context.Context

	mu       sync.Mutex
	makes    []time.Duration // in order: one is made at a time
	destroys []time.Duration // in the order in which the machines were claimed
	waits    []float64       // seconds
}

func (r *replay) make(ctx context.Context, p *provision.Provisioner, tmpl vmm.Template) (*provision.Machine, error) {
	began := time.Now()
	m, err := p.Create(ctx, tmpl)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.makes = append(r.makes, time.Since(began))
	return m, err
}

// play has the arrivals come at their times, and waits until all have been served.
func (r *replay) play(machines *pool.Pool[*provision.Machine], given []workload.Arrival) {
	var runs sync.WaitGroup
	began := time.Now()
	for _, a := range given {
		time.Sleep(time.Until(began.Add(a.At)))
		runs.Go(func() {
			from := time.Now()
			m, err := machines.Claim(r.ctx)
			if err != nil {
				r.t.Error(err)
				return
			}
			r.mu.Lock()
			n := len(r.waits)
			r.waits = append(r.waits, time.Since(from).Seconds())
			r.mu.Unlock()
			machines.Settled(m)
			time.Sleep(a.Service)
			from = time.Now()
			if err := m.Close(); err != nil {
				r.t.Error(err)
			}
			r.mu.Lock()
			r.destroys[n] = time.Since(from)
			r.mu.Unlock()
			machines.Released(m)
		})
	}
	runs.Wait()
}

// predicted is what the simulator says of the trace.
func (r *replay) predicted(cfg pool.Config, given []workload.Arrival) simulate.Result {
	r.t.Helper()
	result, err := simulate.Run(r.ctx, simulate.Config{
		Pool: cfg, Restore: &measured{all: r.makes}, Destroy: &measured{all: r.destroys}, Settle: workload.Const(0), MaxWait: -1,
		MemoryMiB: 512, ReadyMemoryMiB: 512,
		Workload: workload.Workload{Given: given, ServiceGiven: true, Count: len(given), Seed: 1},
	})
	if err != nil {
		r.t.Fatal(err)
	}
	return result
}

// measured is a distribution that gives what was measured, in its order, and after that the mean.
type measured struct {
	all  []time.Duration
	next int
}

// Sample gives the next one.
func (m *measured) Sample(*rand.Rand) time.Duration {
	if m.next < len(m.all) {
		m.next++
		return m.all[m.next-1]
	}
	return m.Mean()
}

// Mean is that of all.
func (m *measured) Mean() time.Duration {
	var sum time.Duration
	for _, d := range m.all {
		sum += d
	}
	return sum / time.Duration(max(1, len(m.all)))
}

func (m *measured) String() string { return fmt.Sprintf("%d measured", len(m.all)) }
