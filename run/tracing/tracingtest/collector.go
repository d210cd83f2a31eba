// Package tracingtest is a double of an OpenTelemetry collector, for tests.
package tracingtest

import (
	"bytes"
	"compress/gzip"
	"encoding/hex"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	otlp "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"
)

// Span is a span as it was received; ids in hexadecimal.
type Span struct {
	Trace, ID, Parent string
	*otlp.Span
}

// Collector takes OTLP over HTTP and keeps all of it.
type Collector struct {
	URL string

	mu    sync.Mutex
	spans []Span
	raw   bytes.Buffer
	heads []http.Header
}

// New starts a collector that ends with the test.
func New(t testing.TB) *Collector {
	c := &Collector{}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := c.take(r); err != nil {
			t.Errorf("traces as received: %v", err)
			w.WriteHeader(http.StatusBadRequest)
		}
	}))
	t.Cleanup(server.Close)
	c.URL = server.URL
	return c
}

func (c *Collector) take(r *http.Request) error {
	body := io.Reader(r.Body)
	if r.Header.Get("Content-Encoding") == "gzip" {
		var err error
		if body, err = gzip.NewReader(body); err != nil {
			return err
		}
	}
	b, err := io.ReadAll(body)
	if err != nil {
		return err
	}
	var request collector.ExportTraceServiceRequest
	if err := proto.Unmarshal(b, &request); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.heads = append(c.heads, r.Header.Clone())
	c.raw.Write(b)
	for _, of := range request.ResourceSpans {
		for _, scope := range of.ScopeSpans {
			for _, s := range scope.Spans {
				c.spans = append(c.spans, Span{hex.EncodeToString(s.TraceId), hex.EncodeToString(s.SpanId), hex.EncodeToString(s.ParentSpanId), s})
			}
		}
	}
	return nil
}

// Spans are those received so far, of one trace or, without one, of all.
func (c *Collector) Spans(trace string) (spans []Span) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range c.spans {
		if trace == "" || s.Trace == trace {
			spans = append(spans, s)
		}
	}
	return spans
}

// Bytes is everything received so far, uncompressed.
func (c *Collector) Bytes() []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	return bytes.Clone(c.raw.Bytes())
}

// Headers are those of what was received so far.
func (c *Collector) Headers() []http.Header {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]http.Header(nil), c.heads...)
}
