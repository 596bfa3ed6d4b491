package main

import (
	"cmp"
	"context"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/exaring/otelpgx"
	"github.com/go-logr/logr"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"

	"github.com/weir-run/weir/policy/mask"
)

const (
	// flushWithin bounds what a process that stops waits for its last spans.
	flushWithin = 3 * time.Second
	// exportNews is how often a process says that its spans do not get through.
	exportNews = time.Minute
)

// traces is where a process's spans go; nil when it makes none. OpenTelemetry's
// own variables, OTEL_…, say where that is; those of the sampler, the batches
// and the limits are read by its SDK.
//
// The global provider stays unset: the SDKs of model providers would send what
// they know of messages there.
type traces struct{ *sdktrace.TracerProvider }

// openTraces starts to collect spans if the environment names a collector. What
// it cannot follow there it says, and goes on without: no turn depends on it.
func openTraces(ctx context.Context, log *slog.Logger, masker *mask.Masker) *traces {
	wanted, problem := wantsTraces(os.Getenv)
	if problem != "" {
		log.Warn("no traces", "reason", problem)
	}
	if !wanted {
		return nil
	}
	client, err := newOTLPClient(os.Getenv)
	if err != nil {
		log.Warn("no traces", "error", err)
		return nil
	}
	otel.SetLogger(logr.FromSlogHandler(log.Handler()))
	otel.SetErrorHandler(&exportErrors{log: log})
	exporter := otlptrace.NewUnstarted(client)
	// The environment's word comes last and stands.
	described, err := resource.New(ctx, resource.WithTelemetrySDK(), resource.WithAttributes(
		attribute.String("service.name", "weir"), attribute.String("service.version", buildVersion()),
		attribute.String("service.instance.id", uuid.NewString()),
	), resource.WithHost(), resource.WithProcessPID(), resource.WithFromEnv())
	if err != nil {
		log.Warn("traces", "error", err) // what could be read is there
	}
	return &traces{sdktrace.NewTracerProvider(sdktrace.WithBatcher(maskedSpans{exporter, masker}), sdktrace.WithResource(described))}
}

// wantsTraces says whether spans are to be collected. problem is what there is
// in the environment that cannot be followed.
func wantsTraces(env func(string) string) (wanted bool, problem string) {
	get := func(name string) string { return strings.TrimSpace(env(name)) }
	if strings.EqualFold(get("OTEL_SDK_DISABLED"), "true") {
		return false, ""
	}
	if exporters := get("OTEL_TRACES_EXPORTER"); exporters != "" {
		names := strings.Split(exporters, ",")
		for i := range names {
			names[i] = strings.ToLower(strings.TrimSpace(names[i]))
		}
		if !slices.Contains(names, "otlp") {
			if exporters != "none" {
				problem = "OTEL_TRACES_EXPORTER is " + exporters + "; there are otlp and none"
			}
			return false, problem
		}
	} else if get("OTEL_EXPORTER_OTLP_ENDPOINT") == "" && get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") == "" {
		return false, ""
	}
	const spoken = "http/protobuf"
	if protocol := cmp.Or(get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"), get("OTEL_EXPORTER_OTLP_PROTOCOL"), spoken); protocol != spoken {
		return false, "OTEL_EXPORTER_OTLP_PROTOCOL is " + protocol + "; there is " + spoken
	}
	return true, ""
}

// provider is what the spans of API and workers go to; nil for none.
func (t *traces) provider() trace.TracerProvider {
	if t == nil {
		return nil
	}
	return t.TracerProvider
}

// queries traces the queries of a pool, those of requests and turns that are
// traced themselves. Their arguments stay out.
func (t *traces) queries() pgx.QueryTracer {
	return otelpgx.NewTracer(otelpgx.WithTracerProvider(t.TracerProvider), otelpgx.WithDisableConnectionDetailsInAttributes(),
		otelpgx.WithDisableAcquireTracer(), otelpgx.WithSpanNameCtxFunc(func(_ context.Context, sql string) string { return queryName(sql) }))
}

// queryName is the name that each of our queries begins with, or its first word.
func queryName(sql string) string {
	words := strings.Fields(strings.TrimPrefix(sql, "-- name:"))
	if len(words) == 0 {
		return "query"
	}
	return words[0]
}

// close sends the last spans, or gives up in time.
func (t *traces) close(log *slog.Logger) {
	if t == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), flushWithin)
	defer cancel()
	if err := t.Shutdown(ctx); err != nil {
		log.Warn("the last spans are lost", "error", err)
	}
}

// exportErrors tells of spans that did not get through, once in a while.
type exportErrors struct {
	log  *slog.Logger
	mu   sync.Mutex
	last time.Time
}

// Handle is part of otel.ErrorHandler.
func (e *exportErrors) Handle(err error) {
	e.mu.Lock()
	tell := time.Since(e.last) >= exportNews
	if tell {
		e.last = time.Now()
	}
	e.mu.Unlock()
	if tell {
		e.log.Warn("traces", "error", err)
	}
}

// maskedSpans sends spans on without what must not leave: credentials, and the
// text of errors, which may quote what a user wrote. Our own spans hold
// neither; those of queries may.
type maskedSpans struct {
	sdktrace.SpanExporter
	masker *mask.Masker
}

// ExportSpans is part of sdktrace.SpanExporter.
func (m maskedSpans) ExportSpans(ctx context.Context, spans []sdktrace.ReadOnlySpan) error {
	masked := make([]sdktrace.ReadOnlySpan, len(spans))
	for i, s := range spans {
		masked[i] = maskedSpan{s, m.masker}
	}
	return m.SpanExporter.ExportSpans(ctx, masked)
}

type maskedSpan struct {
	sdktrace.ReadOnlySpan
	masker *mask.Masker
}

func (s maskedSpan) Name() string { return s.masker.String(s.ReadOnlySpan.Name()) }

func (s maskedSpan) Status() sdktrace.Status {
	return sdktrace.Status{Code: s.ReadOnlySpan.Status().Code}
}

func (s maskedSpan) Attributes() []attribute.KeyValue {
	return s.attributes(s.ReadOnlySpan.Attributes())
}

func (s maskedSpan) Events() []sdktrace.Event {
	events := slices.Clone(s.ReadOnlySpan.Events())
	for i := range events {
		events[i].Attributes = s.attributes(events[i].Attributes)
	}
	return events
}

func (s maskedSpan) attributes(list []attribute.KeyValue) []attribute.KeyValue {
	masked := make([]attribute.KeyValue, 0, len(list))
	for _, a := range list {
		switch {
		case a.Key == "exception.message", a.Key == "exception.stacktrace":
			continue
		case a.Value.Type() == attribute.STRING:
			a.Value = attribute.StringValue(s.masker.String(a.Value.AsString()))
		case a.Value.Type() == attribute.STRINGSLICE:
			values := slices.Clone(a.Value.AsStringSlice())
			for i := range values {
				values[i] = s.masker.String(values[i])
			}
			a.Value = attribute.StringSliceValue(values)
		}
		masked = append(masked, a)
	}
	return masked
}
