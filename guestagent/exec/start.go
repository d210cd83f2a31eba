package exec

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// User is who a command runs as.
type User struct {
	UID, GID uint32
	Groups   []uint32 // supplementary
}

// Exit codes of a command that could not be started, as shells give them; POSIX, Shell Command Language 2.8.2.
const (
	codeNotExecutable = 126
	codeNotFound      = 127
)

func notStarted(code int, format string, args ...any) *Result {
	return &Result{Outcome: NotFound, Code: code, Detail: fmt.Sprintf(format, args...)}
}

// check finds the program and looks at the working directory, for errors that name what is wrong.
func check(spec *Spec) (program string, failed *Result) {
	if len(spec.Args) == 0 || spec.Args[0] == "" {
		return "", notStarted(codeNotFound, "no command")
	}
	if !filepath.IsAbs(spec.Dir) {
		return "", notStarted(codeNotFound, "working directory %q: not an absolute path", spec.Dir)
	}
	switch info, err := os.Stat(spec.Dir); {
	case err != nil:
		return "", notStarted(codeNotFound, "working directory %q: %v", spec.Dir, errno(err))
	case !info.IsDir():
		return "", notStarted(codeNotFound, "working directory %q: %v", spec.Dir, syscall.ENOTDIR)
	}
	program, err := lookup(spec.Args[0], spec)
	if err != nil {
		code := codeNotExecutable
		if errors.Is(err, os.ErrNotExist) {
			code = codeNotFound
		}
		return "", notStarted(code, "command %q: %v", spec.Args[0], errno(err))
	}
	return program, nil
}

// errno is the bare reason, for the path is named by the caller.
func errno(err error) error {
	var number syscall.Errno
	if errors.As(err, &number) {
		return number
	}
	return err
}

// lookup finds a program as execvp(3) does: in PATH unless the name has a slash.
func lookup(name string, spec *Spec) (string, error) {
	if strings.Contains(name, "/") {
		if !filepath.IsAbs(name) {
			name = filepath.Join(spec.Dir, name)
		}
		return name, executable(name)
	}
	result := error(syscall.ENOENT)
	for _, dir := range filepath.SplitList(variable(spec.Env, "PATH")) {
		if !filepath.IsAbs(dir) {
			dir = filepath.Join(spec.Dir, dir)
		}
		path := filepath.Join(dir, name)
		err := executable(path)
		if err == nil {
			return path, nil
		}
		if errors.Is(err, os.ErrPermission) {
			result = err
		}
	}
	return "", result
}

func executable(path string) error {
	info, err := os.Stat(path)
	switch {
	case err != nil:
		return err
	case info.IsDir():
		return syscall.EISDIR
	case info.Mode()&0o111 == 0:
		return syscall.EACCES
	}
	return nil
}

func variable(env []string, name string) string {
	for i := len(env) - 1; i >= 0; i-- {
		if value, ok := strings.CutPrefix(env[i], name+"="); ok {
			return value
		}
	}
	return ""
}

// fork starts the program as the leader of a new session inside the group.
func fork(group *cgroup, program string, child []*os.File, spec *Spec) (int, error) {
	fd, err := group.open()
	if err != nil {
		return 0, err
	}
	defer syscall.Close(fd)
	files := make([]uintptr, 0, len(child)+len(spec.Extra))
	for _, f := range child {
		files = append(files, f.Fd())
	}
	for _, f := range spec.Extra {
		files = append(files, f.Fd())
	}
	pid, err := syscall.ForkExec(program, spec.Args, &syscall.ProcAttr{
		Dir:   spec.Dir,
		Env:   spec.Env,
		Files: files,
		Sys: &syscall.SysProcAttr{
			Setsid:      true,
			UseCgroupFD: true,
			CgroupFD:    fd,
			Credential:  &syscall.Credential{Uid: spec.User.UID, Gid: spec.User.GID, Groups: spec.User.Groups},
		},
	})
	if err != nil {
		return 0, &forkError{err}
	}
	return pid, nil
}

// forkError is a failure of the child before it was the program, or of making it.
type forkError struct{ err error }

func (e *forkError) Error() string { return e.err.Error() }
func (e *forkError) Unwrap() error { return e.err }

// startFailure tells what the caller did wrong, which is a result, from what the machine lacks.
func startFailure(err error, program string, spec *Spec) (Result, error) {
	var fork *forkError
	if !errors.As(err, &fork) {
		return Result{}, fmt.Errorf("start command: %w", err)
	}
	switch fork.err {
	case syscall.EAGAIN, syscall.ENOMEM, syscall.EMFILE, syscall.ENFILE:
		return Result{}, fmt.Errorf("start command: %w: %w", ErrBusy, err)
	case syscall.ENOENT: // the program is there, so this is the interpreter that its first line names
		return *notStarted(codeNotFound, "command %q: its interpreter is missing", program), nil
	}
	return *notStarted(codeNotExecutable, "command %q in %q: %v", program, spec.Dir, fork.err), nil
}
