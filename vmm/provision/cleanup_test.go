package provision

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestCleanupRunsOnceInReverseAndJoins(t *testing.T) {
	var c cleanup
	var order []string
	a, b := errors.New("a"), errors.New("b")
	for _, s := range []struct {
		name string
		err  error
	}{{"first", a}, {"second", nil}, {"third", b}} {
		c.push(s.name, func() error {
			order = append(order, s.name)
			return s.err
		})
	}
	err := c.run(time.Minute)
	if !slices.Equal(order, []string{"third", "second", "first"}) {
		t.Errorf("order %v", order)
	}
	if !errors.Is(err, a) || !errors.Is(err, b) || !strings.Contains(err.Error(), "remove third: b") {
		t.Errorf("error %v", err)
	}
	if err := c.run(time.Minute); err != nil || len(order) != 3 {
		t.Errorf("ran again: %v, %v", err, order)
	}
}

func TestCleanupIsBoundedAndFinishesLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c cleanup
		last := false
		c.push("directory", func() error { last = true; return nil })
		c.push("jail", func() error { time.Sleep(time.Hour); return nil })
		start := time.Now()
		err := c.run(time.Minute)
		if err == nil || !strings.Contains(err.Error(), "remove jail: not done in 1m0s") || time.Since(start) != time.Minute {
			t.Fatalf("after %s: %v", time.Since(start), err)
		}
		time.Sleep(2 * time.Hour)
		synctest.Wait()
		if !last {
			t.Error("what came after the hanging part was forgotten")
		}
	})
}
