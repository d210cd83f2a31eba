package server

import (
	"context"
	"errors"
	"io"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/ephemeral-run/ephemeral/guestagent/exec"
	"github.com/ephemeral-run/ephemeral/guestagent/proto"
)

// Rules of the credit protocol, agent.proto.
const (
	firstCredit    = 16
	maxCredit      = 1 << 20
	maxStdinChunk  = 32 << 10
	maxStdinQueued = 16
	stdinBatch     = 8 // messages of input that are acknowledged together
)

// maxArguments bounds arguments and environment of a command together, in bytes; the kernel allows a quarter of the
// stack limit, execve(2).
const maxArguments = 2 << 20

// Exec runs one command.
func (s *Server) Exec(ctx context.Context, stream proto.Agent_ExecServer) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	start := first.GetStart()
	if start == nil {
		return status.Error(codes.InvalidArgument, "the first request is not start")
	}
	spec, err := s.spec(start)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	call := &execCall{stream: stream, ctx: ctx, cancel: cancel, credit: firstCredit, stdin: make(chan []byte, maxStdinQueued)}
	call.more = sync.NewCond(&call.mu)
	stop := context.AfterFunc(ctx, call.wake)
	defer stop()
	spec.Output, spec.Stdin, spec.Taken = call.send, call.stdin, call.taken
	go call.receive()

	result, err := s.Runner.Run(ctx, spec)
	if err != nil {
		s.Log.Error("run command", "error", err)
		return failure(err)
	}
	if violation := call.violation(); violation != nil {
		return violation
	}
	return call.respond(&proto.ExecResponse{Response: &proto.ExecResponse_Exit{Exit: exitOf(result)}})
}

// spec validates a start.
func (s *Server) spec(start *proto.ExecStart) (exec.Spec, error) {
	scratch, _, err := s.ready()
	if err != nil && !start.Warming {
		return exec.Spec{}, err
	}
	if scratch == "" {
		scratch = s.TempDir
	}
	name := start.User
	if name == "" {
		name = workerName
	}
	account, known := s.Accounts[name]
	if !known {
		return exec.Spec{}, status.Errorf(codes.InvalidArgument, "user %.40q", name)
	}
	size := 0
	for _, text := range append(start.Args[:len(start.Args):len(start.Args)], start.Env...) {
		size += len(text) + 1
		if strings.ContainsRune(text, 0) {
			return exec.Spec{}, status.Error(codes.InvalidArgument, "NUL in arguments or environment")
		}
	}
	switch {
	case size > maxArguments:
		return exec.Spec{}, status.Errorf(codes.InvalidArgument, "arguments and environment of %d bytes, limit %d", size, maxArguments)
	case start.TimeoutNanos < 0 || start.OutputLimit < 0:
		return exec.Spec{}, status.Error(codes.InvalidArgument, "negative limit")
	}
	dir := start.Cwd
	if dir == "" {
		dir = scratch
	}
	return exec.Spec{
		Args: start.Args, Env: environment(account, start.Env), Dir: dir, User: account.User,
		Timeout: time.Duration(start.TimeoutNanos), OutputLimit: start.OutputLimit,
	}, nil
}

// environment is what a command finds: the account's defaults, then what the caller sets, of which the last of a name
// wins. An entry without "=" or without a name is dropped.
func environment(a Account, set []string) []string {
	defaults := []string{
		"HOME=" + a.Home, "USER=" + a.Name, "LOGNAME=" + a.Name, "SHELL=/bin/sh", "LANG=C.UTF-8",
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
	}
	values := make(map[string]string)
	var order []string
	for _, entry := range append(defaults, set...) {
		name, _, ok := strings.Cut(entry, "=")
		if !ok || name == "" {
			continue
		}
		if _, known := values[name]; !known {
			order = append(order, name)
		}
		values[name] = entry
	}
	env := make([]string, 0, len(order))
	for _, name := range order {
		env = append(env, values[name])
	}
	return env
}

