package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/weir-run/weir/jobs"
)

const byName = "/agents/name/default/rpc"

// agentexReply is the answer of a call.
type agentexReply struct {
	JSONRPC string          `json:"jsonrpc"`
	Result  json.RawMessage `json:"result"`
	Error   *agentexError   `json:"error"`
	ID      json.RawMessage `json:"id"`
}

// rpcOf calls an agent at a path, with HTTP 200.
func (p *pod) rpcOf(path, token, method, params string, header ...string) agentexReply {
	p.t.Helper()
	status, h, body := p.do("POST", path, token, fmt.Sprintf(`{"jsonrpc":"2.0","id":"i","method":%q,"params":%s}`, method, params), header...)
	require.Equal(p.t, 200, status, body)
	require.Equal(p.t, "application/json", h.Get("Content-Type"))
	require.Equal(p.t, 1, strings.Count(body, "\n"), "one line")
	var r agentexReply
	require.NoError(p.t, json.Unmarshal([]byte(body), &r))
	require.Equal(p.t, "2.0", r.JSONRPC)
	require.Equal(p.t, `"i"`, string(r.ID))
	return r
}

// task calls task/create or anything else that answers a task.
func (p *pod) task(token, params string, header ...string) map[string]any {
	p.t.Helper()
	r := p.rpcOf(byName, token, "task/create", params, header...)
	require.Nil(p.t, r.Error)
	return object(p.t, r.Result)
}

// send sends a message and returns the agent's.
func (p *pod) send(token, params string, header ...string) []map[string]any {
	p.t.Helper()
	r := p.rpcOf(byName, token, "message/send", params, header...)
	require.Nil(p.t, r.Error)
	var list []map[string]any
	require.NoError(p.t, json.Unmarshal(r.Result, &list))
	return list
}

// fails calls an agent that refuses, with HTTP 200.
func (p *pod) fails(path, token, method, params string) string {
	p.t.Helper()
	r := p.rpcOf(path, token, method, params)
	require.NotNil(p.t, r.Error, string(r.Result))
	require.Equal(p.t, "null", string(r.Result))
	require.Equal(p.t, -32603, r.Error.Code)
	return r.Error.Message
}

func object(t testing.TB, raw []byte) map[string]any {
	t.Helper()
	var m map[string]any
	require.NoError(t, json.Unmarshal(raw, &m), string(raw))
	return m
}

func (p *pod) get(path, token string) map[string]any {
	p.t.Helper()
	status, _, body := p.do("GET", path, token, "")
	require.Equal(p.t, 200, status, body)
	return object(p.t, []byte(body))
}

func (p *pod) list(path, token string) (list []map[string]any) {
	p.t.Helper()
	status, _, body := p.do("GET", path, token, "")
	require.Equal(p.t, 200, status, body)
	require.NoError(p.t, json.Unmarshal([]byte(body), &list))
	require.NotNil(p.t, list)
	return list
}

const micros = `^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{6})?Z$`

