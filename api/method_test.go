package api

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/google/uuid"
	"github.com/invopop/jsonschema"
	"github.com/stretchr/testify/require"

	"github.com/weir-run/weir/api/rpc"
)

// testRequestParams are params as agent.request has them.
type testRequestParams struct {
	SessionID      SessionID   `json:"sessionId" jsonschema:"required" jsonschema_description:"The client's name for the session."`
	UserID         string      `json:"userId" jsonschema:"minLength=1"`
	Content        testContent `json:"content" jsonschema:"required"`
	IdempotencyKey string      `json:"idempotencyKey"`
}

type testContent struct {
	Text   string      `json:"text" jsonschema:"required" jsonschema_extras:"x-max-bytes=262144"`
	Images []testImage `json:"images" jsonschema:"maxItems=8"`
}

func (c *testContent) Validate() error {
	if strings.TrimFunc(c.Text, unicode.IsSpace) == "" && len(c.Images) == 0 {
		return &InvalidError{Field: "text", Reason: "required", Message: "must not be empty without images"}
	}
	return nil
}

type testImage struct {
	Type string `json:"type" jsonschema:"required,enum=url,enum=base64"`
	MIME string `json:"mime" jsonschema:"enum=image/png,enum=image/jpeg"`
}

type testAccepted struct {
	Phase     string    `json:"phase"`
	SessionID SessionID `json:"sessionId"`
	Position  int       `json:"position,omitempty"`
}

type testStatusParams struct {
	SessionID SessionID `json:"sessionId" jsonschema:"required"`
}

type methodFixture struct {
	*Registry
	server *rpc.Server
	log    *bytes.Buffer
}

// setupMethods makes a registry of methods that resemble those of the contract.
func setupMethods(t testing.TB, more ...Method) *methodFixture {
	t.Helper()
	f := &methodFixture{log: new(bytes.Buffer)}
	request := func(_ context.Context, p *testRequestParams) (*testAccepted, error) {
		return &testAccepted{Phase: "thinking", SessionID: p.SessionID}, nil
	}
	route := func(ctx context.Context, _ *struct{}) (*bool, error) {
		on := onAdminRoute(ctx)
		return &on, nil
	}
	fail := func(err error) func(context.Context, *struct{}) (*struct{}, error) {
		return func(context.Context, *struct{}) (*struct{}, error) { return nil, err }
	}
	f.Registry = NewRegistry(append([]Method{
		Define("agent.request", ScopeRPC, "Accepts a message.", request),
		Define("agent.status", ScopeRPC, "Says how a session is.", func(_ context.Context, p *testStatusParams) (*testStatusParams, error) { return p, nil }, ReadOnly),
		Define("admin.only", ScopeAdmin, "", func(context.Context, *testStatusParams) (*struct{}, error) { return &struct{}{}, nil }),
		Define("admin.read", ScopeAdmin, "", func(context.Context, *struct{}) (*struct{}, error) { return &struct{}{}, nil }, ReadOnly),
		Define("both.write", ScopeRPC|ScopeAdmin, "", route),
		Define("both.read", ScopeRPC|ScopeAdmin, "", route, ReadOnly),
		Define("socket.only", 0, "", func(context.Context, *struct{}) (*struct{}, error) { return &struct{}{}, nil }),
		Define("fail.notFound", ScopeRPC, "", fail(fmt.Errorf("load: %w", &NotFoundError{"run", "run_1"}))),
		Define("fail.internal", ScopeRPC, "", fail(errors.New("secret"))),
		Define("fail.wire", ScopeRPC, "", fail(&rpc.Error{Code: rpc.SessionBusy, Message: "session_busy"})),
		DefineWait("wait.ok", ScopeRPC, "", func(_ context.Context, p *testStatusParams) (func(context.Context) (*testStatusParams, error), error) {
			return func(context.Context) (*testStatusParams, error) { return p, nil }, nil
		}),
		DefineWait("wait.fail", ScopeRPC, "", func(context.Context, *struct{}) (func(context.Context) (*struct{}, error), error) {
			return func(context.Context) (*struct{}, error) { return nil, &NotFoundError{"run", "run_2"} }, nil
		}),
		DefineWait("wait.refuse", ScopeRPC, "", func(context.Context, *struct{}) (func(context.Context) (*struct{}, error), error) {
			return nil, &NotFoundError{"run", "run_3"}
		}),
		DefineWait("wait.nil", ScopeRPC, "", func(context.Context, *struct{}) (func(context.Context) (*struct{}, error), error) {
			return nil, nil
		}),
	}, more...)...)
	f.server = &rpc.Server{Dispatcher: f.Registry, MapError: wireError, Log: slog.New(slog.NewJSONHandler(f.log, nil))}
	return f
}

// post calls with the scopes of a token and returns the status and the body.
func (f *methodFixture) post(scopes Scopes, body string, header ...string) (int, string) {
	r := httptest.NewRequest(http.MethodPost, "/rpc", strings.NewReader(body))
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	w := httptest.NewRecorder()
	f.server.ServeHTTP(w, r.WithContext(withCaller(r.Context(), &Caller{TenantID: "t", TokenID: "k", Scopes: scopes})))
	return w.Code, w.Body.String()
}

