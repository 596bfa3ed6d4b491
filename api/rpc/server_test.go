package rpc

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m)
}

// handlerFunc is a Handler.
type handlerFunc func(ctx context.Context, call *Call) (any, Wait, error)

func (h handlerFunc) Accept(ctx context.Context, call *Call) (any, Wait, error) {
	return h(ctx, call)
}

// methods is a Dispatcher.
type methods map[string]handlerFunc

func (m methods) Lookup(_ context.Context, name string) (Handler, error) {
	h, ok := m[name]
	if !ok {
		return nil, &Error{Code: MethodNotFound, Message: "Method not found"}
	}
	return h, nil
}

var errMapped = errors.New("mapped")

// fixture is a server with a few methods and the log it writes.
type fixture struct {
	*Server
	log *bytes.Buffer

	mu    sync.Mutex
	calls []Call // of record, in their order
}

func setup(t testing.TB) *fixture {
	t.Helper()
	f := &fixture{log: new(bytes.Buffer)}
	f.Server = &Server{
		Log: slog.New(slog.NewJSONHandler(f.log, nil)),
		Dispatcher: methods{
			"echo": func(ctx context.Context, call *Call) (any, Wait, error) {
				return json.RawMessage(bytes.Clone(call.Params)), nil, nil
			},
			"record": func(_ context.Context, call *Call) (any, Wait, error) {
				f.mu.Lock()
				defer f.mu.Unlock()
				c := *call
				c.Params = bytes.Clone(c.Params)
				f.calls = append(f.calls, c)
				return len(f.calls), nil, nil
			},
			"fail":     func(context.Context, *Call) (any, Wait, error) { return nil, nil, errors.New("secret: db is down") },
			"mapped":   func(context.Context, *Call) (any, Wait, error) { return nil, nil, fmt.Errorf("deep: %w", errMapped) },
			"panic":    func(context.Context, *Call) (any, Wait, error) { panic("secret: boom") },
			"nil":      func(context.Context, *Call) (any, Wait, error) { return nil, nil, nil },
			"unusable": func(context.Context, *Call) (any, Wait, error) { return func() {}, nil, nil },
			"marshalPanic": func(context.Context, *Call) (any, Wait, error) {
				return panicMarshaler{}, nil, nil
			},
			"unusableData": func(context.Context, *Call) (any, Wait, error) {
				return nil, nil, &Error{Code: SessionBusy, Message: "busy", Data: func() {}}
			},
			"busy": func(context.Context, *Call) (any, Wait, error) {
				return nil, nil, &Error{Code: SessionBusy, Message: "busy", Data: map[string]any{"retryable": true}}
			},
			"draining": func(context.Context, *Call) (any, Wait, error) {
				return nil, nil, NotAvailable("draining", 1500*time.Millisecond)
			},
			"limited": func(context.Context, *Call) (any, Wait, error) { return nil, nil, TooManyRequests(0) },
			"waitPanic": func(context.Context, *Call) (any, Wait, error) {
				return nil, func(context.Context) (any, error) { panic("secret: boom") }, nil
			},
		},
		MapError: func(err error) *Error {
			if errors.Is(err, errMapped) {
				return &Error{Code: IdempotencyConflict, Message: "idempotency_conflict"}
			}
			return nil
		},
	}
	return f
}

type panicMarshaler struct{}

func (panicMarshaler) MarshalJSON() ([]byte, error) { panic("secret: boom") }

// post sends a body to the server.
func (f *fixture) post(body string, header ...string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(http.MethodPost, "/rpc", strings.NewReader(body))
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	w := httptest.NewRecorder()
	f.ServeHTTP(w, r)
	return w
}

func response(id, member string) string {
	return `{"jsonrpc":"2.0","id":` + id + `,` + member + `}`
}

func failure(id string, code int, message string) string {
	return response(id, fmt.Sprintf(`"error":{"code":%d,"message":%q}`, code, message))
}

