#!/usr/bin/env bash
# Runs every fuzz target for some seconds each: scripts/fuzz.sh [SECONDS] [TARGET…]
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-20}; shift || true
targets=("$@")
[ ${#targets[@]} -gt 0 ] || mapfile -t targets < <(cargo +nightly fuzz list)
[ ${#targets[@]} -gt 0 ] || { echo "fuzz: no targets" >&2; exit 1; }
for target in "${targets[@]}"; do
  echo "--- $target, $seconds s"
  cargo +nightly fuzz run "$target" -- -max_total_time="$seconds" -verbosity=0 -print_final_stats=1
done