// call calls a method and returns the result or the error member.
func (f *methodFixture) call(t *testing.T, scopes Scopes, method, params string, header ...string) string {
	t.Helper()
	_, body := f.post(scopes, fmt.Sprintf(`{"jsonrpc":"2.0","id":1,"method":%q,"params":%s}`, method, params), header...)
	var response struct{ Result, Error json.RawMessage }
	require.NoError(t, json.Unmarshal([]byte(body), &response), body)
	if response.Error != nil {
		return string(response.Error)
	}
	return string(response.Result)
}

func wireInvalid(field, reason, message string) string {
	return fmt.Sprintf(`{"code":-32602,"message":%q,"data":{"field":%q,"reason":%q}}`, message, field, reason)
}

// TestMethodParams has a row for each statement of the contract about params that
// holds before a database is asked.
func TestMethodParams(t *testing.T) {
	t.Parallel()
	const (
		thinking  = `{"phase":"thinking","sessionId":"s"}`
		badID     = "sessionId must be 1 to 256 bytes without control characters"
		emptyText = "content.text must not be empty without images"
	)
	tests := map[string]struct{ method, params, want string }{
		"RC-2/Known":                    {"agent.request", `{"sessionId":"s","content":{"text":"x"}}`, thinking},
		"RC-4/Missing":                  {"agent.request", `{"content":{"text":"x"}}`, wireInvalid("sessionId", "required", "sessionId is required")},
		"RC-4/MissingStatus":            {"agent.status", `{}`, wireInvalid("sessionId", "required", "sessionId is required")},
		"RC-4/Null":                     {"agent.status", `{"sessionId":null}`, wireInvalid("sessionId", "required", "sessionId is required")},
		"RC-5/Number":                   {"agent.status", `{"sessionId":7}`, wireInvalid("sessionId", "invalid", "sessionId must be a string")},
		"RC-5/Empty":                    {"agent.status", `{"sessionId":""}`, wireInvalid("sessionId", "invalid", badID)},
		"RC-5/256":                      {"agent.status", `{"sessionId":"` + strings.Repeat("é", 128) + `"}`, `{"sessionId":"` + strings.Repeat("é", 128) + `"}`},
		"RC-5/257":                      {"agent.status", `{"sessionId":"` + strings.Repeat("a", 257) + `"}`, wireInvalid("sessionId", "invalid", badID)},
		"RC-5/Newline":                  {"agent.status", `{"sessionId":"a\nb"}`, wireInvalid("sessionId", "invalid", badID)},
		"RC-5/C1":                       {"agent.status", `{"sessionId":"a\u0085"}`, wireInvalid("sessionId", "invalid", badID)},
		"RC-9/NoContent":                {"agent.request", `{"sessionId":"s"}`, wireInvalid("content", "required", "content is required")},
		"RC-9/ContentText":              {"agent.request", `{"sessionId":"s","content":"x"}`, wireInvalid("content", "invalid", "content must be an object")},
		"RC-9/NoText":                   {"agent.request", `{"sessionId":"s","content":{}}`, wireInvalid("content.text", "required", "content.text is required")},
		"RC-9/TextNumber":               {"agent.request", `{"sessionId":"s","content":{"text":1}}`, wireInvalid("content.text", "invalid", "content.text must be a string")},
		"RC-9/EmptyText":                {"agent.request", `{"sessionId":"s","content":{"text":""}}`, wireInvalid("content.text", "required", emptyText)},
		"RC-9/WhiteText":                {"agent.request", `{"sessionId":"s","content":{"text":" \n\u2003"}}`, wireInvalid("content.text", "required", emptyText)},
		"RC-9/EmptyTextWithImage":       {"agent.request", `{"sessionId":"s","content":{"text":"","images":[{"type":"url"}]}}`, thinking},
		"RC-10/256KiB":                  {"agent.request", `{"sessionId":"s","content":{"text":"` + strings.Repeat("é", 131072) + `"}}`, thinking},
		"RC-10/256KiBEscaped":           {"agent.request", `{"sessionId":"s","content":{"text":"` + strings.Repeat(`\u0041`, 262144) + `"}}`, thinking},
		"RC-10/Over256KiB":              {"agent.request", `{"sessionId":"s","content":{"text":"` + strings.Repeat("a", 262145) + `"}}`, wireInvalid("content.text", "too_large", "content.text must be at most 262144 bytes")},
		"RC-11/ContentIgnored":          {"agent.status", `{"sessionId":"s","content":7}`, `{"sessionId":"s"}`},
		"RC-16/UnknownIgnored":          {"agent.request", `{"sessionId":"s","content":{"text":"x","y":1},"z":[{}]}`, thinking},
		"RC-16/OtherCaseIsUnknown":      {"agent.status", `{"sessionId":"s","SESSIONID":"t","sessionid":1}`, `{"sessionId":"s"}`},
		"RC-18/NulReplaced":             {"agent.status", `{"sessionId":"a\u0000b"}`, `{"sessionId":"a�b"}`},
		"RC-18/SurrogateReplaced":       {"agent.status", `{"sessionId":"\ud800"}`, `{"sessionId":"�"}`},
		"RC-138/ImageIndex":             {"agent.request", `{"sessionId":"s","content":{"text":"x","images":[{"type":"url"},{"type":"file"}]}}`, wireInvalid("content.images[1].type", "invalid", "content.images[1].type must be one of url, base64")},
		"RC-138/NineImages":             {"agent.request", `{"sessionId":"s","content":{"text":"x","images":[` + strings.Repeat(`{"type":"url"},`, 8) + `{"type":"url"}]}}`, wireInvalid("content.images", "invalid", "content.images must have at most 8 items")},
		"Twice":                         {"agent.status", `{"sessionId":"s","session\u0049d":"t"}`, wireInvalid("sessionId", "duplicate", "sessionId is there twice")},
		"TwiceNull":                     {"agent.status", `{"sessionId":null,"sessionId":"t"}`, wireInvalid("sessionId", "duplicate", "sessionId is there twice")},
		"InternalMembersAreNotRequired": {"agent.status", `{"_sessionId":"s"}`, wireInvalid("sessionId", "required", "sessionId is required")},
		"ParamsArray":                   {"agent.status", `[]`, wireInvalid("params", "invalid", "params must be an object")},
		"Wait":                          {"wait.ok", `{"sessionId":"s"}`, `{"sessionId":"s"}`},
		"WaitParams":                    {"wait.ok", `{}`, wireInvalid("sessionId", "required", "sessionId is required")},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			require.JSONEq(t, test.want, setupMethods(t).call(t, ScopeRPC, test.method, test.params))
		})
	}
	t.Run("RC-15/WithoutID", func(t *testing.T) {
		t.Parallel()
		status, body := setupMethods(t).post(ScopeRPC, `{"jsonrpc":"2.0","method":"agent.request","params":{"sessionId":"s","content":{"text":"x"}}}`)
		require.Equal(t, http.StatusNoContent, status)
		require.Empty(t, body)
	})
}

