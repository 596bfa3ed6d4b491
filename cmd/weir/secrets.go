package main

import (
	"net/url"
	"os"
	"strings"

	"github.com/weir-run/weir/policy/mask"
)

// secretOf gives a worker the secrets that agents name: variables of its
// environment, but never our own, the database's or the collector's, which an
// agent with a base URL of its choice could otherwise send away.
func secretOf(name string) (string, bool) {
	if name == "" || strings.HasPrefix(name, "WEIR_") || strings.HasPrefix(name, "PG") || strings.HasPrefix(name, "OTEL_") || name == "DATABASE_URL" {
		return "", false
	}
	return os.LookupEnv(name)
}

// secretEndings are how variables are called whose values nobody should read.
var secretEndings = []string{"KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIALS"}

// newMasker hides the secrets of the environment and the passwords of the given
// URLs, beside what looks like a credential anyway.
func newMasker(urls ...string) *mask.Masker {
	var secrets []string
	for _, entry := range os.Environ() {
		name, value, _ := strings.Cut(entry, "=")
		if strings.HasPrefix(name, "OTEL_") && strings.HasSuffix(name, "_HEADERS") {
			for _, header := range otlpHeaders(value) {
				secrets = append(secrets, header)
			}
		}
		for _, ending := range secretEndings {
			if strings.HasSuffix(strings.ToUpper(name), ending) {
				secrets = append(secrets, value)
				break
			}
		}
	}
	for _, text := range urls {
		if u, err := url.Parse(text); err == nil && u.User != nil {
			if password, ok := u.User.Password(); ok {
				secrets = append(secrets, password)
			}
		}
	}
	return mask.New(secrets...)
}

// redacted is a database URL that may be shown.
func redacted(databaseURL string) string {
	u, err := url.Parse(databaseURL)
	if err != nil || u.Scheme == "" {
		return "postgres://…" // keywords and values: no part is certain to be harmless
	}
	if u.Query().Has("password") {
		q := u.Query()
		q.Set("password", "xxxxx")
		u.RawQuery = q.Encode()
	}
	return u.Redacted()
}
