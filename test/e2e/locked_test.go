package e2e

import (
	"bytes"
	"sync"
)

// locked is a server's log, which its output is written to while tests read it.
type locked struct {
	mu  sync.Mutex
	w   *bytes.Buffer
	tap func([]byte) // sees what is written, when it is; nil: nobody does
}

func (l *locked) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.tap != nil {
		l.tap(p)
	}
	return l.w.Write(p)
}

// String is what was written so far.
func (l *locked) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.String()
}
