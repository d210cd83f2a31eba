# Sourced by the scripts beside it: where things are, and how to say and do them. Not a program.

set -euo pipefail

# What is made here is read by machines, which run as other users: whoever calls may have a stricter mask.
umask 022

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=$repo/build

# open_to_all tells whether every user can pass through the directory and those above it.
open_to_all() {
	local dir=$1
	while [ "$dir" != / ]; do
		[[ $(stat -c %A "$dir") == *[xt] ]] || return 1
		dir=$(dirname "$dir")
	done
}

# state is where images, templates and machines live: build/, unless the checkout is in a place that only its owner can
# enter (a home directory, say).
state=$build
if ! open_to_all "$repo"; then
	state=/var/lib/ephemeral-checkouts/$(printf %s "$repo" | sha256sum | head -c 16)
fi
# shellcheck disable=SC2034 # used by the scripts that source this file
image_dir=${EPHEMERAL_IMAGE_DIR:-$state/images}

say() { printf '==> %s\n' "$*"; }

die() {
	printf '%s: %s\n' "$(basename "$0")" "$*" >&2
	exit 1
}

# can_be_root ends the script where root cannot be had, before anything is built for nothing.
can_be_root() {
	[ "$(id -u)" -eq 0 ] || command -v sudo >/dev/null || die "this needs root: run it as root, or install sudo"
}

# need_root starts the script again as root: machines, taps and namespaces need it.
need_root() {
	if [ "$(id -u)" -eq 0 ]; then
		return
	fi
	can_be_root
	say "this needs root: going on with sudo"
	exec sudo --preserve-env env "PATH=$PATH" "$0" "$@"
}

need_go() {
	command -v go >/dev/null || die "this needs Go: install it (1.21 or newer fetches the version go.mod names)"
}

# build_then_root sets up and builds as the user who calls, so that the files are theirs, and goes on as root.
build_then_root() {
	can_be_root
	need_go
	if [ -z "${EPHEMERAL_BUILT:-}" ]; then
		"$repo/scripts/setup"
		"$repo/scripts/build"
		export EPHEMERAL_BUILT=yes
	fi
	need_root "$@"
}
