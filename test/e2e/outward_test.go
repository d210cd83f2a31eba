package e2e

import (
	"encoding/base64"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ephemeral-run/ephemeral/broker/postgres/postgrestest"
	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/run"
)

// The credentials that the upstreams of TestToolsReachOutward want.
const (
	apiToken    = "tok-outward-5e0c7a1f93d84b62"
	searchToken = "srch-outward-77b1c04d9e5a3f28"
	dbPassword  = "pw-outward-19f2c8d6a0b74e35"
)

// searchAnswer is what the double of a search engine finds.
const searchAnswer = `{"results": [{"title": "Tide tables", "url": "https://tides.example/", "content": "all harbours"}, {"title": "More", "url": "https://more.example/", "content": "more"}]}`

// loopbackDouble is a double of everything on the network that speaks HTTP: a page, a search engine and an API. It listens
// on loopback, which no run may reach: the test's server allows it with EPHEMERAL_WEB_ALLOW and EPHEMERAL_CONNECTION_ALLOW.
type loopbackDouble struct {
	*httptest.Server
	mu    sync.Mutex
	asked []string // method, path and query of every request, with "!" before it when its credential is wrong
}

func newLoopbackDouble(t *testing.T) *loopbackDouble {
	d := &loopbackDouble{}
	d.Server = httptest.NewServer(http.HandlerFunc(d.answer))
	t.Cleanup(d.Close)
	return d
}

func (d *loopbackDouble) answer(w http.ResponseWriter, r *http.Request) {
	token, body := "", ""
	switch {
	case r.URL.Path == "/page":
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		body = `<html><head><title>Tides</title><script>alert("x")</script></head><body><article><h1>Tides</h1><p>High water at Zürich is at 14:07.</p></article></body></html>`
	case r.URL.Path == "/search":
		token = searchToken
		w.Header().Set("Content-Type", "application/json")
		body = searchAnswer
	case strings.HasPrefix(r.URL.Path, "/v1/invoices/"):
		token = apiToken
		w.Header().Set("Content-Type", "application/json")
		body = fmt.Sprintf(`{"invoice": "7", "total": 1250, "you_are": %q}`, r.Header.Get("Authorization"))
	default:
		w.WriteHeader(http.StatusNotFound)
	}
	line := r.Method + " " + r.URL.RequestURI()
	if want := "Bearer " + token; token != "" && r.Header.Get("Authorization") != want || token == "" && r.Header.Get("Authorization") != "" {
		line = "!" + line
	}
	d.mu.Lock()
	d.asked = append(d.asked, line)
	d.mu.Unlock()
	_, _ = io.WriteString(w, body)
}

func (d *loopbackDouble) requests() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return append([]string(nil), d.asked...)
}

// outwardConversation uses every tool of the worker that leaves the machine, and then tries what is not allowed. PAGE is
// the double's page, PORT its port, RESULTS what every tool call gave.
const outwardConversation = `version: 1
description: Uses every tool that leaves the machine.
steps:
  - tool_calls:
      - {id: page, name: web_fetch, arguments: {url: "PAGE?key=1"}}
      - {id: found, name: web_search, arguments: {query: "tides of Zürich", count: 1}}
      - {id: invoice, name: connection_request, arguments: {connection: billing, path: "/invoices/7?full=1"}}
      - {id: rows, name: sql_query, arguments: {connection: shop, sql: "select name, stock from goods where stock > $1 order by name", params: [2]}}
    usage: {input_tokens: 1000, output_tokens: 100}
  - tool_calls:
      - {id: metadata, name: web_fetch, arguments: {url: "http://169.254.169.254:PORT/latest/"}}
      - {id: private, name: web_fetch, arguments: {url: "http://10.0.0.1:PORT/"}}
      - {id: delete, name: connection_request, arguments: {connection: billing, method: DELETE, path: /invoices/7}}
      - {id: outside, name: connection_request, arguments: {connection: billing, path: /admin}}
      - {id: other, name: connection_request, arguments: {connection: payroll, path: /invoices/7}}
      - {id: write, name: sql_query, arguments: {connection: shop, sql: "delete from goods"}}
      - {id: inside, name: shell, arguments: {command: "env | grep -c outward; curl -sS PAGE 2>&1 | cut -c 1-9"}}
    usage: {input_tokens: 1500, output_tokens: 100}
  - text: |-
RESULTS    usage: {input_tokens: 2000, output_tokens: 100}
`

