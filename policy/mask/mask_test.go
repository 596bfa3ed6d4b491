package mask_test

import (
	"encoding/base64"
	"encoding/json"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/weir-run/weir/policy/mask"
)

// Credentials of the shapes that providers hand out; none was ever valid. They
// are put together here so that no scanner takes this file for a leak.
var (
	openAI    = "sk-" + "proj-9aB8cD7eF6gH5iJ4kL3mN2oP1qR0sT-uVwXyZ_0123456789abcd"
	anthropic = "sk-ant-" + "api03-Zm9vYmFyYmF6cXV4_abcdefghijklmnop-0123456789ABCDEF"
	github    = "ghp_" + "16C7e42F292c6912E7710c838347Ae178B4a"
	githubPAT = "github_pat_" + "11ABCDEFG0abcdefghijkl_0123456789abcdefghijklmnopqrstuvwxyz"
	slack     = "xoxb-" + "123456789012-1234567890123-AbCdEfGhIjKlMnOpQrStUvWx"
	aws       = "AKIA" + "IOSFODNN7EXAMPLE"
	google    = "AIza" + "SyD-9tSrke72PouQMnMX-a7eZSW0jkFMBWY"
	gitlab    = "glpat-" + "aBcDeFgHiJkLmNoPqRs1"
	hugging   = "hf_" + "aBcDeFgHiJkLmNoPqRsTuVwXyZaBcDeFgH"
	stripe    = "sk_live_" + "4eC39HqLyjWDarjtT1zdp7dc"
	weir      = "wt_" + "Q2hhbmdlIG1lIGFuZCBJIHdpbGwgYmU0bG9uZ2Vy"
	jwt       = "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9" + ".eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9P"
	pemKey    = "-----BEGIN RSA " + "PRIVATE KEY-----\nMIIEowIBAAKCAQEAn0123456789+/abcdefghijklmnop\nqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ==\n-----END RSA " + "PRIVATE KEY-----"
)

var byPattern = []string{openAI, anthropic, github, githubPAT, slack, aws, google, gitlab, hugging, stripe, weir, jwt, pemKey}

