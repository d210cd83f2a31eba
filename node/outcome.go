package node

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/ephemeral-run/ephemeral/node/guest"
	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/vmm/network"
)

// workerError is the end that the worker itself reported.
type workerError struct{ code, detail string }

func (e *workerError) Error() string { return e.code + ": " + e.detail }

// workerCodes are the codes a worker may report. Any other becomes worker_error: the guest is not trusted to invent one.
var workerCodes = map[string]bool{"model_error": true, "step_limit": true, "worker_error": true}

// endingTime is how long after its connections broke the end of a machine may be noticed.
const endingTime = 500 * time.Millisecond

// failed says how a run ended whose step failed. The cause of ctx, where there is one, is the reason and the step's error
// only its consequence.
func (x *execution) failed(ctx context.Context, err error) run.Outcome {
	if x.machine != nil && context.Cause(ctx) == nil {
		err = explain(err, x.machine)
	}
	if cause := context.Cause(ctx); cause != nil {
		err = cause
	}
	var worker *workerError
	switch {
	case errors.Is(err, errCancelled):
		return run.Outcome{State: run.Cancelled}
	case errors.Is(err, errTimedOut):
		return run.Outcome{State: run.TimedOut, Error: &run.Error{
			Code: "timed_out", Detail: fmt.Sprintf("timeout_seconds (%d) passed", x.lease.Spec.TimeoutSeconds)}}
	case errors.Is(err, run.ErrBudget):
		return run.Outcome{State: run.BudgetExhausted, Error: &run.Error{
			Code: "budget_exhausted", Detail: fmt.Sprintf("max_cost_micros (%d) cannot pay for what comes next", x.lease.Reserved)}}
	case errors.As(err, &worker):
		return failure(worker.code, worker.detail)
	case errors.Is(err, errShutdown):
		return failure("node_lost", "the node was stopped before the run ended")
	case errors.Is(err, guest.ErrNotPrepared):
		x.Log.Warn("machine not prepared", "run", x.lease.Run, "machine", x.machineID(), "error", err)
		return failure("prepare_failed", "the machine did not confirm its own randomness and clock, so it was not used")
	case errors.Is(err, errMachineLost):
		x.Log.Warn("machine lost", "run", x.lease.Run, "machine", x.machineID(), "error", err)
		return failure("machine_lost", "the machine ended by itself")
	case errors.Is(err, run.ErrUpload):
		x.Log.Warn("upload is gone or damaged", "run", x.lease.Run, "error", err)
		return failure("upload_lost", "an upload that the request names is not in the store any more, or not as it was uploaded; nothing was charged")
	case errors.As(err, new(*guest.RefusedError)) && !x.worked && !x.ready.IsZero():
		x.Log.Info("file refused by the machine", "run", x.lease.Run, "error", err)
		return failure("files_failed", "the machine did not take one of the request's files; nothing was charged")
	case errors.Is(err, errTooManyEvents):
		return failure("too_many_events", fmt.Sprintf("the run reported more than %d events", maxEvents))
	case errors.Is(err, guest.ErrLost):
		return failure("agent_lost", "the connection to the machine broke before the worker ended")
	case errors.As(err, new(*ImageError)):
		x.Log.Error("run failed", "run", x.lease.Run, "error", err)
		return failure("image_unavailable", "the node has no machines of the image that the run asked for; nothing was charged")
	case errors.Is(err, run.ErrUnavailable):
		x.Log.Error("run failed", "run", x.lease.Run, "error", err)
		return failure("store_unavailable", "the store did not answer for so long that the run's compute could not be paid any more")
	default:
		x.Log.Error("run failed", "run", x.lease.Run, "error", err)
		return failure("internal", "the node could not carry out the run")
	}
}

// ending is a machine as far as its end goes; see vmm.Machine.
type ending interface {
	Done() <-chan struct{}
	Err() error
}

// lost is errMachineLost with what is known of why a machine has ended.
func lost(m ending) error {
	if why := m.Err(); why != nil {
		return fmt.Errorf("%w: %w", errMachineLost, why)
	}
	return errMachineLost
}

// explain returns errMachineLost for a broken connection whose reason is that the machine ended: whether the host sees the
// one or the other first is chance.
func explain(err error, m ending) error {
	if !errors.Is(err, guest.ErrLost) && !errors.Is(err, guest.ErrNotPrepared) {
		return err
	}
	select {
	case <-m.Done():
		return lost(m)
	case <-time.After(endingTime):
		return err
	}
}

func failure(code, detail string) run.Outcome {
	return run.Outcome{State: run.Failed, Error: &run.Error{Code: code, Detail: detail}}
}

// usage counts what a run did; model calls and their tokens as the broker saw them, never as the guest says.
type usage struct {
	mu      sync.Mutex
	counts  run.Usage
	content int // bytes in shell events
	egress  run.Egress

	attempts *run.EgressAttempts // nil: none
}

// attemptsOf is what the record says of whom a machine tried to reach.
func attemptsOf(a network.Attempts) *run.EgressAttempts {
	if len(a.List) == 0 {
		return nil
	}
	told := &run.EgressAttempts{More: a.More}
	for _, one := range a.List {
		address := ""
		if one.Address.IsValid() {
			address = one.Address.String()
		}
		told.List = append(told.List, run.EgressAttempt{
			Protocol: one.Protocol, Address: address, Port: int(one.Port), Name: one.Name, Packets: one.Packets,
		})
	}
	return told
}

func (u *usage) models(b run.Usage) {
	u.mu.Lock()
	defer u.mu.Unlock()
	b.ShellCommands = u.counts.ShellCommands
	u.counts = b
}

// shell counts a command and returns the bytes of content that the events of all of them carry so far, this one's included.
func (u *usage) shell(content int) (total int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.counts.ShellCommands++
	u.content += content
	return u.content
}

func (u *usage) total() run.Usage {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.counts
}
