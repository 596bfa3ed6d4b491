package main

import (
	"bufio"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestAnswerReader(t *testing.T) {
	t.Parallel()
	read := func(answers string) (first, second error) {
		a := answerReader{r: bufio.NewReader(strings.NewReader(answers))}
		return a.read(), a.read()
	}
	const result = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 15\r\n\r\n{\"result\":true}"
	first, second := read(result + result)
	require.NoError(t, first)
	require.NoError(t, second)
	first, second = read("HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\n{\"error\":true}" + result)
	require.ErrorContains(t, first, "refused")
	require.NoError(t, second)
	first, _ = read("HTTP/1.1 503 Service Unavailable\r\nContent-Length: 2\r\n\r\n{}")
	require.ErrorContains(t, first, "503")
	first, _ = read("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
	require.ErrorContains(t, first, "Content-Length")
}

func TestRequestMarksItsSession(t *testing.T) {
	t.Parallel()
	request, mark := load{addr: "127.0.0.1:1", token: "wt_x"}.request()
	writeHex(request[mark:mark+16], 0xabc)
	require.Contains(t, string(request), `"sessionId":"s-0000000000000abc"`)
	require.Contains(t, string(request), "Authorization: Bearer wt_x\r\n")
}
