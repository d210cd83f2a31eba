package broker_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"html"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"

	"github.com/ephemeral-run/ephemeral/broker"
	"github.com/ephemeral-run/ephemeral/broker/openaitest"
	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/connection"
)

const credential = "tok-MARKER/+5f1c9e0a77"

// connections is a double of the store.
type connections struct {
	mu   sync.Mutex
	all  map[string]connection.Sealed
	ring *connection.Keyring
	err  error
}

func newConnections(t testing.TB) *connections {
	t.Helper()
	ring, err := connection.NewKeyring(connection.NewKey())
	if err != nil {
		t.Fatal(err)
	}
	return &connections{all: map[string]connection.Sealed{}, ring: ring}
}

func (c *connections) Connection(_ context.Context, org, name string) (connection.Sealed, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s, ok := c.all[org+"/"+name]
	if c.err != nil || !ok {
		return s, fmt.Errorf("connection %s: %w", name, cmpErr(c.err, run.ErrNotFound))
	}
	return s, nil
}

func cmpErr(a, b error) error {
	if a != nil {
		return a
	}
	return b
}

func (c *connections) put(t testing.TB, org string, def connection.Connection, credential string) {
	t.Helper()
	def, err := def.Check()
	if err != nil {
		t.Fatal(err)
	}
	s, err := c.ring.Update(org, nil, def, &credential)
	if err != nil {
		t.Fatal(err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.all[org+"/"+def.Name] = s
}

// upstream is a double of an upstream API: it remembers what it was asked.
type upstream struct {
	*httptest.Server
	mu       sync.Mutex
	requests []*http.Request
	bodies   []string
}

func newUpstream(t testing.TB, answer http.HandlerFunc) *upstream {
	u := &upstream{}
	u.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		u.mu.Lock()
		u.requests, u.bodies = append(u.requests, r), append(u.bodies, string(body))
		u.mu.Unlock()
		answer(w, r)
	}))
	t.Cleanup(func() { u.CloseClientConnections(); u.Close() })
	return u
}

func (u *upstream) asked() []*http.Request {
	u.mu.Lock()
	defer u.mu.Unlock()
	return append([]*http.Request(nil), u.requests...)
}

// connected is a session of a run with the connection api, whose definition change may alter.
func connected(t testing.TB, u *upstream, change func(*connection.Connection), cfg ...func(*broker.Config)) (*session, *provider) {
	t.Helper()
	store := newConnections(t)
	def := connection.Connection{Name: "api", BaseURL: u.URL + "/v1", Auth: connection.Auth{Type: connection.AuthBearer}}
	if change != nil {
		change(&def)
	}
	secret := credential
	if def.Auth.Type == connection.AuthNone {
		secret = ""
	}
	store.put(t, "o", def, secret)
	store.put(t, "other", connection.Connection{Name: "theirs", BaseURL: u.URL}, "")
	store.put(t, "o", connection.Connection{Name: "unnamed", BaseURL: u.URL}, "")
	p := newProvider(t, openaitest.New(t, testKey, good), append([]func(*broker.Config){func(c *broker.Config) {
		c.Connections, c.Sealing, c.ConnectionAllow = store, store.ring, []string{"127.0.0.0/8"}
	}}, cfg...)...)
	return startSession(t, p.Broker, newLedger(100_000), &run.Spec{Prompt: "p", Model: "openai/double", Connections: []string{"api", "theirs", "gone"}}), p
}

func (s *session) get(path string) reply {
	return s.send(context.Background(), http.MethodGet, path, "")
}

func echo(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "text/plain")
	w.Header().Set("X-Private", "p")
	w.Header().Set("Set-Cookie", "a=b")
	fmt.Fprintf(w, "%s %s", r.Method, r.URL.RequestURI())
}

