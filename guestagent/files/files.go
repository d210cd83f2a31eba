// Package files puts files into the scratch directory and takes them out, without leaving it: what the commands of a run
// do with links and mounts meanwhile makes no path lead elsewhere.
package files

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"
)

// MaxPath bounds a path, in bytes; PATH_MAX of limits.h.
const MaxPath = 4096

// beneath resolves a path within its directory only, openat2(2).
const beneath = unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV

var (
	// ErrPath: the path is not a plain relative one.
	ErrPath = errors.New("invalid path")
	// ErrNotRegular: there is something else than a file under the path.
	ErrNotRegular = errors.New("not a regular file")
	// ErrTooLarge: the file is larger than the limit.
	ErrTooLarge = errors.New("file too large")
)

// Dir is the scratch directory, held open.
type Dir struct {
	fd       int
	uid, gid int
}

// Open opens the directory. What is made in it will belong to uid and gid.
func Open(dir string, uid, gid int) (*Dir, error) {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", dir, err)
	}
	return &Dir{fd: fd, uid: uid, gid: gid}, nil
}

// Close releases the directory.
func (d *Dir) Close() error { return unix.Close(d.fd) }

// Check says whether a path is relative, without "." and "..", empty names, a trailing slash and NUL.
func Check(name string) error {
	switch {
	case name == "" || len(name) > MaxPath,
		strings.ContainsRune(name, 0),
		strings.HasPrefix(name, "/"),
		path.Clean(name) != name,
		name == "." || name == ".." || strings.HasPrefix(name, "../"):
		return fmt.Errorf("%w: %.100q", ErrPath, name)
	}
	return nil
}

// Put writes a file with the permission bits of mode, 0644 when that is 0, and makes the directories above it. The file
// appears whole or not at all, and replaces one of that name.
func (d *Dir) Put(name string, mode uint32, content io.Reader) (n int64, err error) {
	if err := Check(name); err != nil {
		return 0, err
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("write %.200q: %w", name, err)
		}
	}()
	parent, err := d.makeParents(path.Dir(name))
	if err != nil {
		return 0, err
	}
	defer unix.Close(parent)
	// A new file under a name that nobody knows, so that an existing one, or a link to it, is never written through.
	draft := ".ephemeral-" + rand.Text()
	fd, err := unix.Openat(parent, draft, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return 0, err
	}
	file := os.NewFile(uintptr(fd), draft)
	defer func() {
		err = errors.Join(err, file.Close())
		if err != nil {
			_ = unix.Unlinkat(parent, draft, 0)
		}
	}()
	if n, err = io.Copy(file, content); err != nil {
		return n, err
	}
	if mode &= 0o777; mode == 0 {
		mode = 0o644
	}
	if err := errors.Join(unix.Fchown(fd, d.uid, d.gid), unix.Fchmod(fd, mode)); err != nil {
		return n, err
	}
	return n, unix.Renameat(parent, draft, parent, path.Base(name))
}

// makeParents opens a directory below d, which it makes if need be, one name at a time.
func (d *Dir) makeParents(name string) (int, error) {
	current, err := unix.Dup(d.fd)
	if err != nil {
		return -1, err
	}
	unix.CloseOnExec(current)
	if name == "." {
		return current, nil
	}
	for _, part := range strings.Split(name, "/") {
		next, err := d.enter(current, part)
		_ = unix.Close(current)
		if err != nil {
			return -1, err
		}
		current = next
	}
	return current, nil
}

func (d *Dir) enter(parent int, name string) (int, error) {
	how := &unix.OpenHow{Flags: unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: beneath}
	err := unix.Mkdirat(parent, name, 0o755)
	made := err == nil
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return -1, err
	}
	fd, err := unix.Openat2(parent, name, how)
	if err != nil {
		return -1, err
	}
	if made {
		if err := unix.Fchown(fd, d.uid, d.gid); err != nil {
			return -1, errors.Join(err, unix.Close(fd))
		}
	}
	return fd, nil
}

// Get copies a regular file of at most limit bytes to w. A larger one fails with ErrTooLarge, after limit bytes at most.
func (d *Dir) Get(name string, limit int64, w io.Writer) error {
	if err := Check(name); err != nil {
		return err
	}
	how := &unix.OpenHow{Flags: unix.O_RDONLY | unix.O_NONBLOCK | unix.O_NOCTTY | unix.O_CLOEXEC, Resolve: beneath}
	fd, err := unix.Openat2(d.fd, name, how)
	if err != nil {
		return fmt.Errorf("read %.200q: %w", name, err)
	}
	file := os.NewFile(uintptr(fd), name)
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return fmt.Errorf("read %.200q: %w", name, err)
	}
	if !info.Mode().IsRegular() {
		return fmt.Errorf("read %.200q: %w", name, ErrNotRegular)
	}
	if info.Size() > limit {
		return fmt.Errorf("read %.200q: %w: %d bytes, limit %d", name, ErrTooLarge, info.Size(), limit)
	}
	n, err := io.Copy(struct{ io.Writer }{w}, io.LimitReader(file, limit)) // not w's ReaderFrom: w sees chunks
	if err != nil {
		return fmt.Errorf("read %.200q: %w", name, err)
	}
	if n == limit { // it may have grown meanwhile
		if more, _ := file.Read(make([]byte, 1)); more > 0 {
			return fmt.Errorf("read %.200q: %w: limit %d", name, ErrTooLarge, limit)
		}
	}
	return nil
}
