package images

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/ephemeral-run/ephemeral/test/smalldisk"
)

// containerOptions are those of a build of the container image, beside b's base.
func containerOptions(b *building, from string) Options {
	o := b.Options
	o.OCI, o.Recipe, o.Progress = from, Recipe{Name: "box"}, nil
	return o
}

// unharmed fails the test unless base is as it was, and nothing of a build is left.
func unharmed(t *testing.T, b *building, base Image) {
	t.Helper()
	if got, err := Verify(filepath.Join(b.Dir, "base")); err != nil || got.Digest != base.Digest {
		t.Errorf("image base: %+v, %v", got, err)
	}
	if _, err := Open(filepath.Join(b.Dir, "box")); !errors.Is(err, ErrNotBuilt) {
		t.Errorf("image box: %v, want not built", err)
	}
	for _, name := range entries(t, b.Dir) {
		if strings.HasPrefix(name, leftoverPrefix) || strings.HasPrefix(name, ".box-") {
			t.Errorf("%s is left", name)
		}
	}
}

// A disk that becomes full while layers are unpacked ends the build, and so does the end of its context.
func TestContainerOnAFullDiskAndInterrupted(t *testing.T) {
	b := newBuilding(t)
	b.Dir = filepath.Join(smalldisk.New(t, "2m"), "images")
	base := b.mustBuild(t)
	large := layoutOf(t, rootfsOf(t, file("opt/large", strings.Repeat("large ", 1<<19))))
	if _, err := Build(t.Context(), containerOptions(b, large)); !errors.Is(err, ErrNoSpace) || !strings.Contains(err.Error(), "opt/large") {
		t.Errorf("%v, want no space for the file", err)
	}
	unharmed(t, b, base)
	ctx, cancel := context.WithCancel(t.Context())
	o := containerOptions(b, layoutOf(t, rootfsOf(t)))
	o.Progress = func(line string) {
		if strings.HasPrefix(line, "unpacking layer") {
			cancel()
		}
	}
	if _, err := Build(ctx, o); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want canceled", err)
	}
	unharmed(t, b, base)
	o.Progress = nil
	if _, err := Build(t.Context(), o); err != nil {
		t.Errorf("with room and time: %v", err)
	}
}

// Of two builders of a container image one waits for the other; both have the same image.
func TestTwoBuildersOfAContainer(t *testing.T) {
	b := newBuilding(t)
	b.mustBuild(t)
	from := layoutOf(t, rootfsOf(t))
	var builders sync.WaitGroup
	made := make([]Image, 3)
	for i := range made {
		builders.Go(func() {
			var err error
			if made[i], err = Build(t.Context(), containerOptions(b, from)); err != nil {
				t.Error(err)
			}
		})
	}
	builders.Wait()
	builds, err := (&store{dir: b.Dir}).builds("box")
	if err != nil || len(builds) != 1 || made[0] != made[1] || made[1] != made[2] {
		t.Errorf("%+v, builds %v, %v", made, builds, err)
	}
}
