#!/usr/bin/env bash
# Public interfaces against those of the last release (tag v*): what breaks must raise the version. Before the first
# release there is nothing to compare with.
set -euo pipefail
cd "$(dirname "$0")/.."
last=$(git describe --tags --match 'v*' --abbrev=0 2>/dev/null || true)
[ -n "$last" ] || { echo "no release yet: nothing to compare with"; exit 0; }
cargo semver-checks --version >/dev/null 2>&1 || cargo install --locked --quiet cargo-semver-checks
cargo semver-checks check-release --all-features --baseline-rev "$last" \
  -p paged-kv -p block-mask -p cuda-graphs -p lora-merge -p qwen3-model -p rollout-engine
