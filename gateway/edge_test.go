package gateway

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/run"
)

func TestCatalogue(t *testing.T) {
	seen := map[Code]bool{}
	for _, e := range Catalogue {
		if seen[e.Code] {
			t.Errorf("%s is there twice", e.Code)
		}
		seen[e.Code] = true
		if http.StatusText(e.Status) == "" || e.Status < 400 || e.Title == "" || e.Remediation == "" || !strings.HasSuffix(e.Remediation, ".") {
			t.Errorf("incomplete: %+v", e)
		}
	}
}

// member sends with a member's key.
func (s *served) member(t *testing.T, method, path, body string, header ...string) answer {
	t.Helper()
	return s.do(t, method, path, body, append([]string{"Authorization", "Bearer " + memberSecret}, header...)...)
}

func TestErrorsOfTheStore(t *testing.T) {
	tests := []struct {
		err    error
		code   Code
		status int
	}{
		{run.ErrUnauthenticated, CodeUnauthenticated, 401},
		{run.ErrIdempotencyConflict, CodeIdempotencyConflict, 422},
		{run.ErrInsufficientFunds, CodeInsufficientFunds, 402},
		{run.ErrBudget, CodeBudgetTooSmall, 402},
		{run.ErrQueueFull, CodeQueueFull, 429},
		{run.ErrUnavailable, CodeUnavailable, 503},
		{run.ErrStorageFull, CodeStorageFull, 503},
		{context.DeadlineExceeded, CodeUnavailable, 503},
		{errors.New("secret detail"), CodeInternal, 500},
	}
	for err, code := range map[error]Code{run.ErrNotFound: CodeNotFound, run.ErrState: CodeConflict, run.ErrExists: CodeConflict, run.ErrRange: CodeInvalidRequest} {
		if p := toProblem(fmt.Errorf("at 10.0.0.1: %w", err)); p.Code != code || strings.Contains(p.Detail, "10.0.0.1") {
			t.Errorf("%v: %+v", err, p)
		}
	}
	var fail error
	store := &fakeStore{admit: func(run.Admission) (run.Run, bool, error) { return run.Run{}, false, fail }}
	s := serve(t, Config{}, Deps{Store: store})
	for _, tt := range tests {
		t.Run(tt.err.Error(), func(t *testing.T) {
			fail = fmt.Errorf("admit at 10.0.0.1: %w", tt.err)
			a := s.member(t, "POST", "/v1/runs", `{"prompt":"x"}`)
			if p := a.problem(t); p.Code != tt.code || p.Status != tt.status {
				t.Errorf("%+v", p)
			}
			if strings.Contains(a.body, "10.0.0.1") || strings.Contains(a.body, "secret detail") {
				t.Errorf("the inside shows: %s", a.body)
			}
			if tt.status >= 500 && !strings.Contains(s.log.String(), tt.err.Error()) {
				t.Error("the cause is not in the log")
			}
		})
	}
}

// Whatever the store's client saw of a full disk, clients are told of the disk.
func TestFullDiskIsNamed(t *testing.T) {
	store := &fakeStore{
		full: run.ErrStorageFull,
		admit: func(run.Admission) (run.Run, bool, error) {
			return run.Run{}, false, fmt.Errorf("%w: NOREPLICAS", run.ErrUnavailable)
		},
	}
	s := serve(t, Config{}, Deps{Store: store})
	a := s.member(t, "POST", "/v1/runs", `{"prompt":"x"}`)
	if p := a.problem(t); p.Code != CodeStorageFull || p.Status != 503 || !strings.Contains(p.Remediation, "EPHEMERAL_DATA_DIR") {
		t.Errorf("%+v", p)
	}
	if a.Header.Get("Retry-After") == "" {
		t.Error("no Retry-After")
	}
}

