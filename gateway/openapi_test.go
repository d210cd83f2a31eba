package gateway

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/getkin/kin-openapi/openapi3filter"
	"github.com/getkin/kin-openapi/routers"
	"github.com/getkin/kin-openapi/routers/gorillamux"
	"github.com/google/go-cmp/cmp"
)

// description is the API's description and finds its operations.
var description = sync.OnceValues(func() (*openapi3.T, error) {
	doc, err := openapi3.NewLoader().LoadFromData(openAPI)
	if err != nil {
		return nil, err
	}
	return doc, doc.Validate(context.Background())
})

var operations = sync.OnceValues(func() (routers.Router, error) {
	doc, err := description()
	if err != nil {
		return nil, err
	}
	return gorillamux.NewRouter(doc)
})

// described is a transport that holds every answer, and every request that was accepted, against the description.
type described struct {
	t    testing.TB
	next http.RoundTripper
}

// RoundTrip sends the request.
func (d described) RoundTrip(req *http.Request) (*http.Response, error) {
	var body []byte
	if req.Body != nil {
		b, err := io.ReadAll(req.Body)
		if err != nil {
			return nil, err
		}
		body = b
		req = req.Clone(req.Context())
		req.Body = io.NopCloser(bytes.NewReader(body))
	}
	resp, err := d.next.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	if err := check(req, body, resp); err != nil {
		d.t.Errorf("not as described: %s %s: %d: %v", req.Method, req.URL.Path, resp.StatusCode, err)
	}
	return resp, nil
}

// check holds one exchange against the description.
func check(req *http.Request, body []byte, resp *http.Response) error {
	router, err := operations()
	if err != nil {
		return err
	}
	asked := req.Clone(context.Background())
	asked.URL.Host, asked.URL.Scheme, asked.Host = "", "", ""
	if asked.Method == http.MethodHead {
		asked.Method = http.MethodGet
	}
	asked.Body = io.NopCloser(bytes.NewReader(body))
	route, params, err := router.FindRoute(asked)
	if err != nil {
		if resp.StatusCode == http.StatusNotFound || resp.StatusCode == http.StatusMethodNotAllowed {
			return nil
		}
		return err
	}
	options := &openapi3filter.Options{
		AuthenticationFunc: openapi3filter.NoopAuthenticationFunc, IncludeResponseStatus: true, SkipSettingDefaults: true,
		RejectWhenRequestBodyNotSpecified: true, ExcludeResponseBody: req.Method == http.MethodHead,
	}
	in := &openapi3filter.RequestValidationInput{Request: asked, PathParams: params, Route: route, Options: options}
	if resp.StatusCode < 300 {
		if err := openapi3filter.ValidateRequest(context.Background(), in); err != nil {
			return errors.Join(errors.New("an accepted request"), err)
		}
	}
	out := &openapi3filter.ResponseValidationInput{RequestValidationInput: in, Status: resp.StatusCode, Header: resp.Header, Options: options}
	if ct := resp.Header.Get("Content-Type"); resp.StatusCode == http.StatusOK && (ct == mimeEventStream || ct == "application/yaml" || resp.Header.Get("Content-Disposition") != "") {
		if resp.Header.Get("Content-Disposition") != "" {
			ct = "*/*"
		}
		if route.Operation.Responses.Status(resp.StatusCode).Value.Content.Get(ct) == nil {
			return errors.New("this content is not described: " + ct)
		}
		out.Options.ExcludeResponseBody = true
		out.Body = http.NoBody
		return openapi3filter.ValidateResponse(context.Background(), out)
	}
	answer, err := io.ReadAll(resp.Body)
	resp.Body.Close()
	resp.Body = &broken{Reader: bytes.NewReader(answer), err: err} // whoever reads on meets the same end
	if err != nil {
		return nil
	}
	out.SetBodyBytes(answer)
	return openapi3filter.ValidateResponse(context.Background(), out)
}

// broken reads as its Reader and ends with err.
type broken struct {
	io.Reader
	err error
}

func (b *broken) Read(p []byte) (int, error) {
	n, err := b.Reader.Read(p)
	if err == io.EOF && b.err != nil {
		err = b.err
	}
	return n, err
}

func (b *broken) Close() error { return nil }

// braced finds the names in a route's path.
var braced = regexp.MustCompile(`:(\w+)`)

func TestDescriptionHasTheRoutes(t *testing.T) {
	doc, err := description()
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
	doc, err := description()
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
	doc, err := description()
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
	if a := s.do(t, "GET", "/openapi.yaml", ""); a.StatusCode != 200 || a.body != string(openAPI) || a.Header.Get("Content-Type") != "application/yaml" {
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
		return check(req, []byte(`{"prompt":"x"}`), &http.Response{StatusCode: status, Header: http.Header{"Content-Type": {contentType}, "X-Request-Id": {"x"}},
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
