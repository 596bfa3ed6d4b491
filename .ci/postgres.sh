#!/bin/sh
# Finds Postgres server binaries, or installs Debian's. Where neither works,
# weir fetches them itself at its first start.
set -eu
have() {
	command -v postgres >/dev/null 2>&1 && command -v initdb >/dev/null 2>&1 && return 0
	for dir in /usr/lib/postgresql/*/bin /opt/homebrew/opt/postgresql*/bin /usr/local/opt/postgresql*/bin \
		/Applications/Postgres.app/Contents/Versions/latest/bin; do
		[ -x "$dir/initdb" ] && return 0
	done
	return 1
}
have && exit 0
if command -v apt-get >/dev/null 2>&1; then
	as=
	if [ "$(id -u)" != 0 ]; then
		command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null && as="sudo -n" || as=none
	fi
	if [ "$as" != none ]; then
		echo "installing postgresql (server binaries only, no cluster)" >&2
		$as apt-get update -qq >&2
		# Its own cluster is not wanted: ours is private.
		$as mkdir -p /etc/postgresql-common
		[ -e /etc/postgresql-common/createcluster.conf ] ||
			echo "create_main_cluster = false" | $as tee /etc/postgresql-common/createcluster.conf >/dev/null
		$as env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends postgresql >&2 && have && exit 0
	fi
fi
echo "no Postgres binaries found; weir will fetch them itself" >&2
