package model

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"time"
)

// What both vendors' requests have in common. The order of their parts decides
// what they can cache: tools, instructions and the conversation only grow from
// one call to the next; facts may change, and the time always does, so those two
// stand at the very end.

const defaultMaxOutputTokens = 4096

func maxOutputTokens(req *Request) int64 {
	if req.MaxOutputTokens > 0 {
		return int64(req.MaxOutputTokens)
	}
	return defaultMaxOutputTokens
}

// factsText tells the model the remembered facts; "" when there are none.
func factsText(req *Request) (string, error) {
	if len(req.Facts) == 0 {
		return "", nil
	}
	var b bytes.Buffer
	b.WriteString("<facts>{")
	for i, fact := range req.Facts {
		if i > 0 {
			b.WriteByte(',')
		}
		key, err := json.Marshal(fact.Key)
		if err != nil {
			return "", err
		}
		// Marshal also escapes <, so a value cannot end the element.
		value, err := json.Marshal(fact.Value)
		if err != nil {
			return "", badRequest(fmt.Sprintf("fact %s is not JSON", fact.Key))
		}
		b.Write(key)
		b.WriteByte(':')
		b.Write(value)
	}
	b.WriteString("}</facts>")
	return b.String(), nil
}

// nowText tells the model the date and time; "" when the request has none.
func nowText(req *Request) string {
	if req.Now.IsZero() {
		return ""
	}
	return "<now>" + req.Now.UTC().Format("Monday, "+time.RFC3339) + "</now>"
}

// toolSchema returns the JSON Schema of a tool's parameters in the form that
// both vendors insist on: an object that has properties.
func toolSchema(tool Tool) (map[string]any, error) {
	var members map[string]json.RawMessage
	if !isNull(tool.Parameters) {
		if err := json.Unmarshal(tool.Parameters, &members); err != nil {
			return nil, badRequest(fmt.Sprintf("the parameters of tool %s are not a JSON object", tool.Name))
		}
	}
	schema := make(map[string]any, len(members)+2)
	for name, value := range members {
		schema[name] = value
	}
	if _, ok := schema["type"]; !ok {
		schema["type"] = "object"
	}
	if _, ok := schema["properties"]; !ok {
		schema["properties"] = struct{}{}
	}
	return schema, nil
}

// sentArgs returns the arguments of an earlier call as the object that servers
// expect. Those that a model garbled are kept as a string, see ToolCall.
func sentArgs(args json.RawMessage) json.RawMessage {
	args = bytes.TrimSpace(args)
	switch {
	case isNull(args):
		return json.RawMessage("{}")
	case args[0] == '{':
		return args
	}
	return slices.Concat(json.RawMessage(`{"invalid":`), args, json.RawMessage("}"))
}

// receivedArgs turns the text that a model gave as arguments into
// ToolCall.Args.
func receivedArgs(text string) json.RawMessage {
	args := bytes.TrimSpace([]byte(text))
	if isNull(args) {
		return json.RawMessage("{}")
	}
	if !json.Valid(args) {
		args, _ = json.Marshal(text) // of a string, which cannot fail
	}
	return args
}

// extraParameters returns a copy of Request.Parameters to merge into the body.
// A parameter that the provider's own code sets is refused: it would not do what
// its author means.
func extraParameters(req *Request, reserved ...string) (map[string]any, error) {
	extra := make(map[string]any, len(req.Parameters)+2)
	for name, value := range req.Parameters {
		if slices.Contains(reserved, name) {
			return nil, badRequest(fmt.Sprintf("modelParameters must not set %q", name))
		}
		extra[name] = value
	}
	return extra, nil
}

// callIDs keeps the IDs of the tool calls in one request acceptable: unique in
// the whole request, although each model call numbers its own, and of a form
// that every provider takes, although another one may have made them. What a
// call is named depends only on what stands before it.
type callIDs struct {
	used map[string]bool
	sent map[string]string // by the original ID of the latest such call
}

// call names the i-th tool call of the message at the given place.
func (c *callIDs) call(id string, message, i int) string {
	if c.used == nil {
		c.used, c.sent = map[string]bool{}, map[string]string{}
	}
	name := id
	if !validCallID(name) || c.used[name] {
		name = fmt.Sprintf("call_%d_%d", message, i)
		for c.used[name] {
			name += "x"
		}
	}
	c.used[name] = true
	c.sent[id] = name
	return name
}

// result returns the name of the call that a result answers.
func (c *callIDs) result(id string) string {
	if name, ok := c.sent[id]; ok {
		return name
	}
	return id
}

// validCallID says whether an ID suits both vendors: OpenAI takes 40
// characters, Anthropic only these.
func validCallID(id string) bool {
	return id != "" && len(id) <= 40 && spell(id) == id
}

// uniqueCalls mints the IDs that a provider left out or gave twice.
func uniqueCalls(calls []ToolCall, callIndex int) {
	seen := make(map[string]bool, len(calls))
	for i := range calls {
		if id := calls[i].ID; id == "" || seen[id] {
			calls[i].ID = mintCallID(callIndex, i)
		}
		seen[calls[i].ID] = true
	}
}

func mintCallID(callIndex, i int) string { return fmt.Sprintf("call_%d_%d", callIndex, i) }
