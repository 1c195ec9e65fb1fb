//! Decode attention: one query a row.

use std::sync::Arc;

use cuda_graphs::{Compiler, Device, DeviceBuffer, DeviceSlice, Kernel, LaunchConfig, Stream};
use half::bf16;

use super::shape::check_scale;
use super::specs::{decode_plan_spec, decode_spec};
use super::{AttentionShape, CudaError, DecodeOptions, Functions};
use crate::launch::{
    self, Decode, ITEM_WORDS, Plan, SHARE_WORDS, SHARED_ITEM_WORDS, SHARED_SPLITS, Sharing, TableShape,
};

/// What the buffers of a [`DecodeAttention`] are made for.
///
/// ```no_run
/// # use block_mask::cuda::*;
/// # use block_mask::*;
/// # use cuda_graphs::{Compiler, Device, DeviceBuffer, Stream};
/// # use half::bf16;
/// # use paged_kv::{PageTable, PageTableConfig, Slot};
/// # let device = Device::open(0)?;
/// # let (stream, compiler) = (Stream::new(&device)?, Compiler::new()?);
/// # let shape = AttentionShape { heads: 8, kv_heads: 2, head_dim: 64, page_size: 16, n_pages: 9 };
/// let limits = DecodeLimits { max_rows: 64, n_slots: 65, max_pages_per_slot: 8 };
/// let options = DecodeOptions::for_device(device.info(), &shape);
/// let attention = DecodeAttention::new(&device, &compiler, shape, limits, None, None, Functions::none(), options)?;
/// let slots = DeviceBuffer::<i32>::zeroed(&device, 65)?;
/// assert!(attention.plan(&stream, slots.as_slice(), slots.as_slice(), 0).is_err(), "one row too many");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeLimits {
    /// Rows of a step at most.
    pub max_rows: usize,
    /// Rows of the page table, slot 0 included.
    pub n_slots: usize,
    /// Entries of a row of the page table.
    pub max_pages_per_slot: usize,
}

/// Attention of one query a row over its slot's pages, with slots and lengths in device memory.
///
/// ```text
/// plan(slots, lengths)     once per step: the work list, shared by all layers
/// plan_shared(…, table)    the same, with prefixes that rows have in common read once for all of them
/// run(q, k, v, …)          once per layer: splits of rows over the device, partial sums, merge in order
/// ```
///
/// With [`DecodeOptions::together`] a slot may have several rows, with different lengths: the tokens of a prompt.
///
/// Both can be captured. A row of slot 0 (padding), of a slot outside the table or of length 0 reads nothing and gives 0.
pub struct DecodeAttention {
    shape: AttentionShape,
    limits: DecodeLimits,
    options: DecodeOptions,
    functions: Functions,
    window: Option<usize>,
    scale: f32,
    plan: Kernel,
    kernel: Kernel,
    config: LaunchConfig,
    /// Splits of a row's own tokens at most.
    max_splits: usize,
    /// The same with those of a shared prefix.
    all_splits: usize,
    /// Rows that one read of a prefix serves; 0: nothing is shared.
    shared_rows: usize,
    /// Blocks that the device holds at once.
    resident_blocks: usize,
    workspace: Arc<Workspace>,
}

struct Workspace {
    items: DeviceBuffer<i32>,
    shared_items: DeviceBuffer<i32>,
    row_splits: DeviceBuffer<i32>,
    row_lengths: DeviceBuffer<i32>,
    row_shares: DeviceBuffer<i32>,
    /// Zero between launches, as `arrived`.
    shared_arrived: DeviceBuffer<u32>,
    n_items: DeviceBuffer<i32>,
    partial: DeviceBuffer<f32>,
    partial_sums: DeviceBuffer<f32>,
    /// Zero between launches: the block that completes a row resets its counter.
    arrived: DeviceBuffer<u32>,
    /// All bits set between launches: the block that takes a part out sets them.
    exchange: DeviceBuffer<u32>,
}

/// The work of a plan, for each KV head.
///
/// ```
/// use block_mask::cuda::PlannedItems;
///
/// let work = PlannedItems { own: 64, shared: 8, dealt: false };
/// assert!(work.shared > 0, "some rows share a prefix");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedItems {
    /// Splits of rows, without those of shared prefixes.
    pub own: usize,
    /// Parts of prefixes that several rows share.
    pub shared: usize,
    /// Whether all tokens are dealt to the blocks in equal shares; `own` then counts the places of the list.
    pub dealt: bool,
}