func TestMethodErrors(t *testing.T) {
	t.Parallel()
	notFound := func(id string) string {
		return `{"code":-32602,"message":"run not found: ` + id + `","data":{"kind":"run","reason":"not_found"}}`
	}
	tests := map[string]struct{ method, want string }{
		"NotFound":   {"fail.notFound", notFound("run_1")},
		"OfWait":     {"wait.fail", notFound("run_2")},
		"BeforeWait": {"wait.refuse", notFound("run_3")},
		"WireError":  {"fail.wire", `{"code":-32010,"message":"session_busy"}`},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setupMethods(t)
			require.JSONEq(t, test.want, f.call(t, ScopeRPC, test.method, `{}`))
			require.Empty(t, f.log.String())
		})
	}
	for _, method := range []string{"fail.internal", "wait.nil"} {
		t.Run("Internal/"+method, func(t *testing.T) {
			t.Parallel()
			f := setupMethods(t)
			var e struct {
				Code    int
				Message string
				Data    struct{ ErrorID string }
			}
			require.NoError(t, json.Unmarshal([]byte(f.call(t, ScopeRPC, method, `{}`)), &e))
			require.Equal(t, rpc.InternalError, e.Code)
			require.Equal(t, "internal error", e.Message)
			require.Contains(t, f.log.String(), e.Data.ErrorID)
			require.Equal(t, 1, strings.Count(f.log.String(), "\n"), "logged once")
		})
	}
	t.Run("Message", func(t *testing.T) {
		t.Parallel()
		require.EqualError(t, &InvalidError{Field: "name", Reason: "immutable"}, "name: immutable")
		require.EqualError(t, &InvalidError{Reason: "invalid", Message: "must be an object"}, "params must be an object")
	})
	t.Run("WithinOtherErrors", func(t *testing.T) {
		t.Parallel()
		cause := errors.New("cause")
		require.ErrorIs(t, within("a", cause), cause)
	})
}

