package images

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// buildSpace is what a build takes at most while it runs, in bytes: the tree, the packages, the kernel's package
	// unpacked and the file system made of the tree.
	buildSpace = 1 << 30
	// erofsUUID is fixed so that the same tree gives the same bytes.
	erofsUUID = "6f2a7a5e-0d3c-4c61-9b0e-57c1f3a9d4b2"
	// stopGrace suffices for mmdebstrap to unmount and remove.
	stopGrace = 10 * time.Second
)

// makeDebian is the makeRoot of a recipe: a Debian root filesystem and the kernel of a Debian package.
func (b *builder) makeDebian(ctx context.Context, img, tmp string) (Manifest, []module, error) {
	var m Manifest
	if os.Geteuid() != 0 {
		return m, nil, errors.New("building a root filesystem needs root: files in it belong to several users; run it with sudo")
	}
	for _, program := range []string{"mmdebstrap", "mkfs.erofs", "dpkg-deb"} {
		if _, err := exec.LookPath(program); err != nil {
			return m, nil, fmt.Errorf("building a root filesystem needs %s: run `make setup`", program)
		}
	}
	if err := requireSpace(b.Dir, buildSpace); err != nil {
		return m, nil, err
	}
	tree := filepath.Join(tmp, "tree")
	work := filepath.Join(tmp, "work")
	if err := b.bootstrap(ctx, tree, work); err != nil {
		return m, nil, err
	}
	kernel, modules, err := b.takeKernel(ctx, img, work)
	if err != nil {
		return m, nil, err
	}
	m.Kernel = kernel
	if m.Packages, err = readPackages(work); err != nil {
		return m, nil, err
	}
	if err := emptyDevices(tree); err != nil {
		return m, nil, err
	}
	return m, modules, b.writeRoot(ctx, img, tree)
}

// writeRoot makes the tree the root filesystem of an image.
func (b *builder) writeRoot(ctx context.Context, img, tree string) error {
	b.Progress("writing root filesystem")
	rootfs := filepath.Join(img, rootfsFile)
	if err := b.program(ctx, nil, "mkfs.erofs", "--quiet", "-T"+strconv.FormatInt(fixedTime.Unix(), 10), "-U"+erofsUUID, rootfs, tree); err != nil {
		return err
	}
	if err := os.Chmod(rootfs, 0o444); err != nil {
		return fmt.Errorf("finish root filesystem: %w", err)
	}
	return syncFile(rootfs)
}

// bootstrap installs the recipe's packages into tree. Into work go the kernel's package and the list of packages.
func (b *builder) bootstrap(ctx context.Context, tree, work string) error {
	if err := os.Mkdir(work, 0o755); err != nil {
		return fmt.Errorf("make build directory: %w", noSpace(err))
	}
	script := filepath.Join(work, "customize.sh")
	if err := writeFile(script, customizeScript); err != nil {
		return err
	}
	if err := writeFile(filepath.Join(work, "kernel"), []byte(b.Recipe.Kernel+"\n")); err != nil {
		return err
	}
	b.Progress(fmt.Sprintf("installing Debian %s: %s", b.Recipe.Suite, strings.Join(b.Recipe.Packages, " ")))
	args := []string{
		"--mode=root", "--format=directory", "--variant=minbase", "--architectures=amd64",
		"--include=" + strings.Join(b.Recipe.Packages, ","),
		`--aptopt=APT::Install-Recommends "false"`,
		// The build directory may lie where the user _apt may not look.
		`--aptopt=APT::Sandbox::User "root"`,
		`--aptopt=Acquire::Retries "5"`,
		`--aptopt=Acquire::http::Timeout "60"`,
		`--aptopt=Acquire::Languages "none"`,
		// What an interrupted build leaves is thrown away; what is kept is synced as a whole.
		"--dpkgopt=force-unsafe-io",
		"--dpkgopt=path-exclude=/usr/share/doc/*",
		"--dpkgopt=path-exclude=/usr/share/man/*",
		"--dpkgopt=path-exclude=/usr/share/info/*",
		"--dpkgopt=path-exclude=/usr/share/locale/*",
		"--dpkgopt=path-exclude=/usr/share/lintian/*",
	}
	hook, err := b.Recipe.writeHook(work)
	if err != nil {
		return err
	}
	args = append(args, `--customize-hook=sh "$EPHEMERAL_CUSTOMIZE" "$1"`)
	if hook != "" {
		b.Progress(fmt.Sprintf("then adding %d files and running %d commands", len(b.Recipe.Files), len(b.Recipe.Commands)))
		args = append(args, `--customize-hook=sh "$EPHEMERAL_RECIPE" "$1"`)
	}
	args = append(args, b.Recipe.Suite, tree)
	if b.Mirror != "" {
		args = append(args, b.Mirror)
	}
	env := []string{
		"EPHEMERAL_CUSTOMIZE=" + script,
		"EPHEMERAL_RECIPE=" + hook,
		"SOURCE_DATE_EPOCH=" + strconv.FormatInt(fixedTime.Unix(), 10),
	}
	return b.program(ctx, env, "mmdebstrap", args...)
}