// TestServe has a row for each rule about one message. The name of a row
// starts with the statement of the contract it proves.
func TestServe(t *testing.T) {
	t.Parallel()
	const (
		badVersion = `Invalid request: jsonrpc must be "2.0"`
		badMethod  = "Invalid request: method must be a string"
		badID      = "Invalid request: id must be a string or a number"
		notObject  = "Invalid request: not an object"
		twice      = "Invalid request: a member is named twice"
		notFound   = "Method not found"
	)
	paramsError := func(id string) string {
		return response(id, `"error":{"code":-32602,"message":"params must be an object","data":{"field":"params","reason":"invalid"}}`)
	}
	syntax := func(offset int) string {
		return response("null", fmt.Sprintf(`"error":{"code":-32700,"message":"Parse error: not JSON","data":{"offset":%d}}`, offset))
	}
	tests := map[string]struct {
		body string
		want string // the exact body; empty means 204
	}{
		"RC-1/Request":             {`{"jsonrpc":"2.0","id":1,"method":"echo","params":{"a":[1,{"b":null}]}}`, response("1", `"result":{"a":[1,{"b":null}]}`)},
		"RC-1/AnyOrderAndSpace":    {" \r\n\t{ \"params\" : {} , \"method\" : \"echo\" , \"id\" : 1 , \"jsonrpc\" : \"2.0\" } \n", response("1", `"result":{}`)},
		"RC-1/NoParams":            {`{"jsonrpc":"2.0","id":1,"method":"echo"}`, response("1", `"result":{}`)},
		"RC-1/EscapedNames":        {`{"\u006asonrpc":"\u0032.0","i\u0064":1,"\u006dethod":"ech\u006f","param\u0073":{}}`, response("1", `"result":{}`)},
		"RC-1/ParamsArray":         {`{"jsonrpc":"2.0","id":1,"method":"echo","params":[1]}`, paramsError("1")},
		"RC-1/ParamsNull":          {`{"jsonrpc":"2.0","id":1,"method":"echo","params":null}`, paramsError("1")},
		"RC-1/ParamsString":        {`{"jsonrpc":"2.0","id":1,"method":"echo","params":"{}"}`, paramsError("1")},
		"RC-1/UnknownBeforeParams": {`{"jsonrpc":"2.0","id":1,"method":"nope","params":[1]}`, failure("1", -32601, notFound)},
		"RC-1/OtherMembersIgnored": {`{"jsonrpc":"2.0","id":1,"method":"echo","x":{"y":[]},"ID":2,"Method":"nope"}`, response("1", `"result":{}`)},
		"RC-1/NullResult":          {`{"jsonrpc":"2.0","id":1,"method":"nil"}`, response("1", `"result":null`)},

		"RC-3/Empty":              {``, syntax(0)},
		"RC-3/NotJSON":            {`{"jsonrpc":"2.0","id":1,"method":"echo"`, syntax(39)},
		"RC-3/Text":               {`hello`, syntax(0)},
		"RC-3/Trailing":           {`{"jsonrpc":"2.0","id":1,"method":"record"} x`, syntax(43)},
		"RC-3/ByteOrderMark":      {"\ufeff{}", syntax(0)},
		"RC-3/UnclosedBatch":      {`[{"jsonrpc":"2.0","id":1,"method":"record"}`, syntax(43)},
		"RC-3/ControlInString":    {"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"ec\nho\"}", syntax(36)},
		"RC-3/Scalar":             {`1`, failure("null", -32600, notObject)},
		"RC-3/Null":               {`null`, failure("null", -32600, notObject)},
		"RC-3/ScalarTrailing":     {`1 1`, syntax(2)},
		"RC-3/NoVersion":          {`{"id":1,"method":"echo"}`, failure("1", -32600, badVersion)},
		"RC-3/Version1":           {`{"jsonrpc":"1.0","id":"a","method":"echo"}`, failure(`"a"`, -32600, badVersion)},
		"RC-3/VersionNumber":      {`{"jsonrpc":2.0,"id":1,"method":"echo"}`, failure("1", -32600, badVersion)},
		"RC-3/NoMethod":           {`{"jsonrpc":"2.0","id":1}`, failure("1", -32600, badMethod)},
		"RC-3/MethodNumber":       {`{"jsonrpc":"2.0","id":1,"method":7}`, failure("1", -32600, badMethod)},
		"RC-3/MethodNull":         {`{"jsonrpc":"2.0","id":1,"method":null}`, failure("1", -32600, badMethod)},
		"RC-3/Unknown":            {`{"jsonrpc":"2.0","id":1,"method":"nope"}`, failure("1", -32601, notFound)},
		"RC-3/EmptyMethod":        {`{"jsonrpc":"2.0","id":1,"method":""}`, failure("1", -32601, notFound)},
		"RC-3/EmptyObject":        {`{}`, failure("null", -32600, badVersion)},
		"RC-3/InvalidWithoutID":   {`{"jsonrpc":"2.0","method":1}`, failure("null", -32600, badMethod)},
		"RC-3/AResponse":          {`{"jsonrpc":"2.0","id":1,"result":{}}`, failure("1", -32600, badMethod)},
		"RC-3/MethodTwice":        {`{"jsonrpc":"2.0","id":1,"method":"echo","method":"record"}`, failure("1", -32600, twice)},
		"RC-3/IDTwice":            {`{"jsonrpc":"2.0","id":1,"id":2,"method":"echo"}`, failure("null", -32600, twice)},
		"RC-3/ParamsTwiceEscaped": {`{"jsonrpc":"2.0","id":1,"method":"echo","params":{},"p\u0061rams":{}}`, failure("1", -32600, twice)},
		"RC-3/TooDeep": {
			`{"jsonrpc":"2.0","id":1,"method":"echo","params":{"a":` + strings.Repeat("[", 200) + strings.Repeat("]", 200) + `}}`,
			response("null", `"error":{"code":-32700,"message":"Parse error: nested too deeply","data":{"offset":180}}`),
		},

		"RC-14/String":                 {`{"jsonrpc":"2.0","id":"request-1","method":"echo"}`, response(`"request-1"`, `"result":{}`)},
		"RC-14/EmptyString":            {`{"jsonrpc":"2.0","id":"","method":"echo"}`, response(`""`, `"result":{}`)},
		"RC-14/Zero":                   {`{"jsonrpc":"2.0","id":0,"method":"echo"}`, response("0", `"result":{}`)},
		"RC-14/Fraction":               {`{"jsonrpc":"2.0","id":-1.50e+1,"method":"echo"}`, response("-1.50e+1", `"result":{}`)},
		"RC-14/HugeNumber":             {`{"jsonrpc":"2.0","id":1e999,"method":"echo"}`, response("1e999", `"result":{}`)},
		"RC-14/LongNumber":             {`{"jsonrpc":"2.0","id":12345678901234567890123,"method":"echo"}`, response("12345678901234567890123", `"result":{}`)},
		"RC-14/EscapesStay":            {`{"jsonrpc":"2.0","id":"\u0000\ud800<","method":"echo"}`, response(`"\u0000\ud800<"`, `"result":{}`)},
		"RC-14/IDNull":                 {`{"jsonrpc":"2.0","id":null,"method":"echo"}`, failure("null", -32600, badID)},
		"RC-14/IDTrue":                 {`{"jsonrpc":"2.0","id":true,"method":"echo"}`, failure("null", -32600, badID)},
		"RC-14/IDObject":               {`{"jsonrpc":"2.0","id":{},"method":"echo"}`, failure("null", -32600, badID)},
		"RC-14/IDArray":                {`{"jsonrpc":"2.0","id":[1],"method":"echo"}`, failure("null", -32600, badID)},
		"RC-14/NoID":                   {`{"jsonrpc":"2.0","method":"record"}`, ``},
		"RC-14/NoIDUnknown":            {`{"jsonrpc":"2.0","method":"nope"}`, ``},
		"RC-14/NoIDBadParams":          {`{"jsonrpc":"2.0","method":"echo","params":[1]}`, ``},
		"RC-14/NoIDFails":              {`{"jsonrpc":"2.0","method":"fail"}`, ``},
		"RC-14/NoIDPanics":             {`{"jsonrpc":"2.0","method":"panic"}`, ``},
		"RC-14/NoIDRefused":            {`{"jsonrpc":"2.0","method":"draining"}`, ``},
		"RC-14/BatchWithoutIDs":        {`[{"jsonrpc":"2.0","method":"record"},{"jsonrpc":"2.0","method":"nope"}]`, ``},
		"RC-14/BatchAnswersOnlyWithID": {`[{"jsonrpc":"2.0","method":"record"},{"jsonrpc":"2.0","id":1,"method":"echo"}]`, `[` + response("1", `"result":{}`) + `]`},

		"RC-17/ArrayOrder": {
			`[{"jsonrpc":"2.0","id":2,"method":"record"},{"jsonrpc":"2.0","id":1,"method":"record"},{"jsonrpc":"2.0","id":"x","method":"nope"}]`,
			`[` + response("2", `"result":1`) + `,` + response("1", `"result":2`) + `,` + failure(`"x"`, -32601, notFound) + `]`,
		},
		"RC-17/One":   {`[{"jsonrpc":"2.0","id":1,"method":"echo"}]`, `[` + response("1", `"result":{}`) + `]`},
		"RC-17/Empty": {`[]`, failure("null", -32600, "Empty batch")},
		"RC-17/50":    {batch(50), `[` + strings.TrimSuffix(strings.Repeat(response("1", `"result":{}`)+`,`, 50), ",") + `]`},
		"RC-17/51":    {batch(51), failure("null", -32600, "Batch too large")},
		"RC-17/BadMembers": {
			`[1,[],{"jsonrpc":"2.0","id":1,"method":"echo"},{}]`,
			`[` + failure("null", -32600, notObject) + `,` + failure("null", -32600, notObject) + `,` + response("1", `"result":{}`) + `,` + failure("null", -32600, badVersion) + `]`,
		},
		"RC-17/StatusesOfMembersDoNotCount": {
			`[{"jsonrpc":"2.0","id":1,"method":"draining"}]`, `[` + failure("1", -32014, "draining") + `]`,
		},

		"RC-18/InvalidUTF8":        {"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"echo\",\"params\":{\"a\":\"\xff\"}}", failure("null", -32700, "Parse error: invalid UTF-8")},
		"RC-18/RawSurrogate":       {"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"echo\",\"params\":{\"a\":\"\xed\xa0\x80\"}}", failure("null", -32700, "Parse error: invalid UTF-8")},
		"RC-18/InvalidUTF8Outside": {"\xff", failure("null", -32700, "Parse error: invalid UTF-8")},
		"RC-18/Nul":                {`{"jsonrpc":"2.0","id":1,"method":"echo","params":{"a":"x\u0000y","\u0000":1}}`, response("1", `"result":{"a":"x\ufffdy","\ufffd":1}`)},
		"RC-18/LoneSurrogates":     {`{"jsonrpc":"2.0","id":1,"method":"echo","params":{"a":"\ud800 \uDFFF \ud83d\ude00"}}`, response("1", `"result":{"a":"\ufffd \ufffd \ud83d\ude00"}`)},
		"RC-18/EscapedBackslash":   {`{"jsonrpc":"2.0","id":1,"method":"echo","params":{"a":"\\u0000"}}`, response("1", `"result":{"a":"\\u0000"}`)},

		"Params/InternalMembersStripped": {
			`{"jsonrpc":"2.0","id":1,"method":"echo","params":{"_agentId":"x","a":{"_id":1},"\u005ftrustLevel":9,"_capabilities":["}"]}}`,
			response("1", `"result":{"a":{"_id":1}}`),
		},
		"Result/MarkupStays":  {`{"jsonrpc":"2.0","id":1,"method":"echo","params":{"a":"<b>&"}}`, response("1", `"result":{"a":"<b>&"}`)},
		"Error/Data":          {`{"jsonrpc":"2.0","id":1,"method":"busy"}`, response("1", `"error":{"code":-32010,"message":"busy","data":{"retryable":true}}`)},
		"Error/Mapped":        {`{"jsonrpc":"2.0","id":1,"method":"mapped"}`, failure("1", -32009, "idempotency_conflict")},
		"Error/DataOfNoUse":   {`{"jsonrpc":"2.0","id":1,"method":"unusableData"}`, failure("1", -32010, "busy")},
		"Error/StatusInBatch": {`[{"jsonrpc":"2.0","id":1,"method":"limited"}]`, `[` + failure("1", -32000, "Rate limit exceeded") + `]`},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := setup(t).post(test.body)
			require.Equal(t, test.want, w.Body.String())
			if test.want == "" {
				require.Equal(t, http.StatusNoContent, w.Code)
				require.Empty(t, w.Header())
				return
			}
			require.Equal(t, http.StatusOK, w.Code)
			require.Equal(t, "application/json", w.Header().Get("Content-Type"))
		})
	}
}

