#!/usr/bin/env bash
# What a newcomer does: clones the repository into an empty folder, with an empty home and no cargo cache, and types the
# commands of the README. Needs git, rustup's toolchain and the network; takes as long as the first build does.
#
#   scripts/newcomer.sh [REPOSITORY]      default: this one, as it is committed
set -euo pipefail
repository=${1:-$(cd "$(dirname "$0")/.." && pwd)}
# A toolchain of its own would be a download of several hundred megabytes.
toolchain=$(dirname "$(rustup which cargo)")
home=$(mktemp -d)
trap 'rm -rf "$home"' EXIT
git clone --quiet --depth 1 "file://$(realpath "$repository")" "$home/clone" 2>/dev/null || git clone --quiet --depth 1 "$repository" "$home/clone"
cd "$home/clone"
mapfile -t commands < <(awk '/^```/ { inside = ($0 == "```sh") && !inside; next } inside' README.md)
[ ${#commands[@]} -gt 0 ] || { echo "newcomer: the README has no commands" >&2; exit 1; }
for command in "${commands[@]}"; do
  echo "\$ $command"
  env -i HOME="$home" PATH="$toolchain:/usr/local/bin:/usr/bin:/bin" CARGO_TERM_COLOR=never bash -c "$command"
done
echo "newcomer: ${#commands[@]} commands of the README work in a fresh clone"
