package redisserver

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// ErrDiskFull says that the file system of the server's directory has no room; the message names the directory.
var ErrDiskFull = errors.New("the disk of the Redis data is full")

// What is set aside, and how often it is looked after.
const (
	mostReserve = 64 << 20 // bytes: what changes append in the time between two looks, many times over
	reservePart = 8        // of a small file system, at most this part of it
	lookEvery   = 100 * time.Millisecond
	askEvery    = time.Second // for room on a disk that is full
)

// room sees to it that the server never fails to append for want of space: one that syncs before it answers ends when it
// does. Blocks behind the end of its append-only file are set aside, where nothing but the file can use them. When there is
// no space to set aside more, Full says so, and callers are to add nothing; what goes on appends to what is set aside. With half of it
// used up the server refuses all changes, and answers reads. Both end by themselves when there is space again.
//
// All but full belongs to the goroutine that supervises the server.
type room struct {
	dir  string // of the server
	log  *slog.Logger
	set  func(ctx context.Context, refuse bool) error // makes the running server refuse changes, or take them again
	full atomic.Pointer[error]                        // nil: there is room

	want     int64     // bytes to set aside
	file     string    // what the server appends to
	size     int64     // of it, when it was looked at last
	until    int64     // offset in file up to which blocks are set aside
	refusing bool      // the server refuses changes
	asked    time.Time // when space was asked for last
	failed   error     // why the last look did not succeed; nil: it did
}

// Full is nil while there is room on the disk, and an ErrDiskFull otherwise: then nothing should be begun that adds data.
func (r *room) Full() error {
	if err := r.full.Load(); err != nil {
		return *err
	}
	return nil
}

// newLife is for before the server starts: it will open its file anew, and may cut it.
func (r *room) newLife() {
	r.file, r.until, r.asked = "", 0, time.Time{}
	if err := r.measure(); err != nil {
		r.note(err)
	}
	r.refusing = r.mustRefuse()
}