func TestMethodScopes(t *testing.T) {
	t.Parallel()
	const unknown = `{"code":-32601,"message":"Method not found"}`
	requires := func(scope string) string {
		return `{"code":-32603,"message":"Insufficient scope: requires '` + scope + `'"}`
	}
	status := `{"sessionId":"s"}`
	tests := map[string]struct {
		scopes         Scopes
		method, params string
		want           string
	}{
		"RPC":                         {ScopeRPC, "agent.status", status, status},
		"All":                         {ScopeAll, "agent.status", status, status},
		"AllOnAdmin":                  {ScopeAll, "admin.only", status, `{}`},
		"Admin":                       {ScopeAdmin, "admin.only", status, `{}`},
		"AdminIsNotRPC":               {ScopeAdmin, "agent.status", status, requires("rpc")},
		"RPCIsNotAdmin":               {ScopeRPC, "admin.only", status, requires("admin")},
		"Both":                        {ScopeRPC | ScopeAdmin, "admin.only", status, `{}`},
		"Nobody":                      {0, "agent.status", status, requires("rpc")},
		"FirstScopeOfTwo":             {0, "both.write", `{}`, requires("rpc")},
		"ScopeBeforeParams":           {ScopeRPC, "admin.only", `{}`, requires("admin")},
		"ScopeBeforeParamsKind":       {ScopeRPC, "admin.only", `[]`, requires("admin")},
		"UnknownBeforeScope":          {0, "nope", `[]`, unknown},
		"NotForTokens":                {ScopeAll, "socket.only", `{}`, unknown},
		"NotRegistered":               {ScopeAll, "context.inspect", `{}`, unknown},
		"ReadOnAdmin":                 {ScopeRead, "admin.read", `{}`, `{}`},
		"ReadDoesNotWrite":            {ScopeRead, "admin.only", status, requires("admin")},
		"ReadIsNotRPC":                {ScopeRead, "agent.status", status, requires("rpc")},
		"ReadOnBothWrites":            {ScopeRead, "both.write", `{}`, requires("rpc")},
		"RouteOfRPC":                  {ScopeRPC, "both.write", `{}`, `false`},
		"RouteOfAdmin":                {ScopeAdmin, "both.write", `{}`, `true`},
		"RouteOfRPCAndAdmin":          {ScopeRPC | ScopeAdmin, "both.write", `{}`, `true`},
		"RouteOfAll":                  {ScopeAll, "both.write", `{}`, `true`},
		"RouteOfRead":                 {ScopeRead, "both.read", `{}`, `true`},
		"RouteOfRPCAndRead":           {ScopeRPC | ScopeRead, "both.read", `{}`, `false`},
		"RouteOfRPCAndReadForWriting": {ScopeRPC | ScopeRead, "both.write", `{}`, `false`},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			require.JSONEq(t, test.want, setupMethods(t).call(t, test.scopes, test.method, test.params))
		})
	}
	t.Run("Names", func(t *testing.T) {
		t.Parallel()
		s, err := ParseScopes([]string{"*", "rpc", "read", "admin"})
		require.NoError(t, err)
		require.Equal(t, []string{"rpc", "admin", "read", "*"}, s.Names())
		_, err = ParseScopes([]string{"rpc", "root"})
		require.EqualError(t, err, "scopes[1] must be one of rpc, admin, read, *")
	})
	t.Run("CallerOfNoContext", func(t *testing.T) {
		t.Parallel()
		require.Equal(t, &Caller{}, callerFrom(t.Context()))
		c := &Caller{TenantID: "t"}
		require.Same(t, c, callerFrom(withCaller(t.Context(), c)))
	})
}

func TestMethodIdempotencyKey(t *testing.T) {
	t.Parallel()
	type keyed struct {
		IdempotencyKey string `json:"idempotencyKey"`
	}
	own := Define("own", ScopeRPC, "", func(_ context.Context, p *keyed) (*keyed, error) { return p, nil })
	none := Define("none", ScopeRPC, "", func(context.Context, *struct{}) (*string, error) { return new("ran"), nil })
	strict := Define("strict", ScopeRPC, "", func(context.Context, *struct{}) (*string, error) { return new("ran"), nil }, Strict)
	bad := func(message string) string {
		return wireInvalid("idempotencyKey", "invalid", "idempotencyKey "+message)
	}
	tests := map[string]struct{ method, params, header, want string }{
		"Member":               {"own", `{"idempotencyKey":"m"}`, "", `{"idempotencyKey":"m"}`},
		"Header":               {"own", `{}`, "h", `{"idempotencyKey":"h"}`},
		"NullMember":           {"own", `{"idempotencyKey":null}`, "h", `{"idempotencyKey":"h"}`},
		"MemberWins":           {"own", `{"idempotencyKey":"m"}`, "h", `{"idempotencyKey":"m"}`},
		"Neither":              {"own", `{}`, "", `{"idempotencyKey":""}`},
		"128":                  {"own", `{}`, strings.Repeat("k", 128), `{"idempotencyKey":"` + strings.Repeat("k", 128) + `"}`},
		"129":                  {"own", `{}`, strings.Repeat("k", 129), bad("must be at most 128 bytes")},
		"EmptyMember":          {"own", `{"idempotencyKey":""}`, "", bad("must not be empty")},
		"Control":              {"own", `{"idempotencyKey":"\n"}`, "", bad("must be text without control characters")},
		"RepeatedMember":       {"none", `{"idempotencyKey":"m","x":1}`, "h", `"none m {\"idempotencyKey\":\"m\",\"x\":1}"`},
		"RepeatedHeader":       {"none", `{}`, "h", `"none h {}"`},
		"RepeatedWithoutKey":   {"none", `{}`, "", `"ran"`},
		"RepeatedNumber":       {"none", `{"idempotencyKey":1}`, "", bad("must be a string that is not empty")},
		"RepeatedEmpty":        {"none", `{"idempotencyKey":""}`, "", bad("must be a string that is not empty")},
		"RepeatedNull":         {"none", `{"idempotencyKey":null}`, "", `"ran"`},
		"DeeperMemberIsNoKey":  {"none", `{"a":{"idempotencyKey":"m"}}`, "", `"ran"`},
		"StrictHeader":         {"strict", `{}`, "h", `"strict h {}"`},
		"StrictMember":         {"strict", `{"idempotencyKey":"m"}`, "", wireInvalid("idempotencyKey", "unknown", "idempotencyKey is not known here")},
		"ReadOnlyNeedsNone":    {"agent.status", `{"sessionId":"s"}`, "h", `{"sessionId":"s"}`},
		"BadParamsNotRepeated": {"admin.only", `{}`, "h", wireInvalid("sessionId", "required", "sessionId is required")},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setupMethods(t, own, none, strict)
			f.OnRepeat(func(ctx context.Context, call *KeyedCall, run func(context.Context) (any, rpc.Wait, error)) (any, rpc.Wait, error) {
				result, wait, err := run(ctx)
				require.Equal(t, "ran", *result.(*string))
				require.Nil(t, wait)
				return fmt.Sprintf("%s %s %s", call.Method.Name, call.IdempotencyKey, call.Params), nil, err
			})
			require.JSONEq(t, test.want, f.call(t, ScopeAll, test.method, test.params, "Idempotency-Key", test.header))
		})
	}
	t.Run("WithoutOnRepeat", func(t *testing.T) {
		t.Parallel()
		require.Equal(t, `"ran"`, setupMethods(t, none).call(t, ScopeAll, "none", `{}`, "Idempotency-Key", "h"))
	})
}

