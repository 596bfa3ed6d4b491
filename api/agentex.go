package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/gin-gonic/gin"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/weir-run/weir/api/rpc"
	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/jobs"
)

const (
	maxTaskJSON   = 1 << 20   // bytes of a task's params, or metadata, or a message's attachments
	maxPage       = 10_000    // items of one page
	maxTurnWait   = time.Hour // of message/send; a client that leaves ends it before
	taskCreated   = "Task created, forwarding to ACP server"
	statusDeleted = "DELETED"
)

// agentexRoutes are the paths of the Agentex surface. All need scope rpc.
func (s *Server) agentexRoutes() []route {
	page := []string{"limit", "page_number", "order_by", "order_direction"}
	routes := []route{
		{method: "GET", path: "/agents", summary: "Lists agents", query: append([]string{"task_id"}, page...), serve: s.listAgents},
		{method: "GET", path: "/agents/:agent_id", summary: "Returns an agent", serve: s.getAgent},
		{method: "GET", path: "/agents/name/:agent_name", summary: "Returns an agent by name", serve: s.getAgent},
		{method: "POST", path: "/agents/:agent_id/rpc", summary: "Calls an agent", body: true, serve: s.callAgent},
		{method: "POST", path: "/agents/name/:agent_name/rpc", summary: "Calls an agent by name", body: true, serve: s.callAgent},
		{method: "GET", path: "/tasks/:task_id", summary: "Returns a task", query: []string{"relationships"}, serve: s.getTask},
		{method: "GET", path: "/tasks/name/:task_name", summary: "Returns a task by name", query: []string{"relationships"}, serve: s.getTask},
		{method: "GET", path: "/messages", summary: "Lists the messages of a task", query: append([]string{"task_id"}, page...), serve: s.listMessages},
	}
	for i := range routes {
		routes[i].serve = s.agentexCaller(routes[i].serve)
	}
	return routes
}

// hasAgentKey reports whether a request comes from an agent program. There are
// no agent keys yet, so that every one is wrong.
func hasAgentKey(r *http.Request) bool {
	return len(r.Header["X-Agent-Api-Key"]) > 0 || len(r.Header["X-Agent-Identity"]) > 0
}

// agentexCaller lets callers with scope rpc through.
func (s *Server) agentexCaller(next gin.HandlerFunc) gin.HandlerFunc {
	return func(c *gin.Context) {
		if hasAgentKey(c.Request) {
			detail(c, http.StatusUnauthorized, "Agent Unauthorized")
			return
		}
		caller, err := s.authenticate(c.Request, false)
		switch {
		case errors.Is(err, errUnauthorized):
			c.Header("WWW-Authenticate", "Bearer")
			detail(c, http.StatusUnauthorized, "Unauthorized")
			return
		case err != nil:
			s.agentexFailed(c, fmt.Errorf("authenticate: %w", err))
			return
		case !caller.Scopes.Has(ScopeRPC):
			detail(c, http.StatusForbidden, (&ScopeError{"rpc"}).Error())
			return
		}
		c.Request = c.Request.WithContext(withCaller(c.Request.Context(), caller))
		next(c)
	}
}

// agentexFailed answers for an error of ours, or of the request's shape.
func (s *Server) agentexFailed(c *gin.Context, err error) {
	if e, ok := errors.AsType[*shapeError](err); ok {
		e.answer(c)
		return
	}
	if unavailable(err) {
		s.log.WarnContext(c.Request.Context(), "agentex", "route", c.FullPath(), "error", err)
		c.Header("Retry-After", "1")
		if _, ok := errors.AsType[committedError](err); ok { // SDKs repeat a 503 by themselves
			c.Header("X-Should-Retry", "false")
		}
		problem(c, http.StatusServiceUnavailable, "database unavailable")
		return
	}
	if c.Request.Context().Err() == nil { // else the client left
		s.log.ErrorContext(c.Request.Context(), "agentex", "route", c.FullPath(), "error", err)
	}
	c.Header("X-Should-Retry", "false")
	problem(c, http.StatusInternalServerError, "Internal Server Error")
}

// committedError is an error after a change that is stored, or may be: what
// was asked for must not be asked again.
type committedError struct{ error }

func (e committedError) Unwrap() error { return e.error }

