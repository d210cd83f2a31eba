package images

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/match"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// ErrContainer: the file or directory holds no container image that machines can be made of.
var ErrContainer = errors.New("container image refused")

// amd64 is the platform of machines.
var amd64 = v1.Platform{OS: "linux", Architecture: "amd64"}

// maxIndexes bounds how deep the indexes of an OCI layout are followed.
const maxIndexes = 4

// openContainer opens the container image in an OCI layout (a directory) or an archive of `docker save`. There must be one for
// linux/amd64. Its configuration is known to have the digest that its manifest names; layers are verified as they are read.
func openContainer(file string) (v1.Image, error) {
	fi, err := os.Stat(file)
	if err != nil {
		return nil, fmt.Errorf("open container image: %w", err)
	}
	var img v1.Image
	if fi.IsDir() {
		img, err = openLayout(file)
	} else {
		img, err = tarball.ImageFromPath(file, nil)
	}
	if err == nil {
		err = checkContainer(img)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrContainer, file, err)
	}
	return img, nil
}

func openLayout(dir string) (v1.Image, error) {
	p, err := layout.FromPath(dir)
	if err != nil {
		return nil, err
	}
	index, err := p.ImageIndex()
	if err != nil {
		return nil, err
	}
	return choose(index, maxIndexes)
}

// choose finds the one image for machines in an index.
func choose(index v1.ImageIndex, depth int) (v1.Image, error) {
	m, err := index.IndexManifest()
	if err != nil {
		return nil, err
	}
	fits := match.Platforms(amd64)
	var found []v1.Descriptor
	for _, d := range m.Manifests {
		if (d.MediaType.IsImage() || d.MediaType.IsIndex()) && (d.Platform == nil || fits(d)) {
			found = append(found, d)
		}
	}
	if len(found) != 1 {
		return nil, fmt.Errorf("holds %d images for linux/amd64, want one", len(found))
	}
	if !found[0].MediaType.IsIndex() {
		return index.Image(found[0].Digest)
	}
	if depth == 0 {
		return nil, errors.New("indexes are nested too deep")
	}
	inner, err := index.ImageIndex(found[0].Digest)
	if err != nil {
		return nil, err
	}
	return choose(inner, depth-1)
}

// checkContainer compares the image's configuration with its manifest.
func checkContainer(img v1.Image) error {
	m, err := img.Manifest()
	if err != nil {
		return err
	}
	raw, err := img.RawConfigFile()
	if err != nil {
		return err
	}
	if sum := sha256.Sum256(raw); m.Config.Digest.Hex != hex.EncodeToString(sum[:]) {
		return errors.New("its configuration does not have the digest that the manifest names")
	}
	c, err := img.ConfigFile()
	if err != nil {
		return err
	}
	if c.OS != "linux" || c.Architecture != "amd64" {
		return fmt.Errorf("is for %.32s/%.32s, want linux/amd64", c.OS, c.Architecture)
	}
	layers, err := img.Layers()
	if err != nil {
		return err
	}
	if len(layers) == 0 || len(layers) > maxLayers || len(layers) != len(c.RootFS.DiffIDs) {
		return fmt.Errorf("has %d layers and %d digests of layers, want the same and 1 to %d", len(layers), len(c.RootFS.DiffIDs), maxLayers)
	}
	return nil
}

// containerDigest names what the root filesystem of a container image is made of: its configuration, which names its layers.
func containerDigest(img v1.Image) (string, error) {
	h, err := img.ConfigName()
	if err != nil {
		return "", fmt.Errorf("name of container image: %w", err)
	}
	return h.String(), nil
}

