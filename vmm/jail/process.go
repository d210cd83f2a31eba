package jail

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// process is a launched program. What this package starts and waits for is bubblewrap's first process, the init of a pid
// namespace that holds the program's: the kernel reports its end only after all in there have ended.
type process struct {
	cmd     *exec.Cmd
	cell    *Cell
	out     *output
	monitor int // bubblewrap
	pid     int // the program
	killed  atomic.Bool
	done    chan struct{}
	err     error // set before done is closed
}

func newProcess(c *Cell, l *launch) *process {
	p := &process{cmd: l.cmd, cell: c, out: l.out, monitor: l.cmd.Process.Pid, done: make(chan struct{})}
	go func() {
		p.err = p.ended(p.cmd.Wait())
		close(p.done)
		c.drop(p)
	}()
	return p
}

func (p *process) Pid() int { return p.pid }

func (p *process) Done() <-chan struct{} { return p.done }

// Err is nil while the program runs and after exit code 0; ErrKilled after Kill or Close, ErrMemory after its cgroup's
// limit, else the exit code or signal with the last line it wrote.
func (p *process) Err() error {
	select {
	case <-p.done:
		return p.err
	default:
		return nil
	}
}

func (p *process) Kill() error {
	p.killed.Store(true)
	if err := p.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill process %d: %w", p.monitor, err)
	}
	return nil
}

// wait waits for a killed process, but not for ever.
func (p *process) wait() error {
	select {
	case <-p.done:
		return nil
	case <-time.After(endLimit):
		return fmt.Errorf("process %d does not end", p.monitor)
	}
}

// failed adds what the jail said to why a launch failed. The process may live on.
func (p *process) failed(err error) error {
	_ = p.Kill()
	if end := p.wait(); end != nil {
		return errors.Join(err, end)
	}
	if line := p.out.lastLine(); line != "" {
		return fmt.Errorf("%w: %q", err, line)
	}
	return err
}

// ended makes an error of how bubblewrap ended, which says with its exit code how the program did.
func (p *process) ended(err error) error {
	state := p.cmd.ProcessState
	if state == nil {
		return fmt.Errorf("wait for process %d: %w", p.monitor, err)
	}
	if state.Success() {
		return nil
	}
	if p.killed.Load() {
		return ErrKilled
	}
	if n, err := p.cell.cgroup.oomKills(); err == nil && n > 0 {
		return fmt.Errorf("%w: it may use %d MiB", ErrMemory, p.cell.limit)
	}
	how := state.String()
	if code := state.ExitCode(); code > 128 && code < 128+65 {
		how = "signal: " + syscall.Signal(code-128).String()
	}
	if line := p.out.lastLine(); line != "" {
		return fmt.Errorf("%s: %q", how, line)
	}
	return errors.New(how)
}

const (
	outputLimit = 64 << 10 // bytes passed on of what a program writes
	lineLimit   = 512      // bytes kept of its last line
)

// output takes what a program writes: it never blocks it and never fails, passes the beginning on and remembers the end.
type output struct {
	mu   sync.Mutex
	to   io.Writer
	left int
	tail []byte
}

func newOutput(to io.Writer) *output {
	if to == nil {
		to = io.Discard
	}
	return &output{to: to, left: outputLimit}
}

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.tail = append(o.tail, b[max(0, len(b)-lineLimit):]...)
	o.tail = o.tail[max(0, len(o.tail)-lineLimit):]
	if n := min(len(b), o.left); n > 0 {
		o.left -= n
		if _, err := o.to.Write(b[:n]); err != nil {
			o.left = 0
		}
	}
	return len(b), nil
}

func (o *output) lastLine() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	text := strings.TrimSpace(string(o.tail))
	return text[strings.LastIndexByte(text, '\n')+1:]
}
