package kvmbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// stopGrace is what a command gets to clean up after an interrupt, before it is killed.
const stopGrace = 30 * time.Second

// host is this host as a place.
type host struct{ carry map[string]string }

func (h *host) Describe() string        { return "this host" }
func (h *host) Boxed() bool             { return false }
func (h *host) Path(name string) string { return h.carry[name] }
func (h *host) Close() error            { return nil }

// Run starts the command in a process group of its own.
func (h *host) Run(ctx context.Context, c Command) (int, error) {
	// The signal at this process's death comes when the thread that started the program ends: prctl(2), PR_SET_PDEATHSIG.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd := exec.CommandContext(ctx, c.Args[0], c.Args[1:]...)
	cmd.Env = append(os.Environ(), c.Env...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = c.Dir, c.Stdout, c.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	cmd.Cancel = func() error { return unix.Kill(-cmd.Process.Pid, unix.SIGTERM) }
	cmd.WaitDelay = stopGrace
	err := cmd.Run()
	if cmd.Process != nil {
		// What it left behind; there is nothing when it ended well.
		if kerr := unix.Kill(-cmd.Process.Pid, unix.SIGKILL); kerr != nil && !errors.Is(kerr, unix.ESRCH) {
			err = errors.Join(err, kerr)
		}
	}
	if ctx.Err() != nil {
		return 0, fmt.Errorf("run %s: %w", c.Args[0], context.Cause(ctx))
	}
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		if status, ok := exit.Sys().(syscall.WaitStatus); ok && status.Signaled() {
			return 128 + int(status.Signal()), nil
		}
		return exit.ExitCode(), nil
	}
	if err != nil {
		return 0, fmt.Errorf("run %s: %w", c.Args[0], err)
	}
	return 0, nil
}

func (h *host) ReadFile(_ context.Context, path string, limit int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(b)) > limit {
		err = fmt.Errorf("%s is longer than %d bytes", path, limit)
	}
	return b, err
}