func TestConnectionAuth(t *testing.T) {
	for name, c := range map[string]struct {
		auth connection.Auth
		has  func(*http.Request) bool
	}{
		"bearer": {connection.Auth{Type: connection.AuthBearer}, func(r *http.Request) bool { return r.Header.Get("Authorization") == "Bearer "+credential }},
		"basic": {connection.Auth{Type: connection.AuthBasic, User: "me"}, func(r *http.Request) bool {
			user, password, _ := r.BasicAuth()
			return user == "me" && password == credential
		}},
		"header": {connection.Auth{Type: connection.AuthHeader, Name: "X-Api-Key"}, func(r *http.Request) bool { return r.Header.Get("X-Api-Key") == credential }},
		"query":  {connection.Auth{Type: connection.AuthQuery, Name: "key"}, func(r *http.Request) bool { return r.URL.Query().Get("key") == credential }},
		"none": {connection.Auth{Type: connection.AuthNone}, func(r *http.Request) bool {
			return r.Header.Get("Authorization") == "" && !strings.Contains(r.URL.RawQuery, "MARKER")
		}},
	} {
		u := newUpstream(t, echo)
		s, p := connected(t, u, func(d *connection.Connection) { d.Auth = c.auth })
		got := s.get("/connections/api/invoices/7?day=today&x=a%20b")
		if got.status != 200 || !strings.HasPrefix(got.body, "GET /v1/invoices/7?day=today") || !c.has(u.asked()[0]) {
			t.Errorf("%s: %+v, upstream got %v", name, got, u.asked()[0].Header)
		}
		if got.header.Get("X-Private") != "" || got.header.Get("Set-Cookie") != "" {
			t.Errorf("%s: headers %v", name, got.header)
		}
		if calls := s.calls(); len(calls) != 1 || calls[0].Target != "api/invoices/7" || calls[0].Status != 200 || calls[0].Method != "GET" {
			t.Errorf("%s: events %+v", name, calls)
		}
		if text := fmt.Sprintf("%+v %+v %s", got, s.calls(), p.log.String()); strings.Contains(text, "MARKER") {
			t.Errorf("%s: the credential is shown: %s", name, text)
		}
	}
}

func TestConnectionRules(t *testing.T) {
	u := newUpstream(t, echo)
	s, _ := connected(t, u, func(c *connection.Connection) {
		c.Paths, c.Methods = []string{"/invoices/**", "/items/*"}, []string{"GET", "POST"}
		c.Auth = connection.Auth{Type: connection.AuthQuery, Name: "key"}
	})
	for _, c := range []struct {
		method, path, code string
	}{
		{"GET", "/connections/api/invoices/1", ""}, {"POST", "/connections/api/items/7", ""}, {"GET", "/connections/api/invoices", ""},
		{"DELETE", "/connections/api/invoices/1", "method_not_allowed_here"}, {"TRACE", "/connections/api/invoices/1", "method_not_allowed_here"},
		{"GET", "/connections/api/users", "path_not_allowed"}, {"GET", "/connections/api/items/7/8", "path_not_allowed"},
		{"GET", "/connections/api/invoices/../users", "path_not_allowed"}, {"GET", "/connections/api/invoices/%2e%2e/users", "path_not_allowed"},
		{"GET", "/connections/api/invoices/..%2fusers", "path_not_allowed"}, {"GET", "/connections/api/invoices//users", "path_not_allowed"},
		{"GET", "/connections/api/invoices/%252e%252e/users", "path_not_allowed"}, {"GET", "/connections/api", "path_not_allowed"},
		{"GET", "/connections/api/invoices/1?key=mine", "invalid_request"}, {"GET", "/connections/api/invoices/1?KEY=mine", "invalid_request"},
		{"GET", "/connections/api/invoices/1?a=%zz", "invalid_request"}, {"GET", "/connections/api/invoices/1?a=1;key=2", "invalid_request"},
		{"GET", "/connections/theirs/x", "not_found"}, {"GET", "/connections/unnamed/x", "not_found"}, {"GET", "/connections/gone/x", "not_found"},
		{"GET", "/connections/API/invoices/1", "not_found"}, {"GET", "/connections/%61pi/invoices/1", "not_found"}, {"GET", "/connections//invoices/1", "not_found"},
		{"POST", "/web/fetch", "not_found"}, {"POST", "/web/search", "not_found"},
	} {
		before := len(u.asked())
		got := s.raw1(t, c.method, c.path)
		if got.code() != c.code || (c.code == "") != (got.status == 200) || got.header.Get("Ephemeral-Error") != c.code {
			t.Errorf("%s %s: %+v", c.method, c.path, got)
		}
		if n := len(u.asked()) - before; (c.code == "") != (n == 1) {
			t.Errorf("%s %s: the upstream was asked %d times", c.method, c.path, n)
		}
	}
	if s.refused("path_not_allowed") == 0 || s.refused("method_not_allowed_here") == 0 {
		t.Error("refusals are no events")
	}
}

