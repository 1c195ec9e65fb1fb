//! Attention of both kinds of steps, over the pages of each row's slot.
//!
//! Packed steps send a list of tiles with their inputs; decode steps make their work list on the
//! device, from slots and positions that a replayed graph moves on. All layers of a step share it.
//! A packed step with rows that decode has both: tiles for the chunks of prompts, a work list for those
//! rows, so that their long contexts are cut into pieces for the whole device.
//!
//! Where nothing may depend on the batch, every row is cut at fixed positions of its sequence, and chunks of prompts go through
//! the form of the decode kernel that takes several tokens together and gives each the bits of decoding it.

use block_mask::cuda::{
    AttentionShape, CudaError, DecodeArgs, DecodeAttention, DecodeLimits, DecodeOptions, Functions,
    PrefillArgs, PrefillAttention, PrefillChunk, PrefillLimits, TileOptions,
};
use cuda_graphs::{Compiler, DeviceSlice, Stream};
use half::bf16;

use super::CudaOptions;
use crate::{Error, Qwen3Config, Result, StepPlan};

/// Refused kernel options, under the name that a user gave them by.
fn refused(options: &'static str) -> impl Fn(CudaError) -> Error {
    move |error| match error {
        CudaError::OptionRefused { option, why } => Error::Option {
            option: options,
            problem: format!("{option} is refused: {why}"),
        },
        error => error.into(),
    }
}

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

fn shape(config: &Qwen3Config, options: &CudaOptions) -> AttentionShape {
    AttentionShape {
        heads: config.n_heads,
        kv_heads: config.n_kv_heads,
        head_dim: config.head_dim,
        page_size: options.page_size,
        n_pages: options.n_pages,
    }
}

#[derive(Debug)]
pub(crate) struct Attention {
    decode: DecodeAttention,
    prefill: PrefillAttention,
    /// Whether neighbours that share pages have them read once.
    pub(crate) share_reads: bool,
    /// For chunks of prompts instead of `prefill`, where nothing may depend on the batch.
    together: Option<Together>,
    /// Elements between the rows of `qkv`.
    row_stride: usize,
    /// Of the rows of `out`.
    width: usize,
    chunks: Vec<PrefillChunk>,
}

/// Tokens of prompts with the bits that decoding gives them.
#[derive(Debug)]
struct Together {
    attention: DecodeAttention,
    /// Tokens at once: a packed step with more goes piece by piece.
    max_rows: usize,
}

/// Bytes of partial sums that decide how many rows of a packed step are attended for at once.
const PARTIAL_BYTES: usize = 256 << 20;

impl Attention {
    pub(crate) fn new(
        stream: &Stream,
        compiler: &Compiler,
        config: &Qwen3Config,
        options: &CudaOptions,
    ) -> Result<Self> {
        let device = stream.device();
        let shape = shape(config, options);
        let table = options.page_table();
        let (n_slots, max_pages_per_slot) = (table.n_slots, table.max_pages_per_slot);
        let limits = DecodeLimits {
            max_rows: options.max_batch_size,
            n_slots,
            max_pages_per_slot,
        };
        let how = DecodeOptions::for_device(device.info(), &shape)
            .with(&options.kernels.decode)
            .map_err(refused("decode_kernel_options"))?;
        let decode = DecodeAttention::new(
            device,
            compiler,
            shape,
            limits,
            None,
            None,
            Functions::none(),
            how,
        )
        .map_err(refused("decode_kernel_options"))?;
        let limits = PrefillLimits {
            max_tokens: options.max_tokens,
            // A slot occurs once in a step.
            max_chunks: options.max_batch_size,
            n_slots,
            max_pages_per_slot,
        };
        let how = TileOptions::for_prefill(device.info(), &options.kernels.prefill)
            .map_err(refused("prefill_kernel_options"))?;
        let prefill = PrefillAttention::new(
            device,
            compiler,
            shape,
            limits,
            None,
            None,
            Functions::none(),
            how,
        )
        .map_err(refused("prefill_kernel_options"))?;
        Ok(Self {
            decode,
            prefill,
            share_reads: true,
            together: None,
            row_stride: config.qkv_size(),
            width: config.q_size(),
            chunks: Vec::new(),
        })
    }

