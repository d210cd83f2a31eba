package gateway

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/ephemeral-run/ephemeral/run"
)

const testRun = run.ID("run_00000000000000000000000000000001")

// timeline makes the events of a run with n shell commands.
func timeline(n int) []run.Event {
	types := []run.EventType{run.EventQueued, run.EventMicroVMReady}
	for range n {
		types = append(types, run.EventShell)
	}
	types = append(types, run.EventMicroVMDestroyed, run.EventType(run.Succeeded), run.EventWorkerDestroyed)
	events := make([]run.Event, len(types))
	for i, typ := range types {
		events[i] = run.Event{Seq: int64(i + 1), Run: testRun, Type: typ, At: float64(i), Data: map[string]any{"n": float64(i)}}
	}
	return events
}

func TestEncodeFrame(t *testing.T) {
	f, err := encodeFrame(run.Event{Seq: 7, Run: testRun, Type: run.EventShell, At: 1.25, Data: run.ShellData{Command: "a\r\n\nb\u2028", Outcome: "exited"}})
	if err != nil {
		t.Fatal(err)
	}
	text := string(f.text)
	if !strings.HasPrefix(text, "id: 7\nevent: shell\ndata: {\"seq\":7,") || !strings.HasSuffix(text, "}\n\n") || strings.Count(text, "\n") != 4 || strings.Contains(text, "\r") {
		t.Errorf("%q", text)
	}
	if f.seq != 7 || f.last {
		t.Errorf("%+v", f)
	}
	if f, err := encodeFrame(run.Event{Seq: 8, Type: run.EventWorkerDestroyed}); err != nil || !f.last {
		t.Errorf("%+v, %v", f, err)
	}
	if _, err := encodeFrame(run.Event{Type: "a\nb"}); err == nil {
		t.Error("an event type with a line break was written")
	}
	if _, err := encodeFrame(run.Event{Type: "a", Data: func() {}}); err == nil {
		t.Error("data that is no JSON was written")
	}
}

// sentIDs lists the ids of a stream's text and fails on anything else that is not a comment or a retry.
func sentIDs(t interface{ Fatalf(string, ...any) }, text string) (ids []string, rest string) {
	for block := range strings.SplitSeq(text, "\n\n") {
		switch {
		case strings.HasPrefix(block, "id: "):
			id, _, _ := strings.Cut(block[4:], "\n")
			ids = append(ids, id)
		case block == "" || strings.HasPrefix(block, ":") || strings.HasPrefix(block, "retry:"):
			rest += block + "|"
		default:
			t.Fatalf("odd block %q", block)
		}
	}
	return ids, rest
}

func numbers(from, to int) (ids []string) {
	for i := from; i <= to; i++ {
		ids = append(ids, fmt.Sprint(i))
	}
	return ids
}

// TestStreamNeverLosesOrRepeats gives a stream its events in any mixture of stored, live, repeated and missing ones.
func TestStreamNeverLosesOrRepeats(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		events := timeline(rapid.IntRange(0, 12).Draw(t, "commands"))
		after := rapid.IntRange(0, len(events)-1).Draw(t, "after")
		stored := rapid.IntRange(after, len(events)).Draw(t, "stored at first")
		h := newHub(nil, slog.New(slog.DiscardHandler))
		r := h.join("acme", testRun)
		have := stored // how many the store has
		pageSize := rapid.IntRange(1, 5).Draw(t, "page")
		st := &stream{
			reader: r, heartbeat: time.Hour, sent: int64(after), backlog: events[after:stored],
			stored: func(after int64) ([]run.Event, bool, error) { // in pages
				to := min(int(after)+pageSize, have)
				return events[after:to], to < have, nil
			},
		}
		var out bytes.Buffer
		w := bufio.NewWriter(&out)
		done, err := st.events(w, st.backlog)
		for published := rapid.IntRange(0, stored).Draw(t, "first live"); err == nil && !done && published < len(events); {
			n := rapid.IntRange(1, 4).Draw(t, "batch")
			for ; n > 0 && published < len(events); n-- {
				have = max(have, published+1)
				lost := rapid.IntRange(0, 3).Draw(t, "lost") == 0 && published != len(events)-1
				if !lost {
					h.publish(events[published])
				} else if rapid.Bool().Draw(t, "noticed") {
					h.markGap()
				}
				published++
			}
			done, err = st.advance(w)
		}
		if err != nil || !done {
			t.Fatalf("done %v, %v", done, err)
		}
		ids, _ := sentIDs(t, out.String())
		if d := cmp.Diff(numbers(after+1, len(events)), ids); d != "" {
			t.Fatal(d)
		}
	})
}

func TestStreamPrefersLiveOverStored(t *testing.T) {
	h := newHub(nil, slog.New(slog.DiscardHandler))
	r := h.join("acme", testRun)
	events := timeline(1)
	st := &stream{reader: r, heartbeat: time.Hour, stored: func(after int64) ([]run.Event, bool, error) {
		redacted := append([]run.Event(nil), events[after:]...)
		for i := range redacted {
			redacted[i].Data = "redacted"
		}
		return redacted, false, nil
	}}
	h.publish(events[2]) // 1 and 2 are missing
	var out bytes.Buffer
	if done, err := st.advance(bufio.NewWriter(&out)); err != nil || !done {
		t.Fatal(done, err)
	}
	if n := strings.Count(out.String(), "redacted"); n != len(events)-1 {
		t.Errorf("%d of %d events redacted:\n%s", n, len(events), out.String())
	}
}

