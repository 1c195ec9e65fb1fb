#!/usr/bin/env bash
# Each crate builds alone, with no feature and with each, and without a warning, with no feature its tests as well (clippy sees
# those of all features); and paged-kv alone stays light.
set -euo pipefail
cd "$(dirname "$0")/.."

check() { # CRATE FEATURES
  local said passed= targets=
  [ -n "$2" ] || targets=--all-targets
  echo "$1 [${2:-no features}]"
  # Warnings are looked for in what cargo says: a flag of the compiler would build all dependencies once more.
  said=$(cargo check --quiet --color never -p "$1" --no-default-features ${2:+--features "$2"} $targets 2>&1) && passed=1
  [ -z "$said" ] || printf '%s\n' "$said" >&2
  [ -n "$passed" ] && ! grep -q '^warning' <<<"$said"
}

for crate in paged-kv block-mask cuda-graphs lora-merge qwen3-model; do
  for features in "" cuda; do
    check "$crate" "$features"
  done
done
for features in "" cli cuda serve cli,cuda cli,serve cli,cuda,serve; do
  check rollout-engine "$features"
done
heavy=$(cargo tree -p paged-kv -e normal --prefix none | grep -E '^(tokenizers|cudarc|cuda-graphs|libloading|rayon|serde) ' || true)
[ -z "$heavy" ] || { echo "paged-kv alone pulls in: $heavy" >&2; exit 1; }
