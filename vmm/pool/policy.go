package pool

import (
	"container/list"
	"errors"
	"fmt"
	"time"

	"github.com/ephemeral-run/ephemeral/vmm/pool/autoscale"
)

// The reasons of failures that no make reported.
var (
	errStillborn = errors.New("machine had ended by the time it was made")
	errDead      = errors.New("machine ended by itself while it waited in the pool")
)

// destroyConcurrency is how many machines are destroyed at once.
const destroyConcurrency = 4

// refusedPause is how long the pool waits when admission refused a machine, unless one is released before.
const refusedPause = time.Second

type slotState uint8

const (
	slotReady   slotState = iota
	slotWarming           // ready, but being exercised
	slotOffered           // the answer to a claim that waited and has not yet taken it
	slotLeased            // in use
	slotRetired           // to be destroyed by the pool, or being destroyed
	slotGone              // counted no more
)

// slot is one machine that the pool counts.
type slot[M Machine] struct {
	m          M
	generation int // of the template it was made from
	madeAt     time.Time
	warmAt     time.Time // when it last did something
	state      slotState
	stale      bool          // ready, and so close to its age that a replacement is made
	serving    bool          // handed out from ready and not yet settled
	shelf      *list.List    // policy.ready or policy.outdated
	el         *list.Element // in shelf
	gone       chan struct{} // closed when the pool counts it no more
}

func (s *slot[M]) dead() bool {
	select {
	case <-s.m.Done():
		return true
	default:
		return false
	}
}

// death is why a dead machine is of no use, in the words of a machine that knows.
func (s *slot[M]) death() error {
	if m, ok := any(s.m).(interface{ Err() error }); ok && m.Err() != nil {
		return fmt.Errorf("%w: %w", errDead, m.Err())
	}
	return errDead
}

// waiter is a claim that found no machine ready. Slot or err is set before done is closed.
type waiter[M Machine] struct {
	number int64 // in order of arrival
	since  time.Time
	slot   *slot[M]
	err    error
	el     *list.Element // in policy.waiters; nil once answered
	done   chan struct{}
}

// policy decides what happens to machines and claims. It starts nothing itself: plan says what to start. Its methods are
// called one at a time and take the time as an argument.
type policy[M Machine] struct {
	cfg        Config
	generation int       // of the template that machines are made from
	ready      list.List // of *slot[M] of the current template, oldest first
	outdated   list.List // ready as well, of earlier templates
	waiters    list.List // of *waiter[M], first come first
	retired    []*slot[M]
	slots      map[M]*slot[M]
	stale      int
	leased     int // in use or offered
	offered    int
	arrivals   int64
	making     int
	warming    int
	keepsWarm  bool   // machines at rest are exercised
	share      *share // of limits that pools have in common; nil: there are none
	destroying int
	serving    int               // claims served from ready whose machine has not settled
	yieldUntil time.Time         // refill and destruction stand back until then at the most
	stoodBack  time.Time         // since when wanted makes stand back; zero: they do not
	scaler     *autoscale.Scaler // nil: the target is MinReady
	decision   autoscale.Decision
	refused    error // why admission refused the last make
	refusedEnd time.Time
	circuit    circuit
	closed     bool
	totals     Totals
	journal    journal
}

func newPolicy[M Machine](cfg Config, now time.Time) *policy[M] {
	p := &policy[M]{slots: make(map[M]*slot[M]), circuit: circuit{state: CircuitClosed}}
	p.configure(cfg, now)
	p.journal.target = p.target()
	return p
}

// configure changes the configuration. What a scaler has learned stays with it as long as scaling is on.
func (p *policy[M]) configure(cfg Config, now time.Time) {
	p.cfg = cfg
	switch {
	case !cfg.Autoscale.Enabled():
		p.scaler, p.decision = nil, autoscale.Decision{}
	case p.scaler == nil:
		p.scaler = autoscale.New(cfg.Autoscale, now)
	default:
		p.scaler.Configure(cfg.Autoscale)
	}
}

// live is the number of machines that count against MaxMachines.
func (p *policy[M]) live() int {
	return p.readyLen() + p.warming + p.leased + p.making + len(p.retired) + p.destroying
}

// target is how many machines should be ready.
func (p *policy[M]) target() int {
	if p.scaler != nil {
		return min(p.decision.Target, p.cfg.MaxReady, p.cfg.MaxMachines)
	}
	return min(p.cfg.MinReady, p.cfg.MaxReady, p.cfg.MaxMachines)
}

