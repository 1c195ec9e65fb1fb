#!/usr/bin/env bash
# What a newcomer does: clones the repository into an empty folder, with an empty home and no cargo cache, and types the
# commands of the README, one after the other. Needs git, curl, rustup's toolchain and the network; takes as long as the first
# build does.
#
#   scripts/newcomer.sh [REPOSITORY]      default: this one, as it is committed
#   scripts/newcomer.sh --here            the same commands in this folder, with its builds and cargo's cache (CI)
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
# A toolchain of its own would be a download of several hundred megabytes.
toolchain=$(dirname "$(rustup which cargo)")
home=$(mktemp -d)
trap 'rm -rf "$home"' EXIT
environment=(HOME="$home" PATH="$toolchain:/usr/local/bin:/usr/bin:/bin" CARGO_TERM_COLOR=never)
if [ "${1:-}" = --here ]; then
  cd "$here"
  environment+=(CARGO_HOME="${CARGO_HOME:-$HOME/.cargo}" CARGO_INCREMENTAL="${CARGO_INCREMENTAL:-1}")
  [ -z "${CARGO_TARGET_DIR:-}" ] || environment+=(CARGO_TARGET_DIR="$CARGO_TARGET_DIR")
else
  repository=${1:-$here}
  git clone --quiet --depth 1 "file://$(realpath "$repository")" "$home/clone" 2>/dev/null || git clone --quiet --depth 1 "$repository" "$home/clone"
  cd "$home/clone"
fi

# A server does not end: it must come up, answer, and end well when it is told to.
serve() {
  env -i "${environment[@]}" bash -c "exec $1" 2>"$home/server.log" &
  local server=$! url=
  while [ -z "$url" ]; do
    kill -0 "$server" 2>/dev/null || { cat "$home/server.log" >&2; return 1; }
    sleep 0.2
    url=$(sed -n 's/.* on \(http:[^,]*\),.*/\1/p' "$home/server.log")
  done
  curl --silent --show-error --fail "$url/v1/models" && echo
  kill -TERM "$server"
  wait "$server"
}

mapfile -t commands < <(awk '/^```/ { inside = ($0 == "```sh") && !inside; next } inside' README.md)
[ ${#commands[@]} -gt 0 ] || { echo "newcomer: the README has no commands" >&2; exit 1; }
for command in "${commands[@]}"; do
  echo "\$ $command"
  case $command in
    *" serve"*) serve "$command" ;;
    *) env -i "${environment[@]}" bash -c "$command" ;;
  esac
done
echo "newcomer: ${#commands[@]} commands of the README work"
