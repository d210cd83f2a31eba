package redisserver

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ephemeral-run/ephemeral/test/smalldisk"
)

// With the disk full, what is under way goes on for a while, then changes are refused and reads answered; a server that is
// killed then starts and serves again; with space again all goes on. At no time does the server end by itself, and nothing is lost.
func TestFullDisk(t *testing.T) {
	for _, fsync := range []string{"always", "everysec"} {
		t.Run(fsync, func(t *testing.T) {
			disk := smalldisk.New(t, "64m")
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
			if err := smalldisk.Fill(disk); err != nil {
				t.Fatal(err)
			}
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
			if err := os.Remove(filepath.Join(disk, smalldisk.Filler)); err != nil {
				t.Fatal(err)
			}
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
	disk := smalldisk.New(t, "64m")
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