func batch(n int) string {
	return `[` + strings.TrimSuffix(strings.Repeat(`{"jsonrpc":"2.0","id":1,"method":"echo"},`, n), ",") + `]`
}

func TestNothingRuns(t *testing.T) {
	t.Parallel()
	for name, body := range map[string]string{
		"SyntaxErrorLaterInBatch":  `[{"jsonrpc":"2.0","id":1,"method":"record"},{]`,
		"SyntaxErrorAfterRequest":  `{"jsonrpc":"2.0","id":1,"method":"record"},`,
		"BatchTooLarge":            `[` + strings.Repeat(`{"jsonrpc":"2.0","id":1,"method":"record"},`, 51) + `1]`,
		"InvalidUTF8LaterInBatch":  "[{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"record\"},\"\xff\"]",
		"BadID":                    `{"jsonrpc":"2.0","id":{},"method":"record"}`,
		"BadVersionOfNotification": `{"jsonrpc":"2","method":"record"}`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			require.Contains(t, f.post(body).Body.String(), `"error":`)
			require.Empty(t, f.calls)
		})
	}
}

func TestBodySize(t *testing.T) {
	t.Parallel()
	request := `{"jsonrpc":"2.0","id":1,"method":"nil","params":{"a":"%s"}}`
	room := 1000 - len(request) + 2
	require1000 := func(t *testing.T, body string) {
		require.Len(t, body, 1000)
	}
	t.Run("RC-10/AtTheLimit", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.MaxBody = 1000
		body := fmt.Sprintf(request, strings.Repeat("a", room))
		require1000(t, body)
		require.Equal(t, http.StatusOK, f.post(body).Code)
	})
	t.Run("RC-10/DefaultIs24MiB", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		body := fmt.Sprintf(request, strings.Repeat("a", 24<<20-len(request)+2))
		require.Equal(t, http.StatusOK, f.post(body).Code)
		require.Equal(t, http.StatusRequestEntityTooLarge, f.post(body+" ").Code)
	})
	for name, length := range map[string]int64{"Declared": 1 << 40, "Chunked": -1} {
		t.Run("RC-10/TooLarge"+name+"IsNotReadToTheEnd", func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			f.MaxBody = 1000
			body := &endless{}
			r := httptest.NewRequest(http.MethodPost, "/rpc", body)
			r.ContentLength = length
			w := httptest.NewRecorder()
			f.ServeHTTP(w, r)
			require.Equal(t, http.StatusRequestEntityTooLarge, w.Code)
			require.Equal(t, "close", w.Header().Get("Connection"))
			require.Equal(t, failure("null", -32600, "Request body over 1000 bytes"), w.Body.String())
			require.LessOrEqual(t, body.read, 16<<10)
		})
	}
	t.Run("BodyEndsEarly", func(t *testing.T) {
		t.Parallel()
		r := httptest.NewRequest(http.MethodPost, "/rpc", io.MultiReader(strings.NewReader(`{"jsonrpc"`), &broken{}))
		w := httptest.NewRecorder()
		setup(t).ServeHTTP(w, r)
		require.Equal(t, failure("null", -32700, "Request body ended early"), w.Body.String())
	})
}

