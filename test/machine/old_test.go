package machine

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
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

// old is a template of some age, and what became of its clones.
type old struct {
	name    string
	vmgenid bool
	age     hook
	check   func(t *testing.T, all []sibling)

	all   []sibling
	delay time.Duration // from the template to the last clone
	err   error
}

// TestClonesOfOldTemplates: what holds of clones holds also of those that their kernels do not help: of a template that
// was up for more than four minutes, with and without the hypervisor's word that they are clones, and of one that was
// made an hour ago.
func TestClonesOfOldTemplates(t *testing.T) {
	cases := []*old{
		{name: "up for four minutes", vmgenid: true, age: wait, check: func(*testing.T, []sibling) {}},
		{name: "up for four minutes without vmgenid", vmgenid: false, age: wait, check: alike},
		{name: "an hour old", vmgenid: true, age: setBack, check: late},
	}
	// The waits go on beside each other and beside the other tests.
	var grown sync.WaitGroup
	for _, o := range cases {
		grown.Go(func() { o.err = o.grow(t.Context()) })
	}
	t.Parallel()
	grown.Wait()
	for _, o := range cases {
		t.Run(o.name, func(t *testing.T) {
			if o.err != nil {
				t.Fatal(o.err)
			}
			firsts, before := make(map[string]bool), [][]string{}
			for _, s := range o.all {
				firsts[s.before.Draws[0]] = true
				before = append(before, s.before.Draws)
			}
			t.Logf("%d clones, the last %v after the template; before Prepare %d of their first draws are distinct and %d values are shared",
				len(o.all), o.delay.Round(time.Second), len(firsts), shared(before))
			demand(t, o.all)
			o.check(t, o.all)
		})
	}
}

// grow makes the template, and of it clones at once.
func (o *old) grow(ctx context.Context) (err error) {
	h, err := openHost(ctx, o.vmgenid, probe, o.age, templateLimit+up)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, h.close()) }()
	o.all, err = h.siblings(ctx, 10, true)
	o.delay = time.Since(h.template.MadeAt)
	return err
}

// alike is the control: without Prepare these clones are alike, so the test would see it if Prepare did nothing. Should a
// kernel make them differ by itself, that is no fault, but then nothing is shown.
func alike(t *testing.T, all []sibling) {
	t.Helper()
	var before [][]string
	for _, s := range all {
		before = append(before, s.before.Draws)
	}
	if shared(before) == 0 {
		t.Log("ATTENTION: clones that nobody has prepared share no randomness on this kernel. The test shows nothing about Prepare.")
	}
}

// late is the control of the clock: it was wrong before Prepare.
func late(t *testing.T, all []sibling) {
	t.Helper()
	for i, s := range all {
		if s.before.ahead > -behind+time.Minute {
			t.Errorf("the clock of clone %d was %v ahead before Prepare, want an hour behind", i, s.before.ahead)
		}
	}
}

// probe runs a command and nothing else. A node's own probe rehearses Prepare, so that clones would differ before it.
func probe(ctx context.Context, m vmm.Machine) error {
	_, err := (&machine{guest: guest.Connect(m.Dial)}).ask(ctx, warming("worker", "/bin/true"))
	return err
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
