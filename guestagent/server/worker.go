package server

import (
	"context"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/ephemeral-run/ephemeral/guestagent/exec"
	"github.com/ephemeral-run/ephemeral/guestagent/proto"
	"github.com/ephemeral-run/ephemeral/guestagent/worker"
)

// Bounds of what the worker is asked and what it reports, in bytes and numbers.
const (
	maxPrompt       = 1 << 20
	maxName         = 256
	maxConnections  = 64
	maxSteps        = 1000
	maxFinalOutput  = 256 << 10
	maxDetail       = 4 << 10
	maxEventCommand = 64 << 10
)

// The connections to the broker.
const (
	brokerConns = 8
	brokerIdle  = 30 * time.Second
)

// StartWorker runs the worker, once in a machine's life, and reports its commands and its end.
func (s *Server) StartWorker(ctx context.Context, r *proto.StartWorkerRequest, stream proto.Agent_StartWorkerServer) error {
	scratch, _, err := s.ready()
	if err != nil {
		return err
	}
	if err := checkWorker(r); err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	ended, err := s.claimWorker(cancel)
	if err != nil {
		return err
	}
	defer close(ended)

	transport := s.brokerTransport(brokerConns)
	defer transport.CloseIdleConnections()
	sh := &shell{server: s, account: s.Accounts[workerName], scratch: scratch, dir: scratch, report: func(e *proto.ShellEvent) error {
		return stream.Send(&proto.WorkerEvent{Event: &proto.WorkerEvent_Shell{Shell: e}})
	}}
	config := worker.Config{
		Prompt: r.Prompt, Model: r.Model, Shell: r.Shell, Files: r.Files, Web: r.Web, Door: r.Door,
		Connections: r.Connections, MaxSteps: int(r.MaxSteps),
		HTTP: &http.Client{Transport: transport}, Exec: sh.run, ReadFile: sh.readFile, WriteFile: sh.writeFile,
	}
	if r.WallNanos > 0 {
		config.Deadline = time.Now().Add(time.Duration(r.WallNanos))
	}
	result := worker.Run(ctx, config)
	sh.wait()
	return stream.Send(&proto.WorkerEvent{Event: &proto.WorkerEvent_Finished{Finished: &proto.Finished{
		Ok: result.OK, Output: text(result.Output, maxFinalOutput),
		ErrorCode: text(result.ErrorCode, maxName), ErrorDetail: text(result.ErrorDetail, maxDetail),
	}}})
}

// brokerTransport reaches the broker, whatever the address of a request.
func (s *Server) brokerTransport(conns int) *http.Transport {
	return &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return s.Dial(ctx, proto.BrokerPort)
		},
		MaxConnsPerHost:    conns,
		IdleConnTimeout:    brokerIdle,
		DisableCompression: true,
	}
}

// Conclude ends the worker with what it has done so far. Without a worker there is nothing to end.
func (s *Server) Conclude(_ context.Context, r *proto.ConcludeRequest) (*proto.ConcludeResponse, error) {
	if r.ErrorCode != worker.CodeBudget && r.ErrorCode != worker.CodeTime {
		return nil, status.Errorf(codes.InvalidArgument, "error code %.40q", r.ErrorCode)
	}
	s.mu.Lock()
	cancel := s.worker
	s.mu.Unlock()
	if cancel != nil {
		cancel(&worker.EndError{Code: r.ErrorCode})
	}
	return &proto.ConcludeResponse{}, nil
}

func (s *Server) claimWorker(cancel context.CancelCauseFunc) (ended chan struct{}, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.workerEnd != nil {
		return nil, status.Error(codes.FailedPrecondition, "the worker was started already")
	}
	s.worker, s.workerEnd = cancel, make(chan struct{})
	return s.workerEnd, nil
}

func checkWorker(r *proto.StartWorkerRequest) error {
	switch {
	case r.Prompt == "" || len(r.Prompt) > maxPrompt:
		return status.Errorf(codes.InvalidArgument, "prompt of %d bytes, want 1 to %d", len(r.Prompt), maxPrompt)
	case r.Model == "" || len(r.Model) > maxName:
		return status.Error(codes.InvalidArgument, "model id is empty or too long")
	case len(r.Connections) > maxConnections:
		return status.Errorf(codes.InvalidArgument, "%d connections, limit %d", len(r.Connections), maxConnections)
	case r.WallNanos < 0:
		return status.Error(codes.InvalidArgument, "negative time limit")
	case r.MaxSteps < 0 || r.MaxSteps > maxSteps:
		return status.Errorf(codes.InvalidArgument, "%d steps, limit %d", r.MaxSteps, maxSteps)
	}
	return nil
}

// text cuts a string to limit bytes between characters, and makes it what a protobuf string may be.
func text(s string, limit int) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if len(s) <= limit {
		return s
	}
	cut := []byte(s[:limit])
	return string(cut[:exec.Whole(cut)])
}

// shell runs the worker's commands, one after the other.
type shell struct {
	server  *Server
	account Account
	scratch string
	report  func(*proto.ShellEvent) error

	mu  sync.Mutex
	dir string // where the last command ended
}

// wait returns when no command is running.
func (sh *shell) wait() {
	sh.mu.Lock()
	defer sh.mu.Unlock()
}

// run runs a command where the one before it ended and reports it.
func (sh *shell) run(ctx context.Context, c worker.Command) worker.Output {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	result, output := sh.execute(ctx, c.Text, c.Timeout)
	_ = sh.report(&proto.ShellEvent{ // fails when the call has ended, and then ctx has too
		Command: text(c.Text, maxEventCommand), Exit: exitOf(result), Output: output,
		OutputBytes: result.Stdout.Bytes, DurationNanos: int64(result.Duration),
	})
	return worker.Output{
		Outcome: result.Outcome, ExitCode: result.Code, Detail: result.Detail, Output: output,
		Bytes: result.Stdout.Bytes, Truncated: result.Stdout.Truncated,
		MemoryLimit: result.MemoryLimit, FullMounts: result.FullMounts,
	}
}