/// The arguments of [`DecodePlan::run`].
///
/// ```no_run
/// # use block_mask::cuda::*;
/// # use block_mask::*;
/// # use cuda_graphs::{Compiler, Device, DeviceBuffer, Stream};
/// # use half::bf16;
/// # use paged_kv::{PageTable, PageTableConfig, Slot};
/// # let device = Device::open(0)?;
/// # let (stream, compiler) = (Stream::new(&device)?, Compiler::new()?);
/// # let shape = AttentionShape { heads: 8, kv_heads: 2, head_dim: 64, page_size: 16, n_pages: 9 };
/// # let (q, out) = (DeviceBuffer::<bf16>::zeroed(&device, 3 * 8 * 64)?, DeviceBuffer::<bf16>::zeroed(&device, 3 * 8 * 64)?);
/// # let (k, v) = (DeviceBuffer::<bf16>::zeroed(&device, 2 * 9 * 16 * 64)?, DeviceBuffer::<bf16>::zeroed(&device, 2 * 9 * 16 * 64)?);
/// # let page_table = DeviceBuffer::<i32>::zeroed(&device, 4 * 8)?;
/// # let limits = DecodeLimits { max_rows: 4, n_slots: 4, max_pages_per_slot: 8 };
/// # let options = DecodeOptions::for_device(device.info(), &shape);
/// # let attention = DecodeAttention::new(&device, &compiler, shape, limits, None, None, Functions::none(), options)?;
/// # let slots = DeviceBuffer::from_slice(&stream, &[1i32, 2, 3])?;
/// # let lengths = DeviceBuffer::from_slice(&stream, &[5i32, 60, 17])?;
/// let plan = attention.plan(&stream, slots.as_slice(), lengths.as_slice(), 0)?;
/// let args = DecodeArgs {
///     q: q.as_slice(),
///     q_row_stride: 8 * 64,
///     k: k.as_slice(),
///     v: v.as_slice(),
///     page_table: page_table.as_slice(),
///     out: out.as_slice(),
///     lse: None,
/// };
/// plan.run(&stream, &args)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct DecodeArgs<'a> {
    /// Queries, `[rows, heads, head_dim]`, rows `q_row_stride` elements apart.
    pub q: DeviceSlice<'a, bf16>,
    /// At least `heads * head_dim`, a multiple of 8.
    pub q_row_stride: usize,
    /// Keys of the layer, `[kv_heads, n_pages * page_size, head_dim]`.
    pub k: DeviceSlice<'a, bf16>,
    /// Values of the layer, likewise.
    pub v: DeviceSlice<'a, bf16>,
    /// `[n_slots, max_pages_per_slot]`.
    pub page_table: DeviceSlice<'a, i32>,
    /// `[rows, heads, head_dim]`, overwritten.
    pub out: DeviceSlice<'a, bf16>,
    /// `[rows, heads]`, overwritten: natural logarithm of each softmax's denominator.
    pub lse: Option<DeviceSlice<'a, f32>>,
}

