package jail

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/ephemeral-run/ephemeral/vmm"
)

func TestConfig(t *testing.T) {
	if err := testConfig("node").Validate(); err != nil {
		t.Error(err)
	}
	for want, change := range map[string]func(*Config){
		`node name ""`:                func(c *Config) { c.Node = "" },
		`node name "../x"`:            func(c *Config) { c.Node = "../x" },
		"EPHEMERAL_BUBBLEWRAP":        func(c *Config) { c.Bubblewrap = "" },
		"EPHEMERAL_RUN_DIR":           func(c *Config) { c.RunDir = "run" },
		`EPHEMERAL_CGROUP "/a"`:       func(c *Config) { c.Cgroup = "/a" },
		`EPHEMERAL_CGROUP "a/../b"`:   func(c *Config) { c.Cgroup = "a/../b" },
		`EPHEMERAL_CGROUP ""`:         func(c *Config) { c.Cgroup = "" },
		"EPHEMERAL_FIRST_UID 0":       func(c *Config) { c.FirstUID = 0 },
		"EPHEMERAL_UIDS":              func(c *Config) { c.UIDs = 0 },
		"EPHEMERAL_VMM_OVERHEAD_MIB":  func(c *Config) { c.OverheadMiB = 0 },
		"EPHEMERAL_VMM_PIDS":          func(c *Config) { c.Pids = 1 },
		"EPHEMERAL_VMM_CPU_WEIGHT":    func(c *Config) { c.CPUWeight = 20000 },
		"EPHEMERAL_VMM_OPEN_FILES":    func(c *Config) { c.OpenFiles = 3 },
		"EPHEMERAL_VMM_OOM_SCORE_ADJ": func(c *Config) { c.OOMScoreAdj = -1 },
	} {
		c := testConfig("node")
		change(&c)
		if _, err := Open(c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v does not say %s", err, want)
		}
	}
	c := testConfig("node")
	c.Bubblewrap = "bubblewrap-that-is-not-there"
	if _, err := Open(c); !errors.Is(err, exec.ErrNotFound) || !strings.Contains(err.Error(), "Debian package bubblewrap") {
		t.Errorf("error %v", err)
	}
}

func TestOptions(t *testing.T) {
	r := newRig(t)
	for name, test := range map[string]struct {
		id string
		o  Options
	}{
		"empty id":   {"", Options{MemoryMiB: 64, Netns: r.network}},
		"path":       {"../cell", Options{MemoryMiB: 64, Netns: r.network}},
		"no memory":  {"cell", Options{Netns: r.network}},
		"no network": {"cell", Options{MemoryMiB: 64}},
	} {
		if c, err := r.New(test.id, test.o); err == nil {
			t.Errorf("%s: made cell %s", name, c.id)
		}
	}
	if _, err := r.New("cell", Options{MemoryMiB: 64, Netns: r.network}); err != nil {
		t.Fatal(err)
	}
	if _, err := r.New("cell", Options{MemoryMiB: 64, Netns: r.network}); err == nil {
		t.Error("made a second cell of that name")
	}
	left, err := r.Cgroups()
	if err != nil || len(left) != 0 {
		t.Errorf("left are %v, %v", left, err)
	}
}

// TestInUse: one live node of a name on a host; another name is another's.
func TestInUse(t *testing.T) {
	r := newRig(t)
	if j, err := Open(r.config); !errors.Is(err, ErrInUse) {
		t.Errorf("a second jail of that node: %v, %v", j, err)
	}
	other := newRig(t)
	a, b := r.cell(t, 32), other.cell(t, 32)
	if a.UID() == b.UID() {
		t.Errorf("both have user id %d", a.UID())
	}
	if left, err := other.Cgroups(); err != nil || len(left) != 0 {
		t.Errorf("left are %v, %v", left, err)
	}
}

