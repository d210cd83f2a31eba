package web

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/ephemeral-run/ephemeral/broker/outbound"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const page = `<!doctype html><html><head><title>On  machines</title><style>p{}</style><script>var secret = "script"</script></head><body>
<nav><a href="/">Home</a> <a href="/x">Menu</a></nav><article><h1>On machines</h1>
<p>A machine that exists for one run has nothing to remember, and nothing that anybody else could find in it afterwards, which is the point of it all.</p>
<p>It begins as a copy of a template, works for a moment, and is gone; what it did is in the record, what it cost is in the account, and that is everything.</p>
<p>Whoever wants to know more reads the record, which names every step together with the time that it took, so that no second is left unexplained.</p></article>
<footer>Imprint</footer></body></html>`

// site is a double of a web server.
func site(t *testing.T, change ...func(*Config)) (*Client, string) {
	t.Helper()
	var base string
	mux := http.NewServeMux()
	html := func(body string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/html; charset=utf-8")
			_, _ = io.WriteString(w, body)
		}
	}
	mux.HandleFunc("/page", html(page))
	mux.HandleFunc("/short", html("<title>Short</title><p>Just <b>one</b> line.<p>And another.<script>no()</script>"))
	mux.HandleFunc("/deep", html(strings.Repeat("<div>", 100_000)+"bottom"))
	mux.HandleFunc("/wide", html("<p>"+strings.Repeat("<b>x</b> ", 60_000)))
	mux.HandleFunc("/text", func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, "plain "+r.UserAgent()) })
	mux.HandleFunc("/json", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"a": 1}`)
	})
	mux.HandleFunc("/latin", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=iso-8859-1")
		_, _ = w.Write([]byte("gr\xfc\xdfe"))
	})
	mux.HandleFunc("/image", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "image/png")
		_, _ = w.Write([]byte("\x89PNG\r\n\x1a\n"))
	})
	mux.HandleFunc("/missing", http.NotFound)
	mux.HandleFunc("/bomb", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/plain")
		w.Header().Set("Content-Encoding", "gzip")
		for range 256 { // 1 GiB in all: members follow each other (RFC 1952)
			if _, err := w.Write(bomb()); err != nil {
				return
			}
		}
	})
	mux.HandleFunc("/slow", func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(200)
		for r.Context().Err() == nil {
			_, _ = io.WriteString(w, "x")
			w.(http.Flusher).Flush()
			time.Sleep(20 * time.Millisecond)
		}
	})
	mux.HandleFunc("/silent", func(w http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	mux.HandleFunc("/cut", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Length", "1000")
		_, _ = io.WriteString(w, "x")
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	})
	mux.HandleFunc("/to/", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Location", r.URL.Query().Get("u"))
		w.WriteHeader(http.StatusFound)
	})
	mux.HandleFunc("/loop", func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/loop", http.StatusFound) })
	mux.HandleFunc("/search", func(w http.ResponseWriter, r *http.Request) {
		q := r.URL.Query()
		if q.Get("format") != "json" || r.Header.Get("Authorization") != "Bearer key-MARKER-0123" {
			http.Error(w, "no", http.StatusForbidden)
			return
		}
		switch q.Get("q") {
		case "broken":
			_, _ = io.WriteString(w, "<html>")
		case "redirect":
			http.Redirect(w, r, "http://127.0.0.1:1/", http.StatusFound)
		case "key":
			fmt.Fprintf(w, `{"results": [{"title": "%s", "url": "https://a.example/", "content": "a"}, {"title": "key\u002dMARKER-0123", "url": "https://b.example/", "content": "k e y - M A R K E R - 0 1 2 3"}]}`, "key-MARKER-0123")
		default:
			_, _ = io.WriteString(w, `{"query": "x", "results": [{"title": " One\n hit ", "url": "https://a.example/", "content": "first", "engine": "e"}, {"title": "bad", "url": "javascript:alert(1)"}, {"title": "Two", "url": "https://b.example/", "content": "`+strings.Repeat("y", 5000)+`"}]}`)
		}
	})
	server := httptest.NewServer(mux)
	base = server.URL
	var port uint16
	if _, err := fmt.Sscanf(base[strings.LastIndex(base, ":")+1:], "%d", &port); err != nil {
		t.Fatal(err)
	}
	cfg := Config{Allow: []string{"127.0.0.1/32"}, Ports: []uint16{port, 80, 443}, Timeout: time.Second, MaxBytes: 1 << 20, SearchURL: base + "/search", SearchAPIKey: "key-MARKER-0123"}
	for _, f := range change {
		f(&cfg)
	}
	c, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close(); server.CloseClientConnections(); server.Close() })
	return c, base
}

