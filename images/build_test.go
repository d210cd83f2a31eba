package images

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/ephemeral-run/ephemeral/test/smalldisk"
)

func TestBuildAndOpen(t *testing.T) {
	b := newBuilding(t)
	img := b.mustBuild(t)
	if img.Name != "base" || !strings.HasPrefix(img.Digest, "sha256:") || time.Since(img.BuiltAt) > time.Minute {
		t.Errorf("%+v", img)
	}
	if get(t, img.Kernel) != "kernel" || get(t, img.RootFS) != "root filesystem " || !filepath.IsAbs(img.Initramfs) {
		t.Errorf("files of %+v", img)
	}
	opened, err := Open(filepath.Join(b.Dir, "base"))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(img, opened); diff != "" {
		t.Error(diff)
	}
	m, err := ReadManifest(filepath.Join(b.Dir, "base"))
	if err != nil {
		t.Fatal(err)
	}
	if m.Kernel != "6.12.0-cloud-amd64" || !slices.Equal(m.Modules, []string{"failover.ko", "virtio_net.ko"}) ||
		m.Recipe.Suite != "trixie" || !slices.Equal(m.Packages, []Package{{"bash", "5.2"}}) {
		t.Errorf("manifest %+v", m)
	}
	names, err := List(b.Dir)
	if err != nil || !slices.Equal(names, []string{"base"}) {
		t.Errorf("List: %v, %v", names, err)
	}
	for _, path := range []string{img.Kernel, img.Initramfs, img.RootFS} {
		if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o444 {
			t.Errorf("%s: %v, %v, want mode 0444", path, fi.Mode(), err)
		}
	}
}

func TestSameAgentBuildsNothing(t *testing.T) {
	b := newBuilding(t)
	first := b.mustBuild(t)
	second := b.mustBuild(t)
	if diff := cmp.Diff(first, second); diff != "" {
		t.Error(diff)
	}
	if b.made.Load() != 1 || !strings.Contains(b.said.String(), "up to date") {
		t.Errorf("made %d roots\n%s", b.made.Load(), b.said)
	}
}

func TestNewAgentCostsAnInitramfs(t *testing.T) {
	b := newBuilding(t)
	first := b.mustBuild(t)
	put(t, b.Agent, executable(t, "two"))
	second := b.mustBuild(t)
	if b.made.Load() != 1 {
		t.Errorf("made %d roots, want 1", b.made.Load())
	}
	if first.Digest == second.Digest {
		t.Error("another agent, the same digest")
	}
	before, err := os.Stat(first.RootFS)
	if err != nil {
		t.Fatalf("machines of the image before lost their root filesystem: %v", err)
	}
	after, err := os.Stat(second.RootFS)
	if err != nil || !os.SameFile(before, after) {
		t.Errorf("the root filesystem was copied: %v", err)
	}
	f, err := os.Open(second.Initramfs)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	agent, modules, err := readInitramfs(f)
	if err != nil || string(agent) != string(executable(t, "two")) || len(modules) != 2 {
		t.Errorf("initramfs has %d modules, %v", len(modules), err)
	}
	// A third build removes the first, and keeps the one before it.
	put(t, b.Agent, executable(t, "three"))
	b.mustBuild(t)
	if _, err := Verify(filepath.Dir(first.Kernel)); !errors.Is(err, ErrNotBuilt) {
		t.Errorf("first build: %v, want removed", err)
	}
	if _, err := Verify(filepath.Dir(second.Kernel)); err != nil {
		t.Errorf("second build: %v, want kept", err)
	}
}

func TestRebuild(t *testing.T) {
	t.Run("asked for", func(t *testing.T) {
		b := newBuilding(t)
		first := b.mustBuild(t)
		b.Rebuild = true
		b.content = "of today"
		second := b.mustBuild(t)
		if b.made.Load() != 2 || first.Digest == second.Digest {
			t.Errorf("made %d roots, digests %s, %s", b.made.Load(), first.Digest, second.Digest)
		}
	})
	t.Run("recipe changed, same bytes", func(t *testing.T) {
		b := newBuilding(t)
		first := b.mustBuild(t)
		b.Recipe = Base()
		b.Recipe.Packages = append(b.Recipe.Packages, "jo")
		second := b.mustBuild(t)
		if b.made.Load() != 2 || first.Digest != second.Digest {
			t.Errorf("made %d roots, digests %s, %s", b.made.Load(), first.Digest, second.Digest)
		}
		b.mustBuild(t)
		if b.made.Load() != 2 {
			t.Errorf("made %d roots: the new recipe was not remembered", b.made.Load())
		}
	})
	t.Run("damaged", func(t *testing.T) {
		b := newBuilding(t)
		first := b.mustBuild(t)
		tamper(t, first.RootFS)
		second := b.mustBuild(t)
		if b.made.Load() != 2 || first.Digest != second.Digest || !strings.Contains(b.said.String(), "image damaged") {
			t.Errorf("made %d roots, digests %s, %s\n%s", b.made.Load(), first.Digest, second.Digest, b.said)
		}
		if _, err := Verify(filepath.Join(b.Dir, "base")); err != nil {
			t.Error(err)
		}
	})
}

