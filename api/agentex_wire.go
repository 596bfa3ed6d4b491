package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/gin-gonic/gin"
	"github.com/google/uuid"

	"github.com/weir-run/weir/api/rpc"
	"github.com/weir-run/weir/api/rpc/scan"
)

// The models of the Agentex surface. Every member is there, null when it is
// empty.

// agentexAgent is an agent.
type agentexAgent struct {
	ID                     uuid.UUID       `json:"id"`
	Name                   string          `json:"name"`
	Description            string          `json:"description"`
	Status                 string          `json:"status"`
	ACPType                string          `json:"acp_type"`
	StatusReason           *string         `json:"status_reason"`
	CreatedAt              agentexTime     `json:"created_at"`
	UpdatedAt              agentexTime     `json:"updated_at"`
	RegistrationMetadata   json.RawMessage `json:"registration_metadata"`
	RegisteredAt           *agentexTime    `json:"registered_at"`
	AgentInputType         *string         `json:"agent_input_type"`
	ProductionDeploymentID *string         `json:"production_deployment_id"`
}

// agentexTask is a task.
type agentexTask struct {
	ID           uuid.UUID       `json:"id"`
	Name         *string         `json:"name"`
	Status       *string         `json:"status"`
	StatusReason *string         `json:"status_reason"`
	CreatedAt    agentexTime     `json:"created_at"`
	UpdatedAt    agentexTime     `json:"updated_at"`
	CleanedAt    *agentexTime    `json:"cleaned_at"`
	Params       json.RawMessage `json:"params"`
	TaskMetadata json.RawMessage `json:"task_metadata"`
}

// agentexTaskView is a task with its agents, or null in their place.
type agentexTaskView struct {
	agentexTask
	Agents []agentexAgent `json:"agents"`
}

// agentexMessage is a message of a task.
type agentexMessage struct {
	ID              uuid.UUID       `json:"id"`
	TaskID          uuid.UUID       `json:"task_id"`
	Content         json.RawMessage `json:"content"`
	StreamingStatus *string         `json:"streaming_status"`
	CreatedAt       agentexTime     `json:"created_at"`
	UpdatedAt       *agentexTime    `json:"updated_at"`
}

// agentexTime is a time with microseconds, and without a fraction when there is
// none.
type agentexTime time.Time

// MarshalJSON writes it in UTC.
func (t agentexTime) MarshalJSON() ([]byte, error) {
	v := time.Time(t).UTC().Truncate(time.Microsecond)
	layout := `"2006-01-02T15:04:05.000000Z"`
	if v.Nanosecond() == 0 {
		layout = `"2006-01-02T15:04:05Z"`
	}
	return []byte(v.Format(layout)), nil
}

func agentexTimeOf(t *time.Time) *agentexTime {
	if t == nil {
		return nil
	}
	v := agentexTime(*t)
	return &v
}

// agentexProblem is the error body of the routes themselves.
type agentexProblem struct {
	Message string  `json:"message"`
	Code    int     `json:"code"`
	Data    *string `json:"data"` // always null
}

func problem(c *gin.Context, status int, message string) {
	writeJSON(c, status, agentexProblem{Message: message, Code: status})
}

// missingItem answers for what is not there, or is another tenant's.
func missingItem(c *gin.Context, by, name string) {
	problem(c, http.StatusNotFound, itemMissing(by, name))
}

func itemMissing(by, name string) string {
	return fmt.Sprintf("Item with %s '%s' does not exist.", by, name)
}

// shapeError says that a request does not have the shape of its route: 422.
type shapeError struct {
	kind string   // as pydantic calls it: missing, string_type, value_error
	loc  []string // where: body, params, …
	msg  string
}

func (e *shapeError) Error() string { return strings.Join(e.loc, ".") + ": " + e.msg }

// answer says it as a list of one error.
func (e *shapeError) answer(c *gin.Context) {
	loc := make([]string, len(e.loc))
	for i, part := range e.loc {
		loc[i] = pythonString(part)
	}
	path := strings.Join(loc, ", ")
	if len(loc) == 1 {
		path += ","
	}
	writeJSON(c, http.StatusUnprocessableEntity, struct {
		StatusCode int     `json:"status_code"`
		Message    string  `json:"message"`
		Data       *string `json:"data"`
	}{10422, fmt.Sprintf("[{'type': %s, 'loc': (%s), 'msg': %s}]", pythonString(e.kind), path, pythonString(e.msg)), nil})
}