// TestUIDsRunOut: when no user id is free, New says so and leaves nothing; one given back can be had again.
func TestUIDsRunOut(t *testing.T) {
	r := newRig(t, func(c *Config) { c.UIDs = 2 })
	a := r.cell(t, 32)
	r.cell(t, 32)
	if _, err := r.New("third", Options{MemoryMiB: 32, Netns: r.network}); !errors.Is(err, ErrNoUID) {
		t.Fatalf("error %v", err)
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	if c := r.cell(t, 32); c.UID() != a.UID() {
		t.Errorf("user id %d, not %d", c.UID(), a.UID())
	}
}

// TestUIDs: of two nodes of one host, none ever has a user id that the other has.
func TestUIDs(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		dir, err := os.MkdirTemp("", "uids-")
		if err != nil {
			t.Fatal(err)
		}
		defer os.RemoveAll(dir)
		const count = 5
		nodes := make([]*uids, 2)
		for i := range nodes {
			if nodes[i], err = openUIDs(dir, 30000, count); err != nil {
				t.Fatal(err)
			}
		}
		owner := map[int]int{}
		for range rapid.IntRange(0, 40).Draw(t, "steps") {
			n := rapid.IntRange(0, 1).Draw(t, "node")
			if uid := 30000 + rapid.IntRange(0, count-1).Draw(t, "uid"); rapid.Bool().Draw(t, "give") {
				has, used := owner[uid]
				if err := nodes[n].give(uid); (err == nil) != (used && has == n) {
					t.Fatalf("node %d gives %d, which %d has (%v): %v", n, uid, has, used, err)
				} else if err == nil {
					delete(owner, uid)
				}
				continue
			}
			uid, err := nodes[n].take()
			if len(owner) == count {
				if !errors.Is(err, ErrNoUID) {
					t.Fatalf("all in use: %d, %v", uid, err)
				}
				continue
			}
			if _, used := owner[uid]; err != nil || used || uid < 30000 || uid >= 30000+count {
				t.Fatalf("took %d, in use: %v, %v", uid, used, err)
			}
			owner[uid] = n
		}
		// A node that ends gives all of its ids back.
		if err := nodes[0].close(); err != nil {
			t.Fatal(err)
		}
		for range count - len(ownedBy(owner, 1)) {
			if _, err := nodes[1].take(); err != nil {
				t.Fatal(err)
			}
		}
		if err := nodes[1].close(); err != nil {
			t.Fatal(err)
		}
	})
}

func ownedBy(owner map[int]int, node int) (uids []int) {
	for uid, n := range owner {
		if n == node {
			uids = append(uids, uid)
		}
	}
	return uids
}

// TestDeviceGroups: a program gets the group of a device that it may use only through it, and no other.
func TestDeviceGroups(t *testing.T) {
	dir := tempDir(t)
	device := func(name string, mode uint32, group int) string {
		path := filepath.Join(dir, name)
		if err := errors.Join(
			unix.Mknod(path, unix.S_IFCHR|mode, int(unix.Mkdev(1, 3))), os.Chown(path, 0, group), unix.Chmod(path, mode),
		); err != nil {
			t.Fatal(err)
		}
		return path
	}
	kvm, open := device("kvm", 0o660, 4242), device("open", 0o666, 4243)
	groups, err := deviceGroups([]string{kvm, open, kvm})
	if err != nil || !slices.Equal(groups, []uint32{4242}) {
		t.Errorf("groups %v, %v", groups, err)
	}
	for _, path := range []string{device("root", 0o660, 0), device("read", 0o640, 4242)} {
		if groups, err := deviceGroups([]string{path}); err == nil {
			t.Errorf("%s: groups %v", path, groups)
		}
	}
	r := newRig(t)
	c := r.cell(t, 32)
	p := launchOrFail(t, c, vmm.Command{Args: []string{hostileProgram(t), "sleep"}, Devices: []string{"/dev/full"}})
	if s := status(t, fmt.Sprintf("/proc/%d/status", p.Pid())); s["Groups"] != "" {
		t.Errorf("groups %q for a device that is open to all", s["Groups"])
	}
}

