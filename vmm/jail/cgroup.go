package jail

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/cgroups/v3"
	"golang.org/x/sys/unix"
)

// limits of one machine's cgroup.
type limits struct {
	memory int64 // bytes; swap is not to be used at all
	pids   int64
	weight uint64 // 1 to 10000, as cpu.weight of cgroup v2
}

// hierarchy is where the machines' cgroups of one node lie.
type hierarchy interface {
	// version is "v1" or "v2".
	version() string
	// create makes a machine's cgroup. When it fails it leaves nothing.
	create(id string, l limits) (group, error)
	// load gives access to one that exists, at least in part.
	load(id string) group
	// list names all there are.
	list() ([]string, error)
	// close removes the node's cgroup, which must be empty, and frees the lock on it.
	close() error
}

// group is one machine's cgroup.
type group interface {
	// start calls f, which forks on the calling thread with attr, so that the child is born in the cgroup.
	start(attr *syscall.SysProcAttr, f func() error) error
	// pids lists the processes in it, of the host's pid namespace.
	pids() ([]int, error)
	// kill sends SIGKILL to every process in it and to nothing else; it says how many it found.
	kill() (int, error)
	// weigh sets its share of the CPU, 1 to 10000.
	weigh(weight uint64) error
	// oomKills counts the processes that its memory limit has killed.
	oomKills() (int, error)
	// remove deletes it; fs.ErrNotExist is no error, unix.EBUSY says that a process is in it.
	remove() error
}

const lockLimit = 500 * time.Millisecond

// openHierarchy takes cgroup v2 where it has the controllers, else v1.
func openHierarchy(parent string) (hierarchy, error) {
	switch mode := cgroups.Mode(); mode {
	case cgroups.Unified:
		return openV2("/sys/fs/cgroup", parent, v2Controllers)
	case cgroups.Legacy, cgroups.Hybrid:
		return openV1(parent)
	default:
		return nil, errors.New("no cgroup file system at /sys/fs/cgroup: mount it (mount -t cgroup2 none /sys/fs/cgroup)")
	}
}

// lockDirectory marks a node's cgroup as used by this process until the file is closed or the process ends. What a node
// that was just killed had been forking may hold its lock for a moment longer, so it does not give up at once.
func lockDirectory(path string) (*os.File, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	for deadline := time.Now().Add(lockLimit); ; time.Sleep(5 * time.Millisecond) {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EWOULDBLOCK) {
			break
		}
		if time.Now().After(deadline) {
			err = ErrInUse
			break
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock cgroup %s: %w", path, err), f.Close())
	}
	return f, nil
}

// subdirectories names the directories in the given ones, each name once; missing ones have none.
func subdirectories(paths ...string) ([]string, error) {
	var names []string
	for _, path := range paths {
		entries, err := os.ReadDir(path)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		for _, e := range entries {
			if e.IsDir() {
				names = append(names, e.Name())
			}
		}
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

// readPids reads a cgroup.procs file; a missing one has none.
func readPids(path string) ([]int, error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, field := range strings.Fields(string(b)) {
		pid, err := strconv.Atoi(field)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		if pid > 0 { // 0: a process of a pid namespace that this one cannot see
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// killIn kills the processes that a cgroup.procs file lists. Each is first pinned by a descriptor and then looked up
// again: a process that has ended meanwhile, and whose number now means another, is not signalled.
func killIn(procs string) (int, error) {
	pids, err := readPids(procs)
	if err != nil {
		return 0, err
	}
	killed := 0
	var errs []error
	for _, pid := range pids {
		ok, err := killPinned(pid, func() (bool, error) {
			now, err := readPids(procs)
			return slices.Contains(now, pid), err
		})
		if err != nil {
			errs = append(errs, err)
		}
		if ok {
			killed++
		}
	}
	return killed, errors.Join(errs...)
}

// killPinned sends SIGKILL to the process with that number if, with the process pinned, it still is the one meant.
func killPinned(pid int, still func() (bool, error)) (bool, error) {
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("open process %d: %w", pid, err)
	}
	defer unix.Close(fd)
	ok, err := still()
	if err != nil || !ok {
		return false, err
	}
	err = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
	if errors.Is(err, unix.ESRCH) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("kill process %d: %w", pid, err)
	}
	return true, nil
}

// empty kills all in a cgroup until there is nothing, and removes it. It counts the processes it found first.
func empty(ctx context.Context, g group) (killed int, err error) {
	for wait := time.Millisecond; ; wait = min(2*wait, 50*time.Millisecond) {
		n, err := g.kill()
		if err != nil {
			return killed, err
		}
		killed = max(killed, n)
		if n == 0 {
			err := g.remove()
			if err == nil || !errors.Is(err, unix.EBUSY) {
				return killed, err
			}
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return killed, fmt.Errorf("processes do not end: %w", ctx.Err())
		}
	}
}

// removeDirectories removes a cgroup's directories; missing ones are no error.
func removeDirectories(paths ...string) error {
	var errs []error
	for _, path := range paths {
		if err := unix.Rmdir(path); err != nil && !errors.Is(err, unix.ENOENT) {
			errs = append(errs, &fs.PathError{Op: "rmdir", Path: path, Err: err})
		}
	}
	return errors.Join(errs...)
}

// makeDirectories makes a cgroup and those above it. It tries again when a node that closes removes one of those, being
// empty, in between.
func makeDirectories(path string) error {
	for attempt := 0; ; attempt++ {
		err := os.MkdirAll(path, 0o755)
		if !errors.Is(err, fs.ErrNotExist) || attempt == 3 {
			return err
		}
	}
}

// removeUpward removes the node's cgroup, and of those above it, up to the root, the ones that are empty then.
func removeUpward(root, parent string) error {
	path := filepath.Join(root, parent)
	if err := removeDirectories(path); err != nil {
		return err
	}
	for path = filepath.Dir(path); path != filepath.Clean(root); path = filepath.Dir(path) {
		if unix.Rmdir(path) != nil {
			break // another node's
		}
	}
	return nil
}

// counter reads one "name value" line of a cgroup file.
func counter(path, name string) (int, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if key, value, ok := strings.Cut(strings.TrimSpace(line), " "); ok && key == name {
			return strconv.Atoi(value)
		}
	}
	return 0, fmt.Errorf("%s has no %s", filepath.Base(path), name)
}
