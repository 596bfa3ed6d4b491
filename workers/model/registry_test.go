package model

import (
	"errors"
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestRegistry(t *testing.T) {
	t.Parallel()

	t.Run("BuiltInProviders", func(t *testing.T) {
		t.Parallel()
		r, err := NewRegistry(nil)
		require.NoError(t, err)
		for name, want := range map[string]Provider{ProviderOffline: &Offline{}, ProviderOpenAI: &OpenAI{}, ProviderAnthropic: &Anthropic{}} {
			p, err := r.Provider(name, "", "")
			require.NoError(t, err)
			require.IsType(t, want, p)
		}
		_, err = r.Provider("mine", "", "")
		require.ErrorContains(t, err, `"mine"`)
	})

	t.Run("EqualArgumentsShareAProvider", func(t *testing.T) {
		t.Parallel()
		r, err := NewRegistry(map[string]ProviderConfig{"mine": {Type: ProviderOpenAI, BaseURL: "http://mine/v1"}})
		require.NoError(t, err)
		first, err := r.Provider("mine", "", "key")
		require.NoError(t, err)
		again, err := r.Provider("mine", "", "key\n")
		require.NoError(t, err)
		require.Same(t, first, again)
		for _, other := range []struct{ name, baseURL, key string }{{"mine", "http://other/v1", "key"}, {"mine", "", "other"}, {"openai", "", "key"}} {
			p, err := r.Provider(other.name, other.baseURL, other.key)
			require.NoError(t, err)
			require.NotSame(t, first, p)
		}
	})

	t.Run("TheCacheIsBounded", func(t *testing.T) {
		t.Parallel()
		r, err := NewRegistry(nil)
		require.NoError(t, err)
		for i := range 2*maxProviders + 1 {
			_, err := r.Provider(ProviderOpenAI, "", fmt.Sprint(i))
			require.NoError(t, err)
			require.LessOrEqual(t, len(r.providers), maxProviders)
		}
	})

	t.Run("AllProvidersOfANameShareConnections", func(t *testing.T) {
		t.Parallel()
		const calls = 10
		addresses := make(chan string, calls)
		server := serve(t, func(w http.ResponseWriter, r *http.Request) {
			addresses <- r.RemoteAddr
			events(openAIText("hi", "stop"))(w, r)
		})
		r, err := NewRegistry(map[string]ProviderConfig{"mine": {Type: ProviderOpenAI, BaseURL: server.url}})
		require.NoError(t, err)
		t.Cleanup(r.Close)
		for i := range calls {
			p, err := r.Provider("mine", "", fmt.Sprint("key", i))
			require.NoError(t, err)
			_, err = p.Call(t.Context(), ask("m", "x"), nil)
			require.NoError(t, err)
		}
		close(addresses)
		distinct := map[string]bool{}
		for address := range addresses {
			distinct[address] = true
		}
		// On a busy machine a connection may not come back in time for the next call.
		require.Less(t, len(distinct), calls)
	})

	t.Run("ConfiguredPricesWin", func(t *testing.T) {
		t.Parallel()
		half := 0.5
		r, err := NewRegistry(map[string]ProviderConfig{
			"mine":   {Type: ProviderOpenAI, BaseURL: "http://mine", Prices: map[string]Price{"m": {Rates: Rates{Input: 1, CacheRead: &half, Output: 2}}}},
			"openai": {Prices: map[string]Price{"gpt-4o": {}}},
		})
		require.NoError(t, err)
		usage := Usage{Input: 10, CacheRead: 10, Output: 10}
		require.Equal(t, micros(35), r.Cost("mine", "m", usage))
		require.Nil(t, r.Cost("mine", "gpt-4o", usage))
		require.Equal(t, micros(0), r.Cost("openai", "gpt-4o", usage))
		require.NotNil(t, r.Cost("openai", "gpt-4.1", usage))
	})

	t.Run("OfflineTakesItsGapLimit", func(t *testing.T) {
		t.Parallel()
		r, err := NewRegistry(map[string]ProviderConfig{"offline": {GapTimeout: time.Millisecond}})
		require.NoError(t, err)
		p, err := r.Provider(ProviderOffline, "", "")
		require.NoError(t, err)
		_, err = p.Call(t.Context(), ask("", "!stall"), nil)
		require.Equal(t, ReasonStalled, requireError(t, err).Reason)
	})
}

func TestRegistryRefuses(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		config map[string]ProviderConfig
		want   string
	}{
		"UnknownType":       {map[string]ProviderConfig{"mine": {Type: "other", BaseURL: "http://x"}}, "type must be"},
		"NoType":            {map[string]ProviderConfig{"mine": {BaseURL: "http://x"}}, "type must be"},
		"OfflineByAnother":  {map[string]ProviderConfig{"mine": {Type: "offline", BaseURL: "http://x"}}, "type must be"},
		"NoAddress":         {map[string]ProviderConfig{"mine": {Type: "openai"}}, "baseUrl is missing"},
		"NoURL":             {map[string]ProviderConfig{"mine": {Type: "openai", BaseURL: "localhost:8000"}}, "http or https"},
		"CredentialInURL":   {map[string]ProviderConfig{"mine": {Type: "openai", BaseURL: "http://user:secret@x"}}, "no user"},
		"BuiltInRedefined":  {map[string]ProviderConfig{"openai": {Type: "anthropic"}}, "its type is openai"},
		"WholeFromMessages": {map[string]ProviderConfig{"anthropic": {NoStream: true}}, "noStream"},
		"NegativePrice":     {map[string]ProviderConfig{"openai": {Prices: map[string]Price{"m": {Rates: Rates{Input: -1}}}}}, "negative"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := NewRegistry(c.config)
			require.ErrorContains(t, err, c.want)
			require.NotContains(t, err.Error(), "secret")
		})
	}

	t.Run("AgentsAddress", func(t *testing.T) {
		t.Parallel()
		r, err := NewRegistry(nil)
		require.NoError(t, err)
		for _, baseURL := range []string{"ftp://x", "http://x?key=secret", "http://a:secret@x", "http://", "::secret::"} {
			_, err := r.Provider(ProviderOpenAI, baseURL, "")
			require.Error(t, err, baseURL)
			require.NotContains(t, err.Error(), "secret")
		}
	})
}

