package provision

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"

	"golang.org/x/sys/unix"
)

// keepTemplates is how many templates stay when a new one is made, those in use not counted. A change of image, shape or
// hypervisor leaves the old one behind, as large as a machine's memory; some are kept for whoever goes back and forth.
const keepTemplates = 2

var templateKey = regexp.MustCompile(`^[0-9a-f]{32}$`)

// hold marks a template as used by this process until the provisioner is closed: a shared lock on its directory.
// fs.ErrNotExist: there is none.
func (p *Provisioner) hold(dir string) error {
	f, err := os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	// It blocks as long as somebody looks whether the template is in use, or removes it.
	if err := share(f); err != nil {
		return errors.Join(fmt.Errorf("lock template %s: %w", dir, err), f.Close())
	}
	if !sameFile(f, dir) {
		return errors.Join(&fs.PathError{Op: "lock", Path: dir, Err: fs.ErrNotExist}, f.Close())
	}
	p.keep(dir, f)
	return nil
}

// share locks a file for this process and others.
func share(f *os.File) error {
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_SH)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// keep holds a locked directory in place of what was held by that name.
func (p *Provisioner) keep(dir string, f *os.File) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if old := p.held[dir]; old != nil {
		_ = old.Close() // a directory, read-only: nothing to lose
	}
	p.held[dir] = f
}

// letGo ends the use of all templates.
func (p *Provisioner) letGo() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	var errs []error
	for _, f := range p.held {
		errs = append(errs, f.Close())
	}
	clear(p.held)
	return errors.Join(errs...)
}

// prune removes the oldest templates that no process uses, but for keepTemplates.
func (p *Provisioner) prune() error {
	parent := filepath.Join(p.config.DataDir, "templates")
	paths, err := unused(parent, templateKey.MatchString)
	errs := []error{err}
	age := func(path string) int64 { // damaged ones are the oldest
		info, err := os.Stat(filepath.Join(path, manifestFile))
		if err != nil {
			return 0
		}
		return info.ModTime().UnixNano()
	}
	slices.SortFunc(paths, func(a, b string) int { return int(max(-1, min(1, age(b)-age(a)))) })
	for _, path := range paths[min(keepTemplates, len(paths)):] {
		_, err := discard(path)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// discard removes a template unless somebody began to use it, and tells whether it did. It is renamed first: half of one must not
// look like one.
func discard(path string) (bool, error) {
	d, err := lockDirectory(path)
	if errors.Is(err, errTaken) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	doomed := filepath.Join(filepath.Dir(path), buildPrefix+filepath.Base(path)+"-"+randomHex(4))
	if err := os.Rename(path, doomed); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, errors.Join(err, d.release())
	}
	d.path = doomed
	return true, d.remove()
}
