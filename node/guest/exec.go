package guest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/ephemeral-run/ephemeral/guestagent/proto"
)

// The rules of agent.proto for one command.
const (
	firstCredit   = 16 // output messages on their way at the most
	creditBatch   = 8
	maxChunk      = 128 << 10 // bytes of output in a message
	stdinChunk    = 32 << 10
	stdinCredit   = 16
	defaultOutput = 16 << 20 // bytes of each stream when OutputLimit is 0
)

// Command is a command to run in the machine.
type Command struct {
	Args        []string
	Env         []string // KEY=VALUE, later wins
	Cwd         string   // absolute; empty: the scratch directory
	User        string   // "worker" when empty
	Timeout     time.Duration
	OutputLimit int64 // bytes of each stream that are handed on; 0: 16 MiB
	// Stdin is read until its end, nil for none. A read that blocks when the command has ended goes on alone, as with
	// os/exec.
	Stdin   io.Reader
	Warming bool // allowed before Prepare
}

// Exit is how a command ended.
type Exit struct {
	Outcome         string // exited, signalled, timed_out, killed, not_found, out_of_memory
	Code            int    // 128+n for signal n
	Detail          string
	StdoutBytes     int64 // written in all
	StderrBytes     int64
	StdoutTruncated bool
	StderrTruncated bool
	MemoryLimit     int64 // bytes, when the kernel killed a process of it for want of memory
	// FullMounts are mount points that had no space left while it ran or when it ended.
	FullMounts []string
}

var outcomes = map[string]bool{
	"exited": true, "signalled": true, "timed_out": true, "killed": true, "not_found": true, "out_of_memory": true,
}

// mounts are what an agent may call full.
var mounts = map[string]bool{"/": true, "/tmp": true, "/dev/shm": true}

// Exec runs a command and writes what it wrote, exactly, to stdout and stderr, either of which may be nil. An error says
// that the outcome is not known: ErrLost, a RefusedError, the cause of ctx, or that of a writer or of Stdin.
func (c *Client) Exec(ctx context.Context, command Command, stdout, stderr io.Writer) (Exit, error) {
	var exit Exit
	for _, text := range slices.Concat(command.Args, command.Env, []string{command.Cwd, command.User}) {
		if !utf8.ValidString(text) {
			return exit, fmt.Errorf("exec: %.100q is not UTF-8", text)
		}
	}
	err := c.do(ctx, "exec", func(k *call) error {
		k.guard.streaming(firstCredit + 2) // the exit and the end of the stream
		stream, err := k.agent.Exec(ctx)
		if err != nil {
			return err
		}
		x := &execution{stream: stream, guard: k.guard, stdout: output{w: stdout}, stderr: output{w: stderr}, window: make(chan struct{}, stdinCredit), ended: make(chan struct{})}
		x.limit = command.OutputLimit
		if x.limit <= 0 {
			x.limit = defaultOutput
		}
		if err := x.send(&proto.ExecRequest{Request: &proto.ExecRequest_Start{Start: &proto.ExecStart{
			Args: command.Args, Env: command.Env, Cwd: command.Cwd, User: command.User,
			TimeoutNanos: int64(command.Timeout), OutputLimit: x.limit, Warming: command.Warming,
		}}}); err != nil {
			return err
		}
		go x.feed(command.Stdin)
		defer close(x.ended)
		got, err := x.receive()
		if err != nil {
			if cause := x.inputError(); cause != nil {
				return &callerError{cause}
			}
			return err
		}
		exit = got
		return nil
	})
	return exit, err
}

// execution is the conversation about one command.
type execution struct {
	stream proto.Agent_ExecClient
	guard  *guard
	limit  int64
	stdout output
	stderr output
	owed   uint32        // credit for messages that were consumed
	window chan struct{} // one token a stdin message on its way
	ended  chan struct{}

	sending sync.Mutex // of the stream
	mu      sync.Mutex
	input   error
}

// output is one stream of a command.
type output struct {
	w     io.Writer
	bytes int64
}

func (x *execution) send(r *proto.ExecRequest) error {
	x.sending.Lock()
	defer x.sending.Unlock()
	return x.stream.Send(r)
}

func (x *execution) receive() (Exit, error) {
	for {
		response, err := x.stream.Recv()
		if errors.Is(err, io.EOF) {
			return Exit{}, broke("no exit at the end of the call")
		}
		if err != nil {
			return Exit{}, err
		}
		switch r := response.Response.(type) {
		case *proto.ExecResponse_Stdout:
			err = x.take(&x.stdout, r.Stdout)
		case *proto.ExecResponse_Stderr:
			err = x.take(&x.stderr, r.Stderr)
		case *proto.ExecResponse_StdinCredit:
			err = x.acknowledge(r.StdinCredit)
		case *proto.ExecResponse_Exit:
			return x.exit(r.Exit)
		default:
			err = broke("unknown response")
		}
		if err != nil {
			return Exit{}, err
		}
	}
}