func TestCredentialsAreMasked(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ in, want string }{
		// Prefixes, alone and in company.
		{openAI, "***"},
		{"sk-" + "1234567890abcdef", "***"},
		{"key " + anthropic + ", then", "key ***, then"},
		{"https://api.example.com/v1?k=" + google + "&x=1", "https://api.example.com/v1?k=***&x=1"},
		{"(" + github + ")", "(***)"},
		{"export GH=" + githubPAT, "export GH=***"},
		{"line\n" + slack + "\nline", "line\n***\nline"},
		{`{"text":"first\n` + aws + `\tlast"}`, `{"text":"first\n***\tlast"}`},
		{`{"text":"a\u0026` + gitlab + `"}`, `{"text":"a\u0026***"}`},
		{"cookie=" + jwt + "; path=/", "cookie=***; path=/"},
		{hugging + " " + stripe + " " + weir, "*** *** ***"},

		// Authorization.
		{"Authorization: Bearer abc", "Authorization: Bearer ***"},
		{"authorization=bearer abc123; retry", "authorization=bearer ***; retry"},
		{"request failed: 401 (Authorization: Basic dXNlcjpodW50ZXIy)", "request failed: 401 (Authorization: Basic ***)"},
		{`{"Authorization":"Bearer abc.def"}`, `{"Authorization":"Bearer ***"}`},
		{`{"Proxy-Authorization":"Digest username=\"x\", response=\"y\""}`, `{"Proxy-Authorization":"Digest ***"}`},
		{`{"authorization":"9f86d081884c7d65"}`, `{"authorization":"***"}`},
		{`{"error":"sent {\"Authorization\":\"token abc\"}"}`, `{"error":"sent {\"Authorization\":\"token ***\"}"}`},
		{"map[Authorization:[Bearer xyz] X-Api-Key:[s3cr3t-k3y]]", "map[Authorization:[Bearer ***] X-Api-Key:[***]]"},
		{"curl -H 'Bearer 0123456789abcdef'", "curl -H 'Bearer ***'"},
		{"use Basic dXNlcjpodW50ZXIy here", "use Basic *** here"},

		// PEM.
		{"before " + pemKey + " after", "before *** after"},
		{"KEY=\"" + pemKey + "\"\nX=1", "KEY=\"***\"\nX=1"},
		{"PRIVATE_KEY=" + pemKey, "PRIVATE_KEY=***"},
		{`{"private_key":` + quoteJSON(pemKey+"\n") + `,"type":"x"}`, `{"private_key":"***\n","type":"x"}`},
		{quoteJSON(quoteJSON(pemKey)), `"\"***\""`},
		{pemKey[:70] + "… cut", "***… cut"},

		// URLs.
		{"postgres://weir:hunter2@db:5432/weir?sslmode=disable", "postgres://weir:***@db:5432/weir?sslmode=disable"},
		{"redis://:p%40ss@cache", "redis://:***@cache"},
		{"amqp://u:p@ss:w@rd@mq/", "amqp://u:***@mq/"},
		{"postgres://u:pa/ss?x@db/y", "postgres://u:***@db/y"},
		{"https://0123456789abcdef0123@git.example.com/x", "https://***@git.example.com/x"},
		{`{"dsn":"mysql:\/\/root:pw1@db\/x"}`, `{"dsn":"mysql:\/\/root:***@db\/x"}`},
		{"dsn root:hunter2@tcp(db:3306)/x", "dsn root:***@tcp(db:3306)/x"},

		// Assignments.
		{"password=hunter2", "password=***"},
		{"DB_PASSWORD=correcthorse\nNEXT=1", "DB_PASSWORD=***\nNEXT=1"},
		{"host=db user=weir password=hunter dbname=x", "host=db user=weir password=*** dbname=x"},
		{`password="two words" next`, `password="***" next`},
		{`passwd='it is "it"'`, `passwd='***'`},
		{"?user=a&api_key=abcdef123456&x=1", "?user=a&api_key=***&x=1"},
		{"api_key: abcdef123456", "api_key: ***"},
		{"  password: correcthorse\n  user: weir", "  password: ***\n  user: weir"},
		{"X-Api-Key: 9f86d081", "X-Api-Key: ***"},
		{"AWS_SECRET_ACCESS_KEY=/Ab0dEfGhIjKlMnOpQrStUvWxYz0123456789abc", "AWS_SECRET_ACCESS_KEY=***"},
		{`{"secret":"s3cr3t"}`, `{"secret":"***"}`},
		{`{"client_secret" : "a \"b\" \\" , "n":1}`, `{"client_secret" : "***" , "n":1}`},
		{`{"password":"a","passphrase":"b"}`, `{"password":"***","passphrase":"***"}`},
		{`{"accessToken":"9f86d081884c"}`, `{"accessToken":"***"}`},
		{`{"password":12345678,"n":12345678}`, `{"password":0,"n":12345678}`},
		{`{"args":"{\"password\":\"a\\\"b\",\"x\":1}"}`, `{"args":"{\"password\":\"***\",\"x\":1}"}`},
		{`{"args":"{\"password\":\"cut off"}`, `{"args":"{\"password\":\"***"}`},
		{`os.environ["DB_PASSWORD"] = "hunter2"`, `os.environ["DB_PASSWORD"] = "***"`},
		{`'password' => 'hunter2'`, `'password' => '***'`},
		{`password := "hunter2"`, `password := "***"`},
		{`data: {"password":"hunter2"}`, `data: {"password":"***"}`},
		{`password: "hunter2`, `password: "***`},
	} {
		got := mask.New().String(tc.in)
		require.Equal(t, tc.want, got, tc.in)
		require.Equal(t, got, mask.New().String(got), "masking twice: %s", tc.in)
		require.True(t, mask.LooksLikeCredential(tc.in), tc.in)
		if json.Valid([]byte(tc.in)) {
			require.True(t, json.Valid([]byte(got)), got)
		}
	}
}

