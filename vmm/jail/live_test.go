package jail

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/ephemeral-run/ephemeral/vmm"
)

// TestLiveVMM starts QEMU in a jail as a driver does, with its monitor and its tap as inherited descriptors, and reads
// every property of the jail back from the kernel.
func TestLiveVMM(t *testing.T) {
	t.Run("without /proc", func(t *testing.T) { readBack(t, false) })
	t.Run("with /proc", func(t *testing.T) { readBack(t, true) })
}

func readBack(t *testing.T, withProc bool) {
	r := newRig(t)
	c := r.cell(t, 64)
	dir := machineDir(t, c)
	tap, err := r.network.NewTap("0123456789ab", c.UID())
	if err != nil {
		t.Fatal(err)
	}
	monitor, theirs := connection(t)
	given := filepath.Join(tempDir(t), "template")
	if err := os.WriteFile(given, []byte("template"), 0o444); err != nil {
		t.Fatal(err)
	}
	p := launchOrFail(t, c, vmm.Command{
		Args: []string{
			"/usr/bin/qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none", "-S",
			"-M", "q35,usb=off,vmport=off,smbus=off,sata=off,i8042=off", "-accel", "tcg,thread=multi,tb-size=16", "-m", "64M",
			"-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
			"-chardev", "socket,id=qmp,fd=3", "-mon", "chardev=qmp,mode=control",
			"-netdev", "tap,id=net,vhost=off,fd=4", "-device", "virtio-net-pci,netdev=net,romfile=",
		},
		Files:    []*os.File{theirs, tap.File},
		ReadOnly: []string{"/usr/share/qemu", "/usr/share/seabios", given},
		Writable: []string{dir},
		Proc:     withProc,
	})
	if err := theirs.Close(); err != nil {
		t.Fatal(err)
	}
	if err := monitor.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(monitor).ReadString('\n'); err != nil || !strings.Contains(line, "QMP") {
		t.Fatalf("QEMU's monitor says %q, %v (process: %v)", line, err, p.Err())
	}

	proc := fmt.Sprintf("/proc/%d/", p.Pid())
	t.Run("program", func(t *testing.T) {
		if exe := readLink(t, proc+"exe"); exe != "/usr/bin/qemu-system-x86_64" {
			t.Errorf("Pid is that of %s", exe)
		}
	})
	t.Run("user, capabilities, privileges", func(t *testing.T) { checkStatus(t, proc, c.UID()) })
	t.Run("every thread has the seccomp filter", func(t *testing.T) { checkThreads(t, proc) })
	t.Run("namespaces", func(t *testing.T) { checkNamespaces(t, r, proc) })
	t.Run("cgroup", func(t *testing.T) {
		checkCgroup(t, r, c, proc)
		if err := c.SetUrgent(true); err != nil {
			t.Fatal(err)
		}
		if got := weight(t, r, c); got != "10000" && got != "102400" {
			t.Errorf("urgent, it weighs %s", got)
		}
		if err := c.SetUrgent(false); err != nil {
			t.Fatal(err)
		}
		checkCgroup(t, r, c, proc)
	})
	t.Run("limits", func(t *testing.T) { checkLimits(t, proc) })
	t.Run("root", func(t *testing.T) { checkRoot(t, proc, dir, given, withProc) })
	t.Run("descriptors", func(t *testing.T) { checkDescriptors(t, proc) })
	t.Run("environment", func(t *testing.T) {
		want := "LANG=C\x00TMPDIR=" + dir + "\x00PWD=" + dir + "\x00"
		if got := readFile(t, proc+"environ"); got != want {
			t.Errorf("environment is %q, not %q", got, want)
		}
	})
	t.Run("bubblewrap itself", func(t *testing.T) {
		parent, err := parentOf(p.Pid())
		if err != nil {
			t.Fatal(err)
		}
		proc := fmt.Sprintf("/proc/%d/", parent)
		checkStatus(t, proc, c.UID())
		checkCgroup(t, r, c, proc)
		checkLimits(t, proc)
	})

	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(proc); !os.IsNotExist(err) {
		t.Errorf("after Close the process is still there: %v", err)
	}
}

// TestConfined reads limits and identity back from the simplest program, where there is no QEMU.
func TestConfined(t *testing.T) {
	r := newRig(t)
	c := r.cell(t, 64)
	p := launchOrFail(t, c, vmm.Command{Args: []string{hostileProgram(t), "sleep"}})
	proc := fmt.Sprintf("/proc/%d/", p.Pid())
	checkStatus(t, proc, c.UID())
	checkNamespaces(t, r, proc)
	checkCgroup(t, r, c, proc)
	checkLimits(t, proc)
	t.Logf("cgroup %s", r.CgroupVersion())
}

