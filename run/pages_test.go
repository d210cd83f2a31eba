package run

import (
	"strings"
	"testing"
	"time"
)

// pages reads a run's events page by page.
func (f *fixture) pages(id ID) (sizes []int, events []Event) {
	f.t.Helper()
	for last, more := int64(0), true; more; {
		page, m, err := f.Events(f.ctx, "o", id, last)
		f.must(err)
		if len(page) == 0 {
			f.t.Fatalf("page %d is empty", len(sizes))
		}
		sizes, events, more, last = append(sizes, len(page)), append(events, page...), m, page[len(page)-1].Seq
	}
	return sizes, events
}

func TestPagesOfEvents(t *testing.T) {
	f := newFixture(t)
	l := f.started(1000)
	for i := range 25 {
		batch := make([]NewEvent, 100)
		for j := range batch {
			batch[j] = NewEvent{Type: EventWeb, At: f.clock.now().Add(time.Duration(i*100+j) * time.Microsecond), Data: CallData{}}
		}
		f.must(f.Append(f.ctx, l, batch...))
	}
	sizes, events := f.pages(l.Run)
	f.same(sizes, []int{maxPageEvents, maxPageEvents, 502})
	for i, e := range events {
		if e.Seq != int64(i+1) {
			t.Fatalf("event %d has number %d", i+1, e.Seq)
		}
	}
	page, more, err := f.Events(f.ctx, "o", l.Run, 1502)
	f.must(err)
	f.same([]any{len(page), more}, []any{maxPageEvents, false}) // the last page may be full
}

// A page of large events ends before it is too large to hold in memory.
func TestPagesOfLargeEvents(t *testing.T) {
	f := newFixture(t)
	l := f.started(1000)
	const large = 1 << 20
	for i := range 10 {
		f.must(f.Append(f.ctx, l, NewEvent{Type: EventShell, At: f.clock.now().Add(time.Duration(i) * time.Microsecond),
			Data: ShellData{Output: strings.Repeat("x", large)}}))
	}
	sizes, events := f.pages(l.Run)
	f.same(sizes, []int{6, 4, 2}) // the first with two small ones
	f.same(len(events), 12)
}
