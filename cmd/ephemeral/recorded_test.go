package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/ephemeral-run/ephemeral/run"
)

// recordRun is the program "record-run REDIS-URL ORG" of the scripts: it takes the place of a node that carried out one
// run, and records its timeline in the store. It prints the run's id.
func recordRun() {
	id, err := record(context.Background(), os.Args[1], os.Args[2])
	if err != nil {
		fmt.Fprintln(os.Stderr, "record-run:", err)
		os.Exit(1)
	}
	fmt.Println(id)
}

// freeAddress is the program "free-address" of the scripts: it prints a loopback address at which nobody listens.
func freeAddress() {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err == nil {
		fmt.Println(l.Addr())
		err = l.Close()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "free-address:", err)
		os.Exit(1)
	}
}

func record(ctx context.Context, url, org string) (run.ID, error) {
	cfg, err := load()
	if err != nil {
		return "", err
	}
	cfg.Run.RedisURL = url
	s, err := openStore(ctx, cfg)
	if err != nil {
		return "", err
	}
	defer s.Close()
	r, _, err := s.Admit(ctx, run.Admission{Org: org, FirstSlice: 200, Spec: run.Spec{
		Command: "echo hello", Shell: true, Web: true, TimeoutSeconds: 10, MaxCostMicros: 1000}})
	if err != nil {
		return "", err
	}
	l, err := s.Take(ctx, "recorder")
	if err != nil {
		return "", err
	}
	at := func(ms int) time.Time { return l.QueuedAt.Add(time.Duration(ms) * time.Millisecond) }
	if err := s.Start(ctx, l, run.Start{At: at(2), Machine: "m1", Image: "base", Isolation: "emulated"}); err != nil {
		return "", err
	}
	// More than 90 percent of the hold, so that the store itself adds a budget.warning.
	if _, err := s.Authorize(ctx, l, run.Call{ID: "web-1", Kind: run.KindWeb, Min: 1, Max: 950}); err != nil {
		return "", err
	}
	if err := s.Capture(ctx, l, "web-1", 950); err != nil {
		return "", err
	}
	if err := s.Append(ctx, l,
		run.NewEvent{Type: run.EventWorkerStarted, At: at(3), Data: run.WorkerStartedData{Shell: true, Web: true}},
		run.NewEvent{Type: run.EventWeb, At: at(10), Data: run.CallData{Kind: "fetch", Method: "GET", Target: "https://example.com/", Status: 200, Bytes: 12, Charged: 950}},
		run.NewEvent{Type: run.EventShell, At: at(800), Data: run.ShellData{Command: "echo hello", Outcome: "exited", Output: "hello\n", Bytes: 6}},
		run.NewEvent{Type: run.EventMicroVMDestroyed, At: at(810), Data: run.MicroVMDestroyedData{Egress: run.Egress{DroppedPackets: 2, DroppedBytes: 120}}}); err != nil {
		return "", err
	}
	exit := 3
	_, err = s.Settle(ctx, l, run.Outcome{At: at(820), State: run.Succeeded, Stages: []run.Stage{{Name: "queue", Ms: 2}, {Name: "worker", Ms: 790}},
		Result: &run.Result{ExitCode: &exit, Stdout: run.NewStream([]byte("hello\n"), 6), Stderr: run.NewStream(nil, 0)}})
	return r.ID, err
}
