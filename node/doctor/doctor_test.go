package doctor

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/ephemeral-run/ephemeral/images"
	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/vmm/cloudhypervisor"
)

// fakeHost is a host on which everything is well, until a test breaks one thing.
type fakeHost struct {
	uid      int
	noKVM    string
	devices  error
	files    map[string]string
	readOnly map[string]bool
	output   map[string]string // by program; absent: not installed
	failing  map[string]error  // by program
	netns    error
	nft      error
	space    Space
	spaceErr error
	soft     uint64
	hard     uint64
	filesErr error
	entropy  error
	redis    run.Persistence
	redisErr error
	image    images.Image
	imageErr error
	slow     time.Duration
	program  cloudhypervisor.Program
	noVMM    error // why there is no Cloud Hypervisor
	landlock int
	mapping  error
}

func healthy() *fakeHost {
	return &fakeHost{
		redis: run.Persistence{AppendOnly: "yes", Fsync: "always", Eviction: "noeviction"},
		files: map[string]string{
			"/sys/fs/cgroup/cgroup.controllers": "cpuset cpu io memory hugetlb pids rdma misc\n",
			"/proc/meminfo":                     "MemTotal:       24684084 kB\nMemAvailable:   20971520 kB\n",
			"/sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc\n",
		},
		output: map[string]string{
			"qemu-system-x86_64": "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)\nCopyright (c) 2003-2022",
			"bwrap":              "bubblewrap 0.8.0",
			"redis-server":       "Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc-5.3.0 bits=64",
			"mmdebstrap":         "mmdebstrap 1.3.5",
			"mkfs.erofs":         "mkfs.erofs 1.5",
		},
		failing: map[string]error{"mkfs.erofs": errors.New("mkfs.erofs: exit status 1")},
		space:   Space{Dir: "/var/lib", Bytes: 100 << 30, Inodes: 1 << 24, FreeInodes: 1 << 23},
		soft:    1 << 20, hard: 1 << 20,
		image:   images.Image{Name: "base", Digest: "sha256:abc"},
		program: cloudhypervisor.Program{Path: "/usr/bin/cloud-hypervisor", Version: "53.0"}, landlock: 6,
	}
}

func (h *fakeHost) UID() int                     { return h.uid }
func (h *fakeHost) KVM() (bool, string)          { return h.noKVM == "", h.noKVM }
func (h *fakeHost) OpenDevice(path string) error { return h.devices }
func (h *fakeHost) LandlockABI() int             { return h.landlock }
func (h *fakeHost) SharedMapping(string) error   { return h.mapping }
func (h *fakeHost) CloudHypervisor(string) (cloudhypervisor.Program, error) {
	return h.program, h.noVMM
}
func (h *fakeHost) ReadFile(path string) ([]byte, error) {
	if s, ok := h.files[path]; ok {
		return []byte(s), nil
	}
	return nil, &os.PathError{Op: "open", Path: path, Err: os.ErrNotExist}
}

func (h *fakeHost) Writable(dir string) error {
	if h.readOnly[dir] || h.readOnly["*"] {
		return fmt.Errorf("access %s: %w", dir, os.ErrPermission)
	}
	return nil
}

func (h *fakeHost) Output(ctx context.Context, name string, args ...string) (string, error) {
	if h.slow > 0 {
		select {
		case <-ctx.Done():
			return "", ctx.Err()
		case <-time.After(h.slow):
		}
	}
	text, ok := h.output[name]
	if !ok {
		return "", fmt.Errorf("%w: %s", ErrNoProgram, name)
	}
	return text, h.failing[name]
}

func (h *fakeHost) NetworkNamespace(tables bool) error {
	if h.netns != nil || !tables {
		return h.netns
	}
	return h.nft
}
func (h *fakeHost) Space(string) (Space, error)        { return h.space, h.spaceErr }
func (h *fakeHost) OpenFiles() (uint64, uint64, error) { return h.soft, h.hard, h.filesErr }
func (h *fakeHost) Persistence(context.Context, string) (run.Persistence, error) {
	return h.redis, h.redisErr
}
func (h *fakeHost) Entropy() error                         { return h.entropy }
func (h *fakeHost) Image(dir string) (images.Image, error) { return h.image, h.imageErr }

func config(h Host) Config {
	return Config{DataDir: "/var/lib/ephemeral", ImageDir: "/var/lib/ephemeral/images/base", MemoryMiB: 256, MinReady: 2, MaxMachines: 16, Host: h}
}

