package machine

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/node/guest"
	"github.com/ephemeral-run/ephemeral/vmm"
)

const (
	// up is how long an old template's machine has been up. A kernel draws its generator a new key every few seconds after
	// boot, then once a minute, so clones of a young template differ by themselves soon, and hide what is missing.
	up = 4*time.Minute + 5*time.Second
	// behind is how far the clock of a template is behind.
	behind = time.Hour
)

// TestClonesOfOldTemplates: what holds of clones holds also of those that their kernels do not help: of a template that
// was up for more than four minutes, with and without the hypervisor's word that they are clones, and of one that was
// made an hour ago.
func TestClonesOfOldTemplates(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		vmgenid bool
		age     func(context.Context, vmm.Machine) error
		check   func(t *testing.T, before [][]string, clocks []time.Duration)
	}{
		{"up for four minutes", true, wait, nil},
		{"up for four minutes without vmgenid", false, wait, alike},
		{"an hour old", true, setBack, late},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel() // they wait together
			warm := func(ctx context.Context, m vmm.Machine) error {
				if err := guest.Warm(ctx, m); err != nil {
					return err
				}
				return c.age(ctx, m)
			}
			h, err := openHost(t.Context(), c.vmgenid, warm, templateLimit+up)
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := h.close(); err != nil {
					t.Error(err)
				}
			}()
			checkOld(t, h, c.check)
		})
	}
}

// checkOld makes clones of a template at once, looks at them before they are prepared, and demands all of them after.
func checkOld(t *testing.T, h *host, check func(*testing.T, [][]string, []time.Duration)) {
	t.Helper()
	if age := time.Since(h.template.MadeAt); age > 30*time.Second {
		t.Logf("the template is %v old already", age)
	}
	const n = 10
	before, after := make([][]string, n), make([][]string, n)
	clocks, traits := make([]time.Duration, n), make([]map[string]string, n)
	h.clones(t, n, func(i int, m *machine) (err error) {
		if before[i], err = m.draws(t.Context()); err != nil {
			return err
		}
		if clocks[i], _, err = m.clock(t.Context()); err != nil {
			return err
		}
		if err = m.prepare(t.Context()); err != nil {
			return err
		}
		if traits[i], err = m.traits(t.Context()); err != nil {
			return err
		}
		if after[i], err = m.draws(t.Context()); err != nil {
			return err
		}
		return m.checkClock(t.Context())
	})
	if t.Failed() {
		return
	}
	differ(t, traits)
	first := make(map[string]bool)
	for _, draws := range before {
		first[draws[0]] = true
	}
	t.Logf("before Prepare: %d first draws of %d clones are distinct, %d values are shared; clocks ahead by %v",
		len(first), n, shared(before), clocks)
	if s := shared(append(before, after...)) - shared(before); s != 0 || shared(after) != 0 {
		t.Errorf("after Prepare %d random values occur in more than one machine, and %d had occurred before", shared(after), s)
	}
	if check != nil {
		check(t, before, clocks)
	}
}

// alike is the control: without Prepare these clones are alike, so the test would see it if Prepare did nothing. Should a
// kernel make them differ by itself, that is no fault, but then nothing is shown.
func alike(t *testing.T, before [][]string, _ []time.Duration) {
	t.Helper()
	if shared(before) == 0 {
		t.Log("ATTENTION: clones that nobody has prepared share no randomness on this kernel. The test shows nothing about Prepare.")
	}
}

// late is the control of the clock: it was wrong before Prepare.
func late(t *testing.T, _ [][]string, clocks []time.Duration) {
	t.Helper()
	for i, ahead := range clocks {
		if ahead > -behind+time.Minute {
			t.Errorf("the clock of clone %d was %v ahead before Prepare, want an hour behind", i, ahead)
		}
	}
}

// wait lets a machine grow old.
func wait(ctx context.Context, m vmm.Machine) error {
	for {
		out, err := (&machine{guest: guest.Connect(m.Dial)}).ask(ctx, warming("worker", "cat", "/proc/uptime"))
		if err != nil {
			return err
		}
		seconds, err := strconv.ParseFloat(strings.Fields(out + " ?")[0], 64)
		if err != nil {
			return fmt.Errorf("uptime: %w", err)
		}
		left := up - time.Duration(seconds*float64(time.Second))
		if left <= 0 {
			return nil
		}
		select {
		case <-time.After(left):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// setBack sets the clock back by an hour. A clone goes on with the time at which its template was taken, so to it this is
// a template that was made an hour ago.
func setBack(ctx context.Context, m vmm.Machine) error {
	then := time.Now().Add(-behind)
	_, err := (&machine{guest: guest.Connect(m.Dial)}).ask(ctx, warming("root", "date", "--set", fmt.Sprintf("@%d", then.Unix())))
	return err
}

func warming(user string, args ...string) guest.Command {
	return guest.Command{Args: args, User: user, Warming: true, Cwd: "/"}
}
