//! Attention over any block mask whose blocks are pages.

use cuda_graphs::{Compiler, Device, DeviceBuffer, DeviceSlice, Kernel, Stream};
use half::bf16;

use super::prefill::check_shared;
use super::shape::check_scale;
use super::specs::flex_spec;
use super::{AttentionShape, CudaError, Functions, TileOptions};
use crate::codegen::CudaSource;
use crate::launch::{self, Flex};
use crate::{BlockMask, MaskMod, Physical, ScoreMod};

/// A [`BlockMask<Physical>`] in device memory. Its function is compiled into the kernel, see [`FlexAttention::new`].
///
/// ```text
/// lists    [batch, heads, q_blocks]   first entry, full blocks, partial blocks
/// entries  [visited blocks]           page, logical block; the full ones of a list, then its partial ones
/// spans    [batch]                    first query row, queries, position of the first, keys
/// ```
#[derive(Debug)]
pub struct DeviceBlockMask {
    lists: DeviceBuffer<[i32; 4]>,
    entries: DeviceBuffer<[i32; 2]>,
    spans: DeviceBuffer<[i32; 4]>,
    mask_heads: usize,
    q_blocks: usize,
    block_q: usize,
    page_size: usize,
    largest_page: Option<usize>,
    packed: bool,
    q_rows: usize,
    /// Every query has an allowed key in its first block, and blocks are visited whole.
    rows_safe_up_to: usize,
    /// In every list the full blocks follow each other in the sequence and in memory, and so do the partial ones.
    contiguous: bool,
    /// What the kernel's function is held against.
    function: CudaSource,
}

/// Whether each entry is the page and the logical block after those of the entry before.
fn follow_each_other(entries: &[[i32; 2]]) -> bool {
    entries
        .windows(2)
        .all(|pair| pair[1][0] == pair[0][0] + 1 && pair[1][1] == pair[0][1] + 1)
}

impl DeviceBlockMask {
    /// Copies the lists of `mask` to the stream's device. Waits.
    ///
    /// # Errors
    /// [`CudaError::TooMany`], [`CudaError::Cuda`]. Panics: none.
    pub fn new(stream: &Stream, mask: &BlockMask<Physical>) -> Result<DeviceBlockMask, CudaError> {
        let shape = mask.shape();
        let int = |what, value: usize| {
            i32::try_from(value).map_err(|_| CudaError::TooMany {
                what,
                asked: value,
                limit: i32::MAX as usize,
            })
        };
        int("blocks of a mask", mask.n_blocks())?;
        let (mut lists, mut entries, mut spans) = (Vec::new(), Vec::new(), Vec::new());
        let (mut all_start_full, mut contiguous) = (true, true);
        for b in 0..shape.batch {
            let span = mask.queries(b).unwrap_or(crate::QuerySpan {
                row: 0,
                len: 0,
                position: 0,
            });
            spans.push([
                int("query rows", span.row.saturating_add(span.len)).map(|_| span.row as i32)?,
                int("queries", span.len)?,
                int("positions", span.position.saturating_add(span.len)).map(|_| span.position as i32)?,
                int("keys", mask.kv_len(b))?,
            ]);
            for h in 0..shape.heads {
                for r in 0..shape.q_blocks() {
                    let first = entries.len();
                    let listed = |full: bool| {
                        let of_kind = mask.blocks(b, h, r).filter(move |block| block.full == full);
                        of_kind.map(|block| [block.index as i32, block.logical as i32])
                    };
                    entries.extend(listed(true));
                    let full = entries.len() - first;
                    entries.extend(listed(false));
                    let partial = entries.len() - first - full;
                    contiguous &= follow_each_other(&entries[first..first + full])
                        && follow_each_other(&entries[first + full..]);
                    all_start_full &= full > 0 || r * shape.block_q >= span.len;
                    lists.push([first as i32, full as i32, partial as i32, 0]);
                }
            }
        }
        // A page that is visited in several pieces may have its allowed keys in a later one.
        let rows_safe_up_to = match (mask.rows_are_safe(), all_start_full) {
            (_, true) => usize::MAX,
            (true, false) => shape.block_kv,
            (false, false) => 0,
        };
        Ok(DeviceBlockMask {
            lists: DeviceBuffer::from_slice(stream, &lists)?,
            entries: DeviceBuffer::from_slice(stream, &entries)?,
            spans: DeviceBuffer::from_slice(stream, &spans)?,
            mask_heads: shape.heads,
            q_blocks: shape.q_blocks(),
            block_q: shape.block_q,
            page_size: shape.block_kv,
            largest_page: mask.largest_page(),
            packed: mask.is_packed(),
            q_rows: mask.query_rows(),
            rows_safe_up_to,
            contiguous,
            function: mask.mask_mod().to_cuda(),
        })
    }

