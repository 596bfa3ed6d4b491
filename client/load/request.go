package load

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
)

// Sessions are called load-RUN-N, where RUN tells this load from others.
const (
	sessionDigits = 16 // of N, in hex
	runDigits     = 8
)

// request is an HTTP request that is made once. Only the digits of its session
// change.
type request struct {
	text []byte
	mark int // where the digits are; 0 if it names no session
}

// turnRequest makes the request of a tenant's turns.
func turnRequest(to *target, c *Config, token, run, message string) request {
	mark := ""
	if c.Mode != Execute || c.Sessions > 0 {
		mark = fmt.Sprintf("load-%s-%0*d", run, sessionDigits, 0)
	}
	body := marshal(struct {
		JSONRPC string `json:"jsonrpc"`
		ID      int    `json:"id"`
		Method  string `json:"method"`
		Params  any    `json:"params"`
	}{"2.0", 1, c.Mode.method(), c.params(mark, message)})
	r := request{text: append(head(to, token, len(body)), body...)}
	if mark != "" {
		// The session is the first member, so no message that has it comes before.
		r.mark = bytes.Index(r.text, []byte(mark)) + len(mark) - sessionDigits
	}
	return r
}

func (m Mode) method() string {
	if m == Execute {
		return "agent.execute"
	}
	return "agent.request"
}

func (c *Config) params(session, message string) any {
	type common struct {
		SessionID string `json:"sessionId,omitempty"`
		AgentID   string `json:"agentId,omitempty"`
		UserID    string `json:"userId,omitempty"`
	}
	who := common{session, c.Agent, c.User}
	if c.Mode == Execute {
		return struct {
			common
			TimeoutMs int64  `json:"timeoutMs"`
			Message   string `json:"message"`
		}{who, c.Timeout.Milliseconds(), message}
	}
	type content struct {
		Text string `json:"text"`
	}
	return struct {
		common
		Content content `json:"content"`
	}{who, content{message}}
}

func marshal(v any) []byte {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil { // of values made here: a bug
		panic(err)
	}
	return bytes.TrimRight(b.Bytes(), "\n")
}

// head is everything before the body.
func head(to *target, token string, length int) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "POST %s HTTP/1.1\r\nHost: %s\r\nUser-Agent: weir-load\r\nContent-Type: application/json\r\n", to.path, to.host)
	if token != "" {
		fmt.Fprintf(&b, "Authorization: Bearer %s\r\n", token)
	}
	fmt.Fprintf(&b, "Content-Length: %d\r\n\r\n", length)
	return b.Bytes()
}

// runRequest appends a request that waits for a run's end.
func runRequest(dst []byte, to *target, token, run string, waitMs int64) []byte {
	body := `{"jsonrpc":"2.0","id":1,"method":"run.get","params":{"runId":` + strconv.Quote(run) +
		`,"afterVersion":9223372036854775807,"waitMs":` + strconv.FormatInt(waitMs, 10) + `}}`
	return append(append(dst, head(to, token, len(body))...), body...)
}

// writeHex writes the last digits of v.
func writeHex(dst []byte, v uint64) {
	const digits = "0123456789abcdef"
	for i := len(dst) - 1; i >= 0; i-- {
		dst[i] = digits[v&15]
		v >>= 4
	}
}
