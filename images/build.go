package images

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"
)

// Options says what to build and where.
type Options struct {
	Dir      string               // directory of images; the image is <Dir>/<recipe's name>
	Recipe   Recipe               // empty: Base()
	OCI      string               // an OCI layout or an archive of docker save, in place of the recipe's packages; empty: none
	Agent    string               // the agent's program: guestagent, statically linked
	Mirror   string               // Debian mirror; empty: mmdebstrap's choice
	Rebuild  bool                 // also when root filesystem and kernel are there already: takes today's packages
	Progress func(message string) // called with a line for each step; may be nil
}

// Build makes the image of a recipe and returns it verified. Root filesystem and kernel are taken from the image that is
// there when they were made from the same inputs; so a new agent costs a new initramfs only. The image appears at once and
// whole, or not at all; a second builder waits for the first; what an interrupted build left is removed by the next.
//
// Making a root filesystem needs root, mmdebstrap, mkfs.erofs and a Debian mirror. Errors: ErrNoSpace.
func Build(ctx context.Context, o Options) (Image, error) {
	b, err := newBuilder(o)
	if err != nil {
		return Image{}, err
	}
	return b.run(ctx)
}

// run builds under the lock.
func (b *builder) run(ctx context.Context) (Image, error) {
	s, err := b.lock(ctx)
	if err != nil {
		return Image{}, err
	}
	defer s.lock.Close() // which lets it go: nothing is lost when that fails
	b.store = s
	if _, err := s.removeLeftovers(); err != nil {
		return Image{}, err
	}
	return b.build(ctx)
}

// builder is one build.
type builder struct {
	Options
	inputs string
	agent  []byte
	start  time.Time
	store  *store        // while it builds
	grace  time.Duration // how long a program may clean up after a cancelled build, before it is killed
	// makeRoot puts root filesystem and kernel into the directory img, with tmp for what is thrown away, and returns the
	// modules for the initramfs. It sets the manifest's Kernel and Packages.
	makeRoot func(ctx context.Context, img, tmp string) (Manifest, []module, error)
	// container is the image that makeContainer takes; nil: none.
	container v1.Image
}

func newBuilder(o Options) (*builder, error) {
	if o.Recipe.Name == "" {
		o.Recipe = Base()
	}
	if !ValidName(o.Recipe.Name) {
		return nil, fmt.Errorf("image name %q: want 1 to 63 of a-z, 0-9 and \"-\"", o.Recipe.Name)
	}
	if o.Progress == nil {
		o.Progress = func(string) {}
	}
	dir, err := filepath.Abs(o.Dir)
	if err != nil {
		return nil, fmt.Errorf("find directory of images: %w", err)
	}
	o.Dir = dir
	b := &builder{Options: o, start: time.Now(), grace: stopGrace}
	b.makeRoot = b.makeDebian
	if o.OCI != "" {
		if err := b.takeContainer(); err != nil {
			return nil, err
		}
	}
	if b.inputs, err = b.Recipe.inputs(); err != nil {
		return nil, err
	}
	if b.agent, err = readAgent(o.Agent); err != nil {
		return nil, err
	}
	return b, nil
}

// lock keeps other builders out of the directory.
func (b *builder) lock(ctx context.Context) (*store, error) {
	if err := os.MkdirAll(b.Dir, 0o755); err != nil {
		return nil, fmt.Errorf("make directory of images: %w", noSpace(err))
	}
	return lockStore(ctx, b.Dir, func() { b.Progress("waiting for another build in " + b.Dir) })
}

// link is where the image is found: a symbolic link to the directory of one build.
func (b *builder) link() string { return filepath.Join(b.Dir, b.Recipe.Name) }

func (b *builder) build(ctx context.Context) (Image, error) {
	if fi, err := os.Lstat(b.link()); err == nil && fi.Mode()&os.ModeSymlink == 0 {
		return Image{}, fmt.Errorf("%s is not a link made by a build; move it away first", b.link())
	}
	base, err := b.reusable()
	if err != nil {
		return Image{}, err
	}
	if base != nil && bytes.Equal(base.agent, b.agent) {
		b.Progress("image " + b.Recipe.Name + " is up to date: " + base.image.Digest)
		return base.image, nil
	}
	tmp, err := os.MkdirTemp(b.Dir, leftoverPrefix)
	if err != nil {
		return Image{}, fmt.Errorf("make build directory: %w", noSpace(err))
	}
	defer os.RemoveAll(tmp)
	img := filepath.Join(tmp, "image")
	if err := os.Mkdir(img, 0o755); err != nil {
		return Image{}, fmt.Errorf("make build directory: %w", noSpace(err))
	}
	m, modules, err := b.fill(ctx, img, tmp, base)
	if err != nil {
		return Image{}, err
	}
	b.Progress("writing initramfs")
	if err := createInitramfs(img, b.agent, modules); err != nil {
		return Image{}, err
	}
	if err := b.seal(&m, img, modules); err != nil {
		return Image{}, err
	}
	return b.publish(m, img)
}

// fill puts kernel and root filesystem into img, from base where there is one.
func (b *builder) fill(ctx context.Context, img, tmp string, base *reused) (Manifest, []module, error) {
	if base == nil {
		return b.makeRoot(ctx, img, tmp)
	}
	b.Progress("reusing root filesystem and kernel of " + base.image.Digest)
	for _, from := range []string{base.image.Kernel, base.image.RootFS} {
		if err := os.Link(from, filepath.Join(img, filepath.Base(from))); err != nil {
			return Manifest{}, nil, fmt.Errorf("reuse file of image: %w", noSpace(err))
		}
	}
	return base.manifest, base.modules, nil
}

