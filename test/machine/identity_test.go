package machine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/node/guest"
	"github.com/ephemeral-run/ephemeral/test/cloneid"
	"github.com/ephemeral-run/ephemeral/vmm"
)

// atOnce bounds how many machines a test makes at the same time: an emulated one uses a whole processor.
const atOnce = 2

// goProbe builds the Go probe once, static.
var goProbe = sync.OnceValues(func() ([]byte, error) {
	dir, err := os.MkdirTemp("", "eph-probe-*")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "probe")
	build := exec.Command("go", "build", "-buildvcs=false", "-ldflags=-s -w", "-o", path, "../cloneid/probe")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("build the Go probe: %w\n%s", err, out)
	}
	return os.ReadFile(path)
})

// probePath is where the Go probe is in templates of this package, and so in machines.
const probePath = "/tmp/clone-probe"

// carry puts the Go probe into a machine that a template is to be made of, and observes it, so that clones need not read from
// their disks what an observation needs.
func carry(ctx context.Context, m vmm.Machine) error {
	probe, err := goProbe()
	if err != nil {
		return err
	}
	one := &machine{guest: guest.Connect(m.Dial)}
	put := warming("worker", "sh", "-c", "cat > "+probePath+" && chmod 755 "+probePath)
	put.Stdin = bytes.NewReader(probe)
	if _, err := one.ask(ctx, put); err != nil {
		return err
	}
	_, err = one.observe(ctx, false)
	return err
}

// observe looks at a machine from inside, as the worker, who must not be able to tell another's future.
func (m *machine) observe(ctx context.Context, drawsOnly bool) (cloneid.Observation, error) {
	ctx, cancel := context.WithTimeout(ctx, commandLimit)
	defer cancel()
	return cloneid.Observe(ctx, func(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) error {
		c := guest.Command{Args: args, Stdin: stdin}
		if m.prepared.Scratch == "" {
			c.Warming, c.Cwd = true, "/"
		}
		exit, err := m.guest.Exec(ctx, c, stdout, stderr)
		if err == nil && exit.Code != 0 {
			err = fmt.Errorf("exit code %d", exit.Code)
		}
		return err
	}, cloneid.Options{DrawsOnly: drawsOnly, GoProbe: probePath})
}

// check says whether a prepared machine has the identity that it was given.
func check(o *cloneid.Observation, m *machine) error {
	for name, want := range map[string]string{
		"hostname": m.identity.Hostname, "/etc/hostname": m.identity.Hostname, "machine id": m.identity.MachineID,
		"MAC address of eth0": m.identity.MAC, "IP addresses": strings.TrimSuffix(m.identity.Address, "/32"), "working directory": m.prepared.Scratch,
	} {
		if o.Values[name] != want {
			return fmt.Errorf("%s is %q, want %q", name, o.Values[name], want)
		}
	}
	return nil
}

// sibling is one clone, seen before and after it was prepared.
type sibling struct {
	before, after cloneid.Observation
	refused       []error // why others that were made in its place were not used
	cpu           time.Duration
}

// siblings makes n clones, a few at a time. Those before Prepare are looked at if first.
func (h *host) siblings(ctx context.Context, n int, first bool) ([]sibling, error) {
	var wg sync.WaitGroup
	all, errs := make([]sibling, n), make([]error, n)
	slots := make(chan struct{}, atOnce)
	for i := range n {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			for range 4 {
				err := h.sibling(ctx, &all[i], first)
				if !errors.Is(err, guest.ErrNotPrepared) {
					errs[i] = err
					return
				}
				all[i].refused = append(all[i].refused, err)
			}
			errs[i] = errors.Join(all[i].refused...)
		})
	}
	wg.Wait()
	return all, errors.Join(errs...)
}

func (h *host) sibling(ctx context.Context, s *sibling, first bool) (err error) {
	m, err := h.clone(ctx)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil && !errors.Is(err, guest.ErrNotPrepared) {
			err = errors.Join(err, m.end())
		}
		err = errors.Join(err, m.Close())
	}()
	if first {
		if s.before, err = m.observe(ctx, true); err != nil {
			return fmt.Errorf("before Prepare: %w", err)
		}
	}
	if err := m.prepare(ctx); err != nil {
		return err
	}
	if s.after, err = m.observe(ctx, false); err != nil {
		return err
	}
	stats, err := m.Stats()
	if err != nil {
		return err
	}
	s.cpu = stats.CPU
	return check(&s.after, m)
}

// end says how a machine ended that somebody lost the connection to, or that it did not.
func (m *machine) end() error {
	select {
	case <-m.Done():
		return fmt.Errorf("the machine has ended: %v", m.Err()) // nil: it was powered off
	case <-time.After(2 * time.Second):
		return errors.New("the machine lives")
	}
}

// limits are what is demanded of machines of the base image.
func limits() cloneid.Limits {
	l := cloneid.DefaultLimits
	l.ClockError = guest.MaxClockError
	l.Required = append(l.Required[:len(l.Required):len(l.Required)], "Go crypto/rand", "Go maphash", "Go temporary name", "bash SRANDOM", "memory layout", "MAC address of eth0", "IP addresses")
	return l
}

// faults are what siblings have in common, and what is wrong with each.
func faults(all []sibling) []cloneid.Fault {
	before, after := looks(all)
	return cloneid.Compare(after, before, limits())
}

func looks(all []sibling) (before, after []cloneid.Observation) {
	for _, s := range all {
		before, after = append(before, s.before), append(after, s.after)
	}
	return before, after
}

// demand checks that siblings have nothing in common.
func demand(t *testing.T, all []sibling) {
	t.Helper()
	for _, f := range faults(all) {
		t.Error(f)
	}
	var worst time.Duration
	for _, s := range all {
		worst = max(worst, s.after.Ahead.Abs())
		if len(s.after.Draws) < 64 {
			t.Errorf("observed too little: %+v", s.after)
		}
		for _, err := range s.refused {
			t.Logf("ATTENTION: a machine was refused, as it should on a host too busy to compare clocks: %v", err)
		}
	}
	_, after := looks(all)
	t.Logf("compared %d machines by %q; clocks off by %v at most", len(all), cloneid.Names(after), worst.Round(time.Microsecond))
}

// clones is how many machines TestClonesDiffer compares; EPHEMERAL_CLONES changes it. An emulated one takes about 1.5 s of a
// processor.
const clones = 100

// TestClonesDiffer: machines of one template have nothing in common that should be an individual's own.
func TestClonesDiffer(t *testing.T) {
	t.Parallel()
	h := commonHost(t)
	n := clones
	if v := os.Getenv("EPHEMERAL_CLONES"); v != "" {
		var err error
		if n, err = strconv.Atoi(v); err != nil || n < 2 {
			t.Fatalf("EPHEMERAL_CLONES=%s", v)
		}
	}
	began := time.Now()
	all, err := h.siblings(t.Context(), n, false)
	if err != nil {
		t.Fatal(err)
	}
	demand(t, all)
	var cpu time.Duration
	for _, s := range all {
		cpu += s.cpu
	}
	t.Logf("%d clones in %v; each took %v of a processor", n, time.Since(began).Round(time.Second), (cpu / time.Duration(n)).Round(time.Millisecond))
}
