# Sourced by the scripts beside it: where things are, and how to say and do them. Not a program.

set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=$repo/build
# shellcheck disable=SC2034 # used by the scripts that source this file
image_dir=${EPHEMERAL_IMAGE_DIR:-$build/images}

say() { printf '==> %s\n' "$*"; }

die() {
	printf '%s: %s\n' "$(basename "$0")" "$*" >&2
	exit 1
}

# need_root starts the script again as root: machines, taps and namespaces need it.
need_root() {
	if [ "$(id -u)" -eq 0 ]; then
		return
	fi
	command -v sudo >/dev/null || die "this needs root: run it as root, or install sudo"
	say "this needs root: going on with sudo"
	exec sudo --preserve-env env "PATH=$PATH" "$0" "$@"
}

need_go() {
	command -v go >/dev/null || die "this needs Go: install it (1.21 or newer fetches the version go.mod names)"
}

# build_then_root sets up and builds as the user who calls, so that the files are theirs, and goes on as root.
build_then_root() {
	need_go
	if [ -z "${EPHEMERAL_BUILT:-}" ]; then
		"$repo/scripts/setup"
		"$repo/scripts/build"
		export EPHEMERAL_BUILT=yes
	fi
	need_root "$@"
}
