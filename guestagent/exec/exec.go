// Package exec runs commands inside the machine: each in a session and a cgroup of its own, so that its end is the end of
// all it started, with output of exact bytes and an outcome that says what happened.
package exec

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// DefaultOutputLimit is what is kept of each stream when the caller sets no limit, in bytes.
const DefaultOutputLimit = 16 << 20

// The outcomes of a command.
const (
	Exited      = "exited"
	Signalled   = "signalled"
	TimedOut    = "timed_out"
	Killed      = "killed"
	NotFound    = "not_found" // it could not be started; Detail says why
	OutOfMemory = "out_of_memory"
)

// Config says where commands run.
type Config struct {
	Cgroup      string   // directory of the version 2 hierarchy to put commands under; created
	MemoryLimit int64    // bytes for all commands together, and for each; 0: none
	PidsLimit   int64    // processes and threads of one command; 0: none
	Mounts      []string // mount points that commands can fill
	// OOMScoreAgent and OOMScoreCommand are values for oom_score_adj, proc(5); empty: leave both as they are.
	OOMScoreAgent, OOMScoreCommand string
}

// Spec is a command to run.
type Spec struct {
	Args        []string // program, looked up in the PATH of Env, and its arguments
	Env         []string // KEY=VALUE
	Dir         string   // absolute
	User        User
	Timeout     time.Duration // 0: none
	Combined    bool          // standard error goes where standard output goes
	Output      Sink
	OutputLimit int64         // bytes of each stream that reach Output; 0: DefaultOutputLimit
	Stdin       <-chan []byte // closed at the end of input; nil: no input
	Taken       func()        // called for each chunk of Stdin that was written or given up
	Extra       []*os.File    // descriptors 3, 4, ... of the command
}

// Result is how a command ended.
type Result struct {
	Outcome     string
	Code        int // exit code, or 128+n for signal n
	Detail      string
	Stdout      Volume
	Stderr      Volume
	MemoryLimit int64 // bytes, when the kernel killed a process of it for want of memory
	// FullMounts are those of Config.Mounts that were seen without space left while it ran or when it ended.
	FullMounts []string
	Duration   time.Duration
}

// ErrBusy: the machine has no process or memory left to start a command with.
var ErrBusy = errors.New("no resources to start a command")

var errKilled = errors.New("killed before its start")

// Runner runs commands. Its methods are safe for concurrent use.
type Runner struct {
	config Config
	reaper *Reaper
	root   *cgroup
	next   atomic.Int64

	mu      sync.Mutex
	running map[*running]struct{}
	idle    []*cgroup // empty ones, to be used again
	killing int       // calls of KillAll at work; nothing starts meanwhile
	// generation changes when all cgroups were killed, those at rest included.
	generation int
}

// running is a command that was started. Whoever ends it says why first.
type running struct {
	reason atomic.Pointer[string]
}

func (r *running) because(reason string) { r.reason.CompareAndSwap(nil, &reason) }

// New makes the cgroup that holds all commands.
func New(c Config, reaper *Reaper) (*Runner, error) {
	parent := &cgroup{path: filepath.Dir(c.Cgroup)}
	if err := parent.delegate(); err != nil {
		return nil, fmt.Errorf("prepare cgroup of commands: %w", err)
	}
	root, err := makeCgroup(c.Cgroup, limits{memory: c.MemoryLimit})
	if err == nil {
		err = root.delegate()
	}
	if err != nil {
		return nil, fmt.Errorf("prepare cgroup of commands: %w", err)
	}
	return &Runner{config: c, reaper: reaper, root: root, running: make(map[*running]struct{})}, nil
}

// KillAll ends every command and returns how many there were when none of their processes is left.
func (r *Runner) KillAll() (int, error) {
	r.mu.Lock()
	r.killing++
	r.generation++
	count := len(r.running)
	for c := range r.running {
		c.because(Killed)
	}
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		r.killing--
		r.generation++
		r.mu.Unlock()
	}()
	r.reaper.Barrier() // a command being started is in its cgroup now, or will see that it was killed
	if err := r.root.empty(); err != nil {
		return count, fmt.Errorf("kill commands: %w", err)
	}
	return count, nil
}

// Run runs a command to its end, and returns when none of its processes is left. Ending ctx kills it. What the command
// itself did wrong, not to exist included, is a Result; an error is the machine's, ErrBusy among them.
func (r *Runner) Run(ctx context.Context, spec Spec) (Result, error) {
	if spec.OutputLimit <= 0 {
		spec.OutputLimit = DefaultOutputLimit
	}
	program, failed := check(&spec)
	if failed != nil {
		return *failed, nil
	}
	state := r.register()
	defer r.forget(state)
	group, err := r.takeGroup()
	if err != nil {
		return Result{}, err
	}
	result, err := r.runIn(ctx, group, program, spec, state)
	return result, errors.Join(err, r.giveGroup(group))
}

