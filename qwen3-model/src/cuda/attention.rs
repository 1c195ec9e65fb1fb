//! Attention of both kinds of steps, over the pages of each row's slot.
//!
//! Packed steps send a list of tiles with their inputs; decode steps make their work list on the
//! device, from slots and positions that a replayed graph moves on. All layers of a step share it.
//! A packed step with rows that decode has both: tiles for the chunks of prompts, a work list for those
//! rows, so that their long contexts are cut into pieces for the whole device.

use block_mask::cuda::{
    AttentionShape, DecodeArgs, DecodeAttention, DecodeLimits, DecodeOptions, Functions, PrefillArgs,
    PrefillAttention, PrefillChunk, PrefillLimits, TileOptions,
};
use cuda_graphs::{Compiler, DeviceSlice, Stream};
use half::bf16;

use super::CudaOptions;
use crate::{Qwen3Config, Result, StepPlan};

/// One layer's operands.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Operands<'a> {
    /// `[rows, q + 2 kv]`, of which the query heads come first.
    pub(crate) qkv: DeviceSlice<'a, bf16>,
    /// `[kv_heads, n_pages * page_size, head_dim]`.
    pub(crate) k: DeviceSlice<'a, bf16>,
    /// As `k`.
    pub(crate) v: DeviceSlice<'a, bf16>,
    /// `[n_slots, max_pages]`.
    pub(crate) page_table: DeviceSlice<'a, i32>,
    /// `[rows, q]`.
    pub(crate) out: DeviceSlice<'a, bf16>,
}

impl Operands<'_> {
    /// A captured graph must own what it uses.
    fn keep(&self, stream: &Stream) {
        for buffer in [self.qkv, self.k, self.v, self.out] {
            stream.keep_memory(buffer);
        }
        stream.keep_memory(self.page_table);
    }
}

#[derive(Debug)]
pub(crate) struct Attention {
    decode: DecodeAttention,
    prefill: PrefillAttention,
    /// Elements between the rows of `qkv`.
    row_stride: usize,
    chunks: Vec<PrefillChunk>,
}

impl Attention {
    pub(crate) fn new(
        stream: &Stream,
        compiler: &Compiler,
        config: &Qwen3Config,
        options: &CudaOptions,
    ) -> Result<Self> {
        let device = stream.device();
        let shape = AttentionShape {
            heads: config.n_heads,
            kv_heads: config.n_kv_heads,
            head_dim: config.head_dim,
            page_size: options.page_size,
            n_pages: options.n_pages,
        };
        let table = options.page_table();
        let (n_slots, max_pages_per_slot) = (table.n_slots, table.max_pages_per_slot);
        let limits = DecodeLimits {
            max_rows: options.max_batch_size,
            n_slots,
            max_pages_per_slot,
        };
        let how = DecodeOptions::for_device(device.info(), &shape);
        let decode = DecodeAttention::new(
            device,
            compiler,
            shape,
            limits,
            None,
            None,
            Functions::none(),
            how,
        )?;
        let limits = PrefillLimits {
            max_tokens: options.max_tokens,
            // A slot occurs once in a step.
            max_chunks: options.max_batch_size,
            n_slots,
            max_pages_per_slot,
        };
        let how = TileOptions::for_device(device.info());
        let prefill = PrefillAttention::new(
            device,
            compiler,
            shape,
            limits,
            None,
            None,
            Functions::none(),
            how,
        )?;
        Ok(Self {
            decode,
            prefill,
            row_stride: config.qkv_size(),
            chunks: Vec::new(),
        })
    }

    /// Sends the tiles of a packed step, but for its last `continued` chunks.
    pub(crate) fn prepare(&mut self, stream: &Stream, plan: &StepPlan<'_>, continued: usize) -> Result<()> {
        self.chunks.clear();
        let mut q_start = 0;
        let chunks = plan.chunks();
        for chunk in &chunks[..chunks.len().saturating_sub(continued)] {
            self.chunks.push(PrefillChunk {
                slot: chunk.slot,
                q_start,
                q_len: chunk.len,
                position: chunk.start,
            });
            q_start += chunk.len;
        }
        self.prefill.plan(stream, &self.chunks)?;
        Ok(())
    }

    /// Makes the work list of a decode step from `[rows]` slots and positions.
    pub(crate) fn plan_decode(
        &self,
        stream: &Stream,
        slots: DeviceSlice<'_, i32>,
        positions: DeviceSlice<'_, i32>,
    ) -> Result<()> {
        stream.keep_memory(slots);
        stream.keep_memory(positions);
        // A row sees its own position too.
        self.decode.plan(stream, slots, positions, 1)?;
        Ok(())
    }

    /// Attention of the chunks of the packed step that was prepared last.
    pub(crate) fn packed(&self, stream: &Stream, of: &Operands<'_>) -> Result<()> {
        let args = PrefillArgs {
            q: of.qkv,
            q_token_stride: self.row_stride,
            k: of.k,
            v: of.v,
            page_table: of.page_table,
            out: of.out,
            lse: None,
        };
        Ok(self.prefill.planned().run(stream, &args)?)
    }

    /// Attention of the decode step of `rows` rows that was planned last.
    pub(crate) fn decode(&self, stream: &Stream, rows: usize, of: &Operands<'_>) -> Result<()> {
        of.keep(stream);
        let args = DecodeArgs {
            q: of.qkv,
            q_row_stride: self.row_stride,
            k: of.k,
            v: of.v,
            page_table: of.page_table,
            out: of.out,
            lse: None,
        };
        Ok(self.decode.planned(rows)?.run(stream, &args)?)
    }
}
