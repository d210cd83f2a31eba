package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	ephemeral "github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/redisserver"
)

// Size of the gateway's measurements. Connections are those of redis-benchmark too.
const (
	gatewayConnections = 50
	gatewayRounds      = 3
	gatewayRequests    = 20_000 // in each round
	gatewayAlone       = 1000   // one at a time
)

// posted is what is posted: a command with the fields that a client sets.
const posted = `{"command":"python3 main.py --input data.csv","timeout_seconds":60,"max_cost_micros":20000,"metadata":{"job":"nightly-report"}}`

// gateways measures the HTTP edge with each way of syncing the append-only file, and compares it with redis-benchmark's
// calls of the admit script that the gateway was seen to send.
func gateways(ctx context.Context, o options, data string) (rows []row, err error) {
	for _, fsync := range []string{"always", "everysec"} { // the default first
		c, err := openCell(ctx, o, filepath.Join(data, "cell-"+fsync), fsync)
		if err != nil {
			return nil, fmt.Errorf("gateway with appendfsync %s: %w", fsync, err)
		}
		more, err := c.measure(ctx)
		err = errors.Join(err, c.close())
		if err != nil {
			return nil, fmt.Errorf("gateway with appendfsync %s: %w", fsync, err)
		}
		rows = append(rows, more...)
	}
	return rows, nil
}

// cell is one Redis and one gateway process, as an operator starts them.
type cell struct {
	fsync   string
	redis   *redisserver.Server
	gateway *exec.Cmd
	log     *os.File
	addr    string
	secret  string
	number  atomic.Int64 // last number of an idempotency key
	bare    int          // how often redis-benchmark was called
}

func openCell(ctx context.Context, o options, dir, fsync string) (c *cell, err error) {
	c = &cell{fsync: fsync}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.close())
		}
	}()
	if c.redis, err = redisserver.Start(ctx, filepath.Join(dir, "redis"), redisserver.Options{Fsync: fsync, Log: slog.New(slog.DiscardHandler)}); err != nil {
		return nil, err
	}
	store, err := ephemeral.Open(ctx, ephemeral.Config{RedisURL: c.redis.URL()})
	if err != nil {
		return nil, err
	}
	defer store.Close()
	org, err := store.CreateOrg(ctx, ephemeral.Org{ID: "bench", Name: "bench"})
	if err != nil {
		return nil, err
	}
	if _, err = store.Credit(ctx, org.ID, 1_000_000_000_000, "bench"); err != nil {
		return nil, err
	}
	if _, c.secret, err = store.CreateKey(ctx, org.ID, "bench", ephemeral.Member); err != nil {
		return nil, err
	}
	if c.log, err = os.Create(filepath.Join(dir, "gateway.log")); err != nil {
		return nil, err
	}
	if c.addr, err = freeAddress(); err != nil {
		return nil, err
	}
	admin, err := freeAddress()
	if err != nil {
		return nil, err
	}
	c.gateway = exec.Command(o.ephemeral, "gateway")
	c.gateway.Env = append(os.Environ(), "EPHEMERAL_DATA_DIR="+dir, "EPHEMERAL_LISTEN="+c.addr, "EPHEMERAL_ADMIN_LISTEN="+admin,
		"EPHEMERAL_REDIS_URL="+c.redis.URL(), "EPHEMERAL_QUEUE_LIMIT=1000000000",
		"EPHEMERAL_RATE_LIMIT=1000000", "EPHEMERAL_RATE_BURST=1000000") // it works, and limits nobody
	c.gateway.Stdout, c.gateway.Stderr = c.log, c.log
	if err := c.gateway.Start(); err != nil {
		return nil, fmt.Errorf("start the gateway: %w", err)
	}
	return c, c.ready(ctx)
}

