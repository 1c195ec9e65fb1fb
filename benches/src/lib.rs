//! Criterion benchmarks of the crates.
