#!/usr/bin/env bash
# Each crate builds alone, with no feature and with each; and paged-kv alone stays light.
set -euo pipefail
cd "$(dirname "$0")/.."
for crate in paged-kv block-mask cuda-graphs lora-merge qwen3-model; do
  for features in "" cuda; do
    echo "$crate [${features:-no features}]"
    cargo check --quiet -p "$crate" --no-default-features ${features:+--features "$features"}
  done
done
for features in "" cli cuda serve cli,cuda cli,serve cli,cuda,serve; do
  echo "rollout-engine [${features:-no features}]"
  cargo check --quiet -p rollout-engine --no-default-features ${features:+--features "$features"}
done
heavy=$(cargo tree -p paged-kv -e normal --prefix none | grep -E '^(tokenizers|cudarc|cuda-graphs|libloading|rayon|serde) ' || true)
[ -z "$heavy" ] || { echo "paged-kv alone pulls in: $heavy" >&2; exit 1; }
