package machine

import (
	"bufio"
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/node/guest"
)

// atOnce bounds how many machines a test makes at the same time: an emulated one uses a whole processor.
const atOnce = 2

//go:embed testdata/observe.py
var observeScript string

// observation is what can be told of a machine from inside, as the worker, who must not be able to tell another's future.
type observation struct {
	Traits map[string]string `json:"traits"` // what must differ; empty before Prepare
	Draws  []string          `json:"draws"`  // random values
	// ahead is how far the clock is ahead of the host's, and roundTrip what it was measured by: half of it is the error
	// at the most.
	ahead, roundTrip time.Duration
}

// observe runs observe.py, which tells what it sees and then, for each line, the time.
func (m *machine) observe(ctx context.Context) (o observation, err error) {
	ctx, cancel := context.WithTimeout(ctx, commandLimit)
	defer cancel()
	in, input := io.Pipe()
	output, out := io.Pipe()
	var stderr bytes.Buffer
	ended := make(chan error, 1)
	go func() {
		c := guest.Command{Args: []string{"python3", "-u", "-c", observeScript}, Stdin: in}
		if m.prepared.Scratch == "" {
			c.Args, c.Warming, c.Cwd = append(c.Args, "draws"), true, "/"
		}
		exit, err := m.guest.Exec(ctx, c, out, &stderr)
		if err == nil && exit.Code != 0 {
			err = fmt.Errorf("exit code %d: %s", exit.Code, stderr.String())
		}
		_ = out.Close()
		_ = in.CloseWithError(io.ErrClosedPipe)
		ended <- err
	}()
	lines := bufio.NewReader(output)
	first, err := lines.ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(first, &o)
	}
	if err == nil {
		err = o.measure(input, lines)
	}
	_ = input.Close()
	_ = output.Close()
	return o, errors.Join(err, <-ended)
}

// measure compares the clocks, until a round trip was short enough to tell.
func (o *observation) measure(input io.Writer, lines *bufio.Reader) error {
	o.roundTrip = time.Hour
	for tries := 0; tries < 200 && (tries < 5 || o.roundTrip > 10*time.Millisecond); tries++ {
		sent := time.Now()
		if _, err := input.Write([]byte("\n")); err != nil {
			return err
		}
		line, err := lines.ReadString('\n')
		if err != nil {
			return err
		}
		took := time.Since(sent)
		now, err := strconv.ParseInt(strings.TrimSpace(line), 10, 64)
		if err != nil {
			return err
		}
		if took < o.roundTrip {
			o.ahead, o.roundTrip = time.Unix(0, now).Sub(sent.Add(took/2)), took
		}
	}
	return nil
}

// check says what is wrong with what was seen of a prepared machine by itself.
func (o *observation) check(m *machine) error {
	for name, want := range map[string]string{
		"hostname": m.identity.Hostname, "/etc/hostname": m.identity.Hostname, "machine id": m.identity.MachineID,
		"MAC address": m.identity.MAC, "address": strings.TrimSuffix(m.identity.Address, "/32"), "scratch": m.prepared.Scratch,
	} {
		if o.Traits[name] != want {
			return fmt.Errorf("%s is %q, want %q", name, o.Traits[name], want)
		}
	}
	// On a host so busy that no round trip is short, what the long one cannot tell is allowed.
	allowed := guest.MaxClockError
	if o.roundTrip > 20*time.Millisecond {
		allowed += o.roundTrip / 2
	}
	if o.ahead.Abs() > allowed {
		return fmt.Errorf("the guest's clock is %v ahead of the host's, measured by a round trip of %v", o.ahead, o.roundTrip)
	}
	return nil
}

// sibling is one clone, seen before and after it was prepared.
type sibling struct {
	before, after observation
	refused       []error // why others that were made in its place were not used
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
	defer func() { err = errors.Join(err, m.Close()) }()
	if first {
		if s.before, err = m.observe(ctx); err != nil {
			return fmt.Errorf("before Prepare: %w", err)
		}
	}
	if err := m.prepare(ctx); err != nil {
		return err
	}
	if s.after, err = m.observe(ctx); err != nil {
		return err
	}
	return s.after.check(m)
}

// demand checks that siblings have nothing in common.
func demand(t *testing.T, all []sibling) {
	t.Helper()
	var traits []map[string]string
	var before, after [][]string
	var clocks []string
	for _, s := range all {
		traits, after = append(traits, s.after.Traits), append(after, s.after.Draws)
		before = append(before, s.before.Draws)
		clocks = append(clocks, fmt.Sprintf("%v±%v", s.after.ahead.Round(time.Microsecond), (s.after.roundTrip/2).Round(time.Microsecond)))
		if len(s.after.Draws) < 64 || len(s.after.Traits) < 15 {
			t.Errorf("observed too little: %+v", s.after)
		}
		for _, err := range s.refused {
			t.Logf("ATTENTION: a machine was refused, as it should on a host too busy to compare clocks: %v", err)
		}
	}
	differ(t, traits)
	if n := shared(after); n != 0 {
		t.Errorf("%d random values occur in more than one machine", n)
	}
	if n := shared(append(before, after...)) - shared(before); n != 0 {
		t.Errorf("%d random values from before Prepare occur after it", n)
	}
	t.Logf("compared %q; clocks ahead by %v", names(traits), clocks)
}

// differ checks that no two machines have the same value of any trait.
func differ(t *testing.T, all []map[string]string) {
	t.Helper()
	for _, name := range names(all) {
		seen := make(map[string]int)
		for i, traits := range all {
			if traits == nil {
				continue
			}
			value := traits[name]
			if other, taken := seen[value]; taken || value == "" {
				t.Errorf("machines %d and %d have the same %s: %q", other, i, name, value)
			}
			seen[value] = i
		}
	}
}

func names(all []map[string]string) (names []string) {
	for _, traits := range all {
		for name := range traits {
			if !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	slices.Sort(names)
	return names
}

// shared is how many values occur in more than one machine's draws.
func shared(all [][]string) int {
	owner, common := make(map[string]int), make(map[string]bool)
	for i, draws := range all {
		for _, d := range draws {
			if other, taken := owner[d]; taken && other != i {
				common[d] = true
			}
			owner[d] = i
		}
	}
	return len(common)
}

// TestClonesDiffer: machines of one template have nothing in common that should be an individual's own.
func TestClonesDiffer(t *testing.T) {
	t.Parallel()
	h := commonHost(t)
	for _, n := range []int{2, 20} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			all, err := h.siblings(t.Context(), n, false)
			if err != nil {
				t.Fatal(err)
			}
			demand(t, all)
		})
	}
}
