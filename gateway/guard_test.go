package gateway

import (
	"bytes"
	"compress/gzip"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/run"
)

func asProblem(err error, p **client.Problem) bool { return errors.As(err, p) }

func TestRateLimitPerKey(t *testing.T) {
	a := newLive(t, Config{RateLimit: 5, RateBurst: 10})
	m, other := a.newMember("o", 0), a.newMember("p", 0)
	second := serve(t, Config{RateLimit: 5, RateBurst: 10}, Deps{Store: a.store})
	gateways := []*served{a.served, second}
	get := func(i int, m member) answer {
		return gateways[i%2].do(t, "GET", "/v1/account", "", "Authorization", "Bearer "+m.secret)
	}
	allowed, began := 0, time.Now()
	var refused answer
	for i := range 40 {
		r := get(i, m)
		if policy := r.Header.Get("RateLimit-Policy"); policy != `"requests";q=10;w=2` {
			t.Fatalf("RateLimit-Policy %q", policy)
		}
		if !strings.HasPrefix(r.Header.Get("RateLimit"), `"requests";r=`) {
			t.Fatalf("RateLimit %q", r.Header.Get("RateLimit"))
		}
		if r.StatusCode == 200 {
			allowed++
			continue
		}
		refused = r
	}
	most := 10 + 5*time.Since(began).Seconds() + 1
	if allowed < 10 || float64(allowed) > most {
		t.Errorf("%d allowed in %v, want 10 to %.1f", allowed, time.Since(began), most)
	}
	p := refused.problem(t)
	wait, err := strconv.Atoi(refused.Header.Get("Retry-After"))
	if p.Code != CodeRateLimited || err != nil || wait != 1 || !strings.Contains(refused.Header.Get("RateLimit"), ";r=0;t=1") {
		t.Errorf("%+v, %v", p, refused.Header)
	}
	if r := get(0, other); r.StatusCode != 200 {
		t.Errorf("another key got %d", r.StatusCode)
	}
	time.Sleep(time.Duration(wait) * time.Second)
	if r := get(0, m); r.StatusCode != 200 {
		t.Errorf("after Retry-After: %d", r.StatusCode)
	}
	off := serve(t, Config{RateLimit: NoRateLimit}, Deps{Store: a.store})
	r := off.do(t, "GET", "/v1/account", "", "Authorization", "Bearer "+m.secret)
	if r.StatusCode != 200 || r.Header.Get("RateLimit") != "" {
		t.Errorf("without a limit: %d %v", r.StatusCode, r.Header)
	}
}

func TestCORS(t *testing.T) {
	store := &fakeStore{}
	send := func(s *served, method, origin string, header ...string) *http.Response {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), method, s.url+"/v1/runs", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Origin", origin)
		for i := 0; i < len(header); i += 2 {
			req.Header.Set(header[i], header[i+1])
		}
		transport := &http.Transport{DisableKeepAlives: true}
		resp, err := transport.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		return resp
	}
	const app = "https://app.example.com"
	ask := []string{"Access-Control-Request-Method", "POST", "Access-Control-Request-Headers", "authorization, idempotency-key"}
	for name, tt := range map[string]struct {
		origins []string
		origin  string
		want    string
	}{
		"off":          {nil, app, ""},
		"allowed":      {[]string{app, "http://localhost:3000"}, app, app},
		"not allowed":  {[]string{app}, "https://evil.example.com", ""},
		"no suffix":    {[]string{app}, app + ".evil.example.com", ""},
		"other scheme": {[]string{app}, "http://app.example.com", ""},
		"null":         {[]string{app}, "null", ""},
		"any":          {[]string{"*"}, app, "*"},
	} {
		t.Run(name, func(t *testing.T) {
			s := serve(t, Config{CORSOrigins: tt.origins}, Deps{Store: store})
			pre, real := send(s, "OPTIONS", tt.origin, ask...), send(s, "GET", tt.origin)
			for _, r := range []*http.Response{pre, real} {
				if got := r.Header.Get("Access-Control-Allow-Origin"); got != tt.want {
					t.Errorf("%s: allowed %q, want %q", r.Request.Method, got, tt.want)
				}
				if r.Header.Get("Access-Control-Allow-Credentials") != "" {
					t.Error("credentials")
				}
				if (r.Header.Get("Vary") == "Origin") != (len(tt.origins) > 0) {
					t.Errorf("Vary %q", r.Header.Get("Vary"))
				}
			}
			if ok := tt.want != ""; ok != (pre.StatusCode == 204) || ok != strings.Contains(pre.Header.Get("Access-Control-Allow-Headers"), "Idempotency-Key") ||
				ok != strings.Contains(real.Header.Get("Access-Control-Expose-Headers"), "Link") || real.StatusCode != 401 {
				t.Errorf("preflight %d %v, request %d %v", pre.StatusCode, pre.Header, real.StatusCode, real.Header)
			}
		})
	}
	for _, bad := range []string{"app.example.com", "https://app.example.com/", "ftp://x", "https://"} {
		if err := (Config{CORSOrigins: []string{bad}}).Validate(); err == nil || !strings.Contains(err.Error(), "EPHEMERAL_CORS_ORIGINS") {
			t.Errorf("%s: %v", bad, err)
		}
	}
}