// scale lets the scaler set the target.
func (p *policy[M]) scale(now time.Time, pl *plan[M]) {
	if p.scaler == nil || p.closed {
		return
	}
	p.decision = p.scaler.Decide(now, autoscale.Range{
		Min: p.cfg.MinReady, Max: min(p.cfg.MaxReady, p.cfg.MaxMachines), Makers: p.cfg.RefillConcurrency,
	})
	if next := p.scaler.Next(now); !next.IsZero() {
		pl.at(next)
	}
}

// claim serves a claim that has just come; see serve.
func (p *policy[M]) claim(now time.Time) (*slot[M], error) {
	if p.scaler != nil && !p.closed {
		p.scaler.Arrived(now)
	}
	return p.serve(now)
}

// serve hands out the oldest ready machine, or says why there will be none; nil, nil: wait.
func (p *policy[M]) serve(now time.Time) (*slot[M], error) {
	if p.closed {
		return nil, ErrClosed
	}
	for s := p.next(); s != nil; s = p.next() {
		if !p.usable(s, now) {
			continue // usable took it out; each machine is taken out once, so this stays O(1) a claim
		}
		p.unready(s)
		p.lease(s)
		p.totals.Claims++
		p.totals.Hits++
		s.serving = true
		if p.serving++; p.serving == 1 {
			p.yieldUntil = now.Add(p.cfg.Yield)
		}
		return s, nil
	}
	if p.circuit.blocks(now) {
		p.totals.Refused++
		return nil, p.circuit.err()
	}
	return nil, nil
}

// wait queues a claim.
func (p *policy[M]) wait(now time.Time) *waiter[M] {
	p.arrivals++
	w := &waiter[M]{number: p.arrivals, since: now}
	p.queue(w)
	return w
}

// queue puts a claim in its place in the line, which is the end unless it was there before.
func (p *policy[M]) queue(w *waiter[M]) {
	w.done = make(chan struct{})
	for el := p.waiters.Back(); el != nil; el = el.Prev() {
		if el.Value.(*waiter[M]).number < w.number {
			w.el = p.waiters.InsertAfter(w, el)
			return
		}
	}
	w.el = p.waiters.PushFront(w)
}

// take hands out the machine a queued claim was offered, unless it died meanwhile; then the claim is served anew, with
// nothing taken from its place in the line. It returns nil, nil when the claim is back in line.
func (p *policy[M]) take(w *waiter[M], now time.Time) (*slot[M], error) {
	s := w.slot
	if s == nil {
		return nil, w.err
	}
	w.slot = nil
	if p.closed {
		p.withdraw()
		p.retire(s)
		return nil, ErrClosed
	}
	if !s.dead() {
		s.state = slotLeased
		p.offered--
		p.totals.Claims++
		p.totals.Wait += now.Sub(w.since)
		return s, nil
	}
	p.withdraw()
	p.usable(s, now)
	if s, err := p.serve(now); s != nil || err != nil {
		return s, err
	}
	p.queue(w)
	return nil, nil
}

// cancel ends a claim that waited. A machine it was offered goes to the next, for nobody has used it.
func (p *policy[M]) cancel(w *waiter[M], now time.Time) {
	p.totals.Cancelled++
	if w.el != nil {
		p.waiters.Remove(w.el)
		w.el = nil
		return
	}
	if s := w.slot; s != nil {
		w.slot = nil
		p.withdraw()
		p.offer(s, now)
	}
}

// withdraw takes back a machine that was offered and not taken.
func (p *policy[M]) withdraw() {
	p.leased--
	p.offered--
}

// answer ends the wait of a claim.
func (p *policy[M]) answer(w *waiter[M], s *slot[M], err error) {
	p.waiters.Remove(w.el)
	w.el, w.slot, w.err = nil, s, err
	close(w.done)
}

// answerAll ends the wait of every claim with an error.
func (p *policy[M]) answerAll(err error) {
	for el := p.waiters.Front(); el != nil; el = p.waiters.Front() {
		p.totals.Refused++
		p.answer(el.Value.(*waiter[M]), nil, err)
	}
}

// made takes in the machine of a make that succeeded; one that is dead already counts as a failure. The slot is to be
// watched for its death.
func (p *policy[M]) made(m M, t ticket, now time.Time) (s *slot[M], opened bool, err error) {
	p.making--
	p.share.makeEnded()
	s = &slot[M]{m: m, generation: t.generation, madeAt: now, warmAt: now, gone: make(chan struct{})}
	p.slots[m] = s
	if s.dead() {
		p.retire(s)
		return s, p.failed(t.epoch, now, errStillborn), errStillborn
	}
	p.totals.Made++
	was := p.circuit.state
	p.circuit.made(t.epoch)
	p.journal.closed(now, was, p.circuit.state)
	if p.scaler != nil {
		p.scaler.Refilled(now.Sub(t.since))
	}
	p.offer(s, now)
	return s, false, nil
}

