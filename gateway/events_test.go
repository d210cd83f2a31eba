package gateway

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/redisserver"
)

// follow collects the events of a run after the one numbered after, to its end.
func (l *live) follow(m member, id run.ID, after int64) (events []run.Event, err error) {
	for e, err := range m.Events(l.ctx, id, after) {
		if err != nil {
			return events, err
		}
		events = append(events, e)
	}
	return events, nil
}

// stored reads a run's events as JSON.
func (l *live) stored(m member, id run.ID, query string) []run.Event {
	l.t.Helper()
	req, err := http.NewRequestWithContext(l.ctx, "GET", l.url+"/v1/runs/"+string(id)+"/events"+query, nil)
	l.must(err)
	req.Header.Set("Authorization", "Bearer "+m.secret)
	resp, err := l.client.Do(req)
	l.must(err)
	defer resp.Body.Close()
	var list struct{ Events []run.Event }
	l.must(json.NewDecoder(resp.Body).Decode(&list))
	if resp.StatusCode != 200 || list.Events == nil {
		l.t.Fatalf("%d, %+v", resp.StatusCode, list)
	}
	return list.Events
}

func TestEventsResumeFromEverywhere(t *testing.T) {
	l := newLive(t, Config{})
	m := l.newMember("o", 1_000_000)
	r := l.create(m)
	const commands, all = 7, 7 + 5
	var wg sync.WaitGroup
	got := make([][]run.Event, 2*(all+1))
	follow := func(i int) {
		wg.Go(func() {
			var err error
			if got[i], err = l.follow(m, r.ID, int64(i%(all+1))); err != nil {
				t.Errorf("reader %d: %v", i, err)
			}
		})
	}
	for i := range all + 1 { // while it happens, also from what has not happened
		follow(i)
	}
	eventually(t, "all readers there", func() bool { return l.hub.size() == all+1 })
	lease := l.take()
	l.start(lease)
	for range commands {
		l.shell(lease, 10)
	}
	l.settle(lease)
	wg.Wait()
	for i := range all + 1 { // afterwards
		follow(all + 1 + i)
	}
	wg.Wait()
	want := l.stored(m, r.ID, "")
	if len(want) != all || want[0].Type != run.EventQueued || want[all-1].Type != run.EventWorkerDestroyed {
		t.Fatalf("%d events: %+v", len(want), want)
	}
	for i := range got {
		after := i % (all + 1)
		if d := cmp.Diff(want[after:], got[i], cmp.Transformer("empty", func(e []run.Event) []run.Event {
			if len(e) == 0 {
				return nil
			}
			return e
		})); d != "" {
			t.Errorf("reader %d from %d: %s", i, after, d)
		}
	}
	if d := cmp.Diff(want[5:], l.stored(m, r.ID, "?after=5")); d != "" {
		t.Error(d)
	}
	if n := len(l.stored(m, r.ID, "?after=99")); n != 0 {
		t.Errorf("%d events after the last", n)
	}
	eventually(t, "no reader left", func() bool { return l.hub.size() == 0 })
}

// open asks for a run's event stream over a connection of its own.
func (l *live) open(m member, id run.ID, header string) (net.Conn, *bufio.Reader) {
	l.t.Helper()
	c, err := net.Dial("tcp", l.addr)
	l.must(err)
	l.t.Cleanup(func() { c.Close() })
	l.must(c.SetDeadline(time.Now().Add(30 * time.Second)))
	_, err = fmt.Fprintf(c, "GET /v1/runs/%s/events HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\nAuthorization: Bearer %s\r\n%s\r\n", id, m.secret, header)
	l.must(err)
	return c, bufio.NewReader(c)
}

