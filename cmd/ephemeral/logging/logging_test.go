package logging

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// target counts writes and can be held up.
type target struct {
	mu     sync.Mutex
	text   bytes.Buffer
	writes int
}

func (t *target) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.writes++
	return t.text.Write(p)
}

func (t *target) has() (string, int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.text.String(), t.writes
}

func TestNoLineIsLostOrTorn(t *testing.T) {
	var out target
	w := NewWriter(&out)
	const writers, lines = 8, 2000 // with the padding more than maxBytes
	padding := strings.Repeat("x", 100)
	var all sync.WaitGroup
	for i := range writers {
		all.Go(func() {
			for j := range lines {
				fmt.Fprintf(w, "%d %d %s\n", i, j, padding)
			}
		})
	}
	all.Wait()
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	text, writes := out.has()
	if writes >= writers*lines/4 {
		t.Errorf("%d lines took %d writes", writers*lines, writes)
	}
	next := [writers]int{}
	for line := range strings.Lines(text) {
		var i, j int
		var rest string
		if _, err := fmt.Sscan(line, &i, &j, &rest); err != nil || rest != padding || j != next[i] {
			t.Fatalf("line %q: %v, want number %d", line, err, next[i])
		}
		next[i]++
	}
	for i, n := range next {
		if n != lines {
			t.Errorf("writer %d: %d lines", i, n)
		}
	}
}

func TestWarningsAreWrittenAtOnce(t *testing.T) {
	var out target
	w := NewWriter(&out)
	defer w.Close()
	log := slog.New(w.Handler(slog.NewTextHandler(w, nil))).With("part", "test").WithGroup("g")
	log.Info("first")
	log.Warn("second", "n", 1)
	text, _ := out.has()
	if !strings.Contains(text, "msg=first part=test") || !strings.Contains(text, "msg=second part=test g.n=1") {
		t.Errorf("written: %q", text)
	}
}

func TestAfterClose(t *testing.T) {
	var out target
	w := NewWriter(&out)
	fmt.Fprint(w, "a")
	w.Close()
	fmt.Fprint(w, "b")
	w.Flush()
	if text, _ := out.has(); text != "ab" {
		t.Errorf("written: %q", text)
	}
}

// A target that takes nothing holds up only who logs more than is gathered.
func TestSlowTarget(t *testing.T) {
	var out target
	out.mu.Lock()
	w := NewWriter(&out)
	for range 100 {
		fmt.Fprintln(w, "line")
	}
	out.mu.Unlock()
	w.Close()
	if text, _ := out.has(); strings.Count(text, "line\n") != 100 {
		t.Errorf("%d lines", strings.Count(text, "line\n"))
	}
}