// seal writes the manifest over the files of img.
func (b *builder) seal(m *Manifest, img string, modules []module) error {
	m.Version = manifestVersion
	m.Name = b.Recipe.Name
	m.Recipe = b.Recipe
	m.Inputs = b.inputs
	m.BuiltAt = time.Now().UTC().Truncate(time.Second)
	m.Modules = nil
	for _, mod := range modules {
		m.Modules = append(m.Modules, mod.Name)
	}
	m.Files = map[string]File{}
	for _, name := range imageFiles {
		f, err := sumFile(filepath.Join(img, name))
		if err != nil {
			return fmt.Errorf("compute digest of image: %w", err)
		}
		m.Files[name] = f
	}
	m.Digest = m.digest()
	if err := m.check(); err != nil {
		return err
	}
	return m.write(img)
}

// reused is an image that is there and was made from the same inputs.
type reused struct {
	image    Image
	manifest Manifest
	agent    []byte
	modules  []module
}

// reusable returns the image that is there when its root filesystem and kernel serve, or nil.
func (b *builder) reusable() (*reused, error) {
	if b.Rebuild {
		return nil, nil
	}
	img, err := Open(b.link())
	if errors.Is(err, ErrNotBuilt) {
		return nil, nil
	}
	if errors.Is(err, ErrDamaged) {
		b.Progress("building anew: " + err.Error())
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	m, err := ReadManifest(filepath.Dir(img.Kernel))
	if err != nil {
		return nil, err
	}
	if m.Inputs != b.inputs {
		b.Progress("building anew: the recipe has changed")
		return nil, nil
	}
	f, err := os.Open(img.Initramfs)
	if err != nil {
		return nil, fmt.Errorf("read initramfs: %w", err)
	}
	defer f.Close()
	agent, modules, err := readInitramfs(f)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", img.Initramfs, err)
	}
	return &reused{image: img, manifest: m, agent: agent, modules: modules}, nil
}

// publish makes img the image: it becomes a directory named after its digest, to which the link then points.
func (b *builder) publish(m Manifest, img string) (Image, error) {
	name := b.versionPrefix() + strings.TrimPrefix(m.Digest, "sha256:")[:16]
	dir := filepath.Join(b.Dir, name)
	if _, err := Verify(dir); err == nil {
		// The same bytes are there already; what they were made from may have changed.
		b.Progress("image " + b.Recipe.Name + " came out as before: " + m.Digest)
		if err := os.Rename(filepath.Join(img, manifestFile), filepath.Join(dir, manifestFile)); err != nil {
			return Image{}, fmt.Errorf("publish image: %w", noSpace(err))
		}
	} else {
		// A damaged one may be in use: what has its files open keeps them.
		gone := goneName(b.Dir)
		if err := absent(os.Rename(dir, gone)); err != nil {
			return Image{}, fmt.Errorf("remove damaged image: %w", err)
		}
		if err := os.Rename(img, dir); err != nil {
			return Image{}, fmt.Errorf("publish image: %w", noSpace(err))
		}
		if err := os.RemoveAll(gone); err != nil {
			return Image{}, fmt.Errorf("remove damaged image: %w", err)
		}
	}
	previous, _ := os.Readlink(b.link())
	if err := b.pointTo(name); err != nil {
		return Image{}, err
	}
	if err := b.prune(name, previous); err != nil {
		return Image{}, err
	}
	out, err := Open(b.link())
	if err == nil {
		b.Progress(fmt.Sprintf("image %s built in %.1f s: %s", out.Name, time.Since(b.start).Seconds(), out.Digest))
	}
	return out, err
}

// pointTo replaces the link in one step.
func (b *builder) pointTo(name string) error {
	tmp := filepath.Join(b.Dir, leftoverPrefix+"link-"+rand.Text())
	if err := os.Symlink(name, tmp); err != nil {
		return fmt.Errorf("publish image: %w", noSpace(err))
	}
	if err := os.Rename(tmp, b.link()); err != nil {
		os.Remove(tmp)
		return fmt.Errorf("publish image: %w", noSpace(err))
	}
	if err := syncDir(b.Dir); err != nil {
		return fmt.Errorf("publish image: %w", noSpace(err))
	}
	return nil
}

func (b *builder) versionPrefix() string { return "." + b.Recipe.Name + "-" }

// prune removes the image's builds but those given and those that a process uses. The one before the current stays until the
// next build, for whoever goes back and forth; Collect removes it.
func (b *builder) prune(keep ...string) error {
	builds, err := b.store.builds(b.Recipe.Name)
	if err != nil {
		return err
	}
	for _, build := range builds {
		if slices.Contains(keep, build) {
			continue
		}
		if err := b.store.removeBuild(build, new(Removed)); err != nil && !errors.Is(err, ErrInUse) {
			return err
		}
	}
	return nil
}

// requireSpace refuses a build that would fill the file system.
func requireSpace(dir string, want uint64) error {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return fmt.Errorf("look for free space in %s: %w", dir, err)
	}
	if free := st.Bavail * uint64(st.Bsize); free < want {
		return fmt.Errorf("%w: %d MiB free in %s, a build needs %d MiB; free some or choose another directory",
			ErrNoSpace, free>>20, dir, want>>20)
	}
	return nil
}

// noSpace makes a full disk known as ErrNoSpace.
func noSpace(err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return fmt.Errorf("%w: %w", ErrNoSpace, err)
	}
	return err
}
