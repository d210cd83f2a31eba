package run

import (
	"context"
	"fmt"
	"log/slog"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"golang.org/x/sys/unix"

	"github.com/ephemeral-run/ephemeral/run/redisserver"
)

func BenchmarkAdmit(b *testing.B) {
	f := newFixture(b, func(c *Config) { c.QueueLimit = 1 << 30 })
	f.newOrg("o", 0, 1<<50)
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			_, _, err := f.Admit(f.ctx, Admission{Org: "o", IdempotencyKey: word(8), Fingerprint: "f",
				Spec: Spec{Command: "true", MaxCostMicros: 1, TimeoutSeconds: 10}})
			if err != nil {
				b.Error(err)
				return
			}
		}
	})
}

func BenchmarkReplay(b *testing.B) {
	f := newFixture(b)
	f.newOrg("o", 0, 1<<50)
	a := Admission{Org: "o", IdempotencyKey: "k", Fingerprint: "f", Spec: Spec{Command: "true", MaxCostMicros: 1}}
	for b.Loop() {
		if _, _, err := f.Admit(f.ctx, a); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkAdmitAgainstRedis compares admissions through the store with redis-benchmark's calls of the very same script,
// both over 50 connections: what the store adds is the ratio.
func BenchmarkAdmitAgainstRedis(b *testing.B) {
	const connections = 50
	f := newFixture(b, func(c *Config) {
		c.QueueLimit, c.RedisURL = 1<<30, c.RedisURL+fmt.Sprintf("?pool_size=%d", connections)
	})
	f.newOrg("o", 0, 1<<50)
	spec := Spec{Command: "true", MaxCostMicros: 1, TimeoutSeconds: 10}
	b.SetParallelism(max(1, connections/runtime.GOMAXPROCS(0)))
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if _, _, err := f.Admit(f.ctx, Admission{Org: "o", Key: "key_0", IdempotencyKey: word(8), Fingerprint: "f", Spec: spec}); err != nil {
				b.Error(err)
				return
			}
		}
	})
	ours := float64(b.N) / b.Elapsed().Seconds()
	b.StopTimer()
	if b.N < 1000 {
		return // too few to say anything
	}
	bare := f.redisBenchmark(b, connections, b.N, spec)
	b.ReportMetric(ours, "admissions/s")
	b.ReportMetric(bare, "redis-benchmark/s")
	b.ReportMetric(ours/bare, "ratio")
}

// redisBenchmark calls the admit script n times with redis-benchmark and returns how many it did a second.
func (f *fixture) redisBenchmark(b *testing.B, connections, n int, spec Spec) float64 {
	b.Helper()
	const id = "run_x__rand_int__" // another number in each place of each call
	k := f.keys
	f.newOrg("p", 0, 1<<50)
	f.admit("p", 1) // the script looks whether the first two ids of the index still have records: they do, as in the store's calls
	f.admit("p", 1)
	prefix, suffix := k.runAround()
	keys := []string{k.idem("p", "") + id, k.run(id), k.runEvents(id), k.spec(id), k.org("p"), k.queue("p"), k.active("p"), k.runs("p"),
		k.ring(), k.limits("key_0"), k.parked("p"), k.keyParked("key_0")}
	args := []string{"-s", server.Addr(), "-c", fmt.Sprint(connections), "-n", fmt.Sprint(n), "-r", "2000000000", "--csv",
		"EVALSHA", admitScript.Hash(), fmt.Sprint(len(keys))}
	args = append(args, keys...)
	args = append(args, k.events(), k.work(), id, "p", fmt.Sprint(f.micros()), "f", "86400000", "1", "0", mustEncode(spec), "", "0",
		"key_0", fmt.Sprint(1<<30), "20", prefix, suffix)
	out, err := exec.CommandContext(f.ctx, "redis-benchmark", args...).Output()
	if err != nil {
		b.Fatal(err)
	}
	if got := f.rdb.ZCard(f.ctx, k.queue("p")).Val(); got < int64(n)*99/100 {
		b.Fatalf("%d runs queued by redis-benchmark, want %d:\n%s", got, n, out)
	}
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	fields := strings.Split(lines[len(lines)-1], `","`) // the command, calls a second, and six latencies
	if len(fields) < 8 {
		b.Fatalf("redis-benchmark said %q", out)
	}
	rate, err := strconv.ParseFloat(fields[len(fields)-7], 64)
	if err != nil {
		b.Fatal(err)
	}
	return rate
}

