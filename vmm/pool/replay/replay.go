// Package replay plays a workload on a pool of real machines, and compares what its claims saw with what the simulator says
// of the same workload. It is for tests and measurements of the simulator.
package replay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/ephemeral-run/ephemeral/vmm/pool"
	"github.com/ephemeral-run/ephemeral/vmm/pool/simulate"
	"github.com/ephemeral-run/ephemeral/vmm/pool/workload"
)

// Outcome is what the claims of a workload saw, and what was predicted.
type Outcome struct {
	Arrivals    int
	FirstMake   time.Duration // of the first machine; half an arrival comes in that time
	Missed      float64       // share of the claims that found no machine ready
	Predicted   float64
	WaitP95     time.Duration // 95th percentile of the waits of all claims
	PredictedBy time.Duration // the simulator's
}

// How far a prediction may be off.
const (
	missError = 0.2
	waitError = 0.3
)

// Holds tells whether there was something to predict, and the misses are within 20 percent and the wait within 30 percent.
func (o Outcome) Holds() bool {
	off := func(got, predicted float64) float64 { return math.Abs(predicted-got) / got }
	return o.Missed > 0 && off(o.Missed, o.Predicted) <= missError && off(o.WaitP95.Seconds(), o.PredictedBy.Seconds()) <= waitError
}

func (o Outcome) String() string {
	return fmt.Sprintf("%d arrivals, a make takes %s: missed %.3f, predicted %.3f; p95 of the waits %.3f s, predicted %.3f s",
		o.Arrivals, o.FirstMake.Round(time.Millisecond), o.Missed, o.Predicted, o.WaitP95.Seconds(), o.PredictedBy.Seconds())
}

// replay keeps how long real machines took.
type replay[M pool.Machine] struct {
	maker func(context.Context) (M, error)

	mu       sync.Mutex
	makes    []time.Duration // in order: one is made at a time
	destroys []time.Duration // in the order in which the machines were claimed
	waits    []time.Duration
	errs     []error
}

// Run plays that many arrivals, a Poisson process that keeps the making of one machine after the other busy, on a pool of one ready
// machine, each of which is used for the service time. The simulator takes for each machine what making and destroying it took:
// what else the host does hits both alike, and what is compared is what pool and policy make of it.
func Run[M pool.Machine](ctx context.Context, maker func(context.Context) (M, error), arrivals int, service time.Duration) (Outcome, error) {
	cfg := pool.Config{MinReady: 1, MaxReady: 2, MaxMachines: 6, RefillConcurrency: 1, MakeTimeout: time.Minute}
	r := &replay[M]{maker: maker, destroys: make([]time.Duration, arrivals)}
	machines, err := pool.New(cfg, r.make, pool.WithLogger(slog.New(slog.DiscardHandler)))
	if err != nil {
		return Outcome{}, fmt.Errorf("replay: %w", err)
	}
	o, given, err := r.play(ctx, machines, arrivals, service)
	if err := errors.Join(err, machines.Close()); err != nil {
		return o, fmt.Errorf("replay: %w", err)
	}
	want, err := simulate.Run(ctx, simulate.Config{
		Pool: cfg, Restore: &measured{all: r.makes}, Destroy: &measured{all: r.destroys}, Settle: workload.Const(0), MaxWait: -1,
		MemoryMiB: 1, ReadyMemoryMiB: 1,
		Workload: workload.Workload{Given: given, ServiceGiven: true, Count: len(given), Seed: 1},
	})
	if err != nil {
		return o, fmt.Errorf("replay: %w", err)
	}
	o.Predicted, o.PredictedBy = want.MissRate, time.Duration(want.WaitP95*float64(time.Second))
	return o, nil
}

// make makes a machine and notes how long that took.
func (r *replay[M]) make(ctx context.Context) (M, error) {
	began := time.Now()
	m, err := r.maker(ctx)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.makes = append(r.makes, time.Since(began))
	return m, err
}

// play has arrivals come once a machine is ready, and waits until all have been served.
func (r *replay[M]) play(ctx context.Context, machines *pool.Pool[M], arrivals int, service time.Duration) (o Outcome, given []workload.Arrival, err error) {
	for machines.Stats().Ready < 1 {
		select {
		case <-ctx.Done():
			return o, nil, context.Cause(ctx)
		case <-time.After(5 * time.Millisecond):
		}
	}
	r.mu.Lock()
	first := r.makes[len(r.makes)-1]
	r.mu.Unlock()
	process := workload.Poisson(0.5 / first.Seconds()) // so that the maker has much to do, as in a burst
	next := workload.Workload{Process: process, Service: workload.Const(service), Count: arrivals, Seed: 7}.Start()
	for a, ok := next(); ok; a, ok = next() {
		given = append(given, a)
	}
	var runs sync.WaitGroup
	began := time.Now()
	for _, a := range given {
		select {
		case <-ctx.Done():
			runs.Wait()
			return o, nil, context.Cause(ctx)
		case <-time.After(time.Until(began.Add(a.At))):
		}
		runs.Go(func() { r.use(ctx, machines, a.Service) })
	}
	runs.Wait()
	if err := errors.Join(r.errs...); err != nil {
		return o, nil, err
	}
	slices.Sort(r.waits)
	return Outcome{
		Arrivals: arrivals, FirstMake: first, Missed: 1 - float64(machines.Stats().Hits)/float64(arrivals),
		WaitP95: r.waits[(arrivals*95+99)/100-1],
	}, given, nil
}

// use is one arrival.
func (r *replay[M]) use(ctx context.Context, machines *pool.Pool[M], service time.Duration) {
	from := time.Now()
	m, err := machines.Claim(ctx)
	r.mu.Lock()
	n := len(r.waits)
	if err != nil {
		r.errs = append(r.errs, err)
	} else {
		r.waits = append(r.waits, time.Since(from))
	}
	r.mu.Unlock()
	if err != nil {
		return
	}
	machines.Settled(m)
	time.Sleep(service)
	from = time.Now()
	err = m.Close()
	r.mu.Lock()
	r.destroys[n] = time.Since(from)
	if err != nil {
		r.errs = append(r.errs, err)
	}
	r.mu.Unlock()
	machines.Released(m)
}

// measured is a distribution that gives what was measured, in its order, and after that the mean.
type measured struct {
	all  []time.Duration
	next int
}

// Sample implements workload.Dist.
func (m *measured) Sample(*rand.Rand) time.Duration {
	if m.next < len(m.all) {
		m.next++
		return m.all[m.next-1]
	}
	return m.Mean()
}

// Mean implements workload.Dist.
func (m *measured) Mean() time.Duration {
	var sum time.Duration
	for _, d := range m.all {
		sum += d
	}
	return sum / time.Duration(max(1, len(m.all)))
}

func (m *measured) String() string { return fmt.Sprintf("%d measured", len(m.all)) }
