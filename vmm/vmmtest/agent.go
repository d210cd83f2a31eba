package vmmtest

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/containerd/ttrpc"

	"github.com/ephemeral-run/ephemeral/guestagent/proto"
)

// Dial connects to a port of a guest; vmm.Machine has one.
type Dial func(ctx context.Context, port uint32) (net.Conn, error)

// Agent calls the agent of a machine, each call over a connection of its own. It believes what the agent says, as only a
// test may.
type Agent struct{ dial Dial }

// NewAgent makes a client.
func NewAgent(dial Dial) *Agent { return &Agent{dial} }

// call runs fn with a fresh client, whose end is the end of ctx at the latest.
func (a *Agent) call(ctx context.Context, fn func(proto.AgentClient) error) error {
	conn, err := a.dial(ctx, proto.AgentPort)
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	client := ttrpc.NewClient(proto.Whole(conn))
	defer func() {
		_ = client.Close()
		_ = conn.Close()
	}()
	return fn(proto.NewAgentClient(client))
}

// Ping returns when the agent has answered.
func (a *Agent) Ping(ctx context.Context) error {
	return a.call(ctx, func(c proto.AgentClient) error {
		_, err := c.Ping(ctx, &proto.PingRequest{})
		return err
	})
}

// Prepare makes the guest ready for anything but warming commands.
func (a *Agent) Prepare(ctx context.Context) error {
	var random [80]byte
	if _, err := rand.Read(random[:]); err != nil {
		return err
	}
	return a.call(ctx, func(c proto.AgentClient) error {
		got, err := c.Prepare(ctx, &proto.PrepareRequest{
			ClockUnixNanos: time.Now().UnixNano(), Entropy: random[:64], Hostname: "test", MachineId: fmt.Sprintf("%x", random[64:]),
		})
		if err == nil && !got.GetReseeded() {
			err = errors.New("the agent did not reseed")
		}
		return err
	})
}

// Shutdown powers the guest off.
func (a *Agent) Shutdown(ctx context.Context) error {
	return a.call(ctx, func(c proto.AgentClient) error {
		_, err := c.Shutdown(ctx, &proto.ShutdownRequest{})
		return err
	})
}

// StartWorker runs the worker for a prompt and returns its last event.
func (a *Agent) StartWorker(ctx context.Context, r *proto.StartWorkerRequest) (*proto.Finished, error) {
	var finished *proto.Finished
	err := a.call(ctx, func(c proto.AgentClient) error {
		stream, err := c.StartWorker(ctx, r)
		if err != nil {
			return err
		}
		for finished == nil {
			got, err := stream.Recv()
			if err != nil {
				return err
			}
			finished = got.GetFinished()
		}
		return nil
	})
	return finished, err
}

// Credits of a command's streams, in messages.
const (
	firstCredit = 16
	moreCredit  = 8
	stdinChunk  = 32 << 10
)

// Run executes a command as root, allowed before Prepare, with stdin (may be nil) as its input. It writes the output to
// stdout and fails unless the command exits with 0.
func (a *Agent) Run(ctx context.Context, stdin io.Reader, stdout io.Writer, args ...string) error {
	var stderr bytes.Buffer
	var exit *proto.Exit
	err := a.call(ctx, func(c proto.AgentClient) error {
		stream, err := c.Exec(ctx)
		if err != nil {
			return err
		}
		start := &proto.ExecStart{Args: args, User: "root", Warming: true, Cwd: "/", OutputLimit: 1 << 30}
		if err := stream.Send(&proto.ExecRequest{Request: &proto.ExecRequest_Start{Start: start}}); err != nil {
			return err
		}
		credit := make(chan uint32, 64)
		sent := make(chan error, 1)
		go func() { sent <- sendInput(ctx, stream, stdin, credit) }()
		exit, err = receiveOutput(stream, stdout, &stderr, credit)
		close(credit)
		if serr := <-sent; err == nil && stdin != nil {
			err = serr
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("run %q: %w", args, err)
	}
	if exit.GetOutcome() != "exited" || exit.GetCode() != 0 {
		return fmt.Errorf("run %q: %s %d %s: %s", args, exit.GetOutcome(), exit.GetCode(), exit.GetDetail(), stderr.Bytes())
	}
	return nil
}

// receiveOutput reads to the exit, giving credit for what it has read.
func receiveOutput(stream proto.Agent_ExecClient, stdout, stderr io.Writer, credit chan<- uint32) (*proto.Exit, error) {
	read := uint32(0)
	for {
		got, err := stream.Recv()
		if err != nil {
			return nil, err
		}
		if exit := got.GetExit(); exit != nil {
			return exit, nil
		}
		if more := got.GetStdinCredit(); more > 0 {
			select {
			case credit <- more:
			default:
				return nil, errors.New("the agent gives credit that nobody uses")
			}
			continue
		}
		if _, err := stdout.Write(got.GetStdout()); err != nil {
			return nil, err
		}
		if _, err := stderr.Write(got.GetStderr()); err != nil {
			return nil, err
		}
		if read++; read%moreCredit == 0 {
			if err := stream.Send(&proto.ExecRequest{Request: &proto.ExecRequest_Credit{Credit: moreCredit}}); err != nil {
				return nil, err
			}
		}
	}
}

// sendInput sends all of stdin as far as there is credit, then its end. It ends early when credit is closed.
func sendInput(ctx context.Context, stream proto.Agent_ExecClient, stdin io.Reader, credit <-chan uint32) error {
	left := uint32(firstCredit)
	for stdin != nil {
		chunk := make([]byte, stdinChunk)
		n, err := io.ReadFull(stdin, chunk)
		if n > 0 {
			for left == 0 {
				select {
				case more, open := <-credit:
					if !open {
						return errors.New("the command ended before its input")
					}
					left += more
				case <-ctx.Done():
					return context.Cause(ctx)
				}
			}
			left--
			if err := stream.Send(&proto.ExecRequest{Request: &proto.ExecRequest_Stdin{Stdin: chunk[:n]}}); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			break
		}
		if err != nil {
			return err
		}
	}
	return stream.Send(&proto.ExecRequest{Request: &proto.ExecRequest_StdinEof{StdinEof: true}})
}
