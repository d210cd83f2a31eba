package guest

import (
	"context"
	"errors"
	"io"
	"time"

	"github.com/ephemeral-run/ephemeral/guestagent/proto"
)

// Worker is what the worker in the machine is asked to do.
type Worker struct {
	Prompt      string
	Model       string
	Shell       bool
	Web         bool
	Connections []string
	Files       bool          // the run came with files
	Door        bool          // OpenDoor was called
	MaxSteps    int           // model calls at the most; 0: the agent's default
	Wall        time.Duration // when the final answer must be there at the latest; 0: no limit
}

// Shell is a command that the worker ran.
type Shell struct {
	Command     string
	Exit        Exit
	Output      []byte // both streams as they came; at most 64 KiB
	OutputBytes int64  // written in all
	Duration    time.Duration
}

// Finished is how the worker ended.
type Finished struct {
	OK          bool
	Output      string // the final answer; at most 256 KiB
	ErrorCode   string // budget_exhausted, model_error, step_limit, time_limit, worker_error
	ErrorDetail string
}

// Bounds of what the worker reports, in bytes and events.
const (
	maxShellCommand = 64 << 10
	maxShellOutput  = 64 << 10
	maxAnswer       = 256 << 10
	maxQueuedEvents = 1024
	maxQueuedBytes  = 32 << 20
)

var workerErrors = map[string]bool{"budget_exhausted": true, "model_error": true, "step_limit": true, "time_limit": true, "worker_error": true}

// StartWorker runs the worker to its end and calls onShell for each command it ran, in order. An error of onShell ends
// the call, and with it the worker.
func (c *Client) StartWorker(ctx context.Context, w Worker, onShell func(Shell) error) (Finished, error) {
	var finished Finished
	began := time.Now()
	err := c.do(ctx, "start worker", func(k *call) error {
		k.guard.streaming(unlimited)
		stream, err := k.agent.StartWorker(ctx, &proto.StartWorkerRequest{
			Prompt: w.Prompt, Model: w.Model, Shell: w.Shell, Web: w.Web, Connections: w.Connections, MaxSteps: int64(w.MaxSteps),
			Files: w.Files, Door: w.Door, WallNanos: int64(w.Wall),
		})
		if err != nil {
			return err
		}
		events := newQueue[*proto.WorkerEvent](maxQueuedEvents, maxQueuedBytes)
		defer events.stop(k.guard)
		go events.fill(k.guard, stream.Recv, func(e *proto.WorkerEvent) int {
			return len(e.GetShell().GetOutput()) + len(e.GetShell().GetCommand()) + len(e.GetFinished().GetOutput())
		})
		for {
			event, err := events.next()
			if errors.Is(err, io.EOF) {
				return broke("the worker did not finish")
			}
			if err != nil {
				return err
			}
			switch e := event.Event.(type) {
			case *proto.WorkerEvent_Shell:
				shell, err := checkShell(e.Shell, time.Since(began))
				if err != nil {
					return err
				}
				if err := onShell(shell); err != nil {
					return &callerError{err}
				}
			case *proto.WorkerEvent_Finished:
				finished, err = checkFinished(e.Finished)
				return err
			default:
				return broke("unknown event")
			}
		}
	})
	return finished, err
}

// checkShell says whether a shell event is one that can be. No command took longer than the worker has been at work.
func checkShell(s *proto.ShellEvent, elapsed time.Duration) (Shell, error) {
	if s == nil {
		return Shell{}, broke("empty shell event")
	}
	exit, err := checkExit(s.Exit)
	switch {
	case err != nil:
		return Shell{}, err
	case len(s.Command) > maxShellCommand:
		return Shell{}, broke("command of %d bytes", len(s.Command))
	case len(s.Output) > maxShellOutput:
		return Shell{}, broke("output of %d bytes", len(s.Output))
	case s.OutputBytes < int64(len(s.Output)):
		return Shell{}, broke("%d bytes written, %d received", s.OutputBytes, len(s.Output))
	case s.DurationNanos < 0:
		return Shell{}, broke("negative duration")
	}
	return Shell{
		Command: s.Command, Exit: exit, Output: s.Output, OutputBytes: s.OutputBytes,
		Duration: min(time.Duration(s.DurationNanos), elapsed),
	}, nil
}

func checkFinished(f *proto.Finished) (Finished, error) {
	switch {
	case f == nil:
		return Finished{}, broke("empty end of the worker")
	case len(f.Output) > maxAnswer:
		return Finished{}, broke("answer of %d bytes", len(f.Output))
	case len(f.ErrorDetail) > maxDetail:
		return Finished{}, broke("detail of %d bytes", len(f.ErrorDetail))
	case f.Ok && f.ErrorCode != "", !f.Ok && !workerErrors[f.ErrorCode]:
		return Finished{}, broke("ok %v with error code %.40q", f.Ok, f.ErrorCode)
	}
	return Finished{OK: f.Ok, Output: f.Output, ErrorCode: f.ErrorCode, ErrorDetail: f.ErrorDetail}, nil
}