func TestWhatOnlyLooksSimilarStays(t *testing.T) {
	t.Parallel()
	for _, s := range []string{
		"", "-", "_", ":", "=", "://", "sk-", "eyJ", "AKIA", "Bearer ", "password=", "\"", "\\",
		"sk-learn", "import sk-learn-pipeline-with-a-long-name", "task-0123456789abcdef", "disk-0123456789abcdef0", "risk-averse",
		"commit 3f786850e387550fdab836ed7e6dc881de23001b", "0198c1f2-7b3a-7c44-9d1e-5b6f7a8c9d0e", "run_0198c1f2-7b3a-7c44-9d1e-5b6f7a8c9d0e",
		"sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
		"password reset", "Reset your password: it takes a minute", "password: required", "Password: must be at least 8 characters",
		"the bearer of bad news", "Bearer authentication", "Basic understanding of internationalisation", "basic training",
		"my token: invalid", "a secret: nobody knows", "tokens=4096", `{"max_tokens":4096,"token":17,"total_tokens":"12345678"}`,
		`{"nextPageToken":"CAUQAA0123456789"}`, `{"page_token":"eyJvIjoxMDB9"}`, `{"cursor":"eyJpZCI6MTIzNDU2Nzg5MH0"}`,
		`{"apiKeySecret":"OPENAI_API_KEY"}`, `{"api_key":"OPENAI_API_KEY"}`, `{"password":null,"secret":true,"token":{"a":1}}`,
		`{"password":""}`, `{"password\\":[[]]}`, `{"properties":{"password":{"type":"string","minLength":8}}}`,
		"password = get_password(user)", "password=config.password", "token = response.access_token", "if password == expected {", "password: str", "password: {",
		"PWD=/home/weir", "OLDPWD=/tmp/a1b2c3d4e5f6", "monkey: 12345678", "keyboard=qwerty123456",
		"https://example.com:8080/a@b", "http://[::1]:80/@x", "ssh://git@example.com/x", "git@github.com:weir-run/weir.git", "me@example.com",
		"https://example.com/a?b=c:d@e", "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----", "-----BEGIN PRIVATE KEY----- is missing",
		"hf_hub_download", "wt_short", "npm_config_registry", "ghp_", "github_pat_format", "AKIA is a prefix", "ASIAPACIFICREGIONALOFFICES",
		// Placeholders.
		"password=${DB_PASSWORD}", "password=$DB_PASSWORD", "password=%DB_PASSWORD%", "password=%s", "password=:password", "password=***",
		"Authorization: Bearer ${API_KEY}", "Authorization: Bearer <token>", "Authorization: Bearer ***", "Authorization: Bearer {{token}}",
		"postgres://weir:${PASSWORD}@db/weir", "postgres://weir:***@db/weir", "api_key: {{x}}", "api_key=<your key 123456>",
		`{"api_key":"${API_KEY}","token":"<token>","secret":"{{x}}","password":"***"}`, `{"api_key":"\u003cyour key 1\u003e"}`, `{"password":"[REDACTED]"}`,
		"password: xxxxxxxx", "api_key=...", "Authorization: Basic xxx", "authorization: required",
	} {
		require.Equal(t, s, mask.New().String(s))
		require.False(t, mask.LooksLikeCredential(s), s)
	}
}