type endless struct{ read int }

func (r *endless) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = ' '
	}
	r.read += len(p)
	return len(p), nil
}

type broken struct{}

func (*broken) Read([]byte) (int, error) { return 0, io.ErrUnexpectedEOF }

func TestStatus(t *testing.T) {
	t.Parallel()
	request := func(method string) string { return `{"jsonrpc":"2.0","id":1,"method":"` + method + `"}` }
	t.Run("RC-19/ErrorsAre200", func(t *testing.T) {
		t.Parallel()
		for _, body := range []string{`{`, `[]`, `{}`, request("nope"), request("fail"), request("busy"), request("panic")} {
			w := setup(t).post(body)
			require.Equal(t, http.StatusOK, w.Code, body)
			require.Contains(t, w.Body.String(), `"error":`)
		}
	})
	t.Run("RC-19/503", func(t *testing.T) {
		t.Parallel()
		w := setup(t).post(request("draining"))
		require.Equal(t, http.StatusServiceUnavailable, w.Code)
		require.Equal(t, "2", w.Header().Get("Retry-After"))
		require.Equal(t, failure("1", -32014, "draining"), w.Body.String())
	})
	t.Run("RC-19/429", func(t *testing.T) {
		t.Parallel()
		w := setup(t).post(request("limited"))
		require.Equal(t, http.StatusTooManyRequests, w.Code)
		require.Equal(t, "1", w.Header().Get("Retry-After"))
		require.Equal(t, failure("1", -32000, "Rate limit exceeded"), w.Body.String())
	})
	t.Run("RC-19/401BeforeParsing", func(t *testing.T) {
		t.Parallel()
		w := httptest.NewRecorder()
		WriteError(w, NotAuthorized())
		require.Equal(t, http.StatusUnauthorized, w.Code)
		require.Equal(t, "Bearer", w.Header().Get("WWW-Authenticate"))
		require.Equal(t, failure("null", -32001, "Unauthorized"), w.Body.String())
	})
	t.Run("OtherVerbs", func(t *testing.T) {
		t.Parallel()
		w := httptest.NewRecorder()
		setup(t).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/rpc", nil))
		require.Equal(t, http.StatusMethodNotAllowed, w.Code)
		require.Equal(t, "POST", w.Header().Get("Allow"))
	})
	t.Run("LongAnswerHasItsLength", func(t *testing.T) {
		t.Parallel()
		w := setup(t).post(`{"jsonrpc":"2.0","id":1,"method":"echo","params":{"a":"` + strings.Repeat("a", 5000) + `"}}`)
		require.Equal(t, fmt.Sprint(w.Body.Len()), w.Header().Get("Content-Length"))
	})
}

