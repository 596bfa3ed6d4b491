package jobs

import "github.com/weir-run/weir/db"

// The types of a session's event store (RC-40).
const (
	EventRequest      = db.EventType("agent.request")
	EventClarify      = db.EventType("agent.clarify")
	EventResponse     = db.EventType("agent.response")
	EventStatus       = db.EventType("agent.status")
	EventWarning      = db.EventType("agent.warning")
	EventError        = db.EventType("agent.error")
	EventUsage        = db.EventType("agent.usage")
	EventPlan         = db.EventType("agent.plan")
	EventSummary      = db.EventType("agent.summary")
	EventDebug        = db.EventType("agent.debug")
	EventToolRequest  = db.EventType("tool.request")
	EventToolResponse = db.EventType("tool.response")
	EventMemoryRead   = db.EventType("memory.read")
	EventMemoryWrite  = db.EventType("memory.write")
)