func TestRefusals(t *testing.T) {
	store := &fakeStore{admit: func(run.Admission) (run.Run, bool, error) { panic("boom canary") }}
	s := serve(t, Config{BodyLimit: 64 << 10}, Deps{Store: store})
	auth := []string{"Authorization", "Bearer " + memberSecret}
	tests := map[string]struct {
		method, path, body string
		header             []string
		code               Code
		field              string
	}{
		"unknown route":         {"GET", "/v2/runs", "", nil, CodeNotFound, ""},
		"nowhere":               {"GET", "/nowhere", "", nil, CodeNotFound, ""},
		"trailing slash":        {"GET", "/v1/runs/", "", auth, CodeNotFound, ""},
		"other case":            {"GET", "/V1/runs", "", auth, CodeNotFound, ""},
		"script in the address": {"GET", "/<script>alert(1)</script>", "", nil, CodeNotFound, ""},
		"wrong method":          {"PUT", "/v1/runs", "", nil, CodeMethodNotAllowed, ""},
		"wrong method on id":    {"PATCH", "/v1/runs/run_1", "", nil, CodeMethodNotAllowed, ""},
		"unknown method":        {"BREW", "/v1/runs", "", nil, CodeMethodNotAllowed, ""},
		"metrics are elsewhere": {"GET", "/metrics", "", nil, CodeNotFound, ""},
		"no key":                {"POST", "/v1/runs", `{"prompt":"x"}`, nil, CodeUnauthenticated, ""},
		"wrong key":             {"POST", "/v1/runs", `{"prompt":"x"}`, []string{"Authorization", "Bearer eph_wrong"}, CodeUnauthenticated, ""},
		"basic":                 {"POST", "/v1/runs", `{"prompt":"x"}`, []string{"Authorization", "Basic eph_wrong"}, CodeUnauthenticated, ""},
		"admin key for runs":    {"POST", "/v1/runs", `{"prompt":"x"}`, []string{"Authorization", "Bearer " + adminSecret}, CodeForbidden, ""},
		"member key for orgs":   {"GET", "/v1/orgs", "", auth, CodeForbidden, ""},
		"no run id":             {"GET", "/v1/runs/nonsense", "", auth, CodeNotFound, ""},
		"escaped run id":        {"GET", "/v1/runs/run%5f0000", "", auth, CodeNotFound, ""},
		"form":                  {"POST", "/v1/runs", "prompt=x", append([]string{"Content-Type", "application/x-www-form-urlencoded"}, auth...), CodeUnsupportedMediaType, "Content-Type"},
		"multipart":             {"POST", "/v1/runs", "x", append([]string{"Content-Type", "multipart/form-data; boundary=x"}, auth...), CodeUnsupportedMediaType, "Content-Type"},
		"problem as body":       {"POST", "/v1/runs", "{}", append([]string{"Content-Type", "application/problem+json"}, auth...), CodeUnsupportedMediaType, "Content-Type"},
		"latin-1":               {"POST", "/v1/runs", "{}", append([]string{"Content-Type", "application/json; charset=latin1"}, auth...), CodeUnsupportedMediaType, "Content-Type"},
		"gzip":                  {"POST", "/v1/runs", "\x1f\x8b", append([]string{"Content-Encoding", "gzip"}, auth...), CodeUnsupportedMediaType, "Content-Encoding"},
		"empty body":            {"POST", "/v1/runs", "", append([]string{"Content-Type", "application/json"}, auth...), CodeInvalidJSON, ""},
		"bad idempotency key":   {"POST", "/v1/runs", `{"prompt":"x"}`, append([]string{"Idempotency-Key", `"a b"`}, auth...), CodeInvalidIdempotencyKey, "Idempotency-Key"},
		"large body":            {"POST", "/v1/runs", strings.Repeat("x", 64<<10+1), auth, CodeBodyTooLarge, ""},
		"panic":                 {"POST", "/v1/runs", `{"prompt":"x"}`, auth, CodeInternal, ""},
		"bad limit":             {"GET", "/v1/runs?limit=101", "", auth, CodeInvalidParameter, "limit"},
		"bad state":             {"GET", "/v1/runs?state=done", "", auth, CodeInvalidParameter, "state"},
		"bad cursor":            {"GET", "/v1/runs?cursor=a%0ab", "", auth, CodeInvalidParameter, "cursor"},
		"unknown parameter":     {"GET", "/v1/runs?stat=queued", "", auth, CodeInvalidParameter, "stat"},
		"bad event number":      {"GET", "/v1/runs/" + string(testRun) + "/events", "", append([]string{"Last-Event-ID", "x"}, auth...), CodeInvalidParameter, "Last-Event-ID"},
		"bad after":             {"GET", "/v1/runs/" + string(testRun) + "/events?after=-1", "", auth, CodeInvalidParameter, "after"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			a := s.do(t, tt.method, tt.path, tt.body, tt.header...)
			p := a.problem(t)
			if p.Code != tt.code {
				t.Errorf("%+v", p)
			}
			if tt.field != "" && (len(p.Errors) != 1 || p.Errors[0].Field != tt.field) {
				t.Errorf("fields %+v", p.Errors)
			}
			if strings.Contains(a.body, "canary") || strings.Contains(a.body, "<script") {
				t.Errorf("the answer repeats what it must not: %s", a.body)
			}
			if (a.Header.Get("Allow") != "") != (tt.code == CodeMethodNotAllowed) {
				t.Errorf("Allow %q", a.Header.Get("Allow"))
			}
			if (a.Header.Get("WWW-Authenticate") != "") != (tt.code == CodeUnauthenticated) {
				t.Errorf("WWW-Authenticate %q", a.Header.Get("WWW-Authenticate"))
			}
			if a.Header.Get("Cache-Control") != "no-store" || a.Header.Get("X-Content-Type-Options") != "nosniff" {
				t.Errorf("headers %v", a.Header)
			}
		})
	}
	if !strings.Contains(s.log.String(), "boom canary") {
		t.Error("the panic is not in the log")
	}
	if strings.Contains(s.log.String(), memberSecret) || strings.Contains(s.log.String(), adminSecret) || strings.Contains(s.log.String(), "eph_wrong") {
		t.Error("a key is in the log")
	}
}

