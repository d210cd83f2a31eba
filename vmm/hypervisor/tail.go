package hypervisor

import (
	"io"
	"sync"
)

// tail keeps the last bytes written to it.
type tail struct {
	mu    sync.Mutex
	limit int
	data  []byte
}

var _ io.Writer = (*tail)(nil)

// Write never fails.
func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.data = append(t.data, p...)
	if over := len(t.data) - t.limit; over > 0 {
		t.data = append(t.data[:0], t.data[over:]...)
	}
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.data)
}
