package jail

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"
)

// ErrNoUID says that all user ids of the range are in use.
var ErrNoUID = errors.New("no user id free")

// uids gives out user ids, each to one machine of the host at a time. A user id in use is a lock on the byte of that
// offset in a file that all nodes of the host share, so that two of them never use one at once, and those of a process
// that was killed are free again.
type uids struct {
	mu    sync.Mutex
	file  *os.File
	first int
	used  []bool
	next  int
}

func openUIDs(dir string, first, count int) (*uids, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(dir, "uids.lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	return &uids{file: f, first: first, used: make([]bool, count)}, nil
}

// take goes round the range, so that a user id rests as long as possible before it is used again.
func (u *uids) take() (int, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for range u.used {
		i := u.next
		u.next = (u.next + 1) % len(u.used)
		if u.used[i] {
			continue
		}
		err := u.lock(i, unix.F_WRLCK)
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
			continue // another node of this host has it
		}
		if err != nil {
			return 0, fmt.Errorf("lock user id %d in %s: %w", u.first+i, u.file.Name(), err)
		}
		u.used[i] = true
		return u.first + i, nil
	}
	return 0, fmt.Errorf("%w: all of %d to %d are in use", ErrNoUID, u.first, u.first+len(u.used)-1)
}

func (u *uids) give(uid int) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	i := uid - u.first
	if !u.used[i] {
		return fmt.Errorf("user id %d is not in use", uid)
	}
	if err := u.lock(i, unix.F_UNLCK); err != nil {
		return fmt.Errorf("unlock user id %d: %w", uid, err)
	}
	u.used[i] = false
	return nil
}

// lock sets an open-file-description lock: those of two opens of the file exclude each other, also in one process.
func (u *uids) lock(i int, kind int16) error {
	lock := unix.Flock_t{Type: kind, Start: int64(u.first + i), Len: 1}
	return unix.FcntlFlock(u.file.Fd(), unix.F_OFD_SETLK, &lock)
}

func (u *uids) close() error { return u.file.Close() }
