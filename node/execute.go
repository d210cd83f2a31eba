package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/ephemeral-run/ephemeral/broker"
	"github.com/ephemeral-run/ephemeral/node/guest"
	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/tracing"
	"github.com/ephemeral-run/ephemeral/vmm/pool"
	"github.com/ephemeral-run/ephemeral/vmm/provision"
)

// Why a run ends before its worker does. Each is the cause of the execution's context.
var (
	errCancelled   = errors.New("cancelled by request")
	errTimedOut    = errors.New("timeout_seconds passed")
	errMachineLost = errors.New("the machine ended by itself")
)

// circuitPause is how long a run is kept that no machine can be made for, before it is given back: until this node takes no
// more of them.
const circuitPause = time.Second

// maxTakes is how often a run is taken that has not started because its machine failed: then it fails too.
const maxTakes = 3

// machineFaults are the codes of what a machine failed by before anything of the run was in it.
var machineFaults = map[string]bool{"machine_lost": true, "prepare_failed": true, "agent_lost": true}

// Pool gives ready machines; see vmm/pool.
type Pool interface {
	// Claim waits for a ready machine of the image until ctx ends. *ImageError: there will be none.
	Claim(ctx context.Context, image string) (*provision.Machine, error)
	// Settled tells that a claimed machine is up, so that refill need not stand back for it any longer.
	Settled(m *provision.Machine)
	// Released tells that a claimed machine was closed, so that its place can be refilled.
	Released(m *provision.Machine)
}

// ImageError says that a node has no machines of an image.
type ImageError struct {
	Image string
	Err   error // why
}

func (e *ImageError) Error() string {
	return fmt.Sprintf("no machines of image %s: %v", e.Image, e.Err)
}

// Unwrap gives the reason.
func (e *ImageError) Unwrap() error { return e.Err }

// Runner is the executor that runs each run in a machine of its own.
type Runner struct {
	Store     *run.Store
	Broker    *broker.Broker
	Pool      Pool
	Isolation string        // for the record
	Lease     time.Duration // how long the store lets a node own a run without renewing
	Grace     time.Duration // how long a worker may write its results when nothing else can be paid; see Config
	Artifacts ArtifactLimits
	Metrics   *Metrics        // nil: nothing is counted
	Traces    *tracing.Tracer // nil: none are sent
	// Used is told when a run was queued and how long it had its machine; nil: nobody is.
	Used func(image string, queued time.Time, service time.Duration)
	Log  *slog.Logger

	starts starts // of machines that were claimed

	mu      sync.Mutex
	cancels map[run.ID]context.CancelCauseFunc
}

// execution is one run being carried out.
type execution struct {
	*Runner
	stopping context.Context // ends when the node must be gone

	lease   *run.Lease
	line    *timeline
	ledger  ledger
	meter   *meter
	begun   chan error // whether the first slice is paid for, once known
	end     context.CancelCauseFunc
	owned   sync.WaitGroup // goroutines that end with the machine
	machine *provision.Machine
	up      func() // its machine is up, or never will be
	guest   *guest.Client
	claimed time.Time // when it got its machine
	ready   time.Time // when the machine was confirmed
	started bool      // the store has the run running
	again   bool      // the run goes back to the queue: it has not started, and what failed is not its fault

	usage  usage
	result *run.Result
	worked bool // a worker was started
	files  *run.Files
}

// Execute implements Executor.
func (r *Runner) Execute(ctx context.Context, l *run.Lease) {
	stopping := ctx
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	defer r.track(l.Run, end)()

	price := r.Broker.Prices().ComputePerSecond
	led := ledger{store: r.Store, lease: l, price: price}
	paying := newMeter(led, price, l.Reserved, r.Grace)
	led.spent = &paying.spent
	x := &execution{
		Runner: r, stopping: stopping, lease: l, line: newTimeline(r.Store, l), ledger: led, end: end,
		meter: paying, begun: make(chan error, 1),
	}
	x.line.traced = r.Traces.Run()
	renewing, stop := context.WithCancel(context.WithoutCancel(ctx))
	var renewal sync.WaitGroup
	renewal.Go(func() { x.renew(renewing) })
	outcome := x.carryOut(ctx)
	x.collect(ctx)
	cause := context.Cause(ctx)
	end(nil)
	x.destroy(context.WithoutCancel(ctx))
	switch {
	case errors.Is(cause, run.ErrLeaseLost):
	case x.again && x.requeue(context.WithoutCancel(ctx)):
	default:
		x.settle(context.WithoutCancel(ctx), outcome)
	}
	stop()
	renewal.Wait()
}

// step is one named part of a run; its name is the name of the stage in the record.
type step struct {
	name string
	do   func(context.Context) error
}

