package node

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

func TestSlotsFollowTheirLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSlots(2)
		ctx, cancel := context.WithCancel(t.Context())
		var frees []func()
		got := make(chan context.Context, 10)
		proceed := make(chan func(), 10)
		ended := make(chan error, 1)
		go func() {
			for {
				take, taken, free, err := s.acquire(ctx)
				if err != nil {
					ended <- err
					return
				}
				got <- take
				<-take.Done() // a take that finds nothing
				taken()
				proceed <- free
			}
		}()
		synctest.Wait()
		first := <-got
		s.resize(1)
		synctest.Wait()
		if first.Err() != nil {
			t.Error("the take ended though there is a slot for it")
		}
		s.resize(0)
		synctest.Wait()
		if !errors.Is(context.Cause(first), errFewer) {
			t.Error("the take goes on without a slot")
		}
		(<-proceed)()
		time.Sleep(time.Second)
		if len(got) != 0 {
			t.Fatal("a slot was given though none is left")
		}
		s.resize(3)
		synctest.Wait()
		if len(got) != 1 {
			t.Fatal("no slot though there are three")
		}
		cancel()
		frees = append(frees, <-proceed)
		for _, f := range frees {
			f()
		}
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("ended with %v", err)
		}
		if s.used != 0 || s.now() != 3 {
			t.Errorf("%d of %d slots used", s.used, s.now())
		}
	})
}
