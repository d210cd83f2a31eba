package node

import (
	"context"
	"errors"
	"math"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"pgregory.net/rapid"

	"github.com/ephemeral-run/ephemeral/run"
)

// log collects what is appended; away makes it refuse like a store that does not answer.
type log struct {
	events []run.NewEvent
	away   bool
}

func (l *log) Append(_ context.Context, _ *run.Lease, events ...run.NewEvent) error {
	if l.away {
		return run.ErrUnavailable
	}
	l.events = append(l.events, events...)
	return nil
}

func TestStagesSumToTheWallTime(t *testing.T) {
	queued := time.Now().Add(-3 * time.Millisecond)
	line := newTimeline(&log{}, &run.Lease{QueuedAt: queued})
	for _, name := range []string{"claim", "resume", "prepare", "files", "worker", "destroy"} {
		time.Sleep(time.Millisecond)
		line.stage(name)
	}
	stages, at := line.ended()
	sum := 0.0
	for _, s := range stages {
		if s.Ms < 0 {
			t.Errorf("stage %s took %v ms", s.Name, s.Ms)
		}
		sum += s.Ms
	}
	if wall := float64(at.Sub(queued).Microseconds()) / 1000; math.Abs(sum-wall) > 0.0005 {
		t.Errorf("stages sum to %v ms, the wall time is %v ms", sum, wall)
	}
	if stages[0].Name != "queue" || stages[0].Ms < 3 {
		t.Errorf("first stage is %+v, want queue of at least 3 ms", stages[0])
	}
}

func TestTimelineWithAClockAheadOfTheGateways(t *testing.T) {
	line := newTimeline(&log{}, &run.Lease{QueuedAt: time.Now().Add(time.Hour)}) // the gateway's clock is ahead
	line.stage("claim")
	stages, at := line.ended()
	for _, s := range stages {
		if s.Ms < 0 {
			t.Errorf("stage %s took %v ms", s.Name, s.Ms)
		}
	}
	if at.Before(line.lease.QueuedAt) {
		t.Errorf("ended at %s, before it was queued", at)
	}
}

func TestEventsWaitWhileTheStoreIsAway(t *testing.T) {
	store := &log{away: true}
	line := newTimeline(store, &run.Lease{QueuedAt: time.Now()})
	for _, typ := range []run.EventType{run.EventWorkerStarted, run.EventShell} {
		if err := line.emit(t.Context(), run.NewEvent{Type: typ}); err != nil {
			t.Fatal(err)
		}
	}
	if err := line.flush(t.Context()); !errors.Is(err, run.ErrUnavailable) {
		t.Errorf("flush returned %v while events wait: the run would be settled without them", err)
	}
	store.away = false
	if err := line.emit(t.Context(), run.NewEvent{Type: run.EventMicroVMDestroyed}); err != nil {
		t.Fatal(err)
	}
	want := []run.EventType{run.EventWorkerStarted, run.EventShell, run.EventMicroVMDestroyed}
	if len(store.events) != len(want) {
		t.Fatalf("stored %d events, want %d", len(store.events), len(want))
	}
	for i, e := range store.events {
		if e.Type != want[i] {
			t.Errorf("event %d is %s, want %s", i, e.Type, want[i])
		}
		if i > 0 && e.At.Before(store.events[i-1].At) {
			t.Errorf("time goes back at event %d", i)
		}
	}
}

func TestEventsAreBounded(t *testing.T) {
	line := newTimeline(&log{}, &run.Lease{QueuedAt: time.Now()})
	for i := range maxEvents {
		if err := line.emit(t.Context(), run.NewEvent{Type: run.EventShell}); err != nil {
			t.Fatalf("event %d: %v", i, err)
		}
	}
	if err := line.emit(t.Context(), run.NewEvent{Type: run.EventShell}); err != errTooManyEvents {
		t.Fatalf("one event too many gave %v", err)
	}
	if err := line.emit(t.Context(), run.NewEvent{Type: run.EventMicroVMDestroyed}); err != nil {
		t.Fatalf("the end of the machine was not told: %v", err)
	}
}

func TestContentOfEventsIsBounded(t *testing.T) {
	store := &log{}
	x := &execution{line: newTimeline(store, &run.Lease{QueuedAt: time.Now()})}
	output := strings.Repeat("x", maxEventOutput)
	total := 0
	for range 2 * maxEventContent / maxEventOutput {
		if err := x.shell(t.Context(), run.ShellData{Command: "yes", Output: output, Bytes: 1 << 20}); err != nil {
			t.Fatal(err)
		}
		total += len(store.events[len(store.events)-1].Data.(run.ShellData).Output)
	}
	if total > maxEventContent {
		t.Errorf("events carry %d bytes of output, at most %d are allowed", total, maxEventContent)
	}
	if last := store.events[len(store.events)-1].Data.(run.ShellData); !last.Truncated || last.Bytes != 1<<20 {
		t.Errorf("the last event is %+v, want truncated with the bytes counted", last)
	}
}

func TestClippedNeverCutsACharacter(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		text := rapid.StringOf(rapid.Rune()).Draw(t, "text")
		limit := rapid.IntRange(0, len(text)+3).Draw(t, "limit")
		c := &clipped{limit: limit}
		for rest := []byte(text); len(rest) > 0; {
			n := rapid.IntRange(1, len(rest)).Draw(t, "chunk")
			if _, err := c.Write(rest[:n]); err != nil {
				t.Fatal(err)
			}
			rest = rest[n:]
		}
		got := c.text()
		if !utf8.Valid(got) {
			t.Fatalf("%q cut to %d bytes is not UTF-8: %q", text, limit, got)
		}
		if string(got) != text[:len(got)] || limit-len(got) >= utf8.UTFMax && len(got) < len(text) {
			t.Fatalf("%q cut to %d bytes is %q", text, limit, got)
		}
		if c.total != int64(len(text)) || c.cut != (limit < len(text)) {
			t.Fatalf("total %d, cut %v for %d bytes and limit %d", c.total, c.cut, len(text), limit)
		}
	})
}
