package exec

import (
	"time"

	"golang.org/x/sys/unix"
)

const (
	// spacePoll is how often file systems are looked at while a command runs, besides at its end.
	spacePoll = 250 * time.Millisecond
	// fullBelow is the space left, in bytes, below which a file system counts as full: writers of blocks leave less than
	// one behind.
	fullBelow = 64 << 10
)

// space watches file systems for being full. The kernel tells only who wrote, by ENOSPC, and programs do not always tell
// on: some remove what they could not finish.
type space struct {
	mounts []string
	stop   chan struct{}
	ended  chan struct{}
	full   map[string]bool // of one goroutine until ended is closed, then of end
}

func watchSpace(mounts []string) *space {
	s := &space{mounts: mounts, stop: make(chan struct{}), ended: make(chan struct{}), full: make(map[string]bool)}
	go s.watch()
	return s
}

func (s *space) watch() {
	defer close(s.ended)
	if len(s.mounts) == 0 {
		return
	}
	ticker := time.NewTicker(spacePoll)
	defer ticker.Stop()
	for {
		select {
		case <-s.stop:
			return
		case <-ticker.C:
			s.look()
		}
	}
}

func (s *space) look() {
	for _, mount := range s.mounts {
		if isFull(mount) {
			s.full[mount] = true
		}
	}
}

// end looks a last time and returns what was full, in the order of the mounts.
func (s *space) end() (full []string) {
	close(s.stop)
	<-s.ended
	s.look()
	for _, mount := range s.mounts {
		if s.full[mount] {
			full = append(full, mount)
		}
	}
	return full
}

// isFull tells whether a file system has no space or no room for one more file. One that has no limit is never full.
func isFull(mount string) bool {
	var f unix.Statfs_t
	if err := unix.Statfs(mount, &f); err != nil || f.Blocks == 0 {
		return false
	}
	return f.Bavail*uint64(f.Bsize) < fullBelow || f.Files > 0 && f.Ffree == 0
}
