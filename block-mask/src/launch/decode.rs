//! The kernels of decode attention.

use bytemuck::{Pod, Zeroable};
use cuda_graphs::{DeviceSlice, Kernel, LaunchConfig, Stream};
use half::bf16;

use super::{Paging, TableShape, aligned, at_least, check_cache, check_rows, equal, here, int, paging};
use crate::cuda::{AttentionShape, CudaError};

/// Threads of the kernel decode_plan.
const PLAN_THREADS: u32 = 256;
/// `DecodeItem` in 4-byte words.
pub(crate) const ITEM_WORDS: usize = 8;
/// `SharedItem` in 4-byte words.
pub(crate) const SHARED_ITEM_WORDS: usize = 8;
/// `RowShare` in 4-byte words.
pub(crate) const SHARE_WORDS: usize = 4;
/// Parts of a shared prefix at most; in step with decode_plan.cuh.
pub(crate) const SHARED_SPLITS: usize = 8;

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct PlanParams {
    slots: u64,
    lengths: u64,
    items: u64,
    shared: u64,
    row_splits: u64,
    row_lengths: u64,
    row_shares: u64,
    n_items: u64,
    table: u64,
    max_pages: i32,
    page_shift: i32,
    shared_rows: i32,
    shared_tokens: i32,
    together: i32,
    shared_blocks: i32,
    rows: i32,
    n_slots: i32,
    max_length: i32,
    length_offset: i32,
    min_split: i32,
    max_splits: i32,
    n_classes: i32,
    window: i32,
    shares: i32,
    unused: i32,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct DecodeParams {
    q: u64,
    k: u64,
    v: u64,
    out: u64,
    lse: u64,
    items: u64,
    n_items: u64,
    shared_items: u64,
    row_splits: u64,
    row_lengths: u64,
    row_shares: u64,
    shared_arrived: u64,
    partial: u64,
    partial_sums: u64,
    arrived: u64,
    exchange: u64,
    paging: Paging,
    q_row_stride: i64,
    rows: i32,
    heads: i32,
    kv_heads: i32,
    group: i32,
    max_splits: i32,
    scale: f32,
    early: i32,
    once: i32,
    captures: u64,
}

/// Which rows are served by shared items.
#[derive(Clone, Copy)]
pub(crate) enum Sharing<'a> {
    /// None.
    Off,
    /// Neighbours with a prefix in common.
    Prefixes {
        /// `[n_slots, max_pages]`.
        page_table: DeviceSlice<'a, i32>,
        /// Rows that share one read at most, at least 1.
        max_rows: usize,
        /// Tokens of a prefix at least.
        min_tokens: usize,
    },
    /// All, neighbours with one slot together, for the kernel decode_together.
    Together {
        /// Rows of an item at most, at least 1.
        max_rows: usize,
    },
}

/// What decode_plan is given.
pub(crate) struct Plan<'a> {
    pub(crate) slots: DeviceSlice<'a, i32>,
    pub(crate) lengths: DeviceSlice<'a, i32>,
    /// `[rows * max_splits, ITEM_WORDS]`.
    pub(crate) items: DeviceSlice<'a, i32>,
    /// `[rows * SHARED_SPLITS, SHARED_ITEM_WORDS]`, or `[rows * max_splits, …]` with [`Sharing::Together`].
    pub(crate) shared_items: DeviceSlice<'a, i32>,
    /// `[rows]` or more.
    pub(crate) row_splits: DeviceSlice<'a, i32>,
    /// `[rows]` or more.
    pub(crate) row_lengths: DeviceSlice<'a, i32>,
    /// `[rows, SHARE_WORDS]` or more.
    pub(crate) row_shares: DeviceSlice<'a, i32>,
    /// Blocks of a launch over KV heads: as many parts as all prefixes together should have.
    pub(crate) shared_blocks: usize,
    /// Items, shared items.
    pub(crate) n_items: DeviceSlice<'a, i32>,
    /// What becomes a shared item.
    pub(crate) sharing: Sharing<'a>,
    pub(crate) table: TableShape,
    pub(crate) page_size: usize,
    pub(crate) length_offset: i32,
    pub(crate) min_split: usize,
    pub(crate) max_splits: usize,
    pub(crate) window: Option<usize>,
    /// Blocks of the launch over KV heads, to which all tokens may be dealt in equal shares; 0: rows are cut by their own lengths.
    pub(crate) shares: usize,
}

/// Steps of up to so many rows mark keys and values as read once in the second-level cache. Their products exchange activations and sums
/// through it; for more rows the mark itself costs more than it brings (measured on an H200).
const READ_ONCE_ROWS: usize = 64;
/// As in decode_plan.cuh.
pub(crate) const MAX_SHARES: usize = 1024;

