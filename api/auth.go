package api

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/weir-run/weir/db"
)

// The form of tokens: see db.NewTokenSecret.
const (
	tokenPrefix = "wt_"
	tokenBytes  = 32
)

// tokenHash is what the database has of a token.
type tokenHash [sha256.Size]byte

// isToken reports whether a text has the form of a token, so that others are
// refused without a look at the database.
func isToken(text string) bool {
	encoded, ok := strings.CutPrefix(text, tokenPrefix)
	if !ok || len(encoded) != base64.RawURLEncoding.EncodedLen(tokenBytes) {
		return false
	}
	_, err := base64.RawURLEncoding.DecodeString(encoded)
	return err == nil
}

// errUnauthorized says that a request has no valid credentials.
var errUnauthorized = errors.New("no valid credentials")

// authenticate says who sends a request. Streams may name their token in the
// query, since browsers cannot set their headers. Errors: errUnauthorized;
// others mean that it cannot be told.
func (s *Server) authenticate(r *http.Request, stream bool) (*Caller, error) {
	token, given := credentials(r, stream)
	switch {
	case !given && s.config.TrustLoopback != nil && fromHere(r):
		return s.config.TrustLoopback, nil
	case !isToken(token):
		return nil, errUnauthorized
	}
	return s.tokens.get(r.Context(), tokenHash(db.HashToken(token)))
}

// credentials finds what a request shows. Something that is no token, an agent
// key for one, is given too: who shows it is not nobody.
func credentials(r *http.Request, stream bool) (token string, given bool) {
	values := r.Header.Values("Authorization")
	if len(values) == 0 && stream {
		if query := r.URL.Query(); query.Has("token") {
			return query.Get("token"), true
		}
	}
	if len(values) != 1 {
		return "", len(values) > 0 || hasAgentKey(r)
	}
	scheme, token, _ := strings.Cut(values[0], " ")
	if !strings.EqualFold(scheme, "Bearer") {
		return "", true
	}
	return strings.TrimSpace(token), true
}

// loadToken finds the token of a hash.
func (s *Server) loadToken(ctx context.Context, hash tokenHash) (*Caller, error) {
	row, err := s.queries.TokenByHash(ctx, s.pool, hash[:])
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, errUnauthorized
	} else if err != nil {
		return nil, fmt.Errorf("find token: %w", err)
	}
	scopes, err := ParseScopes(row.Scopes)
	if err != nil {
		return nil, fmt.Errorf("token %s of tenant %s: %w", row.ID, row.TenantID, err)
	}
	return &Caller{TenantID: row.TenantID, TokenID: row.ID, Scopes: scopes}, nil
}

// forwarding are the headers of proxies: with one of them, the peer's address
// says nothing about who sends the request.
var forwarding = []string{
	"Forwarded", "Via", "X-Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Forwarded-Port", "X-Forwarded-Server",
	"X-Real-Ip", "X-Client-Ip", "X-Cluster-Client-Ip", "X-Original-Forwarded-For", "X-Envoy-External-Address", "True-Client-Ip",
	"Cf-Connecting-Ip", "Fastly-Client-Ip",
}

// fromHere reports whether a program on this machine sends a request by itself.
// A web page that a browser on this machine shows does not count, unless it was
// loaded from this machine: neither one that calls us (Origin, Sec-Fetch-Site),
// nor one whose name was made to resolve to us (Host).
func fromHere(r *http.Request) bool {
	peer, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil || !peer.Addr().Unmap().IsLoopback() {
		return false
	}
	for _, name := range forwarding {
		if _, ok := r.Header[name]; ok {
			return false
		}
	}
	if !isLoopback(r.Host) {
		return false
	}
	if origins, ok := r.Header["Origin"]; ok {
		for _, origin := range origins {
			u, err := url.Parse(origin)
			if err != nil || u.Scheme != "http" && u.Scheme != "https" || !isLoopback(u.Host) {
				return false
			}
		}
		return true
	}
	switch r.Header.Get("Sec-Fetch-Site") {
	case "", "none", "same-origin": // no browser, the address bar, our own page
		return true
	default:
		return false
	}
}

// isLoopback reports whether a host, with or without a port, is this machine by
// a name that cannot be anything else.
func isLoopback(host string) bool {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	} else {
		host = strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
	}
	if strings.EqualFold(host, "localhost") {
		return true
	}
	addr, err := netip.ParseAddr(host)
	return err == nil && addr.Unmap().IsLoopback()
}
