package node

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

func TestStandsBackForThoseThatStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s starts
		took := func(ctx context.Context) time.Duration {
			began := time.Now()
			s.wait(ctx)
			return time.Since(began)
		}
		if got := took(t.Context()); got != 0 {
			t.Errorf("alone it waits %v", got)
		}
		first, second := s.begin(), s.begin()
		time.AfterFunc(10*time.Millisecond, first)
		time.AfterFunc(20*time.Millisecond, func() { second(); second() })
		if got := took(t.Context()); got != 20*time.Millisecond {
			t.Errorf("it waits %v for two", got)
		}
		third := s.begin()
		if got := took(t.Context()); got != standBack {
			t.Errorf("it waits %v for one that does not come up", got)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		if got := took(ctx); got != time.Millisecond {
			t.Errorf("it waits %v beyond its context", got-time.Millisecond)
		}
		third()
		if got := took(t.Context()); got != 0 || s.under != 0 {
			t.Errorf("it waits %v for none of %d", got, s.under)
		}
	})
}
