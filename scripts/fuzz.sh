#!/usr/bin/env bash
# Runs every fuzz target for some seconds, all at once: scripts/fuzz.sh [SECONDS] [TARGET…]
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-20}; shift || true
targets=("$@")
[ ${#targets[@]} -gt 0 ] || mapfile -t targets < <(cargo +nightly fuzz list)
[ ${#targets[@]} -gt 0 ] || { echo "fuzz: no targets" >&2; exit 1; }
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
runs=()
for target in "${targets[@]}"; do
  cargo +nightly fuzz build "$target"
done
for target in "${targets[@]}"; do
  cargo +nightly fuzz run "$target" -- -max_total_time="$seconds" -verbosity=0 -print_final_stats=1 >"$logs/$target" 2>&1 &
  runs+=($!)
done
failed=0
for i in "${!targets[@]}"; do
  wait "${runs[i]}" || failed=1
  echo "--- ${targets[i]}, $seconds s"
  cat "$logs/${targets[i]}"
done
exit $failed