// testEverything has a field of each kind.
type testEverything struct {
	testEmbedded
	String   string                     `json:"string" jsonschema:"minLength=2,maxLength=4"`
	Pattern  string                     `json:"pattern" jsonschema:"pattern=^[a-z]{1\\,3}$"`
	Default  string                     `json:"default" jsonschema:"default=x"`
	Bool     bool                       `json:"bool" jsonschema:"default=true"`
	Int      int                        `json:"int" jsonschema:"minimum=1,maximum=100,default=20"`
	Int8     int8                       `json:"int8"`
	Int64    int64                      `json:"int64"`
	Uint     uint16                     `json:"uint"`
	Float    float64                    `json:"float" jsonschema:"exclusiveMinimum=0,exclusiveMaximum=1"`
	Number   int                        `json:"number" jsonschema:"enum=1,enum=2"`
	Pointer  *int                       `json:"pointer" jsonschema:"minimum=0"`
	PointerD *string                    `json:"pointerD" jsonschema:"default=d"`
	List     []string                   `json:"list" jsonschema:"minItems=1,maxItems=3,enum=a,enum=b"`
	Lists    [][]int                    `json:"lists"`
	Map      map[string]int             `json:"map"`
	Object   *testInner                 `json:"object"`
	Objects  []testInner                `json:"objects"`
	Raw      json.RawMessage            `json:"raw"`
	Any      any                        `json:"any"`
	Bytes    []byte                     `json:"bytes"`
	Time     time.Time                  `json:"time"`
	UUID     uuid.UUID                  `json:"uuid"`
	Custom   testCelsius                `json:"custom"`
	Nullable *string                    `json:"nullable" jsonschema:"nullable"`
	Rest     map[string]json.RawMessage `json:"-" params:"rest"`
	Ignored  string                     `json:"-"`
	hidden   string                     //nolint:unused // a field that is not exported is no member
}

type testEmbedded struct {
	Embedded string `json:"embedded"`
}

type testInner struct {
	A string     `json:"a" jsonschema:"required"`
	B *testInner `json:"b"`
}

// testCelsius decodes itself.
type testCelsius float64

func (c *testCelsius) UnmarshalJSON(data []byte) error {
	var text string
	if err := json.Unmarshal(data, &text); err != nil {
		return err
	}
	if _, err := fmt.Sscanf(text, "%f C", (*float64)(c)); err != nil {
		return &InvalidError{Reason: "unit", Message: "must be in C"}
	}
	return nil
}

func (testCelsius) JSONSchema() *jsonschema.Schema { return &jsonschema.Schema{Type: "string"} }