func TestAgentexTask(t *testing.T) {
	t.Parallel()
	t.Run("EveryMemberIsThere", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		task := f.task(f.rpc, `{}`)
		id := uuid.MustParse(text(t, task, "id"))
		for _, at := range []string{"created_at", "updated_at"} {
			require.Regexp(t, micros, task[at])
			delete(task, at)
		}
		require.Equal(t, map[string]any{
			"id": id.String(), "name": nil, "status": "RUNNING", "status_reason": "Task created, forwarding to ACP server",
			"cleaned_at": nil, "params": nil, "task_metadata": nil,
		}, task)
		got := f.get("/tasks/"+id.String(), f.rpc)
		require.Contains(t, got, "agents")
		require.Nil(t, got["agents"])
		got = f.get("/tasks/"+id.String()+"?relationships=agents", f.rpc)
		require.Equal(t, "default", got["agents"].([]any)[0].(map[string]any)["name"])
		var ref string
		f.scan(`SELECT conversation_ref FROM session`, &ref)
		require.Equal(t, refOf(t, "default", "default", "agentex", nil, id.String(), nil, nil), ref)
		require.NotEqual(t, id.String(), text(t, f.task(f.rpc, `{}`), "id"), "no name: always a new one")
	})
	t.Run("ANameIsGotOrMade", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		first := f.task(f.rpc, `{"name":"n","params":{"a":1},"task_metadata":{"userId":"u"},"more":1}`)
		require.Equal(t, map[string]any{"a": 1.0}, first["params"])
		again := f.task(f.rpc, `{"name":"n","task_metadata":{"userId":"v"}}`)
		require.Equal(t, first, again, "metadata of a task that is there is ignored")
		require.Equal(t, first["updated_at"], f.task(f.rpc, `{"name":"n","params":{"a":1}}`)["updated_at"], "nothing new")
		require.Equal(t, map[string]any{}, f.task(f.rpc, `{"name":"n","params":{}}`)["params"], "{} counts as given")
		require.Equal(t, map[string]any{}, f.task(f.rpc, `{"name":"n","params":null}`)["params"])
		require.Equal(t, first["id"], f.get("/tasks/name/n", f.rpc)["id"])
		require.NotEqual(t, first["id"], f.task(f.otherRPC, `{"name":"n"}`)["id"])
		var ref string
		f.scan(`SELECT conversation_ref FROM session WHERE tenant_id = 'default'`, &ref)
		require.Equal(t, refOf(t, "default", "default", "agentex", nil, "n", nil, nil), ref)
	})
	t.Run("OneHundredAtOnceGetOne", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		pods := []*pod{f.pod, f.another()}
		ids := gather(t, 100, func(i int) (string, error) {
			status, _, body, err := pods[i%2].try(f.ctx, "POST", byName, f.rpc, `{"method":"task/create","params":{"name":"n"}}`)
			var r struct{ Result struct{ ID string } }
			if err == nil {
				err = json.Unmarshal([]byte(body), &r)
			}
			if err == nil && (status != 200 || r.Result.ID == "") {
				err = fmt.Errorf("%d %s", status, body)
			}
			return r.Result.ID, err
		})
		require.Len(t, ids, 1)
	})
	t.Run("AnInterruptedTaskIsResumed", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.task(f.rpc, `{"name":"n"}`)
		f.setStatus("INTERRUPTED")
		task := f.task(f.rpc, `{"name":"n"}`)
		require.Equal(t, "RUNNING", task["status"])
		require.Equal(t, "Task resumed on next turn", task["status_reason"])
		f.setStatus("COMPLETED")
		require.Equal(t, "COMPLETED", f.task(f.rpc, `{"name":"n"}`)["status"])
		f.setStatus("DELETED")
		require.Regexp(t, `^Task .* is DELETED$`, f.fails(byName, f.rpc, "task/create", `{"name":"n"}`))
		status, _, body := f.do("GET", "/tasks/name/n", f.rpc, "")
		require.Equal(t, 404, status)
		require.JSONEq(t, `{"message":"Task n not found","code":404,"data":null}`, body)
	})
	t.Run("ATaskOfAnotherAgentIsReturned", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.result(f.admin, "agents.create", map[string]any{"name": "b"})
		task := f.task(f.rpc, `{"name":"n"}`)
		r := f.rpcOf("/agents/name/b/rpc", f.rpc, "task/create", `{"name":"n"}`)
		require.Equal(t, task["id"], object(t, r.Result)["id"])
		require.Equal(t, fmt.Sprintf("Task %s belongs to agent default", task["id"]), f.fails("/agents/name/b/rpc", f.rpc, "message/send", sendTo(`"task_name":"n"`, "x")))
	})
	t.Run("OddNames", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		for _, name := range []string{"a/b", "ü \"?#%", "..", "rpc", strings.Repeat("n", 512)} {
			quoted, err := json.Marshal(name)
			require.NoError(t, err)
			task := f.task(f.rpc, fmt.Sprintf(`{"name":%s}`, quoted))
			require.Equal(t, name, task["name"])
			require.Equal(t, task["id"], f.get("/tasks/name/"+url.PathEscape(name), f.rpc)["id"], name)
		}
		unnamed := f.task(f.rpc, `{"name":""}`)
		require.Nil(t, unnamed["name"])
		same := f.task(f.rpc, fmt.Sprintf(`{"name":%q}`, unnamed["id"])) // the same conversation
		require.Equal(t, unnamed["id"], same["id"])
		require.Equal(t, "a\ufffdb", f.task(f.rpc, `{"name":"a\u0000b"}`)["name"])
	})
	t.Run("ARepeatMakesOne", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		first := f.task(f.rpc, `{"params":{"a":1}}`, "Idempotency-Key", "k")
		require.Equal(t, first, f.task(f.rpc, `{"params":{"a":1}}`, "Idempotency-Key", "k"))
		r := f.rpcOf(byName, f.rpc, "task/create", `{}`, "Idempotency-Key", "k")
		require.Contains(t, r.Error.Message, `idempotency key "k"`)
	})
	t.Run("RC-149/AnotherTenantsTaskIsNotThere", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		id := text(t, f.task(f.rpc, `{"name":"n"}`), "id")
		for _, missing := range []string{id, newID().String(), "x"} {
			status, _, body := f.do("GET", "/tasks/"+missing, f.otherRPC, "")
			require.Equal(t, 404, status)
			require.JSONEq(t, fmt.Sprintf(`{"message":"Item with id '%s' does not exist.","code":404,"data":null}`, missing), body)
		}
		status, _, body := f.do("GET", "/tasks/name/n", f.otherRPC, "")
		require.Equal(t, 404, status)
		require.JSONEq(t, `{"message":"Item with name 'n' does not exist.","code":404,"data":null}`, body)
		require.Equal(t, []map[string]any{}, f.list("/messages?task_id="+id, f.otherRPC))
		require.Equal(t, []map[string]any{}, f.list("/agents?task_id="+id, f.otherRPC))
		require.Equal(t, "Item with id '"+id+"' does not exist.", f.fails(byName, f.otherRPC, "message/send", sendTo(`"task_id":"`+id+`"`, "x")))
	})
	t.Run("OtherSessionsAreNoTasks", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.result(f.rpc, "agent.request", request("s", "x"))
		var id uuid.UUID
		f.scan(`SELECT id FROM session`, &id)
		status, _, _ := f.do("GET", "/tasks/"+id.String(), f.rpc, "")
		require.Equal(t, 404, status)
	})
}

