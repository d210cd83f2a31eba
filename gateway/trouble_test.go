package gateway

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/redisserver"
	"github.com/ephemeral-run/ephemeral/test/smalldisk"
)

// sick is a gateway with a Redis of its own on a small disk.
type sick struct {
	*live
	own  *redisserver.Server
	rdb  *goredis.Client
	disk string
	m    member
}

func newSick(t *testing.T, storeTimeout time.Duration) *sick {
	t.Helper()
	t.Cleanup(func() { time.Sleep(1100 * time.Millisecond) }) // a Redis client that dials notices its end once a second
	dir := smalldisk.New(t, "64m")
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	own, err := redisserver.Start(ctx, filepath.Join(dir, "redis"), redisserver.Options{Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { own.Close() })
	s := &sick{live: liveOn(t, Config{StoreTimeout: storeTimeout}, own.URL(), run.WithRoom(own.Full)), own: own, disk: dir,
		rdb: goredis.NewClient(&goredis.Options{Network: "unix", Addr: own.Addr()})}
	t.Cleanup(func() { s.rdb.Close() })
	s.m = s.newMember("o", 1_000_000_000)
	return s
}

// largeCommand is a request that does not fit into what is left of the last page of a file on a full disk.
var largeCommand = fmt.Sprintf(`{"command":"echo %s","max_cost_micros":1000}`, strings.Repeat("x", 20_000))

// post posts a run with the key once.
func (s *sick) post(key string) (answer, time.Duration) {
	s.t.Helper()
	began := time.Now()
	a := s.do(s.t.(*testing.T), "POST", "/v1/runs", largeCommand, "Authorization", "Bearer "+s.m.secret, "Idempotency-Key", key)
	return a, time.Since(began)
}

// signal sends a signal to Redis.
func (s *sick) signal(sig syscall.Signal) { s.t.Helper(); s.must(syscall.Kill(s.own.PID(), sig)) }

func (s *sick) set(name, value string) {
	s.t.Helper()
	s.must(s.rdb.ConfigSet(s.ctx, name, value).Err())
}

// outage is for how long Redis answers nothing: ten seconds in the long form.
func outage() time.Duration {
	if os.Getenv("EPHEMERAL_CHAOS") != "" {
		return 10 * time.Second
	}
	return 4 * time.Second
}

// Whatever ails Redis, a client is answered within its request's deadline, with a problem and when to come again; the server
// recovers alone; what was acknowledged is there, and nothing is held twice.
func TestTroubleOverHTTP(t *testing.T) {
	const deadline = 2 * time.Second
	s := newSick(t, deadline)
	for _, trouble := range []struct {
		name       string
		hurt, heal func()
		served     bool // a post is served all the same
		code       Code // of the refusal, empty: CodeUnavailable
		lasts      time.Duration
	}{
		{name: "slow", served: true, hurt: func() {
			s.signal(syscall.SIGSTOP)
			time.AfterFunc(time.Second, func() { s.signal(syscall.SIGCONT) })
		}, heal: func() {}},
		{name: "gone", lasts: outage(), hurt: func() { s.signal(syscall.SIGSTOP) }, heal: func() { s.signal(syscall.SIGCONT) }},
		{name: "killed", hurt: func() { s.signal(syscall.SIGSTOP) }, heal: func() { s.signal(syscall.SIGKILL) }},
		{name: "read-only", hurt: func() { s.must(s.rdb.Do(s.ctx, "REPLICAOF", "127.0.0.1", "1").Err()) },
			heal: func() { s.must(s.rdb.Do(s.ctx, "REPLICAOF", "NO", "ONE").Err()) }},
		{name: "out of memory", hurt: func() { s.set("maxmemory", "1") }, heal: func() { s.set("maxmemory", "0") }},
		{name: "scripts forgotten", served: true, hurt: func() { s.must(s.rdb.ScriptFlush(s.ctx).Err()) }, heal: func() {}},
		{name: "disk full", code: CodeStorageFull, hurt: func() {
			s.must(smalldisk.Fill(s.disk))
			for end := time.Now().Add(10 * time.Second); s.own.Full() == nil; time.Sleep(10 * time.Millisecond) {
				if time.Now().After(end) {
					t.Fatal("nobody sees that the disk is full")
				}
			}
		}, heal: func() { s.must(os.Remove(filepath.Join(s.disk, smalldisk.Filler))) }},
	} {
		t.Run(trouble.name, func(t *testing.T) {
			before, err := s.store.Account(s.ctx, "o")
			s.must(err)
			key := strings.ReplaceAll(trouble.name, " ", "-")
			trouble.hurt()
			for began := time.Now(); ; time.Sleep(100 * time.Millisecond) {
				a, took := s.post(key)
				if took > deadline+time.Second {
					t.Errorf("answered after %v", took)
				}
				if trouble.served {
					if a.StatusCode != 202 {
						t.Errorf("%d %s", a.StatusCode, a.body)
					}
				} else if p := a.problem(t); a.StatusCode != 503 || p.Code != cmp.Or(trouble.code, CodeUnavailable) || a.Header.Get("Retry-After") == "" {
					t.Errorf("%d %+v, Retry-After %q", a.StatusCode, p, a.Header.Get("Retry-After"))
				}
				if time.Since(began) >= trouble.lasts {
					break
				}
			}
			trouble.heal()
			var ids [2]run.ID
			for i := range ids {
				for began := time.Now(); ; time.Sleep(50 * time.Millisecond) {
					a, _ := s.post(key)
					if a.StatusCode == 202 {
						var r run.Run
						s.must(json.Unmarshal([]byte(a.body), &r))
						ids[i] = r.ID
						break
					}
					if a.StatusCode != 503 || time.Since(began) > 20*time.Second {
						t.Fatalf("not recovered: %d %s", a.StatusCode, a.body)
					}
				}
			}
			after, err := s.store.Account(s.ctx, "o")
			s.must(err)
			if ids[0] != ids[1] || after.Held != before.Held+1000 || after.Balance != before.Balance {
				t.Errorf("runs %v, before %+v, after %+v", ids, before, after)
			}
			rep, err := s.store.Audit(s.ctx)
			s.must(err)
			s.must(rep.Err())
		})
	}
	// All that were acknowledged are there still.
	list, err := s.m.Runs(s.ctx, run.Page{})
	s.must(err)
	if len(list.Runs) != 7 {
		t.Errorf("%d runs, want 7", len(list.Runs))
	}
	if s.own.Starts() < 2 {
		t.Error("Redis was not restarted")
	}
}
