// Package simulate plays a workload against a pool's policy in virtual time. The policy and the autoscaler are the very code
// that runs on a node (pool.Stepper); only the clock, the machines and the work are made up. Makes do not slow each other or
// the work down: what they take under load has to be in the distributions.
package simulate

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/ephemeral-run/ephemeral/vmm/pool"
	"github.com/ephemeral-run/ephemeral/vmm/pool/workload"
)

// Config is what is simulated.
type Config struct {
	Pool     pool.Config
	Workload workload.Workload

	Restore workload.Dist // making a machine
	Settle  workload.Dist // from the claim until the machine is up and working; part of the service time
	Destroy workload.Dist // destroying a machine
	// FailureRate is the share of restores that fail after their time.
	FailureRate float64
	// MaxWait is how long a claim waits before it gives up; negative: for ever.
	MaxWait time.Duration

	MemoryMiB      int // of a machine in use, being made or destroyed
	ReadyMemoryMiB int // of a machine that rests ready
}

// Validate says what is wrong with the configuration, all of it at once.
func (c Config) Validate() error {
	errs := []error{c.Pool.Validate()}
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	check(c.Restore != nil && c.Settle != nil && c.Destroy != nil, "a distribution is missing")
	check(c.Workload.Process != nil || c.Workload.Given != nil, "there are no arrivals")
	check(c.Workload.ServiceGiven || c.Workload.Service != nil, "there is no service time")
	check(c.Workload.Count >= 1 && c.Workload.Count <= MostArrivals, "%d arrivals: must be from 1 to %d", c.Workload.Count, MostArrivals)
	check(c.FailureRate >= 0 && c.FailureRate < 1, "failure rate %g: must be from 0 to below 1", c.FailureRate)
	check(c.MemoryMiB >= 1 && c.ReadyMemoryMiB >= 0, "memory of a machine: %d MiB in use and %d MiB ready", c.MemoryMiB, c.ReadyMemoryMiB)
	return errors.Join(errs...)
}

// MostArrivals bounds a simulation; each costs eight bytes.
const MostArrivals = 50_000_000

// filling is how long the pool may take to fill before the first arrival.
const filling = 10 * time.Minute

// epoch is when virtual time begins.
var epoch = time.Unix(0, 0).UTC()

var (
	errRestore = errors.New("simulated failure")
	errStuck   = errors.New("claims wait for ever: nothing is under way that could serve them")
)

// machine is a machine that only has an identity (not of size zero: those may share an address). It never dies by itself.
type machine struct{ _ byte }

// Close implements pool.Machine.
func (*machine) Close() error { return nil }

// Done implements pool.Machine.
func (*machine) Done() <-chan struct{} { return nil }

// claim is one arrival under way.
type claim struct {
	at      time.Time
	service time.Duration
	waiting pool.Waiting[*machine]
	ended   bool // served or given up
}

// simulation is one run. It is driven by a heap of events.
type simulation struct {
	cfg     Config
	policy  *pool.Stepper[*machine]
	random  *rand.Rand
	next    func() (workload.Arrival, bool)
	now     time.Time
	start   time.Time // of the workload
	events  events
	line    []*claim // claims that wait, first come first; those that ended are taken out at the front
	wakeAt  time.Time
	arrived int
	more    bool // arrivals are to come
	measure measure
}

// Run plays the workload until its last claim is answered.
func Run(ctx context.Context, cfg Config) (Result, error) {
	if err := cfg.Validate(); err != nil {
		return Result{}, fmt.Errorf("simulate: %w", err)
	}
	policy, err := pool.NewStepper[*machine](cfg.Pool, epoch)
	if err != nil {
		return Result{}, fmt.Errorf("simulate: %w", err)
	}
	s := &simulation{cfg: cfg, policy: policy, random: cfg.Workload.Random(), next: cfg.Workload.Start(), now: epoch}
	s.fill()
	s.start = s.now
	s.measure.begin(s)
	s.more = true
	s.schedule()
	for n := 0; s.more || len(s.line) > 0; n++ {
		if n&0xffff == 0 && ctx.Err() != nil {
			return Result{}, fmt.Errorf("simulate: %w", context.Cause(ctx))
		}
		if len(s.events.heap) == 0 {
			return Result{}, fmt.Errorf("simulate: %w", errStuck)
		}
		s.step()
	}
	return s.measure.result(s), nil
}

