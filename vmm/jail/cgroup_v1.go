package jail

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"

	"github.com/containerd/cgroups/v3/cgroup1"
	"github.com/opencontainers/runtime-spec/specs-go"
)

// v1 keeps the cgroups of a node in three hierarchies: memory, pids and cpu.
type v1 struct {
	parent string // path of the node's cgroup below each root
	roots  []root
	lock   *os.File
}

// root is one controller's hierarchy. home is the tasks file of the cgroup that the node's threads belong to.
type root struct {
	cgroup1.Subsystem
	path string
	home *os.File
}

var v1Controllers = []cgroup1.Name{cgroup1.Memory, cgroup1.Pids, cgroup1.Cpu}

func openV1(parent string) (_ *v1, err error) {
	h := &v1{parent: "/" + parent}
	defer func() {
		if err != nil {
			err = errors.Join(err, h.release())
		}
	}()
	if h.roots, err = v1Roots(); err != nil {
		return nil, err
	}
	own, err := cgroup1.ParseCgroupFile("/proc/self/cgroup")
	if err != nil {
		return nil, fmt.Errorf("own cgroup: %w", err)
	}
	for i := range h.roots {
		r := &h.roots[i]
		if r.home, err = openHome(r.path, own[string(r.Name())]); err != nil {
			return nil, fmt.Errorf("own %s cgroup: %w", r.Name(), err)
		}
		if err := makeDirectories(filepath.Join(r.path, h.parent)); err != nil {
			return nil, fmt.Errorf("make the node's %s cgroup (is %s writable?): %w", r.Name(), r.path, err)
		}
	}
	h.lock, err = lockDirectory(filepath.Join(h.roots[0].path, h.parent))
	return h, err
}

func v1Roots() ([]root, error) {
	all, err := cgroup1.Default()
	if err != nil {
		return nil, fmt.Errorf("cgroup v1 hierarchies: %w", err)
	}
	var roots []root
	for _, name := range v1Controllers {
		found := false
		for _, s := range all {
			p, ok := s.(interface{ Path(string) string })
			if !ok || s.Name() != name {
				continue
			}
			roots = append(roots, root{Subsystem: s, path: filepath.Clean(p.Path("/"))})
			found = true
		}
		if !found {
			return nil, fmt.Errorf("cgroup v1 has no %s controller mounted under /sys/fs/cgroup", name)
		}
	}
	return roots, nil
}

// openHome opens the tasks file of this process's cgroup. Inside a container the path may be one of the host's that
// cannot be seen here; the root of the mount is the container's cgroup then.
func openHome(root, own string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(root, own, "tasks"), os.O_WRONLY, 0)
	if errors.Is(err, os.ErrNotExist) {
		f, err = os.OpenFile(filepath.Join(root, "tasks"), os.O_WRONLY, 0)
	}
	return f, err
}

func (h *v1) version() string { return "v1" }

func (h *v1) create(id string, l limits) (group, error) {
	resources := &specs.LinuxResources{
		Memory: &specs.LinuxMemory{Limit: &l.memory, Swappiness: new(uint64)},
		Pids:   &specs.LinuxPids{Limit: &l.pids},
		CPU:    &specs.LinuxCPU{Shares: shares(l.weight)},
	}
	g := h.load(id).(*v1Group)
	if _, err := os.Stat(filepath.Join(h.roots[0].path, "memory.memsw.limit_in_bytes")); err == nil {
		resources.Memory.Swap = &l.memory // of memory and swap together: no swap
	}
	subsystems := func() ([]cgroup1.Subsystem, error) {
		list := make([]cgroup1.Subsystem, len(h.roots))
		for i, r := range h.roots {
			list[i] = r.Subsystem
		}
		return list, nil
	}
	_, err := cgroup1.New(cgroup1.StaticPath(filepath.Join(h.parent, id)), resources, cgroup1.WithHierarchy(subsystems))
	if err != nil {
		return nil, errors.Join(err, g.remove())
	}
	return g, nil
}

// shares is cpu.shares of cgroup v1 for a weight of v2, whose defaults are 1024 and 100.
func shares(weight uint64) *uint64 {
	s := max(2, weight*1024/100)
	return &s
}

func (h *v1) load(id string) group {
	g := &v1Group{roots: h.roots}
	for _, r := range h.roots {
		g.paths = append(g.paths, filepath.Join(r.path, h.parent, id))
	}
	return g
}

func (h *v1) parents() []string {
	var paths []string
	for _, r := range h.roots {
		paths = append(paths, filepath.Join(r.path, h.parent))
	}
	return paths
}

func (h *v1) list() ([]string, error) { return subdirectories(h.parents()...) }

func (h *v1) close() error {
	var errs []error
	for _, r := range h.roots {
		errs = append(errs, removeUpward(r.path, h.parent))
	}
	return errors.Join(append(errs, h.release())...)
}

func (h *v1) release() error {
	var errs []error
	for _, r := range h.roots {
		if r.home != nil {
			errs = append(errs, r.home.Close())
		}
	}
	if h.lock != nil {
		errs = append(errs, h.lock.Close())
	}
	return errors.Join(errs...)
}

type v1Group struct {
	roots []root
	paths []string // one for each root
}

// start moves the calling thread into the cgroup, forks, and moves it back. A thread that moves itself needs none of the
// kernel's global locks, so this is quick; its memory goes on being charged to the process, since that follows the
// process's first thread, which this one must not be.
func (g *v1Group) start(_ *syscall.SysProcAttr, f func() error) (err error) {
	tasks := make([]*os.File, 0, len(g.paths))
	defer func() {
		for _, t := range tasks {
			err = errors.Join(err, t.Close())
		}
	}()
	for _, path := range g.paths {
		t, err := os.OpenFile(filepath.Join(path, "tasks"), os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		tasks = append(tasks, t)
	}
	defer func() {
		for _, r := range g.roots {
			if _, back := r.home.WriteString("0"); back != nil {
				err = errors.Join(err, fmt.Errorf("return from the %s cgroup: %w", r.Name(), back))
			}
		}
	}()
	for i, t := range tasks {
		if _, err := t.WriteString("0"); err != nil {
			return fmt.Errorf("join the %s cgroup: %w", g.roots[i].Name(), err)
		}
	}
	return f()
}

func (g *v1Group) procs(i int) string { return filepath.Join(g.paths[i], "cgroup.procs") }

func (g *v1Group) pids() ([]int, error) { return readPids(g.procs(0)) }

func (g *v1Group) kill() (killed int, err error) {
	for i := range g.paths {
		n, err := killIn(g.procs(i))
		killed = max(killed, n)
		if err != nil {
			return killed, err
		}
	}
	return killed, nil
}

func (g *v1Group) weigh(weight uint64) error {
	for i, r := range g.roots {
		if r.Name() == cgroup1.Cpu {
			return os.WriteFile(filepath.Join(g.paths[i], "cpu.shares"), strconv.AppendUint(nil, *shares(weight), 10), 0)
		}
	}
	return errors.New("no cpu controller")
}

func (g *v1Group) oomKills() (int, error) {
	return counter(filepath.Join(g.paths[0], "memory.oom_control"), "oom_kill")
}

func (g *v1Group) remove() error { return removeDirectories(g.paths...) }
