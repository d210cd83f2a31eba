package e2e

import (
	"encoding/base64"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ephemeral-run/ephemeral/broker/openaitest"
	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/receipt"
)

// planted are secrets that must be found nowhere but in the server's memory.
var planted = map[string]string{
	"provider key":   "sk-planted-2f6d0c1b9a7e4835",
	"bearer":         "tok-planted-8c41d7e05b92f36a",
	"query":          "qry-planted-51b0e94c7d2a8f63",
	"search key":     "srch-planted-a9d3f01c6b7e2485",
	"sealing key":    base64.StdEncoding.EncodeToString([]byte("planted-sealing-key-7d1f5c3a9be0")),
	"receipt key":    base64.StdEncoding.EncodeToString([]byte("planted-receipt-key-3b9c0f7d51ea")),
	"raw sealing":    "planted-sealing-key-7d1f5c3a9be0",
	"raw receipt":    "planted-receipt-key-3b9c0f7d51ea",
	"sealing of old": base64.StdEncoding.EncodeToString([]byte("planted-sealing-old-e05b92f36a11")),
}

// echoing is a double of an upstream that shows what it was sent, in a few wrappings.
func echoing(t *testing.T) *httptest.Server {
	u := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		all := r.Header.Get("Authorization") + " " + r.URL.RawQuery
		w.Header().Set("Content-Type", "text/plain")
		w.Header().Set("Etag", all)
		if r.URL.Path == "/error" {
			w.WriteHeader(http.StatusInternalServerError)
		}
		_, _ = io.WriteString(w, "echo "+all+" "+base64.StdEncoding.EncodeToString([]byte(all)))
	}))
	t.Cleanup(u.Close)
	return u
}

// TestPlantedSecrets gives a server every kind of secret, lets a machine use all of them and look around, and searches the
// machine's memory, the disk, the store, the log, the answers, the metrics and what is left of a crash.
func TestPlantedSecrets(t *testing.T) {
	upstream := echoing(t)
	var s *server
	var inside []string
	call := func(id, connection, path string) openaitest.ToolCall {
		args, err := json.Marshal(map[string]string{"connection": connection, "path": path})
		if err != nil {
			t.Fatal(err)
		}
		return openaitest.ToolCall{ID: id, Name: "connection_request", Arguments: string(args)}
	}
	said := ""
	provider := openaitest.NewFunc(t, planted["provider key"], func(n int, r *openaitest.Request) openaitest.Answer {
		usage := &openaitest.Usage{Prompt: 100, Completion: 20}
		if n == 0 {
			return openaitest.Answer{ToolCalls: []openaitest.ToolCall{
				openaitest.Shell("a", "env; cat /proc/[0-9]*/environ; grep -rs planted /etc /run /tmp /var | head; echo looked"), call("b", "bearer", "/x"), call("c", "query", "/x"), call("d", "bearer", "/error"), call("e", "gone", "/x"),
			}, Usage: usage}
		}
		said += string(r.Body)
		inside = append(inside, s.findAll(t)...)
		return openaitest.Answer{Text: "done", Usage: usage}
	})
	// What the process inherits allows core files of any size; the server itself forbids them.
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_CORE, &limit); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Setrlimit(unix.RLIMIT_CORE, &limit) })
	s = startOwn(t, "EPHEMERAL_OPENAI_BASE_URL="+provider.BaseURL, "EPHEMERAL_OPENAI_API_KEY="+planted["provider key"], "EPHEMERAL_CONNECTION_ALLOW=127.0.0.0/8",
		"EPHEMERAL_SEALING_KEY="+planted["sealing key"]+","+planted["sealing of old"], "EPHEMERAL_RECEIPT_KEY="+planted["receipt key"],
		"EPHEMERAL_SEARCH_URL=http://127.0.0.1:1/search", "EPHEMERAL_SEARCH_API_KEY="+planted["search key"], "GOTRACEBACK=crash")
	n := s.tenant(t, 1_000_000)
	for name, auth := range map[string]string{"bearer": "bearer", "query": "query:key"} {
		file := filepath.Join(t.TempDir(), "credential") // outside of the server's data directory
		if err := os.WriteFile(file, []byte(planted[name]), 0o600); err != nil {
			t.Fatal(err)
		}
		out, errs, err := s.cli(t.Context(), nil, "connections", "put", n.org, name, "--base-url", upstream.URL, "--auth", auth, "--credential-file", file, "-o", "json")
		if err != nil || shownIn(out+errs) != "" {
			t.Fatalf("%v\n%s%s", err, out, errs)
		}
	}
	r := n.finish(t, client.Request{Prompt: "Look around.", Model: "openai/gpt-5-nano", Web: true, Connections: []string{"bearer", "query"}})
	if r.State != run.Succeeded || !strings.Contains(said, "looked") || !strings.Contains(said, "echo") {
		t.Fatalf("ended %s, %+v; the model was told %s\n%s", r.State, r.Error, said, s.cmd.Stderr)
	}
	if found := append(inside, s.findAll(t)...); len(found) > 0 {
		t.Errorf("found %q", found)
	}
	events := n.events(t, r.ID)
	record, err := json.Marshal(map[string]any{"run": r, "events": events})
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"what the model was told": said, "record and events": string(record), "metrics": s.metrics(t)} {
		if what := shownIn(text); what != "" {
			t.Errorf("%s: the %s is shown", name, what)
		}
	}
	if count(events, run.EventConnection) != 3 {
		t.Errorf("events %+v", events)
	}
	s.verify(t, n, r.ID, 5)
	s.crash(t)
}

