package pools

import (
	"slices"
	"time"
)

// HistoryStep is the time between two looks of a History, HistoryLooks how many there are at most: five minutes of them.
const (
	HistoryStep  = 2 * time.Second
	HistoryLooks = 150
)

// History is what a pool looked like of late: a column for each number, a row every HistoryStep, oldest first.
type History struct {
	End       time.Time `json:"end"` // of the last row
	Ready     []int     `json:"ready"`
	Leased    []int     `json:"leased"`
	Refilling []int     `json:"refilling"`
	Target    []int     `json:"target"`
	Misses    []int64   `json:"misses_total"`
}

// Add adds a report as a row when its time has come. Time that passed without a look is filled with what was seen last.
func (h *History) Add(r Report) {
	steps := 1
	if !h.End.IsZero() {
		steps = int(r.At.Sub(h.End) / HistoryStep)
	}
	if steps <= 0 {
		return
	}
	if steps > HistoryLooks {
		*h, steps = History{}, 1
	}
	if h.End = h.End.Add(time.Duration(steps) * HistoryStep); steps == 1 && len(h.Ready) == 0 {
		h.End = r.At
	}
	for ; steps > 1; steps-- {
		n := len(h.Ready) - 1
		h.row(h.Ready[n], h.Leased[n], h.Refilling[n], h.Target[n], h.Misses[n])
	}
	h.row(r.Ready, r.Leased, r.Refilling, r.Target, r.Misses)
}

func (h *History) row(ready, leased, refilling, target int, misses int64) {
	h.Ready, h.Leased, h.Refilling = last(h.Ready, ready), last(h.Leased, leased), last(h.Refilling, refilling)
	h.Target, h.Misses = last(h.Target, target), last(h.Misses, misses)
}

// last is column with one more, without what is too old. The column is copied: it may be read meanwhile.
func last[N int | int64](column []N, value N) []N {
	column = append(slices.Clone(column), value)
	return column[max(0, len(column)-HistoryLooks):]
}