func TestStreamOnTheWire(t *testing.T) {
	l := newLive(t, Config{Heartbeat: 100 * time.Millisecond})
	m := l.newMember("o", 1_000_000)
	r := l.create(m)
	_, br := l.open(m, r.ID, "")
	resp, err := http.ReadResponse(br, nil)
	l.must(err)
	for name, want := range map[string]string{"Content-Type": "text/event-stream", "Cache-Control": "no-store, no-transform", "X-Accel-Buffering": "no"} {
		if got := resp.Header.Get(name); got != want {
			t.Errorf("%s: %q", name, got)
		}
	}
	body := bufio.NewReader(resp.Body)
	var lines []string
	for len(lines) < 8 {
		line, err := body.ReadString('\n')
		l.must(err)
		lines = append(lines, strings.TrimSuffix(line, "\n"))
	}
	want := []string{"retry: 1000", "", "id: 1", "event: queued", "", ": heartbeat", ""}
	got := append(append([]string{}, lines[:4]...), lines[5:]...)
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	var e struct {
		Seq  int
		Run  run.ID
		Type string
		At   *float64 `json:"at_ms"`
		Data struct {
			Reserved int `json:"reserved_micros"`
		}
	}
	l.must(json.Unmarshal([]byte(strings.TrimPrefix(lines[4], "data: ")), &e))
	if e.Seq != 1 || e.Run != r.ID || e.Type != "queued" || e.At == nil || *e.At != 0 || e.Data.Reserved != 40_000 {
		t.Errorf("%+v from %s", e, lines[4])
	}
	if _, err := m.Cancel(l.ctx, r.ID); err != nil {
		t.Fatal(err)
	}
	rest, err := io.ReadAll(body)
	if err != nil || !strings.Contains(string(rest), "event: worker.destroyed\n") {
		t.Errorf("%v, %q", err, rest)
	}
	_, br = l.open(m, r.ID, "Last-Event-ID: 3\r\n")
	if resp, err := http.ReadResponse(br, nil); err != nil || resp.StatusCode != 204 {
		t.Errorf("an EventSource that has all is not stopped: %v, %v", resp, err)
	}
	_, br = l.open(m, r.ID, "Last-Event-ID: 2\r\nConnection: close\r\n")
	resp, err = http.ReadResponse(br, nil)
	l.must(err)
	rest, err = io.ReadAll(resp.Body)
	if ids, _ := sentIDs(fataler{t}, string(rest)); err != nil || fmt.Sprint(ids) != "[3]" {
		t.Errorf("%v, %q", err, rest)
	}
}

type fataler struct{ *testing.T }

// TestRandomDisconnects reads streams in random pieces over connections that break anywhere; together they are the log.
func TestRandomDisconnects(t *testing.T) {
	l := newLive(t, Config{})
	m := l.newMember("o", 1_000_000)
	r := l.create(m)
	lease := l.take()
	l.start(lease)
	var breaks atomic.Int64
	var wg sync.WaitGroup
	const readers = 10
	got := make([][]run.Event, readers)
	for i := range readers {
		wg.Go(func() {
			transport := &http.Transport{DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
				var d net.Dialer
				c, err := d.DialContext(ctx, network, addr)
				return &brittle{Conn: c, left: 200 + rand.IntN(6000), breaks: &breaks}, err
			}}
			defer transport.CloseIdleConnections()
			c, err := client.New(l.url, m.secret, client.WithTransport(transport))
			if err != nil {
				t.Error(err)
				return
			}
			for e, err := range c.Events(l.ctx, r.ID, 0) {
				if err != nil {
					t.Errorf("reader %d: %v", i, err)
					return
				}
				got[i] = append(got[i], e)
			}
		})
	}
	for n := range 150 {
		l.shell(lease, rand.IntN(400))
		if n%10 == 0 {
			time.Sleep(5 * time.Millisecond)
		}
	}
	l.settle(lease)
	wg.Wait()
	want := l.stored(m, r.ID, "")
	for i := range got {
		if d := cmp.Diff(want, got[i]); d != "" {
			t.Errorf("reader %d: %s", i, d)
		}
	}
	if breaks.Load() < 20 {
		t.Errorf("only %d connections broke", breaks.Load())
	}
}

// brittle is a connection that breaks after some bytes were read.
type brittle struct {
	net.Conn
	left   int
	breaks *atomic.Int64
}

func (b *brittle) Read(p []byte) (int, error) {
	if b.left <= 0 {
		b.breaks.Add(1)
		b.Close()
		return 0, net.ErrClosed
	}
	n, err := b.Conn.Read(p[:min(len(p), b.left)])
	b.left -= n
	return n, err
}

