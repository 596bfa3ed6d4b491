package tool

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/weir-run/weir/policy/mask"
)

func TestParseFactRead(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("k", 128)
	for _, key := range []string{"a", "user.name", "A_b:c-9", "_x", "a__b", long} {
		got, f := ParseFactRead(json.RawMessage(`{"key":"` + key + `"}`))
		require.Nil(t, f, key)
		require.Equal(t, key, got)
	}
	for args, kind := range map[string]Kind{
		`{"key":"` + long + `k"}`: InvalidArguments,
		`{"key":""}`:              InvalidArguments,
		`{"key":"a b"}`:           InvalidArguments,
		`{"key":"a\n"}`:           InvalidArguments,
		`{"key":"ü"}`:             InvalidArguments,
		`{"key":7}`:               InvalidArguments,
		`{"key":null}`:            InvalidArguments,
		`{"Key":"a"}`:             InvalidArguments,
		`{"key":"a","user":"b"}`:  InvalidArguments, // RC-96: a model cannot name another user
		`{}`:                      InvalidArguments,
		`null`:                    InvalidArguments,
		`[]`:                      InvalidArguments,
		`{`:                       InvalidArguments,
		`{"key":"__"}`:            Denied, // RC-94
		`{"key":"__summary"}`:     Denied,
	} {
		_, f := ParseFactRead(json.RawMessage(args))
		require.NotNil(t, f, args)
		require.Equal(t, kind, f.Kind, args)
		require.Empty(t, f.Rule)
	}
}

func TestParseFactWrite(t *testing.T) {
	t.Parallel()
	for args, want := range map[string]Fact{
		`{"key":"a","value":"x"}`:                                          {"a", json.RawMessage(`"x"`), ""},
		`{"key":"a","value":null}`:                                         {"a", json.RawMessage(`null`), ""}, // RC-99
		`{"key":"a", "value": { "b" : [1, 2.50] } }`:                       {"a", json.RawMessage(`{"b":[1,2.50]}`), ""},
		`{"key":"a","value":false,"kind":"preference"}`:                    {"a", json.RawMessage(`false`), "preference"},
		`{"key":"a","value":"\u0000"}`:                                     {"a", json.RawMessage(`"\ufffd"`), ""},
		`{"key":"password_policy","value":"12 characters"}`:                {"password_policy", json.RawMessage(`"12 characters"`), ""},
		`{"key":"api_key","value":"${API_KEY}"}`:                           {"api_key", json.RawMessage(`"${API_KEY}"`), ""},
		`{"key":"note","value":"password reset was asked for"}`:            {"note", json.RawMessage(`"password reset was asked for"`), ""},
		`{"key":"sha","value":"3f786850e387550fdab836ed7e6dc881de23001b"}`: {"sha", json.RawMessage(`"3f786850e387550fdab836ed7e6dc881de23001b"`), ""},
	} {
		got, f := ParseFactWrite(json.RawMessage(args))
		require.Nil(t, f, "%s: %v", args, f)
		require.Equal(t, want, got)
	}
	for args, kind := range map[string]Kind{
		`{"key":"a"}`:                        InvalidArguments,
		`{"value":1}`:                        InvalidArguments,
		`{"key":"a","value":1,"scope":"u"}`:  InvalidArguments,
		`{"key":"a","value":1,"kind":""}`:    InvalidArguments,
		`{"key":"a","value":1,"kind":"a b"}`: InvalidArguments,
		`{"key":"a","value":1,"kind":null}`:  InvalidArguments,
		`{"key":"a","value":}`:               InvalidArguments,
		`{"key":"__usage","value":1}`:        Denied,

		`{"key":"password","value":"hunter2"}`:                                          SecretRefused,
		`{"key":"db.password","value":12345678}`:                                        SecretRefused,
		`{"key":"login","value":{"user":"a","password":"b"}}`:                           SecretRefused,
		`{"key":"github_token","value":"0123456789abcdef"}`:                             SecretRefused,
		`{"key":"note","value":"use sk-` + `1234567890abcdef"}`:                         SecretRefused,
		`{"key":"note","value":"use s\u006b-` + `1234567890abcdef"}`:                    SecretRefused,
		`{"key":"note","value":["Authorization: Bearer abc"]}`:                          SecretRefused,
		`{"key":"note","value":"postgres://u:hunter2@db/x"}`:                            SecretRefused,
		`{"key":"note","value":{"ghp_` + `16C7e42F292c6912E7710c838347Ae178B4a":true}}`: SecretRefused,
		`{"key":"ghp_` + `16C7e42F292c6912E7710c838347Ae178B4a","value":1}`:             SecretRefused,
	} {
		_, f := ParseFactWrite(json.RawMessage(args))
		require.NotNil(t, f, args)
		require.Equal(t, kind, f.Kind, args)
		if kind == SecretRefused {
			require.NotContains(t, f.Message, "hunter2")
			require.False(t, mask.LooksLikeCredential(f.Message))
			redacted := RedactFactWrite(json.RawMessage(args))
			require.True(t, json.Valid(redacted))
			require.False(t, mask.LooksLikeCredential(string(redacted)), "%s", redacted)
			require.NotContains(t, string(redacted), "hunter2")
			require.NotContains(t, string(redacted), "12345678")
		}
	}
}

func TestFactValueLimit(t *testing.T) {
	t.Parallel()
	write := func(n int) *Failure {
		_, f := ParseFactWrite(json.RawMessage(`{"key":"a","value": "` + strings.Repeat("x", n-2) + `" }`))
		return f
	}
	require.Nil(t, write(16384))
	require.Equal(t, TooLarge, write(16385).Kind)
	_, f := ParseFactWrite(json.RawMessage(`{"key":"a","value":[` + strings.Repeat(" ", 20_000) + `1]}`))
	require.Nil(t, f, "white space does not count")
}

func TestRedactFactWrite(t *testing.T) {
	t.Parallel()
	require.JSONEq(t, `{"key":"password","value":"***","kind":"x"}`, string(RedactFactWrite(json.RawMessage(`{"key":"password","value":"hunter2","kind":"x","more":"y"}`))))
	require.JSONEq(t, `{"value":"***"}`, string(RedactFactWrite(json.RawMessage(`hunter2`))))
	require.JSONEq(t, `{"key":"password","value":"***"}`, string(RedactFactWrite(json.RawMessage(`{"key":"password","value":["hunter2"],"kind":7}`))))
}

func FuzzParseFactWrite(f *testing.F) {
	f.Add([]byte(`{"key":"a","value":{"b":"c"},"kind":"d"}`))
	f.Fuzz(func(t *testing.T, args []byte) {
		fact, failure := ParseFactWrite(args)
		if failure != nil {
			return
		}
		require.Regexp(t, `^[A-Za-z0-9_.:-]{1,128}$`, fact.Key)
		require.True(t, json.Valid(fact.Value))
		require.LessOrEqual(t, len(fact.Value), maxFactBytes)
		again, failure := ParseFactWrite(marshal(map[string]any{"key": fact.Key, "value": fact.Value}))
		require.Nil(t, failure)
		require.Equal(t, string(fact.Value), string(again.Value))
	})
}
