package jail

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/ephemeral-run/ephemeral/vmm"
)

// Launch starts a program in the cell and returns when all walls stand and the program is about to begin. It sees c.Args[0], the
// system's shared libraries, c.ReadOnly, c.Writable (existing directories that UID may write to), c.Devices and, if c.Proc
// says so, a read-only /proc of its own processes. All paths must be reachable for everybody: directories above them need
// the x bit for others. Its environment is empty but for LANG and TMPDIR, its working directory the first of c.Writable. Of
// its output, standard output included, the first 64 KiB go to c.Stderr. When ctx ends before Launch returns, the program
// is killed; afterwards ctx means nothing.
func (c *Cell) Launch(ctx context.Context, command vmm.Command) (vmm.Process, error) {
	if err := c.begin(); err != nil {
		return nil, fmt.Errorf("launch in cell %s: %w", c.id, err)
	}
	defer c.launches.Done()
	p, err := c.launch(ctx, command)
	if err != nil {
		return nil, fmt.Errorf("launch in cell %s: %w", c.id, err)
	}
	return p, nil
}

func (c *Cell) launch(ctx context.Context, command vmm.Command) (*process, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	l, err := c.prepare(command)
	if err != nil {
		return nil, err
	}
	defer l.close()
	p, err := c.start(l)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = p.Kill() })
	err = c.confine(l, p)
	if stopped := stop(); !stopped {
		err = ctx.Err()
	}
	if err == nil {
		err = c.keep(p)
	}
	if err == nil {
		return p, nil
	}
	killed := p.Kill()
	return nil, errors.Join(err, killed, p.wait())
}

// launch is all that is open during one launch.
type launch struct {
	cmd   *exec.Cmd
	out   *output
	info  *os.File   // says that the program's process exists: end of file
	gate  *os.File   // a byte lets the program begin; end of file says that it does
	files []*os.File // closed at the end of the launch
}

func (l *launch) close() {
	for _, f := range l.files {
		_ = f.Close() // nothing was written to them
	}
}

// prepare makes the command line and opens all descriptors. The program's own files come first, so they are 3, 4, ...
func (c *Cell) prepare(command vmm.Command) (_ *launch, err error) {
	mounts, groups, err := c.view(command)
	if err != nil {
		return nil, err
	}
	l := &launch{out: newOutput(command.Stderr)}
	defer func() {
		if err != nil {
			l.close()
		}
	}()
	inherited := command.Files
	inherit := func(f *os.File) string {
		inherited = append(inherited[:len(inherited):len(inherited)], f)
		return strconv.Itoa(2 + len(inherited))
	}
	info, infoEnd, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	l.files = append(l.files, info, infoEnd)
	seccomp, err := c.jail.seccomp()
	if err != nil {
		return nil, err
	}
	l.files = append(l.files, seccomp)
	gate, gateEnd, err := socketPair()
	if err != nil {
		return nil, err
	}
	l.files = append(l.files, gate, gateEnd)
	l.info, l.gate = info, gate

	args := []string{
		fmt.Sprintf("--nofile=%d", max(c.jail.config.OpenFiles, command.OpenFiles)), "--core=0", "--msgqueue=0", "--rtprio=0",
		c.jail.bubblewrap,
		"--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup",
		"--as-pid-1", "--die-with-parent", "--hostname", "machine",
		"--info-fd", inherit(infoEnd), "--block-fd", inherit(gateEnd), "--seccomp", inherit(seccomp),
	}
	for _, m := range mounts {
		args = append(args, m.arguments()...)
	}
	directory := "/"
	if len(command.Writable) > 0 {
		directory = command.Writable[0]
	}
	if command.Proc {
		args = append(args, "--proc", "/proc", "--remount-ro", "/proc")
	}
	args = append(args, "--remount-ro", "/", "--chdir", directory, "--")

	l.cmd = exec.Command(c.jail.prlimit, append(args, command.Args...)...)
	l.cmd.Env = []string{"LANG=C", "TMPDIR=" + directory}
	l.cmd.Dir = "/"
	l.cmd.ExtraFiles = inherited
	l.cmd.Stdout, l.cmd.Stderr = l.out, l.out
	l.cmd.WaitDelay = endLimit
	l.cmd.SysProcAttr = &syscall.SysProcAttr{
		Setsid:     true,
		Pdeathsig:  syscall.SIGKILL,
		Cloneflags: syscall.CLONE_NEWPID,
		Credential: &syscall.Credential{Uid: uint32(c.uid), Gid: uint32(c.uid), Groups: groups},
	}
	return l, nil
}

