// Package guest is the host's client of the agent inside a machine. Everything the agent says is untrusted: sizes, types,
// states, numbers and rates are checked, and an agent that breaks the rules ends its own call and nothing else.
package guest

import (
	"context"
	"errors"
	"fmt"
	"net"

	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/ephemeral-run/ephemeral/guestagent/proto"
)

var (
	// ErrLost: the call broke, or the agent broke the rules, so nothing is known about its outcome.
	ErrLost = errors.New("connection to the agent lost")
	// ErrNotPrepared: the agent did not prove that the machine differs from its siblings. It must not be used.
	ErrNotPrepared = errors.New("machine not prepared")
	// errRules explains an ErrLost.
	errRules = errors.New("the agent broke the rules")
)

// RefusedError is the agent's refusal of a call, for example of an invalid path.
type RefusedError struct {
	Code   codes.Code
	Detail string // as the agent says; bounded
}

func (e *RefusedError) Error() string {
	return fmt.Sprintf("refused by the agent: %s: %q", e.Code, e.Detail)
}

const (
	// maxMessage bounds a message of the agent, in bytes. The largest is the end of a worker.
	maxMessage = 512 << 10
	maxDetail  = 4 << 10
)

// Dial opens a connection to a port of the machine.
type Dial func(ctx context.Context, port uint32) (net.Conn, error)

// Client calls the agent of one machine, each call over a connection of its own, so that a slow one holds up no other.
// Its methods are safe for concurrent use. They end with their context: with its cause as the error, and the agent kills
// what the call had started.
type Client struct{ dial Dial }

// Connect returns a client. It opens no connection yet.
func Connect(dial Dial) *Client { return &Client{dial} }

// call is one connection to the agent.
type call struct {
	agent  proto.AgentClient
	guard  *guard
	client *ttrpc.Client
}

// do opens a connection for fn and closes it when fn has returned or ctx has ended.
func (c *Client) do(ctx context.Context, what string, fn func(*call) error) error {
	k, err := c.open(ctx, what)
	if err != nil {
		return err
	}
	defer k.close()
	return k.do(ctx, what, fn)
}

// open opens a connection.
func (c *Client) open(ctx context.Context, what string) (*call, error) {
	conn, err := c.dial(ctx, proto.AgentPort)
	if err != nil {
		if ctx.Err() != nil {
			return nil, fmt.Errorf("%s: %w", what, context.Cause(ctx))
		}
		return nil, fmt.Errorf("%s: %w: %w", what, ErrLost, err)
	}
	guarded := newGuard(conn)
	client := ttrpc.NewClient(proto.Whole(guarded))
	return &call{agent: proto.NewAgentClient(client), guard: guarded, client: client}, nil
}

// do calls fn, and closes the connection when ctx ends meanwhile. Errors of fn get their meaning here.
func (k *call) do(ctx context.Context, what string, fn func(*call) error) error {
	stop := context.AfterFunc(ctx, func() { _ = k.client.Close() })
	err := fn(k)
	stop()
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", what, meaning(ctx, k.guard, err))
}

func (k *call) close() {
	_ = k.client.Close()
	_ = k.client.UserOnCloseWait(context.Background()) // its reader ends with the connection
}

// meaning tells the end of ctx, the agent's refusal and a broken call apart.
func meaning(ctx context.Context, g *guard, err error) error {
	var own *callerError
	switch {
	case errors.As(err, &own):
		return own.err
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case errors.Is(err, ErrLost), errors.Is(err, ErrNotPrepared):
		return err
	}
	if broken := g.violation(); broken != nil {
		return fmt.Errorf("%w: %w", ErrLost, broken)
	}
	if s, ok := status.FromError(err); ok && s.Code() != codes.OK {
		return &RefusedError{Code: s.Code(), Detail: clip(s.Message(), maxDetail)}
	}
	if line, ok := g.Conn.(interface{ SessionReason() error }); ok {
		if why := line.SessionReason(); why != nil {
			return fmt.Errorf("%w: %w: the machine's line ended: %v", ErrLost, err, why)
		}
	}
	return fmt.Errorf("%w: %w", ErrLost, err)
}

// callerError is a failure of what the caller handed in: a writer, a reader, a function.
type callerError struct{ err error }

func (e *callerError) Error() string { return e.err.Error() }

// broke makes an error of a broken rule.
func broke(format string, args ...any) error {
	return fmt.Errorf("%w: %w: %s", ErrLost, errRules, fmt.Sprintf(format, args...))
}

func clip(s string, limit int) string {
	if len(s) <= limit {
		return s
	}
	return s[:limit]
}

// Ping returns when the agent has answered.
func (c *Client) Ping(ctx context.Context) error {
	return c.do(ctx, "ping", func(k *call) error {
		k.guard.unary()
		_, err := k.agent.Ping(ctx, &proto.PingRequest{})
		return err
	})
}

// Kill ends every command and the worker, and returns when none of their processes is left.
func (c *Client) Kill(ctx context.Context) error {
	return c.do(ctx, "kill", func(k *call) error {
		k.guard.unary()
		_, err := k.agent.Kill(ctx, &proto.KillRequest{})
		return err
	})
}

// Shutdown asks the machine to power off. Whether it does is seen at the machine only.
func (c *Client) Shutdown(ctx context.Context) error {
	err := c.do(ctx, "shutdown", func(k *call) error {
		k.guard.unary()
		_, err := k.agent.Shutdown(ctx, &proto.ShutdownRequest{})
		return err
	})
	if errors.Is(err, ErrLost) { // it was faster than its answer
		return nil
	}
	return err
}
