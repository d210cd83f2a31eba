package broker_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/ephemeral-run/ephemeral/broker"
	"github.com/ephemeral-run/ephemeral/broker/openaitest"
	"github.com/ephemeral-run/ephemeral/run"
)

// TestParallelCallsOnASmallHold makes 64 calls at once on a hold that pays for 10 of them.
func TestParallelCallsOnASmallHold(t *testing.T) {
	double := openaitest.NewFunc(t, testKey, func(int, *openaitest.Request) openaitest.Answer {
		return openaitest.Answer{Text: "hi", Usage: &openaitest.Usage{Prompt: 1 << 20, Completion: 1000}, Delay: 20 * time.Millisecond}
	})
	p := newProvider(t, double)
	body := `{"messages":[{"role":"user","content":"hello"}],"max_tokens":64}`
	one := run.Micros(len(`{"max_tokens":64,"messages":[{"content":"hello","role":"user"}],"model":"double"}`) + 256 + 2*64)
	l := newLedger(10*one + one/2)
	s := startSession(t, p.Broker, l, &doubleSpec)
	var wg sync.WaitGroup
	var mu sync.Mutex
	count := map[int]int{}
	for range 64 {
		wg.Go(func() {
			got := s.post(t.Context(), body)
			mu.Lock()
			defer mu.Unlock()
			count[got.status]++
		})
	}
	wg.Wait()
	if count[200] != 10 || count[402] != 54 {
		t.Errorf("statuses %v, want 10 times 200 and 54 times 402", count)
	}
	if n := len(double.Requests()); n != 10 {
		t.Errorf("the provider was asked %d times", n)
	}
	if n := double.MostAtOnce(); n > 8 {
		t.Errorf("%d calls at once", n)
	}
	if err := l.check(); err != nil || l.total() != 10*one {
		t.Errorf("charged %d of %d; %v", l.total(), l.amount, err)
	}
}

// TestChargedNeverAboveAuthorised lets calls meet providers that do anything, on holds of any size.
func TestChargedNeverAboveAuthorised(t *testing.T) {
	var mu sync.Mutex
	var next openaitest.Answer
	double := openaitest.NewFunc(t, testKey, func(int, *openaitest.Request) openaitest.Answer {
		mu.Lock()
		defer mu.Unlock()
		return next
	})
	p := newProvider(t, double, func(c *broker.Config) { c.Attempts = 2 })
	answers := rapid.Custom(func(t *rapid.T) openaitest.Answer {
		a := openaitest.Answer{
			Text:     rapid.StringN(0, 200, 2000).Draw(t, "text"),
			Piece:    rapid.IntRange(1, 50).Draw(t, "piece"),
			CutAfter: rapid.OneOf(rapid.Just(0), rapid.IntRange(0, 3000)).Draw(t, "cut"),
			Status:   rapid.SampledFrom([]int{0, 0, 0, 0, 400, 429, 500}).Draw(t, "status"),
			Refuse:   rapid.IntRange(0, 9).Draw(t, "refuse") == 0,
			Echo:     rapid.IntRange(0, 5).Draw(t, "echo") == 0,
		}
		if rapid.Bool().Draw(t, "has usage") {
			n := rapid.OneOf(rapid.Int64Range(0, 1000), rapid.Int64())
			a.Usage = &openaitest.Usage{Prompt: n.Draw(t, "prompt"), Cached: n.Draw(t, "cached"), Completion: n.Draw(t, "completion")}
		}
		return a
	})
	rapid.Check(t, func(r *rapid.T) {
		l := newLedger(run.Micros(rapid.OneOf(rapid.Int64Range(0, 1000), rapid.Int64Range(0, 50_000)).Draw(r, "hold")))
		s := startSession(t, p.Broker, l, &doubleSpec)
		defer s.stop()
		for range rapid.IntRange(1, 5).Draw(r, "calls") {
			mu.Lock()
			next = answers.Draw(r, "answer")
			mu.Unlock()
			got := s.post(t.Context(), rapid.SampledFrom([]string{plainBody, streamBody}).Draw(r, "body"))
			if shows(guestText(got.body)...) {
				r.Fatalf("the key is shown: %s", got.body)
			}
		}
		s.stop()
		if err := l.check(); err != nil {
			r.Fatal(err)
		}
		var sum run.Micros
		for _, e := range s.events() {
			sum += e.Charged
		}
		if sum != l.total() {
			r.Fatalf("events say %d, the ledger %d", sum, l.total())
		}
	})
}

func TestCallLimit(t *testing.T) {
	double := openaitest.New(t, testKey, good)
	p := newProvider(t, double, func(c *broker.Config) { c.MaxCalls = 3 })
	s := startSession(t, p.Broker, newLedger(100_000), &doubleSpec)
	for n, want := range []int{200, 400, 200, 429, 429} {
		body := plainBody
		if want == 400 {
			body = "{}"
		}
		if got := s.post(t.Context(), body); got.status != want || want == 429 && got.code() != "call_limit" {
			t.Errorf("call %d: %+v, want %d", n+1, got, want)
		}
	}
}

func TestCrowd(t *testing.T) {
	release := make(chan struct{})
	double := openaitest.NewFunc(t, testKey, func(int, *openaitest.Request) openaitest.Answer { <-release; return good })
	s := startSession(t, newProvider(t, double).Broker, newLedger(10_000_000), &doubleSpec)
	const calls = 100 // 8 at once, 64 waiting
	statuses := make(chan int, calls)
	for range calls {
		go func() { statuses <- s.post(context.Background(), plainBody).status }()
	}
	for range calls - 72 {
		if got := <-statuses; got != 429 {
			t.Errorf("status %d, want 429", got)
		}
	}
	close(release)
	for range 72 {
		if got := <-statuses; got != 200 {
			t.Errorf("status %d, want 200", got)
		}
	}
}

