package e2e

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/ephemeral-run/ephemeral/vmm/network"
	"github.com/ephemeral-run/ephemeral/vmm/provision"
)

// remains is what there is of a server's node on the host, while the server runs or not.
type remains struct {
	// machines are the ids of the machines that a kind of thing is there of.
	machines map[string][]string
	// rest names everything that is there but belongs to no machine: mounts, sockets, templates, the namespace.
	rest []string
}

// The kinds of things that a machine has exactly one of, or at least one: processes.
const (
	processes   = "processes"
	cgroupsKind = "cgroups"
	taps        = "taps"
	rules       = "nftables rules"
	directories = "directories"
)

var machineID = regexp.MustCompile(`[0-9a-f]{12}`)

// lookAround collects the remains.
func (s *server) lookAround() (remains, error) {
	r := remains{machines: map[string][]string{}}
	node, err := provision.Config{DataDir: s.data}.NodeID()
	if err != nil {
		return r, err
	}
	name, root := network.Prefix+node, "/"
	if len(s.within) > 0 { // it may have a mount namespace of its own
		root = fmt.Sprintf("/proc/%d/root", s.cmd.Process.Pid)
	}
	namespace := filepath.Join(root, "run/netns", name)
	return r, errors.Join(r.processes(node, namespace), r.cgroups(node), r.links(namespace), r.files(s.data), r.mounts(s.data, name))
}

func (r *remains) add(kind, id string) {
	if !slices.Contains(r.machines[kind], id) {
		r.machines[kind] = append(r.machines[kind], id)
		slices.Sort(r.machines[kind])
	}
}

// processes finds those in machines' cgroups, and those in the node's network namespace that are in none.
func (r *remains) processes(node, namespace string) error {
	var ns unix.Stat_t
	if err := unix.Stat(namespace, &ns); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	inCgroup := regexp.MustCompile(`/` + regexp.QuoteMeta(node) + `/([0-9a-f]{12})\n`)
	dirs, err := filepath.Glob("/proc/[0-9]*")
	for _, dir := range dirs {
		b, err := os.ReadFile(dir + "/cgroup")
		if err != nil {
			continue // it ended meanwhile
		}
		if m := inCgroup.FindSubmatch(b); m != nil {
			r.add(processes, string(m[1]))
		} else if link, err := os.Readlink(dir + "/ns/net"); err == nil && ns.Ino != 0 && link == fmt.Sprintf("net:[%d]", ns.Ino) {
			r.add(processes, "no machine's: "+filepath.Base(dir))
		}
	}
	return err
}

func (r *remains) cgroups(node string) error {
	for _, pattern := range []string{"/sys/fs/cgroup/*/" + node + "/*", "/sys/fs/cgroup/*/*/" + node + "/*"} {
		paths, err := filepath.Glob(pattern)
		if err != nil {
			return err
		}
		for _, path := range paths {
			if id := filepath.Base(path); machineID.MatchString(id) {
				r.add(cgroupsKind, id)
			}
		}
	}
	return nil
}

// links finds the interfaces and the rules in the namespace.
func (r *remains) links(namespace string) error {
	handle, err := netns.GetFromPath(namespace)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer handle.Close()
	inside, err := netlink.NewHandleAt(handle, unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer inside.Close()
	all, err := network.Whole(inside.LinkList)
	if err != nil {
		return err
	}
	for _, l := range all {
		if id, found := strings.CutPrefix(l.Attrs().Name, network.TapPrefix); found {
			r.add(taps, id)
		}
	}
	c, err := nftables.New(nftables.WithNetNSFd(int(handle)))
	if err != nil {
		return err
	}
	chains, err := c.ListChains()
	if err != nil {
		return err
	}
	for _, chain := range chains {
		if id, found := strings.CutPrefix(chain.Name, network.TapPrefix); found {
			r.add(rules, id)
		} else {
			r.rest = append(r.rest, "nftables chain "+chain.Name)
		}
	}
	return nil
}

// files finds machines' directories, sockets and templates in the data directory.
func (r *remains) files(data string) error {
	return filepath.WalkDir(data, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // it went meanwhile
		}
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(data, path)
		switch dir := filepath.Dir(rel); {
		case err != nil:
			return err
		case dir == "machines":
			r.add(directories, d.Name())
			return fs.SkipDir
		case d.Type()&fs.ModeSocket != 0:
			r.rest = append(r.rest, "socket "+rel)
		case dir == "templates", strings.HasPrefix(d.Name(), "temp-"):
			r.rest = append(r.rest, "file "+rel)
		}
		return nil
	})
}

func (r *remains) mounts(data, namespace string) error {
	b, err := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(b)) {
		if strings.Contains(line, data) || strings.Contains(line, namespace+" ") {
			r.rest = append(r.rest, "mount "+strings.Fields(line)[4])
		}
	}
	slices.Sort(r.rest)
	return err
}

// ids are those of all machines that there is anything of.
func (r remains) ids() []string {
	all := map[string]bool{}
	for _, ids := range r.machines {
		for _, id := range ids {
			all[id] = true
		}
	}
	return slices.Sorted(maps.Keys(all))
}

// whole says what is wrong when not every machine has everything that a machine has.
func (r remains) whole() error {
	all := r.ids()
	for _, kind := range []string{processes, cgroupsKind, taps, rules, directories} {
		if got := r.machines[kind]; !slices.Equal(got, all) {
			return fmt.Errorf("of the machines %v there are %s of %v only", all, kind, got)
		}
	}
	return nil
}
