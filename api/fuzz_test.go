package api

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// FuzzEdge sends any body to the edges that read one, with everything behind
// them: whatever it is, it is the sender's fault.
func FuzzEdge(f *testing.F) {
	x := setup(f)
	x.work()
	paths := []string{"/rpc", byName}
	for _, m := range realRegistry().Methods() {
		for _, params := range []string{
			`{}`, `[]`, `{"runId":"run_x","rootRunId":"x","agentId":"default","id":"nobody","name":"A","sessionId":"s","content":{"text":"x"}}`,
			`{"agentId":7,"content":{"text":"\u0000\ud800","images":[{}]},"sessionId":"\u0000","message":" ","limit":1e99,"scopes":["*",""],"cursor":"AA"}`,
			`{"tenant_id":"default","agent_id":"default","conversation_ref":"cv_","offset":2147483647,"limit":1,"since_minutes":1e9,"kind":"dm"}`,
		} {
			f.Add(uint8(0), []byte(fmt.Sprintf(`{"jsonrpc":"2.0","id":1,"method":%q,"params":%s}`, m.Name, params)))
		}
	}
	for _, body := range []string{
		`[{"jsonrpc":"2.0","id":1,"method":"agent.execute","params":{"message":"a","sessionId":"s"}},{"jsonrpc":"2.0","method":"agent.request","params":{"sessionId":"s","content":{"text":"b"}}},7]`,
		`{"jsonrpc":"2.0","id":1,"method":"agent.execute","params":{"message":"!fail","sessionKey":{"userId":"u","channelId":"c"},"idempotencyKey":"k","timeoutMs":50}}`,
		`{"jsonrpc":"2.0","id":1,"method":"agents.create","params":{"name":"a","tools":[{"type":"http","name":"t","url":"http://x","description":"","parameters":{"type":"object","$ref":"file:///etc/passwd"}}]}}`,
		`{"jsonrpc":"2.0","id":1,"method":"agents.update","params":{"agentId":"default","modelParameters":{"x":1e308,"\u0000":"y"},"dryRun":true,"idempotencyKey":"k"}}`,
		`{"jsonrpc":"2.0","id":1,"method":"run.get","params":{"runId":"00000000-0000-0000-0000-000000000000","waitMs":1,"afterVersion":-9223372036854775808}}`,
	} {
		f.Add(uint8(0), []byte(body))
	}
	for _, body := range []string{
		`{"id":1,"method":"task/create","params":{"name":"n","params":{"a":[1,{"b":"\u0000\udfff"}]},"task_metadata":{"userId":7}}}`,
		`{"method":"task/create","params":{"params":{"x":1e131072}}}`, `{"method":"task/create","params":{"params":{"x":1e-99999}}}`,
		`{"method":"message/send","params":{"task_name":"n","content":{"type":"text","author":"user","content":"x","attachments":[1e200000]}}}`,
		`{"method":"message/send","params":{"task_id":"n","task_name":null,"content":{"type":"data","author":"agent"},"stream":null}}`,
		`{"method":"event/send","params":{"task_id":"x"}}`, `{"METHOD":"task/create","Params":{}}`, `{"method":"task/create","params":{"name":"` + strings.Repeat(`\u0000`, 600) + `"}}`,
		"", "null", "{", "\xff", `"\ud800"`, strings.Repeat("[", 10000),
	} {
		f.Add(uint8(1), []byte(body))
	}
	f.Fuzz(func(t *testing.T, path uint8, body []byte) {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		r := httptest.NewRequestWithContext(ctx, "POST", paths[int(path)%len(paths)], bytes.NewReader(body))
		r.Header.Set("Authorization", "Bearer "+x.all)
		w := httptest.NewRecorder()
		x.server.Handler().ServeHTTP(w, r)
		if ctx.Err() != nil {
			return // it waited for a turn, which others queue before
		}
		require.Less(t, w.Code, http.StatusInternalServerError, w.Body.String())
		require.True(t, w.Code == http.StatusNoContent || json.Valid(w.Body.Bytes()), w.Body.String())
		require.NotContains(t, w.Body.String(), `"errorId"`)
		require.NotContains(t, x.log.String(), `"level":"ERROR"`)
	})
}