impl DecodeAttention {
    /// Compiles the kernels and takes the buffers: for partial sums `4 * max_rows * heads * splits * (head_dim + 2)`
    /// bytes, with `splits` the most that a row of the table's width needs.
    ///
    /// `window`: a query at `p` sees `p - window < kv`. `scale`: 1/√head_dim if `None`. The functions see the row as
    /// `b` and the position of the row's newest token as `q`.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`], [`CudaError::OptionRefused`], [`CudaError::TooMany`], [`CudaError::Cuda`].
    /// Panics: none.
    pub fn new(
        device: &Device,
        compiler: &Compiler,
        shape: AttentionShape,
        limits: DecodeLimits,
        window: Option<usize>,
        scale: Option<f32>,
        functions: Functions,
        options: DecodeOptions,
    ) -> Result<DecodeAttention, CudaError> {
        shape.check()?;
        options.check()?;
        let scale = check_scale(scale.unwrap_or(shape.default_scale()))?;
        let shared = options.shared_bytes(&shape);
        let available = device.info().shared_bytes_per_block;
        if shared > available {
            let why = format!("{shared} bytes of shared memory are needed, a block has {available}");
            return Err(CudaError::OptionRefused {
                option: "stages",
                why,
            });
        }
        let max_length = limits.max_pages_per_slot.saturating_mul(shape.page_size);
        let max_splits = max_length
            .div_ceil(options.smallest_split())
            .clamp(1, options.max_splits);
        // Functions may tell the rows of a group apart; a window starts elsewhere in each of them.
        let plain = !functions.has_mask() && !functions.has_score() && window.is_none();
        let shared_rows = match options.together {
            true => options.check_together(plain, &shape, max_length)?,
            false if plain && options.shared_prefix.is_some() => options.shared_rows(&shape),
            false => 0,
        };
        // Items for a row at most, and splits that prefixes add to its own.
        let (shared_items, more) = match (options.together, shared_rows) {
            (true, _) => (max_splits, 0),
            (false, 0) => (0, 0),
            (false, _) => (SHARED_SPLITS, SHARED_SPLITS),
        };
        let all_splits = max_splits + more;
        let parts = limits
            .max_rows
            .checked_mul(shape.heads)
            .and_then(|x| x.checked_mul(all_splits));
        let partial =
            parts
                .and_then(|parts| parts.checked_mul(shape.head_dim))
                .ok_or(CudaError::TooMany {
                    what: "rows of a step",
                    asked: limits.max_rows,
                    limit: usize::MAX / (shape.heads * all_splits * shape.head_dim),
                })?;
        let plan = compiler
            .load(device, &decode_plan_spec())?
            .kernel("decode_plan")?;
        let spec = decode_spec(&shape, &options, &functions);
        let entry = if options.together {
            "decode_together"
        } else {
            "decode_attention"
        };
        let kernel = compiler.load(device, &spec)?.kernel(entry)?;
        let threads = options.warps as u32 * 32;
        let resident = kernel.blocks_per_multiprocessor(threads, shared as u32)?.max(1);
        let most = limits
            .max_rows
            .saturating_mul(max_splits)
            .saturating_mul(shape.kv_heads)
            .max(1);
        let resident_blocks = resident * device.info().multiprocessors;
        let blocks = resident_blocks.min(u32::try_from(most).unwrap_or(u32::MAX));
        // As many for each KV head, so that tokens can be dealt in equal shares.
        let heads = u32::try_from(shape.kv_heads).unwrap_or(u32::MAX).max(1);
        let blocks = if blocks > heads {
            blocks - blocks % heads
        } else {
            blocks
        };
        let workspace = Workspace {
            items: DeviceBuffer::zeroed(device, limits.max_rows * max_splits * ITEM_WORDS)?,
            shared_items: DeviceBuffer::zeroed(device, limits.max_rows * shared_items * SHARED_ITEM_WORDS)?,
            row_splits: DeviceBuffer::zeroed(device, limits.max_rows)?,
            row_lengths: DeviceBuffer::zeroed(device, limits.max_rows)?,
            row_shares: DeviceBuffer::zeroed(device, limits.max_rows * SHARE_WORDS)?,
            shared_arrived: DeviceBuffer::zeroed(device, limits.max_rows * shape.kv_heads * 2)?,
            n_items: DeviceBuffer::zeroed(device, 2)?,
            partial: DeviceBuffer::zeroed(device, partial)?,
            partial_sums: DeviceBuffer::zeroed(device, partial / shape.head_dim * 2)?,
            arrived: DeviceBuffer::zeroed(device, limits.max_rows * shape.kv_heads)?,
            exchange: DeviceBuffer::filled_with_bytes(
                device,
                blocks as usize * shape.group() * (shape.head_dim + 4),
                0xff,
            )?,
        };
        Ok(DecodeAttention {
            shape,
            limits,
            options,
            functions,
            window,
            scale,
            plan,
            kernel,
            config: LaunchConfig::new(blocks.max(1), threads)
                .dynamic_shared_bytes(shared as u32)
                .programmatic(true),
            max_splits,
            all_splits,
            shared_rows,
            resident_blocks: resident_blocks as usize,
            workspace: Arc::new(workspace),
        })
    }

