//! Attention over the paged cache: one block mask per step, used by every layer.

use block_mask::{
    BlockMask, FlexOptions, PackedSequence, Physical, QueryView, flex_attention, paged_causal_mask,
};
use paged_kv::KvView;

use crate::{Qwen3Config, Result, StepPlan};

/// Query rows that share a visit to a block of keys.
const BLOCK_Q: usize = 64;

/// The mask of the step at hand.
#[derive(Default)]
pub(super) struct Attention {
    sequences: Vec<PackedSequence>,
    mask: Option<BlockMask<Physical>>,
    rows: usize,
}

impl Attention {
    pub(super) fn prepare(&mut self, plan: &StepPlan<'_>) -> Result<()> {
        self.sequences.clear();
        let mut row = 0;
        for chunk in plan.chunks() {
            self.sequences.push(PackedSequence {
                slot: chunk.slot,
                q_start: row,
                q_len: chunk.len,
                kv_start_pos: chunk.start,
            });
            row += chunk.len;
        }
        self.rows = row;
        self.mask = Some(paged_causal_mask(plan.table(), &self.sequences, BLOCK_Q, None)?);
        Ok(())
    }

    /// `mixed = attention(q)` for the queries in `qkv` `[rows, q + k + v]`.
    pub(super) fn run(
        &self,
        config: &Qwen3Config,
        qkv: &[f32],
        cache: KvView<'_>,
        mixed: &mut [f32],
    ) -> Result<()> {
        let Some(mask) = &self.mask else { return Ok(()) };
        let extents = [1, self.rows, config.n_heads, config.head_dim];
        let queries = QueryView::with_strides(qkv, extents, [0, config.qkv_size(), config.head_dim])?;
        flex_attention(queries, cache, mask, None, &FlexOptions::default(), mixed, None)?;
        Ok(())
    }
}
