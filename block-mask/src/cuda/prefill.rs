//! Causal prefill over packed chunks of many sequences.

use cuda_graphs::{Compiler, Device, DeviceBuffer, DeviceSlice, Event, Kernel, PinnedBuffer, Stream};
use half::bf16;
use paged_kv::Slot;

use super::options::refuse_contiguous;
use super::prefill_tiles::Tiling;
use super::shape::check_scale;
use super::specs::{counting_prefill_spec, prefill_spec};
use super::{AttentionShape, CudaError, Functions, TileOptions};
use crate::launch::{self, Prefill, PrefillTile, TableShape};

/// Page-locked copies of the tile list; the host fills one while the other may still be read.
const STAGES: usize = 2;

/// What the buffers of a [`PrefillAttention`] are made for.
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
/// let limits = PrefillLimits { max_tokens: 2048, max_chunks: 64, n_slots: 65, max_pages_per_slot: 8 };
/// let options = TileOptions::for_device(device.info());
/// let attention = PrefillAttention::new(&device, &compiler, shape, limits, None, None, Functions::none(), options)?;
/// assert!(attention.options().rows_guaranteed_safe, "a token sees itself");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefillLimits {
    /// Query tokens of a step at most.
    pub max_tokens: usize,
    /// Chunks of a step at most.
    pub max_chunks: usize,
    /// Rows of the page table, slot 0 included.
    pub n_slots: usize,
    /// Entries of a row of the page table.
    pub max_pages_per_slot: usize,
}

/// Consecutive tokens of one sequence on the packed query axis. Its keys, the chunk's own included, are in the cache
/// before attention runs.
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
/// # let limits = PrefillLimits { max_tokens: 64, max_chunks: 4, n_slots: 4, max_pages_per_slot: 8 };
/// # let options = TileOptions::for_device(device.info());
/// # let mut attention = PrefillAttention::new(&device, &compiler, shape, limits, None, None, Functions::none(), options)?;
/// # let chunk = PrefillChunk { slot: Slot::new(1), q_start: 0, q_len: 3, position: 0 };
/// // Three tokens that continue a sequence of five.
/// let chunk = PrefillChunk { slot: Slot::new(2), q_start: 0, q_len: 3, position: 5 };
/// assert_eq!(attention.plan(&stream, &[chunk])?.tiles(), 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefillChunk {
    /// The sequence's slot.
    pub slot: Slot,
    /// Row of the first token on the packed axis.
    pub q_start: usize,
    /// Tokens.
    pub q_len: usize,
    /// Logical position of the first token: what the cache held before.
    pub position: usize,
}

/// Causal attention of packed chunks, first and later pieces of sequences alike, over the pages of their slots.
///
/// A chunk is cut into tiles of [`TileOptions::block_m`] rows, where a row is a token and one of the query heads that
/// share a KV head; the tiles with the longest contexts start first, and each visits the blocks of keys that its rows see
/// and no other. How a sequence is cut into chunks does not change a bit of its result.
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
/// # let limits = PrefillLimits { max_tokens: 64, max_chunks: 4, n_slots: 4, max_pages_per_slot: 8 };
/// # let options = TileOptions::for_device(device.info());
/// # let mut attention = PrefillAttention::new(&device, &compiler, shape, limits, None, None, Functions::none(), options)?;
/// # let chunk = PrefillChunk { slot: Slot::new(1), q_start: 0, q_len: 3, position: 0 };
/// let plan = attention.plan(&stream, &[chunk])?; // once per step
/// println!("{} tiles, {} blocks of keys", plan.tiles(), plan.blocks());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct PrefillAttention {
    shape: AttentionShape,
    limits: PrefillLimits,
    options: TileOptions,
    functions: Functions,
    window: Option<usize>,
    scale: f32,
    kernel: Kernel,
    tiles: DeviceBuffer<PrefillTile>,
    stages: Vec<(PinnedBuffer<PrefillTile>, Event, bool)>,
    next: usize,
    list: Vec<PrefillTile>,
    /// Of the last plan.
    planned: Planned,
}

