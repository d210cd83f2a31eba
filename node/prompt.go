package node

import (
	"context"
	"errors"
	"fmt"

	"github.com/ephemeral-run/ephemeral/broker"
	"github.com/ephemeral-run/ephemeral/guestagent/proto"
	"github.com/ephemeral-run/ephemeral/node/guest"
	"github.com/ephemeral-run/ephemeral/run"
)

// prompt runs the worker: the agent inside the machine talks to the model through the broker, served here.
func (x *execution) prompt(ctx context.Context) error {
	stop, err := x.serveBroker(ctx)
	if err != nil {
		return err
	}
	defer stop()
	spec := &x.lease.Spec
	finished, err := x.guest.StartWorker(ctx, guest.Worker{
		Prompt: spec.Prompt, Model: spec.Model, Shell: spec.Shell, Web: spec.Web, Connections: spec.Connections,
		Files: len(spec.Files) > 0, Door: spec.ExposeBroker, Wall: x.wall(),
	}, func(s guest.Shell) error { return x.shell(ctx, shellData(s)) })
	if err != nil {
		return err
	}
	x.result = &run.Result{Output: finished.Output}
	switch {
	case finished.OK:
		return nil
	case finished.ErrorCode == "budget_exhausted":
		return run.ErrBudget
	case finished.ErrorCode == "time_limit":
		return errTimedOut
	case workerCodes[finished.ErrorCode]:
		return &workerError{finished.ErrorCode, finished.ErrorDetail}
	default:
		return &workerError{"worker_error", finished.ErrorDetail}
	}
}

// serveBroker answers the machine on the broker's port: the socket is what says which run it is. stop returns when every
// call was paid or given back.
func (x *execution) serveBroker(ctx context.Context) (stop func(), err error) {
	l, err := x.machine.Listen(proto.BrokerPort)
	if err != nil {
		return nil, fmt.Errorf("listen for the machine: %w", err)
	}
	handler := x.Broker.Handler(broker.Session{
		Run: x.lease.Run, Org: x.lease.Org, Spec: &x.lease.Spec, Ledger: x.ledger,
		Emit: func(e run.NewEvent) {
			if err := x.line.emit(context.WithoutCancel(ctx), e); err != nil {
				x.end(err)
			}
		},
	})
	if x.lease.Spec.ExposeBroker {
		if err := x.guest.OpenDoor(ctx); err != nil {
			return nil, errors.Join(err, l.Close())
		}
	}
	serving, cancel := context.WithCancel(ctx)
	served := make(chan struct{})
	go func() {
		defer close(served)
		if err := handler.Serve(serving, l); err != nil {
			x.Log.Warn("broker's listener ended", "run", x.lease.Run, "error", err)
		}
	}()
	return func() {
		cancel()
		<-served
		x.usage.models(handler.Usage())
	}, nil
}

func shellData(s guest.Shell) run.ShellData {
	d := run.ShellData{
		Command: s.Command, Outcome: s.Exit.Outcome, ExitCode: s.Exit.Code, Duration: float64(s.Duration.Microseconds()) / 1000,
		Bytes: s.OutputBytes, Truncated: s.OutputBytes > int64(len(s.Output)),
		MemoryLimit: s.Exit.MemoryLimit, FullMounts: s.Exit.FullMounts,
	}
	d.Output, d.Encoding = encode(s.Output)
	return d
}