// TestUnifiedHierarchy tests what cgroup v2 does for the jail where the host has a unified hierarchy beside v1. Its limits
// are tested where it is the one in use, by TestLiveVMM: in a box, see test/kvmbox.
func TestUnifiedHierarchy(t *testing.T) {
	var mount string
	var st unix.Statfs_t
	for _, path := range []string{"/sys/fs/cgroup/unified", "/sys/fs/cgroup"} {
		if unix.Statfs(path, &st) == nil && st.Type == unix.CGROUP2_SUPER_MAGIC {
			mount = path
			break
		}
	}
	if mount == "" {
		mount = t.TempDir()
		if err := unix.Mount("none", mount, "cgroup2", 0, ""); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = unix.Unmount(mount, unix.MNT_DETACH) }()
	}
	node := randomName(t, "jt-")
	h, err := openV2(mount, "ephemeral-test/"+node, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := openV2(mount, "ephemeral-test/"+node, nil); !errors.Is(err, ErrInUse) {
		t.Errorf("opened again: %v", err)
	}
	g, err := h.create("cell", limits{memory: 1 << 20, pids: 10, weight: 50})
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("sh", "-c", "cat /proc/self/cgroup; sleep 1000 & sleep 1000; true")
	var out buffer
	cmd.Stdout = &out
	cmd.WaitDelay = time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{}
	if err := g.start(cmd.SysProcAttr, cmd.Start); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		if pids, err := g.pids(); err != nil || time.Now().After(deadline) {
			t.Fatalf("processes %v, %v", pids, err)
		} else if len(pids) == 3 && out.String() != "" {
			break
		}
	}
	if want := "0::/ephemeral-test/" + node + "/cell\n"; !strings.Contains(out.String(), want) {
		t.Errorf("cgroup of the process: %q, not %q", out.String(), want)
	}
	if err := g.remove(); !errors.Is(err, unix.EBUSY) {
		t.Errorf("removed with processes in it: %v", err)
	}
	if ids, err := h.list(); err != nil || !slices.Equal(ids, []string{"cell"}) {
		t.Errorf("list: %v, %v", ids, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	killed, err := empty(ctx, h.load("cell"))
	_ = cmd.Wait()
	if err != nil || killed != 3 {
		t.Errorf("killed %d, %v", killed, err)
	}
	if err := h.close(); err != nil {
		t.Error(err)
	}
	if left, err := filepath.Glob(mount + "/ephemeral-test/" + node); err != nil || len(left) != 0 {
		t.Errorf("left %v, %v", left, err)
	}
	if h, err := openV2(mount, "ephemeral-test/"+node, []string{"no-such-controller"}); err == nil {
		t.Errorf("opened %v with a controller that does not exist", h.controllers)
	}
	if _, err := os.Stat(mount + "/ephemeral-test/" + node); !os.IsNotExist(err) {
		t.Errorf("a failed open left its cgroup: %v", err)
	}
}

// TestDescriptorsOfTheNode: what the node itself inherited without the close-on-exec flag does not go on into a jail.
func TestDescriptorsOfTheNode(t *testing.T) {
	fd, err := unix.Open("/etc/passwd", unix.O_RDONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	r := newRig(t)
	p := launchOrFail(t, r.cell(t, 32), vmm.Command{Args: []string{hostileProgram(t), "sleep"}})
	// Launch returns when bubblewrap is about to become the program.
	for deadline := time.Now().Add(10 * time.Second); readLink(t, fmt.Sprintf("/proc/%d/exe", p.Pid())) != hostileProgram(t); {
		if time.Now().After(deadline) {
			t.Fatal("the program does not begin")
		}
		time.Sleep(time.Millisecond)
	}
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.Pid()))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		link := readLink(t, fmt.Sprintf("/proc/%d/fd/%s", p.Pid(), e.Name()))
		if n := atoi(t, e.Name()); n > 2 && !strings.HasPrefix(link, "anon_inode:") {
			t.Errorf("descriptor %d is %s", n, link)
		}
	}
}
