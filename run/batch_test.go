package run

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// station is a batcher whose round trips wait to be let go, one by one.
type station struct {
	batcher
	departed chan []redis.Cmder
	letGo    chan struct{}
	routines sync.WaitGroup
}

func newStation(t *testing.T) *station {
	life, end := context.WithCancel(context.Background())
	st := &station{departed: make(chan []redis.Cmder, 100), letGo: make(chan struct{})}
	st.batcher = batcher{life: life, routines: &st.routines, send: func(ctx context.Context, cmds []redis.Cmder) {
		st.departed <- cmds
		select {
		case <-st.letGo:
		case <-ctx.Done():
			for _, c := range cmds {
				c.SetErr(ctx.Err())
			}
		}
	}}
	t.Cleanup(func() {
		end()
		st.barrier()
		st.routines.Wait()
	})
	return st
}

// fill begins a round trip, so that others wait.
func (st *station) fill(t *testing.T) {
	go st.do(t.Context(), redis.NewCmd(t.Context(), "first"))
	<-st.departed
}

// waitingFor blocks until n commands wait.
func (st *station) waitingFor(n int) {
	for {
		st.mu.Lock()
		have := len(st.waiting)
		st.mu.Unlock()
		if have == n {
			return
		}
		time.Sleep(time.Millisecond)
	}
}

func TestBatchTakesAllThatWait(t *testing.T) {
	st := newStation(t)
	st.fill(t)
	const n = maxBatch + 10
	var callers sync.WaitGroup
	for i := range n {
		callers.Go(func() {
			if err := st.do(t.Context(), redis.NewCmd(t.Context(), "then", i)); err != nil {
				t.Error(err)
			}
		})
	}
	st.waitingFor(n)
	sizes := []int{}
	for range 2 {
		st.letGo <- struct{}{}
		sizes = append(sizes, len(<-st.departed))
	}
	st.letGo <- struct{}{}
	callers.Wait()
	if !slices.Equal(sizes, []int{maxBatch, 10}) {
		t.Errorf("round trips of %v commands", sizes)
	}
}

func TestBatchDoesNotSendWhatNobodyWaitsFor(t *testing.T) {
	st := newStation(t)
	st.fill(t)
	ctx, cancel := context.WithCancel(t.Context())
	var callers sync.WaitGroup
	callers.Go(func() {
		if err := st.do(ctx, redis.NewCmd(ctx, "given up")); !errors.Is(err, ErrUnavailable) || !errors.Is(err, context.Canceled) {
			t.Errorf("given up: %v", err)
		}
	})
	st.waitingFor(1)
	cancel()
	callers.Wait()
	callers.Go(func() { st.do(t.Context(), redis.NewCmd(t.Context(), "kept")) })
	st.waitingFor(2)
	st.letGo <- struct{}{}
	if cmds := <-st.departed; len(cmds) != 1 || cmds[0].Name() != "kept" {
		t.Errorf("sent %v", cmds)
	}
	st.letGo <- struct{}{}
	callers.Wait()
}

func TestBatchSharesReads(t *testing.T) {
	st := newStation(t)
	st.fill(t)
	var callers sync.WaitGroup
	var joined atomic.Int64
	read := func(key string) {
		callers.Go(func() {
			joined.Add(1)
			if _, err := st.hgetall(t.Context(), key); err != nil {
				t.Error(err)
			}
		})
	}
	for range 20 {
		read("a")
		read("b")
	}
	st.waitingFor(2)
	for joined.Load() < 40 {
		time.Sleep(time.Millisecond)
	}
	st.letGo <- struct{}{}
	if cmds := <-st.departed; len(cmds) != 2 {
		t.Errorf("sent %v", cmds)
	}
	read("a") // asked after the first was sent: it must not get that answer
	st.waitingFor(1)
	st.letGo <- struct{}{}
	if cmds := <-st.departed; len(cmds) != 1 {
		t.Errorf("sent %v", cmds)
	}
	close(st.letGo)
	callers.Wait()
}

func TestBatchOfAClosedStore(t *testing.T) {
	f := newFixture(t)
	s := f.open()
	f.must(s.Close())
	_, err := s.Authenticate(f.ctx, "eph_"+strings.Repeat("A", 43))
	f.want(err, ErrUnavailable)
	_, _, err = s.Admit(f.ctx, admission("k"))
	f.want(err, ErrUnavailable)
}

// Many callers at once each get the answer to their own question.
func TestBatchedAnswersAreNotMixedUp(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 1_000_000)
	var callers sync.WaitGroup
	for i := range 40 {
		callers.Go(func() {
			a := admission(fmt.Sprint("k", i))
			a.Spec.MaxCostMicros = Micros(100 + i)
			a.Spec.Command = strings.Repeat("x", i*maxBatched/20+1) // some are too large to share a round trip
			r, _, err := f.Admit(f.ctx, a)
			if err != nil {
				t.Error(err)
				return
			}
			got, err := f.Get(f.ctx, "o", r.ID)
			if err != nil || got.Request.Command != a.Spec.Command || got.Money.Reserved != a.Spec.MaxCostMicros {
				t.Errorf("run %d: reserved %s, %d bytes of command, %v", i, got.Money.Reserved, len(got.Request.Command), err)
			}
		})
	}
	callers.Wait()
	f.balanced()
}
