//! Where log lines, traces and the progress of loading go.
//!
//! All three come from the spans and events that the crates emit through `tracing`:
//!
//! | span | covers |
//! |---|---|
//! | `load` | reading weights and making the engine, with `read`, `upload` (a layer), `compile` (a kernel), `capture` (a bucket) within |
//! | `prefill`, `decode` | giving one step to the device; on a CPU also computing it |
//! | `collect` | waiting for a step's tokens |
//! | `refresh` | a change of policy |
//!
//! Without `--trace`, `RUST_LOG` and a terminal nobody listens to spans, and each costs one load from memory. `rollout serve`
//! logs its warnings and errors; the other commands report theirs themselves.

use std::io::IsTerminal;
use std::path::Path;
use std::sync::LazyLock;

use indicatif::MultiProgress;
use tracing::{Metadata, level_filters::LevelFilter};
use tracing_subscriber::filter::{FilterExt, filter_fn};
use tracing_subscriber::prelude::*;

use super::CliError;
use super::progress::LoadingLayer;
use super::trace::{TraceFile, TraceLayer};

/// All bars of the process, so that they do not draw over each other.
pub(super) static BARS: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

/// The crates whose spans go into a trace.
const CRATES: [&str; 6] = [
    "paged_kv",
    "block_mask",
    "cuda_graphs",
    "lora_merge",
    "qwen3_model",
    "rollout_engine",
];

/// Starts to log to standard error what `RUST_LOG` asks for, or of this crate events of `level`, to trace into `trace`, and
/// to show the progress of loading if `progress`. To be called once; a second call, in tests, changes nothing.
pub(super) fn start(
    trace: Option<&Path>,
    level: LevelFilter,
    progress: bool,
) -> Result<Option<TraceFile>, CliError> {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(format!("rollout_engine={level}")));
    let log = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_filter(filter);
    let file = trace.map(TraceFile::create).transpose()?;
    let ours = filter_fn(|metadata: &Metadata<'_>| {
        let root = metadata.target().split("::").next().unwrap_or_default();
        CRATES.contains(&root)
    });
    let trace = file
        .clone()
        .map(|file| TraceLayer::new(file).with_filter(ours.clone().and(LevelFilter::DEBUG)));
    let loading = progress.then(|| {
        let named = filter_fn(|metadata: &Metadata<'_>| {
            metadata.is_span() && LoadingLayer::SPANS.contains(&metadata.name())
        });
        LoadingLayer::default().with_filter(ours.and(named))
    });
    let _ = tracing_subscriber::registry()
        .with(log)
        .with(trace)
        .with(loading)
        .try_init();
    Ok(file)
}
