package rpc

import (
	"encoding/json"
	"net/http"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

// FuzzServe checks that any body gets a proper JSON-RPC answer, or none where
// none is due, and that none panics. The nasty ones are in testdata.
func FuzzServe(f *testing.F) {
	f.Add([]byte(`{"jsonrpc":"2.0","id":1,"method":"echo","params":{"a":"\u0000","_b":1}}`))
	f.Add([]byte(`[{"jsonrpc":"2.0","id":"a","method":"echo"},{"jsonrpc":"2.0","method":"fail"},{"jsonrpc":"2.0","id":2,"method":"waitPanic"}]`))
	s := setup(f)
	f.Fuzz(func(t *testing.T, body []byte) {
		s.log.Reset()
		w := s.post(string(body))
		if w.Code == http.StatusNoContent {
			require.Empty(t, w.Body.Bytes())
			requireNotifications(t, body)
			return
		}
		require.True(t, utf8.Valid(w.Body.Bytes()))
		switch w.Code {
		case http.StatusOK, http.StatusTooManyRequests, http.StatusServiceUnavailable:
		default:
			t.Fatalf("status %d", w.Code)
		}
		if w.Body.Bytes()[0] != '[' {
			requireResponse(t, w.Body.Bytes())
			return
		}
		require.Equal(t, http.StatusOK, w.Code)
		var members []json.RawMessage
		require.NoError(t, json.Unmarshal(w.Body.Bytes(), &members))
		require.NotEmpty(t, members)
		require.LessOrEqual(t, len(members), DefaultMaxBatch)
		for _, member := range members {
			requireResponse(t, member)
		}
	})
}

func requireResponse(t *testing.T, text []byte) {
	t.Helper()
	var members map[string]json.RawMessage
	require.NoError(t, json.Unmarshal(text, &members), string(text))
	require.Len(t, members, 3)
	require.Equal(t, `"2.0"`, string(members["jsonrpc"]))
	id := members["id"]
	require.Contains(t, `"-0123456789n`, string(id[:1]))
	if e, ok := members["error"]; ok {
		var e2 Error
		require.NoError(t, json.Unmarshal(e, &e2))
		require.NotZero(t, e2.Code)
		require.NotEmpty(t, e2.Message)
		return
	}
	require.Contains(t, members, "result")
	require.NotEqual(t, "null", string(id))
	var params map[string]json.RawMessage
	if json.Unmarshal(members["result"], &params) == nil {
		for name, value := range params { // of echo
			require.NotEqual(t, byte('_'), (name + " ")[0])
			require.NotContains(t, name, "\x00")
			var s string
			if json.Unmarshal(value, &s) == nil {
				require.NotContains(t, s, "\x00")
			}
		}
	}
}

// requireNotifications checks that each member of a body is a request without
// id.
func requireNotifications(t *testing.T, body []byte) {
	t.Helper()
	var members []map[string]json.RawMessage
	if json.Unmarshal(body, &members) != nil {
		members = make([]map[string]json.RawMessage, 1)
		require.NoError(t, json.Unmarshal(body, &members[0]))
	}
	for _, member := range members {
		require.NotContains(t, member, "id")
		require.Contains(t, member, "method")
	}
}
