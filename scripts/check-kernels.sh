#!/usr/bin/env bash
# Compiles every kernel, in every specialisation that the engine uses, for sm_80, sm_86, sm_89, sm_90a, sm_100a and sm_120,
# prints what each needs of a multiprocessor, and checks that against the limits written beside the kernel. Needs no GPU:
# NVRTC comes from PyPI.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup-nvrtc.sh
export ROLLOUT_REQUIRE_NVRTC=1
cargo test --release -p block-mask -p paged-kv -p lora-merge -p qwen3-model -p cuda-graphs -p examples \
  kernels_compile_for_every_architecture -- --include-ignored --nocapture
