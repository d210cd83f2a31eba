package gateway

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/redisserver/redistest"
)

// poster posts runs over HTTP, each until it is accepted, and keeps what it was told.
type poster struct {
	s        *served
	secret   string
	deadline time.Duration // of a request

	mu       sync.Mutex
	accepted map[string]run.ID // by idempotency key
	refused  int
	faults   []string
}

func (p *poster) fault(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.faults = append(p.faults, fmt.Sprintf(format, args...))
}

func (p *poster) count() (accepted, refused, faults int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.accepted), p.refused, len(p.faults)
}

// post posts the run of a key once.
func (p *poster) post(ctx context.Context, key string) (answer, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, p.s.url+"/v1/runs", strings.NewReader(`{"command":"true","max_cost_micros":1000}`))
	if err != nil {
		return answer{}, err
	}
	for name, value := range map[string]string{"Content-Type": "application/json", "Authorization": "Bearer " + p.secret, "Idempotency-Key": key} {
		req.Header.Set(name, value)
	}
	resp, err := p.s.client.Do(req)
	if err != nil {
		return answer{}, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return answer{resp, string(body)}, err
}

// insist posts the run of a key until it is accepted. Every refusal has to be the one for a store that does not answer, in time.
func (p *poster) insist(ctx context.Context, key string) {
	for {
		began := time.Now()
		a, err := p.post(ctx, key)
		took := time.Since(began)
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			p.fault("post: %v", err)
			return
		case a.StatusCode == http.StatusAccepted:
			var r run.Run
			if err := json.Unmarshal([]byte(a.body), &r); err != nil {
				p.fault("%v: %s", err, a.body)
			}
			p.mu.Lock()
			p.accepted[key] = r.ID
			p.mu.Unlock()
			return
		case a.StatusCode != http.StatusServiceUnavailable || a.Header.Get("Retry-After") == "" || !strings.Contains(a.body, `"code":"`+string(CodeUnavailable)+`"`):
			p.fault("%d, Retry-After %q: %s", a.StatusCode, a.Header.Get("Retry-After"), a.body)
			return
		case took > p.deadline+time.Second:
			p.fault("refused after %v", took)
			return
		}
		p.mu.Lock()
		p.refused++
		p.mu.Unlock()
		time.Sleep(50 * time.Millisecond)
	}
}

// TestFailOverOverHTTP kills the primary under a Sentinel while runs are posted: until a replica has taken over, clients are
// told to come again, in time; then they are served without anybody's doing. What was acknowledged is there, and nothing is
// held twice.
func TestFailOverOverHTTP(t *testing.T) {
	primary := redistest.Start(t)
	primary.Replicas(2)
	url := primary.Sentinel(2)
	const deadline = 2 * time.Second
	l := liveWith(t, Config{StoreTimeout: deadline}, run.Config{RedisURL: url, Replicas: 1})
	t.Cleanup(func() { time.Sleep(1100 * time.Millisecond) }) // a Redis client that dials notices its end once a second
	m := l.newMember("o", 1_000_000_000)
	p := &poster{s: l.served, secret: m.secret, deadline: deadline, accepted: map[string]run.ID{}}
	ctx, cancel := context.WithCancel(l.ctx)
	defer cancel()
	var clients sync.WaitGroup
	for i := range 4 {
		clients.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				p.insist(ctx, fmt.Sprintf("key-%d-%d", i, n))
			}
		})
	}
	more := func(what string) {
		t.Helper()
		before, _, _ := p.count()
		for began := time.Now(); ; time.Sleep(20 * time.Millisecond) {
			accepted, refused, faults := p.count()
			if accepted >= before+40 || faults > 0 {
				return
			}
			if time.Since(began) > 25*time.Second {
				t.Fatalf("%s: %d accepted and %d refused after 25 s", what, accepted-before, refused)
			}
		}
	}
	more("before the fail-over")
	l.must(primary.Cmd.Process.Kill())
	began := time.Now()
	more("after it")
	took := time.Since(began)
	cancel()
	clients.Wait()
	accepted, refused, _ := p.count()
	t.Logf("%d runs accepted, %d refusals; %v from the kill until 40 more were accepted", accepted, refused, took)
	if len(p.faults) > 0 {
		t.Fatalf("%d faults, first: %s", len(p.faults), p.faults[0])
	}
	if refused == 0 {
		t.Error("nobody was refused: the primary was not missed")
	}
	for key, id := range p.accepted {
		a, err := p.post(l.ctx, key)
		l.must(err)
		var r run.Run
		l.must(json.Unmarshal([]byte(a.body), &r))
		if r.ID != id || a.Header.Get(headerIdempotencyReplay) != "true" {
			t.Fatalf("%s was %s, is now %d %s", key, id, a.StatusCode, a.body)
		}
	}
	account, err := m.Account(l.ctx)
	l.must(err)
	// A client that was stopped in the middle may have a run of which it was not told.
	if least, most := run.Micros(1000*accepted), run.Micros(1000*(accepted+4)); account.Held < least || account.Held > most || account.Balance != 1_000_000_000 {
		t.Errorf("%+v, want between %d and %d held", account, least, most)
	}
	report, err := l.store.Audit(l.ctx)
	l.must(err)
	l.must(report.Err())
}
