package run

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/run/redisserver"
)

// smallDisk is a directory that holds no more than the given number of bytes.
func smallDisk(t *testing.T, size string) string {
	t.Helper()
	if os.Getuid() != 0 {
		t.Fatal("a small disk is a mounted tmpfs: run the tests as root")
	}
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size="+size); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// With the disk of the append-only file full the store is unavailable, holds nothing by halves, and recovers alone once
// there is room; what was acknowledged is there after a restart.
func TestFullDisk(t *testing.T) {
	dir := smallDisk(t, "6m")
	ballast := filepath.Join(dir, "ballast")
	if err := os.WriteFile(ballast, make([]byte, 4<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	own, err := redisserver.Start(ctx, filepath.Join(dir, "redis"), redisserver.Options{Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { own.Close() })
	f := newFixture(t, func(c *Config) { c.RedisURL = own.URL() })
	f.newOrg("o", 0, 1_000_000)
	admitted := map[string]ID{}
	admit := func(key string) error {
		a := admission(key)
		a.Spec.Command = "echo " + strings.Repeat("x", 50_000)
		r, _, err := f.Admit(f.ctx, a)
		if err == nil {
			admitted[key] = r.ID
		}
		return err
	}
	for err = nil; err == nil; err = admit(word(8)) {
		if len(admitted) > 200 {
			t.Fatal("the disk does not get full")
		}
	}
	f.want(err, ErrUnavailable)
	full := len(admitted)
	f.want(admit("refused"), ErrUnavailable)
	f.same(f.account("o").Held, Micros(100*full)) // reads are answered
	f.balanced()

	f.must(os.Remove(ballast))
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		if err = admit("refused"); err == nil {
			break
		}
		if !errors.Is(err, ErrUnavailable) || time.Now().After(end) {
			t.Fatal(err)
		}
	}
	f.must(syscall.Kill(own.PID(), syscall.SIGKILL))
	for key, id := range admitted {
		var r Run
		for {
			var replayed bool
			a := admission(key)
			a.Spec.Command = "echo"
			if r, replayed, err = f.Admit(f.ctx, a); err == nil {
				f.same(replayed, true)
				break
			}
			f.want(err, ErrUnavailable)
			time.Sleep(10 * time.Millisecond)
		}
		f.same(r.ID, id)
	}
	f.same(f.account("o").Held, Micros(100*(full+1)))
	f.balanced()
	if own.Starts() != 2 {
		t.Errorf("redis-server was started %d times", own.Starts())
	}
	t.Logf("full after %d runs", full)
}