// writeCertificate makes a certificate for 127.0.0.1 and returns a pool that trusts it.
func writeCertificate(t *testing.T, certFile, keyFile, name string) *x509.CertPool {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	for file, block := range map[string]*pem.Block{certFile: {Type: "CERTIFICATE", Bytes: der}, keyFile: {Type: "PRIVATE KEY", Bytes: private}} {
		if err := os.WriteFile(file, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
	return pool
}

func TestTLS(t *testing.T) {
	dir := t.TempDir()
	cert, key := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	pool := writeCertificate(t, cert, key, "first")
	s := serve(t, Config{TLSCert: cert, TLSKey: key, ReadTimeout: 300 * time.Millisecond}, Deps{Store: &fakeStore{}})
	get := func(pool *x509.CertPool, version uint16) (string, error) {
		transport := &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: pool, MaxVersion: version}}
		resp, err := (&http.Client{Transport: transport}).Get("https://" + s.addr + "/healthz")
		if err != nil {
			return "", err
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		if err != nil || string(b) != `{"status":"ok"}` {
			t.Errorf("%q, %v", b, err)
		}
		return resp.TLS.PeerCertificates[0].Subject.CommonName, nil
	}
	if name, err := get(pool, 0); name != "first" || err != nil {
		t.Fatal(name, err)
	}
	if _, err := get(pool, tls.VersionTLS11); err == nil {
		t.Error("TLS 1.1 is spoken")
	}
	if err := os.WriteFile(cert, []byte("broken"), 0o600); err != nil {
		t.Fatal(err)
	}
	time.Sleep(certificateCheck + 100*time.Millisecond)
	if name, err := get(pool, 0); name != "first" || err != nil {
		t.Errorf("with broken files: %s, %v", name, err)
	}
	renewed := writeCertificate(t, cert, key, "second")
	eventually(t, "the renewed certificate is served", func() bool { name, _ := get(renewed, 0); return name == "second" })
	silent, err := net.Dial("tcp", s.addr) // sends no handshake
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	_ = silent.SetReadDeadline(time.Now().Add(5 * time.Second))
	if _, err := silent.Read(make([]byte, 1)); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("a client without a handshake keeps its connection")
	}
	for _, bad := range []Config{{TLSCert: cert}, {TLSKey: key}} {
		if bad.Validate() == nil {
			t.Error("half a pair is accepted")
		}
	}
	missing := New(Config{TLSCert: filepath.Join(dir, "none"), TLSKey: key}, Deps{Store: &fakeStore{}})
	if err := missing.Serve(t.Context(), listen(t)); err == nil || !strings.Contains(err.Error(), "EPHEMERAL_TLS_CERT") {
		t.Error(err)
	}
}