func TestSlowReaderIsCutOffAndResumes(t *testing.T) {
	l := newLive(t, Config{WriteTimeout: time.Second})
	m := l.newMember("o", 1_000_000)
	r := l.create(m)
	lease := l.take()
	l.start(lease)
	slow, br := l.open(m, r.ID, "")
	l.must(slow.(*net.TCPConn).SetReadBuffer(128 << 10))
	quick := make(chan []run.Event, 1)
	go func() {
		events, err := l.follow(m, r.ID, 0)
		if err != nil {
			t.Error(err)
		}
		quick <- events
	}()
	eventually(t, "both readers there", func() bool { return l.hub.size() == 2 })
	const commands = 80
	for range commands {
		l.shell(lease, 64<<10) // 5 MiB in all: more than all buffers on the way together
	}
	eventually(t, "the slow reader cut off", func() bool { return l.hub.size() == 1 })
	if log := l.log.String(); !strings.Contains(log, `"end":"slow_reader"`) && !strings.Contains(log, `"end":"client_gone"`) {
		t.Error("the log does not say why the stream ended")
	}
	text, _ := io.ReadAll(br) // whatever was on the way, then the end
	complete := string(text[:strings.LastIndex(string(text), "\n\n")+1])
	last := int64(0)
	for line := range strings.SplitSeq(complete, "\n") {
		if id, ok := strings.CutPrefix(strings.TrimSuffix(line, "\r"), "id: "); ok {
			n, err := strconv.ParseInt(id, 10, 64)
			l.must(err)
			last = max(last, n-1) // the last one may be cut
		}
	}
	l.settle(lease)
	want, _ := l.pages(m, r.ID, 0)
	if d := len(want) - len(<-quick); d != 0 {
		t.Errorf("the quick reader missed %d events", d)
	}
	rest, err := l.follow(m, r.ID, last)
	if err != nil || int(last)+len(rest) != len(want) || last == 0 {
		t.Errorf("resumed after %d with %d of %d events, %v", last, len(rest), len(want), err)
	}
}

func TestDrain(t *testing.T) {
	l := newLive(t, Config{DrainTimeout: 10 * time.Second})
	m := l.newMember("o", 1_000_000)
	r := l.create(m)
	_, br := l.open(m, r.ID, "")
	resp, err := http.ReadResponse(br, nil)
	l.must(err)
	waiting := make(chan answer, 1)
	go func() {
		waiting <- l.do(t, "POST", "/v1/runs", `{"command":"true"}`, "Authorization", "Bearer "+m.secret, "Prefer", "wait=20")
	}()
	eventually(t, "both readers there", func() bool { return l.hub.size() == 2 })
	half, err := net.Dial("tcp", l.addr) // a request that is on its way when the drain begins
	l.must(err)
	defer half.Close()
	l.must(half.SetDeadline(time.Now().Add(20 * time.Second)))
	body := `{"command":"true"}`
	_, err = fmt.Fprintf(half, "POST /v1/runs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", m.secret, len(body), body[:5])
	l.must(err)
	time.Sleep(100 * time.Millisecond)
	stopped := make(chan struct{})
	start := time.Now()
	go func() {
		l.stop()
		close(stopped)
	}()
	rest, err := io.ReadAll(resp.Body)
	if err != nil || !strings.HasSuffix(string(rest), drainLine) {
		t.Errorf("the stream ends with %v, %q", err, rest)
	}
	if a := <-waiting; a.StatusCode != 202 || !strings.Contains(a.body, `"state":"queued"`) {
		t.Errorf("the waiting request gets %d %s", a.StatusCode, a.body)
	}
	eventually(t, "no new connections", func() bool {
		c, err := net.Dial("tcp", l.addr)
		if err == nil {
			c.Close()
		}
		return err != nil
	})
	_, err = io.WriteString(half, body[5:])
	l.must(err)
	if a := answers(t, readAll(half)); len(a) != 1 || a[0].StatusCode != 202 || !a[0].Close {
		t.Errorf("the request in flight gets %+v", a)
	}
	<-stopped
	if d := time.Since(start); d > 5*time.Second {
		t.Errorf("the drain took %v", d)
	}
	if runs, _, err := l.store.List(l.ctx, "o", run.Page{}); err != nil || len(runs) != 3 {
		t.Errorf("%d runs, %v", len(runs), err)
	}
}

func readAll(r io.Reader) string {
	b, _ := io.ReadAll(r) // whatever came is judged by the caller
	return string(b)
}