    /// Makes the work list of `slots.len()` rows: `slots[i]` and `lengths[i] + length_offset`, the tokens that row `i`
    /// sees (1 for `length_offset` when `lengths` holds the position of each row's newest token).
    ///
    /// The list is used by every later [`DecodePlan::run`] of this object on the same stream, until the next plan; runs of
    /// a plan for another number of rows are safe but wrong.
    ///
    /// # Errors
    /// [`CudaError::TooMany`], [`CudaError::Mismatch`], [`CudaError::Cuda`]. Panics: none.
    pub fn plan(
        &self,
        stream: &Stream,
        slots: DeviceSlice<'_, i32>,
        lengths: DeviceSlice<'_, i32>,
        length_offset: i32,
    ) -> Result<DecodePlan<'_>, CudaError> {
        self.plan_rows(stream, slots, lengths, length_offset, Sharing::Off)
    }

    /// As [`plan`](Self::plan), and finds neighbouring rows whose rows of `page_table` (`[n_slots, max_pages_per_slot]`) start
    /// with the same pages: their common prefix is then read once for up to [`DecodeOptions::shared_rows`] of them, and
    /// combined with each row's own part through the softmaxes' maxima and sums. Nothing is shared where
    /// [`DecodeOptions::shared_prefix`] says so, with functions or a window, or in steps of more than 1,024 rows.
    ///
    /// A row's bits then depend on the length of the prefix that it shares, and so on its neighbours.
    ///
    /// # Errors
    /// As [`plan`](Self::plan). Panics: none.
    pub fn plan_shared(
        &self,
        stream: &Stream,
        slots: DeviceSlice<'_, i32>,
        lengths: DeviceSlice<'_, i32>,
        length_offset: i32,
        page_table: DeviceSlice<'_, i32>,
    ) -> Result<DecodePlan<'_>, CudaError> {
        let sharing = match self.options.shared_prefix {
            Some(min_tokens) if self.shared_rows > 0 => Sharing::Prefixes {
                page_table,
                max_rows: self.shared_rows,
                min_tokens,
            },
            _ => Sharing::Off,
        };
        self.plan_rows(stream, slots, lengths, length_offset, sharing)
    }

    fn plan_rows(
        &self,
        stream: &Stream,
        slots: DeviceSlice<'_, i32>,
        lengths: DeviceSlice<'_, i32>,
        length_offset: i32,
        sharing: Sharing<'_>,
    ) -> Result<DecodePlan<'_>, CudaError> {
        let sharing = match self.options.together {
            true => Sharing::Together {
                max_rows: self.shared_rows,
            },
            false => sharing,
        };
        let (rows, limit) = (slots.len(), self.limits.max_rows);
        if rows > limit {
            return Err(CudaError::TooMany {
                what: "rows of a step",
                asked: rows,
                limit,
            });
        }
        stream.keep(&self.workspace);
        launch::decode_plan(
            &self.plan,
            stream,
            &Plan {
                slots,
                lengths,
                items: self.workspace.items.as_slice(),
                shared_items: self.workspace.shared_items.as_slice(),
                row_splits: self.workspace.row_splits.as_slice(),
                row_lengths: self.workspace.row_lengths.as_slice(),
                row_shares: self.workspace.row_shares.as_slice(),
                shared_blocks: self.config.grid[0] as usize / self.shape.kv_heads.max(1),
                n_items: self.workspace.n_items.as_slice(),
                sharing,
                table: self.table(),
                page_size: self.shape.page_size,
                length_offset,
                min_split: self.split(rows),
                max_splits: self.max_splits,
                window: self.window,
                shares: self.shares(rows),
            },
        )?;
        Ok(DecodePlan {
            attention: self,
            rows,
            early: false,
        })
    }

    /// The plan of `rows` rows that was made last, for a caller that cannot hold on to what [`plan`](Self::plan)
    /// returned.
    ///
    /// # Errors
    /// [`CudaError::TooMany`]. Panics: none.
    pub fn planned(&self, rows: usize) -> Result<DecodePlan<'_>, CudaError> {
        let limit = self.limits.max_rows;
        if rows > limit {
            return Err(CudaError::TooMany {
                what: "rows of a step",
                asked: rows,
                limit,
            });
        }
        Ok(DecodePlan {
            attention: self,
            rows,
            early: false,
        })
    }

    /// Waits for the plan that was made last and says what it holds, for tests and reports.
    ///
    /// # Errors
    /// [`CudaError::Cuda`]. Panics: none.
    pub fn planned_items(&self, stream: &Stream) -> Result<PlannedItems, CudaError> {
        let counts = stream.download(&self.workspace.n_items)?;
        let count = |i: usize| counts.get(i).map_or(0, |&n| usize::try_from(n).unwrap_or(0));
        Ok(PlannedItems {
            own: count(0),
            shared: count(1),
            dealt: counts.get(1).is_some_and(|&n| n < 0),
        })
    }

    /// The options it was made with.
    pub fn options(&self) -> &DecodeOptions {
        &self.options
    }

    /// Tokens of a split in a step of `rows` rows: [`DecodeOptions::split`], or what is chosen in its place.
    ///
    /// Panics: none.
    pub fn split(&self, rows: usize) -> usize {
        let options = &self.options;
        options.split_for(rows, self.shape.kv_heads, self.resident_blocks)
    }

    /// Blocks of a launch.
    pub fn blocks(&self) -> u32 {
        self.config.grid[0]
    }

    /// Equal shares of all tokens that a step of `rows` rows may be dealt in; 0: none.
    fn shares(&self, rows: usize) -> usize {
        let (blocks, kv_heads) = (self.config.grid[0] as usize, self.shape.kv_heads.max(1));
        // Few rows are cut finely anyway. A block has one KV head, all of a row's are cut alike.
        let few = self.split(rows) < DecodeOptions::LARGEST_SPLIT / 2;
        match self.options.split.is_some() || self.options.together || few || !blocks.is_multiple_of(kv_heads)
        {
            true => 0,
            false => (blocks / kv_heads).min(launch::MAX_SHARES),
        }
    }

    fn table(&self) -> TableShape {
        TableShape {
            n_slots: self.limits.n_slots,
            max_pages: self.limits.max_pages_per_slot,
        }
    }
}