// pythonString quotes a text on one line.
func pythonString(s string) string {
	return "'" + strings.NewReplacer(`\`, `\\`, `'`, `\'`, "\n", `\n`, "\r", `\r`, "\t", `\t`).Replace(s) + "'"
}

func missingField(loc ...string) *shapeError {
	return &shapeError{"missing", append([]string{"body"}, loc...), "Field required"}
}

func badField(msg string, loc ...string) *shapeError {
	return &shapeError{"value_error", append([]string{"body"}, loc...), msg}
}

// agentexCall is a request to POST /agents/…/rpc.
type agentexCall struct {
	JSONRPC *string         `json:"jsonrpc"`
	ID      json.RawMessage `json:"id"`
	Method  *string         `json:"method"`
	Params  json.RawMessage `json:"params"`
}

// agentexMethods are the methods of the surface. The last three are not built.
var agentexMethods = []string{"task/create", "message/send", "event/send", "task/cancel", "task/interrupt"}

// readCall reads a call. Strings are repaired as those of JSON-RPC are (RC-18).
// Error: *shapeError.
func readCall(body []byte) (*agentexCall, error) {
	if !utf8.Valid(body) {
		return nil, &shapeError{"json_invalid", []string{"body"}, "JSON decode error: invalid UTF-8"}
	}
	s := scan.New(body)
	s.Repair = true
	kind := s.Kind()
	if _, err := s.Value(); err != nil || s.End() != nil {
		return nil, &shapeError{"json_invalid", []string{"body"}, "JSON decode error"}
	}
	if kind != scan.Object {
		return nil, &shapeError{"model_attributes_type", []string{"body"}, "Input should be a valid dictionary or object to extract fields from"}
	}
	call := &agentexCall{}
	if err := decodeShape(body, call); err != nil {
		return nil, err
	}
	switch {
	case call.JSONRPC != nil && *call.JSONRPC != "2.0":
		return nil, &shapeError{"literal_error", []string{"body", "jsonrpc"}, "Input should be '2.0'"}
	case call.Method == nil:
		return nil, missingField("method")
	case !isScalar(call.ID):
		return nil, badField("Input should be a valid integer or string", "id")
	}
	if !slices.Contains(agentexMethods, *call.Method) {
		return nil, &shapeError{"enum", []string{"body", "method"}, "Input should be 'event/send', 'task/create', 'message/send', 'task/cancel' or 'task/interrupt'"}
	}
	if kindOf(call.Params) != scan.Object {
		return nil, missingField("params")
	}
	return call, nil
}

// isScalar reports whether an id is absent, null, a number or a string.
func isScalar(id json.RawMessage) bool {
	switch kindOf(id) {
	case scan.Invalid, scan.Null, scan.Number, scan.String:
		return true
	default:
		return false
	}
}

func kindOf(raw json.RawMessage) scan.Kind {
	s := scan.New(raw)
	return s.Kind()
}

// decodeShape decodes JSON that is valid, below a place in the body. Unknown
// members are ignored. Error: *shapeError.
func decodeShape(raw json.RawMessage, v any, loc ...string) error {
	err := json.Unmarshal(raw, v)
	if e, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		if e.Field != "" {
			loc = append(loc, strings.Split(e.Field, ".")...)
		}
		return &shapeError{"type_error", append([]string{"body"}, loc...), "Input should not be a " + e.Value}
	}
	if err != nil {
		return badField("Input is not valid", loc...)
	}
	return nil
}

// objectField reads a member that is an object or null; null and absent are nil.
func objectField(raw json.RawMessage, loc ...string) (json.RawMessage, error) {
	switch kindOf(raw) {
	case scan.Invalid, scan.Null:
		return nil, nil
	case scan.Object:
	default:
		return nil, &shapeError{"dict_type", append([]string{"body"}, loc...), "Input should be a valid dictionary"}
	}
	if len(raw) > maxTaskJSON {
		return nil, badField(fmt.Sprintf("Input should be at most %d bytes", maxTaskJSON), loc...)
	}
	var compact bytes.Buffer
	if err := json.Compact(&compact, raw); err != nil {
		return nil, badField("Input is not valid", loc...)
	}
	return compact.Bytes(), nil
}

// taskRef names a task, or none.
type taskRef struct {
	TaskID   *string `json:"task_id"`
	TaskName *string `json:"task_name"`
}

