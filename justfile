# `just` lists the commands; each is one line that can be typed without just.

default:
    @just --list

# Everything that CI checks
check: fmt lint doc test

fmt:
    cargo fmt --all --check

lint:
    cargo clippy --workspace --all-targets --all-features -- -D warnings

doc:
    RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --all-features

test:
    cargo test --release --workspace

# The main job, on the bundled model
generate *ARGS:
    cargo run --release --bin rollout -- generate {{ARGS}}

# Licences, sources and banned crates
deny:
    cargo deny --all-features check bans licenses sources

# Compile every kernel for every architecture (no GPU needed; fetches NVRTC from PyPI)
kernels:
    scripts/check-kernels.sh

# All tests that need an NVIDIA GPU
gpu-tests *ARGS:
    scripts/gpu-tests.sh {{ARGS}}

bench NAME *ARGS:
    cargo bench -p benches --bench {{NAME}} -- {{ARGS}}

# A short run of every fuzz target (needs cargo-fuzz and a nightly toolchain)
fuzz SECONDS="20":
    scripts/fuzz.sh {{SECONDS}}
