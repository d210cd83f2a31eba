package door

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// open opens a door to a double of the broker and returns its address.
func open(t *testing.T, brokerDouble http.Handler) string {
	t.Helper()
	server := httptest.NewServer(brokerDouble)
	t.Cleanup(server.Close)
	return openTo(t, func(ctx context.Context) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", server.Listener.Addr().String())
	})
}

func openTo(t *testing.T, dial func(context.Context) (net.Conn, error)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	transport := &http.Transport{DisableCompression: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) }}
	d := Open(l, transport, slog.New(slog.DiscardHandler))
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
		transport.CloseIdleConnections()
		http.DefaultClient.CloseIdleConnections()
	})
	return l.Addr().String()
}

func TestPassesRequestsWithoutCredentials(t *testing.T) {
	address := open(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		w.Header().Set("X-Answer", "1")
		w.WriteHeader(http.StatusTeapot)
		_, _ = fmt.Fprintf(w, "%s %s %s %s %q %q %q %s", r.Method, r.Host, r.URL.RequestURI(), r.Header.Get("Content-Type"),
			r.Header.Get("Authorization"), r.Header.Get("Cookie"), r.Header.Get("X-Forwarded-For"), body)
	}))
	for _, c := range []struct{ path, want string }{
		{"/v1/chat/completions?a=b%20c", `POST broker /v1/chat/completions?a=b%20c text/x "" "" "" hello`},
		{"/web/fetch", `POST broker /web/fetch text/x "" "" "" hello`},
		{"/connections/billing/v1/x%2Fy", `POST broker /connections/billing/v1/x%2Fy text/x "Bearer sk-placeholder" "a=b" "" hello`},
	} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+address+c.path, strings.NewReader("hello"))
		if err != nil {
			t.Fatal(err)
		}
		for name, value := range map[string]string{"Content-Type": "text/x", "Authorization": "Bearer sk-placeholder", "Cookie": "a=b", "X-Forwarded-For": "10.0.0.1"} {
			req.Header.Set(name, value)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if resp.StatusCode != http.StatusTeapot || resp.Header.Get("X-Answer") != "1" || string(body) != c.want {
			t.Errorf("%d %s", resp.StatusCode, body)
		}
	}
}

func TestStreamsAsTheyCome(t *testing.T) {
	next := make(chan struct{})
	address := open(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for i := range 3 {
			<-next
			_, _ = fmt.Fprintf(w, "data: %d\n\n", i)
			_ = http.NewResponseController(w).Flush()
		}
	}))
	go func() { next <- struct{}{} }()
	resp, err := http.Get("http://" + address + "/v1/chat/completions")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	lines := bufio.NewReader(resp.Body)
	for i := range 3 { // each piece arrives before the next is written
		line, err := lines.ReadString('\n')
		if err != nil || line != fmt.Sprintf("data: %d\n", i) {
			t.Fatalf("%q, %v", line, err)
		}
		_, _ = lines.ReadString('\n')
		if i < 2 {
			next <- struct{}{}
		}
	}
}

// TestBrokenAnswerIsBroken: what the broker did not finish is not passed on as finished.
func TestBrokenAnswerIsBroken(t *testing.T) {
	address := open(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte("half"))
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	}))
	resp, err := http.Get("http://" + address)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if body, err := io.ReadAll(resp.Body); err == nil {
		t.Errorf("%q", body)
	}
}

func TestNoBroker(t *testing.T) {
	address := openTo(t, func(context.Context) (net.Conn, error) { return nil, errors.New("nobody there") })
	resp, err := http.Get("http://" + address + "/v1/models")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body)
	if resp.StatusCode != http.StatusBadGateway || resp.Header.Get("Ephemeral-Error") != "unavailable" || !bytes.Contains(body, []byte(`"code":"unavailable"`)) {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
}

// raw writes bytes to the door and returns the first line of its answer.
func raw(t *testing.T, address, request string) string {
	t.Helper()
	c, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	_, _ = c.Write([]byte(request))
	line, _ := bufio.NewReader(c).ReadString('\n')
	return strings.TrimSpace(line)
}

func TestOddRequestsAreRefused(t *testing.T) {
	var mu sync.Mutex
	var got []string
	address := open(t, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		got = append(got, r.Method+" "+r.URL.Path)
	}))
	for request, want := range map[string]string{
		"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com:443\r\n\r\n":                        "HTTP/1.1 501 Not Implemented",
		"GET /up HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n":         "HTTP/1.1 501 Not Implemented",
		"GET / HTTP/1.1\r\nHost: a\r\nX: " + strings.Repeat("x", maxHeader+8192) + "\r\n\r\n":      "HTTP/1.1 431 Request Header Fields Too Large",
		"POST /smuggled HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\nabcd": "HTTP/1.1 400 Bad Request",
		"POST /smuggled HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked\r\n\r\n":                "HTTP/1.1 501 Not Implemented",
		"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n":                                                     "HTTP/1.1 400 Bad Request",
		"GET http://other.example/absolute HTTP/1.1\r\nHost: b\r\n\r\n":                            "HTTP/1.1 200 OK", // still the broker's
	} {
		if line := raw(t, address, request); line != want {
			t.Errorf("%.60q: %s, want %s", request, line, want)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	if len(got) != 1 || got[0] != "GET /absolute" {
		t.Errorf("the broker got %q", got)
	}
}

// TestConnectionsAreBounded: a program that opens more than it may waits; the others are served when one ends.
func TestConnectionsAreBounded(t *testing.T) {
	address := open(t, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	var held []net.Conn
	for range maxConns {
		c, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		held = append(held, c)
	}
	answered := make(chan string)
	go func() { answered <- raw(t, address, "GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n") }()
	select {
	case line := <-answered:
		t.Fatalf("one too many was answered: %q", line)
	case <-time.After(200 * time.Millisecond):
	}
	_ = held[0].Close()
	if line := <-answered; line != "HTTP/1.1 200 OK" {
		t.Errorf("after one had ended: %q", line)
	}
}
