package provision_test

import (
	"context"
	"errors"
	"os"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/pool/replay"
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
	most := before + 1<<20 + uint64(rounds)*1024
	after := heap()
	for end := time.Now().Add(75 * time.Second); after > most && time.Now().Before(end); after = heap() {
		time.Sleep(time.Second) // a connection that was not answered is remembered for a minute
	}
	t.Logf("%d restores in %.1f s, none lost; heap %d KiB before, %d KiB after; open files %d before, %d after",
		rounds, time.Since(began).Seconds(), before>>10, after>>10, files, descriptors(t))
	if n := descriptors(t); n > files+8 { // a spare being launched has some
		t.Errorf("%d open files before, %d after", files, n)
	}
	if after > most {
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

// TestSimulatorPredictsThisHost replays a trace against a pool of real machines and against the simulator.
// EPHEMERAL_TEST_ARRIVALS makes it longer.
func TestSimulatorPredictsThisHost(t *testing.T) {
	arrivals := number(t, "EPHEMERAL_TEST_ARRIVALS", 20)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	p, tmpl, end := openWith(ctx, t, realConfig(lasting(t)))
	o, err := replay.Run(ctx, func(ctx context.Context) (*provision.Machine, error) { return p.Create(ctx, tmpl) }, arrivals, 300*time.Millisecond)
	if err := errors.Join(err, end()); err != nil {
		t.Fatal(err)
	}
	t.Log(o)
	if !o.Holds() {
		t.Error("not within 20 percent of the misses and 30 percent of the wait: ", o)
	}
}