// flatten unpacks the layers of a container image into dir, and verifies each.
func flatten(ctx context.Context, img v1.Image, dir string, progress func(string)) error {
	c, err := img.ConfigFile()
	if err != nil {
		return fmt.Errorf("%w: %w", ErrContainer, err)
	}
	layers, err := img.Layers()
	if err != nil {
		return fmt.Errorf("%w: %w", ErrContainer, err)
	}
	t, err := openTree(dir)
	if err != nil {
		return err
	}
	for i, l := range layers {
		progress(fmt.Sprintf("unpacking layer %d of %d", i+1, len(layers)))
		if err := errors.Join(readLayer(ctx, l, c.RootFS.DiffIDs[i], t.whiteouts)); err != nil {
			return errors.Join(fmt.Errorf("layer %d: %w", i+1, err), t.close())
		}
		if err := readLayer(ctx, l, c.RootFS.DiffIDs[i], t.unpack); err != nil {
			return errors.Join(fmt.Errorf("layer %d: %w", i+1, err), t.close())
		}
	}
	if t.skipped > 0 {
		progress(fmt.Sprintf("left out %d devices and other special files", t.skipped))
	}
	return t.close()
}

// readLayer has f read a layer uncompressed, and verifies that it has the digest that the image's configuration names.
func readLayer(ctx context.Context, l v1.Layer, want v1.Hash, f func(context.Context, io.Reader) error) error {
	r, err := l.Uncompressed()
	if err != nil {
		return fmt.Errorf("%w: %w", ErrLayer, err)
	}
	h := sha256.New()
	err = errors.Join(f(ctx, io.TeeReader(r, h)), r.Close())
	if err != nil {
		return err
	}
	if got := hex.EncodeToString(h.Sum(nil)); want.Algorithm != "sha256" || got != want.Hex {
		return fmt.Errorf("%w: SHA-256 is %s, want %s", ErrLayer, got, want.Hex)
	}
	return nil
}

// prepareTree makes a container's root filesystem one that a machine starts with: a shell, the user of commands, and the files
// that each machine finds in the same state.
func prepareTree(dir string) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return fmt.Errorf("open tree: %w", err)
	}
	defer root.Close()
	for _, program := range []string{"bin/sh", "bin/true"} {
		if fi, err := root.Stat(program); err != nil || fi.Mode()&0o111 == 0 {
			return fmt.Errorf("%w: it has no /%s, which a machine needs; an absolute symbolic link does not count", ErrContainer, program)
		}
	}
	for name, mode := range map[string]fs.FileMode{"etc": 0o755, "proc": 0o755, "sys": 0o755, "run": 0o755, "dev": 0o755, "home": 0o755, "tmp": 0o777 | fs.ModeSticky} {
		fi, err := root.Lstat(name)
		if err == nil && !fi.IsDir() || name == "dev" {
			if err := absent(root.RemoveAll(name)); err != nil {
				return fmt.Errorf("prepare /%s: %w", name, err)
			}
		}
		if err := root.MkdirAll(name, 0o755); err != nil {
			return fmt.Errorf("prepare /%s: %w", name, noSpace(err))
		}
		if err := root.Chmod(name, mode); err != nil {
			return fmt.Errorf("prepare /%s: %w", name, err)
		}
	}
	if err := addUser(root); err != nil {
		return fmt.Errorf("add user worker: %w", noSpace(err))
	}
	for name, text := range map[string]string{"etc/resolv.conf": "", "etc/machine-id": "", "etc/hostname": "ephemeral\n", "etc/hosts": "127.0.0.1\tlocalhost\n"} {
		if err := replace(root, name, []byte(text)); err != nil {
			return fmt.Errorf("prepare /%s: %w", name, noSpace(err))
		}
	}
	return nil
}

// The user of commands, as customize.sh makes it.
const worker = 1000

// addUser makes worker a user that programs know, in place of any other with its id or name.
func addUser(root *os.Root) error {
	shell := "/bin/sh"
	if _, err := root.Stat("bin/bash"); err == nil {
		shell = "/bin/bash"
	}
	for name, line := range map[string]string{
		"etc/passwd": fmt.Sprintf("worker:x:%d:%d::/home/worker:%s", worker, worker, shell), "etc/group": fmt.Sprintf("worker:x:%d:", worker),
	} {
		lines, err := readLines(root, name)
		if err != nil {
			return err
		}
		lines = slices.DeleteFunc(lines, func(l string) bool {
			f := strings.Split(l, ":")
			return f[0] == "worker" || len(f) > 2 && f[2] == fmt.Sprint(worker)
		})
		if err := replace(root, name, []byte(strings.Join(append(lines, line), "\n")+"\n")); err != nil {
			return err
		}
	}
	if err := root.MkdirAll("home/worker", 0o755); err != nil {
		return err
	}
	return root.Lchown("home/worker", worker, worker)
}

