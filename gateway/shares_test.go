package gateway

import (
	"bufio"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/run"
)

// call sends a request with a key and returns status and body.
func (l *live) call(method, path, key, body string) (int, string) {
	l.t.Helper()
	req, err := http.NewRequestWithContext(l.ctx, method, l.url+path, strings.NewReader(body))
	l.must(err)
	req.Header.Set("Authorization", "Bearer "+key)
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := l.client.Do(req)
	l.must(err)
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	l.must(err)
	return resp.StatusCode, string(b)
}

func TestShares(t *testing.T) {
	l := newLive(t, Config{})
	owner, other := l.newMember("owner", 1_000_000), l.newMember("other", 1_000_000)
	c, err := owner.CreateRun(l.ctx, client.Request{Command: "true", Files: []run.File{{Path: "a", Content: "secret-file"}}, Metadata: map[string]string{"ticket": "secret-metadata"}}, client.CreateOptions{})
	l.must(err)
	path := "/v1/runs/" + string(c.Run.ID) + "/shares"

	status, body := l.call("POST", path, owner.secret, `{"expires_in_seconds": 3600}`)
	var made newShare
	l.must(json.Unmarshal([]byte(body), &made))
	if status != http.StatusCreated || !strings.HasPrefix(made.Token, "eph_share_") || made.Run != c.Run.ID {
		t.Fatalf("%d %s", status, body)
	}
	lease := l.take()
	l.start(lease)
	l.shell(lease, 10)
	l.settle(lease)

	status, body = l.call("GET", "/v1/shared", made.Token, "")
	if status != http.StatusOK || !strings.Contains(body, string(c.Run.ID)) || strings.Contains(body, "secret-") || strings.Contains(body, "owner") {
		t.Errorf("shared run: %d %s", status, body)
	}
	if status, body = l.call("GET", "/v1/shared/events", made.Token, ""); status != http.StatusOK || !strings.Contains(body, `"worker.destroyed"`) {
		t.Errorf("shared events: %d %s", status, body)
	}
	if status, body = l.call("GET", path, owner.secret, ""); status != http.StatusOK || strings.Contains(body, made.Token) || !strings.Contains(body, made.ID) {
		t.Errorf("list: %d %s", status, body)
	}

	// The token opens nothing else, and a key is no token.
	for _, r := range []struct{ method, path, key string }{
		{"GET", "/v1/runs/" + string(c.Run.ID), made.Token}, {"GET", "/v1/runs", made.Token}, {"GET", "/v1/account", made.Token},
		{"POST", "/v1/runs/" + string(c.Run.ID) + "/cancel", made.Token}, {"GET", path, made.Token}, {"GET", "/v1/shared", owner.secret},
		{"GET", "/v1/shared", "eph_share_" + strings.Repeat("a", 43)},
	} {
		if status, body := l.call(r.method, r.path, r.key, ""); status != http.StatusUnauthorized {
			t.Errorf("%s %s: %d %s", r.method, r.path, status, body)
		}
	}
	for _, r := range []struct {
		method, path, key, body string
		status                  int
	}{
		{"POST", path, other.secret, `{}`, 404},
		{"GET", path, other.secret, "", 404},
		{"DELETE", path + "/" + made.ID, other.secret, "", 404},
		{"POST", path, owner.secret, `{"expires_in_seconds": 59}`, 400},
		{"POST", path, owner.secret, `{"expires_in_seconds": 2592001}`, 400},
		{"POST", path, owner.secret, `{"forever": true}`, 400},
		{"POST", path, owner.secret, `{}`, 201},
		{"DELETE", path + "/" + made.ID, owner.secret, "", 204},
		{"DELETE", path + "/" + made.ID, owner.secret, "", 404},
		{"GET", "/v1/shared", made.Token, "", 401},
		{"GET", "/v1/shared/events", made.Token, "", 401},
	} {
		if status, body := l.call(r.method, r.path, r.key, r.body); status != r.status {
			t.Errorf("%s %s %s: %d, want %d: %s", r.method, r.path, r.body, status, r.status, body)
		}
	}
	if strings.Contains(l.log.String(), made.Token) {
		t.Error("the log has the token")
	}

	hidden, err := owner.CreateRun(l.ctx, client.Request{Command: "true", ZeroDataRetention: true}, client.CreateOptions{})
	l.must(err)
	if status, body := l.call("POST", "/v1/runs/"+string(hidden.Run.ID)+"/shares", owner.secret, `{}`); status != http.StatusConflict {
		t.Errorf("zero data retention: %d %s", status, body)
	}
}

// TestRevokedShareEndsItsStream: whoever reads along with a link reads no further once it is revoked.
func TestRevokedShareEndsItsStream(t *testing.T) {
	l := newLive(t, Config{Heartbeat: time.Hour}) // it does not wait for one
	owner := l.newMember("owner", 1_000_000)
	shared := l.create(owner)
	path := "/v1/runs/" + string(shared.ID) + "/shares"
	_, body := l.call("POST", path, owner.secret, `{}`)
	var made newShare
	l.must(json.Unmarshal([]byte(body), &made))
	req, err := http.NewRequestWithContext(l.ctx, "GET", l.url+"/v1/shared/events", nil)
	l.must(err)
	req.Header.Set("Authorization", "Bearer "+made.Token)
	req.Header.Set("Accept", "text/event-stream")
	resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
	l.must(err)
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() && !strings.HasPrefix(lines.Text(), "data:") { // until it is there
	}
	lease := l.take()
	l.start(lease)
	for lines.Scan() && lines.Text() != "event: "+string(run.EventMicroVMReady) { // it lives on while the share does
	}
	if lines.Text() == "" {
		t.Fatalf("the stream has ended by itself: %v", lines.Err())
	}
	other, err := l.admin.CreateKey(l.ctx, owner.org, "another")
	l.must(err)
	l.must(l.admin.RevokeKey(l.ctx, other.ID)) // of the same organisation, and no reason to end
	l.shell(lease, 1)
	for lines.Scan() && lines.Text() != "event: "+string(run.EventShell) {
	}
	if lines.Text() == "" {
		t.Fatalf("another's revocation has ended the stream: %v", lines.Err())
	}
	if status, body := l.call("DELETE", path+"/"+made.ID, owner.secret, ""); status != http.StatusNoContent {
		t.Fatalf("%d %s", status, body)
	}
	for lines.Scan() { // ends, or the test's time does
	}
	if l.ctx.Err() != nil {
		t.Error("the stream goes on")
	}
	l.settle(lease)
}