// pathName returns a part of the path that names something; ok is false when no
// stored text can be equal to it.
func pathName(c *gin.Context, param string) (name string, ok bool) {
	name = c.Param(param)
	return name, utf8.ValidString(name) && !strings.Contains(name, "\x00")
}

// paging are the parameters of lists.
type paging struct {
	limit, skip int
	orderBy     string
	ascending   bool
}

func readPaging(c *gin.Context) (paging, error) {
	p := paging{orderBy: c.Query("order_by")}
	number := func(name string, otherwise, most int) (int, error) {
		text, given := c.GetQuery(name)
		if !given {
			return otherwise, nil
		}
		n, err := strconv.Atoi(text)
		switch {
		case err != nil:
			return 0, &shapeError{"int_parsing", []string{"query", name}, "Input should be a valid integer, unable to parse string as an integer"}
		case n < 1:
			return 0, &shapeError{"greater_than_equal", []string{"query", name}, "Input should be greater than or equal to 1"}
		case n > most:
			return 0, &shapeError{"less_than_equal", []string{"query", name}, fmt.Sprintf("Input should be less than or equal to %d", most)}
		}
		return n, nil
	}
	var err error
	if p.limit, err = number("limit", 50, maxPage); err != nil {
		return p, err
	}
	page, err := number("page_number", 1, 100_000)
	if err != nil {
		return p, err
	}
	p.skip = (page - 1) * p.limit
	switch c.DefaultQuery("order_direction", "desc") {
	case "asc":
		p.ascending = true
	case "desc":
	default:
		return p, &shapeError{"literal_error", []string{"query", "order_direction"}, "Input should be 'asc' or 'desc'"}
	}
	return p, nil
}

// agentexAgents reads the agents of the caller's tenant, or the one of a task.
func (s *Server) agentexAgents(ctx context.Context, task *uuid.UUID) ([]agentexAgent, error) {
	rows, err := s.queries.AgentList(ctx, s.pool, db.AgentListParams{TenantID: callerFrom(ctx).TenantID, TaskID: task})
	if err != nil {
		return nil, fmt.Errorf("list agents: %w", err)
	}
	list := make([]agentexAgent, len(rows))
	text := "text"
	for i, row := range rows {
		made := agentexTime(row.CreatedAt)
		list[i] = agentexAgent{
			ID: row.ID, Name: row.Name, Description: row.Provider + "/" + row.Model, Status: "Ready", ACPType: "sync",
			CreatedAt: made, UpdatedAt: agentexTime(row.UpdatedAt), RegisteredAt: &made, AgentInputType: &text,
		}
		if row.SuspendedAt != nil {
			reason := "suspended"
			list[i].Status, list[i].StatusReason = "Unhealthy", &reason
		}
	}
	return list, nil
}

func (s *Server) listAgents(c *gin.Context) {
	p, err := readPaging(c)
	if err != nil {
		s.agentexFailed(c, err)
		return
	}
	var task *uuid.UUID
	if text, given := c.GetQuery("task_id"); given {
		id, ok := parseUUID(text)
		if !ok {
			writeJSON(c, http.StatusOK, []agentexAgent{})
			return
		}
		task = &id
	}
	list, err := s.agentexAgents(c.Request.Context(), task)
	if err != nil {
		s.agentexFailed(c, err)
		return
	}
	sortAgents(list, p)
	list = list[min(p.skip, len(list)):]
	writeJSON(c, http.StatusOK, list[:min(p.limit, len(list))])
}

// sortAgents puts agents in order; they come with the latest change first, and
// stay so when the column is not known.
func sortAgents(list []agentexAgent, p paging) {
	by := map[string]func(a, b agentexAgent) int{
		"id":         func(a, b agentexAgent) int { return strings.Compare(a.ID.String(), b.ID.String()) },
		"name":       func(a, b agentexAgent) int { return strings.Compare(a.Name, b.Name) },
		"created_at": func(a, b agentexAgent) int { return time.Time(a.CreatedAt).Compare(time.Time(b.CreatedAt)) },
		"updated_at": func(a, b agentexAgent) int { return time.Time(a.UpdatedAt).Compare(time.Time(b.UpdatedAt)) },
	}[p.orderBy]
	if by == nil {
		return
	}
	slices.SortStableFunc(list, func(a, b agentexAgent) int {
		if p.ascending {
			return by(a, b)
		}
		return by(b, a)
	})
}

