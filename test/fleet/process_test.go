// Package fleet tests many processes on one Redis: gateways that accept runs, nodes that take them, and what happens when
// they are killed, stopped and cut off. No machine is started: the nodes pretend.
package fleet

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/gateway"
	"github.com/ephemeral-run/ephemeral/node"
	"github.com/ephemeral-run/ephemeral/run"
)

// The test's binary is also the program of the fleet's processes: these variables say which.
const (
	roleVar  = "FLEET_ROLE" // gateway or node
	nameVar  = "FLEET_NAME"
	redisVar = "FLEET_REDIS"
	diaryVar = "FLEET_DIARY" // file to which nodes append what they do
)

// lease is short, so that what a node leaves behind is found soon.
const lease = 1500 * time.Millisecond

// slice is what each run pays.
const slice run.Micros = 200

// perNode is how many runs a node pretends at once.
const perNode = 8

func TestMain(m *testing.M) {
	role := os.Getenv(roleVar)
	if role == "" {
		os.Exit(m.Run())
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if err := serve(ctx, role); err != nil {
		fmt.Fprintf(os.Stderr, "%s %s: %v\n", role, os.Getenv(nameVar), err)
		os.Exit(1)
	}
}

func storeConfig(url string) run.Config {
	return run.Config{RedisURL: url, Lease: lease, Concurrency: 1000, QueueLimit: 100_000}
}

func serve(ctx context.Context, role string) error {
	log := slog.New(slog.DiscardHandler)
	var store *run.Store
	err := insist(ctx, func() (err error) { // Redis may be on its way back
		store, err = run.Open(ctx, storeConfig(os.Getenv(redisVar)))
		return err
	})
	if err != nil {
		return err
	}
	defer store.Close()
	if role == "gateway" {
		ln, err := net.FileListener(os.NewFile(3, "listener"))
		if err != nil {
			return err
		}
		return gateway.New(gateway.Config{DrainTimeout: time.Second}, gateway.Deps{Store: store, FirstSlice: slice, Log: log}).Serve(ctx, ln)
	}
	diary, err := os.OpenFile(os.Getenv(diaryVar), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer diary.Close()
	name := os.Getenv(nameVar)
	n, err := node.New(name, node.Config{Concurrency: perNode, Drain: time.Second}, lease, store,
		&pretendingExecutor{store: store, node: name, diary: diary}, log)
	if err != nil {
		return err
	}
	return n.Run(ctx)
}

// pretendingExecutor does everything with a run but running it: it has no machine, and sleeps where one would work. What it
// does it writes to a diary that all nodes share.
type pretendingExecutor struct {
	store *run.Store
	node  string
	diary *os.File
}

var _ node.Executor = (*pretendingExecutor)(nil)

// note appends one line, whole: "what run organisation token node".
func (e *pretendingExecutor) note(what string, l *run.Lease) {
	fmt.Fprintf(e.diary, "%s %s %s %d %s\n", what, l.Run, l.Org, l.Token, e.node)
}

// Execute implements node.Executor.
func (e *pretendingExecutor) Execute(ctx context.Context, l *run.Lease) {
	ctx, lost := context.WithCancelCause(ctx)
	defer lost(nil)
	var renewal sync.WaitGroup
	renewal.Go(func() { e.renew(ctx, l, lost) })
	defer renewal.Wait()
	defer lost(nil)
	err := e.work(ctx, l)
	if errors.Is(err, run.ErrLeaseLost) || errors.Is(context.Cause(ctx), run.ErrLeaseLost) {
		e.note("fenced", l)
	} else if err != nil {
		e.note("broken", l)
		fmt.Fprintln(os.Stderr, e.node, err)
	}
}

func (e *pretendingExecutor) work(ctx context.Context, l *run.Lease) error {
	compute := run.Call{ID: "compute-1", Kind: run.KindCompute, Min: slice, Max: slice}
	if err := insist(ctx, func() error { _, err := e.store.Authorize(ctx, l, compute); return err }); err != nil {
		return err
	}
	start := run.Start{At: time.Now(), Machine: "none-" + string(l.Run) + fmt.Sprint(l.Token), Image: "none", Isolation: "none"}
	if err := insist(ctx, func() error { return e.store.Start(ctx, l, start) }); err != nil {
		return err
	}
	e.note("started", l)
	sleep(ctx, 20*time.Millisecond+time.Duration(l.QueuedAt.UnixMicro()%40)*time.Millisecond)
	if err := insist(ctx, func() error { return e.store.Capture(ctx, l, compute.ID, slice) }); err != nil {
		return err
	}
	code := 0
	end := run.Outcome{At: time.Now(), State: run.Succeeded, Result: &run.Result{ExitCode: &code}}
	if err := insist(ctx, func() error { _, err := e.store.Settle(ctx, l, end); return err }); err != nil {
		return err
	}
	e.note("settled", l)
	return nil
}

// renew keeps the lease as a node must: it gives up when the time is over without an answer.
func (e *pretendingExecutor) renew(ctx context.Context, l *run.Lease, lost context.CancelCauseFunc) {
	last := time.Now()
	for sleep(ctx, lease/4) {
		asked := time.Now()
		asking, stop := context.WithDeadline(ctx, last.Add(lease))
		_, err := e.store.Renew(asking, l)
		stop()
		switch {
		case err == nil:
			last = asked
		case errors.Is(err, run.ErrLeaseLost) || time.Since(last) >= lease:
			lost(run.ErrLeaseLost)
			return
		}
	}
}

// insist repeats a call while the store is away.
func insist(ctx context.Context, call func() error) error {
	for {
		err := call()
		if err == nil || !errors.Is(err, run.ErrUnavailable) || !sleep(ctx, 20*time.Millisecond) {
			return err
		}
	}
}

// sleep waits and tells whether ctx goes on.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}

// process is one process of the fleet, which can be started again.
type process struct {
	t     *testing.T
	role  string
	name  string
	env   []string
	files []*os.File
	cmd   *exec.Cmd
}

func (p *process) start() {
	p.t.Helper()
	self, err := os.Executable()
	if err != nil {
		p.t.Fatal(err)
	}
	p.cmd = exec.Command(self)
	p.cmd.Env = append(append(os.Environ(), roleVar+"="+p.role, nameVar+"="+p.name), p.env...)
	p.cmd.ExtraFiles, p.cmd.Stderr = p.files, os.Stderr
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := p.cmd.Start(); err != nil {
		p.t.Fatal(err)
	}
}

func (p *process) signal(s syscall.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		p.t.Errorf("%s %s: %v", p.role, p.name, err)
	}
}

// kill ends the process at once and waits until it is gone.
func (p *process) kill() {
	p.cmd.Process.Kill()
	p.cmd.Wait()
}