/// What a tile list holds.
#[derive(Clone, Copy, Debug, Default)]
struct Planned {
    /// Rows of Q that its tiles reach.
    tokens: usize,
    tiles: usize,
    /// Blocks of keys that its tiles visit.
    blocks: usize,
}

/// The arguments of [`PrefillPlan::run`].
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
/// # let limits = PrefillLimits { max_tokens: 64, max_chunks: 4, n_slots: 4, max_pages_per_slot: 8 };
/// # let options = TileOptions::for_device(device.info());
/// # let mut attention = PrefillAttention::new(&device, &compiler, shape, limits, None, None, Functions::none(), options)?;
/// # let chunk = PrefillChunk { slot: Slot::new(1), q_start: 0, q_len: 3, position: 0 };
/// let plan = attention.plan(&stream, &[chunk])?;
/// let args = PrefillArgs {
///     q: q.as_slice(),
///     q_token_stride: 8 * 64,
///     k: k.as_slice(),
///     v: v.as_slice(),
///     page_table: page_table.as_slice(),
///     out: out.as_slice(),
///     lse: None,
/// };
/// plan.run(&stream, &args)?; // once per layer
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct PrefillArgs<'a> {
    /// Queries, `[tokens, heads, head_dim]`, tokens `q_token_stride` elements apart.
    pub q: DeviceSlice<'a, bf16>,
    /// At least `heads * head_dim`, a multiple of 8.
    pub q_token_stride: usize,
    /// Keys of the layer, `[kv_heads, n_pages * page_size, head_dim]`.
    pub k: DeviceSlice<'a, bf16>,
    /// Values of the layer, likewise.
    pub v: DeviceSlice<'a, bf16>,
    /// `[n_slots, max_pages_per_slot]`.
    pub page_table: DeviceSlice<'a, i32>,
    /// `[tokens, heads, head_dim]`; rows of no chunk are left as they are.
    pub out: DeviceSlice<'a, bf16>,
    /// `[tokens, heads]`: natural logarithm of each softmax's denominator.
    pub lse: Option<DeviceSlice<'a, f32>>,
}

impl PrefillAttention {
    /// Compiles the kernel and takes the buffers of the tile list.
    ///
    /// `window`: a query at `p` sees `p - window < kv`. `scale`: 1/√head_dim if `None`. The functions see the chunk's
    /// index in the step as `b`; a mask function is applied beside causality.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`], [`CudaError::OptionRefused`], [`CudaError::Cuda`]. Panics: none.
    pub fn new(
        device: &Device,
        compiler: &Compiler,
        shape: AttentionShape,
        limits: PrefillLimits,
        window: Option<usize>,
        scale: Option<f32>,
        functions: Functions,
        mut options: TileOptions,
    ) -> Result<PrefillAttention, CudaError> {
        shape.check()?;
        let scale = check_scale(scale.unwrap_or(shape.default_scale()))?;
        options.check(&shape, scale)?;
        options.check_device(device.info())?;
        options.check_rows_safe(&functions, window)?;
        refuse_contiguous(Some(options.blocks_are_contiguous))?;
        // Token 0 is in the first block and visible to every row: nothing is lost by leaving the guards out.
        if !functions.has_mask() && !functions.has_score() && window.is_none() {
            options.rows_guaranteed_safe = true;
        }
        check_shared(device, &shape, &options)?;
        let tokens = limits.max_tokens.saturating_mul(shape.group());
        let max_tiles = (tokens / options.block_m).saturating_add(limits.max_chunks);
        let kernel = compiler
            .load(device, &prefill_spec(shape.head_dim, &options, &functions))?
            .kernel(kernel_name(&options))?;
        let stages = (0..STAGES)
            .map(|_| {
                Ok((
                    PinnedBuffer::zeroed(device, max_tiles)?,
                    Event::without_timing(device)?,
                    false,
                ))
            })
            .collect::<Result<Vec<_>, CudaError>>()?;
        Ok(PrefillAttention {
            shape,
            limits,
            options,
            functions,
            window,
            scale,
            kernel,
            tiles: DeviceBuffer::zeroed(device, max_tiles)?,
            stages,
            next: 0,
            list: Vec::with_capacity(max_tiles),
            planned: Planned::default(),
        })
    }

