package boot

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Interface is the network card's name.
const Interface = "eth0"

// Cgroups is where the version 2 hierarchy is mounted.
const Cgroups = "/sys/fs/cgroup"

// Writable are the mount points that commands can fill. Each is limited, see switchRoot and mountRuntime.
var Writable = []string{"/", "/tmp", "/dev/shm"}

// mountRuntime mounts what programs expect to find.
func mountRuntime(memory int64) error {
	const quiet = unix.MS_NOSUID | unix.MS_NODEV
	return mountAll([]mount{
		{"proc", "/proc", "proc", quiet | unix.MS_NOEXEC, ""},
		{"sysfs", "/sys", "sysfs", quiet | unix.MS_NOEXEC, ""},
		{"devtmpfs", "/dev", "devtmpfs", unix.MS_NOSUID, "mode=0755"},
		{"devpts", "/dev/pts", "devpts", unix.MS_NOSUID | unix.MS_NOEXEC, "mode=0620,ptmxmode=0666"},
		{"tmpfs", "/dev/shm", "tmpfs", quiet, fmt.Sprintf("mode=1777,size=%d", memory/4)},
		{"tmpfs", "/tmp", "tmpfs", quiet, fmt.Sprintf("mode=1777,size=%d", memory/2)},
		{"tmpfs", "/run", "tmpfs", quiet, fmt.Sprintf("mode=0755,size=%d", memory/16)},
		{"cgroup2", Cgroups, "cgroup2", quiet | unix.MS_NOEXEC, ""},
	})
}

// setSysctls sets what the machine needs of the kernel. What a kernel does not have needs no setting.
func setSysctls() error {
	for name, value := range map[string]string{
		"net/ipv6/conf/all/disable_ipv6":     "1",
		"net/ipv6/conf/default/disable_ipv6": "1",
		"net/ipv4/tcp_syn_retries":           "1", // connections to nowhere end soon
		"net/ipv4/ping_group_range":          "0 2147483647",
		"kernel/dmesg_restrict":              "1",
		"kernel/kptr_restrict":               "2",
		"kernel/unprivileged_bpf_disabled":   "1",
		"kernel/panic":                       "-1", // a dead kernel ends the machine
		"fs/protected_hardlinks":             "1",
		"fs/protected_symlinks":              "1",
	} {
		err := os.WriteFile(filepath.Join("/proc/sys", name), []byte(value), 0)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("set %s: %w", name, err)
		}
	}
	return nil
}

// Limits of processes, setrlimit(2). They are the agent's and so inherited by every command; root may exceed the number
// of processes, the worker may not.
const (
	maxOpenFiles = 65536
	maxProcesses = 4096
)

func setLimits() error {
	for _, l := range []struct {
		name  string
		kind  int
		value uint64
	}{
		{"open files", unix.RLIMIT_NOFILE, maxOpenFiles},
		{"processes", unix.RLIMIT_NPROC, maxProcesses},
		{"core size", unix.RLIMIT_CORE, 0},
	} {
		// Of package syscall, because Go gives children the limit of open files that was set through it.
		if err := syscall.Setrlimit(l.kind, &syscall.Rlimit{Cur: l.value, Max: l.value}); err != nil {
			return fmt.Errorf("limit %s: %w", l.name, err)
		}
	}
	return nil
}

// startNetwork brings the loopback and, if there is one, the card up. The card does no ARP and has no address yet. With
// an empty resolv.conf the resolver asks the loopback, where nobody answers, and so fails at once.
func startNetwork(log *slog.Logger) error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("bring up loopback: %w", err)
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return fmt.Errorf("bring up loopback: %w", err)
	}
	if err := replaceFile("/etc/resolv.conf", nil); err != nil {
		return fmt.Errorf("empty resolver: %w", err)
	}
	card, err := netlink.LinkByName(Interface)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		log.Info("no network card")
		return nil
	}
	if err != nil {
		return fmt.Errorf("bring up %s: %w", Interface, err)
	}
	if err := errors.Join(netlink.LinkSetARPOff(card), netlink.LinkSetUp(card)); err != nil {
		return fmt.Errorf("bring up %s: %w", Interface, err)
	}
	return nil
}

// replaceFile writes a file that may be a link to elsewhere.
func replaceFile(path string, content []byte) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return os.WriteFile(path, content, 0o644)
}

// CommandMemory is what the commands of the machine may use together, in bytes: all but a reserve for the kernel and the
// agent.
func CommandMemory() (int64, error) {
	total, err := totalMemory()
	if err != nil {
		return 0, err
	}
	const least = 48 << 20
	return total - max(least, total/8), nil
}

// PowerOff ends the machine. It does not return on success.
func PowerOff() error {
	unix.Sync()
	if err := unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF); err != nil {
		return fmt.Errorf("power off: %w", err)
	}
	return nil
}
