package tool

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestForbiddenAddresses(t *testing.T) {
	t.Parallel()
	for _, addr := range []string{
		"0.0.0.0", "0.1.2.3", "10.0.0.1", "100.64.0.1", "100.127.255.254", "127.0.0.1", "127.8.8.8", "169.254.0.1", "169.254.169.254",
		"172.16.0.1", "172.31.255.255", "192.168.1.1", "192.0.0.192", "192.0.2.1", "198.18.0.1", "198.51.100.7", "203.0.113.9",
		"224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255", "168.63.129.16", "100.100.100.200",
		"::", "::1", "::127.0.0.1", "fe80::1", "fe80::1%eth0", "febf::1", "fc00::1", "fd00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "2001:db8::1", "2001::1", "100::1",
		"::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::10.0.0.1", "64:ff9b::169.254.169.254", "64:ff9b:1::1", "2002:7f00:1::", "2002:a00:1::1",
	} {
		require.NotEmpty(t, forbidden(netip.MustParseAddr(addr)), addr)
	}
	for _, addr := range []string{
		"1.1.1.1", "8.8.8.8", "100.63.255.255", "100.128.0.1", "172.15.0.1", "172.32.0.1", "192.167.1.1", "192.169.1.1", "11.0.0.1", "223.255.255.255", "126.0.0.1", "128.0.0.1",
		"2606:4700:4700::1111", "2a00:1450:4001:81b::200e", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8", "2002:808:808::1",
	} {
		require.Empty(t, forbidden(netip.MustParseAddr(addr)), addr)
	}
	require.Equal(t, "a metadata address", forbidden(netip.MustParseAddr("169.254.169.254")))
}

func TestPrivateAddressesAreRefusedWithoutACall(t *testing.T) {
	t.Parallel()
	var requests atomic.Int32
	url := serve(t, func(http.ResponseWriter, *http.Request) { requests.Add(1) })
	port := url[strings.LastIndex(url, ":")+1:]
	names := resolver(t, func(string) netip.Addr { return netip.MustParseAddr("127.0.0.1") })
	r := New(Config{Resolver: names})
	t.Cleanup(r.Close)

	for _, host := range []string{"127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "2130706433", "0x7f.1", "public.example.com", "0.0.0.0"} {
		at := "http://" + host + ":" + port + "/"
		for _, f := range []*Failure{r.Run(t.Context(), httpTool(t, at, ""), call(`{}`)).Err, r.Run(t.Context(), webFetch(t), fetchCall(at)).Err} {
			require.NotNil(t, f, host)
			if host[0] != '2' && host[1] != 'x' { // numbers that some resolvers take for addresses, and others for names
				require.Equal(t, Denied, f.Kind, "%s: %s", host, f.Message)
			}
			require.False(t, f.Retryable)
			require.NotContains(t, f.Message, "127.0.0.1", "what a name resolves to is not told")
		}
	}
	require.Zero(t, requests.Load())
}

// onlyLoopback2 stands for "public" in tests: 127.0.0.2 may be called, while
// the rest of the loopback is as forbidden as ever.
func onlyLoopback2(addr netip.Addr) string {
	if addr.Unmap() == netip.MustParseAddr("127.0.0.2") {
		return ""
	}
	return forbidden(addr)
}

func publicServer(t *testing.T, handler http.HandlerFunc) (port string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.2:0")
	require.NoError(t, err)
	s := &httptest.Server{Listener: l, Config: &http.Server{Handler: handler}}
	s.Start()
	t.Cleanup(s.Close)
	_, port, err = net.SplitHostPort(l.Addr().String())
	require.NoError(t, err)
	return port
}

