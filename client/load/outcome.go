package load

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"time"

	"github.com/weir-run/weir/client"
)

// phase is a part of a turn whose time is measured.
type phase int

const (
	phaseAccept   phase = iota // until agent.request is answered
	phaseQueued                // from its acceptance until a worker has it, by the database's clock
	phaseRunning               // from there to its end, by the database's clock
	phaseTotal                 // until its answer
	phaseRejected              // until it was rejected
	phases
)

// Phases are the names of what Stats.LatencyMs may have, in their order.
var Phases = []string{phaseAccept: "accept", phaseQueued: "queued", phaseRunning: "running", phaseTotal: "total", phaseRejected: "rejected"}

// verdict is what became of a turn.
type verdict int

const (
	verdictOK verdict = iota
	// verdictRejected is backpressure: not now, but later.
	verdictRejected
	verdictFailed
	// verdictAbandoned is nobody's fault: the load was cut off.
	verdictAbandoned
)

// outcome is what became of a turn, and when, from its due time.
type outcome struct {
	verdict verdict
	// code is why: a JSON-RPC code, or one of the words that Error.Code has.
	code    string
	message string
	took    [phases]time.Duration
	has     [phases]bool
}

func (o *outcome) measured(p phase, d time.Duration) { o.took[p], o.has[p] = max(0, d), true }

// answered is how the API begins the answer of a call that it carried out.
var answered = []byte(`{"jsonrpc":"2.0","id":1,"result":`)

// read looks at an answer. result may be nil; it is filled if the API carried the
// call out.
func (o *outcome) read(status int, body []byte, result any) bool {
	if result == nil && status == http.StatusOK && bytes.HasPrefix(body, answered) {
		return true
	}
	var message struct {
		Result json.RawMessage `json:"result"`
		Error  *client.Error   `json:"error"`
	}
	err := json.Unmarshal(body, &message)
	if err == nil && message.Error == nil && message.Result != nil {
		if result == nil {
			return true
		}
		if err = json.Unmarshal(message.Result, result); err == nil {
			return true
		}
	}
	if message.Error == nil {
		o.refused(status, &client.Error{Message: "the answer is no JSON-RPC"}, fmt.Sprintf("http_%d", status))
		return false
	}
	o.refused(status, message.Error, fmt.Sprint(message.Error.Code))
	return false
}

func (o *outcome) refused(status int, e *client.Error, code string) {
	o.verdict, o.code, o.message = verdictFailed, code, e.Error()
	var d struct {
		Retryable bool `json:"retryable"`
	}
	_ = e.DecodeData(&d) // then it is not
	switch {
	case e.Code == client.CodeTurnFailed, e.Code == client.CodeStillRunning: // it was accepted
	case d.Retryable, status == http.StatusTooManyRequests, status == http.StatusServiceUnavailable:
		o.verdict = verdictRejected
	}
}

// lost is the outcome of a request without an answer.
func (o *outcome) lost(err error) {
	o.verdict, o.message = verdictFailed, err.Error()
	_, unconnected := errors.AsType[*connectError](err)
	switch {
	case unconnected:
		o.code = "connect"
	case errors.Is(err, os.ErrDeadlineExceeded):
		o.code, o.message = "timeout", "no answer in time"
	default:
		o.code, o.message = "network", "the connection was lost: "+err.Error()
	}
}

// ended is the outcome of a run that has come to an end.
func (o *outcome) ended(r *client.RunDetail) {
	created, queued := stamp(r.CreatedAt)
	started, ran := stamp(r.StartedAt)
	finished, over := stamp(r.FinishedAt)
	if queued && ran {
		o.measured(phaseQueued, started.Sub(created))
	}
	if ran && over {
		o.measured(phaseRunning, finished.Sub(started))
	}
	if r.State == "completed" {
		return
	}
	o.verdict, o.code, o.message = verdictFailed, "run_"+r.State, "the run is "+r.State
	if r.Error != "" {
		o.message = r.Error
	}
}

func stamp(text string) (time.Time, bool) {
	t, err := time.Parse(time.RFC3339Nano, text)
	return t, err == nil
}
