package pool

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"
)

// Pool keeps machines ready and hands each out once. Its methods are safe for concurrent use.
type Pool[M Machine] struct {
	warm  func(context.Context, M) error // nil: machines at rest are not exercised
	admit func() error
	clock Clock
	log   *slog.Logger
	told  Observer

	patience func() float64
	filled   atomic.Bool // it had MinReady machines once

	ctx    context.Context // ends when the pool is closed; makes run under it
	cancel context.CancelFunc
	wakes  chan struct{} // holds one: something happened, plan anew
	tasks  sync.WaitGroup

	mu     sync.Mutex
	maker  func(context.Context) (M, error) // of the current template
	policy *policy[M]
	errs   []error // of machines destroyed while closing
}

// Option changes how a pool works.
type Option func(*options)

type options struct {
	admit     func() error
	clock     Clock
	log       *slog.Logger
	warm      any // func(context.Context, M) error
	limits    *Limits
	memoryMiB int
	observer  Observer
	patience  func() float64
}

// WithAdmission makes the pool ask admit before each make. An error (no memory, say) puts the make off; it is no failure
// of the make. admit must not block.
func WithAdmission(admit func() error) Option { return func(o *options) { o.admit = admit } }

// WithClock makes the pool go by another clock than the system's.
func WithClock(c Clock) Option { return func(o *options) { o.clock = c } }

// WithKeepWarm makes the pool call warm for each ready machine every Config.KeepWarm, one at a time. It is for machines that
// rest running: an idle guest's pages are reclaimed, and its first claim pays for them. A machine being exercised is not handed
// out; one whose exercise fails is destroyed. Warm must end soon after its context does.
func WithKeepWarm[M Machine](warm func(context.Context, M) error) Option {
	return func(o *options) { o.warm = warm }
}

// WithLimits puts the pool under limits that it shares with others. A machine of this pool takes memoryMiB of them.
func WithLimits(l *Limits, memoryMiB int) Option {
	return func(o *options) { o.limits, o.memoryMiB = l, memoryMiB }
}

// WithObserver makes the pool tell o what happens.
func WithObserver(o Observer) Option { return func(opts *options) { opts.observer = o } }

// WithPatience makes the pool's time limits for makes and exercises longer by a factor, 1 at least, that it asks for at the
// start of each: a busy host takes longer for the same work, and a limit that strikes then makes it busier still.
func WithPatience(factor func() float64) Option { return func(o *options) { o.patience = factor } }

// WithLogger says where failures in the background are logged; the default is slog.Default.
func WithLogger(l *slog.Logger) Option { return func(o *options) { o.log = l } }

// New opens a pool and starts to fill it. Maker makes one machine; it must end soon after its context does, and it
// returns a machine that answers or an error. The pool's machines are made by Config.RefillConcurrency makers at once.
func New[M Machine](cfg Config, maker func(context.Context) (M, error), opts ...Option) (*Pool[M], error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("open pool: %w", err)
	}
	o := options{clock: systemClock{}, log: slog.Default(), observer: deaf{}, patience: func() float64 { return 1 }}
	for _, opt := range opts {
		opt(&o)
	}
	p := &Pool[M]{
		maker: maker, admit: o.admit, clock: o.clock, log: o.log, told: o.observer, patience: o.patience,
		wakes: make(chan struct{}, 1), policy: newPolicy[M](cfg, o.clock.Now()),
	}
	if o.warm != nil {
		warm, ok := o.warm.(func(context.Context, M) error)
		if !ok {
			return nil, fmt.Errorf("open pool: WithKeepWarm takes %T, which is for other machines", o.warm)
		}
		p.warm, p.policy.keepsWarm = warm, true
	}
	if o.limits != nil {
		share, err := o.limits.join(o.memoryMiB, p.wake)
		if err != nil {
			return nil, fmt.Errorf("open pool: %w", err)
		}
		p.policy.share = share
	}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	p.tasks.Go(p.manage)
	p.wake()
	return p, nil
}

