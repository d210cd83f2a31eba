package run

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"time"
)

// pollInterval is how long a node that waits for work sleeps when no wake-up comes. It covers what no message can: a
// wake-up lost with a connection.
const pollInterval = time.Second

var nodePattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$`)

var takeScript, renewScript, requeueScript = loadScript("take"), loadLax("renew"), loadScript("requeue")

// Take leases the next run to the node: organisations that have runs waiting and are under their limit take turns, the
// one that was served longest ago first; inside one the oldest run is first. It blocks until there is work or ctx ends,
// and is woken by admissions and ends of runs. With no room for runs there is no work (see WithRoom). An error is ctx's or ErrUnavailable; the caller decides when to try again.
//
// Script take.lua.
func (s *Store) Take(ctx context.Context, node string) (*Lease, error) {
	return s.TakeOf(ctx, node, nil)
}

// TakeOf is Take of the runs whose image is one of those that able names, which is asked again with every look; nil: of all. Runs
// of other images keep their places. A node looks past a hundred of them in each organisation, and past a hundred organisations
// that have no others.
func (s *Store) TakeOf(ctx context.Context, node string, able func() []string) (*Lease, error) {
	if !nodePattern.MatchString(node) {
		return nil, fmt.Errorf("take: node name %.64q: %w", node, ErrRange)
	}
	wake := s.waker.listen(s)
	timer := time.NewTimer(pollInterval)
	defer timer.Stop()
	for {
		var l *Lease
		var err error
		if s.Full() != nil {
			// What runs already has what room there is.
		} else if able == nil {
			l, err = s.tryTake(ctx, node)
		} else if images := able(); len(images) > 0 {
			l, err = s.tryTake(ctx, node, images...)
		}
		if l != nil {
			s.waker.wake() // one wake-up may stand for several runs: pass it on
			return l, nil
		}
		if err != nil {
			if ctx.Err() != nil {
				err = ctx.Err()
			}
			return nil, fmt.Errorf("take for node %s: %w", node, err)
		}
		timer.Reset(pollInterval)
		select {
		case <-wake:
		case <-timer.C:
		case <-ctx.Done():
			return nil, fmt.Errorf("take for node %s: %w", node, ctx.Err())
		case <-s.life.Done():
			return nil, fmt.Errorf("take for node %s: store closed: %w", node, ErrUnavailable)
		}
	}
}

// waker wakes the takers of this process. The channel holds one wake-up, so none is lost between a take that found
// nothing and the wait that follows it; who takes a run passes the wake-up on.
type waker struct {
	once sync.Once
	ch   chan struct{}
}

// listen starts the store's subscription to the work channel, once, and returns the channel to wait on. A subscription
// that is not up yet loses nothing: when it comes up, it wakes.
func (w *waker) listen(s *Store) <-chan struct{} {
	w.once.Do(func() {
		w.ch = make(chan struct{}, 1)
		s.routines.Go(func() {
			s.follow(s.life, s.keys.work(), func(string) { w.wake() }, w.wake)
		})
	})
	return w.ch
}

func (w *waker) wake() {
	select {
	case w.ch <- struct{}{}:
	default:
	}
}

// tryTake takes a run, of the images if any are given, or returns nil when there is none to take.
func (s *Store) tryTake(ctx context.Context, node string, images ...string) (*Lease, error) {
	able := ""
	if len(images) > 0 {
		able = " " + strings.Join(images, " ") + " "
	}
	now := s.micros()
	args := []any{s.keys.events(), s.keys.work(), node, now, now + s.cfg.Lease.Microseconds(), s.cfg.Lease.Milliseconds(),
		s.cfg.Concurrency, s.cfg.Retention.Milliseconds(), endedContentLost.data, endedContentLost.outcome, able}
	for _, k := range s.keys.closing("<org>", "<run>") {
		args = append(args, k)
	}
	// The answer's name makes a repetition harmless, on the network or by the node's next take: it gets the same lease.
	answer := s.unanswered.pop(node)
	if answer == "" {
		answer = word(12)
	}
	r, err := s.eval(ctx, takeScript, []string{s.keys.ring(), s.keys.turn(), s.keys.leases(), s.keys.answer(answer)}, args...)
	if err != nil {
		s.unanswered.push(node, answer)
		return nil, err
	}
	if r.code() == "NONE" {
		s.allEndedHere(ctx, r.text(1))
		return nil, nil
	}
	if err := refused(r); err != nil {
		return nil, fmt.Errorf("run %s: %w", r.text(1), err)
	}
	s.allEndedHere(ctx, r.text(8))
	return decodeLease(r, node)
}

// unanswered are takes of which nobody knows what they took. Without them what they took would wait for its lease to end.
type unanswered struct {
	mu     sync.Mutex
	byNode map[string][]string
}

// maxUnanswered bounds how many are kept of one node; those beyond are reaped.
const maxUnanswered = 64

func (u *unanswered) push(node, answer string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.byNode == nil {
		u.byNode = map[string][]string{}
	}
	if len(u.byNode[node]) < maxUnanswered {
		u.byNode[node] = append(u.byNode[node], answer)
	}
}

// pop returns one of the node's, or "" when there is none.
func (u *unanswered) pop(node string) string {
	u.mu.Lock()
	defer u.mu.Unlock()
	list := u.byNode[node]
	if len(list) == 0 {
		return ""
	}
	last := list[len(list)-1]
	if list = list[:len(list)-1]; len(list) == 0 {
		delete(u.byNode, node)
	} else {
		u.byNode[node] = list
	}
	return last
}

func decodeLease(r reply, node string) (*Lease, error) {
	token, err1 := r.int(3)
	queued, err2 := r.int(4)
	reserved, err3 := r.int(5)
	if err := errors.Join(err1, err2, err3); err != nil {
		return nil, err
	}
	l := &Lease{Run: ID(r.text(1)), Org: r.text(2), Node: node, Token: token, QueuedAt: time.UnixMicro(queued).UTC(), Reserved: Micros(reserved)}
	spec := r.text(7)
	if spec == "" {
		spec = r.text(6)
	}
	if err := json.Unmarshal([]byte(spec), &l.Spec); err != nil {
		return nil, fmt.Errorf("spec of %s: %w", l.Run, err)
	}
	return l, nil
}

// Renew extends the lease by its full time and tells whether the run was asked to cancel. ErrLeaseLost: stop at once.
//
// Script renew.lua.
func (s *Store) Renew(ctx context.Context, l *Lease) (cancelled bool, err error) {
	r, err := s.eval(ctx, renewScript, []string{s.keys.run(string(l.Run)), s.keys.leases()},
		string(l.Run), l.Token, s.micros()+s.cfg.Lease.Microseconds())
	if err == nil {
		err = refused(r)
	}
	if err != nil {
		return false, fmt.Errorf("renew lease of %s: %w", l.Run, err)
	}
	return r.text(1) == "1", nil
}

// Requeue gives a run back that never started: ErrState once it has started, ErrLeaseLost when it is not the caller's. It
// keeps its place in the queue, and what it was charged so far is taken back. A run that was asked to cancel ends cancelled
// instead.
//
// Script requeue.lua.
func (s *Store) Requeue(ctx context.Context, l *Lease) error {
	content := ""
	if l.Spec.ZeroDataRetention {
		var err error
		if content, err = encode("request", l.Spec); err != nil {
			return fmt.Errorf("requeue %s: %w", l.Run, err)
		}
	}
	r, err := s.eval(ctx, requeueScript, s.keys.closing(l.Org, string(l.Run)),
		s.keys.events(), s.keys.work(), string(l.Run), l.Token, s.micros(), content, s.cfg.Retention.Milliseconds(),
		s.cfg.Concurrency, endedCancelled.data, endedCancelled.outcome)
	if err == nil {
		err = moved(r, l.Run, Queued)
	}
	if err != nil {
		return fmt.Errorf("requeue %s: %w", l.Run, err)
	}
	if r.text(1) == "1" {
		s.endedHere(ctx, l.Org, l.Run)
	}
	return nil
}