func (c *cell) ready(ctx context.Context) error {
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		r, err := http.Get("http://" + c.addr + "/readyz")
		if err == nil {
			r.Body.Close()
			if r.StatusCode == http.StatusOK {
				return nil
			}
		}
		if time.Now().After(deadline) || ctx.Err() != nil {
			said, _ := os.ReadFile(c.log.Name()) // what it says is better than nothing
			return errors.Join(fmt.Errorf("the gateway was not ready in time:\n%s", said[max(0, len(said)-2000):]), err, ctx.Err())
		}
	}
}

func (c *cell) close() (err error) {
	if c.gateway != nil && c.gateway.Process != nil {
		_ = c.gateway.Process.Signal(syscall.SIGTERM) // it may have ended
		err = c.gateway.Wait()
	}
	if c.log != nil {
		err = errors.Join(err, c.log.Close())
	}
	if c.redis != nil {
		err = errors.Join(err, c.redis.Close())
	}
	return err
}

// post is the load of posting runs, each with an idempotency key of its own.
func (c *cell) post() load {
	mark := strings.Repeat("#", keyDigits)
	return load{addr: c.addr, connections: gatewayConnections, status: http.StatusAccepted, number: &c.number,
		requests: [][]byte{fmt.Appendf(nil, "POST /v1/runs HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\nIdempotency-Key: \"job-%s\"\r\n"+
			"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", c.addr, c.secret, mark, len(posted), posted)}}
}

// get is the load of reading runs, a different one on each connection.
func (c *cell) get(ids []ephemeral.ID) load {
	l := load{addr: c.addr, connections: gatewayConnections, status: http.StatusOK, number: new(atomic.Int64)}
	for _, id := range ids {
		l.requests = append(l.requests, fmt.Appendf(nil, "GET /v1/runs/%s HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\n\r\n", id, c.addr, c.secret))
	}
	return l
}

// postOne posts one run and returns its id.
func (c *cell) postOne(ctx context.Context) (ephemeral.ID, error) {
	q, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+c.addr+"/v1/runs", strings.NewReader(posted))
	if err != nil {
		return "", err
	}
	q.Header.Set("Authorization", "Bearer "+c.secret)
	q.Header.Set("Content-Type", "application/json")
	q.Header.Set("Idempotency-Key", fmt.Sprintf(`"job-%0*d"`, keyDigits, c.number.Add(1)))
	r, err := http.DefaultClient.Do(q)
	if err != nil {
		return "", err
	}
	defer r.Body.Close()
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return "", err
	}
	if r.StatusCode != http.StatusAccepted {
		return "", fmt.Errorf("post a run: status %d: %s", r.StatusCode, body)
	}
	var made ephemeral.Run
	return made.ID, json.NewDecoder(bytes.NewReader(body)).Decode(&struct {
		ID *ephemeral.ID `json:"id"`
	}{&made.ID})
}

// round is what one round measured.
type round struct {
	bare, accept, replay, read float64       // a second
	gateway, redis, client     time.Duration // CPU time of one accepted run
}

// measure compares in turns, so that whatever else the host does falls on all alike.
func (c *cell) measure(ctx context.Context) ([]row, error) {
	var ids []ephemeral.ID
	for range gatewayConnections {
		id, err := c.postOne(ctx)
		if err != nil {
			return nil, err
		}
		ids = append(ids, id)
	}
	admit, err := c.seeAdmit(ctx)
	if err != nil {
		return nil, err
	}
	if _, err := c.post().run(ctx, gatewayRequests/4); err != nil { // warm
		return nil, err
	}
	var rounds []round
	for i := range gatewayRounds {
		say("gateway, appendfsync %s: round %d of %d", c.fsync, i+1, gatewayRounds)
		r, err := c.round(ctx, admit, ids)
		if err != nil {
			return nil, err
		}
		rounds = append(rounds, r)
	}
	half := c.post()
	half.rate = median(rounds, func(r round) float64 { return r.accept }) / 2
	paced, err := half.run(ctx, gatewayRequests)
	if err != nil {
		return nil, fmt.Errorf("half load: %w", err)
	}
	alone := c.post()
	alone.connections = 1
	single, err := alone.run(ctx, gatewayAlone)
	if err != nil {
		return nil, fmt.Errorf("one at a time: %w", err)
	}
	return c.rows(rounds, paced, single), nil
}

