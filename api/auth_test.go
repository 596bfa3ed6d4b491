package api

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/weir-run/weir/api/rpc"
	"github.com/weir-run/weir/db"
)

const pingBody = `{"jsonrpc":"2.0","id":1,"method":"system.ping"}`

func TestCredentials(t *testing.T) {
	t.Parallel()
	f := setup(t)
	wrong := db.NewTokenSecret()
	for name, test := range map[string]struct {
		header []string
		want   int
	}{
		"Token":               {[]string{"Authorization", "Bearer " + f.rpc}, 200},
		"SchemeInOtherCase":   {[]string{"Authorization", "bearer " + f.rpc}, 200},
		"None":                {nil, 401},
		"Wrong":               {[]string{"Authorization", "Bearer " + wrong}, 401},
		"Malformed":           {[]string{"Authorization", "Bearer wt_x"}, 401},
		"Empty":               {[]string{"Authorization", "Bearer "}, 401},
		"Basic":               {[]string{"Authorization", "Basic " + f.rpc}, 401},
		"Twice":               {[]string{"Authorization", "Bearer " + f.rpc, "Authorization", "Bearer " + f.rpc}, 401},
		"AgentKey":            {[]string{"X-Agent-Api-Key", "x"}, 401},
		"OtherHeader":         {[]string{"X-Token", f.rpc}, 401},
		"HashIsNoToken":       {[]string{"Authorization", "Bearer wt_" + strings.Repeat("0", 43)}, 401},
		"SpacesAroundTheText": {[]string{"Authorization", "Bearer  " + f.rpc}, 200},
	} {
		t.Run(name, func(t *testing.T) {
			status, header, body := f.do("POST", "/rpc", "", pingBody, test.header...)
			require.Equal(t, test.want, status)
			if status == 401 {
				require.Equal(t, "Bearer", header.Get("WWW-Authenticate"))
				require.JSONEq(t, `{"jsonrpc":"2.0","id":null,"error":{"code":-32001,"message":"Unauthorized"}}`, body)
			}
		})
	}
	t.Run("NotInTheQuery", func(t *testing.T) {
		status, _, _ := f.do("POST", "/rpc?token="+f.rpc, "", pingBody)
		require.Equal(t, 401, status)
	})
	t.Run("InTheQueryOfAStream", func(t *testing.T) {
		r := httptest.NewRequest("GET", "/ws?token="+f.rpc, nil)
		caller, err := f.server.authenticate(r, true)
		require.NoError(t, err)
		require.Equal(t, "rpc", caller.TokenID)
		_, err = f.server.authenticate(httptest.NewRequest("GET", "/ws?token=", nil), true)
		require.ErrorIs(t, err, errUnauthorized)
	})
	t.Run("BeforeAnythingElse", func(t *testing.T) {
		status, _, _ := f.do("POST", "/rpc", "", "no json")
		require.Equal(t, 401, status)
		require.Equal(t, rpc.MethodNotFound, f.call(f.read, "context.inspect", `{}`).Error.Code)
	})
}

