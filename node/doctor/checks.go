package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/ephemeral-run/ephemeral/images"
)

func checkRoot(_ context.Context, c *Config) Check {
	if uid := c.Host.UID(); uid != 0 {
		return fail("run it with sudo, or as a service of root", "runs as uid %d; taps, namespaces and the jail need root", uid)
	}
	return ok("runs as root")
}

func checkTun(_ context.Context, c *Config) Check {
	const device = "/dev/net/tun"
	err := c.Host.OpenDevice(device)
	switch {
	case err == nil:
		return ok("%s opens", device)
	case errors.Is(err, os.ErrNotExist):
		return fail("load the module: `modprobe tun`; in a container pass "+device+" in", "there is no %s", device)
	default:
		return fail("run it as root, and allow the device in the container's device rules", "%v", err)
	}
}

func checkNetworkNamespaces(_ context.Context, c *Config) Check {
	if err := c.Host.NetworkNamespace(false); err != nil {
		return fail("run it as root with CAP_SYS_ADMIN and a kernel with CONFIG_NET_NS", "%v", err)
	}
	return ok("network namespaces can be made")
}

func checkNFTables(_ context.Context, c *Config) Check {
	if err := c.Host.NetworkNamespace(true); err != nil {
		return fail("run it as root with CAP_NET_ADMIN, and load the module: `modprobe nf_tables`", "%v", err)
	}
	return ok("nftables answers in a network namespace")
}

// wantedControllers limit what a machine takes of its host.
var wantedControllers = []string{"memory", "pids", "cpu"}

func checkCgroups(_ context.Context, c *Config) Check {
	const root = "/sys/fs/cgroup"
	fix := "mount cgroup v2 (kernel parameter systemd.unified_cgroup_hierarchy=1); in a container give it a writable " + root
	if b, err := c.Host.ReadFile(root + "/cgroup.controllers"); err == nil {
		have := strings.Fields(string(b))
		if missing := without(wantedControllers, have); len(missing) > 0 {
			return fail(fix, "cgroup v2 has no controller %s here", strings.Join(missing, ", "))
		}
		if err := c.Host.Writable(root); err != nil {
			return fail(fix, "cgroup v2 is not writable: %v", err)
		}
		return ok("v2 with %s", strings.Join(wantedControllers, ", "))
	}
	var missing []string
	for _, controller := range wantedControllers {
		if err := c.Host.Writable(root + "/" + controller); err != nil {
			missing = append(missing, controller)
		}
	}
	if len(missing) > 0 {
		return fail(fix, "neither cgroup v2 nor a writable v1 hierarchy of %s", strings.Join(missing, ", "))
	}
	return ok("v1 with %s", strings.Join(wantedControllers, ", "))
}

// without returns what of want is not in have.
func without(want, have []string) []string {
	return slices.DeleteFunc(slices.Clone(want), func(s string) bool { return slices.Contains(have, s) })
}

func checkUserNamespaces(ctx context.Context, c *Config) Check {
	_, err := c.Host.Output(ctx, "bwrap", "--unshare-user", "--unshare-pid", "--ro-bind", "/", "/", "true")
	switch {
	case err == nil:
		return ok("bubblewrap can make user namespaces")
	case errors.Is(err, ErrNoProgram):
		return warn("install bubblewrap first", "not known: bubblewrap is not installed")
	case c.Host.UID() == 0:
		return warn("set kernel.unprivileged_userns_clone=1 and user.max_user_namespaces above 0; the jail does without them as root",
			"no user namespaces: %v", err)
	default:
		return fail("set kernel.unprivileged_userns_clone=1 and user.max_user_namespaces above 0, or run it as root",
			"no user namespaces: %v", err)
	}
}

// program is a program that has to be there in a version.
type program struct {
	name        string
	args        []string
	pkg         string // Debian package
	major       int    // least version
	minor       int
	missing     Status // when it is not there, or too old
	consequence string
	anyExit     bool // prints its version and ends with an error
}