// connection is a pair of connected sockets.
func connection(t *testing.T) (net.Conn, *os.File) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	ours := os.NewFile(uintptr(fds[0]), "monitor")
	defer ours.Close()
	conn, err := net.FileConn(ours)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn, os.NewFile(uintptr(fds[1]), "monitor")
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func readLink(t *testing.T, path string) string {
	t.Helper()
	link, err := os.Readlink(path)
	if err != nil {
		t.Fatal(err)
	}
	return link
}

// status is /proc/pid/status as a map.
func status(t *testing.T, path string) map[string]string {
	t.Helper()
	m := map[string]string{}
	for line := range strings.Lines(readFile(t, path)) {
		key, value, _ := strings.Cut(line, ":")
		m[key] = strings.Join(strings.Fields(value), " ")
	}
	return m
}

func checkStatus(t *testing.T, proc string, uid int) {
	t.Helper()
	s := status(t, proc+"status")
	id := fmt.Sprint(uid)
	ids := strings.Join([]string{id, id, id, id}, " ")
	none := "0000000000000000"
	want := map[string]string{
		"Uid": ids, "Gid": ids, "Groups": "", "NoNewPrivs": "1", "TracerPid": "0",
		"CapInh": none, "CapPrm": none, "CapEff": none, "CapBnd": none, "CapAmb": none,
	}
	got := map[string]string{}
	for key := range want {
		got[key] = s[key]
	}
	if strings.Contains(readFile(t, proc+"cmdline"), "--unshare-user") {
		delete(want, "CapBnd") // bubblewrap keeps the bounding set in its outer half, but can gain nothing from it
		delete(got, "CapBnd")
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("%sstatus (-want +got):\n%s", proc, diff)
	}
}

func checkThreads(t *testing.T, proc string) {
	threads, err := os.ReadDir(proc + "task")
	if err != nil {
		t.Fatal(err)
	}
	for _, thread := range threads {
		s := status(t, filepath.Join(proc, "task", thread.Name(), "status"))
		if s["Seccomp"] != "2" || s["CapEff"] != "0000000000000000" {
			t.Errorf("thread %s: seccomp %s, capabilities %s", s["Name"], s["Seccomp"], s["CapEff"])
		}
	}
}

func checkNamespaces(t *testing.T, r *rig, proc string) {
	for _, ns := range []string{"user", "pid", "mnt", "ipc", "uts", "cgroup", "net"} {
		if readLink(t, proc+"ns/"+ns) == readLink(t, "/proc/self/ns/"+ns) {
			t.Errorf("%s namespace is the host's", ns)
		}
	}
	var node, its unix.Stat_t
	if err := unix.Stat("/run/netns/"+r.network.Name(), &node); err != nil {
		t.Fatal(err)
	}
	if err := unix.Stat(proc+"ns/net", &its); err != nil {
		t.Fatal(err)
	}
	if node.Ino != its.Ino || node.Dev != its.Dev {
		t.Error("network namespace is not the node's")
	}
	if pids := strings.Fields(status(t, proc+"status")["NSpid"]); len(pids) != 3 || pids[2] != "1" {
		t.Errorf("process ids from the host's namespace to its own: %v", pids)
	}
	parent, err := parentOf(atoi(t, filepath.Base(proc)))
	if err != nil {
		t.Fatal(err)
	}
	for _, ns := range []string{"user", "mnt"} {
		if readLink(t, proc+"ns/"+ns) == readLink(t, fmt.Sprintf("/proc/%d/ns/%s", parent, ns)) {
			t.Errorf("%s namespace is bubblewrap's", ns)
		}
	}
}

// weight is the cell's share of the CPU, as the kernel's cgroup version counts.
func weight(t *testing.T, r *rig, c *Cell) string {
	t.Helper()
	file := "/sys/fs/cgroup/%s/cpu.weight"
	if r.CgroupVersion() == "v1" {
		file = "/sys/fs/cgroup/cpu/%s/cpu.shares"
	}
	return strings.TrimSpace(readFile(t, fmt.Sprintf(file, r.config.Cgroup+"/"+r.config.Node+"/"+c.id)))
}