// outwardCalls are the tool calls of the conversation.
var outwardCalls = []string{"page", "found", "invoice", "rows", "metadata", "private", "delete", "outside", "other", "write", "inside"}

// outwardServer is a server with the conversation, the double's search, prices for every kind of call, and the double
// and the database as connections of a tenant.
func outwardServer(t *testing.T, d *loopbackDouble, db *postgrestest.Cluster) *tenant {
	t.Helper()
	u, err := url.Parse(d.URL)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	var results strings.Builder
	for _, id := range outwardCalls {
		fmt.Fprintf(&results, "      == %s\n      {{ (result %q).Text }}\n", id, id)
	}
	conversation := strings.NewReplacer("PAGE", d.URL+"/page", "PORT", u.Port(), "RESULTS", results.String()).Replace(outwardConversation)
	all := map[string]string{
		"outward.yaml": conversation,
		"prices":       "calls: {web_fetch: 100, web_search: 5000, connection: 7, sql: 11}", "token": apiToken, "password": dbPassword,
	}
	for name, text := range all {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s := startOwn(t, "EPHEMERAL_REPLAY_DIR="+dir, "EPHEMERAL_PRICES="+filepath.Join(dir, "prices"),
		"EPHEMERAL_WEB_ALLOW=127.0.0.0/8", "EPHEMERAL_WEB_PORTS="+u.Port(), "EPHEMERAL_CONNECTION_ALLOW=127.0.0.0/8",
		"EPHEMERAL_SEARCH_URL="+d.URL+"/search", "EPHEMERAL_SEARCH_API_KEY="+searchToken,
		"EPHEMERAL_SEALING_KEY="+base64.StdEncoding.EncodeToString(make([]byte, 32)))
	n := s.tenant(t, 1_000_000)
	for _, args := range [][]string{
		{"billing", "--base-url", d.URL + "/v1", "--auth", "bearer", "--credential-file", filepath.Join(dir, "token"), "--path", "/invoices/*"},
		{"shop", "--kind", "postgres", "--base-url", "postgres://reader@127.0.0.1:" + db.Port + "/shop?sslmode=disable", "--auth", "basic", "--credential-file", filepath.Join(dir, "password")},
	} {
		if out, errs, err := s.cli(t.Context(), nil, append([]string{"connections", "put", n.org}, args...)...); err != nil {
			t.Fatalf("%v\n%s%s", err, out, errs)
		}
	}
	return n
}

// TestToolsReachOutward: the worker in a real machine uses web_fetch, web_search, connection_request and sql_query through
// the real broker. The upstreams get their credentials, the model gets the answers without them; each call is an event
// with a receipt and is charged; what is not allowed is refused, never reaches an upstream and costs nothing.
func TestToolsReachOutward(t *testing.T) {
	db := postgrestest.Start(t, dbPassword)
	db.Exec(t, "shop", "CREATE TABLE goods (name text, stock bigint)", "INSERT INTO goods VALUES ('pear', 3), ('apple', 12), ('fig', 2)",
		"GRANT SELECT, DELETE ON goods TO reader")
	d := newLoopbackDouble(t)
	n := outwardServer(t, d, db)
	r := n.finish(t, client.Request{Prompt: "Use them all.", Model: "replay/outward", Web: true, Connections: []string{"billing", "shop"}})
	if r.State != run.Succeeded || r.Result == nil {
		t.Fatalf("ended %s, error %+v\n%s", r.State, r.Error, n.server.cmd.Stderr)
	}
	if want := strings.ReplaceAll(outwardAnswer, "PAGE", d.URL+"/page"); r.Result.Output != want {
		t.Errorf("the model was told\n%s\nwant\n%s", r.Result.Output, want)
	}
	if diff := cmp.Diff([]string{"GET /page?key=1", "GET /search?format=json&q=tides+of+Z%C3%BCrich", "GET /v1/invoices/7?full=1"}, d.requests()); diff != "" {
		t.Errorf("the upstreams were asked (-want +got):\n%s", diff)
	}
	if left := db.Value(t, "shop", "select count(*) from goods"); left != "3" {
		t.Errorf("%s goods are left", left)
	}
	checkOutward(t, d, r, n.events(t, r.ID))
	checkRecord(t, r)
	checkMoney(t, r, 40_000)
	n.server.verify(t, n, r.ID, 7)
}

// outwardAnswer is what the tool calls gave.
const outwardAnswer = `== page
status 200, text/html, 160 bytes, PAGE?key=1
title: Tides
High water at Zürich is at 14:07.
== found
1. Tide tables
   https://tides.example/
   all harbours

== invoice
status 200
Content-Type: application/json

{"invoice": "7", "total": 1250, "you_are": "Bearer [redacted]"}
== rows
2 rows
columns: [{"name":"name","type":"text"},{"name":"stock","type":"int8"}]
["apple",12]
["pear",3]

== metadata
error: address_not_allowed: the address is not public: address not allowed
== private
error: address_not_allowed: the address is not public: address not allowed
== delete
error: method_not_allowed_here: the connection allows GET, HEAD
== outside
error: path_not_allowed: the connection allows /invoices/*
== other
error: there is no connection "payroll" for this tool, only billing
== write
error: sql_not_allowed: statement not allowed: want SELECT, WITH, VALUES, TABLE, SHOW or EXPLAIN
== inside
exit code 0
0
curl: (7)
`

// checkOutward compares the events with the calls that were made and refused, and their charges with the money.
func checkOutward(t *testing.T, d *loopbackDouble, r run.Run, events []run.Event) {
	t.Helper()
	var calls []run.CallData
	refused := map[string]int64{}
	var model, outward run.Micros
	for _, e := range events {
		switch data := e.Data.(type) {
		case run.CallData:
			if data.Duration <= 0 || data.Receipt == nil {
				t.Errorf("%s: %+v without duration or receipt", e.Type, data)
			}
			outward += data.Charged
			data.Duration, data.Receipt = 0, nil
			calls = append(calls, data)
		case run.ModelData:
			model += data.Charged
		case run.RefusedData:
			refused[data.Code] = data.Count
		}
	}
	want := []run.CallData{
		{Kind: "fetch", Target: d.URL + "/page", Method: "GET", Status: 200, Bytes: 160, Charged: 100},
		{Kind: "search", Target: "tides of Zürich", Method: "GET", Status: 200, Bytes: int64(len(searchAnswer)), Charged: 5000},
		{Kind: "http", Target: "billing/invoices/7", Method: "GET", Status: 200, Bytes: 81, Charged: 7},
		{Kind: "postgres", Target: "shop", Method: "SQL", Status: 200, Bytes: 140, Charged: 11},
	}
	if diff := cmp.Diff(want, calls); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(map[string]int64{"address_not_allowed": 2, "method_not_allowed_here": 1, "path_not_allowed": 1, "sql_not_allowed": 1}, refused); diff != "" {
		t.Errorf("refused (-want +got):\n%s", diff)
	}
	if r.Money.Web != outward || r.Money.Web != 5118 || r.Money.Model != model {
		t.Errorf("money %+v; the events sum to %d for models and %d for the rest", r.Money, model, outward)
	}
}