func TestDecode(t *testing.T) {
	t.Parallel()
	plan := compile(reflect.TypeFor[testEverything](), false)
	defaults := func(change func(*testEverything)) *testEverything {
		e := &testEverything{Default: "x", Bool: true, Int: 20, PointerD: new("d")}
		change(e)
		return e
	}
	good := map[string]struct {
		text string
		want *testEverything
	}{
		"Empty":    {` { } `, defaults(func(*testEverything) {})},
		"Null":     {`{"string":null,"int":null,"pointer":null,"list":null,"object":null,"time":null,"uuid":null,"default":null}`, defaults(func(*testEverything) {})},
		"Embedded": {`{"embedded":"e"}`, defaults(func(e *testEverything) { e.Embedded = "e" })},
		"Strings": {`{"string":"éééé","pattern":"abc","default":"","embedded":"\"\\\/\b\f\n\r\t\u00e9\ud83d\ude00"}`, defaults(func(e *testEverything) {
			e.String, e.Pattern, e.Default, e.Embedded = "éééé", "abc", "", "\"\\/\b\f\n\r\té😀"
		})},
		"Bool": {`{"bool":false}`, defaults(func(e *testEverything) { e.Bool = false })},
		"Ints": {`{"int":100,"int8":-128,"int64":9223372036854775807,"uint":65535,"number":2}`, defaults(func(e *testEverything) {
			e.Int, e.Int8, e.Int64, e.Uint, e.Number = 100, -128, 9223372036854775807, 65535, 2
		})},
		"WholeNumbers": {`{"int":20.0,"int8":-1e1,"int64":9007199254740992.0,"uint":1.5e1}`, defaults(func(e *testEverything) {
			e.Int, e.Int8, e.Int64, e.Uint = 20, -10, 1<<53, 15
		})},
		"Float":    {`{"float":5e-1}`, defaults(func(e *testEverything) { e.Float = 0.5 })},
		"Pointers": {`{"pointer":0,"pointerD":"","nullable":"n"}`, defaults(func(e *testEverything) { e.Pointer, e.PointerD, e.Nullable = new(0), new(""), new("n") })},
		"Lists":    {`{"list":["a","b"],"lists":[[],[1,2],[3]]}`, defaults(func(e *testEverything) { e.List, e.Lists = []string{"a", "b"}, [][]int{{}, {1, 2}, {3}} })},
		"Map":      {`{"map":{"a":1,"\u0062":2}}`, defaults(func(e *testEverything) { e.Map = map[string]int{"a": 1, "b": 2} })},
		"Objects": {`{"object":{"a":"1","b":{"a":"2"}},"objects":[{"a":"3","x":0}]}`, defaults(func(e *testEverything) {
			e.Object, e.Objects = &testInner{"1", &testInner{A: "2"}}, []testInner{{A: "3"}}
		})},
		"Raw": {`{"raw": {"a" : [1]} ,"any":{"a":[1]}}`, defaults(func(e *testEverything) {
			e.Raw, e.Any = json.RawMessage(`{"a" : [1]}`), map[string]any{"a": []any{1.0}}
		})},
		"RawNull": {`{"raw":null,"any":null}`, defaults(func(e *testEverything) { e.Raw = json.RawMessage("null") })},
		"Bytes":   {`{"bytes":"aGk="}`, defaults(func(e *testEverything) { e.Bytes = []byte("hi") })},
		"Custom": {`{"time":"2026-01-02T03:04:05.006Z","uuid":"0199c0de-0000-7000-8000-000000000001","custom":"21.5 C"}`, defaults(func(e *testEverything) {
			e.Time, e.UUID, e.Custom = time.Date(2026, 1, 2, 3, 4, 5, 6e6, time.UTC), uuid.MustParse("0199c0de-0000-7000-8000-000000000001"), 21.5
		})},
		"Rest": {`{"x":1,"Rest":[2],"Ignored":"3","hidden":null,"idempotencyKey":"k"}`, defaults(func(e *testEverything) {
			e.Rest = map[string]json.RawMessage{"x": json.RawMessage("1"), "Rest": json.RawMessage("[2]"), "Ignored": json.RawMessage(`"3"`), "hidden": json.RawMessage("null")}
		})},
	}
	for name, test := range good {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := new(testEverything)
			text := []byte(test.text)
			_, err := plan.decode(text, reflect.ValueOf(got).Elem(), "")
			require.NoError(t, err)
			for i := range text {
				text[i] = '#' // nothing of the value is part of the text
			}
			require.Equal(t, test.want, got)
		})
	}
	bad := map[string]struct{ text, field, reason, message string }{
		"NotAnObject":    {`[]`, "", "invalid", "must be an object"},
		"NotJSON":        {`{"string":`, "", "invalid", "must be JSON"},
		"NotJSONInside":  {`{"objects":[{"a":tru}]}`, "", "invalid", "must be JSON"},
		"Trailing":       {`{} {}`, "", "invalid", "must be JSON"},
		"TooDeep":        {`{"raw":` + strings.Repeat("[", 200), "", "invalid", "must be JSON"},
		"TooShort":       {`{"string":"é"}`, "string", "invalid", "must be at least 2 characters"},
		"TooLong":        {`{"string":"ééééé"}`, "string", "invalid", "must be at most 4 characters"},
		"Pattern":        {`{"pattern":"abcd"}`, "pattern", "invalid", "must match ^[a-z]{1,3}$"},
		"BoolNumber":     {`{"bool":1}`, "bool", "invalid", "must be true or false"},
		"IntString":      {`{"int":"1"}`, "int", "invalid", "must be an integer"},
		"IntFraction":    {`{"int":1.5}`, "int", "invalid", "must be an integer"},
		"IntHuge":        {`{"int64":9223372036854775808}`, "int64", "invalid", "must be an integer"},
		"IntHugeFloat":   {`{"int64":1e300}`, "int64", "invalid", "must be an integer"},
		"IntInfinite":    {`{"int64":1e999}`, "int64", "invalid", "must be an integer"},
		"Int8Over":       {`{"int8":128}`, "int8", "invalid", "must be an integer"},
		"Int8OverFloat":  {`{"int8":128.0}`, "int8", "invalid", "must be an integer"},
		"UintNegative":   {`{"uint":-1}`, "uint", "invalid", "must be an integer"},
		"UintNegativeF":  {`{"uint":-1.0}`, "uint", "invalid", "must be an integer"},
		"Minimum":        {`{"int":0}`, "int", "invalid", "must be at least 1"},
		"Maximum":        {`{"int":101}`, "int", "invalid", "must be at most 100"},
		"Above":          {`{"float":0}`, "float", "invalid", "must be above 0"},
		"Below":          {`{"float":1}`, "float", "invalid", "must be below 1"},
		"FloatInfinite":  {`{"float":1e999}`, "float", "invalid", "must be a number"},
		"FloatString":    {`{"float":"NaN"}`, "float", "invalid", "must be a number"},
		"NumberEnum":     {`{"number":3}`, "number", "invalid", "must be one of 1 2"},
		"PointerMinimum": {`{"pointer":-1}`, "pointer", "invalid", "must be at least 0"},
		"NoItems":        {`{"list":[]}`, "list", "invalid", "must have at least 1 items"},
		"ManyItems":      {`{"list":["a","a","a","a"]}`, "list", "invalid", "must have at most 3 items"},
		"ItemEnum":       {`{"list":["a","c"]}`, "list[1]", "invalid", "must be one of a, b"},
		"ItemNull":       {`{"list":[null]}`, "list[0]", "invalid", "must be a string"},
		"ItemOfItem":     {`{"lists":[[1],[2,"3"]]}`, "lists[1][1]", "invalid", "must be an integer"},
		"ListObject":     {`{"list":{}}`, "list", "invalid", "must be a list"},
		"MapList":        {`{"map":[]}`, "map", "invalid", "must be an object"},
		"MapValue":       {`{"map":{"a":"b"}}`, "map.a", "invalid", "must be an integer"},
		"MapTwice":       {`{"map":{"a":1,"\u0061":1}}`, "map.a", "duplicate", "is there twice"},
		"Required":       {`{"object":{"a":"1","b":{}}}`, "object.b.a", "required", "is required"},
		"RequiredItem":   {`{"objects":[{"a":""},{"a":null}]}`, "objects[1].a", "required", "is required"},
		"Base64":         {`{"bytes":"*"}`, "bytes", "invalid", "must be base64"},
		"BytesNumber":    {`{"bytes":1}`, "bytes", "invalid", "must be a string"},
		"Time":           {`{"time":"yesterday"}`, "time", "invalid", "must be a time as in 2026-01-31T12:00:00Z"},
		"UUID":           {`{"uuid":"x"}`, "uuid", "invalid", "is not valid"},
		"Custom":         {`{"custom":"70 F"}`, "custom", "unit", "must be in C"},
		"CustomNumber":   {`{"custom":70}`, "custom", "invalid", "is not valid"},
		"RestTwice":      {`{"x":1,"x":2}`, "x", "duplicate", "is there twice"},
	}
	for name, test := range bad {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := plan.decode([]byte(test.text), reflect.ValueOf(new(testEverything)).Elem(), "")
			require.Equal(t, &InvalidError{Field: test.field, Reason: test.reason, Message: test.message}, err)
		})
	}
	t.Run("StrictInside", func(t *testing.T) {
		t.Parallel()
		_, err := compile(reflect.TypeFor[testRequestParams](), true).decode([]byte(`{"sessionId":"s","content":{"text":"x","y":1}}`), reflect.ValueOf(new(testRequestParams)).Elem(), "")
		require.Equal(t, &InvalidError{Field: "content.y", Reason: "unknown", Message: "is not known here"}, err)
	})
}

