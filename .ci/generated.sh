#!/bin/sh
# Fails when generated code is not what its sources say.
set -eu
before=$(mktemp)
after=$(mktemp)
trap 'rm -f "$before" "$after"' EXIT
list() { find . -path ./.git -prune -o \( -name '*.gen.go' -o -path './docs/methods.md' \) -type f -print0 | sort -z | xargs -0 sha256sum; }
list >"$before"
go generate ./db ./api
list >"$after"
if ! cmp -s "$before" "$after"; then
	echo "generated code was out of date; it is now regenerated:" >&2
	diff "$before" "$after" >&2 || true
	exit 1
fi