// BenchmarkTake takes from queues of different lengths: the cost must not grow with them. All but the oldest runs of each
// organisation are ids in its queue and nothing else, since a take looks at the oldest one only: so a million fit.
func BenchmarkTake(b *testing.B) {
	for _, waiting := range []int{100, 1000, 10_000, 100_000, 1_000_000} {
		b.Run(fmt.Sprintf("waiting=%d", waiting), func(b *testing.B) {
			f := newFixture(b, func(c *Config) { c.QueueLimit, c.Concurrency = 1<<30, 1<<30 })
			const orgs = 10
			for i := range orgs {
				f.newOrg(fmt.Sprintf("o%d", i), 0, 1<<50)
				f.admit(fmt.Sprintf("o%d", i), 1)
			}
			f.fill(orgs, waiting-orgs)
			var redisTime time.Duration
			for b.Loop() {
				before := f.redisCPU()
				l, err := f.tryTake(f.ctx, "n1")
				if err != nil || l == nil {
					b.Fatal(l, err)
				}
				b.StopTimer()
				redisTime += f.redisCPU() - before
				if err := f.Requeue(f.ctx, l); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
			b.StopTimer()
			b.ReportMetric(float64(redisTime.Nanoseconds())/1000/float64(b.N), "redis-us/op")
			for i := range orgs {
				f.must(f.rdb.Del(f.ctx, f.keys.queue(fmt.Sprintf("o%d", i))).Err())
			}
		})
	}
}

// redisCPU is how long redis-server has worked: its CPU-time clock, as clock_getcpuclockid(3) names it.
func (f *fixture) redisCPU() time.Duration {
	f.t.Helper()
	var t unix.Timespec
	f.must(unix.ClockGettime(int32(^server.PID()<<3|2), &t))
	return time.Duration(t.Nano())
}

// fill adds n ids of younger runs to the queues.
func (f *fixture) fill(orgs, n int) {
	f.t.Helper()
	young := f.micros() + time.Hour.Microseconds()
	for at := 0; at < n; at += 1000 {
		members := make([][]redis.Z, orgs)
		for i := at; i < min(at+1000, n); i++ {
			members[i%orgs] = append(members[i%orgs], redis.Z{Score: float64(young + int64(i)), Member: fmt.Sprintf("run_%032x", i)})
		}
		f.must(f.pipelined(f.ctx, func(p redis.Pipeliner) {
			for org, m := range members {
				if len(m) > 0 {
					p.ZAdd(f.ctx, f.keys.queue(fmt.Sprintf("o%d", org)), m...)
				}
			}
		}))
	}
}

// BenchmarkMemory tells what Redis needs for each run that it keeps: a settled command with its record, events, calls,
// ledger entry and idempotency key.
func BenchmarkMemory(b *testing.B) {
	f := newFixture(b)
	f.newOrg("o", 0, 1<<50)
	used := func() float64 {
		info := f.rdb.Info(f.ctx, "memory").Val()
		_, rest, _ := strings.Cut(info, "used_memory:")
		digits, _, _ := strings.Cut(rest, "\r")
		n, err := strconv.ParseFloat(digits, 64)
		if err != nil {
			b.Fatal(err)
		}
		return n
	}
	before := used()
	for i := 0; b.Loop(); i++ {
		if err := f.oneRun(fmt.Sprintf("k%d", i)); err != nil {
			b.Fatal(err)
		}
	}
	b.StopTimer()
	b.ReportMetric((used()-before)/float64(b.N), "bytes/run")
}

// BenchmarkSettle runs a whole life without a machine, from admission to settlement.
func BenchmarkSettle(b *testing.B) {
	f := newFixture(b)
	f.newOrg("o", 0, 1<<50)
	for i := 0; b.Loop(); i++ {
		if err := f.oneRun(fmt.Sprint(i)); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkWakeUp tells how long an idle node needs to have a run's lease, counted from before its admission.
func BenchmarkWakeUp(b *testing.B) {
	for _, fsync := range []string{"everysec", "always"} {
		b.Run(fsync, func(b *testing.B) { benchmarkWakeUp(b, fsync) })
	}
}

func benchmarkWakeUp(b *testing.B, fsync string) {
	started, stop := context.WithTimeout(context.Background(), 20*time.Second)
	defer stop()
	own, err := redisserver.Start(started, filepath.Join(b.TempDir(), "redis"), redisserver.Options{Fsync: fsync, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { own.Close() })
	f := newFixture(b, func(c *Config) { c.RedisURL, c.Concurrency = own.URL(), 1<<30 })
	f.newOrg("o", 0, 1<<50)
	node := f.open()
	taken := make(chan time.Time)
	ctx, cancel := context.WithCancel(f.ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			if _, err := node.Take(ctx, "n1"); err != nil {
				return
			}
			taken <- time.Now()
		}
	}()
	var took []time.Duration
	for b.Loop() {
		b.StopTimer()
		time.Sleep(2 * time.Millisecond) // until the node waits again
		b.StartTimer()
		begin := time.Now()
		f.admit("o", 1)
		took = append(took, (<-taken).Sub(begin))
	}
	cancel()
	<-ended
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds())/1000, "p50-ms")
	b.ReportMetric(float64(took[len(took)*95/100].Microseconds())/1000, "p95-ms")
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds())/1000, "p99-ms")
}