// TestDefinePanics has types that would promise what is not enforced.
func TestDefinePanics(t *testing.T) {
	t.Parallel()
	type embeds struct{ *testInner }
	type twice struct {
		testEmbedded
		A string `json:"embedded"`
	}
	for name, test := range map[string]struct {
		t    reflect.Type
		want string
	}{
		"NoTag": {reflect.TypeFor[struct{ A string }](), "has no tag json"},
		"Underscore": {reflect.TypeFor[struct {
			A string `json:"_a"`
		}](), "would be stripped"},
		"Twice":  {reflect.TypeFor[twice](), "twice"},
		"Embeds": {reflect.TypeFor[embeds](), "embeds a *api.testInner"},
		"Typo": {reflect.TypeFor[struct {
			A string `json:"a" jsonschema:"requierd"`
		}](), `"requierd" means nothing`},
		"Misplaced": {reflect.TypeFor[struct {
			A string `json:"a" jsonschema:"minimum=1"`
		}](), "means nothing"},
		"OfObject": {reflect.TypeFor[struct {
			A testInner `json:"a" jsonschema:"minLength=1"`
		}](), "means nothing"},
		"OfCustom": {reflect.TypeFor[struct {
			A testCelsius `json:"a" jsonschema:"minLength=1"`
		}](), "means nothing"},
		"OfTime": {reflect.TypeFor[struct {
			A time.Time `json:"a" jsonschema:"minLength=1"`
		}](), "means nothing"},
		"Extra": {reflect.TypeFor[struct {
			A int `json:"a" jsonschema_extras:"x-max-bytes=1"`
		}](), "x-max-bytes"},
		"Pattern": {reflect.TypeFor[struct {
			A string `json:"a" jsonschema:"pattern=("`
		}](), "missing closing"},
		"Default": {reflect.TypeFor[struct {
			A int `json:"a" jsonschema:"minimum=1,default=0"`
		}](), "default"},
		"Unenforced": {reflect.TypeFor[struct {
			A int `json:"a" jsonschema:"oneof_required=x"`
		}](), "method Validate"},
		"Channel": {reflect.TypeFor[struct {
			A map[int]int `json:"a"`
		}](), "names of members"},
		"Rest": {reflect.TypeFor[struct {
			A map[string]any `json:"-" params:"rest"`
		}](), "the rest goes into"},
		"NoSchema": {reflect.TypeFor[struct {
			A testBare `json:"a"`
		}](), "needs a method JSONSchema"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			defer func() { require.Contains(t, fmt.Sprint(recover()), test.want) }()
			compile(test.t, false)
		})
	}
	t.Run("NameTwice", func(t *testing.T) {
		t.Parallel()
		m := Define("a", ScopeRPC, "", func(context.Context, *struct{}) (*struct{}, error) { return nil, nil })
		require.Panics(t, func() { NewRegistry(m, m) })
	})
}