func TestInternalErrors(t *testing.T) {
	t.Parallel()
	for _, method := range []string{"fail", "panic", "waitPanic", "unusable", "marshalPanic"} {
		t.Run(method, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			w := f.post(`{"jsonrpc":"2.0","id":"a","method":"` + method + `"}`)

			var response struct {
				ID    string
				Error struct {
					Code    int
					Message string
					Data    struct{ ErrorID string }
				}
			}
			require.NoError(t, json.Unmarshal(w.Body.Bytes(), &response), w.Body.String())
			require.Equal(t, "a", response.ID)
			require.Equal(t, InternalError, response.Error.Code)
			require.Equal(t, "internal error", response.Error.Message)
			require.NotContains(t, w.Body.String(), "secret")

			var line struct {
				Level, Method, ErrorID, Error, Stack string
			}
			require.NoError(t, json.Unmarshal(f.log.Bytes(), &line), "one line")
			require.Equal(t, "ERROR", line.Level)
			require.Equal(t, method, line.Method)
			require.NotEmpty(t, line.ErrorID)
			require.Equal(t, line.ErrorID, response.Error.Data.ErrorID)
			require.Equal(t, strings.Contains(strings.ToLower(method), "panic"), line.Stack != "")

			require.Equal(t, http.StatusOK, f.post(`{"jsonrpc":"2.0","id":1,"method":"echo"}`).Code, "the server survives")
		})
	}
	t.Run("ClientThatLeftIsNoError", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.Dispatcher = methods{"gone": func(ctx context.Context, _ *Call) (any, Wait, error) { return nil, nil, ctx.Err() }}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		x := f.Accept(ctx, []byte(`{"jsonrpc":"2.0","id":1,"method":"gone"}`), "")
		defer x.Close()
		x.Answer(ctx)
		require.Empty(t, f.log.String())
	})
	t.Run("WithoutMapErrorAndLog", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.MapError = nil
		require.Contains(t, f.post(`{"jsonrpc":"2.0","id":1,"method":"mapped"}`).Body.String(), `"errorId"`)
	})
}