func (s *Server) getAgent(c *gin.Context) {
	list, err := s.agentexAgents(c.Request.Context(), nil)
	if err != nil {
		s.agentexFailed(c, err)
		return
	}
	by, name := "id", c.Param("agent_id")
	if name == "" {
		by, name = "name", c.Param("agent_name")
	}
	i := slices.IndexFunc(list, func(a agentexAgent) bool {
		if by == "name" {
			return a.Name == name
		}
		id, ok := parseUUID(name)
		return ok && a.ID == id
	})
	if i < 0 {
		missingItem(c, by, name)
		return
	}
	writeJSON(c, http.StatusOK, list[i])
}

// taskOf makes the wire's task of a row.
func taskOf(row *db.TaskFindRow) agentexTask {
	return agentexTask{
		ID: row.ID, Name: row.Name, Status: row.TaskStatus, StatusReason: row.TaskStatusReason, CreatedAt: agentexTime(row.CreatedAt),
		UpdatedAt: agentexTime(row.UpdatedAt), Params: row.TaskParams, TaskMetadata: row.TaskMetadata,
	}
}

func (s *Server) getTask(c *gin.Context) {
	ctx := c.Request.Context()
	arg := db.TaskFindParams{TenantID: callerFrom(ctx).TenantID}
	by, param := "id", "task_id"
	if c.Param(param) == "" {
		by, param = "name", "task_name"
	}
	name, ok := pathName(c, param)
	if by == "name" {
		arg.Name = &name
	} else {
		var id uuid.UUID
		id, ok = parseUUID(name)
		arg.ID = &id
	}
	if !ok {
		missingItem(c, by, strings.ToValidUTF8(name, "\uFFFD"))
		return
	}
	row, err := s.queries.TaskFind(ctx, s.pool, arg)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		missingItem(c, by, name)
		return
	case err != nil:
		s.agentexFailed(c, fmt.Errorf("find task: %w", err))
		return
	case *row.TaskStatus == statusDeleted:
		problem(c, http.StatusNotFound, fmt.Sprintf("Task %s not found", name))
		return
	}
	view := agentexTaskView{agentexTask: taskOf(&row)}
	if slices.Contains(strings.Split(strings.Join(c.QueryArray("relationships"), ","), ","), "agents") {
		if view.Agents, err = s.agentexAgents(ctx, &row.ID); err != nil {
			s.agentexFailed(c, err)
			return
		}
	}
	writeJSON(c, http.StatusOK, view)
}

func (s *Server) listMessages(c *gin.Context) {
	ctx := c.Request.Context()
	text, given := c.GetQuery("task_id")
	if !given {
		s.agentexFailed(c, &shapeError{"missing", []string{"query", "task_id"}, "Field required"})
		return
	}
	p, err := readPaging(c)
	if err != nil {
		s.agentexFailed(c, err)
		return
	}
	if c.Query("filters") != "" {
		problem(c, http.StatusBadRequest, "filters are not supported yet")
		return
	}
	list := []agentexMessage{}
	id, ok := parseUUID(text)
	if !ok {
		writeJSON(c, http.StatusOK, list)
		return
	}
	// In the order of their numbers: clocks may stand still.
	arg := db.MessagesNewestParams{TenantID: callerFrom(ctx).TenantID, SessionID: id, Skip: int32(p.skip), MaxRows: int32(p.limit)}
	if p.ascending {
		rows, readErr := s.queries.MessagesOldest(ctx, s.pool, db.MessagesOldestParams(arg))
		for _, row := range rows {
			list = append(list, messageOf(db.MessagesOfRunRow(row)))
		}
		err = readErr
	} else {
		rows, readErr := s.queries.MessagesNewest(ctx, s.pool, arg)
		for _, row := range rows {
			list = append(list, messageOf(db.MessagesOfRunRow(row)))
		}
		err = readErr
	}
	if err != nil {
		s.agentexFailed(c, fmt.Errorf("list messages: %w", err))
		return
	}
	writeJSON(c, http.StatusOK, list)
}