func checkCgroup(t *testing.T, r *rig, c *Cell, proc string) {
	t.Helper()
	name := "/" + r.config.Cgroup + "/" + r.config.Node + "/" + c.id
	want := map[string]string{
		"memory.max": fmt.Sprint((64 + 256) << 20), "pids.max": "128", "cpu.weight": "50",
		"memory.swap.max": "0",
	}
	base := map[string]string{"": "/sys/fs/cgroup"}
	if r.CgroupVersion() == "v1" {
		want = map[string]string{
			"memory.limit_in_bytes": want["memory.max"], "pids.max": "128", "cpu.shares": "512", "memory.swappiness": "0",
		}
		base = map[string]string{"memory": "/sys/fs/cgroup/memory", "pids": "/sys/fs/cgroup/pids", "cpu": "/sys/fs/cgroup/cpu"}
	}
	in := map[string]bool{}
	for line := range strings.Lines(readFile(t, proc+"cgroup")) {
		fields := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if fields[2] == name {
			for _, controller := range strings.Split(fields[1], ",") {
				in[controller] = true
			}
		}
	}
	for controller := range base {
		if !in[controller] {
			t.Errorf("process is not in the %s cgroup %s", controller, name)
		}
	}
	for file, value := range want {
		controller, _, _ := strings.Cut(file, ".")
		dir, ok := base[controller]
		if !ok {
			dir = base[""]
		}
		if got := strings.TrimSpace(readFile(t, dir+name+"/"+file)); got != value {
			t.Errorf("%s is %s, not %s", file, got, value)
		}
	}
}

func checkLimits(t *testing.T, proc string) {
	t.Helper()
	limits := readFile(t, proc+"limits")
	for name, value := range map[string]string{
		"Max open files": "1024", "Max core file size": "0", "Max msgqueue size": "0", "Max realtime priority": "0",
	} {
		i := strings.Index(limits, name)
		if i < 0 {
			t.Fatalf("no %s in %s", name, limits)
		}
		if f := strings.Fields(limits[i+len(name):]); f[0] != value || f[1] != value {
			t.Errorf("%s: soft %s, hard %s, not %s", name, f[0], f[1], value)
		}
	}
	if score := strings.TrimSpace(readFile(t, proc+"oom_score_adj")); score != "500" {
		t.Errorf("oom_score_adj is %s", score)
	}
}

// checkRoot looks at the mounts, and at the root as the process sees it.
func checkRoot(t *testing.T, proc, dir, given string, withProc bool) {
	var mounts []string
	for line := range strings.Lines(readFile(t, proc+"mountinfo")) {
		fields := strings.Fields(line)
		options := strings.Split(fields[5], ",")
		mounts = append(mounts, fields[4]+" "+options[0])
		for _, o := range []string{"nosuid"} {
			if !slices.Contains(options, o) {
				t.Errorf("%s is mounted without %s", fields[4], o)
			}
		}
		if !slices.Contains(options, "nodev") && !strings.HasPrefix(fields[4], "/dev/") {
			t.Errorf("%s is mounted without nodev", fields[4])
		}
	}
	want := []string{
		"/ ro", "/dev/null rw", "/dev/random rw", "/dev/urandom rw", "/dev/zero rw", "/etc/ld.so.cache ro",
		"/usr/bin/qemu-system-x86_64 ro", "/usr/lib/x86_64-linux-gnu ro", "/usr/lib64 ro", "/usr/share/qemu ro",
		"/usr/share/seabios ro", dir + " rw", given + " ro",
	}
	directories := []string{"dev", "etc", "lib", "lib64", "tmp", "usr"}
	if withProc {
		want = append(want, "/proc ro")
		directories = []string{"dev", "etc", "lib", "lib64", "proc", "tmp", "usr"}
	}
	slices.Sort(mounts)
	slices.Sort(want)
	if diff := cmp.Diff(want, mounts); diff != "" {
		t.Errorf("mounts (-want +got):\n%s", diff)
	}
	entries, err := os.ReadDir(proc + "root/")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	if diff := cmp.Diff(directories, names); diff != "" {
		t.Errorf("root directory (-want +got):\n%s", diff)
	}
}

func checkDescriptors(t *testing.T, proc string) {
	entries, err := os.ReadDir(proc + "fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		link := readLink(t, proc+"fd/"+e.Name())
		n := atoi(t, e.Name())
		switch {
		case n == 0 && link == "/dev/null":
		case (n == 1 || n == 2) && strings.HasPrefix(link, "pipe:"): // output
		case n == 3 && strings.HasPrefix(link, "socket:"): // monitor
		case n == 4 && link == "/dev/net/tun":
		case strings.HasPrefix(link, "anon_inode:"), strings.HasPrefix(link, "/memfd:"): // QEMU's own
		case strings.HasPrefix(link, "/usr/share/"):
		default:
			t.Errorf("descriptor %d: %s", n, link)
		}
	}
}

func atoi(t *testing.T, s string) int {
	t.Helper()
	var n int
	if _, err := fmt.Sscan(s, &n); err != nil {
		t.Fatal(err)
	}
	return n
}
