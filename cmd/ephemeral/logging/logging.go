// Package logging writes the log off the way of those who log: a disk that is busy, or a reader of the pipe that is slow,
// must hold up no request.
package logging

import (
	"context"
	"io"
	"log/slog"
	"sync"
	"time"
)

const (
	pause    = 10 * time.Millisecond // within which lines are written together
	maxBytes = 1 << 20               // not yet written; whoever logs more waits
)

// Writer gathers lines for a moment and writes them together. What was gathered in the last 10 ms is lost when the process
// is killed. It is safe for concurrent use.
type Writer struct {
	out     io.Writer
	done    chan struct{} // closed when the goroutine has ended
	mu      sync.Mutex
	changed *sync.Cond // of what follows
	lines   []byte
	writing bool
	hurry   int // callers of Flush
	closed  bool
}

// NewWriter starts a writer. Close ends it.
func NewWriter(out io.Writer) *Writer {
	w := &Writer{out: out, done: make(chan struct{})}
	w.changed = sync.NewCond(&w.mu)
	go w.run()
	return w
}

// Write takes p. It waits while too much is not yet written. After Close it writes at once. That lines cannot be written is
// known to nobody: there is nowhere to tell it.
func (w *Writer) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for len(w.lines) >= maxBytes && !w.closed {
		w.changed.Wait()
	}
	if w.closed {
		return w.out.Write(p)
	}
	if len(w.lines) == 0 {
		w.changed.Broadcast()
	}
	w.lines = append(w.lines, p...)
	return len(p), nil
}

// Flush returns when everything taken before has been written.
func (w *Writer) Flush() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.hurry++
	w.changed.Broadcast()
	for len(w.lines) > 0 || w.writing {
		w.changed.Wait()
	}
	w.hurry--
}

// Close writes what is left and ends the writer. What is logged after it is written at once.
func (w *Writer) Close() error {
	w.mu.Lock()
	w.closed = true
	w.changed.Broadcast()
	w.mu.Unlock()
	<-w.done
	return nil
}

func (w *Writer) run() {
	defer close(w.done)
	w.mu.Lock()
	defer w.mu.Unlock()
	var spare []byte
	for {
		for len(w.lines) == 0 && !w.closed {
			w.changed.Wait()
		}
		if len(w.lines) == 0 {
			return
		}
		if w.hurry == 0 && !w.closed && len(w.lines) < maxBytes/2 {
			w.mu.Unlock()
			time.Sleep(pause)
			w.mu.Lock()
		}
		batch := w.lines
		w.lines, w.writing = spare[:0], true
		w.changed.Broadcast()
		w.mu.Unlock()
		_, _ = w.out.Write(batch)
		spare = batch
		w.mu.Lock()
		w.writing = false
		w.changed.Broadcast()
	}
}

// Handler makes a handler whose lines w writes. Warnings and errors are written before the call returns.
func (w *Writer) Handler(h slog.Handler) slog.Handler { return handler{h, w} }

type handler struct {
	slog.Handler
	w *Writer
}

// Handle logs the record.
func (h handler) Handle(ctx context.Context, r slog.Record) error {
	err := h.Handler.Handle(ctx, r)
	if r.Level >= slog.LevelWarn {
		h.w.Flush()
	}
	return err
}

// WithAttrs is the handler with attributes.
func (h handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return handler{h.Handler.WithAttrs(attrs), h.w}
}

// WithGroup is the handler with a group.
func (h handler) WithGroup(name string) slog.Handler { return handler{h.Handler.WithGroup(name), h.w} }
