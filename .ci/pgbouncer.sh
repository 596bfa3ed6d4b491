#!/bin/sh
# Finds PgBouncer, or installs Debian's. Where neither works, the tests that go
# through it skip, and say so.
set -eu
have() { command -v pgbouncer >/dev/null 2>&1 || [ -x /usr/sbin/pgbouncer ]; }
have && exit 0
if command -v apt-get >/dev/null 2>&1; then
	as=
	if [ "$(id -u)" != 0 ]; then
		command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null && as="sudo -n" || as=none
	fi
	if [ "$as" != none ]; then
		echo "installing pgbouncer (the program only, no service)" >&2
		$as apt-get update -qq >&2 || true
		# Tests start their own; the package's service must not take a port.
		if command -v systemctl >/dev/null 2>&1; then
			$as systemctl mask pgbouncer.service >/dev/null 2>&1 || true
		fi
		$as env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends pgbouncer >&2 && have && exit 0
	fi
fi
echo "no pgbouncer found; the tests that go through it will skip" >&2
