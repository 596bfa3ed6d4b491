// Package rpc frames JSON-RPC 2.0. It knows no method: a Dispatcher finds them.
//
// A message is a request or a batch of them. It is answered in two phases, so
// that the members of a batch, and the messages of a socket, take effect in
// their order although some of them wait long (RC-17, RC-17a):
//
//	x := server.Accept(ctx, body, "") // parses, and runs every member up to its Wait, in order
//	answer := x.Answer(ctx)           // runs the Waits together
//	x.Close()
//
// Server.ServeHTTP does this for POST /rpc; a socket calls Accept in its read
// loop and Answer in a goroutine if x.Waits.
//
// A message is parsed in one pass over its bytes, which stay where they are:
// ids and params are slices of the body. Accept repairs and strips in place,
// so that every handler sees params without U+0000, without lone surrogates
// (RC-18) and without members that start with an underscore.
//
// What is refused, and as what:
//
//   - invalid UTF-8, no JSON, or deeper than scan.MaxDepth: one -32700
//   - [], more than MaxBatch members, more than MaxBody bytes: one -32600
//   - a member that is no object, jsonrpc not "2.0", method not a string, id
//     neither string nor number, or one of the four named twice: -32600 for
//     this member, with id null where there is none to echo
//   - params that are no object: -32602, after the method and its scope were
//     looked at
//
// A valid request without id gets no answer at all (RC-14); what cannot be
// told to be one is answered with id null.
package rpc
