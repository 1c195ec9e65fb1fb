//! A breakdown of the decode step.

use paged_kv::PageTable;
use qwen3_model::cuda::{DecodeRow, StageTime};

use super::BenchArgs;
use crate::Error;
use crate::cli::CliError;
use crate::cuda_runner::CudaRunner;

/// Times the kinds of operations of a decode step with the contexts of the middle of a run.
pub(super) fn profile(
    args: &BenchArgs,
    runner: &mut CudaRunner,
    rows: usize,
) -> Result<Vec<StageTime>, CliError> {
    let backend = runner.backend_mut();
    let options = *backend.options();
    let mut pages = PageTable::new(options.page_table()).map_err(Error::from)?;
    let mut decode = Vec::new();
    for i in 0..rows {
        let position = (64 + i * 37 % 193 + args.max_new_tokens / 2).min(options.max_seq_length - 1);
        let slot = pages.allocate_slot().map_err(Error::from)?;
        // Room for the positions that the timed replays move on by.
        let len = (position + 64).min(options.max_seq_length);
        if !pages.can_reserve(slot, len) {
            break;
        }
        let _ = pages.reserve(slot, len).map_err(Error::from)?;
        decode.push(DecodeRow::greedy(slot.index(), position));
    }
    backend.sync_pages(&mut pages).map_err(Error::from)?;
    Ok(backend.profile_decode(&decode).map_err(Error::from)?)
}
