package jobs

import (
	"github.com/google/uuid"
	"github.com/riverqueue/river"

	"github.com/weir-run/weir/db"
)

// The queues of the fleet: kind times class. Background work is what cron,
// heartbeats and sessions start; it has slots of its own.
const (
	QueueTurns    = "turns"
	QueueTurnsBg  = "turns_bg"
	QueueSpawns   = "spawns"
	QueueGraphs   = "graphs"
	QueueGates    = "gates"
	QueueMemory   = "memory"
	QueueDelivery = "delivery"
	// QueueSuspect holds runs that lost two workers at one step. Whoever takes
	// one runs it alone in a child process.
	QueueSuspect = "suspect"
)

// Queues are all of them.
var Queues = []string{QueueTurns, QueueTurnsBg, QueueSpawns, QueueGraphs, QueueGates, QueueMemory, QueueDelivery, QueueSuspect}

// queueOf is the queue of a kind of run, outside suspicion.
func queueOf(kind db.RunKind) string {
	switch kind {
	case db.RunKindSpawn:
		return QueueSpawns
	case db.RunKindGraphNode:
		return QueueGraphs
	case db.RunKindWakeGate:
		return QueueGates
	case db.RunKindMemorySweep:
		return QueueMemory
	case db.RunKindDelivery:
		return QueueDelivery
	default:
		return QueueTurns
	}
}

// kindOf is the kind of a queue's runs; of suspects most are turns.
func kindOf(queue string) db.RunKind {
	switch queue {
	case QueueSpawns:
		return db.RunKindSpawn
	case QueueGraphs:
		return db.RunKindGraphNode
	case QueueGates:
		return db.RunKindWakeGate
	case QueueMemory:
		return db.RunKindMemorySweep
	case QueueDelivery:
		return db.RunKindDelivery
	default:
		return db.RunKindTurn
	}
}

// Turn carries a turn forward. Like every nudge it names its run and copies
// nothing of it, so an old job cannot act on old data, and a spare one finds
// nothing to claim.
type Turn struct {
	RunID uuid.UUID `json:"run_id"`
}

// Kind is stored in every queued row: renaming it needs KindAliases.
func (Turn) Kind() string { return "turn" }

// Spawn carries a sub-agent's run forward.
type Spawn struct {
	RunID uuid.UUID `json:"run_id"`
}

// Kind is stored in every queued row: renaming it needs KindAliases.
func (Spawn) Kind() string { return "spawn" }

// nudgeArgs is the job of a run's kind. Runs of the kinds graph and cron have
// none: they move in the transactions of their children.
func nudgeArgs(kind db.RunKind, id uuid.UUID) river.JobArgs {
	if kind == db.RunKindSpawn {
		return Spawn{RunID: id}
	}
	return Turn{RunID: id}
}