func TestTrustLoopback(t *testing.T) {
	t.Parallel()
	f := setupWith(t, func(c *Config) { c.TrustLoopback = &Caller{TenantID: "default", TokenID: "dev", Scopes: ScopeAll} })
	wrong := db.NewTokenSecret()
	for name, test := range map[string]struct {
		change func(r *http.Request)
		want   int
	}{
		"IPv4":       {func(*http.Request) {}, 200},
		"IPv4Of127":  {func(r *http.Request) { r.RemoteAddr, r.Host = "127.1.2.3:1", "127.1.2.3:5003" }, 200},
		"IPv6":       {func(r *http.Request) { r.RemoteAddr, r.Host = "[::1]:1", "[::1]:5003" }, 200},
		"IPv4InIPv6": {func(r *http.Request) { r.RemoteAddr = "[::ffff:127.0.0.1]:1" }, 200},
		"Localhost":  {func(r *http.Request) { r.Host = "LocalHost" }, 200},
		"OwnPage": {func(r *http.Request) {
			r.Header.Set("Origin", "http://127.0.0.1:5003")
			r.Header.Set("Sec-Fetch-Site", "same-origin")
		}, 200},
		"PageOfThisMachine": {func(r *http.Request) {
			r.Header.Set("Origin", "http://localhost:3000")
			r.Header.Set("Sec-Fetch-Site", "cross-site")
		}, 200},
		"AddressBar":             {func(r *http.Request) { r.Header.Set("Sec-Fetch-Site", "none") }, 200},
		"OtherMachine":           {func(r *http.Request) { r.RemoteAddr = "192.0.2.1:1" }, 401},
		"NoAddress":              {func(r *http.Request) { r.RemoteAddr = "@" }, 401},
		"Forwarded":              {func(r *http.Request) { r.Header.Set("Forwarded", "for=127.0.0.1") }, 401},
		"XForwardedFor":          {func(r *http.Request) { r.Header.Set("X-Forwarded-For", "127.0.0.1") }, 401},
		"EmptyXForwardedFor":     {func(r *http.Request) { r.Header["X-Forwarded-For"] = nil }, 401},
		"XForwardedForSaysHere":  {func(r *http.Request) { r.RemoteAddr = "192.0.2.1:1"; r.Header.Set("X-Forwarded-For", "127.0.0.1") }, 401},
		"XRealIP":                {func(r *http.Request) { r.Header.Set("X-Real-IP", "127.0.0.1") }, 401},
		"Via":                    {func(r *http.Request) { r.Header.Set("Via", "1.1 proxy") }, 401},
		"ForeignPage":            {func(r *http.Request) { r.Header.Set("Origin", "https://evil.example") }, 401},
		"ForeignPageOfSuffix":    {func(r *http.Request) { r.Header.Set("Origin", "http://localhost.evil.example") }, 401},
		"ForeignPageOfPrefix":    {func(r *http.Request) { r.Header.Set("Origin", "http://127.0.0.1.evil.example:5003") }, 401},
		"UserInOrigin":           {func(r *http.Request) { r.Header.Set("Origin", "http://localhost@evil.example") }, 401},
		"NullOrigin":             {func(r *http.Request) { r.Header.Set("Origin", "null") }, 401},
		"EmptyOrigin":            {func(r *http.Request) { r.Header.Set("Origin", "") }, 401},
		"ExtensionOrigin":        {func(r *http.Request) { r.Header.Set("Origin", "chrome-extension://localhost") }, 401},
		"OneForeignOrigin":       {func(r *http.Request) { r.Header["Origin"] = []string{"http://localhost", "http://evil.example"} }, 401},
		"ForeignLink":            {func(r *http.Request) { r.Header.Set("Sec-Fetch-Site", "cross-site") }, 401},
		"SameSiteLink":           {func(r *http.Request) { r.Header.Set("Sec-Fetch-Site", "same-site") }, 401},
		"Rebinding":              {func(r *http.Request) { r.Host = "evil.example:5003" }, 401},
		"RebindingWithOwnOrigin": {func(r *http.Request) { r.Host = "evil.example"; r.Header.Set("Origin", "http://evil.example") }, 401},
		"NoHost":                 {func(r *http.Request) { r.Host = "" }, 401},
		"WrongToken":             {func(r *http.Request) { r.Header.Set("Authorization", "Bearer "+wrong) }, 401},
		"EmptyToken":             {func(r *http.Request) { r.Header.Set("Authorization", "") }, 401},
		"AgentKey":               {func(r *http.Request) { r.Header.Set("X-Agent-Api-Key", "x") }, 401},
		"TokenFromAfar": {func(r *http.Request) {
			r.RemoteAddr, r.Host = "192.0.2.1:1", "weir.example"
			r.Header.Set("Authorization", "Bearer "+f.rpc)
		}, 200},
	} {
		t.Run(name, func(t *testing.T) {
			for _, path := range []string{"/rpc", "/agents"} {
				r := httptest.NewRequest("POST", path, strings.NewReader(pingBody))
				if path != "/rpc" {
					r.Method = "GET"
				}
				r.RemoteAddr, r.Host = "127.0.0.1:1234", "127.0.0.1:5003"
				test.change(r)
				w := httptest.NewRecorder()
				f.server.Handler().ServeHTTP(w, r)
				require.Equal(t, test.want, w.Code, path)
			}
		})
	}
	t.Run("ActsAsTheTrusted", func(t *testing.T) {
		r := f.result("", "agent.request", request("s", "x"))
		var owner string
		f.scan(`SELECT owner_token FROM run`, &owner)
		require.Equal(t, "dev", owner)
		f.result("", "run.get", map[string]any{"runId": r["runId"]})
	})
	t.Run("NobodyElsewhere", func(t *testing.T) {
		t.Parallel()
		g := setup(t)
		status, _, _ := g.do("POST", "/rpc", "", pingBody)
		require.Equal(t, 401, status)
	})
}

