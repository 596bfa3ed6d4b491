package db

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
)

// DefaultTenant is the tenant that Migrate makes. Its admins operate the fleet.
const DefaultTenant = "default"

// tokenPrefix makes a leaked secret easy to recognise; policy/mask knows it.
const tokenPrefix = "wt_"

// tokenBytes of randomness in a secret: beyond guessing, so that a plain hash
// of it is as safe as a slow one.
const tokenBytes = 32

// NewTokenSecret mints the secret of an API token. It is shown once and stored
// as HashToken of it.
func NewTokenSecret() string {
	var b [tokenBytes]byte
	_, _ = rand.Read(b[:]) // never fails
	return tokenPrefix + base64.RawURLEncoding.EncodeToString(b[:])
}

// HashToken is what api_token.secret_hash holds of a secret.
func HashToken(secret string) []byte {
	sum := sha256.Sum256([]byte(secret))
	return sum[:]
}
