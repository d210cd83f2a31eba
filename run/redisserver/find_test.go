package redisserver

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestFind(t *testing.T) {
	long := filepath.Join(t.TempDir(), strings.Repeat("d", 100)) // the socket then lies elsewhere
	for _, dir := range []string{t.TempDir(), long} {
		if _, err := Find(dir); !errors.Is(err, ErrNotRunning) {
			t.Fatalf("before the start: %v, want ErrNotRunning", err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		s, err := Start(ctx, dir, Options{})
		if err != nil {
			t.Fatal(err)
		}
		url, err := Find(dir)
		if err != nil || url != s.URL() {
			t.Errorf("found %q, %v; want %q", url, err, s.URL())
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		if _, err := Find(dir); !errors.Is(err, ErrNotRunning) {
			t.Errorf("after the end: %v, want ErrNotRunning", err)
		}
	}
}