// bomb is 4 MiB of zeros, compressed.
var bomb = sync.OnceValue(func() []byte {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	_, _ = z.Write(make([]byte, 4<<20)) // a buffer takes everything
	_ = z.Close()
	return b.Bytes()
})

func TestFetch(t *testing.T) {
	c, base := site(t)
	fetch := func(path string, raw bool) *Page {
		t.Helper()
		p, answered, err := c.Fetch(t.Context(), base+path, raw)
		if err != nil || !answered {
			t.Fatalf("%s: %v", path, err)
		}
		return p
	}
	p := fetch("/page", false)
	if p.Title != "On machines" || !strings.Contains(p.Text, "exists for one run") || strings.ContainsAny(p.Text, "<>{") || strings.Contains(p.Text, "Menu") || strings.Contains(p.Text, "script") {
		t.Errorf("page: %+v", p)
	}
	if p.URL != base+"/page" || p.Status != 200 || p.ContentType != "text/html" || p.Bytes != int64(len(page)) || p.Truncated {
		t.Errorf("page: %+v", p)
	}
	if p := fetch("/page", true); p.Text != page {
		t.Errorf("raw: %+v", p)
	}
	if p := fetch("/short", false); !strings.Contains(p.Text, "Just one line.") || strings.Contains(p.Text, "no()") {
		t.Errorf("short: %+v", p)
	}
	if p := fetch("/text", false); !strings.HasPrefix(p.Text, "plain Mozilla") {
		t.Errorf("text: %+v", p)
	}
	if p := fetch("/json", false); p.Text != `{"a": 1}` {
		t.Errorf("json: %+v", p)
	}
	if p := fetch("/latin", false); p.Text != "grüße" {
		t.Errorf("latin: %+v", p)
	}
	if p := fetch("/image", false); p.Text != "" || p.ContentType != "image/png" || p.Bytes != 8 {
		t.Errorf("image: %+v", p)
	}
	if p := fetch("/missing", false); p.Status != 404 {
		t.Errorf("missing: %+v", p)
	}
	if p := fetch("/to/?u=/to/%3Fu=/text", false); p.URL != base+"/text" {
		t.Errorf("redirected: %+v", p)
	}
}

