package provision

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/gofrs/flock"
	"golang.org/x/sys/unix"

	"github.com/ephemeral-run/ephemeral/images"
	"github.com/ephemeral-run/ephemeral/vmm"
)

// ramMode is that of a template's memory: nobody writes to it any more, every machine's user may map it.
const ramMode fs.FileMode = 0o444

// buildPrefix marks directories of templates that are being made, or being removed. The key follows.
const buildPrefix = ".build-"

// lockPoll is how often a process looks whether another has finished making the template it wants.
const lockPoll = 50 * time.Millisecond

// Template returns the template of an image and a shape: the one that is there, if it is undamaged and fits the driver, its
// version and the CPU, else a new one. Making one boots a machine and warms it; progress (may be nil) is told what happens.
// When several processes want the same one, one makes it and the others wait. An interrupted build leaves nothing that
// would be used.
func (p *Provisioner) Template(ctx context.Context, image images.Image, shape vmm.Shape, progress func(string)) (vmm.Template, error) {
	if err := p.begin(); err != nil {
		return vmm.Template{}, fmt.Errorf("make template: %w", err)
	}
	defer p.busy.Done()
	if progress == nil {
		progress = func(string) {}
	}
	want := traitsOf(p.driver, image, shape)
	t, err := p.template(ctx, image, want, progress)
	if err != nil {
		return vmm.Template{}, fmt.Errorf("make template of image %s: %w", image.Name, advise(err))
	}
	return t, nil
}

func (p *Provisioner) template(ctx context.Context, image images.Image, want traits, progress func(string)) (vmm.Template, error) {
	for _, file := range []string{image.Kernel, image.Initramfs, image.RootFS} {
		if err := readable(file); err != nil {
			return vmm.Template{}, err
		}
	}
	dir := filepath.Join(p.config.DataDir, "templates", want.key())
	if m, err := p.find(dir, want); err == nil {
		return m.template(dir, image), nil
	}
	lock := flock.New(dir+".lock", flock.SetPermissions(0o600))
	if taken, err := lock.TryLock(); err != nil {
		return vmm.Template{}, fmt.Errorf("lock %s: %w", lock.Path(), err)
	} else if !taken {
		progress("waiting for another process that makes the same template")
		if _, err := lock.TryLockContext(ctx, lockPoll); err != nil {
			return vmm.Template{}, fmt.Errorf("lock %s: %w", lock.Path(), err)
		}
	}
	defer func() { _ = lock.Unlock() }() // closing the descriptor, which unlocks, does not fail in a way that matters
	m, err := p.find(dir, want)
	if err == nil { // the other process made it
		return m.template(dir, image), nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		progress(fmt.Sprintf("the template that is there cannot be used (%v): making a new one", err))
	}
	if m, err = p.build(ctx, dir, image, want, progress); err != nil {
		return vmm.Template{}, err
	}
	p.trust(want.key())
	if err := p.prune(); err != nil {
		return vmm.Template{}, fmt.Errorf("remove old templates: %w", err)
	}
	return m.template(dir, image), nil
}

// find takes the template that is there into use, if it is undamaged. fs.ErrNotExist: there is none.
func (p *Provisioner) find(dir string, want traits) (manifest, error) {
	if p.distrusted(want.key()) {
		return manifest{}, errors.New("the driver refused it")
	}
	if err := p.hold(dir); err != nil { // before it is looked at, so that it stays
		return manifest{}, err
	}
	return verify(dir, want)
}

// build makes a template in a directory of its own and puts it in its place whole.
func (p *Provisioner) build(ctx context.Context, dir string, image images.Image, want traits, progress func(string)) (m manifest, err error) {
	limit := time.Duration(vmm.Patience() * float64(p.config.TemplateTimeout))
	limited, cancel := context.WithTimeoutCause(ctx, limit,
		fmt.Errorf("not made within %s (EPHEMERAL_TEMPLATE_TIMEOUT, on this host as busy as it is): %w", limit, context.DeadlineExceeded))
	defer cancel()
	started := time.Now()
	b, err := p.newBuild(want.key())
	if err != nil {
		return m, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.remove())
		}
	}()
	if err := p.snapshot(limited, b.path, image, want.Shape, progress); err != nil {
		if limited.Err() != nil && ctx.Err() == nil {
			err = errors.Join(context.Cause(limited), err)
		}
		return m, err
	}
	progress("sealing the memory")
	if err := seal(filepath.Join(b.path, ramFile)); err != nil {
		return m, fmt.Errorf("seal memory: %w", err)
	}
	if m, err = describe(b.path, want, time.Now().UTC().Round(0)); err != nil {
		return m, err
	}
	if err := m.write(b.path); err != nil {
		return m, fmt.Errorf("write manifest: %w", err)
	}
	if err := p.replace(b, dir, want.key()); err != nil {
		return m, err
	}
	progress(fmt.Sprintf("made in %.1f s", time.Since(started).Seconds()))
	return m, nil
}

