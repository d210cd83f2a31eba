package broker_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/ephemeral-run/ephemeral/broker"
	"github.com/ephemeral-run/ephemeral/broker/openaitest"
	"github.com/ephemeral-run/ephemeral/broker/postgres/postgrestest"
	"github.com/ephemeral-run/ephemeral/broker/web"
	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/connection"
)

// webSession is a run with or without the web, at a double of the web and of a search endpoint.
func webSession(t *testing.T, allowed bool, hold run.Micros) (*session, *memoryLedger, *upstream) {
	t.Helper()
	u := newUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/search":
			_, _ = io.WriteString(w, `{"results": [{"title": "Hit", "url": "https://a.example/", "content": "c"}]}`)
		case "/away":
			http.Redirect(w, r, "http://169.254.169.254/", http.StatusFound)
		default:
			w.Header().Set("Content-Type", "text/html")
			_, _ = io.WriteString(w, "<title>T</title><p>Hello")
		}
	})
	var port uint16
	if _, err := fmt.Sscanf(u.URL[strings.LastIndex(u.URL, ":")+1:], "%d", &port); err != nil {
		t.Fatal(err)
	}
	p := newProvider(t, openaitest.New(t, testKey, good), func(c *broker.Config) {
		c.Web = web.Config{Allow: []string{"127.0.0.1/32"}, Ports: []uint16{port}, SearchURL: u.URL + "/search"}
		c.PriceFile = priceFile(t, "calls: {web_fetch: 100, web_search: 5000}")
	})
	l := newLedger(hold)
	return startSession(t, p.Broker, l, &run.Spec{Prompt: "p", Model: "openai/double", Web: allowed}), l, u
}

func (s *session) postTo(path, body string) reply {
	return s.send(s.t.Context(), http.MethodPost, path, body)
}

func TestWebRoutes(t *testing.T) {
	s, l, u := webSession(t, true, 100_000)
	got := s.postTo("/web/fetch", `{"url": "`+u.URL+`/page?q=personal"}`)
	var page web.Page
	if err := json.Unmarshal([]byte(got.body), &page); err != nil || got.status != 200 || page.Text != "Hello" || page.Status != 200 {
		t.Errorf("%+v, %v", got, err)
	}
	if got := s.postTo("/web/search", `{"query": "x"}`); got.status != 200 || got.body != `{"query":"x","results":[{"title":"Hit","url":"https://a.example/","snippet":"c"}]}` {
		t.Errorf("%+v", got)
	}
	for body, code := range map[string]string{
		`{"url": "http://169.254.169.254/"}`: "address_not_allowed", `{"url": "` + u.URL + `/away"}`: "address_not_allowed", `{"url": 1}`: "invalid_request", `{"url": "x", "y": 1}`: "invalid_request",
		`{"url": "` + u.URL + `", "format": "pdf"}`: "invalid_request", `{"url": "` + u.URL + `"} {}`: "invalid_request", ``: "invalid_request",
	} {
		if got := s.postTo("/web/fetch", body); got.code() != code {
			t.Errorf("%s: %+v", body, got)
		}
	}
	for _, body := range []string{`{"query": ""}`, `{"query": "x", "count": 0}`, `{"query": "x", "count": 21}`, `{"query": "` + strings.Repeat("x", 1001) + `"}`} {
		if got := s.postTo("/web/search", body); got.code() != "invalid_request" {
			t.Errorf("%s: %+v", body, got)
		}
	}
	s.stop()
	calls := s.calls()
	if err := l.check(); err != nil || len(calls) != 3 || l.total() != 5200 {
		t.Fatalf("charged %d, events %+v: %v", l.total(), calls, err)
	}
	if c := calls[0]; c.Kind != "fetch" || c.Charged != 100 || c.Target != u.URL+"/page" || c.Status != 200 {
		t.Errorf("%+v", c)
	}
	if c := calls[1]; c.Kind != "search" || c.Charged != 5000 || c.Target != "x" {
		t.Errorf("%+v", c)
	}
	if s.refused("address_not_allowed") != 2 {
		t.Error("forbidden addresses are no events")
	}
}