// Claim hands out a machine, which from then on is the caller's to close; Released tells the pool that it is gone. With
// none ready the claim waits behind earlier ones until ctx ends. It fails with ErrClosed, with a *CircuitError when it
// would have to wait while making machines fails, or with the cause of ctx's end.
func (p *Pool[M]) Claim(ctx context.Context) (M, error) {
	var none M
	if ctx.Err() != nil {
		return none, fmt.Errorf("claim machine: %w", context.Cause(ctx))
	}
	now := p.clock.Now()
	var w *waiter[M]
	p.mu.Lock()
	s, err := p.policy.claim(now)
	if s == nil && err == nil {
		w = p.policy.wait(now)
	}
	p.mu.Unlock()
	p.wake()
	switch {
	case err != nil:
		return none, fmt.Errorf("claim machine: %w", err)
	case s != nil:
		p.told.Claimed(0, now.Sub(s.madeAt), true)
		return s.m, nil
	}
	return p.await(ctx, w)
}

// await waits for the answer to a queued claim.
func (p *Pool[M]) await(ctx context.Context, w *waiter[M]) (M, error) {
	var none M
	for {
		select {
		case <-w.done:
		case <-ctx.Done():
			p.mu.Lock()
			p.policy.cancel(w, p.clock.Now())
			p.mu.Unlock()
			p.wake()
			return none, fmt.Errorf("claim machine: %w", context.Cause(ctx))
		}
		p.mu.Lock()
		now := p.clock.Now()
		s, err := p.policy.take(w, now)
		p.mu.Unlock()
		p.wake()
		switch {
		case err != nil:
			return none, fmt.Errorf("claim machine: %w", err)
		case s != nil:
			p.told.Claimed(now.Sub(w.since), now.Sub(s.madeAt), false)
			return s.m, nil
		}
	}
}

// Settled tells the pool that a claimed machine is up and working, so that refill and destruction need not stand back
// for it any longer.
func (p *Pool[M]) Settled(m M) {
	p.mu.Lock()
	p.policy.settled(m)
	p.mu.Unlock()
	p.wake()
}

// Released tells the pool that a claimed machine was closed and counts no more. A machine that is Done counts no more
// even without it.
func (p *Pool[M]) Released(m M) {
	p.mu.Lock()
	p.policy.released(m)
	p.mu.Unlock()
	p.wake()
}

// Resize changes the configuration at once. Machines in use are never touched.
func (p *Pool[M]) Resize(cfg Config) error {
	if err := cfg.Validate(); err != nil {
		return fmt.Errorf("resize pool: %w", err)
	}
	p.mu.Lock()
	p.policy.configure(cfg, p.clock.Now())
	p.policy.journal.note(p.clock.Now(), "resized", fmt.Sprintf("To keep %d to %d ready of at most %d machines, %d made at once.",
		cfg.MinReady, cfg.MaxReady, cfg.MaxMachines, cfg.RefillConcurrency))
	p.mu.Unlock()
	p.wake()
	return nil
}

// Swap makes later machines with another maker: from a new template. Ready machines of the earlier one serve claims until
// one of the new is ready, are then handed out no more, and are destroyed as they are replaced. A circuit that is open closes.
func (p *Pool[M]) Swap(maker func(context.Context) (M, error)) {
	p.mu.Lock()
	p.maker = maker
	p.policy.swap()
	p.policy.journal.note(p.clock.Now(), "template swapped", "Machines are made from another template; those ready serve until they are replaced.")
	p.mu.Unlock()
	p.wake()
}

// Config is the configuration in force.
func (p *Pool[M]) Config() Config {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.policy.cfg
}

// Stats is what the pool looks like now.
func (p *Pool[M]) Stats() Stats {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.policy.stats(p.clock.Now())
}

// Close refuses further claims, ends the makes under way, destroys every machine that was not handed out and waits for
// all of it. It returns what went wrong with the destruction. Closing twice is harmless.
func (p *Pool[M]) Close() error {
	p.mu.Lock()
	if !p.policy.closed {
		p.policy.shut()
		p.cancel()
	}
	p.mu.Unlock()
	p.wake()
	p.tasks.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := errors.Join(p.errs...); err != nil {
		return fmt.Errorf("close pool: %w", err)
	}
	return nil
}

