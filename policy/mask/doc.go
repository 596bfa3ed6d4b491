// Package mask hides credentials in what weir is about to write: events, steps,
// queue arguments, errors, logs and spans (RC-150, FC-24). It works on the
// write path, in this one place, since what was stored once sits in every
// backup.
//
// Two passes look at a text. The first knows the values of the configured
// secrets and hides them wherever they stand, also inside base64, a URL or a
// JSON string. The second knows how credentials look: the prefixes of API keys,
// JWTs, PEM blocks of private keys, Authorization headers, passwords in URLs,
// and assignments to a name such as password or api_key. What only looks
// similar stays: a git SHA, a UUID, "sk-learn", "password reset", and
// placeholders such as ${API_KEY}.
//
// # Cost
//
// Masking runs on every write, and nearly every text is clean, so a clean text
// must cost next to nothing. No regular expression is used. The pattern pass
// reads each byte once, eight at a time, and looks for three bytes in a row that
// a credential cannot do without, such as the end of sk- or of password= (gram,
// in patterns.go); only there it looks closer. The pass for configured secrets
// skips ahead by up to the length of the shortest of them. Neither allocates
// unless it hides something, and neither is quadratic on hostile input.
//
// # JSON stays valid
//
// A text that is a JSON document is one afterwards, with the same structure. A
// value is replaced by ***, which needs no escaping, and never together with
// its quotes; a number, which cannot be ***, by 0. Inside a document an
// unescaped quote always ends the string that is being read, elsewhere it may
// open a value (password="x"), so the masker has to know which it reads: it asks
// json.Valid, but only once it has found something that depends on the answer.
// A cut never goes through an escape sequence.
package mask
