package machine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/images"
	"github.com/ephemeral-run/ephemeral/node/guest"
	"github.com/ephemeral-run/ephemeral/test/cloneid"
	"github.com/ephemeral-run/ephemeral/vmm"
)

const (
	// up is how long an old template's machine has been up. A kernel draws its generator a new key every few seconds after
	// boot, then once a minute, so clones of a young template differ by themselves soon, and hide what is missing.
	up = 4*time.Minute + 5*time.Second
	// behind is how far the clock of a template of yesterday is behind, and before how far that of one is ahead that was
	// made before the host's clock was set back.
	behind = 24 * time.Hour
	before = 2 * time.Hour
)

// old is a template of some age, and what became of its clones.
type old struct {
	name    string
	vmgenid bool
	age     hook
	check   func(t *testing.T, all []sibling)
	clones  int
	mutant  bool // its agent does not reseed

	all   []sibling
	delay time.Duration // from the template to the last clone
	err   error
}

// TestClonesOfOldTemplates: what holds of clones holds also of those that their kernels do not help: of a template that
// was up for more than four minutes, with and without the hypervisor's word that they are clones, of one that was made
// yesterday, and of one that was made before the host's clock was set back. Of clones whose agent leaves the reseed out it
// does not hold, and is seen not to.
func TestClonesOfOldTemplates(t *testing.T) {
	cases := []*old{
		{name: "up for four minutes", vmgenid: true, age: wait, check: demand, clones: 10},
		{name: "up for four minutes without vmgenid", vmgenid: false, age: wait, check: alike, clones: 10},
		{name: "without the reseed", vmgenid: false, age: wait, check: seen, clones: 6, mutant: true},
		{name: "a day old", vmgenid: true, age: setClock(-behind), check: late(-behind), clones: 10},
		{name: "host's clock set back", vmgenid: true, age: setClock(before), check: late(before), clones: 4},
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
			before, _ := looks(o.all)
			firsts := make(map[string]bool)
			for _, look := range before {
				firsts[look.Draws[0]] = true
			}
			t.Logf("%d clones, the last %v after the template; before Prepare %d of their first draws are distinct and %d are shared",
				len(o.all), o.delay.Round(time.Second), len(firsts), cloneid.SharedDraws(before))
			o.check(t, o.all)
		})
	}
}

// grow makes the template, and of it clones at once.
func (o *old) grow(ctx context.Context) (err error) {
	image, err := testImage()
	if err == nil && o.mutant {
		var dir string
		if dir, err = os.MkdirTemp("", "eph-mutant-*"); err == nil {
			defer os.RemoveAll(dir)
			image, err = withoutReseed(ctx, image, dir)
		}
	}
	if err != nil {
		return err
	}
	h, err := openHostOf(ctx, image, o.vmgenid, probe, o.age, templateLimit+up)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, h.close()) }()
	o.all, err = h.siblings(ctx, o.clones, true)
	o.delay = time.Since(h.template.MadeAt)
	return err
}

// alike demands that clones differ, and is the control: without Prepare they are alike, so the test would see it if Prepare
// did nothing. Should a kernel make them differ by itself, that is no fault, but then nothing is shown.
func alike(t *testing.T, all []sibling) {
	t.Helper()
	demand(t, all)
	if before, _ := looks(all); cloneid.SharedDraws(before) == 0 {
		t.Log("ATTENTION: clones that nobody has prepared share no randomness on this kernel. The test shows nothing about Prepare.")
	}
}

// seen demands that the kit sees clones whose agent did not reseed, and that nothing else is wrong with them.
func seen(t *testing.T, all []sibling) {
	t.Helper()
	shared := 0
	for _, f := range faults(all) {
		if f.Name == "clock" || f.Name == "hostname" || f.Name == "machine id" {
			t.Error(f)
		}
		if f.Name == "draws" {
			shared++
		}
	}
	if shared == 0 {
		t.Error("clones whose agent does not reseed were taken for individuals")
	}
	t.Logf("%d groups of clones share random values", shared)
}

// withoutReseed is the image with an agent that claims to reseed and does not.
func withoutReseed(ctx context.Context, image images.Image, dir string) (images.Image, error) {
	const file, begin = "../../guestagent/prepare/kernel.go", "Reseed(entropy []byte) error {\n"
	path, err := filepath.Abs(file)
	if err != nil {
		return image, err
	}
	code, err := os.ReadFile(path)
	if err != nil {
		return image, err
	}
	if strings.Count(string(code), begin) != 1 {
		return image, fmt.Errorf("%s: want one %q", file, begin)
	}
	mutant := filepath.Join(dir, "kernel.go")
	overlay, err := json.Marshal(map[string]any{"Replace": map[string]string{path: mutant}})
	if err != nil {
		return image, err
	}
	overlayFile, program := filepath.Join(dir, "overlay.json"), filepath.Join(dir, "init")
	if err := errors.Join(
		os.WriteFile(mutant, []byte(strings.Replace(string(code), begin, begin+"return nil\n", 1)), 0o644),
		os.WriteFile(overlayFile, overlay, 0o644), os.Chmod(dir, 0o755),
	); err != nil {
		return image, err
	}
	build := exec.CommandContext(ctx, "go", "build", "-buildvcs=false", "-ldflags=-s -w", "-overlay", overlayFile, "-o", program, "../../cmd/guestagent")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return image, fmt.Errorf("build the mutant: %w\n%s", err, out)
	}
	image.Initramfs, err = replaceInit(image.Initramfs, program, dir)
	return image, err
}

// late demands that clones differ, and is the control of the clock: it was off before Prepare, by what was set and by the
// time between template and clone, in which the template's clock stands still: some minutes on a busy host.
func late(by time.Duration) func(t *testing.T, all []sibling) {
	return func(t *testing.T, all []sibling) {
		t.Helper()
		demand(t, all)
		for i, s := range all {
			if (s.before.Ahead - by).Abs() > 15*time.Minute {
				t.Errorf("the clock of clone %d was %v ahead before Prepare, want about %v", i, s.before.Ahead, by)
			}
		}
	}
}

// probe runs a command and nothing else.
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

// setClock moves the clock of a template. A clone goes on with the time at which its template was taken, so to it this is a
// template that was made as long ago, or while the host's clock was wrong.
func setClock(by time.Duration) hook {
	return func(ctx context.Context, m vmm.Machine) error {
		then := time.Now().Add(by)
		_, err := (&machine{guest: guest.Connect(m.Dial)}).ask(ctx, warming("root", "date", "--set", fmt.Sprintf("@%d", then.Unix())))
		return err
	}
}

func warming(user string, args ...string) guest.Command {
	return guest.Command{Args: args, User: user, Warming: true, Cwd: "/"}
}