// messageOf makes the wire's message of a row.
func messageOf(row db.MessagesOfRunRow) agentexMessage {
	return agentexMessage{
		ID: row.ID, TaskID: row.SessionID, Content: row.Content, StreamingStatus: row.StreamingStatus, CreatedAt: agentexTime(row.CreatedAt),
		UpdatedAt: agentexTimeOf(row.UpdatedAt),
	}
}

// callAgent answers POST /agents/…/rpc.
func (s *Server) callAgent(c *gin.Context) {
	ctx := c.Request.Context()
	if s.draining.Load() {
		c.Header("Retry-After", "1")
		problem(c, http.StatusServiceUnavailable, "this process is shutting down")
		return
	}
	body, err := io.ReadAll(http.MaxBytesReader(c.Writer, c.Request.Body, rpc.DefaultMaxBody))
	if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
		problem(c, http.StatusRequestEntityTooLarge, fmt.Sprintf("Request body over %d bytes", rpc.DefaultMaxBody))
		return
	} else if err != nil {
		problem(c, http.StatusBadRequest, "Request body ended early")
		return
	}
	call, err := readCall(body)
	if err != nil {
		s.agentexFailed(c, err)
		return
	}
	key := c.GetHeader("Idempotency-Key")
	if key != "" && checkKey(key) != nil {
		problem(c, http.StatusBadRequest, checkKey(key).Error())
		return
	}
	do, err := s.agentexMethod(call)
	if err != nil {
		s.agentexFailed(c, err)
		return
	}
	agent, err := s.calledAgent(c)
	if agent == nil && err == nil {
		return // it is answered
	}
	var result any
	if err == nil {
		result, err = do(ctx, agent, key)
	}
	answer := agentexAnswer{JSONRPC: "2.0", Result: result, ID: call.ID}
	if err != nil {
		if answer.Error, err = s.agentexRefusal(c, err); err != nil {
			s.agentexFailed(c, err)
			return
		}
		answer.Result = nil
	}
	writeJSON(c, http.StatusOK, answer)
}

// agentexMethod reads the params of a call. Error: *shapeError.
func (s *Server) agentexMethod(call *agentexCall) (func(ctx context.Context, agent *agentView, key string) (any, error), error) {
	switch *call.Method {
	case "task/create":
		p := &taskCreateParams{}
		if err := p.read(call.Params); err != nil {
			return nil, err
		}
		return func(ctx context.Context, agent *agentView, key string) (any, error) {
			return s.taskCreate(ctx, agent, p, key)
		}, nil
	case "message/send":
		p := &messageSendParams{}
		if err := p.read(call.Params); err != nil {
			return nil, err
		}
		return func(ctx context.Context, agent *agentView, key string) (any, error) {
			return s.messageSend(ctx, agent, p, key)
		}, nil
	default:
		var ref taskRef
		if err := decodeShape(call.Params, &ref, "params"); err != nil {
			return nil, err
		}
		if err := ref.check(true); err != nil {
			return nil, err
		}
		return func(context.Context, *agentView, string) (any, error) {
			return nil, &agentexError{Code: rpc.MethodNotFound, Message: "Unsupported method: " + *call.Method}
		}, nil
	}
}

// calledAgent finds the agent of the path. An unknown name is answered at once,
// with nil; an unknown id is an error of the call.
func (s *Server) calledAgent(c *gin.Context) (*agentView, error) {
	ctx := c.Request.Context()
	tenant := callerFrom(ctx).TenantID
	byName := c.Param("agent_id") == ""
	name, ok := pathName(c, "agent_name")
	if !byName {
		text := c.Param("agent_id")
		id, isID := parseUUID(text)
		var err error
		if ok = isID; isID {
			name, err = s.queries.AgentNameOf(ctx, s.pool, db.AgentNameOfParams{TenantID: tenant, ID: id})
			if errors.Is(err, pgx.ErrNoRows) {
				ok, err = false, nil
			}
		}
		if err != nil {
			return nil, fmt.Errorf("find agent: %w", err)
		}
		if !ok {
			return nil, refuse("%s", itemMissing("id", strings.ToValidUTF8(text, "\uFFFD")))
		}
	}
	var agent *agentView
	err := errNoAgent
	if ok && agentName.MatchString(name) {
		agent, err = s.agents.get(ctx, agentKey{tenant, name})
	}
	switch {
	case errors.Is(err, errNoAgent):
		missingItem(c, "name", strings.ToValidUTF8(name, "\uFFFD"))
		return nil, nil
	case err != nil:
		return nil, err
	case agent.deleted && byName:
		problem(c, http.StatusNotFound, fmt.Sprintf("Agent %s not found", name))
		return nil, nil
	case agent.deleted:
		return nil, refuse("Agent %s is deleted", agent.id)
	}
	return agent, nil
}

