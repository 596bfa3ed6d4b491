package api

import (
	"fmt"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
)

// BenchmarkAccept measures agent.request from the handler to the commit, with
// all that the edge does: 64 callers, a new session each time.
func BenchmarkAccept(b *testing.B) {
	f := setup(b)
	var n atomic.Int64
	h := f.server.Handler()
	b.SetParallelism(32)
	b.ReportAllocs()
	b.ResetTimer()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			body := fmt.Sprintf(`{"jsonrpc":"2.0","id":1,"method":"agent.request","params":{"sessionId":"s%d","userId":"u","content":{"text":"Summarize today's commits."}}}`, n.Add(1))
			r := httptest.NewRequest("POST", "/rpc", strings.NewReader(body))
			r.Header.Set("Authorization", "Bearer "+f.rpc)
			w := httptest.NewRecorder()
			h.ServeHTTP(w, r)
			if w.Code != 200 || !strings.Contains(w.Body.String(), "thinking") {
				b.Fatal(w.Body.String())
			}
		}
	})
}