// verify checks the run's receipts with the command of the binary, and that there are as many as wanted.
func (s *server) verify(t *testing.T, n *tenant, id run.ID, want int) {
	t.Helper()
	out, errs, err := s.cli(t.Context(), []string{"EPHEMERAL_API_KEY=" + n.key}, "runs", "receipts", string(id), "-o", "json")
	var check receipt.Check
	if err != nil || json.Unmarshal([]byte(out), &check) != nil || !check.Holds() || check.Valid != want {
		t.Errorf("receipts: %v\n%s%s", err, out, errs)
	}
}

// crash aborts the server, looks at what is left, and starts it again.
func (s *server) crash(t *testing.T) {
	t.Helper()
	if err := s.cmd.Process.Signal(syscall.SIGABRT); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-s.ended:
		s.ended <- err
	case <-time.After(20 * time.Second):
		t.Fatal("the server did not end")
	}
	if status, ok := s.cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || !status.Signaled() || status.CoreDump() {
		t.Errorf("ended as %v; core file: %v", s.cmd.ProcessState, ok && status.CoreDump())
	}
	if what := shownIn(s.log.String()); what != "" {
		t.Errorf("the last words show the %s", what)
	}
	if err := s.launch(); err != nil {
		t.Fatal(err)
	}
}

// findAll looks for every planted secret; see find.
func (s *server) findAll(t *testing.T) (found []string) {
	for name, secret := range planted {
		for _, place := range s.find(t, secret) {
			found = append(found, name+" in "+place)
		}
	}
	return found
}

// shownIn names a planted secret that a text shows.
func shownIn(text string) string {
	for name, secret := range planted {
		if strings.Contains(text, secret) || strings.Contains(text, base64.StdEncoding.EncodeToString([]byte(secret))[:24]) {
			return name
		}
	}
	return ""
}

// metrics are all of the server's.
func (s *server) metrics(t *testing.T) string {
	t.Helper()
	for _, v := range s.env {
		if address, ok := strings.CutPrefix(v, "EPHEMERAL_ADMIN_LISTEN="); ok {
			resp, err := http.Get("http://" + address + "/metrics")
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			data, err := io.ReadAll(resp.Body)
			if err != nil || len(data) == 0 {
				t.Fatalf("%d bytes of metrics, %v", len(data), err)
			}
			return string(data)
		}
	}
	t.Fatal("no address of metrics")
	return ""
}