func TestFetchBounds(t *testing.T) {
	c, base := site(t)
	for path, want := range map[string]func(*Page, bool, error) bool{
		"/bomb": func(p *Page, _ bool, err error) bool {
			return err == nil && p.Truncated && p.Bytes == 1<<20 && len(p.Text) <= maxText
		},
		"/slow":   func(_ *Page, answered bool, err error) bool { return errors.Is(err, ErrTimeout) && answered },
		"/silent": func(_ *Page, answered bool, err error) bool { return errors.Is(err, ErrTimeout) && !answered },
		"/cut":    func(_ *Page, answered bool, err error) bool { return errors.Is(err, ErrUpstream) && answered },
		"/deep":   func(p *Page, _ bool, err error) bool { return err == nil && strings.Contains(p.Text, "bottom") },
		"/wide":   func(p *Page, _ bool, err error) bool { return err == nil && strings.HasPrefix(p.Text, "x x x") },
		"/loop":   func(_ *Page, _ bool, err error) bool { return errors.Is(err, ErrRedirect) },
	} {
		began := time.Now()
		p, answered, err := c.Fetch(t.Context(), base+path, false)
		if !want(p, answered, err) || time.Since(began) > 5*time.Second {
			t.Errorf("%s: %v, answered %v, after %v", path, err, answered, time.Since(began))
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(50*time.Millisecond, cancel)
	if _, _, err := c.Fetch(ctx, base+"/silent", false); !errors.Is(err, context.Canceled) {
		t.Errorf("abandoned: %v", err)
	}
}

// TestFetchStaysOutside redirects to addresses that are not public.
func TestFetchStaysOutside(t *testing.T) {
	c, base := site(t)
	for _, to := range []string{"http://169.254.169.254/latest/", "http://10.0.0.1/", "http://[::1]/", "http://[::ffff:169.254.169.254]/", "http://0x7f.1/", "http://127.0.0.2/", "file:///etc/passwd", "gopher://127.0.0.1/", "http://127.0.0.1:22/", "http://user:pw@127.0.0.1/"} {
		if p, _, err := c.Fetch(t.Context(), base+"/to/?u="+to, false); !errors.Is(err, outbound.ErrAddress) {
			t.Errorf("%s: %+v, %v", to, p, err)
		}
	}
	public, base := site(t, func(c *Config) { c.Allow = nil })
	if _, _, err := public.Fetch(t.Context(), base+"/text", false); !errors.Is(err, outbound.ErrAddress) {
		t.Errorf("loopback: %v", err)
	}
}

func TestSearch(t *testing.T) {
	c, _ := site(t)
	f, answered, err := c.Search(t.Context(), "x", 10)
	results := f.Results
	if err != nil || f.Status != 200 || f.Bytes < 5000 || !answered || len(results) != 2 || results[0] != (Result{"One hit", "https://a.example/", "first"}) || len(results[1].Snippet) != maxSnippet {
		t.Errorf("%+v, %v", f, err)
	}
	if f, _, err := c.Search(t.Context(), "x", 1); err != nil || len(f.Results) != 1 {
		t.Errorf("one: %+v, %v", f, err)
	}
	for _, q := range []string{"broken", "redirect"} {
		if _, answered, err := c.Search(t.Context(), q, 10); !errors.Is(err, ErrUpstream) || !answered || strings.Contains(err.Error(), "127.0.0.1") {
			t.Errorf("%s: %v", q, err)
		}
	}
	f, _, err = c.Search(t.Context(), "key", 10)
	if err != nil || strings.Contains(strings.ReplaceAll(fmt.Sprint(f.Results), " ", ""), "MARKER") {
		t.Errorf("the key is shown: %+v, %v", f.Results, err)
	}
	if none, _ := site(t, func(c *Config) { c.SearchURL = "" }); none.CanSearch() {
		t.Error("search without an endpoint")
	}
}

func TestConfig(t *testing.T) {
	for _, cfg := range []Config{{Allow: []string{"x"}}, {SearchURL: "x"}, {SearchURL: "ftp://x/"}, {SearchURL: "http://u:pw-MARKER@x/"}, {Timeout: -1}} {
		if _, err := New(cfg); err == nil || strings.Contains(err.Error(), "MARKER") {
			t.Errorf("%+v: %v", cfg, err)
		}
	}
}

// FuzzReadable: whatever a page holds, its text is bounded by the page and comes in time.
func FuzzReadable(f *testing.F) {
	for _, s := range []string{page, "<p>a", strings.Repeat("<table>", 50), "<a href=x><b></a></b>", "<svg><title>x</title></svg>", "\x00<\xff>"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		p := Page{}
		p.fill([]byte(s), "text/html", nil, false)
		if len(p.Text) > maxText || len(p.Title) > maxTitle {
			t.Fatalf("%d bytes of text, %d of title", len(p.Text), len(p.Title))
		}
	})
}