// view checks a command and says what its program sees, and the groups that it needs for its devices.
func (c *Cell) view(command vmm.Command) ([]mount, []uint32, error) {
	if len(command.Args) == 0 || !filepath.IsAbs(command.Args[0]) {
		return nil, nil, errors.New("the program's path is not absolute")
	}
	program := command.Args[0]
	if info, err := os.Stat(program); err != nil {
		return nil, nil, fmt.Errorf("program: %w", err)
	} else if !info.Mode().IsRegular() || info.Mode()&0o001 == 0 {
		return nil, nil, fmt.Errorf("program %s: %w", program, fs.ErrPermission)
	}
	for i, f := range command.Files {
		if f == nil {
			return nil, nil, fmt.Errorf("file %d to inherit is nil", i)
		}
	}
	groups, err := deviceGroups(command.Devices)
	if err != nil {
		return nil, nil, err
	}
	mounts := append([]mount{{kind: readOnly, path: program}}, devices...)
	mounts = append(mounts, c.jail.library...)
	for _, path := range command.ReadOnly {
		mounts = append(mounts, mount{kind: readOnly, path: path})
	}
	for _, path := range command.Writable {
		mounts = append(mounts, mount{kind: writable, path: path})
	}
	for _, path := range command.Devices {
		mounts = append(mounts, mount{kind: device, path: path})
	}
	mounts, err = arrange(mounts)
	if err == nil {
		err = inspect(mounts)
	}
	return mounts, groups, err
}

// seccomp is the filter for bubblewrap to read. It is small enough to lie in a pipe.
func (j *Jail) seccomp() (*os.File, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	_, err = w.Write(j.filter)
	if err = errors.Join(err, w.Close()); err != nil {
		return nil, errors.Join(fmt.Errorf("hand over the seccomp filter: %w", err), r.Close())
	}
	return r, nil
}

// socketPair is a gate: it tells a peer that closed its end after reading from one that never read.
func socketPair() (*os.File, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	// Non-blocking, so that waiting for it occupies no thread.
	if err := unix.SetNonblock(fds[0], true); err != nil {
		return nil, nil, errors.Join(err, unix.Close(fds[0]), unix.Close(fds[1]))
	}
	return os.NewFile(uintptr(fds[0]), "gate"), os.NewFile(uintptr(fds[1]), "gate"), nil
}

// start forks bubblewrap on the thread in the network namespace, inside the cgroup.
func (c *Cell) start(l *launch) (*process, error) {
	err := c.netns.Do(func() error { return c.cgroup.start(l.cmd.SysProcAttr, l.cmd.Start) })
	if l.cmd.Process == nil {
		if err == nil {
			err = errors.New("process was not started")
		}
		return nil, err
	}
	p := newProcess(c, l)
	if err != nil { // it runs, but the thread could not leave the cgroup
		return nil, errors.Join(err, p.Kill(), p.wait())
	}
	return p, nil
}

// confine finds the program's process, sets what its jailed self could not, lets it begin and waits until it does.
func (c *Cell) confine(l *launch, p *process) error {
	// The ends of pipe and gate that the jail has are its alone: what ends in there is seen here.
	for _, f := range l.files {
		if f != l.info && f != l.gate {
			_ = f.Close()
		}
	}
	if _, err := io.Copy(io.Discard, io.LimitReader(l.info, 4096)); err != nil {
		return fmt.Errorf("wait for bubblewrap: %w", err)
	}
	pid, err := c.child(p.monitor)
	if err != nil {
		return p.failed(err)
	}
	p.pid = pid
	for _, pid := range []int{p.monitor, p.pid} {
		if err := c.score(pid); err != nil {
			return p.failed(err)
		}
	}
	if _, err := l.gate.Write([]byte{0}); err != nil {
		return p.failed(fmt.Errorf("let the program begin: %w", err))
	}
	// Closed with the byte unread (ECONNRESET): bubblewrap failed before it came to start the program.
	if _, err := l.gate.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		return p.failed(fmt.Errorf("set up the jail: %w", err))
	}
	return nil
}

// child is the program's process: the one in the cgroup whose parent is bubblewrap's first.
func (c *Cell) child(parent int) (int, error) {
	pids, err := c.cgroup.pids()
	if err != nil {
		return 0, fmt.Errorf("processes of the cgroup: %w", err)
	}
	for _, pid := range pids {
		if p, err := parentOf(pid); err == nil && p == parent {
			return pid, nil
		}
	}
	return 0, errors.New("bubblewrap made no process")
}

// parentOf reads the fourth field of /proc/pid/stat; the second, in parentheses, may hold anything.
func parentOf(pid int) (int, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	s := string(b)
	fields := strings.Fields(s[strings.LastIndexByte(s, ')')+1:])
	if len(fields) < 2 {
		return 0, fmt.Errorf("stat of process %d: %q", pid, s)
	}
	return strconv.Atoi(fields[1])
}

// score sets how early the kernel kills a process when the host is out of memory.
func (c *Cell) score(pid int) error {
	score := []byte(strconv.Itoa(c.jail.config.OOMScoreAdj))
	if err := os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", pid), score, 0); err != nil {
		return fmt.Errorf("set OOM score of process %d: %w", pid, err)
	}
	return nil
}
