// Package tool carries out the tool calls of a model. It decides whether a call
// is sent out at all (Catalogue.Check), makes one call (Runner.Run) and reports
// one Result. It stores nothing, retries nothing and knows no run: whether a
// failed call is made again is decided by the turn worker, by what the tool
// declares and what is stored.
//
// # What an HTTP tool is promised
//
// A call goes out once. The Idempotency-Key of a call is the same over retries
// and resumes, but only a tool that is declared idempotent may see it twice.
// net/http takes that header for leave to repeat a request by itself when a
// connection breaks, so for at_most_once tools it is spelled in a way that
// net/http does not recognise and every server does (see newRequest).
//
// # Where a call may go
//
// The model chooses addresses, for web_fetch, and names resolve to what their
// owners like, so the address is checked when it is dialled, after DNS, on every
// connection and after every redirect. There is nothing between the check and
// the connection that could change it. Proxies of the environment are not used:
// they would dial for us.
package tool
