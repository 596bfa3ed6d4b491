package workers

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/jobs"
)

const withFacts = `{"name":"default","provider":"offline","model":"offline-1","tools":[{"type":"builtin","name":"memory_read"},{"type":"builtin","name":"memory_write"}]}`

func TestTurn(t *testing.T) {
	t.Parallel()
	t.Run("Answers", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.worker(nil)
		a := f.send("s", "hello there")
		o := f.outcome(a.RunID)
		require.JSONEq(t, `{"text":"offline: hello there","finishReason":"stop","steps":1,
			"usage":{"input":2,"cacheRead":0,"cacheWrite":0,"output":3,"reasoning":0,"costMicros":0,"estimated":false}}`, string(o.Result))
		require.Equal(t, []string{"agent.request", "agent.status", "agent.usage", "agent.response", "agent.status"}, f.events(a.SessionID))
	})
	t.Run("RemembersTheConversation", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.worker(nil)
		f.answer("s", "first")
		f.answer("s", "second")
		var sent struct{ Messages []struct{ Role, Text string } }
		require.NoError(t, json.Unmarshal([]byte(f.answer("s", "!context")), &sent))
		var texts []string
		for _, m := range sent.Messages {
			texts = append(texts, m.Role+" "+m.Text)
		}
		require.Equal(t, []string{"user first", "assistant offline: first", "user second", "assistant offline: second", "user !context"}, texts)
	})
	t.Run("KeepsFactsInTheStepsCommit", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.agent(withFacts)
		f.worker(nil)
		a := f.send("s", "!tools memory_write {\"key\":\"a\",\"value\":{\"x\":1}} ;; memory_read {\"key\":\"a\"}\n!result")
		o := f.outcome(a.RunID)
		require.Contains(t, string(o.Result), `{\"found\":true,\"value\":{\"x\":1}}`)
		require.Equal(t, []string{"agent.request", "agent.status", "agent.usage", "memory.write", "memory.read", "agent.usage", "agent.response", "agent.status"}, f.events(a.SessionID))
		var sent struct{ Facts any }
		require.NoError(t, json.Unmarshal([]byte(f.answer("s", "!context")), &sent))
		require.Contains(t, fmt.Sprint(sent.Facts), "a")
	})
	t.Run("RC-104RefusesSecretsInFactsAndStoresThemNowhere", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.agent(withFacts)
		f.worker(nil)
		const secret = "hunter2-correct-horse"
		text := f.answer("s", `!tool memory_write {"key":"password","value":"`+secret+`"}`+"\n!result")
		require.Contains(t, text, "secret_refused")
		for _, table := range []string{"step", "fact", "event"} {
			var n int
			require.NoError(t, f.pool.QueryRow(f.ctx, fmt.Sprintf(`SELECT count(*) FROM %s x WHERE x::text LIKE '%%' || $1 || '%%' AND x::text NOT LIKE '%%agent.request%%'`, table), secret).Scan(&n))
			require.Zero(t, n, table)
		}
	})
	t.Run("RC-150MasksACredentialBeforeItIsStored", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.worker(nil)
		secret := "sk-ant-" + "api03-q7Zp2LmX9vTfR4kWn8YbHc3JdSg6AeUo1QiVx5MzNtPwKrEy0B"
		require.NotContains(t, f.answer("s", "my key is "+secret), secret)
		for _, table := range []string{"run", "step", "event", "river_job"} {
			var n int
			require.NoError(t, f.pool.QueryRow(f.ctx, fmt.Sprintf(`SELECT count(*) FROM %s x WHERE x::text LIKE '%%' || $1 || '%%'`, table), secret).Scan(&n))
			require.Zero(t, n, table)
		}
	})
	t.Run("RC-134EndsAtTheIterationLimit", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.agent(`{"name":"default","limits":{"maxSteps":2},"tools":[{"type":"builtin","name":"memory_read"}]}`)
		f.worker(nil)
		c := f.failure("s", "!tool memory_read {\"key\":\"a\"}\n!tool memory_read {\"key\":\"b\"}\n!tool memory_read {\"key\":\"c\"}")
		require.Equal(t, "max_iterations", c.Kind)
	})
	t.Run("RC-135EndsALoop", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.agent(withFacts)
		f.worker(nil)
		require.Equal(t, "loop_detected", f.failure("s", `!loop memory_read {"key":"a"}`).Kind)
	})
	t.Run("RC-136EndsAtItsTimeLimit", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.worker(nil)
		a, err := f.runs.Accept(f.ctx, jobs.AcceptParams{
			TenantID: "default", Input: json.RawMessage(`{"text":"!stall"}`), Fresh: true,
			Session: jobs.SessionSpec{ConversationRef: "cv_x", ChannelType: "rpc", Scope: json.RawMessage(`[]`)},
			Terms: func(context.Context, string) (jobs.Terms, error) {
				return jobs.Terms{Agent: "default", Version: 1, TurnTimeout: 300 * time.Millisecond, QueueCap: 20}, nil
			},
		})
		require.NoError(t, err)
		o := f.outcome(a.RunID)
		require.Equal(t, db.RunStateTimedOut, o.State)
		require.Equal(t, "turn_timeout", o.EndReason)
	})
	t.Run("RC-73EndsWithAQuestion", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.worker(nil)
		a := f.send("s", "!clarify which one?")
		o := f.outcome(a.RunID)
		require.Equal(t, "clarify", o.EndReason)
		require.Contains(t, f.events(a.SessionID), "agent.clarify")
	})
	t.Run("ParksOnARateLimitWithoutASlotAndGoesOn", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		w, _ := f.worker(nil)
		a := f.send("s", "!status 429 times=2 retry-after=1\n!say there")
		f.eventually("waits", func() bool {
			o, err := f.runs.Outcome(f.ctx, "default", a.RunID)
			return err == nil && o.WaitsFor == db.WaitKindRateLimit && w.Running() == 0
		})
		o := f.outcome(a.RunID)
		require.Contains(t, string(o.Result), `"there"`)
		require.Contains(t, f.events(a.SessionID), "agent.warning")
	})
	t.Run("GivesUpOnAProviderThatFails", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.worker(nil)
		c := f.failure("s", "!error no such model")
		require.Equal(t, "provider_error", c.Kind)
		require.False(t, c.Retryable)
	})
	t.Run("RC-133FallsBackToTheSecondaryModel", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.agent(`{"name":"default","provider":"openai","model":"gpt-4o","baseUrl":"http://127.0.0.1:1/v1","secondary":{"provider":"offline","model":"offline-1"}}`)
		f.worker(nil)
		refuse := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(http.StatusBadRequest)
		}))
		defer refuse.Close()
		f.agent(`{"name":"default","provider":"openai","model":"gpt-4o","baseUrl":"` + refuse.URL + `","secondary":{"provider":"offline","model":"offline-1"}}`)
		a := f.send("s", "hello")
		o := f.outcome(a.RunID)
		require.Contains(t, string(o.Result), "offline: hello")
		require.Contains(t, f.events(a.SessionID), "agent.warning")
	})
	t.Run("FC-7CancelClosesTheConnectionOfAToolInFlight", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		tool := newCountingTool(t, func(w http.ResponseWriter, r *http.Request, _ int) { <-r.Context().Done() })
		f.agent(tool.agent("at_most_once"))
		f.worker(nil)
		a := f.send("s", "!tool slow {}")
		<-tool.called
		began := time.Now()
		c, err := f.runs.Cancel(f.ctx, "default", a.RunID, "")
		require.NoError(t, err)
		require.Equal(t, "cancelling", c.Status)
		o := f.outcome(a.RunID)
		require.Equal(t, db.RunStateCancelled, o.State)
		require.Less(t, time.Since(began), 5*time.Second)
		require.Contains(t, f.events(a.SessionID), "tool.response")
	})
	t.Run("RC-71RepeatsAnIdempotentCallThatAsksForItUnderOneKey", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		tool := newCountingTool(t, func(w http.ResponseWriter, r *http.Request, n int) {
			if n == 1 {
				w.WriteHeader(http.StatusServiceUnavailable)
				return
			}
			_, _ = io.WriteString(w, `{"ok":true}`)
		})
		f.agent(tool.agent("idempotent"))
		f.worker(nil)
		require.JSONEq(t, `{"ok":true}`, f.answer("s", "!tool slow {}\n!result"))
		require.Len(t, tool.keys(), 2)
		require.Equal(t, tool.keys()[0], tool.keys()[1])
	})
	t.Run("RC-71SendsAnAtMostOnceCallOnce", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		tool := newCountingTool(t, func(w http.ResponseWriter, r *http.Request, n int) { w.WriteHeader(http.StatusServiceUnavailable) })
		f.agent(tool.agent("at_most_once"))
		f.worker(nil)
		require.Contains(t, f.answer("s", "!tool slow {}\n!result"), "http_status")
		require.Len(t, tool.keys(), 1)
	})
	t.Run("FC-9DrainHandsOverAtTheStepBoundary", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		release := make(chan struct{})
		tool := newCountingTool(t, func(w http.ResponseWriter, r *http.Request, n int) {
			<-release
			_, _ = io.WriteString(w, `1`)
		})
		f.agent(tool.agent("at_most_once"))
		_, stop := f.worker(nil)
		a := f.send("s", "!tool slow {}\n!say done")
		<-tool.called
		go func() {
			f.eventually("draining", func() bool {
				var n int
				_ = f.pool.QueryRow(f.ctx, `SELECT count(*) FROM worker WHERE state = 'draining'`).Scan(&n)
				return n == 1
			})
			close(release)
		}()
		stop()
		o, err := f.runs.Outcome(f.ctx, "default", a.RunID)
		require.NoError(t, err)
		require.Equal(t, db.RunStateQueued, o.State)
		f.worker(nil)
		require.Contains(t, string(f.outcome(a.RunID).Result), `"done"`)
		require.Len(t, tool.keys(), 1)
		var losses int
		require.NoError(t, f.pool.QueryRow(f.ctx, `SELECT losses FROM run`).Scan(&losses))
		require.Zero(t, losses)
	})
	t.Run("DrainMakesTheCallsItHasStarted", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		tool := newCountingTool(t, func(w http.ResponseWriter, r *http.Request, n int) { _, _ = io.WriteString(w, `1`) })
		f.agent(tool.agent("at_most_once"))
		_, stop := f.worker(nil)
		var turns []*jobs.Accepted
		for i := range 20 { // each a little later, so that the drain meets some in their model calls
			turns = append(turns, f.send(fmt.Sprint(i), fmt.Sprintf("!sleep %dms\n!tool slow {}\n!result", 100+25*i)))
		}
		<-tool.called
		stop()
		f.worker(nil)
		for _, a := range turns {
			require.NotContains(t, string(f.outcome(a.RunID).Result), "interrupted", "handed over unsent, it could never be sent")
		}
		require.Len(t, tool.keys(), len(turns))
	})
	t.Run("OneSessionsTurnsRunInOrder", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.worker(nil)
		var last *jobs.Accepted
		for i := range 15 {
			last = f.send("s", fmt.Sprintf("!say answer %d", i))
		}
		f.outcome(last.RunID)
		rows, err := f.pool.Query(f.ctx, `SELECT content->>'text' FROM event WHERE type = 'agent.response' ORDER BY seq`)
		require.NoError(t, err)
		defer rows.Close()
		for i := 0; rows.Next(); i++ {
			var text string
			require.NoError(t, rows.Scan(&text))
			require.Equal(t, fmt.Sprintf("answer %d", i), text)
		}
		for kind, n := range f.sweeper.Repairs() {
			require.Zero(t, n, kind)
		}
	})
}

// countingTool is a server of the operator's, which sees each call.
type countingTool struct {
	url    string
	called chan struct{}
	mu     sync.Mutex
	seen   []string
}

func newCountingTool(t *testing.T, answer func(w http.ResponseWriter, r *http.Request, n int)) *countingTool {
	c := &countingTool{called: make(chan struct{}, 100)}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c.mu.Lock()
		c.seen = append(c.seen, r.Header.Get("Idempotency-Key"))
		n := len(c.seen)
		c.mu.Unlock()
		_, _ = io.Copy(io.Discard, r.Body)
		c.called <- struct{}{}
		answer(w, r, n)
	}))
	t.Cleanup(s.Close)
	c.url = s.URL
	return c
}

func (c *countingTool) keys() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]string(nil), c.seen...)
}

func (c *countingTool) agent(idempotency string) string {
	return fmt.Sprintf(`{"name":"default","provider":"offline","model":"offline-1","tools":[{"type":"http","name":"slow","description":"d","parameters":{"type":"object"},"url":%q,"idempotency":%q}]}`, c.url, idempotency)
}