func (r *taskRef) check(required bool) error {
	switch id, name := orEmpty(r.TaskID) != "", orEmpty(r.TaskName) != ""; {
	case id && name:
		return badField("Only one of task_id and task_name may be given", "params")
	case required && !id && !name:
		return badField("One of task_id and task_name is required", "params")
	}
	return checkTaskName(orEmpty(r.TaskName), "task_name")
}

// maxTaskName is the size of the longest name of a task in bytes.
const maxTaskName = 512

func checkTaskName(name, field string) error {
	if len(name) > maxTaskName {
		return badField(fmt.Sprintf("String should have at most %d bytes", maxTaskName), "params", field)
	}
	return nil
}

// textContent is a text message as it is stored and shown.
type textContent struct {
	Type        string          `json:"type"`
	Author      string          `json:"author"`
	Style       string          `json:"style"`
	Format      string          `json:"format"`
	Content     string          `json:"content"`
	Attachments json.RawMessage `json:"attachments"`
}

// userMessage is a message of a user that did not come over this surface.
func userMessage(text string) json.RawMessage {
	return textMessage(textContent{Content: text})
}

// textMessage writes a message, with the defaults of what it leaves out.
func textMessage(t textContent) json.RawMessage {
	t.Type = "text"
	if t.Author == "" {
		t.Author = "user"
	}
	if t.Style == "" {
		t.Style = "static"
	}
	if t.Format == "" {
		t.Format = "plain"
	}
	text, err := marshal(t)
	if err != nil {
		panic(err) // strings, and JSON that was read
	}
	return text
}

// readContent reads the content of message/send. Error: *shapeError.
func readContent(raw json.RawMessage) (*textContent, error) {
	at := func(field string) []string { return []string{"params", "content", field} }
	if kindOf(raw) != scan.Object {
		return nil, missingField("params", "content")
	}
	var head struct {
		Type, Author, Style *string
	}
	if err := decodeShape(raw, &head, "params", "content"); err != nil {
		return nil, err
	}
	switch orEmpty(head.Type) {
	case "text", "reasoning", "data", "tool_request", "tool_response":
	case "":
		return nil, missingField(at("type")...)
	default:
		return nil, badField("Input should be 'text', 'reasoning', 'data', 'tool_request' or 'tool_response'", at("type")...)
	}
	switch author := orEmpty(head.Author); {
	case head.Author == nil:
		return nil, missingField(at("author")...)
	case author != "user" && author != "agent":
		return nil, badField("Input should be 'user' or 'agent'", at("author")...)
	}
	if style := orEmpty(head.Style); head.Style != nil && style != "static" && style != "active" {
		return nil, badField("Input should be 'static' or 'active'", at("style")...)
	}
	if *head.Type != "text" {
		return &textContent{Type: *head.Type}, nil // a known form that our agents do not read
	}
	var body struct {
		Content     *string         `json:"content"`
		Format      *string         `json:"format"`
		Attachments json.RawMessage `json:"attachments"`
	}
	if err := decodeShape(raw, &body, "params", "content"); err != nil {
		return nil, err
	}
	if body.Content == nil {
		return nil, missingField(at("content")...)
	}
	switch format := orEmpty(body.Format); {
	case body.Format == nil, format == "markdown", format == "plain", format == "code":
	default:
		return nil, badField("Input should be 'markdown', 'plain' or 'code'", at("format")...)
	}
	switch kindOf(body.Attachments) {
	case scan.Invalid, scan.Null, scan.Array:
	default:
		return nil, badField("Input should be a valid list", at("attachments")...)
	}
	if len(body.Attachments) > maxTaskJSON {
		return nil, badField(fmt.Sprintf("Input should be at most %d bytes", maxTaskJSON), at("attachments")...)
	}
	return &textContent{
		Type: "text", Author: *head.Author, Style: orEmpty(head.Style), Format: orEmpty(body.Format), Content: *body.Content, Attachments: body.Attachments,
	}, nil
}

// agentexAnswer is the answer of a call: HTTP 200 whatever it says.
type agentexAnswer struct {
	JSONRPC string          `json:"jsonrpc"`
	Result  any             `json:"result"`
	Error   *agentexError   `json:"error"`
	ID      json.RawMessage `json:"id"`
}

type agentexError struct {
	Code    int     `json:"code"`
	Message string  `json:"message"`
	Data    *string `json:"data"` // always null
}

func (e *agentexError) Error() string { return e.Message }

func refuse(format string, args ...any) error {
	return &agentexError{Code: rpc.InternalError, Message: fmt.Sprintf(format, args...)}
}