// setStatus sets the status of all tasks, as routes that are to come will.
func (f *fixture) setStatus(status string) {
	f.t.Helper()
	_, err := f.pool.Exec(f.ctx, `UPDATE session SET task_status = $1 WHERE task_status IS NOT NULL`, status)
	require.NoError(f.t, err)
}

// sendTo are params of message/send.
func sendTo(task, message string) string {
	if task != "" {
		task += ","
	}
	quoted, _ := json.Marshal(message)
	return fmt.Sprintf(`{%s"content":{"type":"text","author":"user","content":%s}}`, task, quoted)
}

func TestAgentexMessageSend(t *testing.T) {
	t.Parallel()
	t.Run("AnswersWithTheAgentsMessages", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.work()
		id := text(t, f.task(f.rpc, `{"name":"n","task_metadata":{"userId":"u"}}`), "id")
		answer := f.send(f.rpc, sendTo(`"task_id":"`+id+`"`, "hi"))
		require.Len(t, answer, 1)
		require.Regexp(t, micros, answer[0]["created_at"])
		for _, gone := range []string{"id", "created_at"} {
			require.NotEmpty(t, answer[0][gone])
			delete(answer[0], gone)
		}
		require.Equal(t, map[string]any{
			"task_id": id, "streaming_status": "DONE", "updated_at": nil,
			"content": map[string]any{"type": "text", "author": "agent", "style": "static", "format": "plain", "content": "echo: hi", "attachments": nil},
		}, answer[0])
		second := f.send(f.rpc, `{"task_name":"n","content":{"type":"text","author":"user","content":"more","format":"markdown","style":"active","attachments":[{"file_id":"f"}],"extra":1},"stream":false}`)
		require.Equal(t, "echo: more", second[0]["content"].(map[string]any)["content"])

		messages := f.list("/messages?order_direction=asc&task_id="+id, f.rpc)
		require.Len(t, messages, 4)
		require.Nil(t, messages[0]["streaming_status"])
		require.Equal(t, map[string]any{"type": "text", "author": "user", "style": "static", "format": "plain", "content": "hi", "attachments": nil}, messages[0]["content"])
		require.Equal(t, map[string]any{
			"type": "text", "author": "user", "style": "active", "format": "markdown", "content": "more", "attachments": []any{map[string]any{"file_id": "f"}},
		}, messages[2]["content"])
		newest := f.list("/messages?task_id="+id, f.rpc)
		require.Equal(t, messages[3], newest[0])
		page := f.list("/messages?limit=1&page_number=2&order_by=created_at&task_id="+id, f.rpc)
		require.Equal(t, []map[string]any{messages[2]}, page)
		var users string
		f.scan(`SELECT string_agg(user_id, ',') FROM run`, &users)
		require.Equal(t, "u,u", users)
		require.Equal(t, "default", f.list("/agents?task_id="+id, f.rpc)[0]["name"])
	})
	t.Run("MakesTheTask", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.work()
		id := text(t, f.send(f.rpc, sendTo("", "x"))[0], "task_id")
		task := f.get("/tasks/"+id, f.rpc)
		require.Equal(t, "RUNNING", task["status"])
		require.Nil(t, task["name"])
		var ref string
		f.scan(`SELECT conversation_ref FROM session`, &ref)
		require.Equal(t, refOf(t, "default", "default", "agentex", nil, id, nil, nil), ref)
		named := f.send(f.rpc, sendTo(`"task_params":{"a":1},"task_name":"n"`, "x"))[0]["task_id"]
		task = f.get("/tasks/name/n", f.rpc)
		require.Equal(t, named, task["id"])
		require.Equal(t, map[string]any{"a": 1.0}, task["params"])
		f.send(f.rpc, sendTo(`"task_params":{"b":1},"task_name":"n"`, "x"))
		require.Equal(t, map[string]any{"b": 1.0}, f.get("/tasks/name/n", f.rpc)["params"])
	})
	t.Run("SendsOnOneTaskQueue", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.work()
		pods := []*pod{f.pod, f.another()}
		tasks := gather(t, 15, func(i int) (string, error) {
			_, _, body, err := pods[i%2].try(f.ctx, "POST", byName, f.rpc, `{"method":"message/send","params":`+sendTo(`"task_name":"n"`, fmt.Sprint(i))+`}`)
			var r struct {
				Result []struct {
					TaskID  string `json:"task_id"`
					Content struct{ Content string }
				}
			}
			if err == nil {
				err = json.Unmarshal([]byte(body), &r)
			}
			if err == nil && (len(r.Result) != 1 || r.Result[0].Content.Content != fmt.Sprint("echo: ", i)) {
				err = fmt.Errorf("%s", body)
			}
			if err != nil {
				return "", err
			}
			return r.Result[0].TaskID, nil
		})
		require.Len(t, tasks, 1)
	})
	t.Run("ATurnThatFails", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.work()
		require.Equal(t, "provider_error: no luck", f.fails(byName, f.rpc, "message/send", sendTo(`"task_name":"n"`, "!fail")))
		require.Equal(t, "RUNNING", f.get("/tasks/name/n", f.rpc)["status"])
		require.Equal(t, "which?", f.send(f.rpc, sendTo(`"task_name":"n"`, "!clarify which?"))[0]["content"].(map[string]any)["content"])
	})
	t.Run("ATaskThatHasEndedRefuses", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		id := text(t, f.task(f.rpc, `{"name":"n"}`), "id")
		for _, status := range []string{"COMPLETED", "FAILED", "CANCELED", "TERMINATED", "TIMED_OUT"} {
			f.setStatus(status)
			before := f.stored()
			require.Equal(t, "Task "+id+" is "+status, f.fails(byName, f.rpc, "message/send", sendTo(`"task_name":"n","task_params":{"x":1}`, "x")))
			require.Equal(t, before, f.stored())
			require.Nil(t, f.get("/tasks/"+id, f.rpc)["params"])
		}
		f.setStatus("DELETED")
		require.Equal(t, "Task "+id+" not found", f.fails(byName, f.rpc, "message/send", sendTo(`"task_id":"`+id+`"`, "x")))
		require.Equal(t, "Task "+id+" is DELETED", f.fails(byName, f.rpc, "message/send", sendTo(`"task_name":"n"`, "x")))
		f.setStatus("INTERRUPTED")
		f.work()
		f.send(f.rpc, sendTo(`"task_name":"n"`, "x"))
		require.Equal(t, "RUNNING", f.get("/tasks/"+id, f.rpc)["status"])
	})
	t.Run("RC-30/ABusyTaskRefuses", func(t *testing.T) {
		t.Parallel()
		f := setupWith(t, func(c *Config) { c.MaxQueued = 1 })
		ctx, cancel := context.WithCancel(f.ctx)
		defer cancel()
		for range 2 {
			go f.try(ctx, "POST", byName, f.rpc, `{"method":"message/send","params":`+sendTo(`"task_name":"n"`, "x")+`}`)
		}
		f.eventually("two are accepted", func() bool {
			var n int
			f.scan(`SELECT count(*) FROM run`, &n)
			return n == 2
		})
		require.Contains(t, f.fails(byName, f.rpc, "message/send", sendTo(`"task_name":"n"`, "x")), "session is busy")
	})
	t.Run("AClientThatLeavesLosesNothing", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		w := f.work()
		ctx, cancel := context.WithCancel(f.ctx)
		left := make(chan error)
		body := `{"method":"message/send","params":` + sendTo(`"task_name":"n"`, "!hold") + `}`
		go func() {
			_, _, _, err := f.try(ctx, "POST", byName, f.rpc, body, "Idempotency-Key", "k")
			left <- err
		}()
		f.eventually("the turn runs", func() bool {
			var n int
			f.scan(`SELECT count(*) FROM run WHERE state = 'running'`, &n)
			return n == 1
		})
		cancel()
		require.Error(t, <-left)
		w.letGo()
		answer := f.send(f.rpc, sendTo(`"task_name":"n"`, "!hold"), "Idempotency-Key", "k")
		require.Len(t, answer, 1)
		require.Len(t, f.list("/messages?task_id="+text(t, answer[0], "task_id"), f.rpc), 2, "once")
		require.NotContains(t, f.log.String(), `"ERROR"`)
	})
	t.Run("ADrainEndsTheWait", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		answer := make(chan string, 1)
		go func() {
			_, _, body, _ := f.try(f.ctx, "POST", byName, f.rpc, `{"method":"message/send","params":`+sendTo("", "x")+`}`)
			answer <- body
		}()
		f.eventually("the turn is accepted", func() bool {
			var n int
			f.scan(`SELECT count(*) FROM run`, &n)
			return n == 1
		})
		f.server.Drain()
		require.Contains(t, <-answer, `the turn is still running: thinking`)
	})
	t.Run("MessagesOverJSONRPCAreShown", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.work()
		id := text(t, f.task(f.rpc, `{"name":"n"}`), "id")
		f.result(f.rpc, "agent.execute", map[string]any{"message": "x", "sessionId": id})
		require.Len(t, f.list("/messages?task_id="+id, f.rpc), 2)
		require.Equal(t, true, f.result(f.rpc, "agent.status", request(id, ""))["known"])
		require.Len(t, f.result(f.admin, "run.list", map[string]any{"sessionId": id})["runs"], 1)
		f.setStatus("COMPLETED")
		f.invalid("sessionId", "task_ended", f.rpc, "agent.request", request(id, "x"))
	})
	t.Run("Refusals", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		before := f.stored()
		require.Equal(t, "streaming is not supported yet: send with stream false", f.fails(byName, f.rpc, "message/send", `{"stream":true,"content":{"type":"text","author":"user","content":"x"}}`))
		require.Contains(t, f.fails(byName, f.rpc, "message/send", `{"content":{"type":"data","author":"user","data":{}}}`), "reads content of type text, not data")
		require.Contains(t, f.fails(byName, f.rpc, "message/send", sendTo("", " ")), "must not be empty")
		require.Contains(t, f.fails(byName, f.rpc, "message/send", sendTo("", strings.Repeat("x", 262145))), "must be at most 262144 bytes")
		unknown := newID().String()
		require.Equal(t, "Item with id '"+unknown+"' does not exist.", f.fails(byName, f.rpc, "message/send", sendTo(`"task_id":"`+unknown+`"`, "x")))
		require.Equal(t, "Item with id 'x' does not exist.", f.fails(byName, f.rpc, "message/send", sendTo(`"task_id":"x"`, "x")))
		for _, method := range []string{"event/send", "task/cancel", "task/interrupt"} {
			r := f.rpcOf(byName, f.rpc, method, `{"task_name":"n"}`)
			require.Equal(t, &agentexError{Code: -32601, Message: "Unsupported method: " + method}, r.Error)
		}
		require.Equal(t, before, f.stored())
		f.result(f.admin, "agents.suspend", agent("default"))
		require.Contains(t, f.fails(byName, f.rpc, "message/send", sendTo("", "x")), "agent_suspended")
	})
}