// newBuild makes a directory to build a template in. It is locked, so that nobody takes it for a left one.
func (p *Provisioner) newBuild(key string) (*directory, error) {
	path := filepath.Join(p.config.DataDir, "templates", buildPrefix+key+"-"+randomHex(4))
	d, err := makeDirectory(path, dirMode)
	if err != nil {
		return nil, fmt.Errorf("make directory: %w", err)
	}
	return d, nil
}

// replace renames a finished build to dir and takes it into use. What was there is removed; clones of it keep the memory
// that they mapped.
func (p *Provisioner) replace(b *directory, dir, key string) error {
	p.dropSpares(key) // they would load files that go
	old, err := p.newBuild(key)
	if err != nil {
		return err
	}
	err = os.Rename(dir, filepath.Join(old.path, "old"))
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	if err == nil {
		err = os.Rename(b.path, dir)
	}
	if err == nil {
		b.path = dir
		err = errors.Join(syncDirectory(filepath.Dir(dir)), share(b.lock))
	}
	if err := errors.Join(err, old.remove()); err != nil {
		return fmt.Errorf("put template in its place: %w", err)
	}
	p.keep(dir, b.lock)
	return nil
}

// snapshot boots a machine like any other, warms it, and leaves its memory and state in dir. The machine is gone when it
// returns.
func (p *Provisioner) snapshot(ctx context.Context, dir string, image images.Image, shape vmm.Shape, progress func(string)) (err error) {
	parts := p.newParts()
	defer func() { err = errors.Join(err, p.left(parts.cleanup.run(closeLimit))) }()
	if err := parts.make(shape.MemoryMiB); err != nil {
		return err
	}
	spec := parts.spec()
	spec.Image, spec.Shape, spec.RAM = image, shape, filepath.Join(dir, ramFile)
	if err := makeRAM(spec.RAM, int64(shape.MemoryMiB)<<20, parts.cell.UID()); err != nil {
		return fmt.Errorf("make memory file: %w", err)
	}
	progress("booting")
	m, err := p.driver.Boot(ctx, spec)
	if err != nil {
		return fmt.Errorf("boot: %w", err)
	}
	parts.cleanup.push("machine", m.Close)
	for _, step := range []struct {
		name, telling string
		do            func() error
	}{
		{"wait for the agent", "waiting for the agent", func() error { return p.agent.Probe(ctx, m) }},
		{"warm", "warming the interpreters", func() error { return p.agent.Warm(ctx, m) }},
		{"disconnect", "", m.Disconnect}, // none may be open in a template
		{"pause", "", func() error { return m.Pause(ctx) }},
		{"snapshot", "saving the state", func() error { return m.Snapshot(ctx, dir) }},
	} {
		if step.telling != "" {
			progress(step.telling)
		}
		if err := step.do(); err != nil {
			select {
			case <-m.Done(): // why it ended says more than that it did
				err = errors.Join(err, m.Err())
			default:
			}
			return fmt.Errorf("%s: %w", step.name, err)
		}
	}
	return nil
}

// makeRAM makes a memory file that the machine's user may write to. Its space is set aside: a guest that writes where the disk
// is full would be killed by a signal that says nothing.
func makeRAM(path string, size int64, uid int) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	return errors.Join(f.Truncate(size), fill(f, size), f.Chown(uid, uid), f.Close())
}

// fill leaves a file no holes, where the file system can.
func fill(f *os.File, size int64) error {
	for {
		err := unix.Fallocate(int(f.Fd()), 0, 0, size)
		switch {
		case err == nil, errors.Is(err, unix.EOPNOTSUPP):
			return nil // with holes it costs memory, nothing else
		case !errors.Is(err, unix.EINTR):
			return fmt.Errorf("set %d MiB aside: %w", size>>20, err)
		}
	}
}

// seal makes a memory file what it stays: nobody's but root's, read-only, without holes (a clone that writes to a hole
// makes the kernel allocate the page twice, once of it charged to the clone), and on disk.
func seal(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	info, err := f.Stat()
	if err == nil {
		err = fill(f, info.Size())
	}
	return errors.Join(err, f.Chown(0, 0), f.Chmod(ramMode), f.Sync(), f.Close())
}

func syncDirectory(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

func (m manifest) template(dir string, image images.Image) vmm.Template {
	return vmm.Template{
		Dir: dir, RAM: filepath.Join(dir, ramFile), Image: image, Shape: m.Traits.Shape, Key: m.Traits.key(),
		MadeAt: m.MadeAt, Driver: m.Traits.Driver, Version: m.Traits.Version,
	}
}

func (p *Provisioner) distrust(key string) { p.setDistrust(key, true) }
func (p *Provisioner) trust(key string)    { p.setDistrust(key, false) }

func (p *Provisioner) setDistrust(key string, value bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if value {
		p.suspect[key] = true
	} else {
		delete(p.suspect, key)
	}
}

func (p *Provisioner) distrusted(key string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.suspect[key]
}