func TestAllowNamesTheMethods(t *testing.T) {
	s := serve(t, Config{}, Deps{Store: &fakeStore{}})
	a := s.do(t, "PUT", "/v1/runs/"+string(testRun), "")
	got := map[string]bool{}
	for m := range strings.SplitSeq(a.Header.Get("Allow"), ",") {
		got[strings.TrimSpace(m)] = true
	}
	if len(got) != 3 || !got["GET"] || !got["HEAD"] || !got["DELETE"] {
		t.Errorf("Allow %q", a.Header.Get("Allow"))
	}
}

// exchange writes raw bytes to a new connection and reads to its end or to the deadline.
func exchange(t *testing.T, addr, raw string) string {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(c, raw); err != nil {
		t.Fatal(err)
	}
	b, _ := io.ReadAll(c) // a reset after the answer is the answer's end too
	return string(b)
}

// answers parses the responses in raw.
func answers(t *testing.T, raw string) []answer {
	t.Helper()
	var all []answer
	r := bufio.NewReader(strings.NewReader(raw))
	for {
		if _, err := r.Peek(1); err != nil {
			return all
		}
		resp, err := http.ReadResponse(r, nil)
		if err != nil {
			t.Fatalf("%v in %q", err, raw)
		}
		all = append(all, read(t, resp))
	}
}

