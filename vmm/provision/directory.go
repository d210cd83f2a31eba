package provision

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// dirMode lets machines' users pass through a directory without seeing what is in it.
const dirMode fs.FileMode = 0o711

// errTaken: somebody else has the directory locked, or removed it.
var errTaken = errors.New("directory is in use")

// directory is a directory that this process uses and holds a lock on.
type directory struct {
	path string
	lock *os.File
}

// makeDirectory makes a directory that must not exist, and locks it.
func makeDirectory(path string, mode fs.FileMode) (*directory, error) {
	for range 3 {
		if err := os.Mkdir(path, mode); err != nil {
			return nil, err
		}
		d, err := lockDirectory(path)
		if errors.Is(err, errTaken) {
			continue // a Reconcile of another process took it for a left one before it was locked, and removes it
		}
		if err != nil {
			return nil, errors.Join(err, os.Remove(path))
		}
		return d, nil
	}
	return nil, fmt.Errorf("%s: %w", path, errTaken)
}

// lockDirectory locks an existing directory. errTaken: another has it. The lock is let go with the last descriptor, so
// also when this process is killed.
func lockDirectory(path string) (*directory, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s: %w", path, errTaken)
	}
	if err != nil {
		return nil, err
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		err = errTaken
	}
	if err == nil && !sameFile(f, path) { // removed between opening and locking
		err = errTaken
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
	}
	return &directory{path: path, lock: f}, nil
}

func sameFile(f *os.File, path string) bool {
	a, errA := f.Stat()
	b, errB := os.Lstat(path)
	return errA == nil && errB == nil && os.SameFile(a, b)
}

// remove deletes the directory with all in it and lets the lock go.
func (d *directory) remove() error {
	return errors.Join(os.RemoveAll(d.path), d.lock.Close())
}

// release lets the lock go and leaves the directory.
func (d *directory) release() error { return d.lock.Close() }

// unused lists the directories in dir, by path, that keep is true for and that nobody holds a lock on.
func unused(dir string, keep func(name string) bool) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var paths []string
	for _, e := range entries {
		if !e.IsDir() || !keep(e.Name()) {
			continue
		}
		d, err := lockDirectory(filepath.Join(dir, e.Name()))
		if errors.Is(err, errTaken) {
			continue
		}
		if err != nil {
			return paths, err
		}
		paths = append(paths, d.path)
		if err := d.release(); err != nil {
			return paths, err
		}
	}
	return paths, nil
}

// removeUnused removes those directories and counts them. It goes on after errors and joins them.
func removeUnused(dir string, keep func(name string) bool) (removed int, err error) {
	paths, err := unused(dir, keep)
	errs := []error{err}
	for _, path := range paths {
		d, err := lockDirectory(path)
		if errors.Is(err, errTaken) {
			continue
		}
		if err == nil {
			err = d.remove()
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		removed++
	}
	return removed, errors.Join(errs...)
}

// searchable checks that users without privileges can reach path: each directory above it has to be searchable by
// others. Machines' VMMs run as such users.
func searchable(path string) error {
	for dir := filepath.Dir(path); ; dir = filepath.Dir(dir) {
		info, err := os.Stat(dir)
		if err != nil {
			return err
		}
		if info.Mode()&0o001 == 0 {
			return fmt.Errorf("machines run as unprivileged users, which cannot pass through %s (mode %#o) to %s: chmod o+x %s",
				dir, info.Mode().Perm(), path, dir)
		}
		if dir == "/" {
			return nil
		}
	}
}

// readable checks that unprivileged users can read the file.
func readable(path string) error {
	if err := searchable(path); err != nil {
		return err
	}
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if info.Mode()&0o004 == 0 {
		return fmt.Errorf("machines run as unprivileged users, which cannot read %s (mode %#o): chmod o+r %s", path, info.Mode().Perm(), path)
	}
	return nil
}

// openDirectory makes a directory of the node's own, or lets machines' users pass through the one that is there.
func openDirectory(path string) error {
	if err := os.MkdirAll(path, dirMode); err != nil {
		return err
	}
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if mode := info.Mode().Perm(); mode&0o001 == 0 {
		return os.Chmod(path, mode|0o011)
	}
	return nil
}