func exitOf(r exec.Result) *proto.Exit {
	return &proto.Exit{
		Outcome: r.Outcome, Code: int32(r.Code), Detail: r.Detail, MemoryLimit: r.MemoryLimit,
		StdoutBytes: r.Stdout.Bytes, StderrBytes: r.Stderr.Bytes,
		StdoutTruncated: r.Stdout.Truncated, StderrTruncated: r.Stderr.Truncated, FullMounts: r.FullMounts,
	}
}

// execCall is the conversation about one command.
type execCall struct {
	stream proto.Agent_ExecServer
	ctx    context.Context
	cancel context.CancelFunc
	stdin  chan []byte

	mu     sync.Mutex // also serialises what is sent
	more   *sync.Cond // credit came, or ctx ended
	credit int
	owed   uint32 // messages of input that were taken and not acknowledged
	broken error  // what the caller did against the rules
}

// receive takes the caller's requests until the call ends.
func (c *execCall) receive() {
	open := true
	end := func() {
		if open {
			open = false
			close(c.stdin)
		}
	}
	defer end()
	for {
		request, err := c.stream.Recv()
		if errors.Is(err, io.EOF) { // the caller sends no more; it may still read
			return
		}
		if err != nil {
			c.cancel()
			return
		}
		switch r := request.Request.(type) {
		case *proto.ExecRequest_Credit:
			err = c.add(r.Credit)
		case *proto.ExecRequest_Stdin:
			err = c.queue(r.Stdin, open)
		case *proto.ExecRequest_StdinEof:
			if r.StdinEof {
				end()
			}
		default:
			err = status.Error(codes.InvalidArgument, "unexpected request")
		}
		if err != nil {
			c.violate(err)
			return
		}
	}
}

func (c *execCall) add(credit uint32) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if credit > maxCredit || c.credit+int(credit) > maxCredit {
		return status.Error(codes.InvalidArgument, "too much credit")
	}
	c.credit += int(credit)
	c.more.Broadcast()
	return nil
}

func (c *execCall) queue(chunk []byte, open bool) error {
	if !open {
		return status.Error(codes.InvalidArgument, "input after its end")
	}
	if len(chunk) > maxStdinChunk {
		return status.Errorf(codes.InvalidArgument, "input of %d bytes, limit %d", len(chunk), maxStdinChunk)
	}
	select {
	case c.stdin <- chunk:
		return nil
	default:
		return status.Error(codes.ResourceExhausted, "input without credit")
	}
}

func (c *execCall) violate(err error) {
	c.mu.Lock()
	c.broken = err
	c.mu.Unlock()
	c.cancel()
}

func (c *execCall) violation() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.broken
}

// send hands output to the caller when he has room for it. Without one any more it is dropped.
func (c *execCall) send(from exec.Stream, p []byte) {
	response := &proto.ExecResponse{Response: &proto.ExecResponse_Stdout{Stdout: p}}
	if from == exec.Stderr {
		response.Response = &proto.ExecResponse_Stderr{Stderr: p}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.credit == 0 && c.ctx.Err() == nil {
		c.more.Wait()
	}
	if c.ctx.Err() != nil {
		return
	}
	c.credit--
	if err := c.stream.Send(response); err != nil {
		c.cancel()
	}
}

// wake makes a waiting send look at ctx. The lock keeps the wake-up from falling between its look and its wait.
func (c *execCall) wake() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.more.Broadcast()
}

// taken acknowledges input, several messages at once: the caller has as much credit again until then.
func (c *execCall) taken() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.owed++; c.owed < stdinBatch {
		return
	}
	credit := c.owed
	c.owed = 0
	_ = c.stream.Send(&proto.ExecResponse{Response: &proto.ExecResponse_StdinCredit{StdinCredit: credit}})
}

func (c *execCall) respond(response *proto.ExecResponse) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.stream.Send(response)
}
