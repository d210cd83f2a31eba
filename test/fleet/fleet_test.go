package fleet

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/redisserver"
)

// scale is how large the fleet's work is. EPHEMERAL_FLEET=long chooses the longer one.
type scale struct {
	runs    int
	stopped time.Duration // how long nodes are stopped or cut off
	rounds  int           // of trouble
	limit   time.Duration // for all of it
}

func chosenScale() scale {
	if os.Getenv("EPHEMERAL_FLEET") == "long" {
		return scale{runs: 10_000, stopped: 30 * time.Second, rounds: 3, limit: 10 * time.Minute}
	}
	return scale{runs: 2000, stopped: 2 * lease, rounds: 1, limit: 2 * time.Minute}
}

const (
	gateways = 3
	nodes    = 4
	orgs     = 100
)

type fleet struct {
	t        *testing.T
	ctx      context.Context
	redis    *redisserver.Server
	store    *run.Store
	diary    string
	urls     []string
	gateways []*process
	nodes    []*process
	cable    *cable // of the last node
	secrets  []string
	client   *http.Client

	mu       sync.Mutex
	accepted map[run.ID]int // organisation by run
	retries  atomic.Int64
}

func orgName(i int) string { return fmt.Sprintf("org-%02d", i) }

func newFleet(t *testing.T, s scale) *fleet {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), s.limit)
	t.Cleanup(cancel)
	dir := t.TempDir()
	redis, err := redisserver.Start(ctx, filepath.Join(dir, "redis"), redisserver.Options{Fsync: "always", Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { redis.Close() })
	store, err := run.Open(ctx, storeConfig(redis.URL()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { store.Close() })
	f := &fleet{t: t, ctx: ctx, redis: redis, store: store, diary: filepath.Join(dir, "diary"), accepted: map[run.ID]int{},
		client: &http.Client{Timeout: 3 * time.Second, Transport: &http.Transport{MaxIdleConnsPerHost: 16}}}
	t.Cleanup(f.client.CloseIdleConnections)
	if err := os.WriteFile(f.diary, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for i := range orgs {
		f.must(second(store.CreateOrg(ctx, run.Org{ID: orgName(i), Name: orgName(i)})))
		f.must(second(store.Credit(ctx, orgName(i), 1_000_000_000, "start")))
		_, secret, err := store.CreateKey(ctx, orgName(i), "fleet", run.Member)
		f.must(err)
		f.secrets = append(f.secrets, secret)
	}
	for i := range gateways {
		// The socket outlives the gateway: who comes after a killed one answers those that wait.
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		f.must(err)
		file, err := ln.(*net.TCPListener).File()
		f.must(err)
		f.must(ln.Close())
		t.Cleanup(func() { file.Close() })
		f.urls = append(f.urls, "http://"+ln.Addr().String())
		f.gateways = append(f.gateways, f.process("gateway", fmt.Sprintf("g%d", i), redis.URL(), file))
	}
	f.cable = newCable(t, dir, redis.Addr())
	for i := range nodes {
		url := redis.URL()
		if i == nodes-1 {
			url = "unix://" + f.cable.path
		}
		f.nodes = append(f.nodes, f.process("node", fmt.Sprintf("n%d", i), url))
	}
	return f
}

func (f *fleet) process(role, name, redis string, files ...*os.File) *process {
	p := &process{t: f.t, role: role, name: name, files: files, env: []string{redisVar + "=" + redis, diaryVar + "=" + f.diary}}
	f.t.Cleanup(func() {
		if p.cmd != nil {
			p.kill()
		}
	})
	return p
}

func (f *fleet) must(err error) {
	f.t.Helper()
	if err != nil {
		f.t.Fatal(err)
	}
}

func second[T any](_ T, err error) error { return err }

// post sends one request, to one gateway after the other with the same key until one has answered it.
func (f *fleet) post(org int, key string) (id run.ID, replayed bool, err error) {
	body := fmt.Sprintf(`{"command": "true", "max_cost_micros": 1000, "metadata": {"key": %q}}`, key)
	for try := 0; f.ctx.Err() == nil; try++ {
		if try > 0 {
			f.retries.Add(1)
			sleep(f.ctx, 20*time.Millisecond)
		}
		var wrong bool
		id, replayed, wrong, err = f.postOnce(f.urls[(org+len(key)+try)%len(f.urls)], org, key, body)
		if err == nil || wrong {
			return id, replayed, err
		}
	}
	return "", false, errors.Join(f.ctx.Err(), err)
}

// postOnce tells with wrong that another try is of no use.
func (f *fleet) postOnce(url string, org int, key, body string) (id run.ID, replayed, wrong bool, err error) {
	req, err := http.NewRequestWithContext(f.ctx, http.MethodPost, url+"/v1/runs", strings.NewReader(body))
	if err != nil {
		return "", false, true, err
	}
	req.Header.Set("Authorization", "Bearer "+f.secrets[org])
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Idempotency-Key", strconv.Quote(key))
	resp, err := f.client.Do(req)
	if err != nil {
		return "", false, false, err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		return "", false, false, err
	}
	if resp.StatusCode != http.StatusAccepted && resp.StatusCode != http.StatusOK {
		again := resp.StatusCode >= 500 || resp.StatusCode == http.StatusTooManyRequests
		return "", false, !again, fmt.Errorf("status %d: %s", resp.StatusCode, answer)
	}
	var r run.Run
	if err := json.Unmarshal(answer, &r); err != nil {
		return "", false, true, err
	}
	return r.ID, resp.Header.Get("Idempotency-Replayed") == "true", false, nil
}

// postAll posts the n-th to the m-th run of every organisation, from several clients at once, at most perSecond in all (0:
// no limit). Each tenth is posted again and must be the same run.
func (f *fleet) postAll(from, to, perSecond int) {
	f.t.Helper()
	type job struct{ org, n int }
	jobs := make(chan job)
	var clients sync.WaitGroup
	for range 8 {
		clients.Go(func() {
			for j := range jobs {
				key := fmt.Sprintf("run-%d-%d", j.org, j.n)
				id, _, err := f.post(j.org, key)
				if err == nil && j.n%10 == 0 {
					again, replayed, e := f.post(j.org, key)
					if err = e; err == nil && (again != id || !replayed) {
						err = fmt.Errorf("posted again: %s, replayed %t; want %s", again, replayed, id)
					}
				}
				if err != nil {
					f.t.Errorf("post %s: %v", key, err)
					return
				}
				f.mu.Lock()
				f.accepted[id] = j.org
				f.mu.Unlock()
			}
		})
	}
	sent := 0
	for org := range orgs { // one organisation after the other: fairness must not come from the order of arrival
		for n := from; n < to; n++ {
			select {
			case jobs <- job{org, n}:
			case <-f.ctx.Done():
			}
			if sent++; perSecond > 0 && sent%(perSecond/10+1) == 0 {
				sleep(f.ctx, 100*time.Millisecond)
			}
		}
	}
	close(jobs)
	clients.Wait()
}

// line is one entry of the nodes' diary.
type line struct{ what, run, org, token, node string }

func (f *fleet) read() (lines []line) {
	f.t.Helper()
	b, err := os.ReadFile(f.diary)
	f.must(err)
	for raw := range bytes.Lines(b) {
		p := strings.Fields(string(raw))
		if len(p) == 5 && raw[len(raw)-1] == '\n' {
			lines = append(lines, line{p[0], p[1], p[2], p[3], p[4]})
		}
	}
	return lines
}

func count(lines []line, what string) (n int) {
	for _, l := range lines {
		if l.what == what {
			n++
		}
	}
	return n
}

func (f *fleet) until(what string, ok func() bool) {
	f.t.Helper()
	for !ok() {
		if !sleep(f.ctx, 100*time.Millisecond) {
			f.t.Fatalf("not in time: %s", what)
		}
	}
}

// trouble kills a gateway, a node and Redis, stops a node and cuts another one off, for longer than a lease, and brings all
// back.
func (f *fleet) trouble(s scale, round int) {
	killed, stopped := f.nodes[round%(nodes-1)], f.nodes[(round+1)%(nodes-1)]
	killed.kill()
	stopped.signal(syscall.SIGSTOP)
	f.cable.cut.Lock()
	g := f.gateways[round%gateways]
	g.kill()
	if pid := f.redis.PID(); pid != 0 {
		f.must(syscall.Kill(pid, syscall.SIGKILL))
	}
	sleep(f.ctx, 300*time.Millisecond)
	g.start()
	killed.start()
	sleep(f.ctx, s.stopped)
	stopped.signal(syscall.SIGCONT)
	f.cable.cut.Unlock()
}

// TestFleet is the whole life of a fleet under load and trouble.
func TestFleet(t *testing.T) {
	s := chosenScale()
	f := newFleet(t, s)
	began := time.Now()
	for _, g := range f.gateways {
		g.start()
	}
	each := s.runs / orgs
	f.postAll(0, each/2, 0)
	posted := time.Since(began)
	for _, n := range f.nodes {
		n.start()
	}
	// While every organisation has work, each gets the same share, whenever it asked.
	window := orgs * each * 3 / 10
	f.until("a share of the runs started", func() bool { return count(f.read(), "started") >= window })
	if j := jain(f.read(), window); j < 0.95 {
		t.Errorf("Jain's fairness index of the first %d starts is %.3f, want 0.95 or more", window, j)
	} else {
		t.Logf("Jain's fairness index of the first %d starts: %.3f", window, j)
	}

	var posting sync.WaitGroup
	posting.Go(func() { f.postAll(each/2, each, max(each*orgs/2/(2*s.rounds*int(s.stopped/time.Second)), 50)) })
	for round := range s.rounds {
		f.trouble(s, round)
		sleep(f.ctx, 2*lease)
	}
	posting.Wait()
	f.until("every run ended", func() bool {
		rep, err := f.store.Audit(f.ctx)
		return err == nil && rep.OpenHolds == 0
	})
	f.judge(each)
	t.Logf("%d runs in %s, half of them posted in %s, %d posts repeated", len(f.accepted), time.Since(began).Round(time.Millisecond),
		posted.Round(time.Millisecond), f.retries.Load())
}

// jain is Jain's fairness index of how many of the first starts each organisation had: 1 when all had the same.
func jain(lines []line, window int) float64 {
	share := map[string]float64{}
	for _, l := range lines {
		if l.what == "started" && window > 0 {
			share[l.org]++
			window--
		}
	}
	var sum, squares float64
	for _, x := range share {
		sum += x
		squares += x * x
	}
	return sum * sum / (orgs * squares)
}

// judge looks at everything that is left.
func (f *fleet) judge(each int) {
	t := f.t
	t.Helper()
	if len(f.accepted) != each*orgs {
		t.Errorf("%d runs accepted, %d posted", len(f.accepted), each*orgs)
	}
	lines := f.read()
	started, settled := map[run.ID]int{}, map[run.ID]int{}
	for _, l := range lines {
		switch l.what {
		case "started":
			started[run.ID(l.run)]++
		case "settled":
			settled[run.ID(l.run)]++
		case "broken":
			t.Errorf("node %s broke off %s", l.node, l.run)
		}
	}
	states := map[run.State]int{}
	var charged run.Micros
	for id, org := range f.accepted {
		r, err := f.store.Get(f.ctx, orgName(org), id)
		f.must(err)
		events, _, err := f.store.Events(f.ctx, orgName(org), id, 0)
		f.must(err)
		states[r.State]++
		charged += r.Money.Charged
		ends := 0
		for _, e := range events {
			if run.State(e.Type).Terminal() || e.Type == run.EventWorkerDestroyed {
				ends++
			}
		}
		lost := r.State == run.Failed && r.Error != nil && r.Error.Code == "node_lost"
		switch {
		case !r.State.Terminal() || ends != 2 || events[len(events)-1].Type != run.EventWorkerDestroyed:
			t.Errorf("%s: state %s, %d closing events", id, r.State, ends)
		case started[id] > 1:
			t.Errorf("%s: executed %d times", id, started[id])
		case r.State == run.Succeeded && (r.Money.Charged != slice || started[id] != 1):
			t.Errorf("%s: succeeded, charged %s, started %d times", id, r.Money.Charged, started[id])
		case settled[id] > 1 || settled[id] == 1 && r.State != run.Succeeded:
			t.Errorf("%s: settled %d times by nodes, and is %s", id, settled[id], r.State)
		case r.State != run.Succeeded && !lost:
			t.Errorf("%s: %s, %+v", id, r.State, r.Error)
		}
	}
	for id := range started {
		if _, known := f.accepted[id]; !known {
			t.Errorf("%s was executed, and nobody was told that it was accepted", id)
		}
	}
	if f.redis.Starts() < 2 {
		t.Error("Redis was not killed")
	}
	if count(lines, "fenced") == 0 {
		t.Error("no node was fenced, though some were stopped for longer than their leases")
	}
	rep, err := f.store.Audit(f.ctx)
	if err = errors.Join(err, rep.Err()); err != nil {
		t.Error(err)
	}
	if rep.Runs != len(f.accepted) || rep.Held != 0 || rep.Charged != charged {
		t.Errorf("%d runs in the books, held %s, charged %s; want %d, nothing, %s", rep.Runs, rep.Held, rep.Charged, len(f.accepted), charged)
	}
	t.Logf("states %v, %d leases fenced, redis-server started %d times", states, count(lines, "fenced"), f.redis.Starts())
}
