package files

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
)

// User has the rights with which files anywhere in the machine are read and written.
type User struct {
	UID, GID uint32
	Groups   []uint32 // supplementary
}

// ErrKernelFile: the path leads to a file that the kernel makes, such as those of /proc. To the agent they show the agent
// itself.
var ErrKernelFile = errors.New("a file of the kernel")

// kernelFileSystems are refused; see ErrKernelFile.
var kernelFileSystems = []int64{
	unix.PROC_SUPER_MAGIC, unix.SYSFS_MAGIC, unix.CGROUP2_SUPER_MAGIC, unix.DEBUGFS_MAGIC, unix.TRACEFS_MAGIC, unix.DEVPTS_SUPER_MAGIC,
	unix.SECURITYFS_MAGIC, unix.BPF_FS_MAGIC,
}

// Read returns at most limit bytes of a regular file, from offset, and the size of the whole. The path is absolute; links
// are followed with the user's rights.
func (u User) Read(path string, offset int64, limit int) (data []byte, size int64, err error) {
	err = u.do(func() error {
		file, err := openRegular(path, unix.O_RDONLY)
		if err != nil {
			return err
		}
		defer file.Close()
		info, err := file.Stat()
		if err != nil {
			return err
		}
		size = info.Size()
		data = make([]byte, limit)
		n, err := file.ReadAt(data, offset)
		if errors.Is(err, io.EOF) {
			err = nil
		}
		data = data[:n]
		return err
	})
	if err != nil {
		return nil, 0, fmt.Errorf("read %.200q: %w", path, bare(err))
	}
	return data, size, nil
}

// Write writes a regular file with the user's rights, or adds to its end, and makes the directories above it. An existing
// file stays itself: its mode, owner and links.
func (u User) Write(path string, content []byte, add bool) error {
	err := u.do(func() error {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		flags := unix.O_WRONLY | unix.O_CREAT
		if add {
			flags |= unix.O_APPEND
		}
		file, err := openRegular(path, flags)
		if err != nil {
			return err
		}
		if !add { // not by O_TRUNC: what it is was not known then
			err = file.Truncate(0)
		}
		if err == nil {
			_, err = file.Write(content)
		}
		return errors.Join(err, file.Close())
	})
	if err != nil {
		return fmt.Errorf("write %.200q: %w", path, bare(err))
	}
	return nil
}

// openRegular opens a regular file that is not the kernel's.
func openRegular(path string, flags int) (*os.File, error) {
	how := &unix.OpenHow{
		Flags: uint64(flags | unix.O_NONBLOCK | unix.O_NOCTTY | unix.O_CLOEXEC), Resolve: unix.RESOLVE_NO_MAGICLINKS,
	}
	if flags&unix.O_CREAT != 0 {
		how.Mode = 0o644
	}
	fd, err := unix.Openat2(unix.AT_FDCWD, path, how)
	if err != nil {
		return nil, err
	}
	var stat unix.Stat_t
	var system unix.Statfs_t
	if err = errors.Join(unix.Fstat(fd, &stat), unix.Fstatfs(fd, &system)); err == nil {
		switch {
		case slices.Contains(kernelFileSystems, int64(system.Type)):
			err = ErrKernelFile
		case stat.Mode&unix.S_IFMT != unix.S_IFREG:
			err = ErrNotRegular
		}
	}
	if err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	return os.NewFile(uintptr(fd), path), nil
}

// bare is the reason of an error, for the path is named by the caller.
func bare(err error) error {
	var number unix.Errno
	if errors.As(err, &number) {
		return number
	}
	return err
}

// do calls f on a thread that has the user's rights on files and root's no longer; setfsuid(2) takes CAP_DAC_OVERRIDE and
// its like with it.
func (u User) do(f func() error) error {
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and not unlocked: the thread ends with the goroutine
		err := u.become()
		if err == nil {
			err = f()
		}
		result <- err
	}()
	return <-result
}

// become changes the thread. The calls are made raw, since package syscall's change every thread of the process.
func (u User) become() error {
	groups := append(u.Groups[:len(u.Groups):len(u.Groups)], u.GID)
	if _, _, errno := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(groups)), uintptr(unsafe.Pointer(&groups[0])), 0); errno != 0 {
		return fmt.Errorf("take the user's groups: %w", errno)
	}
	for _, c := range []struct {
		call uintptr
		id   uint32
	}{{unix.SYS_SETFSGID, u.GID}, {unix.SYS_SETFSUID, u.UID}} {
		_, _, _ = unix.RawSyscall(c.call, uintptr(c.id), 0, 0)                              // tells the id before, not whether it worked
		if now, _, _ := unix.RawSyscall(c.call, uintptr(c.id), 0, 0); uint32(now) != c.id { // so look
			return fmt.Errorf("take the user's rights: %w", unix.EPERM)
		}
	}
	return nil
}