func TestRawRequests(t *testing.T) {
	admitted := 0
	store := &fakeStore{admit: func(a run.Admission) (run.Run, bool, error) {
		admitted++
		return run.Run{ID: testRun, State: run.Queued}, false, nil
	}}
	s := serve(t, Config{BodyLimit: 16 << 10, HeaderLimit: 4096, ReadTimeout: 300 * time.Millisecond}, Deps{Store: store})
	head := "POST /v1/runs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + memberSecret + "\r\nContent-Type: application/json\r\n"
	stop := "GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
	body := `{"prompt":"x"}`
	smuggled := "GET /smuggled HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
	tests := map[string]struct {
		raw      string
		statuses []int
	}{
		"chunked":                       {head + "Transfer-Encoding: chunked\r\n\r\n7\r\n{\"promp\r\n7\r\nt\":\"x\"}\r\n0\r\n\r\n" + stop, []int{202, 200}},
		"chunked too large":             {head + "Transfer-Encoding: chunked\r\n\r\n" + strings.Repeat("1000\r\n"+strings.Repeat("x", 4096)+"\r\n", 5) + "0\r\n\r\n" + stop, []int{413, 200}},
		"length too large":              {head + "Content-Length: 20000\r\n\r\n" + strings.Repeat("x", 20000) + stop, []int{413, 200}},
		"far too large":                 {head + "Content-Length: 40000\r\n\r\n" + strings.Repeat("x", 40000), []int{413}},
		"expect 100":                    {head + "Expect: 100-continue\r\nContent-Length: 14\r\n\r\n" + body + stop, []int{100, 202, 200}},
		"refused body is no request":    {"POST /v1/runs HTTP/1.1\r\nHost: x\r\nContent-Length: " + fmt.Sprint(len(smuggled)) + "\r\n\r\n" + smuggled + stop, []int{401, 200}},
		"refused chunks are no request": {"POST /none HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + fmt.Sprintf("%x\r\n%s\r\n0\r\n\r\n", len(smuggled), smuggled) + stop, []int{404, 200}},
		"body of GET is no request":     {"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: " + fmt.Sprint(len(smuggled)) + "\r\n\r\n" + smuggled + stop, []int{200, 200}},
		"large header":                  {"GET /healthz HTTP/1.1\r\nHost: x\r\nX: " + strings.Repeat("x", 5000) + "\r\n\r\n", []int{431}},
		"not HTTP":                      {"\x16\x03\x01\x02\x00\x01\r\n\r\n", []int{400}},
		"body that never comes":         {head + "Content-Length: 100\r\n\r\n" + body, []int{408}},
		"chunk that never comes":        {head + "Transfer-Encoding: chunked\r\n\r\n100\r\n{", []int{408}},
		"header that never ends":        {"GET /healthz HTTP/1.1\r\nHost: x\r\nX: y", []int{408}},
		"unknown method":                {"BREW / HTTP/1.1\r\nHost: x\r\n\r\n", []int{405}},
		"pipelined":                     {head + "Content-Length: 14\r\n\r\n" + body + head + "Content-Length: 14\r\n\r\n" + body + stop, []int{202, 202, 200}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			before, wanted := admitted, 0
			got := answers(t, exchange(t, s.addr, tt.raw))
			var statuses []int
			for _, a := range got {
				statuses = append(statuses, a.StatusCode)
				if a.StatusCode >= 400 {
					a.problem(t)
				}
			}
			for _, status := range tt.statuses {
				if status == 202 {
					wanted++
				}
			}
			if fmt.Sprint(statuses) != fmt.Sprint(tt.statuses) {
				t.Errorf("statuses %v, want %v", statuses, tt.statuses)
			}
			if admitted-before != wanted {
				t.Errorf("%d admitted, want %d", admitted-before, wanted)
			}
		})
	}
}

func TestRequestID(t *testing.T) {
	s := serve(t, Config{}, Deps{Store: &fakeStore{}})
	if got := s.do(t, "GET", "/healthz", "", "X-Request-Id", "mine-1").Header.Get("X-Request-Id"); got != "mine-1" {
		t.Errorf("kept %q", got)
	}
	seen := map[string]bool{}
	for _, bad := range []string{"", "a b", strings.Repeat("x", 65), `"><`} {
		got := s.do(t, "GET", "/healthz", "", "X-Request-Id", bad).Header.Get("X-Request-Id")
		if got == bad || len(got) < 16 || seen[got] {
			t.Errorf("%q for %q", got, bad)
		}
		seen[got] = true
	}
	if !strings.Contains(s.log.String(), `"request_id":"mine-1"`) {
		t.Error("the id is not in the log")
	}
}

func TestHealth(t *testing.T) {
	var pingErr, readyErr error
	store := &fakeStore{ping: func() error { return pingErr }}
	s := serve(t, Config{}, Deps{Store: store, Ready: func() error { return readyErr }})
	if a := s.do(t, "GET", "/healthz", ""); a.StatusCode != 200 || a.body != `{"status":"ok"}` {
		t.Errorf("%d %s", a.StatusCode, a.body)
	}
	if a := s.do(t, "GET", "/readyz", ""); a.StatusCode != 200 || a.body != `{"status":"ready"}` {
		t.Errorf("%d %s", a.StatusCode, a.body)
	}
	if a := s.do(t, "HEAD", "/healthz", ""); a.StatusCode != 200 || a.body != "" {
		t.Errorf("%d %q", a.StatusCode, a.body)
	}
	for part, set := range map[string]func(){
		"store": func() { pingErr, readyErr = errors.New("inside canary"), nil },
		"runs":  func() { pingErr, readyErr = nil, errors.New("inside canary") },
	} {
		set()
		a := s.do(t, "GET", "/readyz", "")
		if p := a.problem(t); p.Code != CodeNotReady || !strings.Contains(p.Detail, part) || strings.Contains(a.body, "canary") {
			t.Errorf("%+v", p)
		}
		resp, err := http.Get(s.adminURL + "/readyz")
		if err != nil {
			t.Fatal(err)
		}
		if p := read(t, resp).problem(t); !strings.Contains(p.Detail, "inside canary") {
			t.Errorf("the operator is not told: %+v", p)
		}
	}
}