// carryOut takes the steps of a run until one fails or all are done, and says how the run ended.
func (x *execution) carryOut(ctx context.Context) run.Outcome {
	steps := []step{
		{"claim", x.claim},
		{"resume", x.resume},
		{"prepare", x.prepare},
		{"files", x.putFiles},
		{"worker", x.work},
	}
	for _, s := range steps {
		x.begins(s.name)
		err := s.do(ctx)
		x.line.stage(s.name)
		if err != nil {
			o := x.failed(ctx, fmt.Errorf("%s: %w", s.name, err))
			x.again = !x.started && (giveBack(ctx, err) || x.machineFailed(o))
			return o
		}
	}
	return run.Outcome{State: run.Succeeded}
}

// begins tells those who debug that a step of the run begins.
func (x *execution) begins(step string) {
	x.Log.Debug("step", "run", x.lease.Run, "step", step, "machine", x.machineID())
}

// machineID is empty while the run has no machine.
func (x *execution) machineID() string {
	if x.machine == nil {
		return ""
	}
	return x.machine.ID()
}

// giveBack tells whether a run that has not started may be tried again: the node stops, the store did not answer, or no machine
// can be made here for now.
func giveBack(ctx context.Context, err error) bool {
	if cause := context.Cause(ctx); cause != nil {
		err = cause
	}
	return errors.Is(err, errShutdown) || errors.Is(err, run.ErrUnavailable) || errors.Is(err, pool.ErrCircuitOpen)
}

// machineFailed tells whether a run that has not started ends so for its machine alone, and may have another one.
func (x *execution) machineFailed(o run.Outcome) bool {
	return o.Error != nil && machineFaults[o.Error.Code] && x.lease.Token < maxTakes
}

// claim gets a ready machine, and begins to pay for it.
func (x *execution) claim(ctx context.Context) error {
	m, err := x.Pool.Claim(ctx, x.lease.Spec.ImageName())
	if errors.Is(err, pool.ErrCircuitOpen) {
		sleepUntil(ctx, time.Now().Add(circuitPause))
	}
	if err != nil {
		return err
	}
	x.machine, x.claimed, x.up = m, time.Now(), x.starts.begin()
	x.guest = guest.Connect(m.Dial)
	x.meter.refused = func(err error) { x.conclude(ctx, err) }
	x.owned.Go(func() { x.pay(ctx) })
	x.owned.Go(func() {
		select {
		case <-m.Done():
			x.end(lost(m))
		case <-ctx.Done():
		}
	})
	return nil
}

// pay pays for the machine until ctx ends or nothing more can be paid. While its first slices are being set aside the machine
// wakes: prepare waits for both. The first begins when it is set aside, so that a store that is slow then leaves time to pay
// the next one.
func (x *execution) pay(ctx context.Context) {
	err := x.meter.begin(ctx)
	start := time.Now()
	x.begun <- err
	if err != nil {
		return
	}
	if err := x.meter.keep(ctx, start); err != nil {
		x.end(err)
	}
}

func (x *execution) resume(ctx context.Context) error { return x.machine.Wake(ctx) }

// prepare completes what the pool has prepared of the clone: it sets the clock, which stood still, and fails closed where
// the clone is no individual. It tells the store that the machine is ready. The run's timeout counts from here.
func (x *execution) prepare(ctx context.Context) error {
	err := x.machine.Confirmed(ctx)
	if errors.Is(err, provision.ErrUnprepared) { // its agent refuses unless somebody else has
		err = x.guest.SetClock(ctx)
	}
	if err != nil {
		return err
	}
	if err := x.machine.Settled(); err != nil {
		return err
	}
	x.Pool.Settled(x.machine)
	if err := <-x.begun; err != nil {
		return err
	}
	x.ready = x.line.now()
	if err := x.recordStart(ctx); err != nil {
		return fmt.Errorf("record the start: %w", err)
	}
	x.started = true
	x.up()
	limit := time.Duration(x.lease.Spec.TimeoutSeconds) * time.Second
	x.owned.Go(func() {
		if sleepUntil(ctx, time.Now().Add(limit)) {
			x.end(errTimedOut)
		}
	})
	return nil
}

// recordStart tells the store that the machine is ready, again while the store is away: whether the first try took effect
// is not known then, and a machine that is ready is worth the wait.
func (x *execution) recordStart(ctx context.Context) error {
	for {
		err := x.Store.Start(ctx, x.lease, run.Start{
			At: x.ready, Machine: x.machine.ID(), Image: x.machine.Image(), Isolation: x.Isolation,
		})
		if !errors.Is(err, run.ErrUnavailable) || !sleepUntil(ctx, time.Now().Add(50*time.Millisecond)) {
			return err
		}
	}
}