// offer gives a machine that nobody has used to the first claim that waits, or makes it ready.
func (p *policy[M]) offer(s *slot[M], now time.Time) {
	switch {
	case p.closed:
		p.retire(s)
	case !p.usable(s, now):
	case p.waiters.Len() > 0:
		w := p.waiters.Front().Value.(*waiter[M])
		p.lease(s)
		s.state = slotOffered
		p.offered++
		p.answer(w, s, nil)
	default:
		p.enready(s)
	}
}

// makeFailed notes a make that failed and tells whether that opened the circuit.
func (p *policy[M]) makeFailed(t ticket, now time.Time, reason error) (opened bool) {
	p.making--
	p.share.makeEnded()
	p.share.free()
	return p.failed(t.epoch, now, reason)
}

func (p *policy[M]) failed(epoch int, now time.Time, reason error) (opened bool) {
	p.totals.MakeFailures++
	if opened = p.circuit.failed(epoch, now, reason); opened {
		p.journal.opened(now, &p.circuit)
		p.answerAll(p.circuit.err())
	}
	return opened
}

// makeRefused notes a make that admission did not let start.
func (p *policy[M]) makeRefused(t ticket, now time.Time, reason error) {
	p.making--
	p.share.makeEnded()
	p.share.free()
	p.circuit.untried(t.epoch)
	p.journal.refused(now, p.refused, reason)
	p.refused, p.refusedEnd = reason, now.Add(refusedPause)
}

// usable takes a machine that is dead or past its age out of service. It must not be in use.
func (p *policy[M]) usable(s *slot[M], now time.Time) bool {
	switch {
	case s.dead():
		p.unready(s)
		p.retire(s)
		p.lost(now, s.death())
		return false
	case p.cfg.MaxAge > 0 && now.Sub(s.madeAt) >= p.cfg.MaxAge:
		p.unready(s)
		p.retire(s)
		p.totals.Expired++
		return false
	}
	return true
}

// lost notes that a machine nobody used turned out useless.
func (p *policy[M]) lost(now time.Time, reason error) {
	p.totals.Died++
	if p.circuit.died(now, reason) {
		p.journal.opened(now, &p.circuit)
		p.answerAll(p.circuit.err())
	}
}

// died notes that a machine has ended. One in use counts no more; a ready one is destroyed, for its remains.
func (p *policy[M]) died(s *slot[M], now time.Time) {
	switch s.state {
	case slotReady:
		if s.el != nil {
			p.usable(s, now)
		}
	case slotLeased:
		p.release(s)
	}
}

// released notes that whoever claimed the machine has destroyed it.
func (p *policy[M]) released(m M) {
	if s := p.slots[m]; s != nil && s.state == slotLeased {
		p.release(s)
	}
}

func (p *policy[M]) release(s *slot[M]) {
	p.leased--
	p.settle(s)
	p.forget(s)
}

// settled notes that a claimed machine is up: refill and destruction need not stand back for it.
func (p *policy[M]) settled(m M) {
	if s := p.slots[m]; s != nil {
		p.settle(s)
	}
}

func (p *policy[M]) settle(s *slot[M]) {
	if s.serving {
		s.serving = false
		p.serving--
	}
}

// destroyed notes that the pool has destroyed a machine.
func (p *policy[M]) destroyed(s *slot[M]) {
	p.destroying--
	p.totals.Destroyed++
	p.forget(s)
}

func (p *policy[M]) forget(s *slot[M]) {
	p.refusedEnd = time.Time{} // its memory is free again: ask admission anew
	if s.state == slotRetired {
		p.share.reprieve()
	}
	p.share.free()
	s.state = slotGone
	delete(p.slots, s.m)
	close(s.gone)
}

// shut makes the pool refuse claims and retires every ready machine.
func (p *policy[M]) shut() {
	p.closed = true
	p.answerAll(ErrClosed)
	p.share.starve(0)
	for s := p.next(); s != nil; s = p.next() {
		p.unready(s)
		p.retire(s)
	}
}

func (p *policy[M]) lease(s *slot[M]) {
	s.state = slotLeased
	p.leased++
	p.circuit.served()
}

func (p *policy[M]) retire(s *slot[M]) {
	s.state = slotRetired
	p.share.doom()
	p.retired = append(p.retired, s)
}
