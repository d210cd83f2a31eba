package images

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// ErrInUse: a process, such as a node that serves it, holds the image.
var ErrInUse = errors.New("image in use")

// Held is an image in use: nobody removes it before Release, or before the process has ended, however it ends.
type Held struct {
	Image
	dir *os.File // the build's directory, with a shared lock; nil after Release
}

// Hold is Open, and keeps the image from being removed. While one is being removed it waits: that takes a moment, and the image is
// then not there. Errors: ErrNotBuilt, ErrDamaged.
func Hold(dir string) (*Held, error) {
	for {
		at, err := resolve(dir)
		if err != nil {
			return nil, err
		}
		f, err := lockBuild(at, unix.LOCK_SH)
		if errors.Is(err, os.ErrNotExist) {
			continue // it was replaced or removed since: the link tells which
		}
		if err != nil {
			return nil, err
		}
		image, err := open(at, true)
		if err != nil {
			return nil, errors.Join(err, f.Close())
		}
		return &Held{image, f}, nil
	}
}

// Release ends the use. It may be repeated.
func (h *Held) Release() error {
	if h == nil || h.dir == nil {
		return nil
	}
	f := h.dir
	h.dir = nil
	if err := f.Close(); err != nil {
		return fmt.Errorf("release image %s: %w", h.Name, err)
	}
	return nil
}

// lockBuild locks the directory of a build: flock(2), shared or exclusive, with LOCK_NB if it shall not wait. ErrInUse: it would
// have to wait. os.ErrNotExist: there is no such directory any more. The lock is let go with the file.
func lockBuild(dir string, how int) (*os.File, error) {
	f, err := os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, fmt.Errorf("lock image: %w", err)
	}
	for err = unix.EINTR; errors.Is(err, unix.EINTR); {
		err = unix.Flock(int(f.Fd()), how)
	}
	switch {
	case errors.Is(err, unix.EWOULDBLOCK):
		err = ErrInUse
	case err == nil && !isStill(f, dir):
		err = &os.PathError{Op: "lock", Path: dir, Err: os.ErrNotExist}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock image %s: %w", filepath.Base(dir), err), f.Close())
	}
	return f, nil
}

// isStill tells whether the open directory is the one at the path.
func isStill(f *os.File, path string) bool {
	a, errA := f.Stat()
	b, errB := os.Lstat(path)
	return errA == nil && errB == nil && os.SameFile(a, b)
}