// work runs the command or the prompt.
func (x *execution) work(ctx context.Context) error {
	x.starts.wait(ctx)
	if err := x.meter.charge(ctx); err != nil {
		return err
	}
	spec := &x.lease.Spec
	if err := x.line.emit(ctx, run.NewEvent{
		Type: run.EventWorkerStarted, Data: run.WorkerStartedData{Shell: spec.Shell, Web: spec.Web},
	}); err != nil {
		return err
	}
	x.worked = true
	if spec.Command != "" {
		return x.command(ctx)
	}
	return x.prompt(ctx)
}

// destroy removes the machine, whatever happened before, and waits for everything that lived with it.
func (x *execution) destroy(ctx context.Context) {
	if x.machine == nil {
		return
	}
	x.up()
	x.begins("destroy")
	if err := x.machine.Close(); err != nil {
		x.Log.Error("machine not removed cleanly", "run", x.lease.Run, "machine", x.machine.ID(), "error", err)
	}
	packets, bytes, err := x.machine.Egress()
	if err != nil {
		x.Log.Warn("dropped packets not counted", "run", x.lease.Run, "machine", x.machine.ID(), "error", err)
	}
	x.usage.egress = run.Egress{DroppedPackets: packets, DroppedBytes: bytes}
	x.usage.attempts = attemptsOf(x.machine.EgressAttempts())
	x.Pool.Released(x.machine)
	if x.Used != nil && !x.again {
		x.Used(x.lease.Spec.ImageName(), x.lease.QueuedAt, time.Since(x.claimed))
	}
	x.owned.Wait()
	x.line.stage("destroy")
}

// tellDestroyed tells of the end of the run's machine. One of a run that goes back is not told of: its next attempt has another.
func (x *execution) tellDestroyed(ctx context.Context) {
	if x.machine == nil {
		return
	}
	if err := x.line.emit(ctx, run.NewEvent{
		Type: run.EventMicroVMDestroyed, Data: run.MicroVMDestroyedData{Egress: x.usage.egress, Attempts: x.usage.attempts},
	}); err != nil {
		x.Log.Warn("cannot append", "run", x.lease.Run, "error", err)
	}
}

// settle brings the run to its terminal state. While the store is away it tries again: the machine is gone, so nothing
// but this goroutine waits.
func (x *execution) settle(ctx context.Context, o run.Outcome) {
	x.tellDestroyed(ctx)
	x.begins("settle")
	o.Usage, o.Egress, o.Attempts = x.usage.total(), x.usage.egress, x.usage.attempts
	o.Files = x.files
	if o.Result == nil {
		o.Result = x.result
	}
	o.Stages, o.At = x.line.ended()
	if x.insist(ctx, "settle", func() error { return x.trySettle(ctx, o) }) {
		x.Metrics.observe(o)
	}
}

// requeue gives a run back that has not started, again while the store is away. false: it has started, the answer that said
// so was lost, and it is to be settled.
func (x *execution) requeue(ctx context.Context) (closed bool) {
	closed = true
	x.insist(ctx, "requeue", func() error {
		err := x.Store.Requeue(ctx, x.lease)
		if errors.Is(err, run.ErrState) {
			closed = false
			return nil
		}
		return err
	})
	return closed
}

// insist does what closes the run on this node until it succeeds (true) or cannot any more: then the run is reaped. While
// the store is away it tries again; on a node that must be gone not longer than a lease.
func (x *execution) insist(ctx context.Context, what string, do func() error) bool {
	ctx, giveUp := context.WithCancel(ctx)
	defer giveUp()
	defer context.AfterFunc(x.stopping, func() {
		sleepUntil(ctx, time.Now().Add(x.Lease))
		giveUp()
	})()
	for wait := 50 * time.Millisecond; ; wait = min(2*wait, 2*time.Second) {
		err := do()
		switch {
		case err == nil:
			return true
		case errors.Is(err, run.ErrLeaseLost):
			return false
		case !errors.Is(err, run.ErrUnavailable), ctx.Err() != nil:
			x.Log.Error("run not closed; it will be reaped", "run", x.lease.Run, "closing", what, "error", err)
			return false
		}
		sleepUntil(ctx, time.Now().Add(wait))
	}
}

func (x *execution) trySettle(ctx context.Context, o run.Outcome) error {
	if err := x.line.flush(ctx); err != nil {
		return err
	}
	if err := x.meter.finish(ctx); err != nil {
		return err
	}
	done, err := x.Store.Settle(ctx, x.lease, o)
	if err == nil {
		x.line.traced.Send(done, x.lease.Spec.Traceparent)
	}
	return err
}