func TestAgentexBadRequests(t *testing.T) {
	t.Parallel()
	f := setup(t)
	before := f.stored()
	content := func(more string) string { return `{"method":"message/send","params":{"content":{` + more + `}}}` }
	for name, test := range map[string]struct{ body, loc string }{
		"NotJSON":             {`{`, `('body',)`},
		"NotUTF8":             {"{\"method\":\"\xff\"}", `('body',)`},
		"Array":               {`[]`, `('body',)`},
		"TooDeep":             {strings.Repeat("[", 200), `('body',)`},
		"Version":             {`{"jsonrpc":"1.0","method":"task/create","params":{}}`, `('body', 'jsonrpc')`},
		"VersionNumber":       {`{"jsonrpc":2,"method":"task/create","params":{}}`, `('body', 'jsonrpc')`},
		"NoMethod":            {`{"params":{}}`, `('body', 'method')`},
		"UnknownMethod":       {`{"method":"task/nope","params":{"a":1}}`, `('body', 'method')`},
		"NoParams":            {`{"method":"task/create"}`, `('body', 'params')`},
		"ParamsList":          {`{"method":"task/create","params":[]}`, `('body', 'params')`},
		"ObjectID":            {`{"id":{},"method":"task/create","params":{}}`, `('body', 'id')`},
		"NameNumber":          {`{"method":"task/create","params":{"name":1}}`, `('body', 'params', 'name')`},
		"LongName":            {`{"method":"task/create","params":{"name":"` + strings.Repeat("n", 513) + `"}}`, `('body', 'params', 'name')`},
		"TaskParamsText":      {`{"method":"task/create","params":{"params":"x"}}`, `('body', 'params', 'params')`},
		"MetadataList":        {`{"method":"task/create","params":{"task_metadata":[]}}`, `('body', 'params', 'task_metadata')`},
		"LargeParams":         {`{"method":"task/create","params":{"params":{"x":"` + strings.Repeat("n", 1<<20) + `"}}}`, `('body', 'params', 'params')`},
		"NumberBeyondStorage": {`{"method":"task/create","params":{"params":{"x":1e200000}}}`, `('body', 'params')`},
		"Both":                {`{"method":"message/send","params":` + sendTo(`"task_id":"a","task_name":"b"`, "x") + `}`, `('body', 'params')`},
		"NoContent":           {`{"method":"message/send","params":{}}`, `('body', 'params', 'content')`},
		"NoType":              {content(`"author":"user","content":"x"`), `('body', 'params', 'content', 'type')`},
		"UnknownType":         {content(`"type":"video","author":"user"`), `('body', 'params', 'content', 'type')`},
		"NoAuthor":            {content(`"type":"text","content":"x"`), `('body', 'params', 'content', 'author')`},
		"OtherAuthor":         {content(`"type":"text","author":"system","content":"x"`), `('body', 'params', 'content', 'author')`},
		"OtherStyle":          {content(`"type":"text","author":"user","content":"x","style":"loud"`), `('body', 'params', 'content', 'style')`},
		"OtherFormat":         {content(`"type":"text","author":"user","content":"x","format":"html"`), `('body', 'params', 'content', 'format')`},
		"NoText":              {content(`"type":"text","author":"user"`), `('body', 'params', 'content', 'content')`},
		"TextNumber":          {content(`"type":"text","author":"user","content":1`), `('body', 'params', 'content', 'content')`},
		"AttachmentsText":     {content(`"type":"text","author":"user","content":"x","attachments":"f"`), `('body', 'params', 'content', 'attachments')`},
		"StreamText":          {`{"method":"message/send","params":{"stream":"yes","content":{}}}`, `('body', 'params', 'stream')`},
		"EventOfNoTask":       {`{"method":"event/send","params":{}}`, `('body', 'params')`},
		"CancelNoTask":        {`{"method":"task/cancel","params":{}}`, `('body', 'params')`},
		"InterruptOfBoth":     {`{"method":"task/interrupt","params":{"task_id":"a","task_name":"b"}}`, `('body', 'params')`},
	} {
		status, header, body := f.do("POST", byName, f.rpc, test.body)
		require.Equal(t, 422, status, "%s: %s", name, body)
		require.Equal(t, "application/json", header.Get("Content-Type"))
		problem := object(t, []byte(body))
		require.Equal(t, 10422.0, problem["status_code"])
		require.Contains(t, problem, "data")
		require.Contains(t, problem["message"], test.loc, name)
		require.NotContains(t, problem["message"], "\n")
	}
	require.Equal(t, before, f.stored())
	for _, path := range []string{"/agents?limit=0", "/agents?limit=x", "/agents?page_number=0", "/agents?order_direction=up", "/messages", "/messages?task_id=x&page_number=-1"} {
		status, _, body := f.do("GET", path, f.rpc, "")
		require.Equal(t, 422, status, path)
		require.Contains(t, body, `('query', `)
	}
	status, _, body := f.do("GET", "/messages?filters={}&task_id="+newID().String(), f.rpc, "")
	require.Equal(t, 400, status)
	require.Contains(t, body, `"code":400`)
	require.Equal(t, []map[string]any{}, f.list("/messages?task_id=x", f.rpc))
	for _, path := range []string{"/tasks/%00", "/tasks/name/%00", "/tasks/name/%ff", "/agents/name/%00", "/agents/%ff"} {
		status, _, _ := f.do("GET", path, f.rpc, "")
		require.Equal(t, 404, status, path)
	}
	for _, path := range []string{"/agents/name/%00/rpc", "/agents/name/%ff/rpc", "/agents/name/A/rpc"} {
		status, _, _ := f.do("POST", path, f.rpc, `{"method":"task/create","params":{}}`)
		require.Equal(t, 404, status, path)
	}
	status, _, _ = f.do("POST", byName, f.rpc, `{"method":"task/create","params":{}}`, "Idempotency-Key", strings.Repeat("k", 129))
	require.Equal(t, 400, status)
}