func find(t *testing.T, all []Check, name string) Check {
	t.Helper()
	for _, c := range all {
		if c.Name == name {
			return c
		}
	}
	t.Fatalf("no check %q", name)
	return Check{}
}

func TestHealthyHost(t *testing.T) {
	all := Run(t.Context(), config(healthy()))
	if len(all) != len(checks) {
		t.Fatalf("%d checks, want %d", len(all), len(checks))
	}
	for i, c := range all {
		if c.Name != checks[i].name || c.Status != OK || c.Detail == "" || c.Fix != "" {
			t.Errorf("check %d: %+v, want %s ok", i, c, checks[i].name)
		}
	}
	if Worst(all) != OK {
		t.Errorf("worst is %s", Worst(all))
	}
}

// TestBrokenHost breaks one thing at a time: the check of it says so with a fix, and no other check changes.
func TestBrokenHost(t *testing.T) {
	tests := []struct {
		name   string
		change func(h *fakeHost, c *Config)
		check  string
		status Status
		detail string // part of it
		fix    string // part of it
		also   []string
	}{
		{"not root", func(h *fakeHost, _ *Config) { h.uid = 1000 }, "root", Fail, "uid 1000", "sudo", nil},
		{"no kvm", func(h *fakeHost, _ *Config) { h.noKVM = "there is no /dev/kvm" }, "kvm", Warn, "no security boundary; there is no /dev/kvm", "usable KVM", nil},
		{"no kvm for cloud-hypervisor", func(h *fakeHost, c *Config) { h.noKVM = "there is no /dev/kvm"; c.Hypervisor = "cloud-hypervisor" }, "kvm", Fail, "needs KVM; there is no /dev/kvm", "EPHEMERAL_HYPERVISOR=auto", nil},
		{"no cloud-hypervisor", func(h *fakeHost, _ *Config) { h.noVMM = fmt.Errorf("%w: x", cloudhypervisor.ErrNotFound) }, "cloud-hypervisor", Warn, "not installed: QEMU makes the machines", "static binary", nil},
		{"no cloud-hypervisor though wanted", func(h *fakeHost, c *Config) {
			h.noVMM = cloudhypervisor.ErrNotFound
			c.Hypervisor = "cloud-hypervisor"
		}, "cloud-hypervisor", Fail, "no machine can start: it is not installed", "static binary", nil},
		{"old cloud-hypervisor", func(h *fakeHost, _ *Config) { h.noVMM = fmt.Errorf("%w: it is 51.0", cloudhypervisor.ErrVersion) }, "cloud-hypervisor", Warn, "it is 51.0", "v53.0", nil},
		{"older cloud-hypervisor", func(h *fakeHost, _ *Config) {
			h.program.Version, h.program.Warning = "52.0", "version 52.0 is accepted, but"
		}, "cloud-hypervisor", Warn, "52.0 is accepted", "v53.0", nil},
		{"broken cloud-hypervisor", func(h *fakeHost, _ *Config) { h.noVMM = errors.New("exit status 127") }, "cloud-hypervisor", Warn, "does not run: exit status 127", "v53.0", nil},
		{"no landlock", func(h *fakeHost, _ *Config) { h.landlock = 2 }, "landlock", Warn, "ABI 2, Cloud Hypervisor asks for 3", "6.2", nil},
		{"no shared mapping", func(h *fakeHost, _ *Config) { h.mapping = errors.New("no such device") }, "template-memory", Warn, "takes a copy: no such device", "EPHEMERAL_DATA_DIR", nil},
		{"no tun", func(h *fakeHost, _ *Config) { h.devices = os.ErrNotExist }, "tun", Fail, "no /dev/net/tun", "modprobe tun", nil},
		{"tun refused", func(h *fakeHost, _ *Config) { h.devices = os.ErrPermission }, "tun", Fail, "permission", "device rules", nil},
		{"no namespaces", func(h *fakeHost, _ *Config) { h.netns = errors.New("unshare network: operation not permitted") }, "network-namespaces", Fail, "not permitted", "CAP_SYS_ADMIN", []string{"nftables"}},
		{"no nftables", func(h *fakeHost, _ *Config) { h.nft = errors.New("list nftables: protocol not supported") }, "nftables", Fail, "not supported", "modprobe nf_tables", nil},
		{"cgroup v2 without pids", func(h *fakeHost, _ *Config) { h.files["/sys/fs/cgroup/cgroup.controllers"] = "cpu memory" }, "cgroups", Fail, "no controller pids", "mount cgroup v2", nil},
		{"cgroup v2 read-only", func(h *fakeHost, _ *Config) { h.readOnly = map[string]bool{"/sys/fs/cgroup": true} }, "cgroups", Fail, "not writable", "writable", nil},
		{"no cgroups", func(h *fakeHost, _ *Config) {
			delete(h.files, "/sys/fs/cgroup/cgroup.controllers")
			h.readOnly = map[string]bool{"*": true}
		}, "cgroups", Fail, "neither", "mount cgroup v2", nil},
		{"user namespaces off, root", func(h *fakeHost, _ *Config) { h.failing["bwrap"] = errors.New("bwrap: no permissions") }, "user-namespaces", Warn, "no permissions", "userns", []string{"bubblewrap"}},
		{"no bubblewrap", func(h *fakeHost, _ *Config) { delete(h.output, "bwrap") }, "bubblewrap", Fail, "not installed", "apt-get install bubblewrap", []string{"user-namespaces"}},
		{"no qemu", func(h *fakeHost, _ *Config) { delete(h.output, "qemu-system-x86_64") }, "qemu", Fail, "not installed", "apt-get install qemu-system-x86", nil},
		{"old qemu", func(h *fakeHost, _ *Config) { h.output["qemu-system-x86_64"] = "QEMU emulator version 5.2.0" }, "qemu", Fail, "5.2.0 is too old: 7.2", "upgrade", nil},
		{"broken qemu", func(h *fakeHost, _ *Config) {
			h.failing["qemu-system-x86_64"] = errors.New("qemu-system-x86_64: exit status 127: libpixman-1.so.0: cannot open")
		}, "qemu", Fail, "libpixman", "--reinstall", nil},
		{"silent qemu", func(h *fakeHost, _ *Config) { h.output["qemu-system-x86_64"] = "" }, "qemu", Warn, "does not tell", "install", nil},
		{"no redis", func(h *fakeHost, _ *Config) { delete(h.output, "redis-server") }, "redis-server", Fail, "private Redis", "redis-server", nil},
		{"redis evicts", func(h *fakeHost, c *Config) { c.RedisURL = "redis://r"; h.redis.Eviction = "allkeys-lru" }, "redis-persistence", Fail, "allkeys-lru", "noeviction", nil},
		{"redis without a file", func(h *fakeHost, c *Config) { c.RedisURL = "redis://r"; h.redis.AppendOnly = "no" }, "redis-persistence", Fail, "loses runs", "appendonly yes", nil},
		{"redis that does not sync", func(h *fakeHost, c *Config) { c.RedisURL = "redis://r"; h.redis.Fsync = "no" }, "redis-persistence", Warn, "half a minute", "appendfsync always", nil},
		{"redis that syncs every second", func(h *fakeHost, c *Config) { c.RedisURL = "redis://r"; h.redis.Fsync = "everysec" }, "redis-persistence", Warn, "two seconds", "appendfsync always", nil},
		{"redis that tells nothing", func(h *fakeHost, c *Config) { c.RedisURL = "redis://r"; h.redis = run.Persistence{} }, "redis-persistence", Warn, "does not tell", "noeviction", nil},
		{"redis away", func(h *fakeHost, c *Config) { c.RedisURL = "redis://r"; h.redisErr = run.ErrUnavailable }, "redis-persistence", Fail, "unavailable", "EPHEMERAL_REDIS_URL", nil},
		{"no redis, but another", func(h *fakeHost, c *Config) { delete(h.output, "redis-server"); c.RedisURL = "redis://r" }, "redis-server", Warn, "not needed", "redis-server", nil},
		{"no mmdebstrap", func(h *fakeHost, _ *Config) { delete(h.output, "mmdebstrap") }, "mmdebstrap", Warn, "cannot be built", "mmdebstrap", nil},
		{"old mkfs.erofs", func(h *fakeHost, _ *Config) { h.output["mkfs.erofs"] = "mkfs.erofs 1.2" }, "mkfs-erofs", Warn, "too old", "erofs-utils", nil},
		{"no image", func(h *fakeHost, _ *Config) { h.imageErr = fmt.Errorf("%w: no manifest", images.ErrNotBuilt) }, "image", Fail, "no image in /var/lib/ephemeral/images/base", "image build", nil},
		{"damaged image", func(h *fakeHost, _ *Config) { h.imageErr = fmt.Errorf("%w: vmlinuz", images.ErrDamaged) }, "image", Fail, "vmlinuz", "--rebuild", nil},
		{"memory too small for the image", func(_ *fakeHost, c *Config) { c.MemoryMiB = 64 }, "image", Fail, "64 MiB", "EPHEMERAL_MACHINE_MEMORY_MIB", nil},
		{"unreadable image", func(h *fakeHost, _ *Config) { h.imageErr = os.ErrPermission }, "image", Fail, "permission", "readable", nil},
		{"little memory", func(h *fakeHost, _ *Config) { h.files["/proc/meminfo"] = "MemAvailable: 1048576 kB\n" }, "memory", Warn, "1024 MiB available; 2 ready machines take 512 MiB, 16 in full use 6400 MiB", "EPHEMERAL_POOL", nil},
		{"no memory", func(h *fakeHost, _ *Config) { h.files["/proc/meminfo"] = "MemAvailable: 102400 kB\n" }, "memory", Fail, "100 MiB available", "add memory", nil},
		{"unknown memory", func(h *fakeHost, _ *Config) { h.files["/proc/meminfo"] = "MemFree: 1 kB\n" }, "memory", Fail, "not known", "3.14", nil},
		{"odd memory", func(h *fakeHost, _ *Config) { h.files["/proc/meminfo"] = "MemAvailable: x kB\n" }, "memory", Fail, "not known", "3.14", nil},
		{"full disk", func(h *fakeHost, _ *Config) { h.space.Bytes = 1 << 30 * 9 / 10 }, "disk", Fail, "921 MiB free in /var/lib", "EPHEMERAL_DATA_DIR", nil},
		{"fuller disk", func(h *fakeHost, _ *Config) { h.space.Bytes = 2000 << 20 }, "disk", Warn, "2000 MiB free", "EPHEMERAL_DATA_DIR", nil},
		{"no inodes", func(h *fakeHost, _ *Config) { h.space.FreeInodes = 100 }, "inodes", Fail, "100 inodes", "EPHEMERAL_DATA_DIR", nil},
		{"few inodes", func(h *fakeHost, _ *Config) { h.space.FreeInodes = 3000 }, "inodes", Warn, "3000 inodes", "remove files", nil},
		{"unknown disk", func(h *fakeHost, _ *Config) { h.spaceErr = os.ErrPermission }, "disk", Fail, "permission", "data directory", []string{"inodes"}},
		{"few open files", func(h *fakeHost, _ *Config) { h.soft, h.hard = 256, 512 }, "open-files", Fail, "at most 512 open files, 1280 needed", "ulimit -n 1280", nil},
		{"low soft limit", func(h *fakeHost, _ *Config) { h.soft = 1024 }, "open-files", Warn, "1024 open files (can be raised to 1048576)", "ulimit", nil},
		{"unknown limit", func(h *fakeHost, _ *Config) { h.filesErr = os.ErrInvalid }, "open-files", Fail, "invalid", "/proc", nil},
		{"slow clock", func(h *fakeHost, _ *Config) {
			h.files["/sys/devices/system/clocksource/clocksource0/current_clocksource"] = "hpet\n"
		}, "clock-source", Warn, "hpet is slow", "tsc", nil},
		{"unknown clock", func(h *fakeHost, _ *Config) {
			delete(h.files, "/sys/devices/system/clocksource/clocksource0/current_clocksource")
		}, "clock-source", Warn, "not known", "/sys", nil},
		{"no entropy", func(h *fakeHost, _ *Config) { h.entropy = errors.New("getrandom: resource temporarily unavailable") }, "entropy", Fail, "getrandom", "virtio-rng", nil},
	}
	broken := map[string]bool{}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			h := healthy()
			c := config(h)
			tt.change(h, &c)
			all := Run(t.Context(), c)
			got := find(t, all, tt.check)
			if got.Status != tt.status || !strings.Contains(got.Detail, tt.detail) || !strings.Contains(got.Fix, tt.fix) {
				t.Errorf("%+v, want %s with detail %q and fix %q", got, tt.status, tt.detail, tt.fix)
			}
			if strings.Contains(got.Detail, "%!") || strings.Contains(got.Fix, "%!") {
				t.Errorf("broken format: %+v", got)
			}
			if Worst(all) == OK {
				t.Error("worst is ok")
			}
			for _, other := range all {
				touched := other.Name == tt.check
				for _, name := range tt.also {
					touched = touched || other.Name == name
				}
				if !touched && other.Status != OK {
					t.Errorf("also %+v", other)
				}
			}
		})
		broken[tt.check] = true
	}
	for _, c := range checks {
		if !broken[c.name] && c.name != "user-namespaces" && c.name != "userfaultfd" { // nothing needs the last
			t.Errorf("no test breaks %s", c.name)
		}
	}
}