// maxAccounts bounds what is read of a file of accounts, in bytes.
const maxAccounts = 1 << 20

func readLines(root *os.Root, name string) ([]string, error) {
	f, err := root.Open(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxAccounts+1))
	if err != nil || len(b) > maxAccounts {
		return nil, errors.Join(err, fmt.Errorf("%s is larger than %d KiB", name, maxAccounts>>10))
	}
	var lines []string
	for s := bufio.NewScanner(bytes.NewReader(b)); s.Scan(); {
		lines = append(lines, s.Text())
	}
	return lines, nil
}

// replace puts a file in place of whatever is there.
func replace(root *os.Root, name string, b []byte) error {
	if err := absent(root.RemoveAll(name)); err != nil {
		return err
	}
	return root.WriteFile(name, b, 0o644)
}

// takeContainer has the build make its root filesystem of Options.OCI.
func (b *builder) takeContainer() error {
	if b.Recipe.Name == Base().Name {
		return fmt.Errorf("image %s is not made of a container image: others take its kernel; choose another name", b.Recipe.Name)
	}
	img, err := openContainer(b.OCI)
	if err != nil {
		return err
	}
	digest, err := containerDigest(img)
	if err != nil {
		return err
	}
	b.Recipe = Recipe{Name: b.Recipe.Name, Modules: b.Recipe.Modules, Kernel: b.Recipe.Kernel, OCI: digest}
	b.container, b.makeRoot = img, b.makeContainer
	return nil
}

// makeContainer is the makeRoot of a container image. Kernel and modules are those of the image base.
func (b *builder) makeContainer(ctx context.Context, img, tmp string) (Manifest, []module, error) {
	var m Manifest
	if os.Geteuid() != 0 {
		return m, nil, errors.New("building a root filesystem needs root: files in it belong to several users; run it with sudo")
	}
	base, modules, err := openBase(b.Dir)
	if err != nil {
		return m, nil, err
	}
	if err := os.Link(base.kernel, filepath.Join(img, kernelFile)); err != nil {
		return m, nil, fmt.Errorf("take the kernel of image base: %w", noSpace(err))
	}
	tree := filepath.Join(tmp, "tree")
	if err := os.Mkdir(tree, 0o755); err != nil {
		return m, nil, fmt.Errorf("make build directory: %w", noSpace(err))
	}
	if err := flatten(ctx, b.container, tree, b.Progress); err != nil {
		return m, nil, fmt.Errorf("unpack container image: %w", err)
	}
	if err := prepareTree(tree); err != nil {
		return m, nil, err
	}
	m.Kernel = base.Kernel
	return m, modules, b.writeRoot(ctx, img, tree)
}

// baseImage is the manifest of the image base, and where it is.
type baseImage struct {
	Manifest
	kernel string // its path
}

// openBase opens the image base for its kernel and modules.
func openBase(dir string) (baseImage, []module, error) {
	base, err := Open(filepath.Join(dir, Base().Name))
	if err != nil {
		return baseImage{}, nil, fmt.Errorf("kernel and modules come from image base: %w", err)
	}
	m, err := ReadManifest(filepath.Dir(base.Kernel))
	if err != nil {
		return baseImage{}, nil, err
	}
	f, err := os.Open(base.Initramfs)
	if err != nil {
		return baseImage{}, nil, fmt.Errorf("read initramfs of image base: %w", err)
	}
	defer f.Close()
	_, modules, err := readInitramfs(f)
	if err != nil {
		return baseImage{}, nil, fmt.Errorf("initramfs of image base: %w", err)
	}
	return baseImage{m, base.Kernel}, modules, nil
}
