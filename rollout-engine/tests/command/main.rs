//! The `rollout` command from outside: what it writes, and how it takes broken input.

mod adapters;
// `bench` and `tune` are part of builds with GPU support; nothing here needs a GPU.
#[cfg(feature = "cuda")]
mod bench;
mod common;
mod errors;
mod files;
mod generate;
mod interruption;
mod plot;
mod quantize;
mod sampling;
mod telemetry;
#[cfg(feature = "cuda")]
mod tune;
