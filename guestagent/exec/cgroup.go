package exec

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// emptyTimeout bounds the wait for killed processes to be gone. Tearing down a process with much memory takes a while
// on a slow machine; longer means that the kernel is stuck.
const emptyTimeout = 30 * time.Second

// cgroup is a directory of the version 2 hierarchy.
type cgroup struct {
	path       string
	killed     bool // processes in it were
	generation int  // of the runner, when it was made
}

// limits are those of one command. Zero means none.
type limits struct {
	memory, pids int64
}

// makeCgroup creates the group and sets its limits. Limits of controllers that the parent does not offer are left out:
// on a machine of ours all are there, on a developer's host they may not be.
func makeCgroup(path string, l limits) (*cgroup, error) {
	g := &cgroup{path: path}
	if err := os.Mkdir(path, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return g, fmt.Errorf("create cgroup: %w", err)
	}
	for _, limit := range []struct {
		file  string
		value int64
		set   bool
	}{
		{"memory.max", l.memory, l.memory > 0},
		{"memory.swap.max", 0, l.memory > 0},
		{"pids.max", l.pids, l.pids > 0},
	} {
		if !limit.set {
			continue
		}
		err := g.write(limit.file, strconv.FormatInt(limit.value, 10))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			_ = g.remove()
			return g, fmt.Errorf("limit cgroup: %w", err)
		}
	}
	return g, nil
}

// delegate offers the controllers to the group's children, as far as there are any.
func (g *cgroup) delegate() error {
	offered, err := os.ReadFile(filepath.Join(g.path, "cgroup.controllers"))
	if err != nil {
		return fmt.Errorf("read controllers: %w", err)
	}
	for _, controller := range strings.Fields(string(offered)) {
		if controller != "memory" && controller != "pids" && controller != "cpu" {
			continue
		}
		if err := g.write("cgroup.subtree_control", "+"+controller); err != nil {
			return fmt.Errorf("delegate controller %s: %w", controller, err)
		}
	}
	return nil
}

func (g *cgroup) write(file, value string) error {
	f, err := os.OpenFile(filepath.Join(g.path, file), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(value)
	return errors.Join(err, f.Close())
}

// open returns a descriptor to start a process in the group with, CLONE_INTO_CGROUP of clone3(2).
func (g *cgroup) open() (int, error) {
	fd, err := unix.Open(g.path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open cgroup: %w", err)
	}
	return fd, nil
}

// populated says whether a process lives in the group or below.
func (g *cgroup) populated() (bool, error) {
	n, err := g.field("cgroup.events", "populated")
	return n > 0, err
}

// field reads one line of a flat keyed file.
func (g *cgroup) field(file, key string) (int64, error) {
	data, err := os.ReadFile(filepath.Join(g.path, file))
	if err != nil {
		return 0, err
	}
	for line := range bytes.Lines(data) {
		if name, value, ok := strings.Cut(strings.TrimSpace(string(line)), " "); ok && name == key {
			return strconv.ParseInt(value, 10, 64)
		}
	}
	return 0, fmt.Errorf("%s: no %q", file, key)
}

// oomKills counts the processes of the group that the kernel killed for want of memory; 0 without a memory controller.
func (g *cgroup) oomKills() int64 {
	n, err := g.field("memory.events", "oom_kill")
	if err != nil {
		return 0
	}
	return n
}

// kill sends SIGKILL to every process in the group and below, those forked meanwhile included, and does not wait.
func (g *cgroup) kill() error {
	g.killed = true
	if err := g.write("cgroup.kill", "1"); err != nil {
		return fmt.Errorf("kill cgroup: %w", err)
	}
	return nil
}

// empty kills until no process is left.
func (g *cgroup) empty() error {
	pause := 200 * time.Microsecond
	for end := time.Now().Add(emptyTimeout); ; {
		alive, err := g.populated()
		if err != nil || !alive {
			return err
		}
		if time.Now().After(end) {
			return fmt.Errorf("cgroup %s: processes left after %v", filepath.Base(g.path), emptyTimeout)
		}
		if err := g.kill(); err != nil {
			return err
		}
		time.Sleep(pause)
		pause = min(2*pause, 20*time.Millisecond)
	}
}

// remove deletes the empty group with those that the command may have made below. The kernel may hold one busy for a
// moment after its last process.
func (g *cgroup) remove() error {
	entries, err := os.ReadDir(g.path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove cgroup: %w", err)
	}
	for _, entry := range entries {
		if entry.IsDir() {
			if err := (&cgroup{path: filepath.Join(g.path, entry.Name())}).remove(); err != nil {
				return err
			}
		}
	}
	for range 50 {
		if err = unix.Rmdir(g.path); err == nil || errors.Is(err, unix.ENOENT) {
			return nil
		}
		time.Sleep(time.Millisecond)
	}
	return fmt.Errorf("remove cgroup %s: %w", filepath.Base(g.path), err)
}