// agentexRefusal gives an error the form of a call's answer. What is returned
// as err has another.
func (s *Server) agentexRefusal(c *gin.Context, err error) (*agentexError, error) {
	if e, ok := errors.AsType[*agentexError](err); ok {
		return e, nil
	}
	if _, ok := errors.AsType[*shapeError](err); ok {
		return nil, err
	}
	if pg, ok := errors.AsType[*pgconn.PgError](err); ok && pg.Code[:2] == "22" {
		return nil, badField("Input cannot be stored", "params") // a number beyond what jsonb holds
	}
	if e, ok := errors.AsType[*TurnFailedError](err); ok {
		return &agentexError{Code: rpc.InternalError, Message: e.Kind + ": " + e.Message}, nil
	}
	if e, ok := errors.AsType[*StillRunningError](err); ok {
		return &agentexError{Code: rpc.InternalError, Message: e.Error()}, nil
	}
	if e, ok := errors.AsType[*jobs.SessionAgentError](err); ok {
		return &agentexError{Code: rpc.InternalError, Message: fmt.Sprintf("Task belongs to agent %s", e.Agent)}, nil
	}
	if e, ok := errors.AsType[*jobs.TaskEndedError](err); ok {
		return &agentexError{Code: rpc.InternalError, Message: e.Error()}, nil
	}
	if e, ok := errors.AsType[*InvalidError](err); ok {
		return &agentexError{Code: rpc.InternalError, Message: e.Reason + ": " + e.Error()}, nil
	}
	if e := wireJobsError(err); e != nil {
		return &agentexError{Code: rpc.InternalError, Message: e.Message}, nil
	}
	if c.Request.Context().Err() != nil || unavailable(err) {
		return nil, err
	}
	e := rpc.Internal(err)
	s.log.ErrorContext(c.Request.Context(), "agentex", "errorId", e.ErrorID(), "route", c.FullPath(), "error", err)
	return &agentexError{Code: rpc.InternalError, Message: "internal error " + e.ErrorID()}, nil
}

// taskCreateParams are the parameters of task/create.
type taskCreateParams struct {
	Name         *string         `json:"name"`
	Params       json.RawMessage `json:"params"`
	TaskMetadata json.RawMessage `json:"task_metadata"`
}

func (p *taskCreateParams) read(raw json.RawMessage) (err error) {
	if err := decodeShape(raw, p, "params"); err != nil {
		return err
	}
	if err := checkTaskName(orEmpty(p.Name), "name"); err != nil {
		return err
	}
	if p.Params, err = objectField(p.Params, "params", "params"); err != nil {
		return err
	}
	p.TaskMetadata, err = objectField(p.TaskMetadata, "params", "task_metadata")
	return err
}

// taskCreate makes a task, or returns the one of its name: the same for all who
// ask at once. Params that are given replace those it has, and an interrupted
// task is resumed.
func (s *Server) taskCreate(ctx context.Context, agent *agentView, p *taskCreateParams, key string) (any, error) {
	run := func(ctx context.Context) (any, error) {
		task, err := s.findOrMakeTask(ctx, agent, p)
		if err != nil {
			return nil, err
		}
		return taskOf(task), nil
	}
	if key == "" {
		return run(ctx)
	}
	digest, err := digest(struct {
		Agent uuid.UUID
		*taskCreateParams
	}{agent.id, p})
	if err != nil {
		return nil, err
	}
	return s.once(ctx, callerFrom(ctx).TenantID, "task/create", key, digest, run)
}

