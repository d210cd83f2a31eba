package images

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/gofrs/flock"
)

// leftoverPrefix begins the name of everything that is being made or removed.
const leftoverPrefix = ".build-"

// store is a directory of images, locked: nobody else builds or removes in it.
type store struct {
	dir  string
	lock *flock.Flock
	dry  bool // nothing is removed
}

// openStore locks a directory of images that is there.
func openStore(ctx context.Context, dir string) (*store, error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("find directory of images: %w", err)
	}
	if _, err := os.Stat(abs); err != nil {
		return nil, fmt.Errorf("find directory of images: %w", err)
	}
	return lockStore(ctx, abs, func() {})
}

// lockStore locks a directory of images; waiting is called once if another has it.
func lockStore(ctx context.Context, dir string, waiting func()) (*store, error) {
	l := flock.New(filepath.Join(dir, ".lock"))
	got, err := l.TryLock()
	if err == nil && !got {
		waiting()
		_, err = l.TryLockContext(ctx, 100*time.Millisecond)
	}
	if err != nil {
		return nil, fmt.Errorf("lock directory of images %s: %w", dir, noSpace(err))
	}
	return &store{dir: dir, lock: l}, nil
}

func (s *store) close() error {
	if err := s.lock.Close(); err != nil {
		return fmt.Errorf("unlock directory of images: %w", err)
	}
	return nil
}

// removeLeftovers removes what interrupted builds and removals left, and counts it.
func (s *store) removeLeftovers() (int, error) {
	left, err := filepath.Glob(filepath.Join(s.dir, leftoverPrefix+"*"))
	if err != nil {
		return 0, err
	}
	for _, path := range left {
		if s.dry {
			continue
		}
		if err := removeTree(path); err != nil {
			return 0, fmt.Errorf("remove what an interrupted build left: %w", err)
		}
	}
	return len(left), nil
}

// syncDir waits until the names in a directory are on disk.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
