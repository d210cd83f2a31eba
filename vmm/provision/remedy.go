package provision

import (
	"errors"
	"io/fs"
	"strings"

	"golang.org/x/sys/unix"
)

// advised is an error with what to do about it.
type advised struct {
	error
	advice string
}

func (e *advised) Error() string { return e.error.Error() + "; " + e.advice }

// Unwrap gives the error.
func (e *advised) Unwrap() error { return e.error }

// remedies are what to do about what the host may lack, the first that fits. They name what an operator changes.
var remedies = []struct {
	fits   func(error) bool
	advice string
}{
	{anyOf(unix.ENOSPC, unix.EDQUOT), "free space, and inodes, on the file system of EPHEMERAL_DATA_DIR"},
	{anyOf(unix.EMFILE), "raise this process's limit of open files (LimitNOFILE= of the service, ulimit -n)"},
	{anyOf(unix.ENFILE), "raise the host's limit of open files (sysctl fs.file-max)"},
	{at("/dev/net/tun", unix.ENOENT, unix.ENODEV, unix.ENXIO, unix.ENOTTY), "load the module (modprobe tun); in a container, pass /dev/net/tun in"},
	{at("/dev/net/tun", unix.EACCES, unix.EPERM), "run this as root, and allow /dev/net/tun in the container's device rules"},
	{at("/sys/fs/cgroup", unix.EROFS, unix.EACCES, unix.EPERM), "make /sys/fs/cgroup writable (mount -o remount,rw; in a container, pass it in writable)"},
	{anyOf(unix.EROFS), "make the file system writable (mount -o remount,rw)"},
	{anyOf(unix.ENOMEM), "free memory, or lower EPHEMERAL_POOL_MAX_MACHINES or EPHEMERAL_MACHINE_MEMORY_MIB"},
}

// anyOf fits an error that is one of the numbers.
func anyOf(numbers ...unix.Errno) func(error) bool {
	return func(err error) bool {
		for _, n := range numbers {
			if errors.Is(err, n) {
				return true
			}
		}
		return false
	}
}

// at fits an error that is one of the numbers and about a path below the given one.
func at(path string, numbers ...unix.Errno) func(error) bool {
	one := anyOf(numbers...)
	return func(err error) bool {
		if !one(err) {
			return false
		}
		var pathError *fs.PathError
		return errors.As(err, &pathError) && strings.HasPrefix(pathError.Path, path) || strings.Contains(err.Error(), path)
	}
}

// advise adds to an error what to do about it, where that is known. nil stays nil.
func advise(err error) error {
	for _, r := range remedies {
		if err != nil && r.fits(err) {
			return &advised{err, r.advice}
		}
	}
	return err
}
