// Package boot turns the kernel's first process into a running machine: modules, root filesystem, the pseudo
// filesystems, limits and the network card.
package boot

import (
	"bufio"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	modulesDir = "/lib/modules"
	rootDevice = "/dev/vda"
	// rootTimeout bounds the wait for the block device.
	rootTimeout = 20 * time.Second
	lowerDir    = "/lower"
	upperDir    = "/upper"
	newRoot     = "/newroot"
)

// Start does everything up to the point where commands can run. It is called in the initramfs and returns in the root
// filesystem of the image.
func Start(log *slog.Logger) error {
	unix.Umask(0o022)
	if err := mountAll([]mount{
		{"proc", "/proc", "proc", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC, ""},
		{"sysfs", "/sys", "sysfs", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC, ""},
		{"devtmpfs", "/dev", "devtmpfs", unix.MS_NOSUID, "mode=0755"},
	}); err != nil {
		return err
	}
	if err := loadModules(modulesDir, log); err != nil {
		return err
	}
	memory, err := totalMemory()
	if err != nil {
		return err
	}
	if err := switchRoot(memory); err != nil {
		return err
	}
	if err := mountRuntime(memory); err != nil {
		return err
	}
	if err := setSysctls(); err != nil {
		return err
	}
	if err := setLimits(); err != nil {
		return err
	}
	return startNetwork(log)
}

type mount struct {
	source, target, kind string
	flags                uintptr
	options              string
}

func mountAll(mounts []mount) error {
	for _, m := range mounts {
		if err := os.MkdirAll(m.target, 0o755); err != nil {
			return fmt.Errorf("mount %s: %w", m.target, err)
		}
		if err := unix.Mount(m.source, m.target, m.kind, m.flags, m.options); err != nil && !errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("mount %s on %s: %w", m.kind, m.target, err)
		}
	}
	return nil
}

// loadModules loads the kernel modules named in dir/order, one path a line. A module for hardware that is not there is no
// error; nor is one that the kernel has built in or loaded.
func loadModules(dir string, log *slog.Logger) error {
	order, err := os.Open(filepath.Join(dir, "order"))
	if errors.Is(err, os.ErrNotExist) {
		return nil // all built in
	}
	if err != nil {
		return fmt.Errorf("load modules: %w", err)
	}
	defer order.Close()
	lines := bufio.NewScanner(order)
	for lines.Scan() {
		path := strings.TrimSpace(lines.Text())
		if path == "" || strings.HasPrefix(path, "#") {
			continue
		}
		if !filepath.IsAbs(path) {
			path = filepath.Join(dir, path)
		}
		if err := loadModule(path); err != nil && !errors.Is(err, unix.EEXIST) && !errors.Is(err, unix.ENODEV) {
			log.Warn("module not loaded", "path", path, "error", err)
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("load modules: %w", err)
	}
	return nil
}

func loadModule(path string) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	return unix.FinitModule(int(file.Fd()), "", 0)
}

func totalMemory() (int64, error) {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return 0, fmt.Errorf("read memory size: %w", err)
	}
	return int64(info.Totalram) * int64(info.Unit), nil
}

// switchRoot puts the image, read-only and shared by all machines, under a layer of memory and makes that the root.
func switchRoot(memory int64) error {
	if err := waitFor(rootDevice, rootTimeout); err != nil {
		return err
	}
	if err := mountAll([]mount{
		{rootDevice, lowerDir, "erofs", unix.MS_RDONLY | unix.MS_NODEV, ""},
		{"upper", upperDir, "tmpfs", unix.MS_NODEV, fmt.Sprintf("mode=0755,size=%d", memory/4)},
	}); err != nil {
		return err
	}
	for _, dir := range []string{upperDir + "/data", upperDir + "/work"} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return fmt.Errorf("switch root: %w", err)
		}
	}
	options := fmt.Sprintf("lowerdir=%s,upperdir=%s/data,workdir=%s/work", lowerDir, upperDir, upperDir)
	if err := mountAll([]mount{{"overlay", newRoot, "overlay", unix.MS_NODEV, options}}); err != nil {
		return err
	}
	if err := os.RemoveAll(modulesDir); err != nil { // an initramfs keeps its files in memory
		return fmt.Errorf("switch root: %w", err)
	}
	for _, dir := range []string{"/dev", "/sys", "/proc"} {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			return fmt.Errorf("switch root: unmount %s: %w", dir, err)
		}
	}
	if err := os.Chdir(newRoot); err != nil {
		return fmt.Errorf("switch root: %w", err)
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("switch root: %w", err)
	}
	if err := unix.Chroot("."); err != nil {
		return fmt.Errorf("switch root: %w", err)
	}
	return os.Chdir("/")
}

func waitFor(path string, timeout time.Duration) error {
	for end := time.Now().Add(timeout); ; time.Sleep(5 * time.Millisecond) {
		if _, err := os.Stat(path); err == nil {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("device %s did not appear within %v", path, timeout)
		}
	}
}
