// Package server answers the host: it is the agent's side of the contract in guestagent/proto.
package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	pb "google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/ephemeral-run/ephemeral/guestagent/door"
	"github.com/ephemeral-run/ephemeral/guestagent/exec"
	"github.com/ephemeral-run/ephemeral/guestagent/files"
	"github.com/ephemeral-run/ephemeral/guestagent/prepare"
	"github.com/ephemeral-run/ephemeral/guestagent/proto"
)

// Account is a user that commands may run as.
type Account struct {
	exec.User
	Name string
	Home string
}

// Config is what a server acts on.
type Config struct {
	Version  string
	Runner   *exec.Runner
	System   prepare.System
	TempDir  string                                                   // where the scratch directory is made: /tmp
	Accounts map[string]Account                                       // "worker" and "root"
	Dial     func(ctx context.Context, port uint32) (net.Conn, error) // to the host
	// DoorAddress is where OpenDoor listens: address and port of the loopback. AddHost gives the address a name.
	DoorAddress string
	AddHost     func(address, name string) error
	PowerOff    func() error
	Log         *slog.Logger
}

// workerName is the user of everything that is not trusted.
const workerName = "worker"

// Server is the agent's service. Its state goes one way: fresh, prepared, and then a worker once.
type Server struct {
	Config

	mu        sync.Mutex
	preparing bool // Prepare was called
	scratch   string
	dir       *files.Dir
	worker    context.CancelCauseFunc // of the running worker
	workerEnd chan struct{}           // closed when it has ended; nil: never started
	door      *door.Door              // nil: not open
}

// New makes a server.
func New(c Config) *Server { return &Server{Config: c} }

// warm makes the protobuf library set up the messages of the contract. It else does so at the first use of each, which
// would be in every clone again.
func warm() error {
	name := proto.File_agent_proto.Package()
	var err error
	protoregistry.GlobalTypes.RangeMessages(func(m protoreflect.MessageType) bool {
		if m.Descriptor().ParentFile().Package() != name {
			return true
		}
		var data []byte
		if data, err = pb.Marshal(m.New().Interface()); err == nil {
			err = pb.Unmarshal(data, m.New().Interface())
		}
		return err == nil
	})
	return err
}

// Serve answers on the listener until ctx ends or the listener fails, then ends all calls.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	rpc, err := ttrpc.NewServer()
	if err != nil {
		return fmt.Errorf("make server: %w", err)
	}
	proto.RegisterAgentService(rpc, s)
	if err := warm(); err != nil {
		return fmt.Errorf("warm messages: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = rpc.Close() })
	defer stop()
	err = rpc.Serve(ctx, proto.WholeListener(l))
	_ = rpc.Close()
	if ctx.Err() != nil || errors.Is(err, ttrpc.ErrServerClosed) {
		return nil
	}
	return fmt.Errorf("serve: %w", err)
}

// Close releases the scratch directory and closes the door.
func (s *Server) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var errs []error
	if s.door != nil {
		errs = append(errs, s.door.Close())
		s.door = nil
	}
	if s.dir != nil {
		errs = append(errs, s.dir.Close())
		s.dir = nil
	}
	return errors.Join(errs...)
}

// Ping answers when the agent serves.
func (s *Server) Ping(context.Context, *proto.PingRequest) (*proto.PingResponse, error) {
	return &proto.PingResponse{Version: s.Version, ClockUnixNanos: time.Now().UnixNano()}, nil
}

// Prepare makes the machine differ from its siblings, once.
func (s *Server) Prepare(_ context.Context, r *proto.PrepareRequest) (*proto.PrepareResponse, error) {
	identity := prepare.Identity{
		Clock: time.Unix(0, r.ClockUnixNanos), Step: time.Duration(r.ClockStepNanos), Entropy: r.Entropy,
		Hostname: r.Hostname, MachineID: r.MachineId, MAC: r.Mac, Address: r.Address,
	}
	if err := identity.Check(); err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.preparing {
		return nil, status.Error(codes.FailedPrecondition, "prepared already")
	}
	s.preparing = true
	account := s.Accounts[workerName]
	scratch, reseeded, err := prepare.Prepare(s.System, identity, s.TempDir, int(account.UID), int(account.GID))
	if err != nil && !reseeded {
		s.Log.Error("not reseeded", "error", err)
		return &proto.PrepareResponse{ClockUnixNanos: time.Now().UnixNano()}, nil
	}
	if err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	dir, err := files.Open(scratch, int(account.UID), int(account.GID))
	if err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	s.dir, s.scratch = dir, scratch
	return &proto.PrepareResponse{Reseeded: true, Scratch: scratch, ClockUnixNanos: time.Now().UnixNano()}, nil
}

// SetClock sets the clock of a prepared machine.
func (s *Server) SetClock(_ context.Context, r *proto.SetClockRequest) (*proto.SetClockResponse, error) {
	if _, _, err := s.ready(); err != nil {
		return nil, err
	}
	err := prepare.SetClock(s.System, time.Unix(0, r.ClockUnixNanos), time.Duration(r.ClockStepNanos))
	if errors.Is(err, prepare.ErrClock) {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	if err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	return &proto.SetClockResponse{ClockUnixNanos: time.Now().UnixNano()}, nil
}

// ready returns the scratch directory once the machine is prepared.
func (s *Server) ready() (string, *files.Dir, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.dir == nil {
		return "", nil, status.Error(codes.FailedPrecondition, "not prepared")
	}
	return s.scratch, s.dir, nil
}

// killTimeout bounds how long Kill waits for the worker after its commands have ended.
const killTimeout = 10 * time.Second

// Kill ends the worker and every command, and answers when no process of theirs is left.
func (s *Server) Kill(ctx context.Context, _ *proto.KillRequest) (*proto.KillResponse, error) {
	s.mu.Lock()
	cancel, ended := s.worker, s.workerEnd
	s.mu.Unlock()
	if cancel != nil {
		cancel(errors.New("killed"))
	}
	killed, err := s.Runner.KillAll()
	if err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	if ended != nil {
		select {
		case <-ended:
		case <-time.After(killTimeout):
			return nil, status.Error(codes.Internal, "the worker does not end")
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return &proto.KillResponse{Killed: int64(killed)}, nil
}

// Shutdown powers the machine off.
func (s *Server) Shutdown(context.Context, *proto.ShutdownRequest) (*proto.ShutdownResponse, error) {
	if err := s.PowerOff(); err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	return &proto.ShutdownResponse{}, nil
}

// failure gives an error of files the code that says whose fault it is.
func failure(err error) error {
	code := codes.Internal
	switch {
	case errors.Is(err, files.ErrPath), errors.Is(err, files.ErrNotRegular):
		code = codes.InvalidArgument
	case errors.Is(err, files.ErrTooLarge):
		code = codes.OutOfRange
	case errors.Is(err, os.ErrNotExist):
		code = codes.NotFound
	case errors.Is(err, exec.ErrBusy):
		code = codes.ResourceExhausted
	case isFileFault(err):
		code = codes.InvalidArgument
	case isNoSpace(err):
		code = codes.ResourceExhausted
	}
	return status.Error(code, text(err.Error(), maxDetail))
}
