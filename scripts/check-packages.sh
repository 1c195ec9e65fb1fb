#!/usr/bin/env bash
# What would be published: every file list must be readable and every package under the registry's limit of 10 MiB.
set -euo pipefail
cd "$(dirname "$0")/.."
for crate in paged-kv block-mask cuda-graphs lora-merge qwen3-model rollout-engine; do
  list=$(cargo package --list --allow-dirty -p "$crate")
  printf '%s\n' "$list" | grep -qx README.md || { echo "$crate: no README.md in the package" >&2; exit 1; }
  printf '%s\n' "$list" | grep -q '^src/lib.rs$' || { echo "$crate: no src/lib.rs in the package" >&2; exit 1; }
  size=$(cd "$crate" && printf '%s\n' "$list" | grep -vE '^(Cargo.toml.orig|Cargo.lock|.cargo_vcs_info.json)$' | tar czf - -T - 2>/dev/null | wc -c)
  printf '%-16s %4d files %9d bytes compressed\n' "$crate" "$(printf '%s\n' "$list" | wc -l)" "$size"
  [ "$size" -lt 10485760 ] || { echo "$crate: over 10 MiB" >&2; exit 1; }
done
