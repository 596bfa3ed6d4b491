package api

import (
	"context"
	"errors"
	"fmt"
	"regexp"

	"github.com/jackc/pgx/v5"

	"github.com/weir-run/weir/db"
)

var tokenID = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$`)

// TokenInfo is a token without its secret.
type TokenInfo struct {
	ID        string   `json:"id"`
	Scopes    []string `json:"scopes"`
	CreatedAt string   `json:"createdAt"`
}

// TokensListResult is the result of tokens.list.
type TokensListResult struct {
	Tokens []TokenInfo `json:"tokens"`
}

func (s *Server) tokensList(ctx context.Context, _ *struct{}) (*TokensListResult, error) {
	rows, err := s.queries.TokenList(ctx, s.pool, callerFrom(ctx).TenantID)
	if err != nil {
		return nil, fmt.Errorf("list tokens: %w", err)
	}
	r := &TokensListResult{Tokens: make([]TokenInfo, len(rows))}
	for i, row := range rows {
		r.Tokens[i] = TokenInfo{row.ID, row.Scopes, timestamp(row.CreatedAt)}
	}
	return r, nil
}

// TokensCreateParams are the parameters of tokens.create.
type TokensCreateParams struct {
	ID     string   `json:"id" jsonschema:"required" jsonschema_description:"1 to 128 of A-Z a-z 0-9 . _ -, the first a letter or digit."`
	Scopes []string `json:"scopes" jsonschema:"required,minItems=1" jsonschema_description:"Of rpc, admin, read and *."`
}

// Validate checks what tags cannot say.
func (p *TokensCreateParams) Validate() error {
	if !tokenID.MatchString(p.ID) {
		return &InvalidError{Field: "id", Reason: "invalid", Message: "must be 1 to 128 of A-Z a-z 0-9 . _ -, and start with a letter or digit"}
	}
	_, err := ParseScopes(p.Scopes)
	return err
}

// TokensCreateResult is the result of tokens.create.
type TokensCreateResult struct {
	ID     string   `json:"id"`
	Secret string   `json:"secret" jsonschema_description:"The token. It is shown this once; a repeat of the call has it empty."`
	Scopes []string `json:"scopes"`
}

func (r *TokensCreateResult) withoutSecret() any {
	stored := *r
	stored.Secret = ""
	return &stored
}

func (s *Server) defineTokensCreate() Method {
	return Define("tokens.create", ScopeAdmin, "Makes a token.", s.tokensCreate, Describe(
		"A token with `admin` makes tokens with `rpc`, `admin` and `read`; only one with `*` makes one with `*`."))
}

// tokensCreate makes a token. Errors: *InvalidError for an id that is taken,
// *ScopeError.
func (s *Server) tokensCreate(ctx context.Context, p *TokensCreateParams) (*TokensCreateResult, error) {
	scopes, err := ParseScopes(p.Scopes)
	if err != nil {
		return nil, err
	}
	if err := mayMint(ctx, scopes); err != nil {
		return nil, err
	}
	secret := db.NewTokenSecret()
	arg := db.TokenPutParams{TenantID: callerFrom(ctx).TenantID, ID: p.ID, SecretHash: db.HashToken(secret), Scopes: scopes.Names()}
	err = s.inTx(ctx, func(tx pgx.Tx) error {
		n, err := s.queries.TokenPut(ctx, tx, arg)
		if err != nil {
			return fmt.Errorf("make token %s: %w", p.ID, err)
		}
		if n == 0 {
			return &InvalidError{Field: "id", Reason: "exists", Message: "is the id of a token already"}
		}
		return nil
	}, s.agentsChanged)
	if err != nil {
		return nil, err
	}
	return &TokensCreateResult{ID: p.ID, Secret: secret, Scopes: arg.Scopes}, nil
}

// mayMint reports whether the caller may make a token with these scopes.
func mayMint(ctx context.Context, scopes Scopes) error {
	if scopes&ScopeAll != 0 && callerFrom(ctx).Scopes&ScopeAll == 0 {
		return &ScopeError{"*"}
	}
	return nil
}

// TokenParams are the parameters of methods about one token.
type TokenParams struct {
	ID string `json:"id" jsonschema:"required"`
}

// TokensRevokeResult is the result of tokens.revoke.
type TokensRevokeResult struct {
	ID      string `json:"id"`
	Revoked bool   `json:"revoked"` // always true
}

func (s *Server) defineTokensRevoke() Method {
	return Define("tokens.revoke", ScopeAdmin, "Revokes a token for good.", s.tokensRevoke, Describe(
		"It is refused from its next request on: at once by the process that answers, within half a second by every other. "+
			"Runs that it started go on."))
}

func (s *Server) tokensRevoke(ctx context.Context, p *TokenParams) (*TokensRevokeResult, error) {
	err := s.inTx(ctx, func(tx pgx.Tx) error {
		n, err := s.queries.TokenRevoke(ctx, tx, db.TokenRevokeParams{TenantID: callerFrom(ctx).TenantID, ID: p.ID})
		if err == nil && n == 0 {
			return noToken(p.ID)
		}
		return err
	}, s.agentsChanged)
	if err != nil {
		return nil, err
	}
	return &TokensRevokeResult{ID: p.ID, Revoked: true}, nil
}

func noToken(id string) error { return &NotFoundError{"token", fmt.Sprintf("%.80s", id)} }

// TokensRotateResult is the result of tokens.rotate.
type TokensRotateResult struct {
	TokensCreateResult
	Rotated bool `json:"rotated"` // always true
}

func (r *TokensRotateResult) withoutSecret() any {
	stored := *r
	stored.Secret = ""
	return &stored
}

func (s *Server) defineTokensRotate() Method {
	return Define("tokens.rotate", ScopeAdmin, "Puts a new token in place of one, with its id and scopes.", s.tokensRotate, Describe(
		"The old one is refused as tokens.revoke says. Only a token with `*` rotates one with `*`."))
}

// tokensRotate replaces a token's secret. Errors: *NotFoundError, also for a
// revoked token, *ScopeError.
func (s *Server) tokensRotate(ctx context.Context, p *TokenParams) (*TokensRotateResult, error) {
	tenant := callerFrom(ctx).TenantID
	r := &TokensRotateResult{TokensCreateResult: TokensCreateResult{ID: p.ID, Secret: db.NewTokenSecret()}, Rotated: true}
	err := s.inTx(ctx, func(tx pgx.Tx) error {
		row, err := s.queries.TokenLock(ctx, tx, db.TokenLockParams{TenantID: tenant, ID: p.ID})
		if errors.Is(err, pgx.ErrNoRows) || err == nil && row.RevokedAt != nil {
			return noToken(p.ID)
		} else if err != nil {
			return fmt.Errorf("lock token: %w", err)
		}
		scopes, err := ParseScopes(row.Scopes)
		if err != nil {
			return fmt.Errorf("token %s: scopes %q", p.ID, row.Scopes)
		}
		if err := mayMint(ctx, scopes); err != nil {
			return err
		}
		r.Scopes = scopes.Names()
		return s.queries.TokenRotate(ctx, tx, db.TokenRotateParams{TenantID: tenant, ID: p.ID, SecretHash: db.HashToken(r.Secret)})
	}, s.agentsChanged)
	if err != nil {
		return nil, err
	}
	return r, nil
}