func TestIdempotencyKey(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.post(`{"jsonrpc":"2.0","id":1,"method":"record"}`, "Idempotency-Key", "k")
	f.post(`{"jsonrpc":"2.0","method":"record"}`, "Idempotency-Key", "k")
	f.post(`[{"jsonrpc":"2.0","id":1,"method":"record"}]`, "Idempotency-Key", "k")
	require.Equal(t, []Call{
		{Method: "record", Params: json.RawMessage("{}"), IdempotencyKey: "k"},
		{Method: "record", Params: json.RawMessage("{}"), IdempotencyKey: "k", Notification: true},
		{Method: "record", Params: json.RawMessage("{}")},
	}, f.calls)
}

// waiting is a method that notes when it is accepted and then waits.
type waiting struct {
	accepted []string
	waits    int // Waits that ended, of whatever reason
	mu       sync.Mutex
	d        time.Duration
}

func (m *waiting) Lookup(context.Context, string) (Handler, error) {
	return handlerFunc(func(_ context.Context, call *Call) (any, Wait, error) {
		name := string(call.Params)
		m.accepted = append(m.accepted, name) // no lock: calls are accepted one by one
		return nil, func(ctx context.Context) (any, error) {
			defer func() {
				m.mu.Lock()
				defer m.mu.Unlock()
				m.waits++
			}()
			select {
			case <-time.After(m.d):
				return name, nil
			case <-ctx.Done():
				return nil, context.Cause(ctx)
			}
		}, nil
	}), nil
}

