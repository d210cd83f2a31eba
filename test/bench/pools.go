package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/ephemeral-run/ephemeral/client"
	ephemeral "github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/pool"
	"github.com/ephemeral-run/ephemeral/vmm/provision"
	"github.com/ephemeral-run/ephemeral/vmm/vmmtest"
)

// restAtOnce is how many machines rest while their memory and CPU time are measured.
const restAtOnce = 4

// restAge is how old a bare machine is when its memory is looked at.
const restAge = 2 * time.Second

// restTime is how long resting machines are watched.
const restTime = 10 * time.Second

// spare waits until a spare is in hand, as it is for a pool that refills at its own pace: its launch must not fall on a
// bare restore that is being measured.
func spare(ctx context.Context, parts *provision.Provisioner, t vmm.Template) error {
	for deadline := time.Now().Add(20 * time.Second); parts.Spares(t) == 0; {
		if time.Now().After(deadline) {
			return errors.New("no spare was launched in 20 s")
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(5 * time.Millisecond):
		}
	}
	return nil
}

// resting measures machines that wait in a pool: their private memory beside that of a bare one in the same state, and the
// CPU time that they take.
func resting(ctx context.Context, bare vmmtest.Bare, t vmm.Template, parts *provision.Provisioner) (rows []row, err error) {
	say("resting machines: %d for %s", restAtOnce, restTime)
	cfg := pool.Config{MinReady: restAtOnce, MaxReady: restAtOnce, MaxMachines: restAtOnce, RefillConcurrency: 1, MakeTimeout: time.Minute}
	var mu sync.Mutex
	var made []*provision.Machine
	machines, err := pool.New(cfg, func(ctx context.Context) (*provision.Machine, error) {
		m, err := parts.Create(ctx, t)
		if err == nil {
			mu.Lock()
			made = append(made, m)
			mu.Unlock()
		}
		return m, err
	}, pool.WithLogger(slog.New(slog.DiscardHandler)))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, machines.Close()) }()
	for machines.Stats().Ready < restAtOnce {
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(20 * time.Millisecond):
		}
	}
	for _, m := range made {
		if err := m.Rested(ctx); err != nil {
			return nil, err
		}
	}
	before, memory, err := measureRest(made)
	if err != nil {
		return nil, err
	}
	began := time.Now()
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-time.After(restTime):
	}
	after, _, err := measureRest(made)
	if err != nil {
		return nil, err
	}
	wall := time.Since(began)
	var cpu []float64
	for i := range before {
		cpu = append(cpu, 100*(after[i]-before[i]).Seconds()/wall.Seconds())
	}
	var theirs []float64
	bare.Watch = func(pid int) error {
		time.Sleep(restAge) // as long as ours have been there, on average
		s, err := vmm.ProcessStats(pid)
		theirs = append(theirs, float64(s.PrivateBytes)/(1<<20))
		return err
	}
	for range restAtOnce {
		if _, err := bare.Restore(ctx, t); err != nil {
			return nil, fmt.Errorf("bare restore: %w", err)
		}
	}
	ours := quantities("pool.memory", "MiB", memory)
	ours.Baseline, ours.mostRatio = "vm.memory", 1.1
	idle := quantities("pool.idle_cpu", "% of a core", cpu)
	idle.most = 0.2
	return []row{quantities("vm.memory", "MiB", theirs), ours, idle}, nil
}

// measureRest reads CPU time and private memory (MiB) of machines.
func measureRest(machines []*provision.Machine) (cpu []time.Duration, memory []float64, err error) {
	for _, m := range machines {
		s, err := m.Stats()
		if err != nil {
			return nil, nil, err
		}
		cpu, memory = append(cpu, s.CPU), append(memory, float64(s.PrivateBytes)/(1<<20))
	}
	return cpu, memory, nil
}

// quantities makes a row of numbers: median and 95th percentile.
func quantities(name, unit string, v []float64) row {
	v = slices.Clone(v)
	slices.Sort(v)
	at := func(q float64) float64 { return v[min(int(q*float64(len(v))), len(v)-1)] }
	if len(v) == 0 {
		return row{Name: name, Unit: unit}
	}
	return row{Name: name, Value: at(0.5), P95: at(0.95), Unit: unit, Samples: len(v)}
}

// burstSize is how many runs come at once, and how many machines are ready for them.
const burstSize = 12

// bursts measures runs on a server whose pool has a machine ready for each: one alone, and as many at once as there are. It
// does so with the rest that the driver has by default, and with machines that rest running.
func bursts(ctx context.Context, o options, data string) ([]row, error) {
	one, many, err := burst(ctx, o, data, provision.RestAuto)
	if err != nil {
		return nil, err
	}
	oneRunning, manyRunning, err := burst(ctx, o, data, provision.RestRunning)
	if err != nil {
		return nil, err
	}
	rows := []row{
		measured("pool.single", "ms", one), measured("pool.burst12", "ms", many),
		measured("pool.single_running", "ms", oneRunning), measured("pool.burst12_running", "ms", manyRunning),
	}
	for i := 1; i < len(rows); i += 2 {
		rows[i].Value, rows[i].Baseline = rows[i].P95, rows[i-1].Name
	}
	rows[1].mostRatio = 3
	return rows, nil
}

// burst measures runs one at a time and burstSize at once, each from queued to its machine being ready.
func burst(ctx context.Context, o options, data string, rest provision.Rest) (single, many []time.Duration, err error) {
	size := fmt.Sprint(burstSize)
	for name, value := range map[string]string{
		"EPHEMERAL_POOL_MIN_READY": size, "EPHEMERAL_POOL_MAX_READY": size, "EPHEMERAL_POOL_MAX_MACHINES": fmt.Sprint(2 * burstSize),
		"EPHEMERAL_MACHINE_MEMORY_MIB": "256", "EPHEMERAL_POOL_REST": string(rest),
	} {
		if err := os.Setenv(name, value); err != nil {
			return nil, nil, err
		}
		defer func() { _ = os.Unsetenv(name) }()
	}
	s, err := serve(ctx, o, data)
	if err != nil {
		return nil, nil, err
	}
	defer s.stop()
	c, err := s.client(ctx)
	if err != nil {
		return nil, nil, err
	}
	once := func() (time.Duration, error) {
		created, err := c.CreateRun(ctx, client.Request{Command: "true"}, client.CreateOptions{Wait: time.Minute})
		if err != nil {
			return 0, err
		}
		r := created.Run
		if r.State != ephemeral.Succeeded || r.StartedAt == nil {
			return 0, fmt.Errorf("run %s ended %s: %+v", r.ID, r.State, r.Error)
		}
		return r.StartedAt.Sub(r.QueuedAt), nil
	}
	settle := 15 * time.Second // until the pool is full again and the host calm
	calm := func() error {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(settle):
			return nil
		}
	}
	for range 4 {
		if err := calm(); err != nil {
			return nil, nil, err
		}
		d, err := once()
		if err != nil {
			return nil, nil, err
		}
		single = append(single, d)
	}
	say("bursts of %d, rest %s", burstSize, rest)
	for range 3 {
		if err := calm(); err != nil {
			return nil, nil, err
		}
		var all sync.WaitGroup
		times, errs := make([]time.Duration, burstSize), make([]error, burstSize)
		for i := range burstSize {
			all.Go(func() { times[i], errs[i] = once() })
		}
		all.Wait()
		if err := errors.Join(errs...); err != nil {
			return nil, nil, err
		}
		many = append(many, times...)
	}
	return single, many, nil
}
