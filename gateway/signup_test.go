package gateway

import (
	"encoding/json"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/ephemeral-run/ephemeral/client"
)

func TestSignupIsClosed(t *testing.T) {
	l := newLive(t, Config{})
	terms, err := l.admin.SignupTerms(l.ctx)
	l.must(err)
	if terms.Open || terms.Credit != 0 {
		t.Errorf("%+v", terms)
	}
	if p := l.do(t, "POST", "/v1/signup", `{"name": "x"}`).problem(t); p.Code != CodeSignupClosed {
		t.Errorf("%+v", p)
	}
	if orgs, err := l.admin.Orgs(l.ctx); err != nil || len(orgs) != 0 {
		t.Errorf("%v, %v", orgs, err)
	}
}

func TestSignup(t *testing.T) {
	l := newLive(t, Config{Signup: SignupConfig{Open: true, Credit: 300_000, Pot: 700_000, PerDay: 2, Concurrency: 3, Header: "X-Forwarded-For"}})
	sign := func(from, body string) answer { return l.do(t, "POST", "/v1/signup", body, "X-Forwarded-For", from) }
	for _, body := range []string{`{}`, `{"name": " "}`, `{"name": "x", "credit_micros": 5}`, `{"name": "a\u0007"}`, `{"name": "` + strings.Repeat("x", maxName+1) + `"}`} {
		if p := sign("198.51.100.1", body).problem(t); p.Code != CodeInvalidRequest {
			t.Errorf("%.40s: %+v", body, p)
		}
	}
	a := sign("203.0.113.9, 198.51.100.1", `{"name": " Somebody "}`) // the first is only the client's word
	if a.StatusCode != http.StatusCreated {
		t.Fatalf("%d %s", a.StatusCode, a.body)
	}
	var made client.Account
	l.must(json.Unmarshal([]byte(a.body), &made))
	if made.Org.Name != "Somebody" || made.Org.Concurrency != 3 || made.Account.Available != 300_000 || made.Key.Org != made.Org.ID {
		t.Errorf("%+v", made)
	}
	member, err := client.New(l.url, made.Key.Secret)
	l.must(err)
	balance, err := member.Account(l.ctx)
	l.must(err)
	if balance != made.Account {
		t.Errorf("%+v, answered %+v", balance, made.Account)
	}
	if _, err := member.CreateRun(l.ctx, client.Request{Command: "true"}, client.CreateOptions{}); err != nil {
		t.Error(err)
	}
	if strings.Contains(l.log.String(), made.Key.Secret) {
		t.Error("the log has the secret")
	}
	if a := sign("198.51.100.1", `{"name": "second"}`); a.StatusCode != http.StatusCreated {
		t.Errorf("%d %s", a.StatusCode, a.body)
	}
	refused := sign("198.51.100.1", `{"name": "third"}`)
	if p := refused.problem(t); p.Code != CodeTooManySignups {
		t.Errorf("%+v", p)
	}
	if s, err := strconv.Atoi(refused.Header.Get("Retry-After")); err != nil || s < 11*3600 || s > 12*3600 {
		t.Errorf("Retry-After %q", refused.Header.Get("Retry-After"))
	}
	if p := sign("198.51.100.2", `{"name": "the pot has too little"}`).problem(t); p.Code != CodeTrialExhausted {
		t.Errorf("%+v", p)
	}
	if terms, err := l.admin.SignupTerms(l.ctx); err != nil || terms.Open {
		t.Errorf("with what is left in the pot: %+v, %v", terms, err)
	}
	if p := l.do(t, "POST", "/v1/signup", `{"name": "x"}`).problem(t); p.Code != CodeInternal { // the proxy is not there
		t.Errorf("without the header: %+v", p)
	}
	report, err := l.store.Audit(l.ctx)
	if err != nil || report.Err() != nil || report.Deposits != 600_000 {
		t.Errorf("%+v, %v", report, err)
	}
}

// TestSignupRepeated: a client that lost the answer asks again, and learns that there is an account instead of getting another.
func TestSignupRepeated(t *testing.T) {
	l := newLive(t, Config{Signup: SignupConfig{Open: true, Credit: 300_000, Pot: 10_000_000, PerDay: 10, Concurrency: 3}})
	sign := func(body, key string) answer { return l.do(t, "POST", "/v1/signup", body, "Idempotency-Key", key) }
	if a := sign(`{"name": "x"}`, `"first"`); a.StatusCode != http.StatusCreated {
		t.Fatalf("%d %s", a.StatusCode, a.body)
	}
	for body, want := range map[string]Code{`{"name": "x"}`: CodeAlreadySignedUp, `{ "name":" x" }`: CodeAlreadySignedUp, `{"name": "y"}`: CodeIdempotencyConflict} {
		a := sign(body, "first")
		if p := a.problem(t); p.Code != want || strings.Contains(a.body, "eph_") {
			t.Errorf("%s: %s", body, a.body)
		}
	}
	if p := sign(`{"name": "x"}`, `"`).problem(t); p.Code != CodeInvalidIdempotencyKey {
		t.Errorf("%+v", p)
	}
	for range 2 { // the client makes a key for each call
		_, err := l.admin.SignUp(l.ctx, "x")
		l.must(err)
	}
	orgs, err := l.admin.Orgs(l.ctx)
	l.must(err)
	given, err := l.store.TrialGiven(l.ctx)
	l.must(err)
	if len(orgs) != 3 || given != 900_000 {
		t.Errorf("%d organisations, %d given", len(orgs), given)
	}
}

func TestSignupConfig(t *testing.T) {
	good := SignupConfig{Open: true, Credit: 1, Pot: 1, PerDay: 1, Concurrency: 1}
	if err := (Config{Signup: good}).Validate(); err != nil {
		t.Error(err)
	}
	for name, change := range map[string]func(*SignupConfig){
		"CREDIT": func(c *SignupConfig) { c.Credit = -1 }, "POT": func(c *SignupConfig) { c.Pot = maxCredit + 1 },
		"PER_DAY": func(c *SignupConfig) { c.PerDay = -1 }, "CONCURRENCY": func(c *SignupConfig) { c.Concurrency = maxConcurrency + 1 },
	} {
		c := good
		if change(&c); !strings.Contains((Config{Signup: c}).Validate().Error(), "EPHEMERAL_SIGNUP_"+name) {
			t.Errorf("%s: %v", name, (Config{Signup: c}).Validate())
		}
	}
}
