package gateway

import (
	"context"
	"net/http"
	"strings"
	"testing"

	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/pools"
)

// onePool is a cell with one pool.
type onePool struct{ Pools }

func (onePool) Get(_ context.Context, name string) (pools.Pool, error) {
	if name != "base" {
		return pools.Pool{}, run.ErrNotFound
	}
	return pools.Pool{Name: name}, nil
}

func TestPrediction(t *testing.T) {
	var asked pools.Sizing
	s := serve(t, Config{}, Deps{Store: &fakeStore{}, Pools: onePool{}, Predict: func(_ context.Context, size pools.Sizing) (pools.Prediction, error) {
		asked = size
		return pools.Prediction{Claims: 7, MissRate: 0.5}, nil
	}})
	ask := func(path, key, body string) answer {
		return s.do(t, "POST", path, body, "Authorization", "Bearer "+key, "Content-Type", "application/json")
	}
	good := `{"min_ready": 2, "max_ready": 4, "max_machines": 8, "claims_per_second": 1.5}`
	if a := ask("/v1/pools/base/prediction", adminSecret, good); a.StatusCode != http.StatusOK || !strings.Contains(a.body, `"miss_rate":0.5`) {
		t.Fatalf("%d %s", a.StatusCode, a.body)
	}
	if want := (pools.Sizing{MinReady: 2, MaxReady: 4, MaxMachines: 8, MemoryMiB: 512, ClaimsPerSecond: 1.5, ServiceSeconds: 1, RestoreSeconds: 0.25}); asked != want {
		t.Errorf("asked for %+v, want %+v", asked, want)
	}
	admin, err := client.New(s.url, adminSecret)
	if err != nil {
		t.Fatal(err)
	}
	p, err := admin.PredictPool(t.Context(), "base", client.Sizing{MaxReady: 1, MaxMachines: 1, ClaimsPerSecond: 1})
	if want := (client.Prediction{Claims: 7, MissRate: 0.5}); err != nil || p != want || asked.MemoryMiB != 512 {
		t.Errorf("%+v, %v, asked for %+v", p, err, asked)
	}
	for name, c := range map[string]struct {
		path, key, body string
		status          int
	}{
		"member":      {"/v1/pools/base/prediction", memberSecret, good, 403},
		"other pool":  {"/v1/pools/other/prediction", adminSecret, good, 404},
		"no load":     {"/v1/pools/base/prediction", adminSecret, `{"min_ready": 2, "max_ready": 4, "max_machines": 8}`, 400},
		"too much":    {"/v1/pools/base/prediction", adminSecret, strings.Replace(good, "1.5", "1e9", 1), 400},
		"too rare":    {"/v1/pools/base/prediction", adminSecret, strings.Replace(good, "1.5", "1e-38", 1), 400},
		"upside down": {"/v1/pools/base/prediction", adminSecret, strings.Replace(good, `"max_ready": 4`, `"max_ready": 1`, 1), 400},
		"unknown":     {"/v1/pools/base/prediction", adminSecret, `{"size": 1}`, 400},
	} {
		if a := ask(c.path, c.key, c.body); a.StatusCode != c.status {
			t.Errorf("%s: %d, want %d: %s", name, a.StatusCode, c.status, a.body)
		}
	}
}