func TestCache(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	t.Run("AsksOnceForAll", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			var looks atomic.Int64
			c := newCache(func(context.Context, int) (int64, error) {
				time.Sleep(time.Millisecond)
				return looks.Add(1), nil
			})
			var wg sync.WaitGroup
			for range 50 {
				wg.Go(func() {
					v, err := c.get(ctx, 1)
					require.NoError(t, err)
					require.Equal(t, int64(1), v)
				})
			}
			wg.Wait()
			time.Sleep(cacheTTL - 2*time.Millisecond)
			v, _ := c.get(ctx, 1)
			require.Equal(t, int64(1), v)
			time.Sleep(time.Millisecond) // the age counts from before the look
			v, _ = c.get(ctx, 1)
			require.Equal(t, int64(2), v)
		})
	})
	t.Run("ForgetsWhatWasBeingRead", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			var looks atomic.Int64
			c := newCache(func(context.Context, int) (int64, error) {
				n := looks.Add(1)
				time.Sleep(time.Second)
				return n, nil
			})
			first := make(chan int64)
			go func() {
				v, _ := c.get(ctx, 1)
				first <- v
			}()
			synctest.Wait()
			c.forget()
			v, _ := c.get(ctx, 1)
			require.Equal(t, int64(2), v, "what was read before may be old")
			require.Equal(t, int64(1), <-first)
			v, _ = c.get(ctx, 1)
			require.Equal(t, int64(3), v, "a look takes longer than an answer lasts")
		})
	})
	t.Run("ErrorsAreNotRemembered", func(t *testing.T) {
		t.Parallel()
		fails := true
		c := newCache(func(context.Context, int) (int, error) {
			if fails {
				return 0, errNoAgent
			}
			return 7, nil
		})
		_, err := c.get(ctx, 1)
		require.ErrorIs(t, err, errNoAgent)
		fails = false
		v, err := c.get(ctx, 1)
		require.NoError(t, err)
		require.Equal(t, 7, v)
	})
	t.Run("WhoAskedFirstMayLeave", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			c := newCache(func(ctx context.Context, _ int) (int, error) {
				time.Sleep(time.Second)
				return 7, ctx.Err()
			})
			leaving, leave := context.WithCancel(ctx)
			go c.get(leaving, 1)
			synctest.Wait()
			other, leaveToo := context.WithCancel(ctx)
			gone := make(chan error)
			go func() {
				_, err := c.get(other, 1)
				gone <- err
			}()
			synctest.Wait()
			leave()
			leaveToo()
			require.ErrorIs(t, <-gone, context.Canceled)
			v, err := c.get(ctx, 1)
			require.NoError(t, err)
			require.Equal(t, 7, v)
		})
	})
	t.Run("APanicIsOneLooks", func(t *testing.T) {
		t.Parallel()
		panics := true
		c := newCache(func(context.Context, int) (int, error) {
			if panics {
				panic("bug")
			}
			return 7, nil
		})
		require.Panics(t, func() { c.get(ctx, 1) })
		panics = false
		v, err := c.get(ctx, 1)
		require.NoError(t, err)
		require.Equal(t, 7, v)
	})
	t.Run("IsBounded", func(t *testing.T) {
		t.Parallel()
		c := newCache(func(_ context.Context, k int) (int, error) { return k, nil })
		for i := range cacheMax + 10 {
			c.get(ctx, i)
		}
		require.LessOrEqual(t, len(c.known), cacheMax)
		require.Empty(t, c.looking)
		_, err := newCache(func(context.Context, int) (int, error) { return 0, errors.New("x") }).get(ctx, 1)
		require.Error(t, err)
	})
}