    /// Whether a kernel that loads `block_n` keys at once may leave out the guards against rows without keys.
    fn rows_are_safe(&self, block_n: usize) -> bool {
        match self.rows_safe_up_to {
            0 => false,
            usize::MAX => true,
            page_size => page_size <= block_n,
        }
    }
}

/// Where queries and outputs lie: `[b · batch_stride + h · head_stride + row · row_stride + d]`, in elements.
///
/// ```
/// use block_mask::cuda::QueryLayout;
///
/// // [rows, heads, head_dim]
/// assert_eq!(QueryLayout::packed(8, 64), QueryLayout { batch_stride: 0, head_stride: 64, row_stride: 512 });
/// // [batch, heads, len, head_dim]
/// assert_eq!(QueryLayout::batched(8, 100, 64).head_stride, 6400);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueryLayout {
    /// Between batch rows; not used by packed masks, whose batch rows lie on one axis.
    pub batch_stride: usize,
    /// Between heads.
    pub head_stride: usize,
    /// Between queries.
    pub row_stride: usize,
}

impl QueryLayout {
    /// `[rows, heads, head_dim]`, for packed masks. The log-sum-exp is `[rows, heads]`.
    pub fn packed(heads: usize, head_dim: usize) -> QueryLayout {
        QueryLayout {
            batch_stride: 0,
            head_stride: head_dim,
            row_stride: heads * head_dim,
        }
    }

    /// `[batch, heads, len, head_dim]`. The log-sum-exp is `[batch, heads, len]`.
    pub fn batched(heads: usize, len: usize, head_dim: usize) -> QueryLayout {
        QueryLayout {
            batch_stride: heads * len * head_dim,
            head_stride: len * head_dim,
            row_stride: head_dim,
        }
    }
}

/// The arguments of [`FlexAttention::run`].
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
/// # let mut table = PageTable::new(PageTableConfig { n_pages: 9, page_size: 16, n_slots: 4, max_pages_per_slot: 8 })?;
/// # let slot = table.allocate_slot()?;
/// # let _ = table.reserve(slot, 3)?;
/// # table.advance(slot, 3)?;
/// # let sequence = PackedSequence { slot, q_start: 0, q_len: 3, kv_start_pos: 0 };
/// # let mask = BlockMask::packed(&table, &[sequence], 1, 128, MaskMod::causal())?;
/// let attention = FlexAttention::new(&stream, &compiler, shape, mask.mask_mod(), None, None, TileOptions::default())?;
/// let args = FlexArgs {
///     q: q.as_slice(),
///     out: out.as_slice(),
///     layout: QueryLayout::packed(8, 64),
///     lse: None,
///     k: k.as_slice(),
///     v: v.as_slice(),
/// };
/// attention.run(&stream, &DeviceBlockMask::new(&stream, &mask)?, &args)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct FlexArgs<'a> {
    /// Queries.
    pub q: DeviceSlice<'a, bf16>,
    /// Outputs, laid out as the queries; rows of no sequence are left as they are.
    pub out: DeviceSlice<'a, bf16>,
    /// Where queries and outputs lie.
    pub layout: QueryLayout,
    /// Natural logarithm of each softmax's denominator, contiguous: `[rows, heads]` for packed masks, else
    /// `[batch, heads, queries]`.
    pub lse: Option<DeviceSlice<'a, f32>>,
    /// Keys of the layer, `[kv_heads, n_pages * page_size, head_dim]`.
    pub k: DeviceSlice<'a, bf16>,
    /// Values of the layer, likewise.
    pub v: DeviceSlice<'a, bf16>,
}

/// `softmax(score_mod(scale · q·k)) · v` under a block mask, with one mask and one score function compiled in.
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
/// # let mut table = PageTable::new(PageTableConfig { n_pages: 9, page_size: 16, n_slots: 4, max_pages_per_slot: 8 })?;
/// # let slot = table.allocate_slot()?;
/// # let _ = table.reserve(slot, 3)?;
/// # table.advance(slot, 3)?;
/// # let sequence = PackedSequence { slot, q_start: 0, q_len: 3, kv_start_pos: 0 };
/// # let mask = BlockMask::packed(&table, &[sequence], 1, 128, MaskMod::causal())?;
/// // One kernel for all masks of this function, compiled now.
/// let attention = FlexAttention::new(&stream, &compiler, shape, mask.mask_mod(), None, None, TileOptions::default())?;
/// println!("{attention:?}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct FlexAttention {
    shape: AttentionShape,
    options: TileOptions,
    functions: Functions,
    /// Of the masks that it serves.
    function: CudaSource,
    scale: f32,
    kernel: Kernel,
}

