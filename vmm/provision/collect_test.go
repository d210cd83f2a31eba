package provision

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ephemeral-run/ephemeral/images"
	"github.com/ephemeral-run/ephemeral/vmm"
)

// Collect removes the templates that no process uses, but for those of images that stay, and half-made ones.
func TestCollect(t *testing.T) {
	dir := dataDir(t)
	s := newStage()
	p := open(t, s, config(dir))
	base := image(t, dir)
	keys := map[string]string{}
	for _, digest := range []string{"sha256:kept", "sha256:gone"} {
		img := base
		img.Digest = digest
		tmpl, err := p.Template(t.Context(), img, p.config.Shape(), nil)
		if err != nil {
			t.Fatal(err)
		}
		keys[digest] = tmpl.Key
	}
	half := filepath.Join(dir, "templates", buildPrefix+keys["sha256:gone"]+"-12345678")
	if err := os.MkdirAll(filepath.Join(half, "x"), 0o711); err != nil {
		t.Fatal(err)
	}
	collect := func(dry bool, keep ...string) Collected {
		t.Helper()
		got, err := Collect(dir, func(image string) bool { return slices.Contains(keep, image) }, dry)
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	if got := collect(true); len(got.Templates) != 0 || got.Leftovers != 1 {
		t.Errorf("of templates in use: %+v", got)
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	if got := collect(true, "sha256:kept"); !slices.Equal(got.Templates, []string{keys["sha256:gone"]}) || got.Bytes < int64(p.config.MemoryMiB)<<20 || got.Leftovers != 1 {
		t.Errorf("dry: %+v", got)
	}
	if got := collect(false, "sha256:kept"); !slices.Equal(got.Templates, []string{keys["sha256:gone"]}) || got.Leftovers != 1 {
		t.Errorf("%+v", got)
	}
	if _, err := os.Stat(half); !os.IsNotExist(err) {
		t.Errorf("what was half made: %v", err)
	}
	if _, err := os.Stat(filepath.Join(dir, "templates", keys["sha256:kept"], manifestFile)); err != nil {
		t.Error(err)
	}
	if err := os.Remove(filepath.Join(dir, "templates", keys["sha256:kept"], manifestFile)); err != nil { // whose it is, nobody knows
		t.Fatal(err)
	}
	if got := collect(false, "sha256:kept"); !slices.Equal(got.Templates, []string{keys["sha256:kept"]}) {
		t.Errorf("a damaged one: %+v", got)
	}
	if got, err := Collect(filepath.Join(dir, "none"), func(string) bool { return false }, false); err != nil || len(got.Templates) != 0 {
		t.Errorf("no templates at all: %+v, %v", got, err)
	}
}

// store is a directory of images with an image base, of whichever build was made last.
type store string

// build makes a build of base that is like no other, and returns its directory.
func (s store) build(t *testing.T, content string) string {
	t.Helper()
	m := images.Manifest{Version: 1, Name: "base", Files: map[string]images.File{}}
	texts, whole := map[string]string{"vmlinuz": "kernel", "initramfs": "initramfs", "rootfs.erofs": content}, ""
	for _, name := range []string{"vmlinuz", "initramfs", "rootfs.erofs"} {
		sum := fmt.Sprintf("%x", sha256.Sum256([]byte(texts[name])))
		m.Files[name] = images.File{SHA256: sum, Size: int64(len(texts[name]))}
		whole += sum + "  " + name + "\n"
	}
	digest := fmt.Sprintf("%x", sha256.Sum256([]byte(whole)))
	m.Digest = "sha256:" + digest
	b, err := json.Marshal(m)
	texts["manifest.json"] = string(b)
	dir := filepath.Join(string(s), ".base-"+digest[:16])
	err = errors.Join(err, os.MkdirAll(dir, 0o755))
	for name, text := range texts {
		err = errors.Join(err, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
	}
	link := filepath.Join(string(s), "base")
	if err := errors.Join(err, os.RemoveAll(link), os.Symlink(filepath.Base(dir), link)); err != nil {
		t.Fatal(err)
	}
	return dir
}

// A keeper holds the image of its template and that of the template before, and none when it has ended.
func TestKeeperHoldsItsImages(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := dataDir(t)
		p := open(t, newStage(), config(dir))
		s := store(filepath.Join(dir, "images"))
		k := p.Keeper(func() (*images.Held, error) { return images.Hold(filepath.Join(string(s), "base")) }, p.config.Shape(), nil, func(vmm.Template) {})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		builds := []string{s.build(t, "one")}
		go func() { defer close(ended); k.Run(ctx) }()
		held := func(what string, want ...bool) {
			t.Helper()
			synctest.Wait()
			for i, b := range builds {
				d, err := lockDirectory(b)
				if want[i] != errors.Is(err, errTaken) {
					t.Errorf("%s: build %d: %v, want held: %v", what, i, err, want[i])
				}
				if err == nil {
					_ = d.release()
				}
			}
		}
		held("first", true)
		if _, err := images.Remove(ctx, string(s), "base"); !errors.Is(err, images.ErrInUse) {
			t.Errorf("removed: %v", err)
		}
		for i, want := range [][]bool{{true, true}, {false, true, true}} {
			builds = append(builds, s.build(t, fmt.Sprint(i)))
			time.Sleep(time.Minute)
			held(fmt.Sprint("then ", i), want...)
		}
		cancel()
		<-ended
		held("ended", false, false, false)
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
}