func (c *cell) round(ctx context.Context, admit []string, ids []ephemeral.ID) (r round, err error) {
	if r.bare, err = c.redisBenchmark(ctx, admit); err != nil {
		return r, err
	}
	pids := []int{c.gateway.Process.Pid, c.redis.PID(), os.Getpid()}
	before, err := cpuTimes(pids)
	if err != nil {
		return r, err
	}
	first := c.number.Load()
	accepted, err := c.post().run(ctx, gatewayRequests)
	if err != nil {
		return r, fmt.Errorf("post: %w", err)
	}
	after, err := cpuTimes(pids)
	if err != nil {
		return r, err
	}
	per := func(i int) time.Duration { return (after[i] - before[i]) / gatewayRequests }
	r.accept, r.gateway, r.redis, r.client = accepted.perSecond(), per(0), per(1), per(2)
	again := c.post()
	again.number = new(atomic.Int64)
	again.number.Store(first)
	replayed, err := again.run(ctx, gatewayRequests)
	if err != nil {
		return r, fmt.Errorf("replay: %w", err)
	}
	read, err := c.get(ids).run(ctx, gatewayRequests)
	if err != nil {
		return r, fmt.Errorf("read: %w", err)
	}
	r.replay, r.read = replayed.perSecond(), read.perSecond()
	return r, nil
}

// rows are the numbers of one way of syncing. Those of the default, always, have no suffix.
func (c *cell) rows(rounds []round, half, single loaded) []row {
	suffix := ""
	if c.fsync != "always" {
		suffix = "." + c.fsync
	}
	make := func(name, unit string, of func(round) float64) row {
		var all []float64
		for _, r := range rounds {
			all = append(all, of(r))
		}
		slices.Sort(all)
		return row{Name: name + suffix, Value: median(rounds, of), Unit: unit, Samples: len(rounds), P95: all[len(all)-1]}
	}
	us := func(of func(round) time.Duration) func(round) float64 {
		return func(r round) float64 { return float64(of(r).Nanoseconds()) / 1000 }
	}
	accept := make("gateway.accept", "runs/s", func(r round) float64 { return r.accept })
	accept.Baseline, accept.leastRatio = "redis.admit"+suffix, 0.5
	cpu := make("gateway.cpu", "us/run", us(func(r round) time.Duration { return r.gateway }))
	cpu.most = 70
	replay := make("gateway.replay", "runs/s", func(r round) float64 { return r.replay })
	read := make("gateway.read", "runs/s", func(r round) float64 { return r.read })
	replay.Baseline, replay.leastRatio = accept.Name, 1.5
	read.Baseline, read.leastRatio = accept.Name, 1.5
	p99 := row{Name: "gateway.accept.p99" + suffix, Value: half.at(0.99), Unit: "ms", Samples: len(half.took), P95: half.at(0.95), most: 15}
	return []row{
		make("redis.admit", "runs/s", func(r round) float64 { return r.bare }),
		accept, cpu,
		make("gateway.cpu.redis", "us/run", us(func(r round) time.Duration { return r.redis })),
		make("gateway.cpu.client", "us/run", us(func(r round) time.Duration { return r.client })),
		p99,
		{Name: "gateway.accept.alone" + suffix, Value: single.at(0.5), Unit: "ms", Samples: len(single.took), P95: single.at(0.95)},
		replay, read,
	}
}

// median of one number of the rounds.
func median(rounds []round, of func(round) float64) float64 {
	var all []float64
	for _, r := range rounds {
		all = append(all, of(r))
	}
	slices.Sort(all)
	return all[len(all)/2]
}

func cpuTimes(pids []int) (all []time.Duration, err error) {
	for _, pid := range pids {
		d, err := cpuTime(pid)
		if err != nil {
			return nil, err
		}
		all = append(all, d)
	}
	return all, nil
}
