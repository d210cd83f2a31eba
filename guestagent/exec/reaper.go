package exec

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Reaper is the one place in the process that waits for children. PID 1 inherits every orphan of the machine, so it has
// to wait for any child; a second waiter, such as os/exec, would steal exit codes or lose its own.
type Reaper struct {
	mu       sync.Mutex // held while a child is made, so that it is known before its end is taken
	waiting  map[int]chan<- syscall.WaitStatus
	children chan struct{} // wakes the loop after a child was made
	stop     chan struct{}
	stopped  chan struct{}
}

// NewReaper starts to reap. There may be one in a process.
func NewReaper() *Reaper {
	r := &Reaper{
		waiting:  make(map[int]chan<- syscall.WaitStatus),
		children: make(chan struct{}, 1),
		stop:     make(chan struct{}),
		stopped:  make(chan struct{}),
	}
	go r.loop()
	return r
}

// Close ends the reaping. It waits for the children that are alive.
func (r *Reaper) Close() {
	close(r.stop)
	<-r.stopped
}

// Start makes a child with fork and returns its pid and the channel that gets its exit status.
func (r *Reaper) Start(fork func() (int, error)) (int, <-chan syscall.WaitStatus, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	pid, err := fork()
	if err != nil {
		return 0, nil, err
	}
	status := make(chan syscall.WaitStatus, 1)
	r.waiting[pid] = status
	select {
	case r.children <- struct{}{}:
	default:
	}
	return pid, status, nil
}

// Barrier returns when every child that was being made is made.
func (r *Reaper) Barrier() {
	r.mu.Lock()
	defer r.mu.Unlock()
}

// Kill sends SIGKILL to a child that Start made, unless its end was taken already and the pid may be another's.
func (r *Reaper) Kill(pid int) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, alive := r.waiting[pid]; !alive {
		return nil
	}
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		return fmt.Errorf("kill process %d: %w", pid, err)
	}
	return nil
}

func (r *Reaper) loop() {
	defer close(r.stopped)
	for {
		// Look without taking: whose end it is may not be known yet.
		var info unix.Siginfo
		err := unix.Waitid(unix.P_ALL, 0, &info, unix.WEXITED|unix.WNOWAIT, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil: // ECHILD. Orphans come from children, so there is nothing to wait for until one is made.
			select {
			case <-r.children:
			case <-r.stop:
				return
			}
		default:
			r.take()
		}
	}
}

// take reaps all that has ended and tells who waits for it.
func (r *Reaper) take() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG, nil)
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if err != nil || pid == 0 {
			return
		}
		if waiter, ours := r.waiting[pid]; ours {
			waiter <- status
			delete(r.waiting, pid)
		}
	}
}

// oomScore makes a child with an out-of-memory score of its own from its first instruction on: the score is inherited,
// and the agent has to have a lower one. Between the two writes the agent has the child's score, which costs it nothing
// as PID 1: the kernel never picks that, oom_unkillable_task() in mm/oom_kill.c.
type oomScore struct {
	agent, child string
}

func (s oomScore) around(fork func() (int, error)) (int, error) {
	if s.child == "" {
		return fork()
	}
	const file = "/proc/self/oom_score_adj"
	if err := os.WriteFile(file, []byte(s.child), 0); err != nil {
		return 0, fmt.Errorf("raise out-of-memory score: %w", err)
	}
	pid, err := fork()
	if rerr := os.WriteFile(file, []byte(s.agent), 0); rerr != nil && err == nil {
		_ = unix.Kill(pid, unix.SIGKILL) // not reaped yet: the caller holds the reaper
		return 0, fmt.Errorf("lower out-of-memory score: %w", rerr)
	}
	return pid, err
}
