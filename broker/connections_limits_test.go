package broker_test

import (
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/broker"
	"github.com/ephemeral-run/ephemeral/broker/openaitest"
	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/connection"
)

func TestConnectionLimits(t *testing.T) {
	release := make(chan struct{})
	defer close(release)
	u := newUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/v1/large":
			_, _ = w.Write(make([]byte, 1001))
		case "/v1/fits":
			_, _ = w.Write(make([]byte, 1000))
		case "/v1/slow":
			select {
			case <-release:
			case <-r.Context().Done():
			}
		case "/v1/cut":
			w.Header().Set("Content-Length", "100")
			_, _ = w.Write([]byte("x"))
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		case "/v1/gzip":
			w.Header().Set("Content-Encoding", "br")
			_, _ = w.Write([]byte("\x0b\x02\x80abc\x03"))
		}
	})
	s, _ := connected(t, u, func(c *connection.Connection) {
		c.MaxResponseBytes, c.TimeoutSeconds, c.RatePerMinute, c.Methods, c.MaxRequestBytes = 1000, 1, 72, []string{"GET", "POST"}, 10
	}, func(c *broker.Config) { c.PriceFile = priceFile(t, "calls: {connection: 7}") })
	for path, want := range map[string]string{"fits": "", "large": "response_too_large", "slow": "upstream_timeout", "cut": "upstream_error", "gzip": "response_withheld"} {
		if got := s.get("/connections/api/" + path); got.code() != want || want == "" && got.status != 200 {
			t.Errorf("%s: %+v", path, got)
		}
	}
	if got := s.send(t.Context(), http.MethodPost, "/connections/api/fits", "01234567890"); got.code() != "request_too_large" {
		t.Errorf("11 bytes: %+v", got)
	}
	// What the upstream began to answer is paid, what it did not is not.
	for _, c := range s.calls() {
		want := run.Micros(7)
		if strings.HasSuffix(c.Target, "/slow") {
			want = 0
		}
		if c.Charged != want {
			t.Errorf("%s: charged %d, want %d", c.Target, c.Charged, want)
		}
	}
	limited := 0
	for range 20 {
		if got := s.get("/connections/api/fits"); got.code() == "rate_limited" && got.header.Get("Retry-After") != "" {
			limited++
		}
	}
	if limited < 10 {
		t.Errorf("%d of 20 calls refused at 72 a minute, 12 at once, 6 of them used", limited)
	}
}

func TestConnectionToPrivateAddress(t *testing.T) {
	u := newUpstream(t, echo)
	s, _ := connected(t, u, nil, func(c *broker.Config) { c.ConnectionAllow = nil })
	if got := s.get("/connections/api/x"); got.code() != "address_not_allowed" || len(u.asked()) != 0 {
		t.Errorf("%+v", got)
	}
}

func TestConnectionWithoutKey(t *testing.T) {
	u := newUpstream(t, echo)
	s, p := connected(t, u, nil, func(c *broker.Config) { c.Sealing = nil })
	if got := s.get("/connections/api/x"); got.code() != "unavailable" || len(u.asked()) != 0 {
		t.Errorf("%+v", got)
	}
	if strings.Contains(p.log.String(), "MARKER") {
		t.Error("the log shows the credential")
	}
}

// TestConnectionIsReadAtEachCall: a connection that is deleted or changed is so at once.
func TestConnectionIsReadAtEachCall(t *testing.T) {
	u := newUpstream(t, echo)
	var store *connections
	s, _ := connected(t, u, nil, func(c *broker.Config) { store = c.Connections.(*connections) })
	if got := s.get("/connections/api/x"); got.status != 200 {
		t.Fatalf("%+v", got)
	}
	store.put(t, "o", connection.Connection{Name: "api", BaseURL: u.URL, Paths: []string{"/y"}}, "")
	if got := s.get("/connections/api/x"); got.code() != "path_not_allowed" {
		t.Errorf("changed: %+v", got)
	}
	store.mu.Lock()
	delete(store.all, "o/api")
	store.mu.Unlock()
	if got := s.get("/connections/api/y"); got.code() != "not_found" {
		t.Errorf("deleted: %+v", got)
	}
	store.mu.Lock()
	store.err = run.ErrUnavailable
	store.mu.Unlock()
	if got := s.get("/connections/api/y"); got.code() != "unavailable" || got.header.Get("Retry-After") == "" {
		t.Errorf("store away: %+v", got)
	}
}

func TestListConnections(t *testing.T) {
	u := newUpstream(t, echo)
	s, _ := connected(t, u, func(c *connection.Connection) { c.Description = "Invoices" })
	got := s.get("/connections")
	want := `{"connections":[{"name":"api","kind":"http","description":"Invoices","methods":["GET","HEAD"],"paths":["/**"]}]}`
	if got.status != 200 || got.body != want {
		t.Errorf("%+v", got)
	}
}

// TestConnectionsOnASmallHold makes 64 calls at once on a hold that pays for 10.
func TestConnectionsOnASmallHold(t *testing.T) {
	u := newUpstream(t, func(w http.ResponseWriter, r *http.Request) { time.Sleep(10 * time.Millisecond) })
	store := newConnections(t)
	store.put(t, "o", connection.Connection{Name: "api", BaseURL: u.URL}, "")
	p := newProvider(t, openaitest.New(t, testKey, good), func(c *broker.Config) {
		c.Connections, c.ConnectionAllow, c.PriceFile = store, []string{"127.0.0.0/8"}, priceFile(t, "calls: {connection: 100}")
	})
	l := newLedger(1050)
	s := startSession(t, p.Broker, l, &run.Spec{Connections: []string{"api"}})
	var wg sync.WaitGroup
	var mu sync.Mutex
	count := map[int]int{}
	for range 64 {
		wg.Go(func() {
			got := s.get("/connections/api/x")
			mu.Lock()
			defer mu.Unlock()
			count[got.status]++
		})
	}
	wg.Wait()
	if err := l.check(); err != nil || count[200] != 10 || count[402] != 54 || l.total() != 1000 || len(u.asked()) != 10 {
		t.Errorf("statuses %v, charged %d, asked %d: %v", count, l.total(), len(u.asked()), err)
	}
}
