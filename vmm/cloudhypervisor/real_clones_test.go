package cloudhypervisor_test

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/node/guest"
	"github.com/ephemeral-run/ephemeral/vmm/vmmtest"
)

// TestRealManyClones makes 100 clones one after another, and 20 that live at once. The suite checks that the template's
// memory is what it was.
func TestRealManyClones(t *testing.T) {
	d := realDriver(t)
	h := vmmtest.Harness{Driver: d, Image: vmmtest.Image(t), Slow: slow(t), Clones: 100, AtOnce: 20, MostPrivate: 6_000_000}
	vmmtest.RunOnly(t, h, "ClonesInARow", "ClonesAtOnce")
}

// templateAge is long enough for the kernel's random generator to rest: in the first minutes it reseeds itself so often
// that clones differ by chance.
const templateAge = 4 * time.Minute

// TestRealClonesDiffer prepares 20 clones of a template that was up for minutes, at once after it was taken. Their first
// random bytes differ and their clocks are right. Those of two clones that nobody prepares tell whether this needed doing.
func TestRealClonesDiffer(t *testing.T) {
	if testing.Short() {
		t.Skip("it lets a template age for minutes")
	}
	h := vmmtest.Harness{Driver: realDriver(t), Image: vmmtest.Image(t), Slow: slow(t), TemplateAge: templateAge}
	tpl := h.MakeTemplate(t, t.TempDir())
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()

	alike := map[string]bool{}
	for range 3 {
		alike[firstBytes(ctx, t, guest.Connect(h.Clone(t, tpl).Dial), true)] = true
	}
	t.Logf("of 3 clones that nobody prepared, %d different", len(alike))

	// One that is refused, as on a host too busy to set a clock by it, is destroyed like in a pool, and another made.
	const clones, refusedMost = 20, 20
	seen := map[string]int{}
	var worst time.Duration
	refused := 0
	for i := 0; i < clones; {
		m := h.Clone(t, tpl)
		c := guest.Connect(m.Dial)
		prepared, err := c.Prepare(ctx, guest.Identity{Hostname: "clone", MachineID: fmt.Sprintf("%032x", i+1)})
		if errors.Is(err, guest.ErrNotPrepared) && refused < refusedMost {
			refused++
			t.Logf("refused: %v", err)
			if err := m.Close(); err != nil {
				t.Fatal(err)
			}
			continue
		}
		if err != nil {
			t.Fatalf("clone %d: %v", i, err)
		}
		worst = max(worst, prepared.ClockError.Abs())
		if prepared.ClockError.Abs() > 50*time.Millisecond {
			t.Errorf("clone %d: its clock is %v wrong", i, prepared.ClockError)
		}
		bytes := firstBytes(ctx, t, c, false)
		if other, ok := seen[bytes]; ok {
			t.Errorf("clones %d and %d read the same random bytes %s", other, i, bytes)
		}
		seen[bytes] = i
		if err := m.Pause(ctx); err != nil { // it stays alive, and out of the others' way
			t.Fatal(err)
		}
		i++
	}
	t.Logf("%d clones within %v of the template, %d more refused", clones, time.Since(tpl.MadeAt).Round(time.Millisecond), refused)
	t.Logf("%d clones, %d different first random bytes, clocks at most %v wrong", clones, len(seen), worst.Round(time.Microsecond))
}

// firstBytes are the first that a clone's kernel gives.
func firstBytes(ctx context.Context, t *testing.T, c *guest.Client, warming bool) string {
	t.Helper()
	var out bytes.Buffer
	command := guest.Command{Args: []string{"head", "-c", "16", "/dev/urandom"}, User: "root", Cwd: "/", Warming: warming}
	exit, err := c.Exec(ctx, command, &out, nil)
	if err != nil || exit.Outcome != "exited" || exit.Code != 0 || out.Len() != 16 {
		t.Fatalf("random bytes: %d bytes, %+v, %v", out.Len(), exit, err)
	}
	return hex.EncodeToString(out.Bytes())
}
