package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	ephemeral "github.com/ephemeral-run/ephemeral/run"
)

// Size of the measurement of event streams.
const (
	sseRuns     = 200
	sseReaders  = 2000 // ten for each run
	sseEvents   = 2000 // in all, evenly spread over the runs
	ssePerSec   = 100  // events a second; each reaches ten readers
	sseSettle   = 3 * time.Second
	sseDeadline = 2 * time.Minute
)

// streams measures how old an event is when a reader has it, and what a reader costs the gateway.
func streams(ctx context.Context, o options, data string) (rows []row, err error) {
	ctx, cancel := context.WithTimeout(ctx, sseDeadline)
	defer cancel()
	c, err := openCell(ctx, o, filepath.Join(data, "cell-sse"), "always")
	if err != nil {
		return nil, fmt.Errorf("event streams: %w", err)
	}
	defer func() { err = errors.Join(err, c.close()) }()
	store, err := ephemeral.Open(ctx, ephemeral.Config{RedisURL: c.redis.URL()})
	if err != nil {
		return nil, err
	}
	defer store.Close()
	leases, err := leased(ctx, store)
	if err != nil {
		return nil, fmt.Errorf("event streams: start %d runs: %w", sseRuns, err)
	}
	say("%d readers of %d runs", sseReaders, sseRuns)
	before, err := memory(c.gateway.Process.Pid)
	if err != nil {
		return nil, err
	}
	a := &audience{c: c, there: make(chan struct{}, sseReaders)}
	if err := a.gather(ctx, leases); err != nil {
		return nil, errors.Join(fmt.Errorf("event streams: %w", err), a.leave())
	}
	time.Sleep(sseSettle)
	after, err := memory(c.gateway.Process.Pid)
	if err == nil {
		err = play(ctx, store, leases)
	}
	time.Sleep(sseSettle) // the last events are on their way
	if err = errors.Join(err, a.leave()); err != nil {
		return nil, fmt.Errorf("event streams: %w", err)
	}
	ages := slices.Concat(a.ages...)
	if len(ages) != sseEvents*sseReaders/sseRuns {
		return nil, fmt.Errorf("event streams: %d events arrived, want %d", len(ages), sseEvents*sseReaders/sseRuns)
	}
	slices.Sort(ages)
	at := func(q float64) float64 { return float64(ages[int(q*float64(len(ages)-1))].Microseconds()) / 1000 }
	per := float64(after-before) / sseReaders / 1024
	return []row{
		{Name: "sse.age", Value: at(0.99), P95: at(0.95), Unit: "ms p99", Samples: len(ages), most: 50},
		{Name: "sse.age.median", Value: at(0.5), P95: at(0.95), Unit: "ms", Samples: len(ages)},
		{Name: "sse.memory", Value: per, P95: per, Unit: "KiB/reader", Samples: sseReaders, most: 40},
	}, nil
}

// leased admits runs and takes them, as a node does.
func leased(ctx context.Context, store *ephemeral.Store) (leases []*ephemeral.Lease, err error) {
	if _, err := store.LimitOrg(ctx, "bench", ephemeral.Limits{Concurrency: sseRuns, Queue: 2 * sseRuns}); err != nil {
		return nil, err
	}
	for range sseRuns {
		spec := ephemeral.Spec{Command: "true", TimeoutSeconds: 600, MaxCostMicros: 1000}
		if _, _, err := store.Admit(ctx, ephemeral.Admission{Org: "bench", Key: "key_bench", Spec: spec}); err != nil {
			return nil, err
		}
		l, err := store.Take(ctx, "bench")
		if err != nil {
			return nil, err
		}
		if err := store.Start(ctx, l, ephemeral.Start{At: time.Now(), Machine: "m-" + string(l.Run), Image: "bench", Isolation: "emulated"}); err != nil {
			return nil, err
		}
		leases = append(leases, l)
	}
	return leases, nil
}

// play appends events to the runs in turn. Each says when it was appended.
func play(ctx context.Context, store *ephemeral.Store, leases []*ephemeral.Lease) error {
	tick := time.NewTicker(time.Second / ssePerSec)
	defer tick.Stop()
	for i := range sseEvents {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
		l := leases[i%len(leases)]
		now := time.Now()
		err := store.Append(ctx, l, ephemeral.NewEvent{Type: ephemeral.EventShell, At: now, Data: ephemeral.ShellData{
			Command: "echo", Outcome: "exited", Output: fmt.Sprintf("appended %d.", now.UnixNano())}})
		if err != nil {
			return fmt.Errorf("append: %w", err)
		}
		if i%len(leases) == 0 { // a long measurement outlives a lease
			for _, l := range leases {
				if _, err := store.Renew(ctx, l); err != nil {
					return fmt.Errorf("renew: %w", err)
				}
			}
		}
	}
	return nil
}

// audience is all readers.
type audience struct {
	c       *cell
	there   chan struct{} // one for each reader that has its stream
	conns   []net.Conn
	ages    [][]time.Duration
	readers sync.WaitGroup
	leaving atomic.Bool
	failed  atomic.Pointer[error]
}

// gather opens all streams and returns when each has its first events.
func (a *audience) gather(ctx context.Context, leases []*ephemeral.Lease) error {
	a.ages = make([][]time.Duration, sseReaders)
	for i := range sseReaders {
		conn, err := net.Dial("tcp", a.c.addr)
		if err != nil {
			return err
		}
		a.conns = append(a.conns, conn)
		_, err = fmt.Fprintf(conn, "GET /v1/runs/%s/events HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\nAuthorization: Bearer %s\r\n\r\n",
			leases[i%len(leases)].Run, a.c.secret)
		if err != nil {
			return err
		}
		a.readers.Go(func() { a.read(i, conn) })
	}
	for range sseReaders {
		select {
		case <-a.there:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// read notes the age of every event of one stream.
func (a *audience) read(i int, conn net.Conn) {
	in := bufio.NewReaderSize(conn, 1024)
	for {
		line, err := in.ReadSlice('\n')
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			if !a.leaving.Load() {
				err = fmt.Errorf("reader %d: %w", i, err)
				a.failed.CompareAndSwap(nil, &err)
			}
			return
		}
		if bytes.HasPrefix(line, []byte("event: microvm.ready")) {
			a.there <- struct{}{}
		}
		_, rest, found := bytes.Cut(line, []byte("appended "))
		if !found {
			continue
		}
		digits, _, _ := bytes.Cut(rest, []byte("."))
		if ns, err := strconv.ParseInt(string(digits), 10, 64); err == nil {
			a.ages[i] = append(a.ages[i], time.Duration(time.Now().UnixNano()-ns))
		}
	}
}

// leave ends all streams.
func (a *audience) leave() error {
	a.leaving.Store(true)
	for _, conn := range a.conns {
		_ = conn.Close() // nothing is expected from it any more
	}
	a.readers.Wait()
	if err := a.failed.Load(); err != nil {
		return *err
	}
	return nil
}

// memory is how many bytes of a process are in memory: its resident set, as /proc tells.
func memory(pid int) (int64, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if value, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			kib, err := strconv.ParseInt(strings.Fields(value)[0], 10, 64)
			return kib << 10, err
		}
	}
	return 0, fmt.Errorf("the memory of process %d is not told", pid)
}