// takeGroup returns an empty cgroup, one that was used before if there is: to make and remove one takes milliseconds on
// an emulated machine.
func (r *Runner) takeGroup() (*cgroup, error) {
	r.mu.Lock()
	generation := r.generation
	var group *cgroup
	if last := len(r.idle) - 1; last >= 0 {
		group, r.idle = r.idle[last], r.idle[:last]
	}
	r.mu.Unlock()
	if group != nil {
		if group.generation == generation {
			return group, nil
		}
		if err := group.remove(); err != nil {
			return nil, err
		}
	}
	group, err := makeCgroup(filepath.Join(r.root.path, fmt.Sprintf("command-%d", r.next.Add(1))),
		limits{memory: r.config.MemoryLimit, pids: r.config.PidsLimit})
	if err == nil {
		group.generation = generation
	}
	return group, err
}

// giveGroup keeps a cgroup to be used again, or removes it. One in which processes were killed is not used again: in it
// the kernel may kill what is started later too, as it compares how often that cgroup and the parent's were killed
// (cgroup_post_fork in kernel/cgroup/cgroup.c, with CLONE_INTO_CGROUP).
func (r *Runner) giveGroup(group *cgroup) error {
	if group.killed {
		return group.remove()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.idle = append(r.idle, group)
	return nil
}

// Close removes the cgroups. No command may be running.
func (r *Runner) Close() error { return r.root.remove() }

func (r *Runner) runIn(ctx context.Context, group *cgroup, program string, spec Spec, state *running) (Result, error) {
	pipes, err := newPipes(&spec)
	if err != nil {
		return Result{}, err
	}
	defer pipes.close()
	killsBefore := group.oomKills()
	start := time.Now()
	pid, exited, err := r.reaper.Start(func() (int, error) {
		if state.reason.Load() != nil {
			return 0, errKilled
		}
		return oomScore{r.config.OOMScoreAgent, r.config.OOMScoreCommand}.around(func() (int, error) {
			return fork(group, program, pipes.child, &spec)
		})
	})
	pipes.closeChild()
	if errors.Is(err, errKilled) {
		return Result{Outcome: Killed, Code: 128 + int(syscall.SIGKILL)}, nil
	}
	if err != nil {
		return startFailure(err, program, &spec)
	}
	space := watchSpace(r.config.Mounts)
	p := startPumps(pipes, &spec, start)
	status := r.await(ctx, group, pid, exited, spec.Timeout, state)
	result := Result{Duration: time.Since(start), FullMounts: space.end()}
	p.grace()
	err = group.empty()
	p.finish()
	result.Stdout, result.Stderr = p.stdout.volume, p.stderr.volume
	r.explain(&result, status, group.oomKills()-killsBefore, state, p)
	return result, err
}

func (r *Runner) register() *running {
	r.mu.Lock()
	defer r.mu.Unlock()
	state := &running{}
	if r.killing > 0 {
		state.because(Killed)
	}
	r.running[state] = struct{}{}
	return state
}

func (r *Runner) forget(state *running) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.running, state)
}

// await waits for the command itself, and kills it with all its descendants at the end of its time or of ctx.
func (r *Runner) await(ctx context.Context, group *cgroup, pid int, exited <-chan syscall.WaitStatus, timeout time.Duration, state *running) syscall.WaitStatus {
	var expired <-chan time.Time
	if timeout > 0 {
		timer := time.NewTimer(timeout)
		defer timer.Stop()
		expired = timer.C
	}
	select {
	case status := <-exited:
		return status
	case <-expired:
		state.because(TimedOut)
	case <-ctx.Done():
		state.because(Killed)
	}
	if err := group.kill(); err != nil {
		_ = r.reaper.Kill(pid)
	}
	return <-exited
}

func (r *Runner) explain(result *Result, status syscall.WaitStatus, kills int64, state *running, p *pumps) {
	if kills > 0 {
		result.MemoryLimit = r.config.MemoryLimit
		result.Detail = fmt.Sprintf("out of memory: %d of its processes were killed at the limit of %d bytes", kills, r.config.MemoryLimit)
	}
	reason := state.reason.Load()
	switch {
	case !status.Signaled():
		result.Outcome, result.Code = Exited, status.ExitStatus()
		if kills > 0 && result.Code != 0 {
			result.Outcome = OutOfMemory
		}
	case reason != nil && status.Signal() == syscall.SIGKILL:
		result.Outcome, result.Code = *reason, 128+int(status.Signal())
	case kills > 0:
		result.Outcome, result.Code = OutOfMemory, 128+int(status.Signal())
	default:
		result.Outcome, result.Code = Signalled, 128+int(status.Signal())
		result.Detail = status.Signal().String()
	}
	if result.Detail == "" && p.inputBroken() {
		result.Detail = "standard input was closed before its end"
	}
}