// fill lets the pool make its first machines before the workload starts.
func (s *simulation) fill() {
	s.plan()
	for len(s.events.heap) > 0 && s.now.Sub(epoch) < filling {
		if c := s.policy.Counts(); c.Making == 0 && c.Ready >= s.policy.Stats(s.now).Target {
			return
		}
		s.step()
	}
}

// schedule puts the next arrival among the events.
func (s *simulation) schedule() {
	a, ok := s.next()
	if !ok {
		s.more = false
		return
	}
	s.events.push(event{at: s.start.Add(a.At), kind: arrives, service: a.Service})
}

// step lets the next event happen, and what follows from it.
func (s *simulation) step() {
	e := s.events.pop()
	s.measure.pass(s, e.at)
	s.now = e.at
	switch e.kind {
	case arrives:
		s.arrive(e.service)
	case makes:
		if s.cfg.FailureRate > 0 && s.random.Float64() < s.cfg.FailureRate {
			s.policy.MakeFailed(e.make, s.now, errRestore)
		} else {
			s.policy.Made(e.make, &machine{}, s.now)
		}
	case settles:
		s.policy.Settled(e.machine)
	case ends:
		s.policy.Released(e.machine)
	case destroys:
		s.policy.Destroyed(e.doomed)
	case givesUp:
		if !e.claim.ended && !e.claim.waiting.Answered() {
			s.policy.Cancel(e.claim.waiting, s.now)
			s.measure.lost()
			e.claim.ended = true
		}
	case wakes:
		if e.at.Equal(s.wakeAt) {
			s.wakeAt = time.Time{}
		}
	}
	s.answer()
	s.plan()
	s.answer()
}

func (s *simulation) arrive(service time.Duration) {
	s.arrived++
	m, ok, w, err := s.policy.Claim(s.now)
	switch {
	case err != nil:
		s.measure.lost()
	case ok:
		s.serve(m, service, 0)
	default:
		c := &claim{at: s.now, service: service, waiting: w}
		s.line = append(s.line, c)
		defer func() {
			if s.cfg.MaxWait >= 0 {
				s.events.push(event{at: s.now.Add(s.cfg.MaxWait), kind: givesUp, claim: c, late: true})
			}
		}()
	}
	s.schedule()
}

// serve lets a claim use its machine.
func (s *simulation) serve(m *machine, service, wait time.Duration) {
	s.measure.served(wait)
	up := s.cfg.Settle.Sample(s.random)
	if up < service {
		s.events.push(event{at: s.now.Add(up), kind: settles, machine: m})
	}
	total := service + s.cfg.Destroy.Sample(s.random)
	s.events.push(event{at: s.now.Add(total), kind: ends, machine: m})
}

// answer hands out the machines that claims in line were offered. They are offered in order of arrival.
func (s *simulation) answer() {
	for len(s.line) > 0 {
		c := s.line[0]
		if !c.ended {
			if !c.waiting.Answered() {
				return
			}
			m, ok, err := s.policy.Take(c.waiting, s.now)
			switch {
			case err != nil:
				s.measure.lost()
			case ok:
				s.serve(m, c.service, s.now.Sub(c.at))
			default: // back in line; a simulated machine does not die
				return
			}
			c.ended = true
		}
		s.line[0] = nil
		s.line = s.line[1:]
	}
}

// plan starts what the policy wants.
func (s *simulation) plan() {
	steps := s.policy.Plan(s.now)
	for range steps.Makes {
		s.events.push(event{at: s.now.Add(s.cfg.Restore.Sample(s.random)), kind: makes, make: steps.Make})
	}
	for _, d := range steps.Destroys {
		s.events.push(event{at: s.now.Add(s.cfg.Destroy.Sample(s.random)), kind: destroys, doomed: d})
	}
	if !steps.Next.IsZero() && (s.wakeAt.IsZero() || steps.Next.Before(s.wakeAt)) {
		s.wakeAt = steps.Next
		if s.wakeAt.Before(s.now) {
			s.wakeAt = s.now
		}
		s.events.push(event{at: s.wakeAt, kind: wakes})
	}
}
