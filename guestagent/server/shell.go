package server

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ephemeral-run/ephemeral/guestagent/exec"
	"github.com/ephemeral-run/ephemeral/guestagent/files"
	"github.com/ephemeral-run/ephemeral/guestagent/worker"
)

// shellOutput is what is kept of a command's output, in bytes.
const shellOutput = 64 << 10

// keepDirectory runs $1 and tells on descriptor 3 where it ended, also when it ended by `exit`. The shift takes the
// command's own text out of its arguments.
const keepDirectory = `trap '{ pwd -P >&3; } 2>/dev/null' EXIT; eval "shift; $1"`

// execute runs one command in a shell. The working directory is kept between commands, nothing else: each has a shell,
// a session and a cgroup of its own.
func (sh *shell) execute(ctx context.Context, command string, timeout time.Duration) (exec.Result, []byte) {
	if strings.ContainsRune(command, 0) {
		return exec.Result{Outcome: exec.NotFound, Code: 126, Detail: "NUL in the command"}, nil
	}
	if info, err := os.Stat(sh.dir); err != nil || !info.IsDir() {
		sh.dir = sh.scratch // it was removed
	}
	program := "/bin/bash"
	if _, err := os.Stat(program); err != nil {
		program = "/bin/sh"
	}
	ours, childs, err := directoryPipe()
	if err != nil {
		return sh.failed(err)
	}
	defer ours.Close()
	var output []byte
	result, err := sh.server.Runner.Run(ctx, exec.Spec{
		Args: []string{program, "-c", keepDirectory, filepath.Base(program), command},
		Env:  environment(sh.account, nil), Dir: sh.dir, User: sh.account.User, Timeout: timeout,
		Combined: true, OutputLimit: shellOutput, Extra: []*os.File{childs},
		Output: func(_ exec.Stream, p []byte) { output = append(output, p...) },
	})
	_ = childs.Close()
	if err != nil {
		return sh.failed(err)
	}
	if dir := readDirectory(ours); dir != "" {
		sh.dir = dir
	}
	return result, output
}

// failed is a command that the machine could not run.
func (sh *shell) failed(err error) (exec.Result, []byte) {
	sh.server.Log.Error("run command", "error", err)
	return exec.Result{Outcome: exec.Killed, Code: 137, Detail: text(err.Error(), maxDetail)}, nil
}

// directoryPipe makes a pipe that is read once, after the command has ended, so that nobody waits for its writers.
func directoryPipe() (ours, childs *os.File, err error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		return nil, nil, err
	}
	return os.NewFile(uintptr(fds[0]), "directory"), os.NewFile(uintptr(fds[1]), "directory"), nil
}

// readDirectory returns the directory told last, if it is one. The command may have written anything.
func readDirectory(pipe *os.File) string {
	data := make([]byte, 2*files.MaxPath)
	if err := pipe.SetReadDeadline(time.Now().Add(time.Second)); err != nil {
		return ""
	}
	n, _ := pipe.Read(data)
	lines := strings.Split(strings.TrimSuffix(string(data[:n]), "\n"), "\n")
	dir := lines[len(lines)-1]
	if !filepath.IsAbs(dir) || len(dir) > files.MaxPath || strings.ContainsRune(dir, 0) {
		return ""
	}
	if info, err := os.Stat(dir); err != nil || !info.IsDir() {
		return ""
	}
	return dir
}

// path is where a file tool's path leads: relative ones are below where the last command ended.
func (sh *shell) path(path string) string {
	if filepath.IsAbs(path) {
		return path
	}
	sh.mu.Lock()
	defer sh.mu.Unlock()
	return filepath.Join(sh.dir, path)
}

func (sh *shell) user() files.User {
	return files.User{UID: sh.account.UID, GID: sh.account.GID, Groups: sh.account.Groups}
}

func (sh *shell) readFile(_ context.Context, path string, offset int64, limit int) (worker.FilePart, error) {
	data, size, err := sh.user().Read(sh.path(path), offset, limit)
	return worker.FilePart{Data: data, Size: size}, err
}

func (sh *shell) writeFile(_ context.Context, path string, content []byte, add bool) error {
	return sh.user().Write(sh.path(path), content, add)
}