func (s *Server) findOrMakeTask(ctx context.Context, agent *agentView, p *taskCreateParams) (*db.TaskFindRow, error) {
	caller := callerFrom(ctx)
	tx := s.reading(ctx)
	id, name := newID(), orEmpty(p.Name)
	spec := taskSpec(caller.TenantID, agent.config.Name, id, name)
	for {
		row, err := s.queries.TaskInsert(ctx, tx, db.TaskInsertParams{
			TenantID: caller.TenantID, ID: id, ConversationRef: spec.ConversationRef, Name: optional(name, name != ""), Scope: spec.Scope,
			Agent: agent.config.Name, OwnerToken: &caller.TokenID, TaskStatusReason: new(taskCreated), TaskParams: p.Params, TaskMetadata: p.TaskMetadata,
		})
		if err == nil {
			found := db.TaskFindRow(row)
			return &found, nil
		}
		if !errors.Is(err, pgx.ErrNoRows) {
			return nil, committedError{fmt.Errorf("make task: %w", err)}
		}
		found, err := s.findTask(ctx, tx, agent, "", name)
		if err != nil {
			return nil, err
		}
		if found == nil {
			continue // removed between the two statements
		}
		if *found.TaskStatus == statusDeleted {
			return nil, refuse("Task %s is %s", found.ID, statusDeleted)
		}
		return s.updateTask(ctx, tx, found, p.Params, true)
	}
}

// taskSpec is the session of a new task; a task without a name is called by its
// id.
func taskSpec(tenant, agent string, id uuid.UUID, name string) jobs.SessionSpec {
	conversation := name
	if name == "" {
		conversation = id.String()
	}
	sc := scope{tenant: tenant, agent: agent, channelType: channelAgentex, conversationID: conversation}.JSON()
	return jobs.SessionSpec{
		ConversationRef: conversationRef(sc), Name: name, ChannelType: channelAgentex, Scope: sc, TaskStatus: "RUNNING", TaskReason: taskCreated,
	}
}

// findTask finds a task by its id, or by its name; nil when there is none.
func (s *Server) findTask(ctx context.Context, tx db.DBTX, agent *agentView, id, name string) (*db.TaskFindRow, error) {
	arg := db.TaskFindParams{TenantID: callerFrom(ctx).TenantID}
	if id != "" {
		parsed, ok := parseUUID(id)
		if !ok {
			return nil, nil
		}
		arg.ID = &parsed
	} else {
		arg.Name = &name
		arg.ConversationRef = new(taskSpec(arg.TenantID, agent.config.Name, uuid.Nil, name).ConversationRef)
	}
	row, err := s.queries.TaskFind(ctx, tx, arg)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("find task: %w", err)
	}
	return &row, nil
}

// updateTask stores params that differ, and, with resume, puts an interrupted
// task back to work.
func (s *Server) updateTask(ctx context.Context, tx db.DBTX, task *db.TaskFindRow, params json.RawMessage, resume bool) (*db.TaskFindRow, error) {
	if params == nil && !(resume && *task.TaskStatus == "INTERRUPTED") {
		return task, nil
	}
	row, err := s.queries.TaskUpdate(ctx, tx, db.TaskUpdateParams{TenantID: callerFrom(ctx).TenantID, ID: task.ID, TaskParams: params, Resume: resume})
	if errors.Is(err, pgx.ErrNoRows) {
		return task, nil
	} else if err != nil {
		return nil, fmt.Errorf("update task %s: %w", task.ID, err)
	}
	updated := db.TaskFindRow(row)
	return &updated, nil
}

// messageSendParams are the parameters of message/send.
type messageSendParams struct {
	taskRef
	Content    json.RawMessage `json:"content"`
	TaskParams json.RawMessage `json:"task_params"`
	Stream     *bool           `json:"stream"`

	content *textContent
}

func (p *messageSendParams) read(raw json.RawMessage) (err error) {
	if err := decodeShape(raw, p, "params"); err != nil {
		return err
	}
	if err := p.check(false); err != nil {
		return err
	}
	if p.content, err = readContent(p.Content); err != nil {
		return err
	}
	p.TaskParams, err = objectField(p.TaskParams, "params", "task_params")
	return err
}