/// Makes the work list of `slots.len()` rows.
pub(crate) fn decode_plan(kernel: &Kernel, stream: &Stream, plan: &Plan<'_>) -> Result<(), CudaError> {
    let rows = plan.slots.len();
    for (what, slice) in [
        ("slots", plan.slots),
        ("lengths", plan.lengths),
        ("items", plan.items),
        ("shared items", plan.shared_items),
        ("splits of rows", plan.row_splits),
        ("lengths of rows", plan.row_lengths),
        ("what rows share", plan.row_shares),
        ("item count", plan.n_items),
    ] {
        here(kernel, stream, what, slice)?;
    }
    equal("lengths", rows, plan.lengths.len())?;
    equal("item count", 2, plan.n_items.len())?;
    at_least("splits of rows", rows, plan.row_splits.len())?;
    at_least("lengths of rows", rows, plan.row_lengths.len())?;
    at_least(
        "what rows share",
        rows.saturating_mul(SHARE_WORDS),
        plan.row_shares.len(),
    )?;
    aligned("what rows share", plan.row_shares, 16)?;
    let (page_table, shared_rows, shared_tokens, shared_splits) = match plan.sharing {
        Sharing::Off => (None, 1, 1, 0),
        Sharing::Prefixes {
            page_table,
            max_rows,
            min_tokens,
        } => (Some(page_table), max_rows, min_tokens, SHARED_SPLITS),
        Sharing::Together { max_rows } => (None, max_rows, 1, plan.max_splits),
    };
    at_least(
        "shared items",
        rows.saturating_mul(shared_splits)
            .saturating_mul(SHARED_ITEM_WORDS),
        plan.shared_items.len(),
    )?;
    aligned("shared items", plan.shared_items, 16)?;
    if let Some(table) = page_table {
        here(kernel, stream, "page table", table)?;
        equal(
            "page table",
            plan.table.n_slots.saturating_mul(plan.table.max_pages),
            table.len(),
        )?;
    }
    let together = matches!(plan.sharing, Sharing::Together { .. });
    at_least(
        "items",
        rows.saturating_mul(plan.max_splits).saturating_mul(ITEM_WORDS),
        plan.items.len(),
    )?;
    aligned("items", plan.items, 16)?;
    if plan.min_split == 0 || plan.max_splits == 0 {
        return Err(CudaError::Mismatch {
            what: "splits",
            expected: 1,
            found: 0,
        });
    }
    // Lengths are compared after an addition in the kernel, and a split may end past the longest row.
    let max_length = plan.table.max_pages.saturating_mul(plan.page_size);
    let limit = (i32::MAX / 4) as usize;
    if max_length > limit || plan.min_split > limit {
        return Err(CudaError::TooMany {
            what: "tokens of a slot",
            asked: max_length.max(plan.min_split),
            limit,
        });
    }
    if together && plan.min_split.saturating_mul(plan.max_splits) < max_length {
        return Err(CudaError::Mismatch {
            what: "splits",
            expected: max_length.div_ceil(plan.min_split),
            found: plan.max_splits,
        });
    }
    let mut n_classes = 1;
    while (plan.min_split << (n_classes - 1)).saturating_mul(plan.max_splits) < max_length {
        n_classes += 1;
    }
    let params = PlanParams {
        slots: plan.slots.ptr(),
        lengths: plan.lengths.ptr(),
        items: plan.items.ptr(),
        shared: plan.shared_items.ptr(),
        row_splits: plan.row_splits.ptr(),
        n_items: plan.n_items.ptr(),
        row_lengths: plan.row_lengths.ptr(),
        row_shares: plan.row_shares.ptr(),
        table: page_table.map_or(0, |table| table.ptr()),
        max_pages: int("pages of a slot", plan.table.max_pages)?,
        page_shift: plan.page_size.trailing_zeros() as i32,
        shared_rows: int("rows that share", shared_rows.max(1))?,
        shared_tokens: shared_tokens.clamp(1, limit) as i32,
        together: i32::from(together),
        shared_blocks: int("blocks", plan.shared_blocks.max(1))?,
        rows: int("rows", rows)?,
        n_slots: int("slots", plan.table.n_slots)?,
        max_length: max_length as i32,
        length_offset: plan.length_offset,
        min_split: plan.min_split as i32,
        max_splits: int("splits", plan.max_splits)?,
        n_classes,
        window: plan.window.map_or(0, |window| window.clamp(1, limit) as i32),
        shares: plan.shares.min(MAX_SHARES) as i32,
        unused: 0,
    };
    // SAFETY: the kernel reads `rows` slots and lengths and writes at most `rows * max_splits` items, since a row of at
    // most `max_length` tokens has no more splits in the class that it takes and a list of shares that is longer is not made, and
    // the shared items that were checked; it
    // reads the table's rows of slots below `n_slots`; all checked above.
    unsafe { kernel.launch(stream, &LaunchConfig::new(1, PLAN_THREADS), &params) }?;
    Ok(())
}

