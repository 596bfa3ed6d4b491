package api

import (
	"context"
	"os"
	"runtime"
	"time"
)

// GatewayStatusParams are the parameters of gateway.status.
type GatewayStatusParams struct {
	WorkerID string `json:"workerId" jsonschema_description:"Another process. Not supported yet: leave it out."`
}

// GatewayStatusResult is the result of gateway.status.
type GatewayStatusResult struct {
	PID         int      `json:"pid"`
	Uptime      float64  `json:"uptime" jsonschema_description:"Seconds since the process began to serve."`
	MemoryUsage uint64   `json:"memoryUsage" jsonschema_description:"Bytes that the process has from the system."`
	NodeVersion string   `json:"nodeVersion" jsonschema_description:"The version of Go."`
	ConfigPaths []string `json:"configPaths" jsonschema_description:"The configuration files that were read."`
	Sections    []string `json:"sections" jsonschema_description:"The sections of the configuration."`
}

func (s *Server) gatewayStatus(_ context.Context, p *GatewayStatusParams) (*GatewayStatusResult, error) {
	if p.WorkerID != "" {
		return nil, &InvalidError{Field: "workerId", Reason: "not_supported", Message: "is not supported yet"}
	}
	var memory runtime.MemStats
	runtime.ReadMemStats(&memory)
	return &GatewayStatusResult{
		PID: os.Getpid(), Uptime: time.Since(s.began).Seconds(), MemoryUsage: memory.Sys, NodeVersion: runtime.Version(),
		ConfigPaths: notNil(s.config.ConfigPaths), Sections: notNil(s.config.Sections),
	}, nil
}
