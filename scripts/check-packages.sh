#!/usr/bin/env bash
# What would be published, in the order of publication: every file list must be readable, every package under the
# registry's limit of 10 MiB, and `cargo publish --dry-run` must take it. Crates of this workspace that a package needs
# are taken from the dry run itself. With --verify each package is also built from what is in it.
set -euo pipefail
cd "$(dirname "$0")/.."
verify=--no-verify
[ "${1:-}" = --verify ] && verify=
# Each after all it depends on.
crates=(cuda-graphs paged-kv block-mask lora-merge qwen3-model rollout-engine)
for crate in "${crates[@]}"; do
  list=$(cargo package --list --allow-dirty -p "$crate")
  grep -qx README.md <<<"$list" || { echo "$crate: no README.md in the package" >&2; exit 1; }
  grep -qx src/lib.rs <<<"$list" || { echo "$crate: no src/lib.rs in the package" >&2; exit 1; }
  size=$(cd "$crate" && printf '%s\n' "$list" | grep -vE '^(Cargo.toml.orig|Cargo.lock|.cargo_vcs_info.json)$' | tar czf - -T - 2>/dev/null | wc -c)
  printf '%-16s %4d files %9d bytes compressed\n' "$crate" "$(printf '%s\n' "$list" | wc -l)" "$size"
  [ "$size" -lt 10485760 ] || { echo "$crate: over 10 MiB" >&2; exit 1; }
done
cargo publish --dry-run --allow-dirty ${verify:+"$verify"} $(printf -- '-p %s ' "${crates[@]}")