/// What decode_attention is given.
pub(crate) struct Decode<'a> {
    pub(crate) shape: AttentionShape,
    pub(crate) rows: usize,
    pub(crate) q: DeviceSlice<'a, bf16>,
    pub(crate) q_row_stride: usize,
    pub(crate) k: DeviceSlice<'a, bf16>,
    pub(crate) v: DeviceSlice<'a, bf16>,
    pub(crate) page_table: DeviceSlice<'a, i32>,
    pub(crate) table: TableShape,
    pub(crate) out: DeviceSlice<'a, bf16>,
    pub(crate) lse: Option<DeviceSlice<'a, f32>>,
    pub(crate) items: DeviceSlice<'a, i32>,
    pub(crate) n_items: DeviceSlice<'a, i32>,
    pub(crate) shared_items: DeviceSlice<'a, i32>,
    pub(crate) row_splits: DeviceSlice<'a, i32>,
    pub(crate) row_lengths: DeviceSlice<'a, i32>,
    pub(crate) row_shares: DeviceSlice<'a, i32>,
    /// `[rows, kv_heads, 2]` or more.
    pub(crate) shared_arrived: DeviceSlice<'a, u32>,
    pub(crate) partial: DeviceSlice<'a, f32>,
    pub(crate) partial_sums: DeviceSlice<'a, f32>,
    pub(crate) arrived: DeviceSlice<'a, u32>,
    /// `[blocks, group, head_dim + 4]`, all bits set between launches; for lists with shares.
    pub(crate) exchange: DeviceSlice<'a, u32>,
    pub(crate) max_splits: usize,
    pub(crate) scale: f32,
    /// See [`DecodePlan::early`](crate::cuda::DecodePlan::early).
    pub(crate) early: bool,
    pub(crate) captures: u64,
}

/// Attends for every item of the work list, by decode_attention or, for a list with [`Sharing::Together`], by decode_together.
pub(crate) fn decode_attention(
    kernel: &Kernel,
    stream: &Stream,
    config: &LaunchConfig,
    of: &Decode<'_>,
) -> Result<(), CudaError> {
    let shape = &of.shape;
    check_cache(kernel, stream, shape, of.k, of.v)?;
    let row = shape.heads * shape.head_dim;
    for (what, slice) in [("q", of.q), ("out", of.out)] {
        here(kernel, stream, what, slice)?;
    }
    check_rows("q", of.q, of.rows, row, of.q_row_stride)?;
    check_rows("out", of.out, of.rows, row, row)?;
    if let Some(lse) = of.lse {
        here(kernel, stream, "lse", lse)?;
        at_least("lse", of.rows * shape.heads, lse.len())?;
    }
    let parts = (of.rows * shape.heads).saturating_mul(of.max_splits);
    at_least(
        "partial sums",
        parts.saturating_mul(shape.head_dim),
        of.partial.len(),
    )?;
    at_least("partial maxima", parts.saturating_mul(2), of.partial_sums.len())?;
    at_least("arrival counters", of.rows * shape.kv_heads, of.arrived.len())?;
    at_least(
        "counters of shared parts",
        2 * of.rows * shape.kv_heads,
        of.shared_arrived.len(),
    )?;
    let blocks = config.grid[0] as usize;
    at_least(
        "parts of blocks",
        blocks * shape.group() * (shape.head_dim + 4),
        of.exchange.len(),
    )?;
    aligned("partial sums", of.partial, 16)?;
    aligned("partial maxima", of.partial_sums, 8)?;
    aligned("parts of blocks", of.exchange, 16)?;
    let params = DecodeParams {
        q: of.q.ptr(),
        k: of.k.ptr(),
        v: of.v.ptr(),
        out: of.out.ptr(),
        lse: of.lse.map_or(0, |lse| lse.ptr()),
        items: of.items.ptr(),
        n_items: of.n_items.ptr(),
        shared_items: of.shared_items.ptr(),
        row_splits: of.row_splits.ptr(),
        row_lengths: of.row_lengths.ptr(),
        row_shares: of.row_shares.ptr(),
        shared_arrived: of.shared_arrived.ptr(),
        partial: of.partial.ptr(),
        partial_sums: of.partial_sums.ptr(),
        arrived: of.arrived.ptr(),
        exchange: of.exchange.ptr(),
        paging: paging(kernel, stream, shape, of.page_table, of.table)?,
        q_row_stride: of.q_row_stride as i64,
        rows: int("rows", of.rows)?,
        heads: shape.heads as i32,
        kv_heads: shape.kv_heads as i32,
        group: shape.group() as i32,
        max_splits: int("splits", of.max_splits)?,
        scale: of.scale,
        early: i32::from(of.early),
        once: i32::from(of.rows <= READ_ONCE_ROWS),
        captures: of.captures,
    };
    // SAFETY: the items come from decode_plan with the same table and split counts (both are private to the object that
    // made the kernel); the kernel skips rows past `rows`, and reads only pages that the table names. Lengths and
    // alignment are checked above; `captures` is 0 or what the kernel's own functions captured.
    unsafe { kernel.launch(stream, config, &params) }?;
    Ok(())
}