func TestFailedBuildLeavesTheImage(t *testing.T) {
	b := newBuilding(t)
	first := b.mustBuild(t)
	b.Rebuild = true
	boom := errors.New("boom")
	b.hold = func(_ context.Context, tmp string) error {
		put(t, filepath.Join(tmp, "tree", "half"), []byte("x"))
		return boom
	}
	if _, err := b.build(t.Context()); !errors.Is(err, boom) {
		t.Fatalf("%v, want boom", err)
	}
	opened, err := Verify(filepath.Join(b.Dir, "base"))
	if err != nil || opened.Digest != first.Digest {
		t.Errorf("%+v, %v", opened, err)
	}
	for _, name := range entries(t, b.Dir) {
		if strings.HasPrefix(name, ".build-") {
			t.Errorf("%s is left", name)
		}
	}
}

// TestTwoBuilders: of eight builders at once one makes the root filesystem, the others wait and take it.
func TestTwoBuilders(t *testing.T) {
	b := newBuilding(t)
	b.hold = func(context.Context, string) error { time.Sleep(200 * time.Millisecond); return nil }
	b.Progress = nil
	var wg sync.WaitGroup
	digests := make([]string, 8)
	for i := range digests {
		wg.Go(func() {
			img, err := b.build(t.Context())
			if err != nil {
				t.Error(err)
			}
			digests[i] = img.Digest
		})
	}
	wg.Wait()
	if b.made.Load() != 1 || len(slices.Compact(digests)) != 1 {
		t.Errorf("made %d roots, digests %v", b.made.Load(), digests)
	}
}

