package run

import (
	"errors"
	"sync"
	"testing"
)

// Cancel, the node's success and the node's end by cancellation come together a thousand times: one of them decides, once.
func TestCancelAgainstCompletion(t *testing.T) {
	f := newFixture(t, func(c *Config) { c.Concurrency = 10_000 })
	f.newOrg("o", 0, 1_000_000)
	const runs, atOnce = 1000, 8
	leases := make(chan *Lease, runs)
	for range runs {
		f.admit("o", 100)
		l := f.take()
		f.begin(l)
		leases <- l
	}
	close(leases)
	decided := map[State]int{}
	var mu sync.Mutex
	var workers sync.WaitGroup
	for range atOnce {
		workers.Go(func() {
			for l := range leases {
				state, err := f.raceToTheEnd(l)
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				decided[state]++
				mu.Unlock()
			}
		})
	}
	workers.Wait()
	if decided[Succeeded]+decided[Cancelled] != runs || decided[Succeeded] == 0 || decided[Cancelled] == 0 {
		t.Errorf("ended %v", decided)
	}
	rep := f.balanced()
	f.same(rep.Held, Micros(0))
	t.Logf("ended %v", decided)
}

// raceToTheEnd lets three writers end the run at the same time and returns how it ended. Each must have seen that end.
func (f *fixture) raceToTheEnd(l *Lease) (State, error) {
	var seen [2]Run
	var failed [3]error
	var writers sync.WaitGroup
	for i, end := range []State{Succeeded, Cancelled} {
		writers.Go(func() { seen[i], failed[i] = f.Settle(f.ctx, l, Outcome{State: end}) })
	}
	writers.Go(func() { _, failed[2] = f.Cancel(f.ctx, "o", l.Run) })
	writers.Wait()
	r, err := f.Get(f.ctx, "o", l.Run)
	if err = errors.Join(err, errors.Join(failed[:]...)); err != nil {
		return "", err
	}
	if seen[0].State != r.State || seen[1].State != r.State {
		return "", errors.New("the writers saw different ends")
	}
	f.endedOnce(l.Run)
	return r.State, nil
}
