// Package api is the HTTP edge: JSON-RPC at POST /rpc, Agentex task RPC at the
// root, and what operators poll. It writes nothing about runs itself; it hands
// changes to package jobs and reads rows.
//
// A method is one declaration (Method) in the file of its namespace, right
// below the types of its params and result; server.go holds the table of all.
// docs/methods.md is made from it by go generate.
//
// # Who calls
//
// A token is "wt_" and 43 characters of base64url; the database has its SHA-256
// alone. What a token may do and what an agent's configuration says is
// remembered for at most half a second (cacheTTL) and forgotten at once when
// the bus says that a token or an agent changed, in this process before the
// change is answered. So a revoked token is refused, and a suspended agent
// refuses, at the next request here; in another process as soon as the
// notification is there, and after half a second when it is lost. In return
// the path that accepts a turn asks the database for neither.
//
// # Repeats
//
// A call with an idempotency key takes effect once. agent.request and
// agent.execute keep their key with the run, in the committer's transaction;
// every other method that changes something runs inside the transaction that
// holds its key (Server.once), so that a repeat on another process waits for
// the first and is answered as it was.
package api

//go:generate go test . -run TestReference -update
