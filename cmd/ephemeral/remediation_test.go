package main

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

// refusals are what the double of a server answers, by path.
var refusals = map[string]struct {
	status int
	body   string
}{
	"/v1/runs/run_00000000000000000000000000000001": {http.StatusNotFound,
		`{"type":"about:blank","title":"No","status":404,"detail":"There is no such run.","code":"not_found","remediation":"Check the id.","request_id":"r1"}`},
	"/v1/runs": {http.StatusPaymentRequired,
		`{"type":"about:blank","title":"No","status":402,"detail":"The account has 3 micro-dollars.","code":"insufficient_funds","remediation":"Add credit: ephemeral orgs credit.","request_id":"r2"}`},
}

// TestRefusalsSayWhatToDo runs the scripts that need a server, a double that refuses everything.
func TestRefusalsSayWhatToDo(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		a, ok := refusals[r.URL.Path]
		if !ok {
			w.WriteHeader(http.StatusBadGateway) // something in between, without a problem document
			return
		}
		w.Header().Set("Content-Type", "application/problem+json")
		w.WriteHeader(a.status)
		_, _ = w.Write([]byte(a.body)) // a client that is gone is the test's failure
	}))
	t.Cleanup(server.Close) // scripts run in parallel
	testscript.Run(t, testscript.Params{
		Dir: "testdata/refused",
		Setup: func(env *testscript.Env) error {
			env.Setenv("EPHEMERAL_URL", server.URL)
			env.Setenv("EPHEMERAL_API_KEY", "eph_x")
			return nil
		},
	})
}