    /// From now on a row's sums depend on its own sequence alone.
    pub(crate) fn make_invariant(
        &mut self,
        stream: &Stream,
        compiler: &Compiler,
        config: &Qwen3Config,
        options: &CudaOptions,
    ) -> Result<()> {
        let device = stream.device();
        let shape = shape(config, options);
        let table = options.page_table();
        let max_length = table.max_pages_per_slot * table.page_size;
        let how = DecodeOptions::for_device(device.info(), &shape)
            .with(&options.kernels.decode)
            .map_err(refused("decode_kernel_options"))?
            .in_fixed_splits(max_length);
        let new = |max_rows, how| {
            let limits = DecodeLimits {
                max_rows,
                n_slots: table.n_slots,
                max_pages_per_slot: table.max_pages_per_slot,
            };
            let none = Functions::none();
            DecodeAttention::new(device, compiler, shape, limits, None, None, none, how)
                .map_err(refused("decode_kernel_options"))
        };
        self.decode = new(options.max_batch_size, how)?;
        let row_bytes = how.max_splits * config.n_heads * (config.head_dim + 2) * size_of::<f32>();
        let max_rows = (PARTIAL_BYTES / row_bytes.max(1)).clamp(1, options.max_tokens.max(1));
        let attention = new(max_rows, how.for_tokens_together())?;
        self.together = Some(Together { attention, max_rows });
        Ok(())
    }

    pub(crate) fn options(&self) -> (&DecodeOptions, &TileOptions) {
        (self.decode.options(), self.prefill.options())
    }

    /// Sends the tiles of a packed step, but for its last `continued` chunks.
    pub(crate) fn prepare(&mut self, stream: &Stream, plan: &StepPlan<'_>, continued: usize) -> Result<()> {
        if self.together.is_some() {
            return Ok(());
        }
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

    /// Makes the work list of a decode step from `[rows]` slots and positions. Neighbours that share pages, as siblings of a
    /// group do, have them read once if [`share_reads`](Self::share_reads) says so.
    pub(crate) fn plan_decode(
        &self,
        stream: &Stream,
        slots: DeviceSlice<'_, i32>,
        positions: DeviceSlice<'_, i32>,
        page_table: DeviceSlice<'_, i32>,
    ) -> Result<()> {
        stream.keep_memory(slots);
        stream.keep_memory(positions);
        stream.keep_memory(page_table);
        // A row sees its own position too.
        match self.share_reads {
            true => self.decode.plan_shared(stream, slots, positions, 1, page_table)?,
            false => self.decode.plan(stream, slots, positions, 1)?,
        };
        Ok(())
    }

    /// Attention of the chunks of the packed step that was prepared last, whose tokens have these slots and positions.
    /// `first_layer`: no other layer of the step was attended for.
    pub(crate) fn packed(
        &self,
        stream: &Stream,
        of: &Operands<'_>,
        [slots, positions]: [DeviceSlice<'_, i32>; 2],
        first_layer: bool,
    ) -> Result<()> {
        if let Some(together) = &self.together {
            return self.packed_together(together, stream, of, [slots, positions], first_layer);
        }
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

    fn packed_together(
        &self,
        Together { attention, max_rows }: &Together,
        stream: &Stream,
        of: &Operands<'_>,
        [slots, positions]: [DeviceSlice<'_, i32>; 2],
        first_layer: bool,
    ) -> Result<()> {
        let rows = slots.len();
        for from in (0..rows).step_by(*max_rows) {
            let to = (from + max_rows).min(rows);
            // The list of a step that is one piece is the same for all layers.
            if first_layer || rows > *max_rows {
                attention.plan(stream, slots.slice(from..to)?, positions.slice(from..to)?, 1)?;
            }
            let args = DecodeArgs {
                q: of.qkv.slice(from * self.row_stride..to * self.row_stride)?,
                q_row_stride: self.row_stride,
                k: of.k,
                v: of.v,
                page_table: of.page_table,
                out: of.out.slice(from * self.width..to * self.width)?,
                lse: None,
            };
            attention.planned(to - from)?.run(stream, &args)?;
        }
        Ok(())
    }

    /// Attention of the decode step of `rows` rows that was planned last. `early`: nothing but each row's newest token was written to
    /// the cache since the plan was made, and the plan is done.
    pub(crate) fn decode(&self, stream: &Stream, rows: usize, of: &Operands<'_>, early: bool) -> Result<()> {
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
        Ok(self.decode.planned(rows)?.early(early).run(stream, &args)?)
    }
}
