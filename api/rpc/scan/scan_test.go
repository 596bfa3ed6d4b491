package scan

import (
	"encoding/json"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

func valid(text string) error {
	s := New([]byte(text))
	if _, err := s.Value(); err != nil {
		return err
	}
	return s.End()
}

func TestValue(t *testing.T) {
	t.Parallel()
	deep := func(n int) string { return strings.Repeat("[", n) + strings.Repeat("]", n) }
	tests := map[string]struct {
		text string
		err  error
	}{
		"Object":           {text: ` {"a" : [1, -0.5e+3, true, false, null, "x"], "": {}} `},
		"Scalar":           {text: `0`},
		"HugeNumber":       {text: `1e999999999`},
		"Depth128":         {text: deep(128)},
		"Depth129":         {text: deep(129), err: ErrDepth},
		"Empty":            {text: ``, err: ErrSyntax},
		"Space":            {text: " \n", err: ErrSyntax},
		"LeadingZero":      {text: `01`, err: ErrSyntax},
		"Plus":             {text: `+1`, err: ErrSyntax},
		"BareMinus":        {text: `-`, err: ErrSyntax},
		"BareDot":          {text: `1.`, err: ErrSyntax},
		"BareExponent":     {text: `1e`, err: ErrSyntax},
		"Trailing":         {text: `{} {}`, err: ErrSyntax},
		"TrailingComma":    {text: `{"a":1,}`, err: ErrSyntax},
		"TrailingItem":     {text: `[1,]`, err: ErrSyntax},
		"LeadingComma":     {text: `[,1]`, err: ErrSyntax},
		"NoColon":          {text: `{"a" 1}`, err: ErrSyntax},
		"NoValue":          {text: `{"a":}`, err: ErrSyntax},
		"NameNotString":    {text: `{a:1}`, err: ErrSyntax},
		"Unclosed":         {text: `{"a":[1`, err: ErrSyntax},
		"UnclosedString":   {text: `"abc`, err: ErrSyntax},
		"UnclosedEscape":   {text: `"abc\`, err: ErrSyntax},
		"Control":          {text: "\"a\nb\"", err: ErrSyntax},
		"Nul":              {text: "\"a\x00b\"", err: ErrSyntax},
		"BadEscape":        {text: `"\x41"`, err: ErrSyntax},
		"ShortUnicode":     {text: `"\u12"`, err: ErrSyntax},
		"Literal":          {text: `nul`, err: ErrSyntax},
		"ByteOrderMark":    {text: "\ufeff{}", err: ErrSyntax},
		"MismatchedBraces": {text: `[1}`, err: ErrSyntax},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			require.ErrorIs(t, valid(test.text), test.err)
		})
	}
}

func TestStrip(t *testing.T) {
	t.Parallel()
	tests := map[string]struct{ text, want string }{
		"None":    {`{"a":1,"b":2}`, `{"a":1,"b":2}`},
		"First":   {`{"_a":1,"b":2}`, `{"b":2}`},
		"Middle":  {`{"a":1,"_b":{"c":[1]},"d":2}`, `{"a":1,"d":2}`},
		"Last":    {`{"a":1,"_b":2}`, `{"a":1}`},
		"LastTwo": {`{"a":1 , "_b":2 , "_c":3 }`, `{"a":1}`},
		"All":     {`{"_a":1,"_b":2}`, `{}`},
		"Only":    {`{ "_a" : "x,}" }`, `{}`},
		"Escaped": {`{"\u005fa":1,"b":2}`, `{"b":2}`},
		"Inner":   {`{"a":{"_b":1}}`, `{"a":{"_b":1}}`},
		"Empty":   {`{}`, `{}`},
		"NoName":  {`{"":1,"_":2}`, `{"":1}`},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := New([]byte(test.text))
			got, err := s.Strip('_')
			require.NoError(t, err)
			require.NoError(t, s.End())
			require.JSONEq(t, test.want, string(got))
			require.NotContains(t, string(got), "_a")
		})
	}
}

func TestRepair(t *testing.T) {
	t.Parallel()
	tests := map[string]struct{ text, want string }{
		"Nul":            {`"a\u0000b"`, `"a\ufffdb"`},
		"LoneHigh":       {`"\ud800"`, `"\ufffd"`},
		"LoneLow":        {`"\uDC00x"`, `"\ufffdx"`},
		"HighThenLetter": {`"\ud800\u0041"`, `"\ufffd\u0041"`},
		"TwoHighsOneLow": {`"\ud800\ud800\udc00"`, `"\ufffd\ud800\udc00"`},
		"Pair":           {`"\ud83d\ude00"`, `"\ud83d\ude00"`},
		"Backslash":      {`"\\u0000"`, `"\\u0000"`},
		"Name":           {`{"\u0000":1}`, `{"\ufffd":1}`},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := New([]byte(test.text))
			s.Repair = true
			got, err := s.Value()
			require.NoError(t, err)
			require.Equal(t, test.want, string(got))

			untouched := []byte(test.text)
			s = New(untouched)
			_, err = s.Value()
			require.NoError(t, err)
			require.Equal(t, test.text, string(untouched))
		})
	}
}

// FuzzValue checks that the grammar and the strings are those of encoding/json.
func FuzzValue(f *testing.F) {
	for _, seed := range []string{
		`{"a":[1,-0.5e+3,true,null,"x\u00e9\n\ud83d\ude00\ud800"],"":{}}`, `01`, `"\ud800\u0041"`, "\"\x7f\xff\"", `[[[[]]]]`,
		`{"_a":1,"b":2,"_c":3}`, `"aaaaaaaaaaaaaaaa\"bbbbbbbbb"`, "\"aaaaaaaaaaaaaaaa\x1f\"",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		err := valid(text)
		if err == ErrDepth {
			return
		}
		require.Equal(t, json.Valid([]byte(text)), err == nil)
		if err != nil {
			return
		}
		var members map[string]json.RawMessage
		if json.Unmarshal([]byte(text), &members) == nil && members != nil {
			s := New([]byte(text))
			stripped, err := s.Strip('_')
			require.NoError(t, err)
			for name := range members {
				if strings.HasPrefix(name, "_") {
					delete(members, name)
				}
			}
			var got map[string]json.RawMessage
			require.NoError(t, json.Unmarshal(stripped, &got))
			require.Equal(t, members, got)
		}
		var want string
		s := New([]byte(text))
		if raw, _ := s.Value(); raw[0] == '"' && utf8.Valid(raw) {
			require.NoError(t, json.Unmarshal(raw, &want))
			require.Equal(t, want, Unquote(raw))
		}
	})
}
