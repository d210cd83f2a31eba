package redisserver

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// smallDisk is a directory with a file system of its own, of 64 MiB.
func smallDisk(t *testing.T) string {
	t.Helper()
	if os.Getuid() != 0 {
		t.Fatal("a small disk is a mounted tmpfs: run the tests as root")
	}
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=64m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// fill writes a file in dir until there is no space left.
func fill(t *testing.T, dir string) (remove func()) {
	t.Helper()
	name := filepath.Join(dir, "filler")
	f, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := io.Copy(f, zeros{}); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("the disk is not full: %v", err)
	}
	return func() {
		if err := os.Remove(name); err != nil {
			t.Error(err)
		}
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }

// With the disk full, what is under way goes on for a while, then changes are refused and reads answered; a server that is
// killed then starts and serves again; with space again all goes on. At no time does the server end by itself, and nothing is lost.
func TestFullDisk(t *testing.T) {
	for _, fsync := range []string{"always", "everysec"} {
		t.Run(fsync, func(t *testing.T) {
			disk := smallDisk(t)
			o := quiet
			o.Fsync = fsync
			s, err := Start(t.Context(), filepath.Join(disk, "redis"), o)
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			c := once(t, s)
			ctx := t.Context()
			set := func(key string) error { return c.Set(ctx, key, strings.Repeat("x", 100_000), 0).Err() }
			if err := set("before"); err != nil || s.Full() != nil {
				t.Fatal(err, s.Full())
			}
			eventually(t, "space is set aside", func() bool { return c.Set(ctx, "tick", "1", 0).Err() == nil && reserved(t, s) > 6<<20 })
			remove := fill(t, disk)
			eventually(t, "it is said that the disk is full", func() bool { return errors.Is(s.Full(), ErrDiskFull) })
			if !strings.Contains(s.Full().Error(), disk) {
				t.Errorf("the error does not name the directory: %v", s.Full())
			}
			for range 20 { // what was set aside is for these
				if err := set("under way"); err != nil {
					t.Fatal(err)
				}
			}
			eventually(t, "changes are refused", func() bool { err = set("more"); return err != nil })
			if !strings.HasPrefix(err.Error(), "NOREPLICAS") {
				t.Fatal(err)
			}
			if got := c.StrLen(ctx, "under way").Val(); got != 100_000 {
				t.Errorf("read %d bytes", got)
			}
			if s.Starts() != 1 {
				t.Errorf("the server ended and was started %d times", s.Starts())
			}
			pid := s.PID()
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			eventually(t, "the server runs again", func() bool { return s.PID() != 0 && s.PID() != pid && c.Ping(ctx).Err() == nil })
			if err := set("more"); err == nil || !strings.HasPrefix(err.Error(), "NOREPLICAS") {
				t.Errorf("after the restart: %v", err)
			}
			if n := c.Exists(ctx, "before", "under way").Val(); n != 2 {
				t.Errorf("%d of 2 keys are left", n)
			}
			remove()
			began := time.Now()
			eventually(t, "changes are taken again", func() bool { return set("after") == nil && s.Full() == nil })
			t.Logf("taken again after %s", time.Since(began).Round(time.Millisecond))
			if s.Starts() != 2 {
				t.Errorf("started %d times", s.Starts())
			}
		})
	}
}

// reserved is how many bytes are set aside behind the end of the append-only file.
func reserved(t *testing.T, s *Server) int64 {
	t.Helper()
	file, err := appended(s.dir)
	if err != nil || file == "" {
		return 0
	}
	var st unix.Stat_t
	if err := unix.Stat(file, &st); err != nil {
		t.Fatal(err)
	}
	return st.Blocks*512 - st.Size
}

// After a rewrite the new file has space set aside, and the old one is gone with its own.
func TestSpaceFollowsARewrite(t *testing.T) {
	disk := smallDisk(t)
	s := start(t, filepath.Join(disk, "redis"))
	c := client(t, s)
	for range 3 {
		if err := c.Set(t.Context(), "a", strings.Repeat("x", 1000), 0).Err(); err != nil {
			t.Fatal(err)
		}
		before, err := appended(s.dir)
		if err != nil {
			t.Fatal(err)
		}
		if err := c.BgRewriteAOF(t.Context()).Err(); err != nil {
			t.Fatal(err)
		}
		eventually(t, "space is set aside for another file", func() bool {
			file, err := appended(s.dir)
			return err == nil && file != before && reserved(t, s) > 6<<20
		})
		eventually(t, "the old file is gone", func() bool { _, err := os.Stat(before); return errors.Is(err, os.ErrNotExist) })
	}
	free, whole, err := space(disk)
	if err != nil {
		t.Fatal(err)
	}
	if used := whole - free; used > 12<<20 {
		t.Errorf("%d bytes are used", used)
	}
}