    /// Sends the tile list of a step's chunks; shared by all layers. Does not wait, except for the list before the last.
    ///
    /// # Errors
    /// [`CudaError::TooMany`] beyond the limits or the table, [`CudaError::Cuda`]. Panics: none.
    pub fn plan(&mut self, stream: &Stream, chunks: &[PrefillChunk]) -> Result<PrefillPlan<'_>, CudaError> {
        self.planned = Planned::default();
        let limits = &self.limits;
        let max_len = limits
            .max_pages_per_slot
            .saturating_mul(self.shape.page_size)
            .min(i32::MAX as usize / 2);
        let within = |what, asked, limit| {
            if asked <= limit {
                Ok(())
            } else {
                Err(CudaError::TooMany { what, asked, limit })
            }
        };
        within("chunks of a step", chunks.len(), limits.max_chunks)?;
        let tiling = Tiling {
            group: self.shape.group(),
            block_m: self.options.block_m,
            block_n: self.options.block_n,
            window: self.window.map_or(usize::MAX, |window| window.max(1)),
        };
        let mut tokens = 0;
        self.list.clear();
        for (index, chunk) in chunks.iter().enumerate() {
            let end = chunk.q_start.saturating_add(chunk.q_len);
            within(
                "query rows of a step",
                end,
                limits.max_tokens.min(i32::MAX as usize / 16),
            )?;
            within("slot", chunk.slot.index(), limits.n_slots.saturating_sub(1))?;
            within(
                "tokens of a slot",
                chunk.position.saturating_add(chunk.q_len),
                max_len,
            )?;
            tokens = tokens.max(end);
            self.list.extend(tiling.tiles(index, *chunk));
        }
        // Overlapping chunks can name more tiles than there are rows.
        within("tiles of a step", self.list.len(), self.tiles.len())?;
        let group = self.shape.group() as i32;
        let keys = |tile: &PrefillTile| tile.position + tile.first_row / group;
        self.list.sort_by_key(|tile| std::cmp::Reverse(keys(tile)));
        let tiles = self.list.len();
        if tiles > 0 {
            let (pinned, copied, used) = &mut self.stages[self.next];
            self.next = (self.next + 1) % STAGES;
            if *used {
                copied.synchronize()?;
            }
            pinned.write(0, &self.list)?;
            stream.upload_async(self.tiles.slice(..tiles)?, pinned.slice(..tiles)?)?;
            stream.record(copied)?;
            *used = true;
        }
        self.planned = Planned {
            tokens,
            tiles,
            blocks: self.list.iter().map(|tile| tile.blocks as usize).sum(),
        };
        Ok(self.planned())
    }

    /// The plan that was made last, of no chunk before the first; for a caller that cannot hold on to what
    /// [`plan`](Self::plan) returned.
    ///
    /// Panics: none.
    pub fn planned(&self) -> PrefillPlan<'_> {
        PrefillPlan {
            attention: self,
            planned: self.planned,
        }
    }

    /// The options it was made with; `rows_guaranteed_safe` is set by itself where it is.
    pub fn options(&self) -> &TileOptions {
        &self.options
    }
}

fn kernel_name(options: &TileOptions) -> &'static str {
    match options.warpgroup_products {
        true => "prefill_wgmma",
        false => "prefill_attention",
    }
}

/// Refuses options whose tiles do not fit a block's shared memory.
pub(super) fn check_shared(
    device: &Device,
    shape: &AttentionShape,
    options: &TileOptions,
) -> Result<(), CudaError> {
    let (needed, available) = (options.shared_bytes(shape), device.info().shared_bytes_per_block);
    if needed <= available {
        return Ok(());
    }
    let why = format!("{needed} bytes of shared memory are needed, a block has {available}");
    Err(CudaError::OptionRefused {
        option: "block_m, block_n and stages",
        why,
    })
}