// messageSend accepts a turn of a task, waits for it and returns what the agent
// said.
func (s *Server) messageSend(ctx context.Context, agent *agentView, p *messageSendParams, key string) (any, error) {
	caller := callerFrom(ctx)
	switch text := p.content; {
	case orEmpty(p.Stream):
		return nil, refuse("streaming is not supported yet: send with stream false")
	case text.Type != "text":
		return nil, refuse("agent %s reads content of type text, not %s", agent.config.Name, text.Type)
	case checkText("content.content", text.Content) != nil:
		return nil, checkText("content.content", text.Content)
	case len(text.Content) > maxText:
		return nil, &InvalidError{Field: "content.content", Reason: "too_large", Message: fmt.Sprintf("must be at most %d bytes", maxText)}
	}
	request := jobs.Message{ID: newID(), Content: textMessage(*p.content)}
	arg := jobs.AcceptParams{TenantID: caller.TenantID, OwnerToken: caller.TokenID, Message: &request}
	id, name := orEmpty(p.TaskID), orEmpty(p.TaskName)
	switch {
	case id == "" && name == "":
		task := newID()
		arg.Session, arg.Fresh = taskSpec(caller.TenantID, agent.config.Name, task, ""), true
		arg.Session.ID = task
	default:
		task, err := s.findTask(ctx, s.pool, agent, id, name)
		switch {
		case err != nil:
			return nil, err
		case task == nil && id != "":
			return nil, refuse("%s", itemMissing("id", id))
		case task == nil:
			arg.Session = taskSpec(caller.TenantID, agent.config.Name, uuid.Nil, name)
		case *task.TaskStatus == statusDeleted && id != "":
			return nil, refuse("Task %s not found", task.ID)
		case task.Agent != agent.config.Name:
			return nil, refuse("Task %s belongs to agent %s", task.ID, task.Agent)
		default:
			if *task.TaskStatus == "RUNNING" || *task.TaskStatus == "INTERRUPTED" { // else it is refused below
				if task, err = s.updateTask(ctx, s.pool, task, p.TaskParams, false); err != nil {
					return nil, err
				}
			}
			arg.SessionID, arg.UserID = task.ID, metadataUser(task.TaskMetadata)
		}
	}
	if arg.SessionID == uuid.Nil {
		arg.Session.OwnerToken, arg.Session.TaskParams = caller.TokenID, p.TaskParams
	}
	var err error
	if arg.Input, err = marshal(turnInput{p.content.Content, arg.UserID}); err != nil {
		return nil, err
	}
	arg.Terms = func(ctx context.Context, _ string) (jobs.Terms, error) {
		return s.terms(ctx, caller.TenantID, agent.config.Name, arg.UserID)
	}
	accepted, err := s.acceptParams(ctx, arg, key, "message/send", struct {
		Agent        uuid.UUID
		TaskID, Name string
		Content      *textContent
		TaskParams   json.RawMessage
	}{agent.id, id, name, p.content, p.TaskParams})
	if err != nil {
		return nil, err
	}
	answer, err := s.answerOf(ctx, accepted, request.ID)
	if err != nil {
		return nil, committedError{err}
	}
	return answer, nil
}

// answerOf waits for an accepted turn and returns what its agent said. The
// request is the user's message, unless the turn is that of an earlier call.
func (s *Server) answerOf(ctx context.Context, a *jobs.Accepted, request uuid.UUID) ([]agentexMessage, error) {
	tenant := callerFrom(ctx).TenantID
	o, err := s.await(ctx, tenant, a, maxTurnWait)
	if err != nil {
		return nil, err
	}
	if o.State != db.RunStateCompleted {
		return nil, s.turnFailed(ctx, a, o)
	}
	read := db.MessagesOfRunParams{TenantID: tenant, SessionID: a.SessionID, RunID: a.RunID, RequestID: request}
	if a.Duplicate {
		read.RequestID = uuid.Nil
	}
	rows, err := s.queries.MessagesOfRun(ctx, s.pool, read)
	if err != nil {
		return nil, fmt.Errorf("messages of run %s: %w", a.RunID, err)
	}
	list := make([]agentexMessage, len(rows))
	for i, row := range rows {
		list[i] = messageOf(row)
	}
	return list, nil
}

// metadataUser is who speaks in a task.
func metadataUser(metadata json.RawMessage) string {
	var m struct {
		UserID any `json:"userId"`
	}
	if len(metadata) == 0 || json.Unmarshal(metadata, &m) != nil {
		return ""
	}
	user, _ := m.UserID.(string)
	if UserID(user).Validate() != nil {
		return ""
	}
	return user
}