// wake makes the manager plan anew. It never blocks.
func (p *Pool[M]) wake() {
	select {
	case p.wakes <- struct{}{}:
	default:
	}
}

// manage starts what the policy plans, each time something happened or the time it named has come. It ends when the pool
// is closed and empty.
func (p *Pool[M]) manage() {
	stop := func() bool { return true }
	for range p.wakes {
		stop()
		p.mu.Lock()
		now := p.clock.Now()
		pl := p.policy.plan(now)
		over := p.policy.over()
		maker := p.maker
		p.mu.Unlock()
		if over {
			p.policy.share.leave()
			return
		}
		for _, s := range pl.destroys {
			p.tasks.Go(func() { p.destroy(s) })
		}
		for range pl.makes {
			p.tasks.Go(func() { p.make(pl.ticket, maker) })
		}
		for _, s := range pl.warms {
			p.tasks.Go(func() { p.exercise(s) })
		}
		if !pl.next.IsZero() {
			stop = p.clock.AfterFunc(max(0, pl.next.Sub(now)), p.wake)
		}
	}
}

// make makes one machine and takes it in.
func (p *Pool[M]) make(t ticket, maker func(context.Context) (M, error)) {
	defer p.wake()
	if p.admit != nil {
		if err := p.admit(); err != nil {
			p.mu.Lock()
			p.policy.makeRefused(t, p.clock.Now(), err)
			p.mu.Unlock()
			return
		}
	}
	began := p.clock.Now()
	m, err := p.call(maker)
	p.told.Made(p.clock.Now().Sub(began), err)
	p.mu.Lock()
	now := p.clock.Now()
	var s *slot[M]
	var opened bool
	if err != nil {
		opened = p.policy.makeFailed(t, now, err)
	} else {
		s, opened, err = p.policy.made(m, t, now)
		p.tasks.Go(func() { p.watch(s) })
	}
	closed, until := p.policy.closed, p.policy.circuit.until
	p.mu.Unlock()
	switch {
	case err == nil || closed:
	case opened:
		p.log.Error("making machines keeps failing, circuit opened", "error", err, "until", until)
	default:
		p.log.Warn("making a machine failed", "error", err)
	}
}

// call runs the maker under its time limit.
func (p *Pool[M]) call(maker func(context.Context) (M, error)) (M, error) {
	limit := p.patient(p.Config().MakeTimeout)
	ctx, cancel := context.WithCancelCause(p.ctx)
	defer cancel(nil)
	timeout := fmt.Errorf("not made within %s: %w", limit, context.DeadlineExceeded)
	stop := p.clock.AfterFunc(limit, func() { cancel(timeout) })
	defer stop()
	m, err := maker(ctx)
	if err != nil && errors.Is(context.Cause(ctx), timeout) {
		return m, fmt.Errorf("%w (%w)", timeout, err)
	}
	return m, err
}

// patient is a time limit on this host as busy as it is.
func (p *Pool[M]) patient(limit time.Duration) time.Duration {
	return time.Duration(max(1, p.patience()) * float64(limit))
}

// watch tells the policy when a machine dies, until it counts no more.
func (p *Pool[M]) watch(s *slot[M]) {
	select {
	case <-s.m.Done():
		p.mu.Lock()
		p.policy.died(s, p.clock.Now())
		p.mu.Unlock()
		p.wake()
	case <-s.gone:
	case <-p.ctx.Done():
	}
}

// destroy closes a machine that was never handed out.
func (p *Pool[M]) destroy(s *slot[M]) {
	defer p.wake()
	err := s.m.Close()
	p.mu.Lock()
	p.policy.destroyed(s)
	closed := p.policy.closed
	if err != nil && closed {
		p.errs = append(p.errs, err)
	}
	p.mu.Unlock()
	if err != nil && !closed {
		p.log.Warn("destroying a machine failed", "error", err)
	}
}
