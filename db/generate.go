// Package db holds the schema, its migrations, and every fixed query with the
// Go that sqlc makes of it. Files ending in .gen.go are sqlc's output.
package db

//go:generate env CGO_ENABLED=0 go run github.com/sqlc-dev/sqlc/cmd/sqlc@v1.31.1 generate -f ../sqlc.yaml