// raw1 sends one request whose path goes out as it is.
func (s *session) raw1(t *testing.T, method, path string) reply {
	t.Helper()
	p, query, _ := strings.Cut(path, "?")
	req, err := http.NewRequest(method, "http://broker", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.URL.Opaque = p
	req.URL.RawQuery = query
	resp, err := s.client().Transport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	return reply{status: resp.StatusCode, header: resp.Header, body: string(data), err: err}
}

func TestConnectionHeaders(t *testing.T) {
	u := newUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Request-Cost", "3")
		w.Header().Set("Etag", `"e"`)
		w.Header().Set("Ephemeral-Error", "forged")
		w.WriteHeader(http.StatusTeapot)
	})
	s, _ := connected(t, u, func(c *connection.Connection) {
		c.RequestHeaders, c.ResponseHeaders = []string{"x-trace"}, []string{"x-request-cost"}
	})
	req, err := http.NewRequest(http.MethodGet, "http://broker/connections/api/x", nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range []string{"Authorization", "Cookie", "X-Forwarded-For", "X-Http-Method-Override", "X-Other", "Accept", "X-Trace", "Proxy-Authorization", "Te", "Upgrade"} {
		req.Header.Set(h, "mine")
	}
	resp, err := s.client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	got := u.asked()[0].Header
	if got.Get("Authorization") != "Bearer "+credential || got.Get("X-Trace") != "mine" || got.Get("Accept") != "mine" {
		t.Errorf("upstream got %v", got)
	}
	for _, h := range []string{"Cookie", "X-Forwarded-For", "X-Http-Method-Override", "X-Other", "Proxy-Authorization", "Te", "Upgrade"} {
		if got.Get(h) != "" {
			t.Errorf("upstream got %s: %s", h, got.Get(h))
		}
	}
	if resp.StatusCode != http.StatusTeapot || resp.Header.Get("X-Request-Cost") != "3" || resp.Header.Get("Etag") != `"e"` || resp.Header.Get("Ephemeral-Error") != "" {
		t.Errorf("%d %v", resp.StatusCode, resp.Header)
	}
}

// wrapped are the ways in which an upstream may show a credential, each piece by piece.
func wrapped(secret string) map[string]string {
	mixed := func(f func(i int, c byte) string) string {
		var b strings.Builder
		for i := range len(secret) {
			b.WriteString(f(i, secret[i]))
		}
		return b.String()
	}
	mime := base64.StdEncoding.EncodeToString([]byte(strings.Repeat("x", 50) + "Authorization: Bearer " + secret))
	return map[string]string{
		"plain": "a " + secret + " b", "base64": base64.StdEncoding.EncodeToString([]byte("Bearer " + secret)), "base64url": base64.RawURLEncoding.EncodeToString([]byte("u:" + secret)),
		"hex": hex.EncodeToString([]byte(secret)), "URL": url.QueryEscape(secret), "path": url.PathEscape(secret),
		"every byte URL encoded": mixed(func(_ int, c byte) string { return fmt.Sprintf("%%%02x", c) }),
		"JSON": `{"k":"` + mixed(func(i int, c byte) string {
			return map[bool]string{true: fmt.Sprintf(`\u%04x`, c), false: string(c)}[i%2 == 0]
		}) + `"}`,
		"JSON slash": `{"k":"` + strings.ReplaceAll(secret, "/", `\/`) + `"}`,
		"HTML":       html.EscapeString(mixed(func(_ int, c byte) string { return string(c) })) + mixed(func(_ int, c byte) string { return fmt.Sprintf("&#%d;", c) }),
		"lines":      mime[:76] + "\r\n" + mime[76:], "UTF-16": mixed(func(_ int, c byte) string { return string(c) + "\x00" }), "spaced": mixed(func(_ int, c byte) string { return string(c) + " " }),
		"JSON of URL": `{"k":"` + strings.ReplaceAll(mixed(func(_ int, c byte) string { return fmt.Sprintf("%%%02X", c) }), "%", `\u0025`) + `"}`,
	}
}

// reads tells whether somebody who undoes the wrapping of a text finds the secret in it.
func reads(text, secret string) bool {
	seen := []string{text}
	for range 2 {
		for _, s := range seen {
			seen = append(seen, html.UnescapeString(s), strings.NewReplacer(" ", "", "\x00", "", "\r\n", "", "\n", "").Replace(s))
			if u, err := url.QueryUnescape(strings.ReplaceAll(s, "+", "%2B")); err == nil {
				seen = append(seen, u)
			}
			var doc map[string]string
			if json.Unmarshal([]byte(s), &doc) == nil {
				seen = append(seen, doc["k"])
			}
		}
	}
	for _, s := range seen {
		if strings.Contains(s, secret) || strings.Contains(s, hex.EncodeToString([]byte(secret))) || strings.Contains(s, base64.StdEncoding.EncodeToString([]byte(secret))[:len(secret)-4]) {
			return true
		}
		for _, e := range []*base64.Encoding{base64.StdEncoding, base64.RawURLEncoding} {
			if b, err := e.DecodeString(s); err == nil && strings.Contains(string(b), secret) {
				return true
			}
		}
	}
	return false
}

