package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/run"
)

// shortFuzz bounds the fuzzing with one key; EPHEMERAL_TEST_FUZZ_TIME says otherwise.
const shortFuzz = 15 * time.Second

// TestFuzzAPI lets schemathesis send what the description allows and what it does not, with a member's and an
// administrator's key: no answer is a 5xx, and all are as described. The server is one of its own, since an administrator may
// also drain its pool. scripts/test-api runs this for longer.
func TestFuzzAPI(t *testing.T) {
	fuzzer := os.Getenv("EPHEMERAL_TEST_FUZZER")
	if fuzzer == "" {
		t.Skip("EPHEMERAL_TEST_FUZZER does not name schemathesis's program: make test-api")
	}
	description, err := filepath.Abs("../../gateway/api/openapi.yaml")
	if err != nil {
		t.Fatal(err)
	}
	examples := os.Getenv("EPHEMERAL_TEST_EXAMPLES")
	if examples == "" {
		examples = "10"
	}
	within := shortFuzz
	if d, err := time.ParseDuration(os.Getenv("EPHEMERAL_TEST_FUZZ_TIME")); err == nil {
		within = d
	}
	s := startOwn(t)
	m := s.tenant(t, 1_000_000)
	var admin client.NewKey
	s.json(t, &admin, "keys", "create", "--admin")
	for role, key := range map[string]string{"member": m.key, "admin": admin.Secret} {
		t.Run(role, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), within+2*time.Minute)
			defer cancel()
			st := exec.CommandContext(ctx, fuzzer, "run", description, "--url", "http://"+s.listen, "-H", "Authorization: Bearer "+key,
				"--checks", "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,response_schema_conformance",
				"--request-timeout", "70", "--phases", "examples,coverage,fuzzing", "--max-time", fmt.Sprint(int(within.Seconds())), "-n", examples, "--no-color", "--no-shrink")
			st.Dir = t.TempDir()
			out, err := st.CombinedOutput()
			if err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			if at := strings.Index(string(out), "SUMMARY"); at >= 0 {
				t.Logf("%s", out[at:])
			}
		})
	}
}

// TestTwiceTheLoad sends twice the requests that a key may make: each is answered, with 202 or 429, which names when to come
// again, and what was accepted is there.
func TestTwiceTheLoad(t *testing.T) {
	if os.Getenv("EPHEMERAL_TEST_LOAD") == "" {
		t.Skip("part of make test-api")
	}
	const rate, seconds = 100, 10
	s := startOwn(t, "EPHEMERAL_RATE_LIMIT="+fmt.Sprint(rate), "EPHEMERAL_RATE_BURST="+fmt.Sprint(rate), "EPHEMERAL_QUEUE_LIMIT=500")
	m := s.tenant(t, 1_000_000_000)
	var sent sync.WaitGroup
	var refused atomic.Int64
	var mu sync.Mutex
	accepted := map[run.ID]bool{}
	tick := time.NewTicker(time.Second / (2 * rate))
	defer tick.Stop()
	described := checked(t)
	for range 2 * rate * seconds {
		<-tick.C
		sent.Go(func() {
			req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+s.listen+"/v1/runs", strings.NewReader(`{"command":"true"}`))
			if err != nil {
				t.Error(err)
				return
			}
			req.Header.Set("Authorization", "Bearer "+m.key)
			req.Header.Set("Content-Type", "application/json")
			resp, err := described.Do(req)
			if err != nil {
				t.Error(err)
				return
			}
			defer resp.Body.Close()
			var r run.Run
			err = json.NewDecoder(resp.Body).Decode(&r)
			switch {
			case err != nil:
				t.Error(err)
			case resp.StatusCode == http.StatusAccepted:
				mu.Lock()
				accepted[r.ID] = true
				mu.Unlock()
			case (resp.StatusCode == http.StatusTooManyRequests || resp.StatusCode == http.StatusServiceUnavailable) && resp.Header.Get("Retry-After") != "":
				refused.Add(1)
			default:
				t.Errorf("status %d, Retry-After %q", resp.StatusCode, resp.Header.Get("Retry-After"))
			}
		})
	}
	sent.Wait()
	t.Logf("%d accepted, %d told to come again", len(accepted), refused.Load())
	if len(accepted) == 0 || refused.Load() == 0 || len(accepted)+int(refused.Load()) != 2*rate*seconds {
		t.Errorf("%d accepted, %d told to come again", len(accepted), refused.Load())
	}
	for page := (run.Page{Limit: 100}); ; {
		list, err := m.Runs(t.Context(), page)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range list.Runs {
			if !accepted[r.ID] {
				t.Errorf("%s is there twice, or was not accepted", r.ID)
			}
			delete(accepted, r.ID)
		}
		if page.Cursor = list.NextCursor; page.Cursor == "" {
			break
		}
	}
	if len(accepted) > 0 {
		t.Errorf("%d accepted runs are not there", len(accepted))
	}
	a, err := m.Account(t.Context())
	if err != nil || a.Available < 0 {
		t.Errorf("%+v, %v", a, err)
	}
}