func TestConnectionsBeyondTheLimit(t *testing.T) {
	s := serve(t, Config{MaxConnections: 3}, Deps{Store: &fakeStore{}})
	var held []net.Conn
	for range 3 {
		c, err := net.Dial("tcp", s.addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		fmt.Fprint(c, "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
		if _, err := c.Read(make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		held = append(held, c)
	}
	for range 5 {
		a := answers(t, exchange(t, s.addr, "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"))
		if len(a) != 1 || a[0].StatusCode != 503 || a[0].problem(t).Code != CodeTooManyConnections {
			t.Fatalf("%+v", a)
		}
	}
	resp, err := http.Get(s.adminURL + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	if m := read(t, resp).body; !strings.Contains(m, `ephemeral_gateway_refusals_total{code="too_many_connections"} 5`) {
		t.Error(m)
	}
	held[0].Close()
	eventually(t, "room again", func() bool {
		a := answers(t, exchange(t, s.addr, "GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"))
		return len(a) == 1 && a[0].StatusCode == 200
	})
}

func TestAbortedClientsCountAs499(t *testing.T) {
	slow := make(chan struct{})
	store := &fakeStore{
		get:     func(id run.ID) (run.Run, error) { return run.Run{ID: id, State: run.Queued}, nil },
		account: func() (run.Account, error) { <-slow; return run.Account{}, nil },
	}
	s := serve(t, Config{}, Deps{Store: store})
	head := "Host: x\r\nAuthorization: Bearer " + memberSecret + "\r\nContent-Type: application/json\r\n"
	abort := func(raw string, reset bool) {
		c, err := net.Dial("tcp", s.addr)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprint(c, raw)
		time.Sleep(100 * time.Millisecond)
		if reset {
			_ = c.(*net.TCPConn).SetLinger(0)
		}
		c.Close()
	}
	count := func() int { return strings.Count(s.log.String(), `"status":499`) }
	wants := 0
	for _, reset := range []bool{false, true} {
		for name, raw := range map[string]string{
			"in the header":        "GET /healthz HTTP/1.1\r\nHost: x",
			"in the body":          "POST /v1/runs HTTP/1.1\r\n" + head + "Content-Length: 100\r\n\r\n{",
			"in a chunked body":    "POST /v1/runs HTTP/1.1\r\n" + head + "Transfer-Encoding: chunked\r\n\r\n10\r\n{",
			"while it waits":       "GET /v1/runs/" + string(testRun) + " HTTP/1.1\r\n" + head + "Prefer: wait=60\r\n\r\n",
			"while it is answered": "GET /v1/account HTTP/1.1\r\n" + head + "\r\n",
		} {
			wants++
			abort(raw, reset)
			if strings.Contains(name, "answered") {
				slow <- struct{}{}
			}
			eventually(t, fmt.Sprintf("%s, reset %v: counted", name, reset), func() bool { return count() == wants })
		}
	}
	for _, status := range []string{`"status":400`, `"status":500`, `"status":200`} {
		if strings.Contains(s.log.String(), status) {
			t.Errorf("an aborted request has %s in the log:\n%s", status, s.log)
		}
	}
	resp, err := http.Get(s.adminURL + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	if m := read(t, resp).body; !strings.Contains(m, `status="499"`) || strings.Contains(m, `code="bad_request"`) {
		t.Error(m)
	}
	if n := s.hub.size(); n != 0 {
		t.Errorf("%d readers left", n)
	}
}

// TestSlowLoris holds many connections with requests that never end, and asks whether others are served meanwhile.
func TestSlowLoris(t *testing.T) {
	s := serve(t, Config{ReadTimeout: time.Second, MaxConnections: 300}, Deps{Store: &fakeStore{}})
	var wg sync.WaitGroup
	var cut atomic.Int64
	for i := range 200 {
		wg.Go(func() {
			c, err := net.Dial("tcp", s.addr)
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			raw := "GET /healthz HTTP/1.1\r\nHost: x\r\nX-" + strings.Repeat("a", 1000)
			if i%2 == 0 {
				raw = "POST /v1/runs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + memberSecret + "\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n" + strings.Repeat(" ", 900)
			}
			_ = c.SetDeadline(time.Now().Add(20 * time.Second))
			for at := range raw {
				if _, err := c.Write([]byte{raw[at]}); err != nil {
					cut.Add(1)
					return
				}
				time.Sleep(50 * time.Millisecond)
			}
		})
	}
	for range 20 {
		if a := s.do(t, "GET", "/healthz", ""); a.StatusCode != 200 {
			t.Errorf("others get %d", a.StatusCode)
		}
		time.Sleep(20 * time.Millisecond)
	}
	wg.Wait()
	if cut.Load() != 200 {
		t.Errorf("%d of 200 were cut off", cut.Load())
	}
}

// TestGzipBomb sends a body that would unpack to a gigabyte: it is refused unread.
func TestGzipBomb(t *testing.T) {
	var bomb bytes.Buffer
	z := gzip.NewWriter(&bomb)
	zeros := make([]byte, 1<<20)
	for range 64 {
		if _, err := z.Write(zeros); err != nil {
			t.Fatal(err)
		}
	}
	z.Close()
	s := serve(t, Config{}, Deps{Store: &fakeStore{}})
	for _, encoding := range []string{"gzip", "deflate", "br", "identity, gzip", "GZIP", "x-gzip"} {
		if p := s.member(t, "POST", "/v1/runs", bomb.String(), "Content-Encoding", encoding).problem(t); p.Code != CodeUnsupportedMediaType {
			t.Errorf("%s: %+v", encoding, p)
		}
	}
}

// TestStrictJSON refuses what two readers could understand differently.
func TestStrictJSON(t *testing.T) {
	s := serve(t, Config{}, Deps{Store: &fakeStore{}})
	for _, body := range []string{
		`{"prompt":"a","prompt":"b"}`, `{"prompt":"a","prom\u0070t":"b"}`, `{"prompt":"a"}{}`, `{"prompt":"a"} x`, `{"prompt":"a",}`, `{'prompt':'a'}`,
		`[{"prompt":"a"}]`, `"a"`, `null`, `{"prompt":"` + "\xff" + `"}`, `{"prompt":"\ud800"}`, `{"metadata":{"a":"1","a":"2"},"prompt":"x"}`,
		strings.Repeat(`{"files":[`, 20_000), "\ufeff" + `{"prompt":"a"}`, `{"prompt":"a"`,
	} {
		if p := s.member(t, "POST", "/v1/runs", body).problem(t); p.Code != CodeInvalidJSON && p.Code != CodeInvalidRequest {
			t.Errorf("%.60s: %+v", body, p)
		}
	}
}
