package provision

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

func TestTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		turns := make(turns, 2)
		first, err := turns.take(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := turns.take(t.Context()); err != nil {
			t.Fatal(err)
		}
		order := make(chan int, 3)
		for i := range 3 {
			go func() {
				if _, err := turns.take(t.Context()); err == nil {
					order <- i
				}
			}()
			synctest.Wait()
		}
		time.Sleep(10 * time.Millisecond)
		began := time.Now()
		first()
		first()
		if got := <-order; got != 0 || time.Since(began) != 0 {
			t.Errorf("the next is %d, after %v", got, time.Since(began))
		}
		if got := <-order; got != 1 || time.Since(began) != turnLimit-10*time.Millisecond {
			t.Errorf("behind one that does not end: %d, after %v", got, time.Since(began))
		}
		if got := <-order; got != 2 {
			t.Errorf("the last is %d", got)
		}
		if _, err := turns.take(t.Context()); err != nil {
			t.Fatal(err)
		}
		gone := errors.New("caller left")
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(gone)
		if done, err := turns.take(ctx); err == nil { // one of the two may be free
			done()
		} else if !errors.Is(err, gone) {
			t.Errorf("got %v", err)
		}
		time.Sleep(2 * turnLimit)
		if len(turns) != 0 {
			t.Errorf("%d turns are left", len(turns))
		}
	})
}