// takeKernel takes kernel image and modules out of the kernel's package.
func (b *builder) takeKernel(ctx context.Context, img, work string) (string, []module, error) {
	debs, err := filepath.Glob(filepath.Join(work, "*.deb"))
	if err != nil || len(debs) != 1 {
		return "", nil, fmt.Errorf("want one package of %s, have %d", b.Recipe.Kernel, len(debs))
	}
	b.Progress("unpacking " + strings.TrimSuffix(filepath.Base(debs[0]), ".deb"))
	out := filepath.Join(work, "kernel-package")
	if err := b.program(ctx, nil, "dpkg-deb", "--extract", debs[0], out); err != nil {
		return "", nil, err
	}
	name := strings.SplitN(strings.TrimSuffix(filepath.Base(debs[0]), ".deb"), "_", 3)
	if len(name) == 3 {
		line := name[0] + " " + strings.ReplaceAll(name[1], "%3a", ":") + "\n"
		if err := writeFile(filepath.Join(work, "packages-kernel"), []byte(line)); err != nil {
			return "", nil, err
		}
	}
	kernels, err := filepath.Glob(filepath.Join(out, "boot", "vmlinuz-*"))
	if err != nil || len(kernels) != 1 {
		return "", nil, fmt.Errorf("package %s holds %d kernels, want one", filepath.Base(debs[0]), len(kernels))
	}
	version := strings.TrimPrefix(filepath.Base(kernels[0]), "vmlinuz-")
	vmlinuz, err := os.ReadFile(kernels[0])
	if err != nil {
		return "", nil, fmt.Errorf("read kernel: %w", err)
	}
	if err := writeFile(filepath.Join(img, kernelFile), vmlinuz); err != nil {
		return "", nil, err
	}
	dir := filepath.Join(out, "usr", "lib", "modules", version)
	if _, err := os.Stat(dir); err != nil {
		dir = filepath.Join(out, "lib", "modules", version) // before Debian 13
	}
	tree, err := openModuleTree(dir)
	if err != nil {
		return "", nil, err
	}
	modules, err := tree.collect(b.Recipe.Modules)
	return version, modules, err
}

// readPackages reads the lists "packages*" in work: name and version a line.
func readPackages(work string) ([]Package, error) {
	lists, err := filepath.Glob(filepath.Join(work, "packages*"))
	if err != nil {
		return nil, err
	}
	var all []byte
	for _, list := range lists {
		b, err := os.ReadFile(list)
		if err != nil {
			return nil, fmt.Errorf("read list of packages: %w", err)
		}
		all = append(all, b...)
	}
	return parsePackages(all)
}

// emptyDevices removes the device nodes: a machine mounts devtmpfs.
func emptyDevices(tree string) error {
	dev := filepath.Join(tree, "dev")
	if err := removeTree(dev); err != nil {
		return fmt.Errorf("empty /dev of the root filesystem: %w", err)
	}
	if err := os.Mkdir(dev, 0o755); err != nil {
		return fmt.Errorf("empty /dev of the root filesystem: %w", err)
	}
	return nil
}

