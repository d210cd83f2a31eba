package e2e

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/google/go-containerregistry/pkg/name"
)

// unneeded is what a container of the tests does not have: machines have to start without it.
var unneeded = []string{"usr/lib/python3", "usr/lib/python3.13", "usr/lib/git-core", "usr/share", "usr/lib/locale", "var/lib/dpkg", "usr/bin/python3",
	"usr/bin/python3.13", "usr/bin/git", "usr/bin/curl", "usr/bin/jq"}

// treeOf unpacks the root filesystem of an image of Debian's packages.
func treeOf(t *testing.T, image string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "tree")
	out, err := exec.Command("fsck.erofs", "--extract="+dir, "--preserve", filepath.Join(image, "rootfs.erofs")).CombinedOutput()
	if err != nil {
		t.Fatalf("unpack the root filesystem of %s: %v\n%s", image, err, out)
	}
	for _, name := range unneeded {
		if err := os.RemoveAll(filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// writeTree writes a directory as an archive, with owners and modes.
func writeTree(w io.Writer, dir string) error {
	tw := tar.NewWriter(w)
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == dir {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		link := ""
		if info.Mode()&fs.ModeSymlink != 0 {
			if link, err = os.Readlink(path); err != nil {
				return err
			}
		}
		h, err := tar.FileInfoHeader(info, link)
		if err != nil {
			return err
		}
		h.Name = strings.TrimPrefix(path, dir+"/")
		h.Uid, h.Gid = int(info.Sys().(*syscall.Stat_t).Uid), int(info.Sys().(*syscall.Stat_t).Gid)
		if err := tw.WriteHeader(h); err != nil || !info.Mode().IsRegular() {
			return err
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		_, err = io.Copy(tw, f)
		return errors.Join(err, f.Close())
	})
	return errors.Join(err, tw.Close())
}

// layerOf is a layer of what write writes.
func layerOf(t *testing.T, write func(io.Writer) error) v1.Layer {
	t.Helper()
	path := filepath.Join(t.TempDir(), "layer.tar")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(write(f), f.Close()); err != nil {
		t.Fatal(err)
	}
	l, err := tarball.LayerFromFile(path, tarball.WithCompressionLevel(1))
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// files is a layer of small files, each with a text.
func files(texts map[string]string) func(io.Writer) error {
	return func(w io.Writer) error {
		tw := tar.NewWriter(w)
		for name, text := range texts {
			if err := tw.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o755, Size: int64(len(text))}); err != nil {
				return err
			}
			if _, err := io.WriteString(tw, text); err != nil {
				return err
			}
		}
		return tw.Close()
	}
}

// container is a container image of the layers.
func container(t *testing.T, layers ...v1.Layer) v1.Image {
	t.Helper()
	img, err := mutate.AppendLayers(empty.Image, layers...)
	if err != nil {
		t.Fatal(err)
	}
	c, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	c = c.DeepCopy()
	c.OS, c.Architecture = "linux", "amd64"
	if img, err = mutate.ConfigFile(img, c); err != nil {
		t.Fatal(err)
	}
	return img
}

// containers are two container images, the second with a layer more: as an archive of docker save and as an OCI layout.
func containers(t *testing.T, image string) (saved, oci string) {
	t.Helper()
	tree := treeOf(t, image)
	system := layerOf(t, func(w io.Writer) error { return writeTree(w, tree) })
	first := layerOf(t, files(map[string]string{"opt/hello": "#!/bin/sh\necho hello from a container\n", "etc/gone": "x"}))
	second := layerOf(t, files(map[string]string{"opt/hello": "#!/bin/sh\necho hello from a layout\n", "etc/.wh.gone": ""}))
	saved, oci = filepath.Join(t.TempDir(), "saved.tar"), filepath.Join(t.TempDir(), "layout")
	tag, err := name.NewTag("example/tools:1")
	if err != nil {
		t.Fatal(err)
	}
	if err := tarball.WriteToFile(saved, tag, container(t, system, first)); err != nil {
		t.Fatal(err)
	}
	p, err := layout.Write(oci, empty.Index)
	if err == nil {
		err = p.AppendImage(container(t, system, first, second))
	}
	if err != nil {
		t.Fatal(err)
	}
	return saved, oci
}

// testImage is the image that the tests' machines boot from, as a directory without links.
func testImage(t *testing.T) string {
	t.Helper()
	dir := os.Getenv("EPHEMERAL_TEST_IMAGE")
	if dir == "" {
		dir = "../../build/images/base"
	}
	dir, err := filepath.Abs(dir)
	if err == nil {
		dir, err = filepath.EvalSymlinks(dir)
	}
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// imageStore is a directory of images with a copy of the tests' image as base, and the agent to build others with.
func imageStore(t *testing.T, dir string) (agent string) {
	t.Helper()
	from := testImage(t)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("cp", "-a", "--reflink=auto", from, dir).CombinedOutput(); err != nil {
		t.Fatalf("copy the image: %v\n%s", err, out)
	}
	if err := os.Symlink(filepath.Base(from), filepath.Join(dir, "base")); err != nil {
		t.Fatal(err)
	}
	agent = filepath.Join(binaries.dir, "guestagent")
	build := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w", "-o", agent, "../../cmd/guestagent")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build guestagent: %v\n%s", err, out)
	}
	return agent
}

// ephemeral runs a command of the binary that needs no server.
func ephemeral(ctx context.Context, env []string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, binaries.ephemeral, args...)
	cmd.Env = slices.Concat(os.Environ(), env)
	out, err := cmd.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("ephemeral %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return string(out), err
}