impl std::fmt::Debug for PrefillAttention {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PrefillAttention")
            .field("shape", &self.shape)
            .field("limits", &self.limits)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

/// A tile list on the device; see [`PrefillAttention::plan`].
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
/// # let limits = PrefillLimits { max_tokens: 64, max_chunks: 4, n_slots: 4, max_pages_per_slot: 8 };
/// # let options = TileOptions::for_device(device.info());
/// # let mut attention = PrefillAttention::new(&device, &compiler, shape, limits, None, None, Functions::none(), options)?;
/// # let chunk = PrefillChunk { slot: Slot::new(1), q_start: 0, q_len: 3, position: 0 };
/// let plan = attention.plan(&stream, &[chunk])?;
/// assert!(plan.blocks() >= plan.tiles());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct PrefillPlan<'a> {
    attention: &'a PrefillAttention,
    planned: Planned,
}

impl PrefillPlan<'_> {
    /// Tiles of the step, for one KV head.
    pub fn tiles(&self) -> usize {
        self.planned.tiles
    }

    /// Blocks of [`TileOptions::block_n`] keys that the step's tiles visit, for one KV head.
    pub fn blocks(&self) -> usize {
        self.planned.blocks
    }

    /// Attends, in one launch; does not wait.
    ///
    /// # Errors
    /// [`CudaError::Mismatch`], [`CudaError::Misaligned`], [`CudaError::Cuda`]. Panics: none.
    pub fn run(&self, stream: &Stream, args: &PrefillArgs<'_>) -> Result<(), CudaError> {
        self.launch(&self.attention.kernel, stream, args, None)
    }

    /// Attends with a form of the kernel that counts the blocks of keys that its tiles bring, all KV heads together; to be
    /// held against [`blocks`](Self::blocks) and a block mask. Compiles, and waits: for tests.
    ///
    /// # Errors
    /// As for [`run`](Self::run). Panics: none.
    pub fn count_blocks(
        &self,
        compiler: &Compiler,
        stream: &Stream,
        args: &PrefillArgs<'_>,
    ) -> Result<usize, CudaError> {
        let of = self.attention;
        let device = stream.device();
        let kernel = compiler
            .load(
                device,
                &counting_prefill_spec(of.shape.head_dim, &of.options, &of.functions),
            )?
            .kernel(kernel_name(&of.options))?;
        let visited = DeviceBuffer::<u32>::zeroed(device, 1)?;
        self.launch(&kernel, stream, args, Some(visited.as_slice()))?;
        Ok(stream.download(&visited)?[0] as usize)
    }

    fn launch(
        &self,
        kernel: &Kernel,
        stream: &Stream,
        args: &PrefillArgs<'_>,
        visited: Option<DeviceSlice<'_, u32>>,
    ) -> Result<(), CudaError> {
        let of = self.attention;
        let prefill = Prefill {
            shape: of.shape,
            tokens: self.planned.tokens,
            tiles: of.tiles.slice(..self.planned.tiles)?,
            q: args.q,
            q_token_stride: args.q_token_stride,
            k: args.k,
            v: args.v,
            page_table: args.page_table,
            table: TableShape {
                n_slots: of.limits.n_slots,
                max_pages: of.limits.max_pages_per_slot,
            },
            out: args.out,
            lse: args.lse,
            window: of.window,
            scale: of.scale,
            captures: of.functions.captures(stream),
            visited,
            threads: of.options.threads(),
            shared_bytes: of.options.shared_bytes(&of.shape) as u32,
        };
        if of.options.warpgroup_products {
            launch::prefill_wgmma(kernel, stream, &prefill, of.options.block_n)
        } else {
            launch::prefill_attention(kernel, stream, &prefill)
        }
    }
}