impl FlexAttention {
    /// Compiles the kernel for masks of one function: [`BlockMask::mask_mod`] of the mask as it is given to
    /// [`DeviceBlockMask::new`]. That of a mask from lists is not the function that the lists came with, since it also
    /// speaks for full blocks that a length cuts. [`run`](Self::run) refuses masks of another function.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`], [`CudaError::OptionRefused`], [`CudaError::Cuda`]. Panics: none.
    pub fn new(
        stream: &Stream,
        compiler: &Compiler,
        shape: AttentionShape,
        mask_mod: &MaskMod,
        score_mod: Option<&ScoreMod>,
        scale: Option<f32>,
        options: TileOptions,
    ) -> Result<FlexAttention, CudaError> {
        shape.check()?;
        let device: &Device = stream.device();
        let scale = check_scale(scale.unwrap_or(shape.default_scale()))?;
        options.check(&shape, scale)?;
        if options.warpgroup_products {
            let why = "causal prefill alone has a form with them".to_owned();
            return Err(CudaError::OptionRefused {
                option: "warpgroup_products",
                why,
            });
        }
        if options.rows_guaranteed_safe && score_mod.is_some() {
            let why = "a score function can make every score −∞".to_owned();
            return Err(CudaError::OptionRefused {
                option: "rows_guaranteed_safe",
                why,
            });
        }
        check_shared(device, &shape, &options)?;
        let functions = Functions::new(stream, Some(mask_mod), score_mod)?;
        let kernel = compiler
            .load(device, &flex_spec(shape.head_dim, &options, &functions))?
            .kernel("flex_attention")?;
        Ok(FlexAttention {
            shape,
            options,
            functions,
            function: mask_mod.to_cuda(),
            scale,
            kernel,
        })
    }

    /// Attends, in one launch; does not wait.
    ///
    /// # Errors
    /// [`CudaError::OptionRefused`] when the kernel was made for rows that are guaranteed safe and `mask` is not known to
    /// have them, or for contiguous blocks and `mask` has others; [`CudaError::OtherFunction`] when the mask's function, or what it captured, is not the one that the
    /// kernel was made for; [`CudaError::Mask`] when the mask's pages are not the cache's; [`CudaError::Mismatch`],
    /// [`CudaError::Misaligned`], [`CudaError::Cuda`]. Panics: none.
    pub fn run(&self, stream: &Stream, mask: &DeviceBlockMask, args: &FlexArgs<'_>) -> Result<(), CudaError> {
        let shape = &self.shape;
        if let Some(what) = self.function.difference(&mask.function) {
            return Err(CudaError::OtherFunction { what });
        }
        if mask.page_size != shape.page_size {
            let (block_kv, page_size) = (mask.page_size, shape.page_size);
            return Err(crate::Error::PageSize { block_kv, page_size }.into());
        }
        if let Some(page) = mask.largest_page.filter(|&page| page >= shape.n_pages) {
            return Err(crate::Error::PageOutOfRange {
                page,
                n_pages: shape.n_pages,
            }
            .into());
        }
        if mask.mask_heads != 1 && mask.mask_heads != shape.heads {
            let (expected, found) = (shape.heads, mask.mask_heads);
            return Err(CudaError::Mismatch {
                what: "heads of the mask",
                expected,
                found,
            });
        }
        if self.options.rows_guaranteed_safe && !mask.rows_are_safe(self.options.block_n) {
            let why = "a row of this mask may see no key of its first block".to_owned();
            return Err(CudaError::OptionRefused {
                option: "rows_guaranteed_safe",
                why,
            });
        }
        if self.options.blocks_are_contiguous && !mask.contiguous {
            let why = "blocks of this mask do not follow each other in memory".to_owned();
            return Err(CudaError::OptionRefused {
                option: "blocks_are_contiguous",
                why,
            });
        }
        let QueryLayout {
            batch_stride,
            head_stride,
            row_stride,
        } = args.layout;
        let (heads, rows) = (shape.heads, mask.q_rows);
        let (batch_stride, lse_strides) = if mask.packed {
            (0, [0, 1, heads])
        } else {
            (batch_stride, [heads * rows, rows, 1])
        };
        let flex = Flex {
            shape: *shape,
            spans: mask.spans.as_slice(),
            lists: mask.lists.as_slice(),
            entries: mask.entries.as_slice(),
            mask_heads: mask.mask_heads,
            q_blocks: mask.q_blocks,
            block_q: mask.block_q,
            block_m: self.options.block_m,
            q: args.q,
            out: args.out,
            lse: args.lse,
            q_strides: [batch_stride, head_stride, row_stride],
            lse_strides,
            q_rows: rows,
            k: args.k,
            v: args.v,
            scale: self.scale,
            captures: self.functions.captures(stream),
            threads: self.options.threads(),
            shared_bytes: self.options.shared_bytes(shape) as u32,
        };
        launch::flex_attention(&self.kernel, stream, &flex)
    }
}

impl std::fmt::Debug for FlexAttention {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FlexAttention")
            .field("shape", &self.shape)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}