func TestAgentexIDs(t *testing.T) {
	t.Parallel()
	f := setup(t)
	for _, id := range []string{`1`, `"a"`, `null`, `-1.5e3`, `"\u00e9\""`} {
		_, _, body := f.do("POST", byName, f.rpc, `{"id":`+id+`,"method":"task/create","params":{}}`)
		require.Equal(t, id, string(decode[agentexReply](t, body).ID))
	}
	_, _, body := f.do("POST", byName, f.rpc, `{"method":"task/create","params":{}}`)
	require.Contains(t, body, `"error":null,"id":null}`)
}

func decode[T any](t testing.TB, body string) (v T) {
	t.Helper()
	require.NoError(t, json.Unmarshal([]byte(body), &v), body)
	return v
}

func TestAgentexAgents(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.result(f.admin, "agents.create", map[string]any{"name": "b"})
	list := f.list("/agents", f.rpc)
	require.Len(t, list, 2)
	require.Equal(t, "b", list[0]["name"], "the latest change first")
	require.Equal(t, "default", f.list("/agents?order_by=name&order_direction=desc", f.rpc)[0]["name"])
	require.Equal(t, "b", f.list("/agents?order_by=nothing", f.rpc)[0]["name"])
	require.Equal(t, "default", f.list("/agents?limit=1&page_number=2", f.rpc)[0]["name"])
	require.Empty(t, f.list("/agents?page_number=3", f.rpc))
	require.Empty(t, f.list("/agents?task_id=x", f.rpc))

	b := f.get("/agents/name/b", f.rpc)
	id := text(t, b, "id")
	require.Equal(t, b, f.get("/agents/"+id, f.rpc))
	for _, at := range []string{"created_at", "updated_at", "registered_at"} {
		require.Regexp(t, micros, b[at])
		delete(b, at)
	}
	require.Equal(t, map[string]any{
		"id": id, "name": "b", "description": "offline/offline-1", "status": "Ready", "acp_type": "sync", "status_reason": nil,
		"registration_metadata": nil, "agent_input_type": "text", "production_deployment_id": nil,
	}, b)
	require.Equal(t, "b", text(t, object(t, f.rpcOf("/agents/"+id+"/rpc", f.rpc, "task/create", `{"name":"b"}`).Result), "name"))

	f.result(f.admin, "agents.suspend", agent("b"))
	suspended := f.get("/agents/"+id, f.rpc)
	require.Equal(t, []any{"Unhealthy", "suspended"}, []any{suspended["status"], suspended["status_reason"]})
	f.result(f.admin, "agents.delete", agent("b"))
	require.Len(t, f.list("/agents", f.rpc), 1)
	require.Equal(t, "Agent "+id+" is deleted", f.fails("/agents/"+id+"/rpc", f.rpc, "task/create", `{}`))
	status, _, body := f.do("POST", "/agents/name/b/rpc", f.rpc, `{"method":"task/create","params":{}}`)
	require.Equal(t, 404, status)
	require.JSONEq(t, `{"message":"Agent b not found","code":404,"data":null}`, body)
	for path, message := range map[string]string{
		"/agents/" + id: "id '" + id + "'", "/agents/name/b": "name 'b'", "/agents/x": "id 'x'", "/agents/name/nobody": "name 'nobody'",
	} {
		status, _, body := f.do("GET", path, f.rpc, "")
		require.Equal(t, 404, status)
		require.JSONEq(t, fmt.Sprintf(`{"message":"Item with %s does not exist.","code":404,"data":null}`, message), body)
	}
	status, _, body = f.do("POST", "/agents/name/nobody/rpc", f.rpc, `{"method":"task/create","params":{}}`)
	require.Equal(t, 404, status)
	require.JSONEq(t, `{"message":"Item with name 'nobody' does not exist.","code":404,"data":null}`, body)
	for _, unknown := range []string{"x", newID().String()} {
		require.Equal(t, "Item with id '"+unknown+"' does not exist.", f.fails("/agents/"+unknown+"/rpc", f.rpc, "task/create", `{}`))
	}
	var theirs uuid.UUID
	f.scan(`SELECT id FROM agent WHERE tenant_id = 'other'`, &theirs)
	require.Equal(t, "Item with id '"+theirs.String()+"' does not exist.", f.fails("/agents/"+theirs.String()+"/rpc", f.rpc, "task/create", `{}`))
	status, _, _ = f.do("GET", "/agents/"+theirs.String(), f.rpc, "")
	require.Equal(t, 404, status)
}

