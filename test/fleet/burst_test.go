package fleet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/gateway"
	"github.com/ephemeral-run/ephemeral/node"
	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/redisserver"
)

// The burst: runs of one length on a node that takes few at once, and more requests than may wait.
const (
	burstService = 800 * time.Millisecond
	burstSlots   = 2
	burstQueue   = 30
	burstRefused = 24
)

// steadyExecutor has no machine: it takes as long for each run as for any other. It notes when it starts one.
type steadyExecutor struct {
	store *run.Store

	mu    sync.Mutex
	takes []time.Time
}

// Execute implements node.Executor.
func (e *steadyExecutor) Execute(ctx context.Context, l *run.Lease) {
	e.mu.Lock()
	e.takes = append(e.takes, time.Now())
	e.mu.Unlock()
	err := e.store.Start(ctx, l, run.Start{At: time.Now(), Machine: "none-" + string(l.Run), Image: "none", Isolation: "none"})
	sleep(ctx, burstService)
	if err == nil {
		_, err = e.store.Settle(context.WithoutCancel(ctx), l, run.Outcome{At: time.Now(), State: run.Succeeded})
	}
	if err != nil {
		fmt.Println("pretended run:", err)
	}
}

func (e *steadyExecutor) taken() []time.Time {
	e.mu.Lock()
	defer e.mu.Unlock()
	return append([]time.Time(nil), e.takes...)
}

// refusal is one 429 of the burst.
type refusal struct {
	at    time.Time
	told  time.Duration // Retry-After
	first int           // how many requests of the burst were to be let in before it
	again time.Duration // after which it was let in
	tries int
}

// TestRetryAfterInABurst posts over HTTP far more than may wait. Each refused request is told when there will be room for it:
// within 20 percent of when that is, and it comes back then.
func TestRetryAfterInABurst(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	b := newBurst(ctx, t)
	for range 3 * burstSlots { // from which it learns how long runs take
		if status, _ := b.post(); status != http.StatusAccepted {
			t.Fatalf("status %d before the burst", status)
		}
	}
	for len(b.exec.taken()) < 3*burstSlots {
		sleep(ctx, 10*time.Millisecond)
	}
	sleep(ctx, 2*burstService)
	before := len(b.exec.taken())
	var refused []*refusal
	for accepted := 0; len(refused) < burstRefused; {
		status, after := b.post()
		switch status {
		case http.StatusAccepted:
			accepted++
		case http.StatusTooManyRequests:
			refused = append(refused, &refusal{at: time.Now(), told: after, first: accepted + len(refused)})
		default:
			t.Fatalf("status %d in the burst", status)
		}
	}
	var all sync.WaitGroup
	for _, r := range refused {
		all.Go(func() { b.comeBack(ctx, r) })
	}
	all.Wait()
	b.judge(refused, b.exec.taken()[before:])
}

// burst is a gateway and a node in this process, on a Redis of their own.
type burst struct {
	t      *testing.T
	exec   *steadyExecutor
	url    string
	secret string
	client *http.Client
}

func newBurst(ctx context.Context, t *testing.T) *burst {
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	log := slog.New(slog.DiscardHandler)
	redis, err := redisserver.Start(ctx, filepath.Join(t.TempDir(), "redis"), redisserver.Options{Log: log})
	must(err)
	t.Cleanup(func() { redis.Close() })
	store, err := run.Open(ctx, run.Config{RedisURL: redis.URL(), Lease: time.Minute, Concurrency: 1000, QueueLimit: burstQueue})
	must(err)
	t.Cleanup(func() { store.Close() })
	must(second(store.CreateOrg(ctx, run.Org{ID: "o", Name: "o"})))
	must(second(store.Credit(ctx, "o", 1_000_000_000, "start")))
	b := &burst{t: t, exec: &steadyExecutor{store: store}, client: &http.Client{Timeout: 10 * time.Second}}
	_, b.secret, err = store.CreateKey(ctx, "o", "burst", run.Member)
	must(err)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	must(err)
	b.url = "http://" + ln.Addr().String()
	n, err := node.New("n0", node.Config{Concurrency: burstSlots, Drain: time.Second}, time.Minute, store, b.exec, log)
	must(err)

	serving, stop := context.WithCancel(ctx)
	var parts sync.WaitGroup
	t.Cleanup(func() {
		stop()
		parts.Wait()
		b.client.CloseIdleConnections()
	})
	part := func(f func() error) {
		parts.Go(func() {
			if err := f(); err != nil && !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
		})
	}
	part(func() error {
		return gateway.New(gateway.Config{DrainTimeout: time.Second}, gateway.Deps{Store: store, FirstSlice: slice, Log: log}).Serve(serving, ln)
	})
	part(func() error { return n.Run(serving) })
	part(func() error {
		node.Announce(serving, store, func() run.Node { return run.Node{ID: "n0", Slots: n.Concurrency()} }, log)
		return nil
	})
	return b
}

// post sends one request and gives the status and Retry-After.
func (b *burst) post() (status int, after time.Duration) {
	b.t.Helper()
	req, err := http.NewRequest(http.MethodPost, b.url+"/v1/runs", strings.NewReader(`{"command": "true", "max_cost_micros": 1000}`))
	if err != nil {
		b.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+b.secret)
	req.Header.Set("Content-Type", "application/json")
	resp, err := b.client.Do(req)
	if err != nil {
		b.t.Error(err)
		return 0, 0
	}
	defer resp.Body.Close()
	_, _ = io.Copy(io.Discard, resp.Body)
	if text := resp.Header.Get("Retry-After"); text != "" {
		seconds, err := strconv.Atoi(text)
		if err != nil {
			b.t.Errorf("Retry-After %q: %v", text, err)
		}
		after = time.Duration(seconds) * time.Second
	}
	return resp.StatusCode, after
}

// comeBack does as the refused request was told.
func (b *burst) comeBack(ctx context.Context, r *refusal) {
	for wait := time.Until(r.at.Add(r.told)); sleep(ctx, wait); wait = 100 * time.Millisecond {
		r.tries++
		if status, _ := b.post(); status == http.StatusAccepted {
			r.again = time.Since(r.at)
			return
		}
	}
}

// judge compares what was told with when the node had taken so many runs that there was room. Whole seconds cannot tell a
// short time within 20 percent: up to one of them is the rounding up, which the header has to do.
func (b *burst) judge(refused []*refusal, takes []time.Time) {
	at, exact := 0, 0
	for i, r := range refused {
		n := r.first + 1 - burstQueue // so many had to be taken
		if n < 1 || n > len(takes) {
			b.t.Fatalf("refusal %d needs take %d of %d", i, n, len(takes))
		}
		room := takes[n-1].Sub(r.at)
		least := r.told - time.Second // what was rounded up
		off := max(0, (least - room).Seconds(), (room - r.told).Seconds())
		if room >= 5*time.Second { // there a second is no more than 20 percent
			off = math.Abs((r.told - room).Seconds())
			exact++
		}
		if off > 0.2*room.Seconds() {
			b.t.Errorf("refused as number %d: told %v, there was room after %.2f s", i+1, r.told, room.Seconds())
		}
		if r.tries == 1 {
			at++
		}
	}
	b.t.Logf("%d refused; %d were let in when they came as told; of %d the whole header is within 20 percent", len(refused), at, exact)
	if exact < 5 || at < len(refused)*8/10 {
		b.t.Errorf("only %d of %d were let in at once when they came as told, %d waited for 5 s or more", at, len(refused), exact)
	}
}
