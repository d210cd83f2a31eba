package files

import (
	"errors"
	"fmt"
	"io"
	"os"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// Out is the directory below the scratch directory whose files are collected when a run ends.
const Out = "out"

const (
	maxDepth   = 32      // directories below Out
	maxEntries = 200_000 // looked at in one Collect
	readBatch  = 512     // directory entries read at once
)

// Limits bound what Collect hands on.
type Limits struct {
	Files int64
	Bytes int64 // of all files together
	Path  int64 // of one path, in bytes
}

// Left counts what Collect did not hand on.
type Left struct {
	Skipped   int64 // links, devices, pipes, sockets, names that are not UTF-8 or too long
	Truncated bool  // there were files beyond the limits
}

// Collect calls file for each regular file below Out, with its path relative to that, its permission bits, and a reader
// of exactly what of it is to be handed on, which is not used after file returns. No link is followed and no other file
// system entered. The order is that of the directories. An error of file, or of reading content, ends it.
func (d *Dir) Collect(l Limits, file func(path string, mode uint32, content io.Reader) error) (Left, error) {
	c := &collection{limits: l, file: file}
	fd, err := openIn(d.fd, Out, unix.O_DIRECTORY)
	switch {
	case errors.Is(err, unix.ENOENT), isOther(err):
		return c.left, nil // it was removed, or is something else now
	case err != nil:
		return c.left, fmt.Errorf("collect: open %s: %w", Out, err)
	}
	if err := c.walk(os.NewFile(uintptr(fd), Out), "", 0); err != nil && !errors.Is(err, errEnough) {
		return c.left, fmt.Errorf("collect: %w", err)
	}
	return c.left, nil
}

// errEnough ends a walk that has reached its limits.
var errEnough = errors.New("enough files")

type collection struct {
	limits Limits
	file   func(path string, mode uint32, content io.Reader) error
	seen   int
	files  int64
	bytes  int64
	left   Left
}

// openIn opens a name directly in a directory, for reading, without waiting for whoever is at the other end.
func openIn(parent int, name string, flags uint64) (int, error) {
	return unix.Openat2(parent, name, &unix.OpenHow{
		Flags: unix.O_RDONLY | unix.O_NONBLOCK | unix.O_NOCTTY | unix.O_NOFOLLOW | unix.O_CLOEXEC | flags, Resolve: beneath,
	})
}

// isOther says that a name is not what its directory said: a link, a mount, a socket.
func isOther(err error) bool {
	for _, errno := range []unix.Errno{unix.ELOOP, unix.EXDEV, unix.ENOTDIR, unix.ENXIO, unix.ENODEV, unix.EACCES, unix.EPERM} {
		if errors.Is(err, errno) {
			return true
		}
	}
	return false
}

// walk takes the entries of a directory, which it closes.
func (c *collection) walk(dir *os.File, prefix string, depth int) error {
	defer dir.Close()
	for {
		entries, err := dir.ReadDir(readBatch)
		for _, e := range entries {
			if err := c.entry(dir, prefix, e, depth); err != nil {
				return err
			}
		}
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return fmt.Errorf("read directory %.200q: %w", prefix, err)
		}
	}
}

func (c *collection) entry(dir *os.File, prefix string, e os.DirEntry, depth int) error {
	if c.seen++; c.seen > maxEntries {
		c.left.Truncated = true
		return errEnough
	}
	path := prefix + e.Name()
	switch {
	case e.Type() != 0 && !e.IsDir(), !utf8.ValidString(path), int64(len(path)) > c.limits.Path, e.IsDir() && depth == maxDepth:
		c.left.Skipped++
		return nil
	case e.IsDir():
		fd, err := openIn(int(dir.Fd()), e.Name(), unix.O_DIRECTORY)
		if err != nil {
			return c.skip(path, err)
		}
		return c.walk(os.NewFile(uintptr(fd), e.Name()), path+"/", depth+1)
	case c.files == c.limits.Files:
		c.left.Truncated = true
		return errEnough
	}
	fd, err := openIn(int(dir.Fd()), e.Name(), 0)
	if err != nil {
		return c.skip(path, err)
	}
	f := os.NewFile(uintptr(fd), e.Name())
	defer f.Close()
	return c.take(path, f)
}

// skip counts what cannot be opened because it is something else or gone; any other error ends the walk.
func (c *collection) skip(path string, err error) error {
	if errors.Is(err, unix.ENOENT) || isOther(err) {
		c.left.Skipped++
		return nil
	}
	return fmt.Errorf("open %.200q: %w", path, err)
}

// take hands a file on, unless it is none or does not fit.
func (c *collection) take(path string, f *os.File) error {
	info, err := f.Stat()
	switch {
	case err != nil:
		return fmt.Errorf("look at %.200q: %w", path, err)
	case !info.Mode().IsRegular():
		c.left.Skipped++
		return nil
	case info.Size() > c.limits.Bytes-c.bytes:
		c.left.Truncated = true
		return nil
	}
	content := &io.LimitedReader{R: f, N: info.Size()}
	if err := c.file(path, uint32(info.Mode().Perm()), content); err != nil {
		return err
	}
	c.files++
	c.bytes += info.Size()
	return nil
}
