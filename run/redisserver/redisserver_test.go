package redisserver

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

var quiet = Options{Log: slog.New(slog.DiscardHandler)}

func start(t *testing.T, dir string) *Server {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	s, err := Start(ctx, dir, quiet)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func client(t *testing.T, s *Server) *redis.Client {
	t.Helper()
	o, err := redis.ParseURL(s.URL())
	if err != nil {
		t.Fatal(err)
	}
	o.MaxRetries = 20
	c := redis.NewClient(o)
	t.Cleanup(func() { c.Close() })
	return c
}

// once is a client that asks once: what is refused is not asked again.
func once(t *testing.T, s *Server) *redis.Client {
	t.Helper()
	c := redis.NewClient(&redis.Options{Network: "unix", Addr: s.Addr(), MaxRetries: -1})
	t.Cleanup(func() { c.Close() })
	return c
}

// eventually waits until f is true.
func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(15 * time.Second); !f(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within 15 s: %s", what)
		}
	}
}

func TestUnfinishedSnapshotsAreRemoved(t *testing.T) {
	dir := t.TempDir()
	s := start(t, dir)
	c := client(t, s)
	if err := c.Set(t.Context(), "a", "1", 0).Err(); err != nil {
		t.Fatal(err)
	}
	left := []string{"temp-rewriteaof-bg-12.aof", "temp-13.rdb", "appendonlydir/temp-appendonly.aof.manifest"}
	for _, name := range left {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("content"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := once(t, s).Do(t.Context(), "SHUTDOWN", "NOW").Err(); err == nil {
		t.Fatal("the server answered its own end")
	}
	eventually(t, "the server runs again", func() bool { return c.Get(t.Context(), "a").Val() == "1" })
	for _, name := range left {
		if _, err := os.Stat(filepath.Join(dir, name)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is left: %v", name, err)
		}
	}
}

func TestDataSurvivesCloseAndKill(t *testing.T) {
	dir := t.TempDir()
	s := start(t, dir)
	ctx := context.Background()
	c := client(t, s)
	if err := c.Set(ctx, "a", "1", 0).Err(); err != nil {
		t.Fatal(err)
	}
	pid := s.PID()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the server runs again", func() bool { return s.PID() != 0 && s.PID() != pid && c.Ping(ctx).Err() == nil })
	if got := c.Get(ctx, "a").Val(); got != "1" {
		t.Fatalf("after kill: %q", got)
	}
	if s.Starts() != 2 {
		t.Errorf("started %d times, want 2", s.Starts())
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatalf("second close: %v", err)
	}
	if _, err := os.Stat(s.Addr()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is left: %v", err)
	}
	if got := client(t, start(t, dir)).Get(ctx, "a").Val(); got != "1" {
		t.Fatalf("after close: %q", got)
	}
}

func TestOneServerPerDirectory(t *testing.T) {
	dir := t.TempDir()
	start(t, dir)
	ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer cancel()
	if _, err := Start(ctx, dir, quiet); !errors.Is(err, ErrInUse) {
		t.Fatalf("error %v, want ErrInUse", err)
	}
}

func TestMissingBinaryNamesTheFix(t *testing.T) {
	o := quiet
	o.Binary = "no-such-redis-server"
	_, err := Start(context.Background(), t.TempDir(), o)
	if !errors.Is(err, ErrMissing) || !strings.Contains(err.Error(), "apt-get install redis-server") {
		t.Fatalf("error %v", err)
	}
}

func TestServerThatCannotStart(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	o := quiet
	o.Binary = "/bin/false"
	if _, err := Start(ctx, t.TempDir(), o); err == nil {
		t.Fatal("started")
	} else if ctx.Err() != nil {
		t.Fatalf("not told before the deadline: %v", err)
	}
	o.Binary, o.Fsync = "", "sometimes"
	if _, err := Start(ctx, t.TempDir(), o); err == nil {
		t.Fatal("started with a policy that does not exist")
	}
}

func TestLongDirectory(t *testing.T) {
	dir := filepath.Join(t.TempDir(), strings.Repeat("long/", 30), "with space")
	s := start(t, dir)
	if len(s.Addr()) > 107 {
		t.Fatalf("socket path of %d bytes", len(s.Addr()))
	}
	if err := client(t, s).Set(context.Background(), "a", "1", 0).Err(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "appendonlydir")); err != nil {
		t.Errorf("the data is not in the directory: %v", err)
	}
}

func TestOnlyTheOwnerReachesIt(t *testing.T) {
	s := start(t, filepath.Join(t.TempDir(), "redis"))
	for path, want := range map[string]os.FileMode{s.Addr(): 0o600, filepath.Dir(s.Addr()): 0o700} {
		info, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode().Perm() != want {
			t.Errorf("%s: mode %v, want %v", path, info.Mode().Perm(), want)
		}
	}
	if port := client(t, s).ConfigGet(context.Background(), "port").Val()["port"]; port != "0" {
		t.Errorf("listens on port %s", port)
	}
}

// A process that is killed takes its server with it, and the next life gets the directory.
func TestServerDiesWithItsProcess(t *testing.T) {
	if dir := os.Getenv("REDISSERVER_TEST_DIR"); dir != "" {
		s, err := Start(context.Background(), dir, quiet)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Printf("pid=%d\n", s.PID())
		select {} // until killed
	}
	dir := t.TempDir()
	cmd := exec.Command(os.Args[0], "-test.run=^TestServerDiesWithItsProcess$")
	cmd.Env = append(os.Environ(), "REDISSERVER_TEST_DIR="+dir)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var pid int
	if _, err := fmt.Fscanf(out, "pid=%d\n", &pid); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // killed
	eventually(t, "redis-server "+strconv.Itoa(pid)+" is gone", func() bool {
		raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		return err != nil || strings.Contains(string(raw), ") Z ")
	})
	start(t, dir)
}

// TestBackoff: the wait before a start grows while servers die soon, and is short again after one that served for some seconds.
func TestBackoff(t *testing.T) {
	var wait time.Duration
	for i, c := range []struct{ lived, want time.Duration }{
		{0, minBackoff}, {time.Second, 2 * minBackoff}, {healthyRun, 4 * minBackoff}, {healthyRun + 1, minBackoff}, {0, 2 * minBackoff},
	} {
		if wait = backoff(wait, c.lived); wait != c.want {
			t.Errorf("death %d, after %v: waits %v, want %v", i+1, c.lived, wait, c.want)
		}
	}
	for range 100 {
		wait = backoff(wait, 0)
	}
	if wait != maxBackoff {
		t.Errorf("after many: waits %v, want %v", wait, maxBackoff)
	}
}
