package hypervisor

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// SharedMapping tells whether a file in the directory can be a guest's memory that clones share: it is mapped shared and
// written to, and mapped privately when it is only open for reading. A file system that cannot do this, as some of
// remote and user-space ones, makes it fail. The file has no name and is gone afterwards.
func SharedMapping(dir string) error {
	fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil { // not every file system has files without a name
		return namedMapping(dir)
	}
	f := os.NewFile(uintptr(fd), dir)
	defer func() { _ = f.Close() }()
	return mapShared(f)
}

func namedMapping(dir string) error {
	f, err := os.CreateTemp(dir, ".mapping-")
	if err != nil {
		return err
	}
	defer func() {
		_ = f.Close()
		_ = os.Remove(f.Name())
	}()
	return mapShared(f)
}

func mapShared(f *os.File) error {
	size := 2 * os.Getpagesize()
	fd := int(f.Fd())
	if err := f.Truncate(int64(size)); err != nil {
		return err
	}
	shared, err := unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("map a file in %s shared: %w", f.Name(), err)
	}
	shared[0] = 1
	if err := unix.Munmap(shared); err != nil {
		return err
	}
	read, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err != nil {
		return err
	}
	defer func() { _ = read.Close() }()
	private, err := unix.Mmap(int(read.Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
	if err != nil {
		return fmt.Errorf("map a file in %s privately: %w", f.Name(), err)
	}
	if private[0] != 1 {
		err = fmt.Errorf("a file in %s reads differently when it is mapped privately", f.Name())
	}
	private[0] = 2
	if uerr := unix.Munmap(private); err == nil {
		err = uerr
	}
	return err
}