// program runs a program to its end. Its lines are shown as progress; an error has the last of them. When ctx ends the program
// and all its children are asked to stop, then killed; they are also when this process dies.
func (b *builder) program(ctx context.Context, env []string, name string, args ...string) error {
	// The signal at this process's death comes when the thread that started the program ends: prctl(2), PR_SET_PDEATHSIG.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	out := &lineWriter{line: func(s string) { b.Progress(name + ": " + s) }}
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = append(append(os.Environ(), "LC_ALL=C.UTF-8", "DEBIAN_FRONTEND=noninteractive"), env...)
	cmd.Stdout, cmd.Stderr = out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	cmd.Cancel = func() error { return unix.Kill(-cmd.Process.Pid, unix.SIGTERM) }
	cmd.WaitDelay = b.grace
	err := cmd.Run()
	if cmd.Process != nil {
		// What the program left behind; there is nothing when it ended well.
		if kerr := unix.Kill(-cmd.Process.Pid, unix.SIGKILL); kerr != nil && !errors.Is(kerr, unix.ESRCH) {
			err = errors.Join(err, fmt.Errorf("stop %s: %w", name, kerr))
		}
	}
	out.flush()
	if ctx.Err() != nil {
		return fmt.Errorf("%s: %w", name, context.Cause(ctx))
	}
	if err != nil {
		tail := out.tail()
		if strings.Contains(tail, unix.ENOSPC.Error()) || strings.Contains(tail, "No space left on device") {
			err = fmt.Errorf("%w: %w", ErrNoSpace, err)
		}
		return fmt.Errorf("%s: %w; its last words: %s", name, err, tail)
	}
	return nil
}

// lineWriter hands on whole lines and keeps the last of them.
type lineWriter struct {
	line func(string)
	buf  []byte
	last []string
}

// What a lineWriter keeps: lines, and bytes of one line.
const (
	keepLines = 12
	keepBytes = 400
)

func (w *lineWriter) Write(p []byte) (int, error) {
	w.buf = append(w.buf, p...)
	for {
		i := bytes.IndexAny(w.buf, "\r\n")
		if i < 0 {
			if len(w.buf) > keepBytes {
				w.flush()
			}
			return len(p), nil
		}
		w.emit(w.buf[:i])
		w.buf = w.buf[i+1:]
	}
}

func (w *lineWriter) flush() {
	w.emit(w.buf)
	w.buf = nil
}

func (w *lineWriter) emit(b []byte) {
	s := strings.TrimSpace(strings.ToValidUTF8(string(b[:min(len(b), keepBytes)]), "?"))
	if s == "" {
		return
	}
	w.last = append(w.last, s)
	if len(w.last) > keepLines {
		w.last = w.last[1:]
	}
	w.line(s)
}

func (w *lineWriter) tail() string { return strings.Join(w.last, " | ") }

// removeTree removes a directory, after what an interrupted build left mounted in it.
func removeTree(dir string) error {
	mounts, err := mountsBelow(dir)
	if err != nil {
		return err
	}
	for _, m := range mounts {
		if err := unix.Unmount(m, unix.MNT_DETACH); err != nil {
			return fmt.Errorf("unmount %s: %w", m, err)
		}
	}
	return os.RemoveAll(dir)
}

// mountsBelow lists the mount points in or at dir, the deepest first.
func mountsBelow(dir string) ([]string, error) {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("look for mounts in %s: %w", dir, err)
	}
	var out []string
	for line := range strings.Lines(string(b)) {
		fields := strings.Fields(line)
		if len(fields) < 5 {
			continue
		}
		point := unescapeMount(fields[4])
		if point == dir || strings.HasPrefix(point, dir+"/") {
			// Later mounts lie over or in earlier ones.
			out = append([]string{point}, out...)
		}
	}
	return out, nil
}

// unescapeMount undoes the octal escapes of proc_pid_mountinfo(5).
var unescapeMount = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace

func syncFile(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.Sync(); err != nil {
		return fmt.Errorf("write %s: %w", path, noSpace(err))
	}
	return nil
}