func TestAgentexAuth(t *testing.T) {
	t.Parallel()
	f := setup(t)
	for _, path := range []string{"/agents", "/agents/x", "/agents/name/x", "/tasks/x", "/tasks/name/x", "/messages", byName} {
		method := "GET"
		if path == byName {
			method = "POST"
		}
		status, header, body := f.do(method, path, "", "{")
		require.Equal(t, 401, status)
		require.JSONEq(t, `{"detail":"Unauthorized"}`, body)
		require.Equal(t, "Bearer", header.Get("WWW-Authenticate"))
		for _, token := range []string{f.admin, f.read} {
			status, _, body = f.do(method, path, token, "{")
			require.Equal(t, 403, status)
			require.JSONEq(t, `{"detail":"Insufficient scope: requires 'rpc'"}`, body)
		}
		for _, header := range []string{"X-Agent-API-Key", "X-Agent-Identity"} {
			status, _, body = f.do(method, path, f.rpc, "{", header, "x")
			require.Equal(t, 401, status)
			require.JSONEq(t, `{"detail":"Agent Unauthorized"}`, body)
		}
	}
}

// TestAgentexFailed: SDKs repeat a 5xx by themselves, unless they are told that
// it may have happened.
func TestAgentexFailed(t *testing.T) {
	t.Parallel()
	s := &Server{log: slog.New(slog.DiscardHandler)}
	for name, test := range map[string]struct {
		err    error
		status int
		retry  string
	}{
		"NothingStored":   {&jobs.UnavailableError{Err: errors.New("x")}, 503, ""},
		"MayBeStored":     {committedError{fmt.Errorf("make task: %w", jobs.ErrClosed)}, 503, "false"},
		"Ours":            {errors.New("x"), 500, "false"},
		"TheRequestsForm": {missingField("params"), 422, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := httptest.NewRecorder()
			c := gin.CreateTestContextOnly(w, gin.New())
			c.Request = httptest.NewRequest("POST", byName, nil)
			s.agentexFailed(c, test.err)
			require.Equal(t, test.status, w.Code)
			require.Equal(t, test.retry, w.Header().Get("X-Should-Retry"))
			require.NotContains(t, w.Body.String(), "make task")
		})
	}
}

func TestAgentexTime(t *testing.T) {
	t.Parallel()
	for want, at := range map[string]time.Time{
		`"2026-11-30T14:25:28.015499Z"`: time.Date(2026, 11, 30, 15, 25, 28, 15499999, time.FixedZone("", 3600)),
		`"2026-11-30T14:25:28.500000Z"`: time.Date(2026, 11, 30, 14, 25, 28, 5e8, time.UTC),
		`"2026-11-30T14:25:28Z"`:        time.Date(2026, 11, 30, 14, 25, 28, 999, time.UTC),
	} {
		text, err := json.Marshal(agentexTime(at))
		require.NoError(t, err)
		require.Equal(t, want, string(text))
	}
}
