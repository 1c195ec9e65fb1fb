#!/usr/bin/env bash
# The oldest versions that Cargo.toml allows, of Rust and of every direct dependency, are enough: checks all crates with
# both at once, in a copy, so that the lock file stays. Fetches the toolchain if it is not there.
set -euo pipefail
cd "$(dirname "$0")/.."
rust=$(sed -n 's/^rust-version = "\(.*\)"$/\1/p' Cargo.toml)
toolchain=+$rust
if ! rustup toolchain list | grep -q "^$rust" && ! rustup toolchain install "$rust" --profile minimal --no-self-update; then
  echo "NOT CHECKED: Rust $rust cannot be fetched here; the oldest dependencies are checked with $(rustc --version)" >&2
  toolchain=
fi
target=${CARGO_TARGET_DIR:-$PWD/target}/oldest-versions
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
# As new files (tar's m): cargo would take a crate that was checked before for unchanged.
git ls-files -z --cached --others --exclude-standard -- ':!fixtures' ':!Cargo.lock' | tar cf - --null --ignore-failed-read -T - | tar xmf - -C "$copy"
cd "$copy"
# Stable cargo takes unstable flags with this variable; only the choice of versions uses one.
RUSTC_BOOTSTRAP=1 cargo update -Z direct-minimal-versions
CARGO_TARGET_DIR=$target cargo $toolchain check --locked --all-features \
  -p paged-kv -p block-mask -p cuda-graphs -p lora-merge -p qwen3-model -p rollout-engine
