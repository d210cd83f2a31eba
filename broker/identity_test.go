package broker_test

import (
	"bytes"
	"crypto/ed25519"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/ephemeral-run/ephemeral/broker"
	"github.com/ephemeral-run/ephemeral/broker/openaitest"
	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/connection"
	"github.com/ephemeral-run/ephemeral/run/receipt"
)

// with sends a model call with headers.
func (s *session) with(header http.Header) reply {
	s.t.Helper()
	req, err := http.NewRequest(http.MethodPost, "http://broker/v1/chat/completions", strings.NewReader(plainBody))
	if err != nil {
		s.t.Fatal(err)
	}
	req.Header = header
	resp, err := s.client().Do(req)
	if err != nil {
		return reply{err: err}
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	return reply{status: resp.StatusCode, header: resp.Header, body: string(data), err: err}
}

func TestAnotherRunsID(t *testing.T) {
	double := openaitest.New(t, testKey, good)
	l := newLedger(1_000_000)
	s := startSession(t, newProvider(t, double).Broker, l, &doubleSpec)
	if got := s.with(http.Header{"Ephemeral-Run": {string(sessionRun)}}); got.status != 200 {
		t.Errorf("its own id: %+v", got)
	}
	for _, h := range []http.Header{{"Ephemeral-Run": {"run_ffffffffffffffffffffffffffffffff"}}, {"Ephemeral-Run": {""}}, {"Ephemeral-Run": {string(sessionRun), "run_ffffffffffffffffffffffffffffffff"}}} {
		if got := s.with(h); got.status != 403 || got.code() != "wrong_run" {
			t.Errorf("%v: %+v", h, got)
		}
	}
	if n := s.refused("wrong_run"); n != 2 { // the 1st and 2nd are events, the 3rd is not
		t.Errorf("%d refusals told", n)
	}
	if n := len(double.Requests()); n != 1 || len(l.asked) != 1 {
		t.Errorf("the provider was asked %d times, the ledger %d", n, len(l.asked))
	}
}

func TestReplayedCall(t *testing.T) {
	double := openaitest.New(t, testKey, good)
	l := newLedger(1_000_000)
	s := startSession(t, newProvider(t, double).Broker, l, &doubleSpec)
	if got := s.with(http.Header{"Ephemeral-Call-Id": {"a"}}); got.status != 200 {
		t.Errorf("first: %+v", got)
	}
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			if got := s.with(http.Header{"Ephemeral-Call-Id": {"a"}}); got.status != 409 || got.code() != "call_replayed" {
				t.Errorf("again: %+v", got)
			}
		})
	}
	wg.Wait()
	for _, bad := range []http.Header{{"Ephemeral-Call-Id": {""}}, {"Ephemeral-Call-Id": {"a b"}}, {"Ephemeral-Call-Id": {strings.Repeat("x", 129)}}, {"Ephemeral-Call-Id": {"b", "c"}}} {
		if got := s.with(bad); got.code() != "invalid_request" {
			t.Errorf("%v: %+v", bad, got)
		}
	}
	if n := len(double.Requests()); n != 1 || s.refused("call_replayed") != 16 {
		t.Errorf("asked %d times, %d refusals told", n, s.refused("call_replayed"))
	}
}