func TestCgroupV1(t *testing.T) {
	h := healthy()
	delete(h.files, "/sys/fs/cgroup/cgroup.controllers")
	got := find(t, Run(t.Context(), config(h)), "cgroups")
	if got.Status != OK || !strings.HasPrefix(got.Detail, "v1") {
		t.Errorf("%+v, want v1", got)
	}
	h.readOnly = map[string]bool{"/sys/fs/cgroup/pids": true}
	got = find(t, Run(t.Context(), config(h)), "cgroups")
	if got.Status != Fail || !strings.Contains(got.Detail, "hierarchy of pids") {
		t.Errorf("%+v, want pids missing", got)
	}
}

// TestQEMUHost: where QEMU makes the machines, nothing of Cloud Hypervisor's is missed.
func TestQEMUHost(t *testing.T) {
	h := healthy()
	h.noVMM, h.landlock = cloudhypervisor.ErrNotFound, 0
	c := config(h)
	c.Hypervisor = "qemu"
	for _, got := range Run(t.Context(), c) {
		if got.Status != OK {
			t.Errorf("%+v", got)
		}
	}
}

func TestUserfaultfd(t *testing.T) {
	for name, c := range map[string]struct {
		device error
		sysctl string
		want   string
	}{
		"device":  {nil, "", "/dev/userfaultfd opens"},
		"refused": {os.ErrPermission, "", "does not open"},
		"sysctl":  {os.ErrNotExist, "0\n", "vm.unprivileged_userfaultfd is 0;"},
		"none":    {os.ErrNotExist, "", "has none"},
	} {
		h := healthy()
		h.devices = c.device
		if c.sysctl != "" {
			h.files["/proc/sys/vm/unprivileged_userfaultfd"] = c.sysctl
		}
		if got := find(t, Run(t.Context(), config(h)), "userfaultfd"); got.Status != OK || !strings.Contains(got.Detail, c.want) {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

func TestInstallCloudHypervisor(t *testing.T) {
	for name, c := range map[string]struct{ release, want string }{
		"ubuntu":     {"NAME=Ubuntu\nID=ubuntu\nID_LIKE=debian\nVERSION_ID=\"26.10\"\n", "`apt-get install cloud-hypervisor`"},
		"old ubuntu": {"ID=ubuntu\nID_LIKE=debian\nVERSION_ID=\"24.04\"\n", "put the release's static binary"},
		"mint":       {"ID=linuxmint\nID_LIKE=\"ubuntu debian\"\nVERSION_ID=\"99\"\n", "put the release's static binary"},
		"debian":     {"ID=debian\nVERSION_ID=\"13\"\n", "put the release's static binary"},
		"fedora":     {"ID=fedora\nVERSION_ID=44\n", "`dnf install cloud-hypervisor`"},
		"arch":       {"ID=arch\n", "`pacman -S cloud-hypervisor`"},
		"manjaro":    {"ID=manjaro\nID_LIKE=arch\n", "`pacman -S cloud-hypervisor`"},
		"alpine":     {"ID=alpine\nVERSION_ID=3.24.1\n", "`apk add cloud-hypervisor`"},
		"nix":        {"ID=nixos\nVERSION_ID=\"26.05\"\n", "`nix-env -iA nixos.cloud-hypervisor`"},
		"unknown":    {"", "put the release's static binary"},
	} {
		h := healthy()
		h.noVMM = cloudhypervisor.ErrNotFound
		if c.release != "" {
			h.files["/etc/os-release"] = c.release
		}
		got := find(t, Run(t.Context(), config(h)), "cloud-hypervisor")
		if !strings.Contains(got.Fix, c.want) || !strings.Contains(got.Fix, "releases/download/v53.0/cloud-hypervisor-static") {
			t.Errorf("%s: %s", name, got.Fix)
		}
	}
}

func TestUserNamespacesNeededWithoutRoot(t *testing.T) {
	h := healthy()
	h.uid = 1000
	h.failing["bwrap"] = errors.New("bwrap: no permissions to create new namespace")
	if got := find(t, Run(t.Context(), config(h)), "user-namespaces"); got.Status != Fail {
		t.Errorf("%+v, want fail", got)
	}
}

func TestTmpfsWithoutInodeLimit(t *testing.T) {
	h := healthy()
	h.space.Inodes, h.space.FreeInodes = 0, 0
	if got := find(t, Run(t.Context(), config(h)), "inodes"); got.Status != OK {
		t.Errorf("%+v, want ok", got)
	}
}

// TestParallel: five slow programs cost the time of one, and a context that ends ends the checks.
func TestParallel(t *testing.T) {
	h := healthy()
	h.slow = 300 * time.Millisecond
	start := time.Now()
	if all := Run(t.Context(), config(h)); Worst(all) != OK {
		t.Errorf("%+v", all)
	}
	if d := time.Since(start); d > 1200*time.Millisecond {
		t.Errorf("took %s: the checks wait for each other", d)
	}
	h.slow = time.Hour
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	all := Run(ctx, config(h))
	for _, name := range []string{"qemu", "redis-server", "mkfs-erofs"} {
		if got := find(t, all, name); got.Status == OK {
			t.Errorf("%+v after the context has ended", got)
		}
	}
}

func TestText(t *testing.T) {
	all := []Check{
		{Name: "kvm", Status: Warn, Detail: "emulated", Fix: "use KVM"},
		{Name: "entropy", Status: OK, Detail: "ready"},
	}
	var b bytes.Buffer
	if err := WriteText(&b, all); err != nil {
		t.Fatal(err)
	}
	want := "warn  kvm                 emulated\n" +
		"                          fix: use KVM\n" +
		"ok    entropy             ready\n" +
		"1 ok, 1 warn, 0 fail\n"
	if diff := cmp.Diff(want, b.String()); diff != "" {
		t.Error(diff)
	}
}

func TestJSON(t *testing.T) {
	b, err := json.Marshal([]Check{{Name: "kvm", Status: Warn, Detail: "emulated", Fix: "use KVM"}, {Name: "tun", Status: OK, Detail: "opens"}})
	if err != nil {
		t.Fatal(err)
	}
	want := `[{"name":"kvm","status":"warn","detail":"emulated","fix":"use KVM"},{"name":"tun","status":"ok","detail":"opens"}]`
	if string(b) != want {
		t.Errorf("%s, want %s", b, want)
	}
}

// TestSystem runs the checks on the host of the test, whatever it is like.
func TestSystem(t *testing.T) {
	start := time.Now()
	all := Run(t.Context(), Config{DataDir: t.TempDir() + "/not/yet/there", ImageDir: t.TempDir(), MemoryMiB: 64, MinReady: 1, MaxMachines: 1})
	t.Logf("took %s", time.Since(start))
	for _, c := range all {
		t.Logf("%+v", c)
		if c.Name == "" || c.Detail == "" || (c.Status != OK && c.Fix == "") {
			t.Errorf("%+v is not complete", c)
		}
	}
	if got := find(t, all, "image"); got.Status != Fail {
		t.Errorf("%+v, want no image", got)
	}
	for _, name := range []string{"disk", "entropy", "memory"} {
		if got := find(t, all, name); got.Status == Fail {
			t.Errorf("%+v on the host of the test", got)
		}
	}
}

func TestOutputOfMissingProgram(t *testing.T) {
	if _, err := (System{}).Output(t.Context(), "no-such-program-here"); !errors.Is(err, ErrNoProgram) {
		t.Errorf("%v, want ErrNoProgram", err)
	}
}

func TestVersions(t *testing.T) {
	for _, tt := range []struct {
		version      string
		major, minor int
		want         bool
	}{
		{"7.2.22", 7, 2, true}, {"7.1", 7, 2, false}, {"10.0.2", 7, 2, true}, {"0.8.0", 0, 8, true}, {"1.10", 1, 5, true},
		{"99999999999999999999.1", 1, 5, false}, {"6.99", 7, 0, false},
	} {
		if got := atLeast(tt.version, tt.major, tt.minor); got != tt.want {
			t.Errorf("atLeast(%s, %d, %d) = %t", tt.version, tt.major, tt.minor, got)
		}
	}
}