// TestStreamWaitsForTheLiveFrame has events stored while the reader joins: the live frame of one comes a moment later, that
// of another never.
func TestStreamWaitsForTheLiveFrame(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		events := timeline(1)
		redacted := append([]run.Event(nil), events...)
		for i := range redacted {
			redacted[i].Data = "redacted"
		}
		h := newHub(nil, slog.New(slog.DiscardHandler))
		st := &stream{reader: h.join("acme", testRun), heartbeat: time.Hour, backlog: redacted[:1], since: redacted[1:]}
		time.AfterFunc(overlapTime/2, func() {
			for _, ev := range events[2:] {
				h.publish(ev)
			}
		})
		var out bytes.Buffer
		if err := st.run(bufio.NewWriter(&out)); err != nil {
			t.Fatal(err)
		}
		ids, _ := sentIDs(t, out.String())
		if d := cmp.Diff(numbers(1, len(events)), ids); d != "" {
			t.Error(d)
		}
		if n := strings.Count(out.String(), "redacted"); n != 2 {
			t.Errorf("%d events redacted, want 2:\n%s", n, out.String())
		}

		st = &stream{reader: h.join("acme", testRun), heartbeat: time.Hour, since: redacted}
		out.Reset()
		if err := st.run(bufio.NewWriter(&out)); err != nil { // nothing comes live
			t.Fatal(err)
		}
		if n := strings.Count(out.String(), "redacted"); n != len(events) {
			t.Errorf("%d events redacted, want all:\n%s", n, out.String())
		}
	})
}

func TestStreamHeartbeatsAndDrains(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHub(nil, slog.New(slog.DiscardHandler))
		r := h.join("acme", testRun)
		st := &stream{reader: r, heartbeat: 15 * time.Second, backlog: timeline(0)[:1]}
		var out bytes.Buffer
		ended := make(chan error, 1)
		go func() { ended <- st.run(bufio.NewWriter(&out)) }()
		time.Sleep(50 * time.Second)
		synctest.Wait()
		h.publish(timeline(0)[1])
		h.drain()
		if err := <-ended; !errors.Is(err, errDrained) {
			t.Fatal(err)
		}
		ids, rest := sentIDs(t, out.String())
		if d := cmp.Diff([]string{"1", "2"}, ids); d != "" {
			t.Error(d)
		}
		want := "retry: 1000|: heartbeat|: heartbeat|: heartbeat|: this server is going away, reconnect\nretry: 1000||"
		if d := cmp.Diff(want, rest); d != "" {
			t.Error(d)
		}
		if r := h.join("acme", testRun); !r.take().drained {
			t.Error("a reader that joins a draining hub is not told")
		}
	})
}

func TestReaderIsBoundedAndCut(t *testing.T) {
	big := strings.Repeat("x", 300<<10)
	tests := map[string]struct {
		data any
		fit  int
	}{
		"by number": {nil, maxWaitingFrames},
		"by bytes":  {big, 3},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			h := newHub(nil, slog.New(slog.DiscardHandler))
			slow, quick := h.join("acme", testRun), h.join("acme", testRun)
			ev := run.Event{Run: testRun, Type: run.EventShell, Data: tt.data}
			for i := range tt.fit {
				ev.Seq = int64(i + 1)
				h.publish(ev)
				quick.take()
			}
			if got := slow.take(); got.cut || len(got.frames) != tt.fit {
				t.Fatalf("cut %v with %d frames", got.cut, len(got.frames))
			}
			for range tt.fit + 1 {
				h.publish(ev)
			}
			if slow.bytes != 0 || slow.waiting != nil {
				t.Error("a reader that was cut off still holds memory")
			}
			st := &stream{reader: slow}
			if _, err := st.advance(bufio.NewWriter(io.Discard)); !errors.Is(err, errSlow) {
				t.Errorf("the stream ends with %v", err)
			}
			h.leave(slow)
			h.leave(quick)
			if h.size() != 0 || len(h.readers) != 0 {
				t.Error("readers left")
			}
		})
	}
}

func TestStreamEndsWhenTheClientIsGone(t *testing.T) {
	h := newHub(nil, slog.New(slog.DiscardHandler))
	st := &stream{reader: h.join("acme", testRun), heartbeat: time.Millisecond}
	pr, pw := io.Pipe()
	pr.Close()
	if err := st.run(bufio.NewWriter(pw)); !errors.Is(err, errGone) {
		t.Error(err)
	}
}

func TestStreamPanicIsContained(t *testing.T) {
	h := newHub(nil, slog.New(slog.DiscardHandler))
	r := h.join("acme", testRun)
	h.markGap()
	st := &stream{reader: r, heartbeat: time.Hour, stored: func(int64) ([]run.Event, bool, error) { panic("boom") }}
	if err := st.run(bufio.NewWriter(io.Discard)); err == nil || !strings.Contains(err.Error(), "boom") {
		t.Error(err)
	}
}
