package api

import (
	"context"
	"time"
)

// SystemPingResult is the result of system.ping.
type SystemPingResult struct {
	Pong bool  `json:"pong"` // always true
	TS   int64 `json:"ts" jsonschema_description:"The server's time in milliseconds since 1970."`
}

func (s *Server) systemPing(context.Context, *struct{}) (*SystemPingResult, error) {
	return &SystemPingResult{Pong: true, TS: time.Now().UnixMilli()}, nil
}
