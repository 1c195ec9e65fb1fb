#!/usr/bin/env bash
# Builds and runs every example that needs no GPU. Those that need one say so in one line and exit 0 without it.
set -euo pipefail
cd "$(dirname "$0")/.."
# Short programs: what does not fit belongs into a crate.
awk 'FNR == 120 { print FILENAME ": 120 lines or more" > "/dev/stderr"; long = 1 } END { exit long }' examples/examples/*.rs
cargo build --quiet --release -p examples --examples
for source in examples/examples/*.rs; do
  name=$(basename "$source" .rs)
  echo "--- $name"
  # The short form of those that take a minute.
  short=()
  if grep -q -- '-- --short' "$source"; then short=(-- --short); fi
  cargo run --quiet --release -p examples --example "$name" "${short[@]}"
done