// raw sends bytes on a connection of its own and returns what comes back within the time.
func (s *session) raw(t *testing.T, write func(net.Conn) error, within time.Duration) string {
	t.Helper()
	conn, err := s.ln.dial(t.Context(), "", "")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(within)); err != nil {
		t.Fatal(err)
	}
	got := make(chan string, 1)
	go func() {
		b, _ := io.ReadAll(conn) // ends with the deadline or the connection
		got <- string(b)
	}()
	if err := write(conn); err != nil && !errors.Is(err, io.ErrClosedPipe) && !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("write: %v", err)
	}
	return <-got
}

func TestRawRequests(t *testing.T) {
	double := openaitest.New(t, testKey, good)
	s := startSession(t, newProvider(t, double).Broker, newLedger(1_000_000), &doubleSpec)
	say := func(text string) func(net.Conn) error {
		return func(c net.Conn) error { _, err := io.WriteString(c, text); return err }
	}
	post := "POST /v1/chat/completions HTTP/1.1\r\nHost: broker\r\n"
	for name, c := range map[string]struct{ send, want string }{
		"huge header":         {post + "X: " + strings.Repeat("x", 64<<10) + "\r\n\r\n", "431"},
		"two lengths":         {post + "Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello", "400"},
		"length and chunks":   {post + "Content-Length: 5\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n", "400"},
		"unknown encoding":    {post + "Transfer-Encoding: gzip, chunked\r\n\r\n", "501"},
		"space in the header": {post + "Content-Length : 5\r\n\r\nhello", "400"},
		"no HTTP":             {"\x16\x03\x01\x02\x00\x01\x00\x01\r\n\r\n", "400"},
		"HTTP/2":              {"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "404"},
		"proxy request":       {"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com:443\r\nConnection: close\r\n\r\n", "404"},
		"absolute URL":        {"GET http://169.254.169.254/latest HTTP/1.1\r\nHost: 169.254.169.254\r\nConnection: close\r\n\r\n", "404"},
	} {
		t.Run(name, func(t *testing.T) {
			got := s.raw(t, say(c.send), 2*time.Second)
			if !strings.HasPrefix(got, "HTTP/1.1 "+c.want) || strings.Count(got, "HTTP/1.1") != 1 {
				t.Errorf("got %q, want one answer with %s", got, c.want)
			}
		})
	}
	if n := len(double.Requests()); n != 0 {
		t.Errorf("the provider was asked %d times", n)
	}
}

// TestTricklingGuest sends a body byte by byte, and never its end.
func TestTricklingGuest(t *testing.T) {
	double := openaitest.New(t, testKey, good)
	p := newProvider(t, double)
	p.SetBodyTimeout(300 * time.Millisecond)
	s := startSession(t, p.Broker, newLedger(1_000_000), &doubleSpec)
	began := time.Now()
	got := s.raw(t, func(c net.Conn) error {
		if _, err := io.WriteString(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: b\r\nContent-Length: 4000000\r\n\r\n"); err != nil {
			return err
		}
		for {
			if _, err := c.Write([]byte(" ")); err != nil {
				return io.ErrClosedPipe // the broker hung up
			}
			time.Sleep(20 * time.Millisecond)
		}
	}, 10*time.Second)
	if !strings.HasPrefix(got, "HTTP/1.1 408") || s.refused("too_slow") != 1 || time.Since(began) > 5*time.Second {
		t.Errorf("after %v: %q", time.Since(began), got)
	}
}

// TestTinySocket works over a real socket pair with the smallest buffers the kernel gives, and a guest that reads slowly.
func TestTinySocket(t *testing.T) {
	text := strings.Repeat("0123456789abcdef", 4096)
	double := openaitest.New(t, testKey, openaitest.Answer{Text: text, Piece: 512, Usage: &openaitest.Usage{Prompt: 10, Completion: 900}})
	s := startSession(t, newProvider(t, double).Broker, newLedger(1_000_000), &doubleSpec)
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var ends [2]net.Conn
	for i, fd := range fds {
		if err := syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_SNDBUF, 1); err != nil {
			t.Fatal(err)
		}
		f := os.NewFile(uintptr(fd), "socket")
		if ends[i], err = net.FileConn(f); err != nil {
			t.Fatal(err)
		}
		f.Close()
	}
	defer ends[0].Close()
	s.ln.conns <- ends[1]
	if _, err := fmt.Fprintf(ends[0], "POST /v1/chat/completions HTTP/1.1\r\nHost: b\r\nContent-Length: %d\r\n\r\n%s", len(streamBody), streamBody); err != nil {
		t.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReaderSize(ends[0], 16), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil || guestText(string(body))[1] != text || !strings.HasSuffix(string(body), "data: [DONE]\n\n") {
		t.Errorf("%d bytes, %v", len(body), err)
	}
}

// TestListenerFails ends with an error and with the money settled.
func TestListenerFails(t *testing.T) {
	double := openaitest.New(t, testKey, good)
	h := newProvider(t, double).Handler(broker.Session{Run: "run_0", Spec: &doubleSpec, Ledger: newLedger(1)})
	ln := newPipeListener()
	ln.Close()
	if err := h.Serve(t.Context(), ln); !errors.Is(err, net.ErrClosed) {
		t.Errorf("got %v", err)
	}
}
