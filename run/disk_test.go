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
	"github.com/ephemeral-run/ephemeral/test/smalldisk"
)

// With the disk of the append-only file full, runs are refused and those under way end; reads are answered; nothing is held by
// halves. The store recovers alone once there is room, and what was acknowledged is there after a restart.
func TestFullDisk(t *testing.T) {
	for _, fsync := range []string{"always", "everysec"} {
		t.Run(fsync, func(t *testing.T) { fullDisk(t, fsync) })
	}
}

func fullDisk(t *testing.T, fsync string) {
	dir := smalldisk.New(t, "64m")
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	own, err := redisserver.Start(ctx, filepath.Join(dir, "redis"), redisserver.Options{Fsync: fsync, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { own.Close() })
	f := newFixture(t, func(c *Config) { c.RedisURL, c.QueueLimit = own.URL(), 100_000 })
	f.room = own.Full
	f.newOrg("o", 0, 10_000_000)
	under := func(cost Micros) *Lease {
		f.admit("o", cost)
		l := f.take()
		f.begin(l)
		return l
	}
	l, waiting := under(1000), under(500)
	admitted := map[string]ID{}
	admit := func(key string) error {
		a := admission(key)
		a.Spec.Command = "echo " + strings.Repeat("x", 2000)
		r, _, err := f.Admit(f.ctx, a)
		if err == nil {
			admitted[key] = r.ID
		}
		return err
	}
	for range 20 {
		f.must(admit(word(8)))
	}
	f.must(f.until(func() bool { return spare(t, dir) > 6<<20 })) // which what is under way may use
	f.must(smalldisk.Fill(dir))
	for err = nil; err == nil; err = admit(word(8)) {
		if len(admitted) > 50_000 {
			t.Fatal("runs are admitted without end")
		}
	}
	f.want(err, ErrUnavailable)
	f.want(err, ErrStorageFull)
	full := len(admitted)
	f.want(admit("refused"), ErrStorageFull)
	again := func() {
		t.Helper()
		for key, id := range admitted {
			r, replayed, err := f.Admit(f.ctx, admission(key))
			f.must(err)
			f.same(r.ID, id)
			f.same(replayed, true)
			return // one is enough
		}
	}
	again()
	_, err = f.BeginUpload(f.ctx, NewUpload{Org: "o", Life: time.Hour, Most: 10, MostBytes: 10, MostCount: 1})
	f.want(err, ErrStorageFull)
	soon, cancel := context.WithTimeout(f.ctx, 300*time.Millisecond)
	defer cancel()
	if l, err := f.Take(soon, "n1"); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("took %+v, %v though there is no room", l, err)
	}
	f.same(f.account("o").Held, Micros(1500+100*full))
	f.must(f.Append(f.ctx, l, NewEvent{Type: EventShell, At: f.clock.now(), Data: ShellData{Command: "ls"}}))
	_, err = f.Settle(f.ctx, l, Outcome{State: Succeeded})
	f.must(err)
	f.balanced()
	if own.Starts() != 1 {
		t.Fatalf("redis-server ended when the disk was full: it was started %d times", own.Starts())
	}
	f.must(syscall.Kill(own.PID(), syscall.SIGKILL)) // and starts on a full disk
	f.must(f.until(func() bool { return f.Ping(f.ctx) == nil }))
	f.same(string(f.get(l.Run).State), string(Succeeded))
	f.want(admit("refused"), ErrStorageFull)
	again()

	f.must(os.Remove(filepath.Join(dir, smalldisk.Filler)))
	f.must(f.until(func() bool {
		err := admit("refused")
		if err != nil {
			f.want(err, ErrUnavailable)
		}
		return err == nil
	}))
	f.must(syscall.Kill(own.PID(), syscall.SIGKILL))
	for key, id := range admitted {
		var r Run
		f.must(f.until(func() bool {
			var replayed bool
			if r, replayed, err = f.Admit(f.ctx, admission(key)); err != nil {
				f.want(err, ErrUnavailable)
				return false
			}
			f.same(replayed, true)
			return true
		}))
		f.same(r.ID, id)
	}
	_, err = f.Settle(f.ctx, waiting, Outcome{State: Succeeded})
	f.must(err)
	f.same(f.account("o").Held, Micros(100*(full+1)))
	f.balanced()
	if own.Starts() != 3 {
		t.Errorf("redis-server was started %d times", own.Starts())
	}
	t.Logf("full after %d runs", full)
}

// until waits for at most 20 seconds until done.
func (f *fixture) until(done func() bool) error {
	for end := time.Now().Add(20 * time.Second); !done(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			return context.DeadlineExceeded
		}
	}
	return nil
}

// spare is how many bytes are set aside behind the append-only files below dir.
func spare(t *testing.T, dir string) (n int64) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "redis", "appendonlydir", "*.incr.aof"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		var st syscall.Stat_t
		if err := syscall.Stat(file, &st); err == nil {
			n += st.Blocks*512 - st.Size
		}
	}
	return n
}
