#!/bin/sh
# Finds promtool, or installs Debian's. Without it the checks of deploy/ parse the
# alerts themselves and leave their unit tests out.
set -eu
command -v promtool >/dev/null 2>&1 && exit 0
if command -v apt-get >/dev/null 2>&1 && [ "$(id -u)" = 0 ]; then
	echo "installing promtool (Debian's package prometheus; its service is not started)" >&2
	# The package starts its server where a policy does not forbid it.
	policy=/usr/sbin/policy-rc.d
	made=
	[ -e "$policy" ] || { printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod +x "$policy" && made=yes; }
	apt-get update -qq >&2 || true
	env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends prometheus >&2 || true
	[ -z "$made" ] || rm -f "$policy"
fi
command -v promtool >/dev/null 2>&1 || echo "no promtool: the alerts' unit tests are left out" >&2
