package images

import (
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/test/smalldisk"
)

// buildOf is the name of an image's build as Removed has it.
func buildOf(img Image) string { return filepath.Base(filepath.Dir(img.Kernel))[1:] }

// An image that a process holds is not removed, and the refusal names it and what to do; then it is removed whole.
func TestRemove(t *testing.T) {
	b := newBuilding(t)
	first := b.mustBuild(t)
	held, err := Hold(filepath.Join(b.Dir, "base"))
	must(t, err)
	if held.Digest != first.Digest || held.Kernel != first.Kernel {
		t.Errorf("held %+v", held.Image)
	}
	put(t, b.Agent, executable(t, "two"))
	second := b.mustBuild(t) // the node still uses the first
	for _, want := range []string{"image in use", "base", buildOf(first), "EPHEMERAL_IMAGES"} {
		if _, err := Remove(t.Context(), b.Dir, "base"); !errors.Is(err, ErrInUse) || !strings.Contains(err.Error(), want) {
			t.Fatalf("%v, want %q", err, want)
		}
	}
	for _, img := range []Image{first, second} {
		if _, err := Verify(filepath.Dir(img.Kernel)); err != nil {
			t.Errorf("after the refusal: %v", err)
		}
	}
	must(t, held.Release())
	must(t, held.Release())
	got, err := Remove(t.Context(), b.Dir, "base")
	must(t, err)
	want := []string{buildOf(first), buildOf(second)}
	slices.Sort(want)
	if !slices.Equal(got.Images, []string{"base"}) || !slices.Equal(got.Builds, want) || got.Bytes == 0 {
		t.Errorf("removed %+v, want builds %v", got, want)
	}
	if left := entries(t, b.Dir); !slices.Equal(left, []string{".lock"}) {
		t.Errorf("left %v", left)
	}
	for name, want := range map[string]string{"base": "image list", "../x": "image name"} {
		if _, err := Remove(t.Context(), b.Dir, name); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := Hold(filepath.Join(b.Dir, "base")); !errors.Is(err, ErrNotBuilt) {
		t.Errorf("hold what is gone: %v", err)
	}
	put(t, filepath.Join(b.Dir, "own", "file"), nil)
	if _, err := Remove(t.Context(), b.Dir, "own"); err == nil || !strings.Contains(err.Error(), "remove it yourself") {
		t.Errorf("a directory of the user's: %v", err)
	}
}

// What an image's link leads to outside of the directory of images stays, and is known to be in use.
func TestRemoveLinkToElsewhere(t *testing.T) {
	b := newBuilding(t)
	elsewhere := filepath.Dir(b.mustBuild(t).Kernel)
	dir := t.TempDir()
	must(t, os.Symlink(elsewhere, filepath.Join(dir, "base")))
	held, err := Hold(filepath.Join(dir, "base"))
	must(t, err)
	if _, err := Remove(t.Context(), dir, "base"); !errors.Is(err, ErrInUse) {
		t.Errorf("%v", err)
	}
	must(t, held.Release())
	if _, err := Remove(t.Context(), dir, "base"); err != nil {
		t.Error(err)
	}
	if _, err := Verify(elsewhere); err != nil {
		t.Error(err)
	}
}

// A build removes old builds, but none that a process uses.
func TestBuildKeepsWhatIsUsed(t *testing.T) {
	b := newBuilding(t)
	first := b.mustBuild(t)
	held, err := Hold(filepath.Join(b.Dir, "base"))
	must(t, err)
	var last Image
	for _, agent := range []string{"two", "three", "four"} {
		put(t, b.Agent, executable(t, agent))
		last = b.mustBuild(t)
	}
	if _, err := Verify(filepath.Dir(first.Kernel)); err != nil {
		t.Errorf("a build that is in use: %v", err)
	}
	must(t, held.Release())
	put(t, b.Agent, executable(t, "five"))
	b.mustBuild(t)
	if _, err := Verify(filepath.Dir(first.Kernel)); !errors.Is(err, ErrNotBuilt) {
		t.Errorf("a build that nothing uses: %v", err)
	}
	if _, err := Verify(filepath.Dir(last.Kernel)); err != nil {
		t.Errorf("the build before the last: %v", err)
	}
}

func TestCollect(t *testing.T) {
	b := newBuilding(t)
	old := b.mustBuild(t)
	put(t, b.Agent, executable(t, "two"))
	base := b.mustBuild(t)
	b.Recipe = Base()
	b.Recipe.Name = "base-x"
	b.mustBuild(t)
	b.Recipe.Name = "served"
	b.mustBuild(t)
	b.Recipe.Name = "spare"
	spare := b.mustBuild(t)
	held, err := Hold(filepath.Join(b.Dir, "served"))
	must(t, err)
	defer held.Release()
	put(t, filepath.Join(b.Dir, leftoverPrefix+"1", "tree", "half"), nil)
	before := entries(t, b.Dir)
	dry, err := Collect(t.Context(), b.Dir, CollectOptions{All: true, Keep: []string{"base", "base-x"}, Dry: true})
	must(t, err)
	if !slices.Equal(before, entries(t, b.Dir)) {
		t.Errorf("dry, and something was removed: %v", entries(t, b.Dir))
	}
	got, err := Collect(t.Context(), b.Dir, CollectOptions{})
	must(t, err)
	if len(got.Images) > 0 || !slices.Equal(got.Builds, []string{buildOf(old)}) || got.Leftovers != 1 {
		t.Errorf("removed %+v", got)
	}
	names, err := List(b.Dir)
	must(t, err)
	if !slices.Equal(names, []string{"base", "base-x", "served", "spare"}) {
		t.Errorf("images %v", names)
	}
	got, err = Collect(t.Context(), b.Dir, CollectOptions{All: true, Keep: []string{"base", "base-x"}})
	must(t, err)
	if !slices.Equal(got.Images, []string{"spare"}) || !slices.Equal(got.Builds, []string{buildOf(spare)}) {
		t.Errorf("removed %+v", got)
	}
	want := []string{buildOf(old), buildOf(spare)}
	slices.Sort(want)
	slices.Sort(dry.Builds)
	if !slices.Equal(dry.Images, []string{"spare"}) || !slices.Equal(dry.Builds, want) || dry.Leftovers != 1 {
		t.Errorf("dry %+v", dry)
	}
	for _, name := range []string{"base", "base-x", "served"} {
		if _, err := Verify(filepath.Join(b.Dir, name)); err != nil {
			t.Error(err)
		}
	}
	digests, err := Digests(b.Dir)
	if err != nil || !digests[base.Digest] || digests[old.Digest] {
		t.Errorf("digests %v, %v", digests, err)
	}
	if _, err := Collect(t.Context(), "/nonexistent", CollectOptions{}); err == nil {
		t.Error("no directory of images, and no error")
	}
}

// TestKilledAtAnyPoint kills a process that builds, holds, removes and collects over and over, at random moments. Each time an
// image is there whole or not at all, and a collection leaves nothing but images.
func TestKilledAtAnyPoint(t *testing.T) {
	if dir := os.Getenv("IMAGES_TEST_CHURN"); dir != "" {
		churn(t, dir)
	}
	b := newBuilding(t)
	b.Dir = filepath.Join(smalldisk.New(t, "64m"), "images") // where nothing waits for a disk, more happens
	must(t, os.MkdirAll(b.Dir, 0o755))
	there := 0
	for range 15 {
		cmd := exec.Command(os.Args[0], "-test.run=^TestKilledAtAnyPoint$")
		cmd.Env = append(os.Environ(), "IMAGES_TEST_CHURN="+b.Dir, "TMPDIR="+t.TempDir())
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		out, err := cmd.StdoutPipe()
		must(t, err)
		must(t, cmd.Start())
		if _, err := out.Read(make([]byte, 1)); err != nil { // it has begun
			t.Fatal(err)
		}
		time.Sleep(time.Duration(rand.IntN(40_000)) * time.Microsecond)
		must(t, cmd.Process.Kill())
		rest, _ := io.ReadAll(out) // before Wait closes it
		if err := cmd.Wait(); err == nil || !strings.Contains(err.Error(), "killed") {
			t.Fatalf("it ended by itself: %v\n%s", err, rest)
		}
		for _, name := range []string{"base", "other"} {
			_, err := Verify(filepath.Join(b.Dir, name))
			if err != nil && !errors.Is(err, ErrNotBuilt) {
				t.Errorf("%s: %v", name, err)
			}
			if err == nil {
				there++
			}
		}
		if _, err := Collect(t.Context(), b.Dir, CollectOptions{}); err != nil {
			t.Fatal(err)
		}
		for _, name := range entries(t, b.Dir) {
			if strings.HasPrefix(name, leftoverPrefix) {
				t.Errorf("%s is left", name)
			}
		}
		left, err := (&store{dir: b.Dir}).builds("")
		must(t, err)
		names, err := List(b.Dir)
		must(t, err)
		if len(left) != len(names) {
			t.Errorf("images %v, builds %v", names, left)
		}
	}
	if _, err := Collect(t.Context(), b.Dir, CollectOptions{All: true}); err != nil {
		t.Error(err)
	}
	if left := entries(t, b.Dir); !slices.Equal(left, []string{".lock"}) {
		t.Errorf("left %v", left)
	}
	if t.Logf("%d images were there", there); there == 0 {
		t.Error("nothing was ever built before the end")
	}
}

// churn builds, holds, removes and collects until it is killed.
func churn(t *testing.T, dir string) {
	b := newBuilding(t)
	b.Dir = dir
	b.Recipe = Base()
	os.Stdout.WriteString("x")
	for i := 0; ; i++ {
		b.Recipe.Name = []string{"base", "other"}[i%2]
		put(t, b.Agent, executable(t, []string{"a", "b", "c"}[i%3]))
		b.mustBuild(t)
		held, err := Hold(filepath.Join(dir, b.Recipe.Name))
		must(t, err)
		if _, err := Remove(t.Context(), dir, b.Recipe.Name); !errors.Is(err, ErrInUse) {
			t.Fatal(err)
		}
		must(t, held.Release())
		if i%4 == 3 {
			_, err = Remove(t.Context(), dir, b.Recipe.Name)
			must(t, err)
		}
		if i%5 == 4 {
			_, err = Collect(t.Context(), dir, CollectOptions{All: i%2 == 0})
			must(t, err)
		}
	}
}