func TestWithoutWebThereAreNoRoutes(t *testing.T) {
	s, l, u := webSession(t, false, 100_000)
	for _, path := range []string{"/web/fetch", "/web/search", "/web/", "/web"} {
		if got := s.postTo(path, `{"url": "`+u.URL+`", "query": "x"}`); got.status != 404 || got.code() != "not_found" {
			t.Errorf("%s: %+v", path, got)
		}
	}
	if len(u.asked()) != 0 || len(l.asked) != 0 {
		t.Error("something was asked")
	}
}

func TestWebBudget(t *testing.T) {
	s, l, u := webSession(t, true, 150)
	if got := s.postTo("/web/fetch", `{"url": "`+u.URL+`/"}`); got.status != 200 {
		t.Errorf("first: %+v", got)
	}
	if got := s.postTo("/web/fetch", `{"url": "`+u.URL+`/"}`); got.status != 402 || got.code() != "budget_exhausted" {
		t.Errorf("second: %+v", got)
	}
	if len(u.asked()) != 1 || l.total() != 100 {
		t.Errorf("asked %d times, charged %d", len(u.asked()), l.total())
	}
}

// TestSQL asks a real PostgreSQL through the broker.
func TestSQL(t *testing.T) {
	db := postgrestest.Start(t, credential)
	db.Exec(t, "shop", "CREATE TABLE orders (id int, note text)", "INSERT INTO orders VALUES (1, 'a'), (2, '"+credential+"'), (3, 'c')", "GRANT SELECT ON orders TO reader")
	store := newConnections(t)
	store.put(t, "o", connection.Connection{Name: "db", Kind: connection.Postgres, BaseURL: "postgres://reader@127.0.0.1:" + db.Port + "/shop?sslmode=disable",
		Auth: connection.Auth{Type: connection.AuthBasic}, MaxRows: 2, TimeoutSeconds: 2}, credential)
	p := newProvider(t, openaitest.New(t, testKey, good), func(c *broker.Config) {
		c.Connections, c.Sealing, c.ConnectionAllow, c.PriceFile = store, store.ring, []string{"127.0.0.0/8"}, priceFile(t, "calls: {sql: 10}")
	})
	l := newLedger(1000)
	s := startSession(t, p.Broker, l, &run.Spec{Prompt: "p", Connections: []string{"db"}})
	ask := func(sql string) reply {
		body, err := json.Marshal(map[string]any{"sql": sql})
		if err != nil {
			t.Fatal(err)
		}
		return s.postTo("/connections/db/sql", string(body))
	}
	if got := ask("select * from orders order by id"); got.status != 200 ||
		got.body != `{"columns":[{"name":"id","type":"int4"},{"name":"note","type":"text"}],"rows":[[1,"a"],[2,"[redacted]"]],"row_count":2,"truncated":true}` {
		t.Errorf("%+v", got)
	}
	for sql, code := range map[string]string{
		"delete from orders": "sql_not_allowed", "select nothing": "sql_error", "select pg_sleep(5)": "sql_not_allowed", "select 1; select 2": "sql_not_allowed",
		"select count(*) from generate_series(1, 10000000) a, generate_series(1, 10000000) b": "upstream_timeout", "select '" + credential + "'::int": "sql_error",
	} {
		if got := ask(sql); got.code() != code || strings.Contains(got.body, "MARKER") {
			t.Errorf("%s: %+v", sql, got)
		}
	}
	if got := s.get("/connections/db/sql"); got.status != 405 {
		t.Errorf("GET: %+v", got)
	}
	if got := s.postTo("/connections/db/other", "{}"); got.status != 404 {
		t.Errorf("other path: %+v", got)
	}
	s.stop()
	if err := l.check(); err != nil || l.total() != 40 {
		t.Errorf("charged %d: %v", l.total(), err)
	}
	if text := fmt.Sprintf("%+v %s", s.timeline(), p.log.String()); strings.Contains(text, "MARKER") {
		t.Errorf("the credential is shown: %s", text)
	}
}
