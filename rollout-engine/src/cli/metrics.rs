//! `--metrics FILE`: what a run did and took, as one JSON object.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;

use super::CliError;
use crate::engine::Engine;
use crate::memory::peak_memory;
use crate::statistics::Statistics;

/// Times of a run besides the counters of its engine.
pub(super) struct Run {
    pub(super) prompts: usize,
    pub(super) completions: usize,
    pub(super) failed: usize,
    pub(super) interrupted: bool,
    pub(super) load: Duration,
    pub(super) generate: Duration,
}

#[derive(Serialize)]
struct Metrics<'a> {
    version: &'static str,
    model: PathBuf,
    device: String,
    prompts: usize,
    completions: usize,
    /// Prompts that were refused or failed.
    failed: usize,
    interrupted: bool,
    /// Seconds from the start to a model that is ready, with tokenizer, adapters and graphs.
    load_s: f64,
    /// Seconds from the first prompt tokenized to the last completion.
    generate_s: f64,
    new_tokens_per_s: f64,
    statistics: &'a Statistics,
    memory: Memory,
    policy: Policy,
}

/// Bytes.
#[derive(Serialize)]
struct Memory {
    weights: u64,
    adapters: u64,
    kv_cache: u64,
    /// Most that the process has held in the host's memory.
    peak_process: Option<u64>,
}

#[derive(Serialize)]
struct Policy {
    number: u64,
    sha256: String,
}

/// Writes the metrics of `run`, which `engine` has done, to `path`.
pub(super) fn write(path: &Path, model: &Path, engine: &Engine, run: &Run) -> Result<(), CliError> {
    let statistics = engine.statistics();
    let memory = crate::runner::Runner::memory(engine.runner());
    let policy = engine.policy();
    let seconds = run.generate.as_secs_f64();
    let metrics = Metrics {
        version: env!("CARGO_PKG_VERSION"),
        model: model.to_owned(),
        device: engine.scheduler().device(),
        prompts: run.prompts,
        completions: run.completions,
        failed: run.failed,
        interrupted: run.interrupted,
        load_s: run.load.as_secs_f64(),
        generate_s: seconds,
        new_tokens_per_s: statistics.new_tokens as f64 / seconds.max(1e-9),
        statistics,
        memory: Memory {
            weights: memory.weight_bytes,
            adapters: memory.adapter_bytes,
            kv_cache: memory.kv_bytes,
            peak_process: peak_memory(),
        },
        policy: Policy {
            number: policy.number,
            sha256: policy.sha256_hex(),
        },
    };
    let fail = |error: String| CliError::Failed(format!("--metrics {}: {error}", path.display()));
    let text = serde_json::to_string_pretty(&metrics).map_err(|error| fail(error.to_string()))?;
    std::fs::write(path, text + "\n").map_err(|error| fail(error.to_string()))
}
