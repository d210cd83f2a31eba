package tracing

import (
	"net/http"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/ephemeral-run/ephemeral/run"
)

// Request is the span of a request that asks for a run. It is sent if a run came of it. Nil: traces are off.
type Request struct {
	tracer      trace.Tracer
	began       time.Time
	span        trace.Span
	traceparent string
	named       bool // by the client
	run         run.ID
}

// Request begins the span of a request that arrived at the given time with the client's traceparent, which may be empty or
// nonsense. id is what the run is to be called.
func (t *Tracer) Request(began time.Time, traceparent string, id run.ID) *Request {
	if t == nil {
		return nil
	}
	r := &Request{tracer: t.tracer, began: began}
	r.begin(traceparent, id)
	return r
}

func (r *Request) begin(traceparent string, id run.ID) {
	ctx := parent(traceparent, id)
	r.named = trace.SpanContextFromContext(ctx).IsValid()
	ctx, r.span = r.tracer.Start(ctx, "POST /v1/runs", trace.WithTimestamp(r.began), trace.WithSpanKind(trace.SpanKindServer))
	carrier := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, carrier)
	r.traceparent = carrier["traceparent"]
}

// Traceparent is what the run's record says of the trace.
func (r *Request) Traceparent() string {
	if r == nil {
		return ""
	}
	return r.traceparent
}

// Admitted tells which run came of the request. A replay that is in no trace of its client's belongs to that of the run.
func (r *Request) Admitted(record run.Run, replayed bool) {
	if r == nil {
		return
	}
	if replayed && !r.named {
		first := ""
		if record.Request != nil {
			first = record.Request.Traceparent
		}
		r.begin(first, record.ID)
	}
	r.run = record.ID
	r.span.SetAttributes(attribute.String("ephemeral.run", string(record.ID)), attribute.String("ephemeral.org", record.Org),
		attribute.Bool("ephemeral.replayed", replayed))
}

// End sends the span, with the status that was answered.
func (r *Request) End(status int) {
	if r == nil || r.run == "" {
		return
	}
	r.span.SetAttributes(attribute.Int("http.response.status_code", status), attribute.String("http.request.method", http.MethodPost),
		attribute.String("http.route", "/v1/runs"))
	if status >= http.StatusInternalServerError {
		r.span.SetStatus(codes.Error, "")
	}
	r.span.End()
}
