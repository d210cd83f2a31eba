package guest

import (
	"io"
	"sync"
)

// queue takes messages off a stream at once, because the ttrpc client gives a stream up whose reader is a second late,
// and keeps them, bounded, for a consumer that may be slow.
type queue[T any] struct {
	maxItems, maxBytes int

	mu      sync.Mutex
	changed *sync.Cond
	items   []item[T]
	bytes   int
	err     error // what comes after the items
	stopped chan struct{}
}

type item[T any] struct {
	value T
	bytes int
}

func newQueue[T any](maxItems, maxBytes int) *queue[T] {
	q := &queue[T]{maxItems: maxItems, maxBytes: maxBytes, stopped: make(chan struct{})}
	q.changed = sync.NewCond(&q.mu)
	return q
}

// fill reads until an error. The queue being full is one, and closes the connection at once: the ttrpc client would log
// each message that nobody reads.
func (q *queue[T]) fill(connection io.Closer, receive func() (T, error), size func(T) int) {
	defer close(q.stopped)
	for {
		value, err := receive()
		if err != nil {
			q.end(err)
			return
		}
		if !q.put(value, size(value)) {
			_ = connection.Close()
			q.end(broke("more than %d messages or %d bytes faster than they can be handled", q.maxItems, q.maxBytes))
			return
		}
	}
}

func (q *queue[T]) put(value T, bytes int) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.items) >= q.maxItems || q.bytes+bytes > q.maxBytes {
		return false
	}
	q.items = append(q.items, item[T]{value, bytes})
	q.bytes += bytes
	q.changed.Signal()
	return true
}

func (q *queue[T]) end(err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.err = err
	q.changed.Signal()
}

// next waits for a message, and after the last returns the error that ended the stream.
func (q *queue[T]) next() (T, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.items) == 0 && q.err == nil {
		q.changed.Wait()
	}
	if len(q.items) == 0 {
		var none T
		return none, q.err
	}
	first := q.items[0]
	q.items = q.items[1:]
	q.bytes -= first.bytes
	return first.value, nil
}

// stop closes the connection, which ends fill, and waits for that.
func (q *queue[T]) stop(connection io.Closer) {
	_ = connection.Close()
	<-q.stopped
}