func TestHostIs(t *testing.T) {
	t.Parallel()
	for baseURL, want := range map[string]bool{
		"https://anthropic.com": true, "https://api.anthropic.com:443/v1": true,
		"https://api.anthropic.com.evil.example": false, "https://notanthropic.com": false, "": false,
	} {
		require.Equal(t, want, hostIs(baseURL, "anthropic.com"), baseURL)
	}
}

func TestErrors(t *testing.T) {
	t.Parallel()
	require.Equal(t, "model: rate_limited (HTTP 429): slow down", (&Error{Status: 429, Reason: ReasonRateLimited, Message: "slow down"}).Error())
	cause := errors.New("stop")
	aborted := &AbortedError{Cause: cause}
	require.ErrorIs(t, aborted, cause)
	require.Equal(t, "model: call aborted: stop", aborted.Error())
}

func TestRetryAfter(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)
	for name, c := range map[string]struct {
		headers map[string]string
		want    time.Duration
	}{
		"None":               {nil, 0},
		"Seconds":            {map[string]string{"Retry-After": "3"}, 3 * time.Second},
		"FractionOfASecond":  {map[string]string{"Retry-After": "0.25"}, 250 * time.Millisecond},
		"Milliseconds":       {map[string]string{"Retry-After-Ms": "1500", "Retry-After": "7"}, 1500 * time.Millisecond},
		"Date":               {map[string]string{"Retry-After": "Mon, 30 Nov 2026 12:00:20 GMT"}, 20 * time.Second},
		"DateByTheirClock":   {map[string]string{"Retry-After": "Mon, 30 Nov 2026 12:10:20 GMT", "Date": "Mon, 30 Nov 2026 12:10:00 GMT"}, 20 * time.Second},
		"OldDateForm":        {map[string]string{"Retry-After": "Monday, 30-Nov-26 12:00:20 GMT"}, 20 * time.Second},
		"PastDate":           {map[string]string{"Retry-After": "Mon, 30 Nov 2026 11:00:00 GMT"}, 0},
		"Negative":           {map[string]string{"Retry-After": "-3"}, 0},
		"Garbage":            {map[string]string{"Retry-After": "soon"}, 0},
		"NotANumber":         {map[string]string{"Retry-After": "NaN"}, 0},
		"BeyondAllMeasure":   {map[string]string{"Retry-After": "1e999"}, maxRetryAfter},
		"LongerThanADay":     {map[string]string{"Retry-After": "999999999999999"}, maxRetryAfter},
		"GarbageThenSeconds": {map[string]string{"Retry-After-Ms": "x", "Retry-After": "7"}, 7 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			header := http.Header{}
			for k, v := range c.headers {
				header.Set(k, v)
			}
			require.Equal(t, c.want, retryAfter(header, now))
		})
	}
}
