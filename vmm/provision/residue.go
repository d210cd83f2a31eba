package provision

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/ephemeral-run/ephemeral/vmm/network"
)

// Residue counts what lives of this node have left, by kind.
type Residue struct {
	Processes  int `json:"processes"`  // of machines' users, in the node's cgroups or in its network namespace
	Taps       int `json:"taps"`       // interfaces in that namespace
	Namespaces int `json:"namespaces"` // names under /run/netns
	Dirs       int `json:"dirs"`       // of machines
	Cgroups    int `json:"cgroups"`    // of machines
	Templates  int `json:"templates"`  // half-built ones
}

// Total is the sum over all kinds.
func (r Residue) Total() int {
	return r.Processes + r.Taps + r.Namespaces + r.Dirs + r.Cgroups + r.Templates
}

// Survey counts what there is of the configuration's node and changes nothing. While the node lives, what it uses is
// counted too, but for directories; afterwards everything that is found was left.
func Survey(c Config) (Residue, error) {
	node, err := c.NodeID()
	if err != nil {
		return Residue{}, fmt.Errorf("survey: %w", err)
	}
	c.Node = node
	return survey(c, func(string) bool { return false })
}

// Residue counts what this node has on the host beside its own machines and namespace, and changes nothing.
func (p *Provisioner) Residue() (Residue, error) {
	r, err := survey(p.config, p.owns)
	r.Namespaces = max(0, r.Namespaces-1) // its own
	return r, err
}

func survey(c Config, live func(id string) bool) (Residue, error) {
	var r Residue
	groups, pids := cgroups(c, live)
	r.Cgroups = len(groups)
	inside, err := inNamespace(c, live)
	errs := []error{err}
	for _, pid := range inside {
		pids[pid] = struct{}{}
	}
	r.Processes = len(pids)
	r.Namespaces, r.Taps, err = links(c.Node, live)
	errs = append(errs, err)
	dirs, err := unused(filepath.Join(c.DataDir, "machines"), anything)
	r.Dirs, errs = len(dirs), append(errs, err)
	builds, err := unused(filepath.Join(c.DataDir, "templates"), halfBuilt)
	r.Templates, errs = len(builds), append(errs, err)
	if err := errors.Join(errs...); err != nil {
		return r, fmt.Errorf("survey of node %s: %w", c.Node, err)
	}
	return r, nil
}

func anything(string) bool { return true }

func halfBuilt(name string) bool { return strings.HasPrefix(name, buildPrefix) }

// cgroups finds the node's machines' cgroups, in any hierarchy, and the processes in them.
func cgroups(c Config, live func(id string) bool) (groups map[string]struct{}, pids map[int]struct{}) {
	groups, pids = map[string]struct{}{}, map[int]struct{}{}
	for _, hierarchy := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/*"} {
		// The pattern is well-formed: the parts are checked by Config.Validate.
		paths, _ := filepath.Glob(filepath.Join(hierarchy, c.Jail.Cgroup, c.Node, "*", "cgroup.procs"))
		for _, path := range paths {
			id := filepath.Base(filepath.Dir(path))
			if live(id) {
				continue
			}
			groups[id] = struct{}{}
			b, _ := os.ReadFile(path) // it may be gone by now
			for _, field := range strings.Fields(string(b)) {
				if pid, err := strconv.Atoi(field); err == nil && pid > 0 {
					pids[pid] = struct{}{}
				}
			}
		}
	}
	return groups, pids
}

// inNamespace finds the processes of machines' users in the node's network namespace, whatever their cgroup.
func inNamespace(c Config, live func(id string) bool) ([]int, error) {
	var ns unix.Stat_t
	err := unix.Stat(filepath.Join("/run/netns", network.Prefix+c.Node), &ns)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look at network namespace: %w", err)
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil && belongs(c, pid, ns.Ino, live) {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// belongs tells whether a process is of a machine's user, in the network namespace with that inode, and of no live
// machine. One that has ended is not.
func belongs(c Config, pid int, namespace uint64, live func(id string) bool) bool {
	dir := filepath.Join("/proc", strconv.Itoa(pid))
	if uid, ok := userOf(dir); !ok || uid < c.Jail.FirstUID || uid >= c.Jail.FirstUID+c.Jail.UIDs {
		return false
	}
	link, err := os.Readlink(filepath.Join(dir, "ns/net"))
	if err != nil || link != fmt.Sprintf("net:[%d]", namespace) {
		return false
	}
	b, err := os.ReadFile(filepath.Join(dir, "cgroup"))
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(b)) {
		if _, id, found := strings.Cut(strings.TrimSpace(line), "/"+c.Jail.Cgroup+"/"+c.Node+"/"); found && live(id) {
			return false
		}
	}
	return true
}

// userOf is the effective user id of a process. (The owner of its directory is root when it is not dumpable.)
func userOf(dir string) (int, bool) {
	b, err := os.ReadFile(filepath.Join(dir, "status"))
	if err != nil {
		return 0, false
	}
	for line := range strings.Lines(string(b)) {
		if ids, found := strings.CutPrefix(line, "Uid:"); found {
			if f := strings.Fields(ids); len(f) == 4 {
				uid, err := strconv.Atoi(f[1])
				return uid, err == nil
			}
		}
	}
	return 0, false
}

// links counts the node's namespace, and in it the interfaces that belong to no live machine.
func links(node string, live func(id string) bool) (namespaces, taps int, err error) {
	handle, err := netns.GetFromName(network.Prefix + node)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, 0, nil
	}
	if err != nil {
		return 0, 0, fmt.Errorf("open network namespace: %w", err)
	}
	defer func() { _ = handle.Close() }()
	inside, err := netlink.NewHandleAt(handle, unix.NETLINK_ROUTE)
	if err != nil {
		return 1, 0, fmt.Errorf("enter network namespace: %w", err)
	}
	defer inside.Close()
	all, err := network.Whole(inside.LinkList)
	if err != nil {
		return 1, 0, fmt.Errorf("list interfaces: %w", err)
	}
	for _, l := range all {
		name := l.Attrs().Name
		if name != "lo" && !live(strings.TrimPrefix(name, network.TapPrefix)) {
			taps++
		}
	}
	return 1, taps, nil
}

// Reconcile removes whatever an earlier life of this node left, and counts what it removed of each kind: processes,
// cgroups, taps, half-built templates, machines' directories; the namespace, if it was found, is used on and counted. It
// goes on after errors and joins them; ctx is its one deadline. What live machines use, of this process or of others on
// the same data directory, is not touched, so it may be called at any time. A second call finds nothing.
func (p *Provisioner) Reconcile(ctx context.Context) (Residue, error) {
	removed, err := p.host.removeStale(ctx)
	errs := []error{err}
	killed, err := p.killStale(ctx)
	removed.Processes += killed
	errs = append(errs, err)
	for _, left := range []struct {
		dir   string
		keep  func(string) bool
		count *int
	}{
		{"machines", anything, &removed.Dirs},
		{"templates", halfBuilt, &removed.Templates},
	} {
		if err := ctx.Err(); err != nil {
			errs = append(errs, fmt.Errorf("remove %s: %w", left.dir, context.Cause(ctx)))
			continue
		}
		n, err := removeUnused(filepath.Join(p.config.DataDir, left.dir), left.keep)
		*left.count += n
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return removed, fmt.Errorf("reconcile node %s: %w", p.config.Node, err)
	}
	return removed, nil
}
