// Package tracing sends one OpenTelemetry trace of each run to a collector, over OTLP/HTTP. It is off unless an endpoint is
// configured; then a *Tracer is nil, and all its methods do nothing.
//
// A gateway sends the span of the request; the node that ended the run sends all others, made of the run's own record and
// events, so that trace and timeline agree. Of a run that no node ended, the process does whose call ended it. Where both belong travels in the record, as run.Spec.Traceparent. A span
// carries states, codes, sizes, money and ids, and no content: it is made for runs under zero data retention as well.
package tracing

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"strings"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"

	"github.com/ephemeral-run/ephemeral/run"
)

// Config says where traces go. The names are OpenTelemetry's own; its other variables (OTEL_TRACES_SAMPLER,
// OTEL_SERVICE_NAME, OTEL_BSP_*, OTEL_EXPORTER_OTLP_CERTIFICATE ...) hold as well.
type Config struct {
	Endpoint string `env:"OTEL_EXPORTER_OTLP_ENDPOINT" help:"base URL of an OpenTelemetry collector that takes OTLP over HTTP, e.g. http://127.0.0.1:4318 (empty: no traces)"`
	Headers  string `env:"OTEL_EXPORTER_OTLP_HEADERS" secret:"true" help:"headers of what is sent to the collector, name=value, comma-separated"`
	Disabled bool   `env:"OTEL_SDK_DISABLED" envDefault:"false" help:"true: no traces, whatever the endpoint"`
}

// Tracer sends traces, in the background and in batches: nobody waits for a collector, and what it does not take is lost.
type Tracer struct {
	provider *sdk.TracerProvider
	tracer   trace.Tracer
}

// Open makes a tracer; nil when the configuration names no endpoint. It makes no connection. It takes the process's one
// error handler of OpenTelemetry.
func Open(ctx context.Context, cfg Config, version string, log *slog.Logger) (*Tracer, error) {
	if cfg.Endpoint == "" || cfg.Disabled {
		return nil, nil
	}
	options, err := cfg.options()
	if err != nil {
		return nil, err
	}
	exporter, err := otlptracehttp.New(ctx, options...)
	if err != nil {
		return nil, fmt.Errorf("open the exporter of traces: %w", err)
	}
	what, err := resource.New(ctx,
		resource.WithAttributes(attribute.String("service.name", "ephemeral"), attribute.String("service.version", version)),
		resource.WithTelemetrySDK(), resource.WithFromEnv())
	if err != nil {
		return nil, errors.Join(fmt.Errorf("OTEL_RESOURCE_ATTRIBUTES: %w", err), exporter.Shutdown(ctx))
	}
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { log.Warn("traces are lost", "error", err) }))
	provider := sdk.NewTracerProvider(sdk.WithBatcher(exporter), sdk.WithResource(what), sdk.WithIDGenerator(ids{}))
	return &Tracer{provider: provider, tracer: provider.Tracer("github.com/ephemeral-run/ephemeral")}, nil
}

// options checks the configuration. No error quotes it: URL and headers may hold credentials.
func (c Config) options() ([]otlptracehttp.Option, error) {
	u, err := url.Parse(c.Endpoint)
	if err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https") {
		return nil, errors.New("OTEL_EXPORTER_OTLP_ENDPOINT: want a URL like http://127.0.0.1:4318")
	}
	headers := map[string]string{}
	for pair := range strings.SplitSeq(c.Headers, ",") {
		if pair = strings.TrimSpace(pair); pair == "" {
			continue
		}
		name, value, ok := strings.Cut(pair, "=")
		value, err := url.PathUnescape(strings.TrimSpace(value))
		if name = strings.TrimSpace(name); !ok || name == "" || err != nil {
			return nil, errors.New("OTEL_EXPORTER_OTLP_HEADERS: want name=value, comma-separated, values percent-encoded")
		}
		headers[name] = value
	}
	return []otlptracehttp.Option{otlptracehttp.WithEndpointURL(u.JoinPath("v1/traces").String()), otlptracehttp.WithHeaders(headers)}, nil
}

// Close sends what is left, until ctx ends.
func (t *Tracer) Close(ctx context.Context) error {
	if t == nil {
		return nil
	}
	if err := t.provider.Shutdown(ctx); err != nil {
		return fmt.Errorf("send the last traces: %w", err)
	}
	return nil
}

// of is the trace of a run that no client named: its id's digits.
func of(id run.ID) trace.TraceID {
	var t trace.TraceID
	b, err := hex.DecodeString(strings.TrimPrefix(string(id), "run_"))
	if err == nil && len(b) == len(t) {
		copy(t[:], b)
	}
	return t
}

// parent is a context under the span that a traceparent (W3C Trace Context) names; without one, and under none that is
// valid, spans begin the run's own trace.
func parent(traceparent string, id run.ID) context.Context {
	ctx := context.WithValue(context.Background(), wanted{}, of(id))
	return propagation.TraceContext{}.Extract(ctx, propagation.MapCarrier{"traceparent": traceparent})
}

// wanted is the key of the trace id that a new trace gets.
type wanted struct{}

// ids makes ids of true randomness: those of clients' traces are not to be guessed from others.
type ids struct{}

func (ids) NewIDs(ctx context.Context) (trace.TraceID, trace.SpanID) {
	t, _ := ctx.Value(wanted{}).(trace.TraceID)
	for !t.IsValid() {
		_, _ = rand.Read(t[:]) // never fails
	}
	return t, ids{}.NewSpanID(ctx, t)
}

func (ids) NewSpanID(context.Context, trace.TraceID) (s trace.SpanID) {
	for !s.IsValid() {
		_, _ = rand.Read(s[:])
	}
	return s
}