// TestTheCredentialStaysOutside lets an upstream send the credential back in every wrapping, one byte a chunk, as body, as
// header and as error.
func TestTheCredentialStaysOutside(t *testing.T) {
	for name, text := range wrapped(credential) {
		if !reads(text, credential) {
			t.Fatalf("%s: the test's own reader does not see it", name)
		}
		for _, status := range []int{200, 401, 500} {
			u := newUpstream(t, func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Content-Type", "text/plain")
				if !strings.ContainsAny(text, "\r\n\x00") {
					w.Header().Set("Etag", text)
					w.Header().Set("X-Mine", text)
				}
				w.WriteHeader(status)
				for i := range len(text) {
					_, _ = io.WriteString(w, text[i:i+1])
					w.(http.Flusher).Flush()
				}
			})
			s, p := connected(t, u, func(c *connection.Connection) { c.ResponseHeaders = []string{"X-Mine"} })
			got := s.get("/connections/api/x")
			if got.err != nil || got.status != status && got.code() != "response_withheld" {
				t.Errorf("%s: %+v", name, got)
			}
			events, err := json.Marshal(s.calls())
			if err != nil {
				t.Fatal(err)
			}
			for _, shown := range []string{got.body, got.header.Get("Etag"), got.header.Get("X-Mine"), string(events), p.log.String()} {
				if reads(shown, credential) {
					t.Errorf("%s, %d: the credential is shown: %q", name, status, shown)
				}
			}
		}
	}
}

func TestConnectionPassesInnocentBytes(t *testing.T) {
	blob := bytes.Repeat([]byte{0, 1, 2, '%', '&', '\\', '"', 0xff, 'm', 'a'}, 10_000)
	u := newUpstream(t, func(w http.ResponseWriter, r *http.Request) { _, _ = w.Write(blob) })
	s, _ := connected(t, u, nil)
	got := s.get("/connections/api/x")
	if got.status != 200 || got.body != string(blob) || got.header.Get("Content-Type") == "" {
		t.Errorf("status %d, %d bytes, type %q", got.status, len(got.body), got.header.Get("Content-Type"))
	}
	if head := s.send(t.Context(), http.MethodHead, "/connections/api/x", ""); head.status != 200 || head.body != "" {
		t.Errorf("HEAD: %+v", head)
	}
}

func TestConnectionRedirects(t *testing.T) {
	elsewhere := newUpstream(t, echo)
	var u *upstream
	u = newUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		to := map[string]string{
			"/v1/a/inside": "/v1/a/target", "/v1/a/relative": "target?x=1", "/v1/a/absolute": u.URL + "/v1/a/target", "/v1/a/host": elsewhere.URL + "/v1/a/target",
			"/v1/a/path": "/v1/b/target", "/v1/a/above": "/admin", "/v1/a/dots": "/v1/a/../b", "/v1/a/encoded": "/v1/a/%2e%2e/b", "/v1/a/scheme": "https://" + u.Listener.Addr().String() + "/v1/a/target",
			"/v1/a/user": "http://x@" + u.Listener.Addr().String() + "/v1/a/target", "/v1/a/loop": "/v1/a/loop", "/v1/a/file": "file:///etc/passwd", "/v1/a/slashes": "//evil.example/v1/a/target",
		}[r.URL.Path]
		if to == "" {
			echo(w, r)
			return
		}
		http.Redirect(w, r, to, http.StatusFound)
	})
	s, _ := connected(t, u, func(c *connection.Connection) {
		c.Paths, c.Methods = []string{"/a/**"}, []string{"GET", "POST"}
	})
	for path, want := range map[string]string{
		"inside": "GET /v1/a/target", "relative": "GET /v1/a/target?x=1", "absolute": "GET /v1/a/target",
		"host": "", "path": "", "above": "", "dots": "", "encoded": "", "scheme": "", "user": "", "loop": "", "file": "", "slashes": "",
	} {
		got := s.get("/connections/api/a/" + path)
		if want != "" && (got.status != 200 || got.body != want) || want == "" && got.code() != "redirect_not_allowed" {
			t.Errorf("%s: %+v", path, got)
		}
	}
	if len(elsewhere.asked()) != 0 {
		t.Error("another host was asked")
	}
	for _, r := range u.asked() {
		if r.Header.Get("Authorization") != "Bearer "+credential {
			t.Errorf("%s: without the credential", r.URL)
		}
	}
	// What changes something is not sent twice: the guest sees where to.
	got := s.raw1(t, http.MethodPost, "/connections/api/a/inside")
	if got.status != http.StatusFound || got.header.Get("Location") != "/connections/api/a/target" {
		t.Errorf("POST: %+v", got)
	}
}