impl std::fmt::Debug for DecodeAttention {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DecodeAttention")
            .field("shape", &self.shape)
            .field("limits", &self.limits)
            .field("options", &self.options)
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

/// A work list on the device; see [`DecodeAttention::plan`].
///
/// ```no_run
/// # use block_mask::cuda::*;
/// # use block_mask::*;
/// # use cuda_graphs::{Compiler, Device, DeviceBuffer, Stream};
/// # use half::bf16;
/// # use paged_kv::{PageTable, PageTableConfig, Slot};
/// # let device = Device::open(0)?;
/// # let (stream, compiler) = (Stream::new(&device)?, Compiler::new()?);
/// # let shape = AttentionShape { heads: 8, kv_heads: 2, head_dim: 64, page_size: 16, n_pages: 9 };
/// # let limits = DecodeLimits { max_rows: 4, n_slots: 4, max_pages_per_slot: 8 };
/// # let options = DecodeOptions::for_device(device.info(), &shape);
/// # let attention = DecodeAttention::new(&device, &compiler, shape, limits, None, None, Functions::none(), options)?;
/// # let slots = DeviceBuffer::from_slice(&stream, &[1i32, 2, 3])?;
/// # let lengths = DeviceBuffer::from_slice(&stream, &[5i32, 60, 17])?;
/// let plan = attention.plan(&stream, slots.as_slice(), lengths.as_slice(), 0)?;
/// assert_eq!(plan.rows(), 3); // `plan.run` for each layer of the step
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct DecodePlan<'a> {
    attention: &'a DecodeAttention,
    rows: usize,
    early: bool,
}

impl DecodePlan<'_> {
    /// Rows of the step.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Launches of the plan that this returns read the first tokens of rows, but for the newest of each, before the kernels ahead in
    /// the stream have ended. For a caller who vouches that since the plan was made nothing but each row's newest token was
    /// written to the keys and values that it reads, nor anything to the page table. Queries and newest tokens may come from the
    /// kernel just ahead. Gains on devices with programmatic dependent launch, elsewhere it changes nothing.
    pub fn early(self, on: bool) -> Self {
        Self { early: on, ..self }
    }

    /// Attends, in one launch; does not wait.
    ///
    /// # Errors
    /// [`CudaError::Mismatch`], [`CudaError::Misaligned`], [`CudaError::Cuda`]. Panics: none.
    pub fn run(&self, stream: &Stream, args: &DecodeArgs<'_>) -> Result<(), CudaError> {
        if self.rows == 0 {
            return Ok(());
        }
        let of = self.attention;
        stream.keep(&of.workspace);
        let decode = Decode {
            shape: of.shape,
            rows: self.rows,
            q: args.q,
            q_row_stride: args.q_row_stride,
            k: args.k,
            v: args.v,
            page_table: args.page_table,
            table: of.table(),
            out: args.out,
            lse: args.lse,
            items: of.workspace.items.as_slice(),
            n_items: of.workspace.n_items.as_slice(),
            shared_items: of.workspace.shared_items.as_slice(),
            row_splits: of.workspace.row_splits.as_slice(),
            row_lengths: of.workspace.row_lengths.as_slice(),
            row_shares: of.workspace.row_shares.as_slice(),
            shared_arrived: of.workspace.shared_arrived.as_slice(),
            partial: of.workspace.partial.as_slice(),
            partial_sums: of.workspace.partial_sums.as_slice(),
            arrived: of.workspace.arrived.as_slice(),
            exchange: of.workspace.exchange.as_slice(),
            max_splits: of.all_splits,
            scale: of.scale,
            early: self.early,
            captures: of.functions.captures(stream),
        };
        launch::decode_attention(&of.kernel, stream, &of.config, &decode)
    }
}
