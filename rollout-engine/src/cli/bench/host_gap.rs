//! How long the device waits between decode steps.

use qwen3_model::Qwen3Config;
use serde::Serialize;

use super::BenchArgs;
use super::workload::{Round, prompt};
use crate::Error;
use crate::cli::CliError;
use crate::cuda_runner::CudaRunner;
use crate::request::SamplingParams;
use crate::scheduler::Scheduler;

/// New tokens of the round that is traced, at most.
const TRACED: usize = 128;
/// Steps at either end that are not counted: the first follow prompts, the last have fewer sequences.
const ENDS: usize = 4;

/// Of the decode steps of a round, by events on the device around each.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct HostGap {
    /// Steps counted.
    pub(super) steps: usize,
    /// Mean time that the device works on a step.
    pub(super) busy_ms: f64,
    /// Mean time from the end of a step to the start of the next.
    pub(super) mean_ms: f64,
    /// The longest of them.
    pub(super) longest_ms: f64,
    /// Mean gap, of gap and step together.
    pub(super) percent: f64,
}

/// A round of `prompts` prompts, traced; `None` if it is too short to tell.
pub(super) fn host_gap(
    args: &BenchArgs,
    scheduler: &mut Scheduler<CudaRunner>,
    config: &Qwen3Config,
    prompts: usize,
) -> Result<Option<HostGap>, CliError> {
    let sampling = SamplingParams {
        max_new_tokens: args.max_new_tokens.min(TRACED),
        ..args.sampling()?
    };
    // More than slots: steps with prompts would be among those traced.
    let prompts = prompts.min(scheduler.shape().max_batch_size);
    let prompts: Vec<_> = (0..prompts / args.group_size)
        .map(|i| prompt(i, args.prompt_tokens, config.vocab_size))
        .collect();
    Round::run(
        scheduler,
        &prompts,
        args.group_size,
        &sampling,
        args.seed,
        |scheduler| {
            let backend = scheduler.runner_mut().backend_mut();
            Ok(backend.trace_decode(TRACED).map_err(Error::from)?)
        },
    )?;
    let backend = scheduler.runner_mut().backend_mut();
    let spans = backend.take_decode_trace().map_err(Error::from)?;
    let Some(counted) = spans
        .get(ENDS..spans.len().saturating_sub(ENDS))
        .filter(|spans| !spans.is_empty())
    else {
        return Ok(None);
    };
    let mean = |sum: f64| sum / counted.len() as f64;
    let busy_ms = mean(counted.iter().map(|span| span.busy_ms).sum());
    let mean_ms = mean(counted.iter().map(|span| span.gap_ms).sum());
    Ok(Some(HostGap {
        steps: counted.len(),
        busy_ms,
        mean_ms,
        longest_ms: counted.iter().map(|span| span.gap_ms).fold(0.0, f64::max),
        percent: 100.0 * mean_ms / (mean_ms + busy_ms),
    }))
}