func TestDrainDoesNotWaitForEver(t *testing.T) {
	s := serve(t, Config{DrainTimeout: 300 * time.Millisecond}, Deps{Store: &fakeStore{}})
	c, err := net.Dial("tcp", s.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := io.WriteString(c, "POST /v1/runs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "+memberSecret+"\r\nContent-Type: application/json\r\nContent-Length: 10\r\n\r\n{"); err != nil {
		t.Fatal(err)
	}
	time.Sleep(50 * time.Millisecond)
	start := time.Now()
	s.stop()
	if d := time.Since(start); d > 3*time.Second {
		t.Errorf("the drain took %v", d)
	}
}

// TestStoreGoesAway kills the store's Redis in the middle: clients are told to come again, streams go on without loss.
func TestStoreGoesAway(t *testing.T) {
	dir, err := os.MkdirTemp("", "ephemeral-gateway-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	own, err := redisserver.Start(ctx, dir, redisserver.Options{Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { own.Close() })
	l := liveOn(t, Config{StoreTimeout: 2 * time.Second}, own.URL())
	m := l.newMember("o", 1_000_000)
	r := l.create(m)
	lease := l.take()
	l.start(lease)
	streamed := make(chan []run.Event, 1)
	go func() {
		events, err := l.follow(m, r.ID, 0)
		if err != nil {
			t.Error(err)
		}
		streamed <- events
	}()
	eventually(t, "the reader there", func() bool { return l.hub.size() == 1 })
	l.must(syscall.Kill(own.PID(), syscall.SIGSTOP)) // a Redis that answers nothing
	a := l.do(t, "POST", "/v1/runs", `{"command":"true"}`, "Authorization", "Bearer "+m.secret, "Idempotency-Key", "k")
	if p := a.problem(t); p.Code != CodeUnavailable || a.Header.Get("Retry-After") == "" {
		t.Errorf("%+v", p)
	}
	if p := l.do(t, "GET", "/readyz", "").problem(t); p.Code != CodeNotReady {
		t.Errorf("%+v", p)
	}
	l.must(syscall.Kill(own.PID(), syscall.SIGKILL))
	starts := own.Starts()
	eventually(t, "Redis again", func() bool { return own.Starts() > starts || own.PID() != 0 && l.store.Ping(l.ctx) == nil })
	for attempt := 0; ; attempt++ { // the subscription comes back by itself; what happens before it does must not be lost
		if err := l.store.Append(l.ctx, lease, run.NewEvent{Type: run.EventShell, At: time.Now(), Data: run.ShellData{Outcome: "exited"}}); err == nil {
			break
		} else if attempt > 100 {
			t.Fatal(err)
		}
		time.Sleep(50 * time.Millisecond)
	}
	c, err := m.CreateRun(l.ctx, client.Request{Command: "true"}, client.CreateOptions{IdempotencyKey: "k"})
	if err != nil || c.Run.State != run.Queued {
		t.Errorf("%+v, %v", c, err)
	}
	l.settle(lease)
	if d := cmp.Diff(l.stored(m, r.ID, ""), <-streamed); d != "" {
		t.Error(d)
	}
	if acc, err := m.Account(l.ctx); err != nil || acc.Held != 40_000 {
		t.Errorf("%+v, %v", acc, err)
	}
}

func TestZeroDataRetentionReachesLiveReadersOnly(t *testing.T) {
	l := newLive(t, Config{})
	m := l.newMember("o", 1_000_000)
	c, err := m.CreateRun(l.ctx, client.Request{Command: "echo canary", ZeroDataRetention: true}, client.CreateOptions{})
	l.must(err)
	lease := l.take()
	l.start(lease)
	seen := make(chan string, 1)
	go func() {
		events, err := l.follow(m, c.Run.ID, 0)
		if err != nil {
			t.Error(err)
		}
		b, _ := json.Marshal(events)
		seen <- string(b)
	}()
	eventually(t, "the reader there", func() bool { return l.hub.size() == 1 })
	l.hub.ready(l.ctx, &reader{})
	l.must(l.store.Append(l.ctx, lease, run.NewEvent{Type: run.EventShell, At: time.Now(),
		Data: run.ShellData{Command: "echo canary", Outcome: "exited", Output: "canary\n"}}))
	l.settle(lease)
	if live := <-seen; strings.Count(live, "canary") != 2 {
		t.Errorf("the live reader gets %s", live)
	}
	a := l.do(t, "GET", "/v1/runs/"+string(c.Run.ID), "", "Authorization", "Bearer "+m.secret)
	b, err := json.Marshal(l.stored(m, c.Run.ID, ""))
	if err != nil || strings.Contains(a.body+string(b), "canary") || strings.Contains(l.log.String(), "canary") {
		t.Errorf("content is kept: %s %s", a.body, b)
	}
}
