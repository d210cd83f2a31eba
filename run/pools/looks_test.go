package pools

import (
	"slices"
	"testing"
	"time"
)

func TestHistoryOfAPool(t *testing.T) {
	start := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	var h History
	add := func(at time.Duration, ready int) {
		h.Add(Report{At: start.Add(at), Ready: ready, Misses: int64(10 * ready)})
	}
	add(0, 1)
	add(HistoryStep/2, 9) // too soon
	add(HistoryStep, 2)
	before := h
	add(4*HistoryStep+time.Millisecond, 3) // two looks were missed
	if want := []int{1, 2, 2, 2, 3}; !slices.Equal(h.Ready, want) || h.Misses[4] != 30 || len(h.Target) != 5 {
		t.Errorf("%+v, want ready %v", h, want)
	}
	if !h.End.Equal(start.Add(4 * HistoryStep)) {
		t.Errorf("it ends at %v", h.End)
	}
	if !slices.Equal(before.Ready, []int{1, 2}) {
		t.Errorf("what was read before has changed: %v", before.Ready)
	}
	for i := range 2 * HistoryLooks {
		add(time.Duration(5+i)*HistoryStep, i)
	}
	if n := len(h.Ready); n != HistoryLooks || h.Ready[n-1] != 2*HistoryLooks-1 || h.Ready[0] != HistoryLooks {
		t.Errorf("%d looks, from %d to %d", n, h.Ready[0], h.Ready[n-1])
	}
	add(24*time.Hour, 7) // of what was before nothing is known any more
	if !slices.Equal(h.Ready, []int{7}) || !h.End.Equal(start.Add(24*time.Hour)) {
		t.Errorf("after a long time: %+v", h)
	}
}
