// Package apitest holds exchanges of tests against the description of the API.
package apitest

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"sync"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/getkin/kin-openapi/openapi3filter"
	"github.com/getkin/kin-openapi/routers"
	"github.com/getkin/kin-openapi/routers/gorillamux"

	"github.com/ephemeral-run/ephemeral/gateway/api"
)

// Document is the API's description.
var Document = sync.OnceValues(func() (*openapi3.T, error) {
	doc, err := openapi3.NewLoader().LoadFromData(api.Description)
	if err != nil {
		return nil, err
	}
	return doc, doc.Validate(context.Background())
})

var operations = sync.OnceValues(func() (routers.Router, error) {
	doc, err := Document()
	if err != nil {
		return nil, err
	}
	return gorillamux.NewRouter(doc)
})

// Transport sends requests through Next and holds every answer, and every request that was accepted, against the description.
// Report is told what differs.
type Transport struct {
	Next   http.RoundTripper
	Report func(format string, args ...any)
}

// RoundTrip sends the request.
func (t Transport) RoundTrip(req *http.Request) (*http.Response, error) {
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
	resp, err := t.Next.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	if err := Check(req, body, resp); err != nil {
		t.Report("not as described: %s %s: %d: %v", req.Method, req.URL.Path, resp.StatusCode, err)
	}
	return resp, nil
}

// Check holds one exchange against the description. It reads the answer's body and leaves it to be read again; a stream is
// left alone.
func Check(req *http.Request, body []byte, resp *http.Response) error {
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
	if ct := resp.Header.Get("Content-Type"); resp.StatusCode == http.StatusOK && (ct == "text/event-stream" || ct == "application/yaml" || resp.Header.Get("Content-Disposition") != "") {
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