// keep looks after the room until ctx ends.
func (r *room) keep(ctx context.Context) {
	ticker := time.NewTicker(lookEvery)
	defer ticker.Stop()
	for {
		r.note(r.look(ctx))
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// note logs why a look failed, once.
func (r *room) note(err error) {
	if err != nil && r.failed == nil {
		r.log.Warn("space for the append-only file is not looked after", "dir", r.dir, "error", err)
	}
	r.failed = err
}

// look sets blocks aside where too few are, and tells the server what follows.
func (r *room) look(ctx context.Context) error {
	if err := r.measure(); err != nil {
		return err
	}
	refuse := r.mustRefuse()
	if refuse == r.refusing {
		return nil
	}
	if err := r.set(ctx, refuse); err != nil {
		return fmt.Errorf("make redis-server refuse changes (%t): %w", refuse, err)
	}
	r.refusing = refuse
	if refuse {
		r.log.Error("the disk is full: changes are refused until there is room", "dir", r.dir, "error", r.Full())
	}
	return nil
}

// mustRefuse tells whether what is set aside has to be saved for what the server appends by itself: keys that expire.
func (r *room) mustRefuse() bool { return r.full.Load() != nil && r.until-r.size < r.want/2 }

// measure finds the file, its size and whether there is room.
func (r *room) measure() error {
	free, whole, err := space(r.dir)
	if err != nil {
		return err
	}
	r.want = min(mostReserve, whole/reservePart)
	file, err := appended(r.dir)
	if err != nil {
		return err
	}
	if file != r.file {
		r.file, r.size, r.until, r.asked = file, 0, 0, time.Time{}
	}
	tight := free < r.want/4
	if file == "" {
		r.tell(tight, nil)
		return nil
	}
	info, err := os.Stat(file)
	if err != nil {
		return fmt.Errorf("look at the append-only file: %w", err)
	}
	if info.Size() < r.size {
		r.until = 0 // it was cut, and what was behind its end with it
	}
	r.size = info.Size()
	if r.until-r.size > r.want/8*7 {
		r.tell(tight, nil)
		return nil
	}
	if r.full.Load() != nil && time.Since(r.asked) < askEvery {
		return nil
	}
	r.asked = time.Now()
	switch err := setAside(file, r.size, r.want); {
	case err == nil:
		r.until = r.size + r.want
		free, _, err = space(r.dir)
		r.tell(free < r.want/4, nil)
		return err
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		r.tell(true, err)
		return nil
	case errors.Is(err, unix.EOPNOTSUPP):
		r.until = r.size + min(free, r.want) // cannot be set aside; nobody else may want it
		r.tell(free < r.want, nil)
		return nil
	default:
		return err
	}
}

// tell notes whether the disk is full, and logs when that changes.
func (r *room) tell(full bool, why error) {
	switch was := r.full.Load() != nil; {
	case full && !was:
		err := fmt.Errorf("%w: free space on the file system of %s", ErrDiskFull, r.dir)
		if why != nil {
			err = fmt.Errorf("%w (%w)", err, why)
		}
		r.full.Store(&err)
		r.log.Error("the disk is full: no run is accepted or started until there is room", "dir", r.dir, "error", err)
	case !full && was:
		r.full.Store(nil)
		r.log.Info("there is room on the disk again", "dir", r.dir)
	}
}

// space is what is free of the file system of dir for this process, and how large it is, in bytes.
func space(dir string) (free, whole int64, err error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, 0, fmt.Errorf("ask for the space of %s: %w", dir, err)
	}
	blocks := st.Bavail
	if os.Geteuid() == 0 {
		blocks = st.Bfree
	}
	return int64(blocks) * st.Bsize, int64(st.Blocks) * st.Bsize, nil
}

// appended is the file that a server in dir appends to, "" when there is none yet. Blocks behind the end of those that it appended
// to before are given back.
func appended(dir string) (newest string, err error) {
	const ending = ".incr.aof"
	files, err := filepath.Glob(filepath.Join(escape.Replace(dir), "appendonlydir", "*"+ending))
	if err != nil {
		return "", fmt.Errorf("look for the append-only file: %w", err)
	}
	number := func(file string) int {
		base := strings.TrimSuffix(file, ending)
		n, _ := strconv.Atoi(base[strings.LastIndexByte(base, '.')+1:]) // 0: not one of redis-server's
		return n
	}
	for _, f := range files {
		if newest == "" || number(f) > number(newest) {
			newest = f
		}
	}
	for _, f := range files {
		if f == newest {
			continue
		}
		if err := trim(f); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return "", fmt.Errorf("give back what was set aside: %w", err)
		}
	}
	return newest, nil
}

// trim gives back the blocks behind the end of a file that nobody writes to.
func trim(file string) error {
	var st unix.Stat_t
	if err := unix.Stat(file, &st); err != nil {
		return &fs.PathError{Op: "stat", Path: file, Err: err}
	}
	if st.Blocks*512 < st.Size+mostReserve/64 {
		return nil
	}
	return os.Truncate(file, st.Size)
}

// setAside allocates blocks for n bytes from offset on, without changing the size of the file.
func setAside(file string, offset, n int64) error {
	f, err := os.OpenFile(file, os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("open the append-only file: %w", err)
	}
	defer f.Close()
	for {
		err = unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_KEEP_SIZE, offset, n)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		return fmt.Errorf("set %d bytes aside behind the append-only file: %w", n, err)
	}
	return nil
}

// refuse makes the running server refuse all changes, or take them again: it then asks for a replica to write, and has none.
func (s *Server) refuse(ctx context.Context, yes bool) error {
	conn, err := s.dial(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	if _, err := fmt.Fprintf(conn, "CONFIG SET %s\r\n", replicasWanted(yes)); err != nil {
		return err
	}
	answer, err := bufio.NewReader(conn).ReadString('\n')
	if err != nil {
		return err
	}
	if strings.TrimSpace(answer) != "+OK" {
		return fmt.Errorf("answer %.80q", answer)
	}
	return nil
}

// replicasWanted is the line of the configuration that makes the server refuse changes, or not.
func replicasWanted(refuse bool) string {
	if refuse {
		return "min-replicas-to-write 1"
	}
	return "min-replicas-to-write 0"
}
