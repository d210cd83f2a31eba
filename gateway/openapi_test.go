package gateway

import (
	"io"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/google/go-cmp/cmp"

	"github.com/ephemeral-run/ephemeral/gateway/api"
	"github.com/ephemeral-run/ephemeral/gateway/apitest"
)

// described is a transport that holds every answer, and every request that was accepted, against the description.
type described struct {
	t    testing.TB
	next http.RoundTripper
}

// RoundTrip sends the request.
func (d described) RoundTrip(req *http.Request) (*http.Response, error) {
	return apitest.Transport{Next: d.next, Report: d.t.Errorf}.RoundTrip(req)
}

// braced finds the names in a route's path.
var braced = regexp.MustCompile(`:(\w+)`)

func TestDescriptionHasTheRoutes(t *testing.T) {
	doc, err := apitest.Document()
	if err != nil {
		t.Fatal(err)
	}
	var described, served []string
	for path, item := range doc.Paths.Map() {
		for method := range item.Operations() {
			described = append(described, method+" "+path)
		}
	}
	s := New(Config{}, Deps{Store: &fakeStore{}})
	defer s.stop()
	for _, r := range s.publicRoutes() {
		if r.method != http.MethodHead {
			served = append(served, r.method+" "+strings.ReplaceAll(braced.ReplaceAllString(r.path, "{$1}"), "*", "{path}"))
		}
	}
	slices.Sort(described)
	slices.Sort(served)
	if d := cmp.Diff(served, described); d != "" {
		t.Error(d)
	}
}

func TestDescriptionHasTheCodes(t *testing.T) {
	doc, err := apitest.Document()
	if err != nil {
		t.Fatal(err)
	}
	var described, used []string
	for _, v := range doc.Components.Schemas["Problem"].Value.Properties["code"].Value.Enum {
		described = append(described, v.(string))
	}
	for _, e := range Catalogue {
		used = append(used, string(e.Code))
	}
	slices.Sort(described)
	slices.Sort(used)
	if d := cmp.Diff(used, described); d != "" {
		t.Error(d)
	}
}

func TestDescriptionHasTheLimits(t *testing.T) {
	doc, err := apitest.Document()
	if err != nil {
		t.Fatal(err)
	}
	p := doc.Components.Schemas["RunRequest"].Value.Properties
	value := func(name string) *openapi3.Schema { return p[name].Value }
	got := []float64{
		float64(*value("prompt").MaxLength), float64(*value("command").MaxLength), float64(*value("files").MaxItems),
		float64(*value("connections").MaxItems), float64(*value("metadata").MaxProps), *value("timeout_seconds").Min, *value("timeout_seconds").Max,
		*value("max_cost_micros").Min, *value("max_cost_micros").Max,
		float64(*value("files").Items.Value.Properties["path"].Value.MaxLength),
	}
	want := []float64{maxPrompt, maxCommand, maxFiles, maxConnections, maxMetadata, minTimeoutSeconds, maxTimeoutSeconds, minCostMicros, maxCostMicros, maxPath}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	for name, want := range map[string]any{"timeout_seconds": float64(defaultTimeout), "max_cost_micros": float64(defaultCostMicros), "shell": true, "web": false} {
		if got := value(name).Default; got != want {
			t.Errorf("default of %s: %v, want %v", name, got, want)
		}
	}
}

func TestDescriptionIsServed(t *testing.T) {
	s := serve(t, Config{}, Deps{Store: &fakeStore{}})
	if a := s.do(t, "GET", "/openapi.yaml", ""); a.StatusCode != 200 || a.body != string(api.Description) || a.Header.Get("Content-Type") != "application/yaml" {
		t.Errorf("%d %v", a.StatusCode, a.Header)
	}
}

// TestCheckSeesDifferences keeps the watchman awake.
func TestCheckSeesDifferences(t *testing.T) {
	exchange := func(status int, contentType, answer string) error {
		req, err := http.NewRequest("POST", "http://x/v1/runs", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		return apitest.Check(req, []byte(`{"prompt":"x"}`), &http.Response{StatusCode: status, Header: http.Header{"Content-Type": {contentType}, "X-Request-Id": {"x"}},
			Body: io.NopCloser(strings.NewReader(answer))})
	}
	problem := `{"type":"about:x","title":"x","status":400,"detail":"x","code":"invalid_json","remediation":"x","request_id":"x"}`
	if err := exchange(400, "application/problem+json", problem); err != nil {
		t.Errorf("a good answer: %v", err)
	}
	for name, err := range map[string]error{
		"status":       exchange(418, "application/problem+json", problem),
		"content type": exchange(400, "text/plain", problem),
		"code":         exchange(400, "application/problem+json", strings.Replace(problem, "invalid_json", "odd", 1)),
		"field":        exchange(400, "application/problem+json", strings.Replace(problem, `"title"`, `"titel"`, 1)),
		"no retry":     exchange(503, "application/problem+json", problem),
		"run":          exchange(202, "application/json", `{"id":"x"}`),
	} {
		if err == nil {
			t.Errorf("%s: the difference is not seen", name)
		}
	}
}
