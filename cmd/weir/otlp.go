package main

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"
)

const (
	otlpEndpoint = "http://localhost:4318" // of the specification, as are the path and the timeout
	otlpPath     = "/v1/traces"
	otlpTimeout  = 10 * time.Second
	otlpBackoff  = 500 * time.Millisecond // doubled with each failure
)

// otlpClient sends spans by OTLP over HTTP. The client of the OpenTelemetry
// project links gRPC too, whatever it speaks: 15 MB more of binary.
type otlpClient struct {
	http    *http.Client
	url     string
	header  http.Header
	gzip    bool
	timeout time.Duration
}

// newOTLPClient makes a client as OTEL_EXPORTER_OTLP_… say.
func newOTLPClient(env func(string) string) (*otlpClient, error) {
	// What is said of traces alone comes before what is said of all signals.
	get := func(name string) string {
		if v := strings.TrimSpace(env("OTEL_EXPORTER_OTLP_TRACES_" + name)); v != "" {
			return v
		}
		return strings.TrimSpace(env("OTEL_EXPORTER_OTLP_" + name))
	}
	c := &otlpClient{url: strings.TrimSpace(env("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")), timeout: otlpTimeout, header: http.Header{}}
	if c.url == "" {
		base := get("ENDPOINT")
		if base == "" {
			base = otlpEndpoint
		}
		c.url = strings.TrimSuffix(base, "/") + otlpPath
	}
	if u, err := url.Parse(c.url); err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return nil, fmt.Errorf("the endpoint of OTLP is no http or https URL")
	}
	for name, value := range otlpHeaders(get("HEADERS")) {
		c.header.Set(name, value)
	}
	c.header.Set("Content-Type", "application/x-protobuf")
	c.header.Set("User-Agent", "weir/"+buildVersion())
	switch compression := get("COMPRESSION"); compression {
	case "", "none":
	case "gzip":
		c.gzip = true
		c.header.Set("Content-Encoding", "gzip")
	default:
		return nil, fmt.Errorf("OTEL_EXPORTER_OTLP_COMPRESSION is %q; there are gzip and none", compression)
	}
	if text := get("TIMEOUT"); text != "" {
		ms, err := strconv.Atoi(text)
		if err != nil || ms <= 0 {
			return nil, fmt.Errorf("OTEL_EXPORTER_OTLP_TIMEOUT is %q; it is a number of milliseconds", text)
		}
		c.timeout = time.Duration(ms) * time.Millisecond
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	var err error
	if transport.TLSClientConfig, err = otlpTLS(get("CERTIFICATE"), get("CLIENT_CERTIFICATE"), get("CLIENT_KEY")); err != nil {
		return nil, err
	}
	c.http = &http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	return c, nil
}

// otlpHeaders reads a list of name=value, each as in a URL.
func otlpHeaders(list string) map[string]string {
	headers := map[string]string{}
	for entry := range strings.SplitSeq(list, ",") {
		name, value, ok := strings.Cut(entry, "=")
		name, nameErr := url.PathUnescape(strings.TrimSpace(name))
		value, valueErr := url.PathUnescape(strings.TrimSpace(value))
		if ok && name != "" && nameErr == nil && valueErr == nil {
			headers[name] = value
		}
	}
	return headers
}

// otlpTLS trusts the certificates of a file, and shows one of our own; "" is
// whom the machine trusts, and none.
func otlpTLS(ca, cert, key string) (*tls.Config, error) {
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if ca != "" {
		pem, err := os.ReadFile(ca)
		if err != nil {
			return nil, fmt.Errorf("OTEL_EXPORTER_OTLP_CERTIFICATE: %w", err)
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("OTEL_EXPORTER_OTLP_CERTIFICATE: no certificate in %s", ca)
		}
	}
	if cert != "" && key != "" {
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			return nil, fmt.Errorf("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE: %w", err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return config, nil
}

// Start is part of otlptrace.Client.
func (c *otlpClient) Start(context.Context) error { return nil }

// Stop is part of otlptrace.Client.
func (c *otlpClient) Stop(context.Context) error {
	c.http.CloseIdleConnections()
	return nil
}

// UploadTraces is part of otlptrace.Client. It tries again for as long as the
// collector asks for it and the timeout allows.
func (c *otlpClient) UploadTraces(ctx context.Context, spans []*tracepb.ResourceSpans) error {
	// ExportTraceServiceRequest, which comes with gRPC, has the same form.
	body, err := proto.Marshal(&tracepb.TracesData{ResourceSpans: spans})
	if err != nil {
		return err
	}
	if c.gzip {
		var packed bytes.Buffer
		w := gzip.NewWriter(&packed)
		_, _ = w.Write(body) // into memory
		_ = w.Close()
		body = packed.Bytes()
	}
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	for wait := otlpBackoff; ; wait *= 2 {
		again, asked, err := c.post(ctx, body)
		if err == nil || !again {
			return err
		}
		t := time.NewTimer(max(wait, asked))
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return err
		}
	}
}

// post sends once. again says that it may be tried again, after what was asked
// for.
func (c *otlpClient) post(ctx context.Context, body []byte) (again bool, asked time.Duration, _ error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url, bytes.NewReader(body))
	if err != nil {
		return false, 0, err
	}
	req.Header = c.header.Clone()
	resp, err := c.http.Do(req)
	if err != nil {
		return true, 0, err
	}
	defer func() { _ = resp.Body.Close() }()
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, 64<<10)) // so that the connection serves again
	if resp.StatusCode >= 200 && resp.StatusCode <= 299 {
		return false, 0, nil
	}
	switch resp.StatusCode {
	case http.StatusTooManyRequests, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		again = true
		if seconds, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil {
			asked = time.Duration(min(max(seconds, 0), 3600)) * time.Second
		}
	}
	return again, asked, fmt.Errorf("the collector answered %s", resp.Status)
}
