package tracing

import (
	"context"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/ephemeral-run/ephemeral/run"
)

// maxDeeds bounds the spans of one run beside its stages; of more only the number is sent.
const maxDeeds = 1000

// Record collects what one run does, from its events. It is used under its owner's lock. Nil: traces are off.
type Record struct {
	tracer  trace.Tracer
	deeds   []deed
	omitted int
}

// deed is one thing a worker did: a model call, a call to a connection or the web, a shell command.
type deed struct {
	name       string
	kind       trace.SpanKind
	began      time.Time
	ended      time.Time
	failed     bool
	attributes []attribute.KeyValue
}

// Run begins the record of a run.
func (t *Tracer) Run() *Record {
	if t == nil {
		return nil
	}
	return &Record{tracer: t.tracer}
}

// Event notes an event that tells of a deed, at its time. It takes none of its content.
func (r *Record) Event(e run.NewEvent) {
	if r == nil {
		return
	}
	var d deed
	var ms float64
	switch data := e.Data.(type) {
	case run.ModelData:
		ms = data.Duration
		d = deed{name: "model", kind: trace.SpanKindClient, failed: data.Error != "", attributes: []attribute.KeyValue{
			attribute.String("gen_ai.request.model", data.Model), attribute.Int("http.response.status_code", data.Status),
			attribute.Int64("gen_ai.usage.input_tokens", data.InputTokens), attribute.Int64("gen_ai.usage.output_tokens", data.OutputTokens),
			attribute.Int64("ephemeral.charged_micros", int64(data.Charged)),
		}}
	case run.CallData:
		ms = data.Duration
		d = deed{name: string(e.Type), kind: trace.SpanKindClient, failed: data.Error != "", attributes: []attribute.KeyValue{
			attribute.String("ephemeral.kind", data.Kind), attribute.Int("http.response.status_code", data.Status),
			attribute.Int64("ephemeral.bytes", data.Bytes), attribute.Int64("ephemeral.charged_micros", int64(data.Charged)),
		}}
	case run.ShellData:
		ms = data.Duration
		d = deed{name: "shell", kind: trace.SpanKindInternal, failed: data.Outcome != "exited", attributes: []attribute.KeyValue{
			attribute.String("ephemeral.outcome", data.Outcome), attribute.Int("process.exit.code", data.ExitCode),
			attribute.Int64("ephemeral.bytes", data.Bytes),
		}}
	default:
		return
	}
	if len(r.deeds) == maxDeeds {
		r.omitted++
		return
	}
	d.ended = e.At
	d.began = e.At.Add(-milliseconds(ms))
	r.deeds = append(r.deeds, d)
}

// Send sends the spans of a run that has ended: the run, under it its stages one after the other, and under the worker
// what it did. done is the run's record, traceparent that of its spec.
func (r *Record) Send(done run.Run, traceparent string) {
	if r == nil || done.EndedAt == nil {
		return
	}
	ctx, span := r.tracer.Start(parent(traceparent, done.ID), "run", trace.WithTimestamp(done.QueuedAt),
		trace.WithSpanKind(trace.SpanKindConsumer), trace.WithAttributes(attributesOf(done)...))
	if !span.IsRecording() {
		return
	}
	if r.omitted > 0 {
		span.SetAttributes(attribute.Int("ephemeral.omitted_spans", r.omitted))
	}
	if done.Error != nil {
		span.SetAttributes(attribute.String("error.type", done.Error.Code))
		span.SetStatus(codes.Error, done.Error.Code)
	}
	at, working := done.QueuedAt, ctx
	for _, stage := range done.Stages {
		next := at.Add(milliseconds(stage.Ms))
		in := r.send(ctx, deed{name: stage.Name, kind: trace.SpanKindInternal, began: at, ended: next})
		if stage.Name == "worker" {
			working = in
		}
		at = next
	}
	for _, d := range r.deeds {
		r.send(working, d)
	}
	span.End(trace.WithTimestamp(*done.EndedAt))
}

// Ended sends the trace of a run that no node settled, made of its record and its stored events.
func (t *Tracer) Ended(done run.Run, events []run.Event) {
	if t == nil || done.Request == nil {
		return
	}
	record := t.Run()
	for _, e := range events {
		record.Event(run.NewEvent{Type: e.Type, At: done.QueuedAt.Add(milliseconds(e.At)), Data: e.Data})
	}
	record.Send(done, done.Request.Traceparent)
}

func milliseconds(ms float64) time.Duration { return time.Duration(ms * float64(time.Millisecond)) }

func (r *Record) send(ctx context.Context, d deed) context.Context {
	ctx, span := r.tracer.Start(ctx, d.name, trace.WithTimestamp(d.began), trace.WithSpanKind(d.kind), trace.WithAttributes(d.attributes...))
	if d.failed {
		span.SetStatus(codes.Error, "")
	}
	span.End(trace.WithTimestamp(d.ended))
	return ctx
}

func attributesOf(r run.Run) []attribute.KeyValue {
	return []attribute.KeyValue{
		attribute.String("ephemeral.run", string(r.ID)), attribute.String("ephemeral.org", r.Org),
		attribute.String("ephemeral.state", string(r.State)), attribute.String("ephemeral.node", r.Node),
		attribute.String("ephemeral.machine", r.Machine), attribute.String("ephemeral.isolation", r.Isolation),
		attribute.Int64("ephemeral.reserved_micros", int64(r.Money.Reserved)), attribute.Int64("ephemeral.charged_micros", int64(r.Money.Charged)),
		attribute.Int64("ephemeral.model_calls", r.Usage.ModelCalls), attribute.Int64("ephemeral.tokens", r.Usage.TotalTokens),
		attribute.Int64("ephemeral.shell_commands", r.Usage.ShellCommands),
	}
}
