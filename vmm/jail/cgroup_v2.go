package jail

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/containerd/cgroups/v3/cgroup2"
	"golang.org/x/sys/unix"
)

// v2Controllers are those that the limits need.
var v2Controllers = []string{"cpu", "memory", "pids"}

// v2 keeps the cgroups of a node in the unified hierarchy.
type v2 struct {
	mount       string
	parent      string // path of the node's cgroup below mount
	controllers []string
	lock        *os.File
}

func openV2(mount, parent string, controllers []string) (_ *v2, err error) {
	h := &v2{mount: mount, parent: "/" + parent, controllers: controllers}
	if err := makeDirectories(h.path()); err != nil {
		return nil, fmt.Errorf("make the node's cgroup (is %s writable?): %w", mount, err)
	}
	if h.lock, err = lockDirectory(h.path()); err != nil {
		return nil, err
	}
	if err := h.enable(); err != nil {
		return nil, errors.Join(err, h.close())
	}
	return h, nil
}

// enable gives the controllers to the machines' cgroups. The kernel refuses it (EBUSY) on the way through a cgroup, other
// than the root, that has processes itself: EPHEMERAL_CGROUP must not lie below one.
func (h *v2) enable() error {
	if len(h.controllers) == 0 {
		return nil
	}
	child, err := cgroup2.Load(h.parent+"/machine", cgroup2.WithMountpoint(h.mount))
	if err != nil {
		return err
	}
	// What counts is what arrives: on the way some may be enabled already and forbidden to write.
	toggled := child.ToggleControllers(h.controllers, cgroup2.Enable)
	b, err := os.ReadFile(h.path("cgroup.subtree_control"))
	if err != nil {
		return err
	}
	have := strings.Fields(string(b))
	for _, c := range h.controllers {
		if !slices.Contains(have, c) {
			return errors.Join(fmt.Errorf("cgroup %s cannot limit %s", h.path(), c), toggled)
		}
	}
	return nil
}

func (h *v2) path(names ...string) string {
	return filepath.Join(append([]string{h.mount, h.parent}, names...)...)
}

func (h *v2) version() string { return "v2" }

func (h *v2) create(id string, l limits) (group, error) {
	noSwap, whole := int64(0), true
	resources := &cgroup2.Resources{}
	for _, c := range h.controllers {
		switch c {
		case "memory":
			resources.Memory = &cgroup2.Memory{Max: &l.memory, OOMGroup: &whole}
			if _, err := os.Stat(h.path("memory.swap.max")); err == nil { // missing in a kernel without swap
				resources.Memory.Swap = &noSwap
			}
		case "pids":
			resources.Pids = &cgroup2.Pids{Max: l.pids}
		case "cpu":
			resources.CPU = &cgroup2.CPU{Weight: &l.weight}
		}
	}
	if _, err := cgroup2.NewManager(h.mount, h.parent+"/"+id, resources); err != nil {
		return nil, errors.Join(err, removeDirectories(h.path(id)))
	}
	return h.load(id), nil
}

func (h *v2) load(id string) group { return &v2Group{path: h.path(id)} }

func (h *v2) list() ([]string, error) { return subdirectories(h.path()) }

func (h *v2) close() error { return errors.Join(removeUpward(h.mount, h.parent), h.lock.Close()) }

type v2Group struct{ path string }

// start lets the kernel put the child into the cgroup as it makes it (clone3 with CLONE_INTO_CGROUP, Linux 5.7).
func (g *v2Group) start(attr *syscall.SysProcAttr, f func() error) error {
	fd, err := unix.Open(g.path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open cgroup %s: %w", g.path, err)
	}
	attr.UseCgroupFD, attr.CgroupFD = true, fd
	err = f()
	attr.UseCgroupFD, attr.CgroupFD = false, 0
	return errors.Join(err, unix.Close(fd))
}

func (g *v2Group) procs() string { return filepath.Join(g.path, "cgroup.procs") }

func (g *v2Group) pids() ([]int, error) { return readPids(g.procs()) }

// kill uses cgroup.kill (Linux 5.14), which no fork can outrun, and where it is missing signals each process.
func (g *v2Group) kill() (int, error) {
	pids, err := g.pids()
	if err != nil || len(pids) == 0 {
		return 0, err
	}
	err = os.WriteFile(filepath.Join(g.path, "cgroup.kill"), []byte("1"), 0)
	if errors.Is(err, os.ErrNotExist) {
		return killIn(g.procs())
	}
	return len(pids), err
}

func (g *v2Group) weigh(weight uint64) error {
	return os.WriteFile(filepath.Join(g.path, "cpu.weight"), strconv.AppendUint(nil, weight, 10), 0)
}

func (g *v2Group) oomKills() (int, error) {
	return counter(filepath.Join(g.path, "memory.events"), "oom_kill")
}

func (g *v2Group) remove() error { return removeDirectories(g.path) }
