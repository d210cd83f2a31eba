package provision

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// TestTidy: what a machine leaves because it cannot be removed when it is closed is removed later, without a restart.
func TestTidy(t *testing.T) {
	s := newStage()
	p, tmpl := made(t, s)
	m, err := p.Create(t.Context(), tmpl)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	tries, ended := make(chan error, 100), make(chan struct{})
	go func() {
		defer close(ended)
		p.Tidy(ctx, func(_ Residue, err error) { tries <- err })
	}()
	select {
	case err := <-tries:
		t.Errorf("tidied for no reason: %v", err)
	case <-time.After(2 * tidyBase):
	}
	broken := errors.New("read-only file system")
	s.mu.Lock()
	s.fail["close tap"], s.fail["remove stale"] = broken, broken
	s.mu.Unlock()
	if err := m.Close(); !errors.Is(err, broken) {
		t.Fatalf("closed: %v", err)
	}
	must(t, os.MkdirAll(filepath.Join(p.config.DataDir, "machines", "0123456789ab"), 0o700))
	if err := <-tries; !errors.Is(err, broken) {
		t.Fatalf("the first try: %v", err)
	}
	s.mu.Lock()
	clear(s.fail)
	s.mu.Unlock()
	for err := range tries {
		if err == nil {
			break
		}
	}
	if r, err := p.Residue(); r.Total() != 0 || err != nil {
		t.Errorf("left: %+v, %v", r, err)
	}
	cancel()
	<-ended
}