func TestWaits(t *testing.T) {
	t.Parallel()
	t.Run("RC-17a/AcceptedInOrderAndWaitedForTogether", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			m := &waiting{d: time.Minute}
			var body strings.Builder
			var accepted []string
			var want []string
			for i := range 50 {
				params := fmt.Sprintf(`{"n":%d}`, i)
				accepted = append(accepted, params)
				want = append(want, response(fmt.Sprint(i), fmt.Sprintf(`"result":%q`, params)))
				fmt.Fprintf(&body, `,{"jsonrpc":"2.0","id":%d,"method":"x","params":%s}`, i, params)
			}
			s := &Server{Dispatcher: m}
			start := time.Now()
			x := s.Accept(t.Context(), []byte("["+body.String()[1:]+"]"), "")
			defer x.Close()
			require.Equal(t, accepted, m.accepted)
			require.True(t, x.Waits())
			require.Zero(t, time.Since(start))
			require.Equal(t, "["+strings.Join(want, ",")+"]", string(x.Answer(t.Context())))
			require.Equal(t, time.Minute, time.Since(start))
		})
	})
	t.Run("NotificationIsNotWaitedFor", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			m := &waiting{d: time.Minute}
			s := &Server{Dispatcher: m}
			start := time.Now()
			x := s.Accept(t.Context(), []byte(`{"jsonrpc":"2.0","method":"x"}`), "")
			defer x.Close()
			require.False(t, x.Waits())
			require.Empty(t, x.Answer(t.Context()))
			require.Zero(t, time.Since(start))
			require.Equal(t, 1, m.waits, "it could let go")
		})
	})
	t.Run("EndsWithItsContext", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			m := &waiting{d: time.Hour}
			s := &Server{Dispatcher: m, Log: slog.New(slog.DiscardHandler)}
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			x := s.Accept(ctx, []byte(`[{"jsonrpc":"2.0","id":1,"method":"x"},{"jsonrpc":"2.0","id":2,"method":"x"}]`), "")
			defer x.Close()
			require.Equal(t, 2, strings.Count(string(x.Answer(ctx)), `"code":-32603`))
			require.Equal(t, 2, m.waits)
		})
	})
	t.Run("CloseLetsGoOfWhatNobodyWaitsFor", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			m := &waiting{d: time.Hour}
			s := &Server{Dispatcher: m, Log: slog.New(slog.DiscardHandler)}
			s.Accept(t.Context(), []byte(`{"jsonrpc":"2.0","id":1,"method":"x"}`), "").Close()
			require.Equal(t, 1, m.waits)
		})
	})
}

// TestPooledMemory runs messages of all kinds at the same time and checks that
// none sees memory of another.
func TestPooledMemory(t *testing.T) {
	t.Parallel()
	f := setup(t)
	var group sync.WaitGroup
	for g := range 8 {
		group.Go(func() {
			for i := range 300 {
				params := fmt.Sprintf(`{"g":%d,"s":"%s"}`, g, strings.Repeat(string(rune('a'+g)), i*7%5000))
				want := response("1", `"result":`+params)
				body := fmt.Sprintf(`{"jsonrpc":"2.0","id":1,"method":"echo","params":%s}`, params)
				switch i % 4 {
				case 1:
					body, want = "["+body+","+body+"]", "["+want+","+want+"]"
				case 2:
					f.post("[" + body + ",")
				case 3:
					f.post(`{"jsonrpc":"2.0","method":"echo"}`)
				}
				if got := f.post(body).Body.String(); got != want {
					t.Errorf("got %s, want %s", got, want)
				}
			}
		})
	}
	group.Wait()
}

func TestError(t *testing.T) {
	t.Parallel()
	cause := errors.New("cause")
	e := Internal(cause)
	require.ErrorIs(t, e, cause)
	require.EqualError(t, e, "internal error (-32603)")
	require.Len(t, e.ErrorID(), 16)
	require.Empty(t, NotAuthorized().ErrorID())

	var r Response
	require.NoError(t, json.Unmarshal([]byte(failure(`"a"`, -32010, "busy")), &r))
	require.Equal(t, Response{JSONRPC: "2.0", ID: json.RawMessage(`"a"`), Error: &Error{Code: SessionBusy, Message: "busy"}}, r)
}
