// Package vmmtest holds what tests of machines share: one conformance suite that every driver must pass, a plain
// launcher, a small client of the agent, and a bare hypervisor command line to compare speeds with.
package vmmtest

import (
	"context"
	"fmt"
	"os/exec"
	"runtime"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/ephemeral-run/ephemeral/vmm"
)

// Launcher starts programs without a jail: in a process group of their own, killed when this process ends. The zero
// value is ready to use.
type Launcher struct {
	mu      sync.Mutex
	running map[int]*process
}

var _ vmm.Launcher = (*Launcher)(nil)

// thread starts all programs: the kernel sends the death signal of a child when the thread that started it ends, so it
// has to be one that never does.
var thread = sync.OnceValue(func() chan<- func() {
	work := make(chan func())
	go func() {
		runtime.LockOSThread()
		for fn := range work {
			fn()
		}
	}()
	return work
})

// Launch starts the program.
func (l *Launcher) Launch(ctx context.Context, c vmm.Command) (vmm.Process, error) {
	if err := ctx.Err(); err != nil {
		return nil, context.Cause(ctx)
	}
	cmd := exec.Command(c.Args[0], c.Args[1:]...)
	cmd.ExtraFiles = c.Files
	if len(c.Writable) > 0 {
		cmd.Dir = c.Writable[0]
	}
	cmd.Stderr = c.Stderr
	cmd.SysProcAttr = &unix.SysProcAttr{Setpgid: true, Pdeathsig: unix.SIGKILL}
	started := make(chan error)
	thread() <- func() { started <- cmd.Start() }
	if err := <-started; err != nil {
		return nil, fmt.Errorf("launch: %w", err)
	}
	p := &process{cmd: cmd, done: make(chan struct{})}
	l.mu.Lock()
	if l.running == nil {
		l.running = make(map[int]*process)
	}
	l.running[p.Pid()] = p
	l.mu.Unlock()
	go func() {
		err := cmd.Wait()
		l.mu.Lock()
		delete(l.running, p.Pid())
		l.mu.Unlock()
		p.mu.Lock()
		p.ended = true
		p.mu.Unlock()
		p.err = err
		close(p.done)
	}()
	return p, nil
}

// Pids are the programs that have not ended.
func (l *Launcher) Pids() []int {
	l.mu.Lock()
	defer l.mu.Unlock()
	pids := make([]int, 0, len(l.running))
	for pid := range l.running {
		pids = append(pids, pid)
	}
	return pids
}

type process struct {
	cmd  *exec.Cmd
	done chan struct{}
	err  error // valid after done

	mu    sync.Mutex
	ended bool
}

func (p *process) Pid() int              { return p.cmd.Process.Pid }
func (p *process) Done() <-chan struct{} { return p.done }

func (p *process) Err() error {
	select {
	case <-p.done:
		return p.err
	default:
		return nil
	}
}

// Kill ends the program and all it started.
func (p *process) Kill() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended {
		return nil
	}
	if err := unix.Kill(-p.Pid(), unix.SIGKILL); err != nil && err != unix.ESRCH {
		return fmt.Errorf("kill process group %d: %w", p.Pid(), err)
	}
	return nil
}