// TestThousandConnections opens far more connections than a machine may.
func TestThousandConnections(t *testing.T) {
	s := startSession(t, newProvider(t, openaitest.New(t, testKey, good)).Broker, newLedger(1_000_000), &doubleSpec)
	var open []net.Conn
	defer func() {
		for _, c := range open {
			c.Close()
		}
	}()
	refused := 0
	for range 1000 {
		c, err := s.ln.dial(t.Context(), "", "")
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, c)
		if len(open) <= 128 {
			continue
		}
		_ = c.SetReadDeadline(time.Now().Add(5 * time.Second))
		answer, err := io.ReadAll(c)
		if err != nil || !bytes.HasPrefix(answer, []byte("HTTP/1.1 429")) || !bytes.Contains(answer, []byte("too_many_connections")) {
			t.Fatalf("connection %d: %q, %v", len(open), answer, err)
		}
		refused++
	}
	if n := s.refused("too_many_connections"); refused != 872 || n != 512 {
		t.Errorf("%d refused, %d told", refused, n)
	}
	for _, c := range open[:128] {
		c.Close()
	}
	deadline := time.Now().Add(5 * time.Second)
	for s.post(t.Context(), plainBody).status != 200 {
		if time.Now().After(deadline) {
			t.Fatal("no call after the connections were closed")
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// TestGigabyte sends a body without end, announced and not.
func TestGigabyte(t *testing.T) {
	double := openaitest.New(t, testKey, good)
	s := startSession(t, newProvider(t, double).Broker, newLedger(1_000_000), &doubleSpec)
	for _, head := range []string{"Content-Length: 1073741824\r\n\r\n", "Transfer-Encoding: chunked\r\n\r\n"} {
		sent := 0
		got := s.raw(t, func(c net.Conn) error {
			if _, err := io.WriteString(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: b\r\n"+head); err != nil {
				return err
			}
			block := append([]byte("10000\r\n"), bytes.Repeat([]byte(" "), 1<<16)...)
			for sent < 1<<30 {
				n, err := c.Write(append(block, "\r\n"...))
				if sent += n; err != nil {
					return io.ErrClosedPipe
				}
			}
			return nil
		}, 20*time.Second)
		if !strings.HasPrefix(got, "HTTP/1.1 413") || sent > 16<<20 {
			t.Errorf("%q: after %d bytes %q", head, sent, got)
		}
	}
	if s.refused("request_too_large") == 0 || len(double.Requests()) != 0 {
		t.Error("no event, or the provider was asked")
	}
}

// TestSmuggling sends requests that two servers would cut in different ways: the upstream gets none of them, or exactly one
// that the broker made.
func TestSmuggling(t *testing.T) {
	u := newUpstream(t, echo)
	s, _ := connected(t, u, func(c *connection.Connection) { c.Methods, c.Paths = []string{"GET", "POST"}, []string{"/ok/**"} })
	inner := "GET /connections/api/secret HTTP/1.1\r\nHost: b\r\n\r\n"
	for name, text := range map[string]string{
		"length and chunks":   "POST /connections/api/ok HTTP/1.1\r\nHost: b\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + inner,
		"two lengths":         "POST /connections/api/ok HTTP/1.1\r\nHost: b\r\nContent-Length: 0\r\nContent-Length: 60\r\n\r\n" + inner,
		"odd chunks":          "POST /connections/api/ok HTTP/1.1\r\nHost: b\r\nTransfer-Encoding: xchunked\r\n\r\n" + inner,
		"chunks twice":        "POST /connections/api/ok HTTP/1.1\r\nHost: b\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n" + inner,
		"space before colon":  "POST /connections/api/ok HTTP/1.1\r\nHost: b\r\nContent-Length : 60\r\n\r\n" + inner,
		"folded":              "POST /connections/api/ok HTTP/1.1\r\nHost: b\r\nX: a\r\n Content-Length: 60\r\n\r\n" + inner,
		"break in the path":   "GET /connections/api/ok%0d%0aX:y HTTP/1.1\r\nHost: b\r\n\r\n",
		"absolute":            "GET http://169.254.169.254/connections/api/secret HTTP/1.1\r\nHost: b\r\n\r\n",
		"connect":             "CONNECT 169.254.169.254:80 HTTP/1.1\r\nHost: b\r\n\r\n",
		"upgrade":             "GET /connections/api/ok HTTP/1.1\r\nHost: b\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\n",
		"HTTP/2":              "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
		"no HTTP":             "\x16\x03\x01\x02\x00\x01\x00",
		"huge header":         "GET / HTTP/1.1\r\nHost: b\r\nX: " + strings.Repeat("x", 64<<10) + "\r\n\r\n",
		"headers without end": "GET / HTTP/1.1\r\n" + strings.Repeat("X: y\r\n", 20_000),
		"trailer":             "POST /connections/api/ok HTTP/1.1\r\nHost: b\r\nTransfer-Encoding: chunked\r\nTrailer: Authorization\r\n\r\n0\r\nAuthorization: Bearer mine\r\n\r\n",
	} {
		before := len(u.asked())
		got := s.raw(t, func(c net.Conn) error { _, err := io.WriteString(c, text); return ignorePipe(err) }, 600*time.Millisecond)
		for _, r := range u.asked()[before:] {
			if r.URL.Path != "/v1/ok" || r.Header.Get("Authorization") != "Bearer "+credential || r.Header.Get("Upgrade") != "" {
				t.Errorf("%s: the upstream got %s %s %v", name, r.Method, r.URL, r.Header)
			}
		}
		if n := len(u.asked()) - before; n > 1 {
			t.Errorf("%s: the upstream was asked %d times; answer %q", name, n, got)
		}
	}
	s.stop()
	if s.refused("malformed_request") < 4 {
		t.Errorf("%d malformed requests told", s.refused("malformed_request"))
	}
}

func ignorePipe(err error) error {
	if err != nil {
		return io.ErrClosedPipe
	}
	return nil
}

func TestRatePerRun(t *testing.T) {
	double := openaitest.New(t, testKey, good)
	s := startSession(t, newProvider(t, double, func(c *broker.Config) { c.CallRate = 2 }).Broker, newLedger(1_000_000), &doubleSpec)
	count := map[int]int{}
	for range 12 {
		got := s.post(t.Context(), plainBody)
		count[got.status]++
		if got.status == 429 && (got.code() != "rate_limited" || got.header.Get("Retry-After") == "") {
			t.Errorf("%+v", got)
		}
	}
	if count[200] < 4 || count[200] > 8 || count[429] < 4 || s.refused("rate_limited") == 0 {
		t.Errorf("%v", count)
	}
}

func TestModelsRoute(t *testing.T) {
	s := startSession(t, newProvider(t, openaitest.New(t, testKey, good)).Broker, newLedger(1), &doubleSpec)
	if got := s.get("/v1/models"); got.body != `{"data":[{"created":0,"id":"openai/double","object":"model","owned_by":"openai"}],"object":"list"}` {
		t.Errorf("%+v", got)
	}
	none := startSession(t, newProvider(t, openaitest.New(t, testKey, good)).Broker, newLedger(1), &run.Spec{Command: "c"})
	if got := none.get("/v1/models"); got.status != 404 {
		t.Errorf("%+v", got)
	}
}

// signed is a broker that signs receipts.
func signed(t testing.TB) (*receipt.Signer, func(*broker.Config), map[string]ed25519.PublicKey) {
	t.Helper()
	s, err := receipt.NewSigner(receipt.NewSeed())
	if err != nil {
		t.Fatal(err)
	}
	return s, func(c *broker.Config) { c.Receipts = s }, map[string]ed25519.PublicKey{s.ID(): s.Public()}
}

// TestReceipts: every outward call has one, and no change of an event, of its order or of its run goes unnoticed.
func TestReceipts(t *testing.T) {
	_, sign, keys := signed(t)
	u := newUpstream(t, echo)
	s, _ := connected(t, u, nil, sign)
	for range 2 {
		s.post(t.Context(), plainBody)
		s.get("/connections/api/x")
	}
	s.stop()
	events := stored(t, s.timeline())
	check := receipt.CheckAll(sessionRun, events, keys)
	if !check.Holds() || check.Valid != 4 || check.Micros == 0 {
		t.Fatalf("%+v", check)
	}
	for name, change := range map[string]func([]run.Event) []run.Event{
		"amount": func(e []run.Event) []run.Event { d := e[0].Data.(run.ModelData); d.Charged++; e[0].Data = d; return e },
		"target": func(e []run.Event) []run.Event {
			d := e[1].Data.(run.CallData)
			d.Target = "api/y"
			e[1].Data = d
			return e
		},
		"status": func(e []run.Event) []run.Event {
			d := e[1].Data.(run.CallData)
			d.Status = 404
			e[1].Data = d
			return e
		},
		"bytes": func(e []run.Event) []run.Event { d := e[1].Data.(run.CallData); d.Bytes = 0; e[1].Data = d; return e },
		"duration": func(e []run.Event) []run.Event {
			d := e[1].Data.(run.CallData)
			d.Duration = math.Nextafter(d.Duration, 100)
			e[1].Data = d
			return e
		},
		"type": func(e []run.Event) []run.Event { e[1].Type = run.EventWeb; return e },
		"run":  func(e []run.Event) []run.Event { e[1].Run = "run_ffffffffffffffffffffffffffffffff"; return e },
		"no receipt": func(e []run.Event) []run.Event {
			d := e[1].Data.(run.CallData)
			d.Receipt = nil
			e[1].Data = d
			return e
		},
		"number": func(e []run.Event) []run.Event {
			r := *receipt.Of(e[1])
			r.Number = 9
			d := e[1].Data.(run.CallData)
			d.Receipt = &r
			e[1].Data = d
			return e
		},
		"twice":   func(e []run.Event) []run.Event { return append(e, e[1]) },
		"missing": func(e []run.Event) []run.Event { return append(e[:1:1], e[2:]...) },
		"signature": func(e []run.Event) []run.Event {
			r := *receipt.Of(e[1])
			r.Signature = "AAAA" + r.Signature[4:]
			d := e[1].Data.(run.CallData)
			d.Receipt = &r
			e[1].Data = d
			return e
		},
	} {
		if c := receipt.CheckAll(sessionRun, change(stored(t, s.timeline())), keys); c.Holds() {
			t.Errorf("%s: %+v", name, c)
		}
	}
	_, _, others := signed(t)
	if c := receipt.CheckAll(sessionRun, events, others); c.Holds() || c.Valid != 0 {
		t.Errorf("with another key: %+v", c)
	}
}

// stored is what comes back of events that were stored and read as JSON.
func stored(t testing.TB, events []run.Event) []run.Event {
	t.Helper()
	data, err := json.Marshal(events)
	if err != nil {
		t.Fatal(err)
	}
	var out []run.Event
	if err := json.Unmarshal(data, &out); err != nil {
		t.Fatal(err)
	}
	return out
}

// TestReceiptsWithoutContent: under zero data retention what is stored has a receipt of its own, and no content.
func TestReceiptsWithoutContent(t *testing.T) {
	_, sign, keys := signed(t)
	u := newUpstream(t, echo)
	p, _ := connected(t, u, nil, sign)
	spec := run.Spec{Connections: []string{"api"}, ZeroDataRetention: true}
	store := newConnections(t)
	store.put(t, "o", connection.Connection{Name: "api", BaseURL: u.URL}, "")
	b := newProvider(t, openaitest.New(t, testKey, good), sign, func(c *broker.Config) { c.Connections, c.ConnectionAllow = store, []string{"127.0.0.0/8"} })
	s := startSession(t, b.Broker, newLedger(1000), &spec)
	s.get("/connections/api/personal")
	s.stop()
	p.stop()
	e := s.all[0]
	kept := stored(t, []run.Event{{Seq: 1, Run: sessionRun, Type: e.Type, Data: e.Redacted}})
	if c := receipt.CheckAll(sessionRun, kept, keys); !c.Holds() || c.Valid != 1 || strings.Contains(fmt.Sprintf("%+v", kept), "personal") {
		t.Errorf("%+v: %+v", kept, c)
	}
	if c := receipt.CheckAll(sessionRun, stored(t, s.timeline()), keys); !c.Holds() || c.Valid != 1 {
		t.Errorf("live: %+v", c)
	}
}

// TestReceiptsProperty: whatever an event holds, its receipt survives being stored, and only unchanged.
func TestReceiptsProperty(t *testing.T) {
	s, _, keys := signed(t)
	rapid.Check(t, func(t *rapid.T) {
		d := run.CallData{
			Kind: rapid.String().Draw(t, "kind"), Target: rapid.String().Draw(t, "target"), Method: rapid.String().Draw(t, "method"), Status: rapid.Int().Draw(t, "status"),
			Bytes: rapid.Int64().Draw(t, "bytes"), Duration: rapid.Float64Range(0, 1e9).Draw(t, "duration"), Charged: run.Micros(rapid.Int64().Draw(t, "charged")),
		}
		n := rapid.Int64Range(1, 1000).Draw(t, "number")
		data, err := s.Sign(sessionRun, run.EventWeb, d, "c", n, time.Now())
		if err != nil {
			t.Fatal(err)
		}
		text, err := json.Marshal(run.Event{Run: sessionRun, Type: run.EventWeb, Data: data})
		if err != nil {
			t.Fatal(err)
		}
		var e run.Event
		if err := json.Unmarshal(text, &e); err != nil {
			t.Fatal(err)
		}
		if err := receipt.Verify(e, keys); err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		changed := e.Data.(run.CallData)
		changed.Charged++
		e.Data = changed
		if receipt.Verify(e, keys) == nil {
			t.Fatal("a changed event verifies")
		}
	})
}