func TestRedirectToPrivateIsRefused(t *testing.T) {
	t.Parallel()
	var requests atomic.Int32
	private := serve(t, func(http.ResponseWriter, *http.Request) { requests.Add(1) })
	port := publicServer(t, func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, r.URL.Query().Get("to"), http.StatusFound)
	})
	r := newRunner(Config{}, onlyLoopback2)
	t.Cleanup(r.Close)
	for _, to := range []string{private, "http://169.254.169.254/latest/meta-data/", "http://[::1]/", "ftp://example.com/", "http://user:pw@127.0.0.2:" + port + "/"} {
		at := "http://127.0.0.2:" + port + "/?to=" + to
		for _, f := range []*Failure{r.Run(t.Context(), webFetch(t), fetchCall(at)).Err, r.Run(t.Context(), httpTool(t, at, `,"method":"GET"`), call(`{}`)).Err} {
			require.NotNil(t, f, to)
			require.Equal(t, Denied, f.Kind, "%s: %s", to, f.Message)
		}
	}
	require.Zero(t, requests.Load())
}

// A name that resolves to an allowed address first and to a private one when it
// is dialled again: the check is made on what is dialled.
func TestDNSRebindingIsRefused(t *testing.T) {
	t.Parallel()
	var lookups, private atomic.Int32
	port := publicServer(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Connection", "close") // so that the name is resolved again
		fmt.Fprint(w, "public")
	})
	l, err := net.Listen("tcp", "127.0.0.1:"+port)
	if err != nil {
		t.Skip("the port is taken on 127.0.0.1: ", err)
	}
	inside := &httptest.Server{Listener: l, Config: &http.Server{Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) { private.Add(1) })}}
	inside.Start()
	t.Cleanup(inside.Close)

	r := newRunner(Config{Resolver: resolver(t, func(string) netip.Addr {
		if lookups.Add(1) == 1 {
			return netip.MustParseAddr("127.0.0.2")
		}
		return netip.MustParseAddr("127.0.0.1")
	})}, onlyLoopback2)
	t.Cleanup(r.Close)

	at := "http://rebind.example.com:" + port + "/"
	require.Nil(t, r.Run(t.Context(), webFetch(t), fetchCall(at)).Err)
	f := r.Run(t.Context(), webFetch(t), fetchCall(at)).Err
	require.NotNil(t, f)
	require.Equal(t, Denied, f.Kind, f.Message)
	require.Zero(t, private.Load())
	require.GreaterOrEqual(t, lookups.Load(), int32(2))
}

func TestRedirects(t *testing.T) {
	t.Parallel()
	var requests atomic.Int32
	url := serve(t, func(w http.ResponseWriter, r *http.Request) {
		requests.Add(1)
		var left int
		_, _ = fmt.Sscanf(r.URL.Path, "/%d", &left)
		if left > 0 {
			http.Redirect(w, r, fmt.Sprintf("/%d", left-1), http.StatusFound)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, `"arrived"`)
	})
	run := func(path, method string) (Result, int32) {
		requests.Store(0)
		result := anywhere(t, Config{}).Run(t.Context(), httpTool(t, url+path, `,"method":"`+method+`"`), call(`{}`))
		return result, requests.Load()
	}
	result, n := run("/5", "GET")
	require.Nil(t, result.Err)
	require.Equal(t, `"arrived"`, string(result.Output))
	require.EqualValues(t, 6, n)

	result, n = run("/6", "GET")
	require.Equal(t, HTTPStatus, result.Err.Kind)
	require.Contains(t, result.Err.Message, "5 redirects")
	require.EqualValues(t, 6, n)

	for _, method := range []string{"POST", "PUT", "PATCH", "DELETE"} {
		result, n = run("/1", method)
		require.Equal(t, HTTPStatus, result.Err.Kind, method)
		require.Contains(t, result.Err.Message, "302")
		require.EqualValues(t, 1, n, method)
	}
}

func TestProxiesOfTheEnvironmentAreNotUsed(t *testing.T) {
	t.Parallel()
	r := New(Config{})
	require.Nil(t, r.client.Transport.(*http.Transport).Proxy)
	require.Nil(t, r.fresh.Transport.(*http.Transport).Proxy)
}

func TestGuardRefusesWhatItCannotRead(t *testing.T) {
	t.Parallel()
	require.Error(t, guard(forbidden)("tcp", "nonsense", nil))
	d := net.Dialer{Control: guard(forbidden)}
	_, err := d.DialContext(context.Background(), "tcp", "127.0.0.1:9")
	var refused *forbiddenError
	require.ErrorAs(t, err, &refused)
}
