//! How long a new policy takes.

use std::path::Path;

use lora_merge::{ActiveAdapter, Adapter};
use qwen3_model::{MergeMode, Qwen3Config, random_adapter};

use super::workload::median;
use crate::Error;
use crate::cli::CliError;
use crate::cuda_runner::CudaRunner;
use crate::runner::Runner;

/// Refreshes that are timed.
pub(super) const REFRESHES: usize = 5;

/// Medians over [`REFRESHES`].
#[derive(serde::Serialize)]
pub(super) struct Refresh {
    /// From adapters in host memory to the new policy.
    pub(super) total_ms: f64,
    /// Of which the pass over the weights.
    pub(super) merge_ms: f64,
}

/// Serves the adapter of a PEFT folder.
pub(super) fn serve_adapter(runner: &mut impl Runner, dir: &Path, mode: MergeMode) -> Result<(), CliError> {
    let adapter = Adapter::load(dir).map_err(Error::from)?;
    runner.set_adapters(&[ActiveAdapter::new(adapter)], mode)?;
    Ok(())
}

/// Serves a random adapter, and times refreshes between two.
pub(super) fn refresh(
    runner: &mut CudaRunner,
    config: &Qwen3Config,
    rank: usize,
    seed: u64,
    mode: MergeMode,
) -> Result<Refresh, CliError> {
    let adapter = |seed| {
        random_adapter(config, rank, seed)
            .map(ActiveAdapter::new)
            .map_err(Error::from)
    };
    let adapters = [[adapter(seed)?], [adapter(seed.wrapping_add(1))?]];
    let (mut total, mut merge) = (Vec::new(), Vec::new());
    for i in 0..=REFRESHES {
        let update = runner.set_adapters(&adapters[(i + REFRESHES) % 2], mode)?;
        // The first one takes the pristine copies and loads the kernels.
        if i > 0 {
            total.push(update.elapsed.as_secs_f64() * 1e3);
            merge.push(update.merge_elapsed.as_secs_f64() * 1e3);
        }
    }
    Ok(Refresh {
        total_ms: median(&total),
        merge_ms: median(&merge),
    })
}