func TestWaitingBuilderCanBeStopped(t *testing.T) {
	b := newBuilding(t)
	release := make(chan struct{})
	holding := make(chan struct{})
	b.hold = func(context.Context, string) error { close(holding); <-release; return nil }
	done := make(chan error, 1)
	go func() {
		_, err := b.build(context.Background())
		done <- err
	}()
	<-holding
	other := newBuilding(t)
	other.Dir = b.Dir
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err := other.build(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v, want deadline exceeded", err)
	}
	if !strings.Contains(other.said.String(), "waiting for another build") || other.made.Load() != 0 {
		t.Errorf("made %d roots\n%s", other.made.Load(), other.said)
	}
	close(release)
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// TestKilledBuilder kills a builder with half a root filesystem written. There is no image; the next builder removes what
// is left and builds.
func TestKilledBuilder(t *testing.T) {
	b := newBuilding(t)
	if dir := os.Getenv("IMAGES_TEST_KILLED"); dir != "" {
		b.Dir = dir
		b.hold = func(_ context.Context, tmp string) error {
			put(t, filepath.Join(tmp, "tree", "half"), []byte("x"))
			put(t, filepath.Join(dir, "..", "holding"), nil)
			time.Sleep(time.Minute)
			return errors.New("was not killed")
		}
		_, err := b.build(t.Context())
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, os.Args[0], "-test.run=^TestKilledBuilder$")
	cmd.Env = append(os.Environ(), "IMAGES_TEST_KILLED="+b.Dir, "TMPDIR="+t.TempDir()) // it cannot clean up
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for holding := filepath.Join(b.Dir, "..", "holding"); ; time.Sleep(10 * time.Millisecond) {
		if _, err := os.Stat(holding); err == nil {
			break
		}
		if ctx.Err() != nil {
			t.Fatal("the builder never started")
		}
	}
	if err := cmd.Process.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()

	if _, err := Open(filepath.Join(b.Dir, "base")); !errors.Is(err, ErrNotBuilt) {
		t.Errorf("%v, want not built", err)
	}
	left, err := filepath.Glob(filepath.Join(b.Dir, ".build-*", "tree", "half"))
	if err != nil || len(left) != 1 {
		t.Fatalf("left %v, %v: the builder was not in the middle", left, err)
	}
	img := b.mustBuild(t)
	want := []string{filepath.Base(filepath.Dir(img.Kernel)), ".lock", "base"}
	slices.Sort(want)
	if got := entries(t, b.Dir); !slices.Equal(got, want) {
		t.Errorf("directory holds %v, want %v", got, want)
	}
}

func TestFullDisk(t *testing.T) {
	dir := smalldisk.New(t, "1m")
	b := newBuilding(t)
	b.Dir = filepath.Join(dir, "images")
	first := b.mustBuild(t)
	put(t, b.Agent, executable(t, strings.Repeat("large ", 1<<18)))
	_, err := b.build(t.Context())
	if !errors.Is(err, ErrNoSpace) || !strings.Contains(err.Error(), "initramfs") {
		t.Errorf("%v, want no space for the initramfs", err)
	}
	opened, err := Verify(filepath.Join(b.Dir, "base"))
	if err != nil || opened.Digest != first.Digest {
		t.Errorf("image before: %+v, %v", opened, err)
	}
	left, err := filepath.Glob(filepath.Join(b.Dir, ".build-*"))
	if err != nil || len(left) != 0 {
		t.Errorf("left %v, %v", left, err)
	}
	// The root filesystem is refused before anything is downloaded.
	if err := requireSpace(dir, buildSpace); !errors.Is(err, ErrNoSpace) || !strings.Contains(err.Error(), dir) {
		t.Errorf("%v, want no space in %s", err, dir)
	}
}

// TestLeftoverMount: what an interrupted build left mounted is unmounted, not deleted through.
func TestLeftoverMount(t *testing.T) {
	b := newBuilding(t)
	precious := t.TempDir()
	put(t, filepath.Join(precious, "file"), []byte("x"))
	point := filepath.Join(b.Dir, ".build-1", "tree with space", "dev")
	if err := os.MkdirAll(point, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(precious, point, "", unix.MS_BIND, ""); err != nil {
		t.Fatalf("bind mount: %v (the tests run as root)", err)
	}
	b.mustBuild(t)
	if get(t, filepath.Join(precious, "file")) != "x" {
		t.Error("a file behind a mount was deleted")
	}
	if _, err := os.Stat(filepath.Join(b.Dir, ".build-1")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%v, want removed", err)
	}
}

func TestRefusals(t *testing.T) {
	tests := []struct {
		name   string
		change func(t *testing.T, b *building)
		want   string
	}{
		{"image name", func(t *testing.T, b *building) { b.Recipe = Base(); b.Recipe.Name = "../x" }, "image name"},
		{"no agent", func(t *testing.T, b *building) { b.Agent = "/none" }, "make build"},
		{"agent is a script", func(t *testing.T, b *building) { put(t, b.Agent, []byte("#!/bin/sh\n")) }, "agent program"},
		{"agent is a module", func(t *testing.T, b *building) { put(t, b.Agent, kernelModule(t, "depends=")) }, "not an x86-64 executable"},
		{"agent is linked", func(t *testing.T, b *building) { put(t, b.Agent, executable(t, "", interpreter())) }, "not statically linked"},
		{"directory in the way", func(t *testing.T, b *building) { put(t, filepath.Join(b.Dir, "base", "file"), nil) }, "move it away"},
		{"file for a directory", func(t *testing.T, b *building) { put(t, b.Dir, nil) }, "directory of images"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := newBuilding(t)
			tt.change(t, b)
			if _, err := b.build(t.Context()); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want %q", err, tt.want)
			}
			if b.made.Load() != 0 {
				t.Error("a root filesystem was made")
			}
		})
	}
}

// TestPruneKeepsOtherImages: base-x is another image than base.
func TestPruneKeepsOtherImages(t *testing.T) {
	b := newBuilding(t)
	b.Recipe = Base()
	b.Recipe.Name = "base-x"
	other := b.mustBuild(t)
	b.Recipe.Name = "base"
	for _, agent := range []string{"two", "three", "four"} {
		put(t, b.Agent, executable(t, agent))
		b.mustBuild(t)
	}
	if _, err := Verify(filepath.Dir(other.Kernel)); err != nil {
		t.Error(err)
	}
	names, err := List(b.Dir)
	if err != nil || !slices.Equal(names, []string{"base", "base-x"}) {
		t.Errorf("List: %v, %v", names, err)
	}
}