var versionRE = regexp.MustCompile(`\d+(\.\d+)+`)

// check finds the program's version and compares it.
func (p program) check(ctx context.Context, h Host) Check {
	fix := "install it: `apt-get install " + p.pkg + "`, or run `make setup`"
	text, err := h.Output(ctx, p.name, p.args...)
	if errors.Is(err, ErrNoProgram) {
		return Check{Status: p.missing, Detail: fmt.Sprintf("%s is not installed: %s", p.name, p.consequence), Fix: fix}
	}
	if err != nil && (!p.anyExit || ctx.Err() != nil) {
		return Check{Status: p.missing, Detail: err.Error(), Fix: "reinstall it: `apt-get install --reinstall " + p.pkg + "`"}
	}
	version := versionRE.FindString(text)
	if version == "" {
		return warn(fix, "%s does not tell its version", p.name)
	}
	if !atLeast(version, p.major, p.minor) {
		return Check{
			Status: p.missing,
			Detail: fmt.Sprintf("%s %s is too old: %d.%d or newer is needed; %s", p.name, version, p.major, p.minor, p.consequence),
			Fix:    "upgrade it: `apt-get install " + p.pkg + "` on Debian 12 or newer",
		}
	}
	return ok("%s %s", p.name, version)
}

// atLeast compares the first two parts of a version. Parts too large to be numbers do not pass.
func atLeast(version string, major, minor int) bool {
	parts := strings.SplitN(version, ".", 3)
	a, err := strconv.Atoi(parts[0])
	if err != nil {
		return false
	}
	b, err := strconv.Atoi(parts[1])
	if err != nil {
		return false
	}
	return a > major || a == major && b >= minor
}

func checkQEMU(ctx context.Context, c *Config) Check {
	return program{c.QEMU, []string{"--version"}, "qemu-system-x86", 7, 2, Fail, "no machine can start", false}.check(ctx, c.Host)
}

func checkBubblewrap(ctx context.Context, c *Config) Check {
	return program{"bwrap", []string{"--version"}, "bubblewrap", 0, 8, Fail, "machines cannot be jailed", false}.check(ctx, c.Host)
}

func checkRedis(ctx context.Context, c *Config) Check {
	p := program{"redis-server", []string{"--version"}, "redis-server", 7, 0, Fail, "`ephemeral serve` cannot start its private Redis", false}
	if c.RedisURL != "" {
		p.missing = Warn
		p.consequence = "not needed while EPHEMERAL_REDIS_URL is set"
	}
	return p.check(ctx, c.Host)
}

func checkMmdebstrap(ctx context.Context, c *Config) Check {
	return program{"mmdebstrap", []string{"--version"}, "mmdebstrap", 1, 3, Warn, "images cannot be built here", false}.check(ctx, c.Host)
}

func checkMkfsErofs(ctx context.Context, c *Config) Check {
	// Old ones do not know -V: they print their version, then that they do not know it.
	return program{"mkfs.erofs", []string{"-V"}, "erofs-utils", 1, 5, Warn, "images cannot be built here", true}.check(ctx, c.Host)
}

func checkImage(_ context.Context, c *Config) Check {
	img, err := c.Host.Image(c.ImageDir)
	switch {
	case err == nil:
		if err := img.CheckMemory(c.MemoryMiB); err != nil {
			return fail("raise EPHEMERAL_MACHINE_MEMORY_MIB, or the image's own memory in EPHEMERAL_IMAGES", "%v", err)
		}
		return ok("%s is verified: %s", img.Name, img.Digest)
	case errors.Is(err, images.ErrNotBuilt):
		return fail("build it: `ephemeral image build`, or `make image`", "there is no image in %s", c.ImageDir)
	case errors.Is(err, images.ErrDamaged):
		return fail("rebuild it: `ephemeral image build --rebuild`", "%v", err)
	default:
		return fail("make the image's files readable", "%v", err)
	}
}