type testBare struct{}

func (*testBare) UnmarshalJSON([]byte) error { return nil }

// FuzzDecode checks that what decodes is what encoding/json makes of it, and
// that what does not is an *InvalidError.
func FuzzDecode(f *testing.F) {
	type params struct {
		String string            `json:"string"`
		Int    int32             `json:"int"`
		Float  float64           `json:"float"`
		Bool   *bool             `json:"bool"`
		List   []string          `json:"list"`
		Map    map[string]uint8  `json:"map"`
		Object *testInner        `json:"object"`
		Raw    json.RawMessage   `json:"raw"`
		Maps   []map[string]bool `json:"maps"`
	}
	for _, seed := range []string{
		`{"string":"a\u0000\ud800","int":-1,"float":1e-9,"bool":true,"list":["",null],"map":{"a":1},"object":{"a":"","b":null},"raw":[ ],"maps":[{}]}`,
		`{"int":1e2}`, `{"string":1}`, `{"x":{"y":[]}}`, `{"map":{"a":256}}`, `{"List":[]}`, `{"object":{"a":"x","b":{"a":"y"}}}`, `{"raw":`,
	} {
		f.Add([]byte(seed))
	}
	plan := compile(reflect.TypeFor[params](), false)
	f.Fuzz(func(t *testing.T, text []byte) {
		got, want := new(params), new(params)
		if _, err := plan.decode(text, reflect.ValueOf(got).Elem(), ""); err != nil {
			_, ok := errors.AsType[*InvalidError](err)
			require.True(t, ok, "%v", err)
			return
		}
		require.True(t, json.Valid(text))
		var members map[string]json.RawMessage
		require.NoError(t, json.Unmarshal(text, &members))
		for name := range members {
			if i, ok := plan.object.byName[name]; !ok || plan.object.fields[i].name != name {
				delete(members, name) // encoding/json ignores the case of names
			}
		}
		exact, err := json.Marshal(members)
		require.NoError(t, err)
		decoder := json.NewDecoder(bytes.NewReader(exact))
		if err := decoder.Decode(want); err != nil {
			return // a number like 1e2 in an integer, or a name of another case further inside
		}
		if bytes.ContainsAny(text, "Kk\u017f\u212aAaBb") && got.Object != nil {
			got.Object, want.Object = nil, nil // its names too
		}
		if got.Raw != nil {
			require.JSONEq(t, string(want.Raw), string(got.Raw))
			got.Raw, want.Raw = nil, nil
		}
		if !bytes.Contains(text, []byte{0xff}) && json.Valid(text) && string(bytes.ToValidUTF8(text, nil)) == string(text) {
			require.Equal(t, want, got)
		}
	})
}

func BenchmarkMethodDecode(b *testing.B) {
	text := []byte(`{"sessionId":"session-0001","userId":"alice","content":{"text":"Summarize today's commits in two bullet points, please.\nThen send them to the team."}}`)
	b.Run("Plan", func(b *testing.B) {
		plan := compile(reflect.TypeFor[testRequestParams](), false)
		b.ReportAllocs()
		for b.Loop() {
			p := new(testRequestParams)
			if _, err := plan.decode(text, reflect.ValueOf(p).Elem(), "key"); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("EncodingJSON", func(b *testing.B) { // for comparison; it checks nothing
		b.ReportAllocs()
		for b.Loop() {
			p := new(testRequestParams)
			if err := json.Unmarshal(text, p); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// BenchmarkMethodCall measures a whole call: message, scope, params, a handler that
// does nothing, answer.
func BenchmarkMethodCall(b *testing.B) {
	f := setupMethods(b)
	ctx := withCaller(b.Context(), &Caller{TenantID: "t", Scopes: ScopeRPC})
	body := []byte(`{"jsonrpc":"2.0","id":12345,"method":"agent.request","params":{"sessionId":"session-0001","userId":"alice","content":{"text":"Summarize today's commits in two bullet points, please.\nThen send them to the team."}}}`)
	b.ReportAllocs()
	for b.Loop() {
		x := f.server.Accept(ctx, body, "key")
		if answer := x.Answer(ctx); !bytes.Contains(answer, []byte("thinking")) {
			b.Fatal(string(answer))
		}
		x.Close()
	}
}