// take hands output on and gives the agent credit for more.
func (x *execution) take(o *output, chunk []byte) error {
	if len(chunk) == 0 || len(chunk) > maxChunk {
		return broke("output of %d bytes, want 1 to %d", len(chunk), maxChunk)
	}
	if o.bytes += int64(len(chunk)); o.bytes > x.limit {
		return broke("more output than the limit of %d bytes", x.limit)
	}
	if o.w != nil {
		if _, err := o.w.Write(chunk); err != nil {
			return &callerError{fmt.Errorf("hand on output: %w", err)}
		}
	}
	if x.owed++; x.owed < creditBatch {
		return nil
	}
	credit := x.owed
	x.owed = 0
	x.guard.allow(int64(credit))
	return x.send(&proto.ExecRequest{Request: &proto.ExecRequest_Credit{Credit: credit}})
}

func (x *execution) acknowledge(n uint32) error {
	for range min(n, stdinCredit+1) {
		select {
		case <-x.window:
		default:
			return broke("credit for input that was not sent")
		}
	}
	if n == 0 || n > stdinCredit {
		return broke("input credit of %d", n)
	}
	return nil
}

// exit checks the numbers of the end against what was seen.
func (x *execution) exit(e *proto.Exit) (Exit, error) {
	exit, err := checkExit(e)
	if err != nil {
		return Exit{}, err
	}
	for _, s := range []struct {
		name            string
		written, handed int64
		truncated       bool
	}{
		{"stdout", exit.StdoutBytes, x.stdout.bytes, exit.StdoutTruncated},
		{"stderr", exit.StderrBytes, x.stderr.bytes, exit.StderrTruncated},
	} {
		if s.truncated && s.written <= s.handed || !s.truncated && s.written != s.handed {
			return Exit{}, broke("%s: %d bytes written, %d received, truncated %v", s.name, s.written, s.handed, s.truncated)
		}
	}
	return exit, nil
}

// checkExit says whether an exit is one that can be.
func checkExit(e *proto.Exit) (Exit, error) {
	switch {
	case e == nil:
		return Exit{}, broke("empty exit")
	case !outcomes[e.Outcome]:
		return Exit{}, broke("outcome %.40q", e.Outcome)
	case e.Code < 0 || e.Code > 255:
		return Exit{}, broke("exit code %d", e.Code)
	case e.Outcome != "exited" && e.Code == 0:
		return Exit{}, broke("outcome %s with exit code 0", e.Outcome)
	case len(e.Detail) > maxDetail:
		return Exit{}, broke("detail of %d bytes", len(e.Detail))
	case e.StdoutBytes < 0 || e.StderrBytes < 0 || e.MemoryLimit < 0:
		return Exit{}, broke("negative count")
	case len(e.FullMounts) > len(mounts):
		return Exit{}, broke("%d full mounts", len(e.FullMounts))
	}
	for i, mount := range e.FullMounts {
		if !mounts[mount] || slices.Contains(e.FullMounts[:i], mount) {
			return Exit{}, broke("full mount %.40q", mount)
		}
	}
	return Exit{
		Outcome: e.Outcome, Code: int(e.Code), Detail: e.Detail, MemoryLimit: e.MemoryLimit,
		StdoutBytes: e.StdoutBytes, StderrBytes: e.StderrBytes,
		StdoutTruncated: e.StdoutTruncated, StderrTruncated: e.StderrTruncated, FullMounts: e.FullMounts,
	}, nil
}

// feed sends the input, each message when the agent is ready for it. A failed send shows in receive.
func (x *execution) feed(r io.Reader) {
	if r != nil {
		buffer := make([]byte, stdinChunk)
		for {
			n, err := r.Read(buffer)
			if n > 0 && !x.sendInput(buffer[:n]) {
				return
			}
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				x.fail(fmt.Errorf("read standard input: %w", err))
				return
			}
		}
	}
	_ = x.send(&proto.ExecRequest{Request: &proto.ExecRequest_StdinEof{StdinEof: true}})
}

func (x *execution) sendInput(chunk []byte) bool {
	select {
	case x.window <- struct{}{}:
	case <-x.ended:
		return false
	}
	x.guard.allow(1) // its acknowledgement
	return x.send(&proto.ExecRequest{Request: &proto.ExecRequest_Stdin{Stdin: chunk}}) == nil
}

// fail ends the call: a command with half of its input would do the wrong thing.
func (x *execution) fail(err error) {
	x.mu.Lock()
	x.input = err
	x.mu.Unlock()
	_ = x.guard.Close()
}

func (x *execution) inputError() error {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.input
}