func TestConfiguredSecretsAreMaskedInEveryForm(t *testing.T) {
	t.Parallel()
	const plain, odd = "correct horse battery", `pa"ss\wo/rd&<x>`
	m := mask.New(plain, odd+"\n", "12345678", "short", "")

	for _, in := range []string{
		plain, "x" + plain + "y", plain + plain, `{"a":"` + plain + `"}`,
		odd, quoteJSON(odd), quoteJSON(quoteJSON(odd)), quoteJS(odd),
		"?q=correct+horse+battery", "/correct%20horse%20battery/",
	} {
		got := m.String(in)
		require.Contains(t, got, "***", in)
		require.NotContains(t, got, plain)
		require.NotContains(t, got, odd)
		require.NotContains(t, got, "horse")
		require.NotContains(t, got, "wo/rd")
		require.Equal(t, json.Valid([]byte(in)), json.Valid([]byte(got)), got)
	}

	for offset := range 4 {
		for _, enc := range []*base64.Encoding{base64.StdEncoding, base64.RawURLEncoding} {
			in := enc.EncodeToString([]byte(strings.Repeat("u", offset) + plain + ":tail"))
			got := m.String("x=" + in)
			require.Contains(t, got, "***")
			require.Greater(t, len(in)-len(got), 15, "nearly all of the secret is gone")
		}
	}

	t.Run("ShortOnesAreLeftOut", func(t *testing.T) {
		require.Equal(t, "short story", m.String("short story"))
	})
	t.Run("NumbersStayNumbers", func(t *testing.T) {
		require.Equal(t, `{"n":0,"s":"***","l":[0,0.5]}`, m.String(`{"n":12345678,"s":"12345678","l":[-12345678e1,0.5]}`))
		require.Equal(t, "pin ***", m.String("pin 12345678"))
	})
	t.Run("StructureIsNoSecret", func(t *testing.T) {
		structure := mask.New(`ab","cd`, "1, 2, 3", "true,false")
		for _, s := range []string{`["ab","cd"]`, `[1, 2, 3]`, `[true,false]`} {
			require.Equal(t, s, structure.String(s))
		}
		require.Equal(t, `["***"]`, structure.String(`["ab\",\"cd"]`))
	})
	t.Run("EscapesAreNotCut", func(t *testing.T) {
		escapes := mask.New("nosecret", "u0026secret", "26abcdef")
		require.Equal(t, `["a***b"]`, escapes.String(`["a\nosecretb"]`))
		require.Equal(t, `["a***b"]`, escapes.String(`["a\u0026secretb"]`))
		require.Equal(t, `["a***b"]`, escapes.String(`["a\u0026abcdefb"]`))
		require.Equal(t, `["a\\***b"]`, escapes.String(`["a\\nosecretb"]`))
	})
	t.Run("OverlappingOnesAreJoined", func(t *testing.T) {
		require.Equal(t, "x***y", mask.New("abcdef12", "ef123456").String("xabcdef123456y"))
		require.Equal(t, "x***y", mask.New("abcabc").String("xabcabcabcy"))
		require.Equal(t, "x***y", mask.New("abcdef", "abcdefghi").String("xabcdefghiy"), "the longest first")
	})
	t.Run("Contains", func(t *testing.T) {
		require.True(t, m.Contains("a "+plain))
		require.True(t, m.Contains("password=x1"))
		require.False(t, m.Contains("plain"))
	})
}

func TestUntouchedTextIsReturnedAsItIs(t *testing.T) {
	t.Parallel()
	clean := []byte(prose)
	require.Same(t, &clean[0], &mask.New("configured secret").Bytes(clean)[0])

	dirty := []byte("password=hunter2")
	got := mask.New().Bytes(dirty)
	require.Equal(t, "password=***", string(got))
	require.Equal(t, "password=hunter2", string(dirty), "the input is never changed")

	var none *mask.Masker
	require.Equal(t, "password=***", none.String("password=hunter2"))
	require.Nil(t, none.Bytes(nil))
}

func TestCleanTextAllocatesNothing(t *testing.T) {
	m := mask.New("a configured secret", "another one 12345")
	b, j := []byte(prose), []byte(document)
	require.Zero(t, testing.AllocsPerRun(50, func() { m.Bytes(b); m.Bytes(j); m.String(prose) }))
}

