package e2e

import (
	"bufio"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/run"
)

// TestRecordedHistoryIsSimulated has runs end on a live server, records its history, and simulates with it.
func TestRecordedHistoryIsSimulated(t *testing.T) {
	const runs = 3
	s := startOwn(t) // with no other runs in its history
	tenant := s.tenant(t, 1_000_000)
	for range runs {
		if got := tenant.finish(t, client.Request{Command: "sleep 0.3"}); got.State != run.Succeeded {
			t.Fatalf("the run ended %s: %+v", got.State, got.Error)
		}
	}
	path := filepath.Join(t.TempDir(), "arrivals.csv")
	deadline := time.Now().Add(20 * time.Second) // the history is written beside the runs
	for {
		out, errs, err := s.cli(t.Context(), nil, "pool", "record", "--file", path)
		if err == nil && len(services(t, path)) >= runs {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("no history of %d runs: %v\n%s%s", runs, err, out, errs)
		}
		time.Sleep(200 * time.Millisecond)
	}
	all := services(t, path)
	for _, took := range all {
		if took < 0.3 || took > runLimit.Seconds() {
			t.Errorf("a run that sleeps for 0.3 s had its machine for %g s", took)
		}
	}
	var result struct {
		Arrivals int `json:"arrivals"`
	}
	s.json(t, &result, "pool", "simulate", "--trace", path)
	if result.Arrivals != len(all) {
		t.Errorf("%d arrivals are simulated of %d recorded", result.Arrivals, len(all))
	}
}

// services are the service times, in seconds, of a trace.
func services(t *testing.T, path string) (all []float64) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		return nil
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if fields := strings.Split(lines.Text(), ","); len(fields) == 2 {
			if s, err := strconv.ParseFloat(fields[1], 64); err == nil { // else the header
				all = append(all, s)
			}
		}
	}
	return all
}