func TestMetrics(t *testing.T) {
	s := serve(t, Config{}, Deps{Store: &fakeStore{}})
	s.do(t, "GET", "/v1/runs/secret-path-canary", "")
	s.do(t, "BREW", "/method-canary", "")
	s.do(t, "GET", "/healthz", "")
	resp, err := http.Get(s.adminURL + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	a := read(t, resp)
	for _, want := range []string{
		`ephemeral_gateway_requests_total{method="GET",route="/v1/runs/:id",status="401"} 1`,
		`ephemeral_gateway_requests_total{method="any",route="none",status="405"} 1`,
		`ephemeral_gateway_refusals_total{code="unauthenticated"} 1`, `ephemeral_gateway_readers 0`,
	} {
		if !strings.Contains(a.body, want) {
			t.Errorf("no %s in\n%s", want, a.body)
		}
	}
	if strings.Contains(a.body, "canary") || strings.Contains(a.body, "BREW") {
		t.Error("metrics hold what clients chose")
	}
	if resp, err := http.Get(s.adminURL + "/v1/runs"); err != nil || read(t, resp).problem(t).Code != CodeNotFound {
		t.Errorf("the admin listener serves the API: %v", err)
	}
}

func TestDefaults(t *testing.T) {
	t.Setenv("EPHEMERAL_LISTEN", "192.0.2.1:1") // only the caller reads the environment
	c, err := Config{BodyLimit: 5}.withDefaults()
	if err != nil || c.Listen != "127.0.0.1:8080" || c.BodyLimit != 5 || c.Heartbeat != 15*time.Second {
		t.Errorf("%+v, %v", c, err)
	}
}

func TestBodiesInMemoryAreBounded(t *testing.T) {
	store := &fakeStore{admit: func(run.Admission) (run.Run, bool, error) {
		return run.Run{ID: testRun, State: run.Queued}, false, nil
	}}
	s := serve(t, Config{BodyMemory: 100, StoreTimeout: 200 * time.Millisecond}, Deps{Store: store})
	slow, err := net.Dial("tcp", s.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer slow.Close()
	head := "POST /v1/runs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + memberSecret + "\r\nContent-Type: application/json\r\nConnection: close\r\n"
	body := `{"prompt":"` + strings.Repeat("x", 77) + `"}`
	if _, err := fmt.Fprintf(slow, "%sTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n", head); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the memory taken", func() bool { return !s.bodies.TryAcquire(100) || func() bool { s.bodies.Release(100); return false }() })
	refused := answers(t, exchange(t, s.addr, fmt.Sprintf("%sContent-Length: %d\r\n\r\n%s", head, len(body), body)))
	if len(refused) != 1 || refused[0].problem(t).Code != CodeUnavailable {
		t.Errorf("while the memory is taken: %+v", refused)
	}
	if _, err := fmt.Fprintf(slow, "%x\r\n%s\r\n0\r\n\r\n", len(body)-1, body[1:]); err != nil {
		t.Fatal(err)
	}
	if a := answers(t, readAll(slow)); len(a) != 1 || a[0].StatusCode != 202 {
		t.Errorf("the slow one: %+v", a)
	}
	if a := answers(t, exchange(t, s.addr, fmt.Sprintf("%sContent-Length: %d\r\n\r\n%s", head, len(body), body))); len(a) != 1 || a[0].StatusCode != 202 {
		t.Errorf("afterwards: %+v", a)
	}
}