// Hostile texts, each built to make a piece of the masker look at the rest of
// the text again and again.
func TestHostileTextIsNotQuadratic(t *testing.T) {
	t.Parallel()
	m := mask.New("aaaaaa", "secret value")
	for _, piece := range []string{
		"a", "eyJ-", "eyJa.", "sk-", "sk-a", "ghp_", "wt_", "password='", `password="`, `password=\"`, "password=<", "password={", "token=/", "pwd=/",
		"://", "://a:/", "http://u:p", "-----BEGIN PRIVATE KEY-----", "-----BEGIN PRIVATE KEY-----A ", `\`, `\"`, `\\":`, "Bearer ", "Basic aaaa", "Authorization: ", "authorization:", "token=x://", "token=<a>", "token=a(", "password=a.b",
		"@tcp(", "a:@tcp(", "= ", ": ", "aaaaa", "AKIA", "AIza-", "[", "\"", `{"a":`,
	} {
		s := strings.Repeat(piece, 1<<18/len(piece))
		start := time.Now()
		m.String(s)
		require.Less(t, time.Since(start), 8*time.Second, piece)
		m.String("-----BEGIN PRIVATE KEY-----" + s)
	}
}

func FuzzMask(f *testing.F) {
	for _, secret := range byPattern {
		f.Add("the key is "+secret+" indeed", "configured")
		f.Add(`{"password":`+quoteJSON(secret)+`}`, secret)
	}
	f.Add(`{"a":"{\"password\":\"x\\\"y\"}"}`, `x"y\z12`)
	f.Add(`{"n":12345678}`, "12345678")
	f.Add(`["a\u0026b\\nc\n"]`, "0026b\\n")
	f.Fuzz(func(t *testing.T, s, secret string) {
		m := mask.New(secret)
		got := m.String(s)
		if json.Valid([]byte(s)) {
			require.True(t, json.Valid([]byte(got)), "%s\n%s", s, got)
		}
		secret = strings.TrimSpace(secret)
		if len(secret) >= 6 && !strings.Contains(secret, "*") && !json.Valid([]byte(s)) {
			require.NotContains(t, got, secret)
		}
		require.Equal(t, got, string(m.Bytes([]byte(s))))
		if got != s {
			require.True(t, m.Contains(s))
		}
	})
}

// FuzzSecretInDocument puts a secret into a document in every way that a tool
// could, and looks for it in what the document then says.
func FuzzSecretInDocument(f *testing.F) {
	f.Add("hunter2hunter2", "before ", " after")
	f.Add("pa\"ss\\wo\nrd", "\\", "\"")
	f.Add("nfoobar", "a\n", "\\n")
	f.Add("00000000", "1", "e5")
	f.Fuzz(func(t *testing.T, secret, before, after string) {
		secret = strings.TrimSpace(secret)
		if len(secret) < 6 || strings.Contains(secret, "*") || strings.ToValidUTF8(secret, "") != secret {
			t.Skip()
		}
		inner, err := json.Marshal(map[string]string{"v": before + secret + after, before: after})
		require.NoError(t, err)
		outer, err := json.Marshal([]string{before, string(inner), secret})
		require.NoError(t, err)

		var said []string
		require.NoError(t, json.Unmarshal(mask.New(secret).Bytes(outer), &said), "%s", outer)
		for _, s := range said {
			require.NotContains(t, s, secret)
		}
	})
}

// TestDocumentsKeepTheirShape builds documents from the pieces that could
// mislead the masker, in JSON inside JSON up to three levels deep.
func TestDocumentsKeepTheirShape(t *testing.T) {
	t.Parallel()
	const configured = "nu0026\"conf\\igured"
	m := mask.New(configured, "12345678", "true, false")
	pieces := []string{
		"password", "Authorization", "api_key", "token", "secret", "note", "=", ":", " ", ": ", " = ", "=>", "\"", "'", "`", "\\", "\n", "\t", "\u2028", "<", "&", "é",
		"Bearer ", "Basic ", "{", "}", "[", "]", ",", "/", "://", "@", "user:", "x", "hunter2", "n", "u0026", "${X}", "***", "12345678", "1e5",
		"-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----", "\nMIIEabcdefghijklmnop0123", "eyJ", configured,
	}
	pieces = append(pieces, byPattern...)
	text := rapid.Custom(func(t *rapid.T) string {
		return strings.Join(rapid.SliceOfN(rapid.SampledFrom(pieces), 0, 8).Draw(t, "pieces"), "")
	})
	var value func(depth int) *rapid.Generator[any]
	value = func(depth int) *rapid.Generator[any] {
		return rapid.Custom(func(t *rapid.T) any {
			switch kind := rapid.IntRange(0, 7).Draw(t, "kind"); {
			case kind == 0:
				return rapid.SampledFrom([]any{nil, true, false, 0.0, 12345678.0, -1.5, 1e21}).Draw(t, "literal")
			case kind == 1 && depth > 0:
				return rapid.SliceOfN(value(depth-1), 0, 3).Draw(t, "list")
			case kind <= 3 && depth > 0:
				return rapid.MapOfN(text, value(depth-1), 0, 3).Draw(t, "object")
			case kind == 4 && depth > 0:
				return quoteJSON(value(depth-1).Draw(t, "inner"))
			case kind == 5 && depth > 0:
				return quoteJS(value(depth-1).Draw(t, "inner"))
			}
			return text.Draw(t, "text")
		})
	}
	rapid.Check(t, func(t *rapid.T) {
		in := value(3).Draw(t, "document")
		for _, doc := range []string{quoteJSON(in), quoteJS(in)} {
			var out any
			got := m.String(doc)
			require.NoError(t, json.Unmarshal([]byte(got), &out), "%s\n%s", doc, got)
			sameShape(t, in, out)
			require.NotContains(t, got, "12345678", doc)
			for _, secret := range byPattern {
				noString(t, out, func(s string) bool { return standsIn(s, secret) }, doc)
			}
			noString(t, out, func(s string) bool { return strings.Contains(s, configured) }, doc)
		}
	})
}

// standsIn reports whether word stands in s with no part of a longer word around it.
func standsIn(s, word string) bool {
	joins := func(c byte) bool {
		return c == '-' || c == '_' || c == '.' || '0' <= c && c <= '9' || 'A' <= c|0x20 && c|0x20 <= 'z'
	}
	for from := 0; ; from++ {
		i := strings.Index(s[from:], word)
		if i < 0 {
			return false
		}
		from += i
		end := from + len(word)
		if (from == 0 || !joins(s[from-1])) && (end == len(s) || !joins(s[end])) {
			return true
		}
	}
}

func sameShape(t require.TestingT, in, out any) {
	switch in := in.(type) {
	case map[string]any:
		require.IsType(t, in, out)
		for key, value := range in {
			if o, ok := out.(map[string]any)[key]; ok && !strings.Contains(key, "***") { // else the key was masked
				sameShape(t, value, o)
			}
		}
	case []any:
		require.Len(t, out, len(in))
		for i := range in {
			sameShape(t, in[i], out.([]any)[i])
		}
	default:
		require.IsType(t, in, out)
	}
}

// noString fails for the first string in v, also in its keys and in JSON inside
// it, that is bad.
func noString(t require.TestingT, v any, bad func(string) bool, doc string) {
	switch v := v.(type) {
	case map[string]any:
		for key, value := range v {
			require.False(t, bad(key), "%s\n%s", key, doc)
			noString(t, value, bad, doc)
		}
	case []any:
		for _, value := range v {
			noString(t, value, bad, doc)
		}
	case string:
		require.False(t, bad(v), "%s\n%s", v, doc)
		var inner any
		if json.Unmarshal([]byte(v), &inner) == nil {
			noString(t, inner, bad, doc)
		}
	}
}

func quoteJSON(s any) string {
	b, err := json.Marshal(s)
	if err != nil {
		panic(err)
	}
	return string(b)
}

// quoteJS quotes as JavaScript does, without escaping < > &.
func quoteJS(s any) string {
	var b strings.Builder
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(s); err != nil {
		panic(err)
	}
	return strings.TrimSpace(b.String())
}

// A KiB each of what is written all the time.
var (
	prose = strings.Repeat("The worker claims a run, loads its stored steps and carries it forward until it ends or waits. "+
		"Nothing that was stored is made again: a well-known rule, and the only one that makes a crash harmless. ", 6)[:1024]
	document = func() string {
		var rows []map[string]any
		for i := range 7 {
			rows = append(rows, map[string]any{
				"run_id": "0198c1f2-7b3a-7c44-9d1e-5b6f7a8c9d0" + strconv.Itoa(i), "kind": "turn", "steps_total": 17 * i,
				"created_at": "2026-03-01T12:00:00.123Z", "note": "claimed by worker-" + strconv.Itoa(i),
			})
		}
		b, _ := json.Marshal(rows)
		return string(b)
	}()
)

func BenchmarkMask(b *testing.B) {
	secrets := make([]string, 20)
	for i := range secrets {
		secrets[i] = "configured-secret-value-" + strconv.Itoa(1000+i)
	}
	for _, bc := range []struct {
		name, text string
		masker     *mask.Masker
	}{
		{"prose", prose, mask.New()},
		{"json", document, mask.New()},
		{"prose+20secrets", prose, mask.New(secrets...)},
		{"json+20secrets", document, mask.New(secrets...)},
		{"dirty", prose[:900] + " " + openAI, mask.New(secrets...)},
		{"dirty+json", `{"note":` + quoteJSON(prose[:900]) + `,"password":"hunter2"}`, mask.New(secrets...)},
	} {
		text := []byte(bc.text)
		b.Run(bc.name, func(b *testing.B) {
			b.ReportAllocs()
			b.SetBytes(int64(len(text)))
			for b.Loop() {
				bc.masker.Bytes(text)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(len(text)), "ns/byte")
		})
	}
}
