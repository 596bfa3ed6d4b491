package main

import (
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestProbe(t *testing.T) {
	t.Parallel()
	status := make(chan int, 1)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case code := <-status:
			w.WriteHeader(code)
			_, _ = w.Write([]byte("draining"))
		case <-r.Context().Done(): // it hangs
		}
	}))
	t.Cleanup(server.Close)

	status <- http.StatusOK
	require.NoError(t, probe(server.URL, time.Minute))
	status <- http.StatusServiceUnavailable
	require.ErrorContains(t, probe(server.URL, time.Minute), "draining")
	require.Error(t, probe(server.URL, 50*time.Millisecond), "it does not answer in time")
	require.Error(t, probe("http://127.0.0.1:1/", time.Minute), "nobody listens")
}
