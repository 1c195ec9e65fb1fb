//! The merge kernels and their safe launches: the one module with `unsafe`.
#![allow(unsafe_code)]

use bytemuck::{Pod, Zeroable};
use cuda_graphs::{DeviceBuffer, DeviceSlice, Kernel, KernelSpec, LaunchConfig, Limits, Stream};
use half::bf16;

/// Columns, rows and threads of a tile; in step with the kernel.
pub(crate) const TILE_COLUMNS: usize = 128;
const TILE_ROWS: usize = 64;
const THREADS: u32 = 128;
/// Rows of one block: its right factors stay in shared memory for that long.
const ROWS_PER_ITEM: usize = 512;
/// Shared memory that the kernel has besides the tiles.
const STATIC_SHARED: usize = 4096;
/// Ranks are padded to a multiple of this, per term.
pub(crate) const RANK_STEP: usize = 16;

/// Every kernel of this crate, for compiling ahead and for tests without a GPU.
pub fn kernel_specs() -> Vec<KernelSpec> {
    // 168 registers let three blocks share a multiprocessor; a few loop-invariant values are kept in local memory.
    let merge = Limits {
        spill_bytes: 128,
        stack_bytes: 64,
        ..Limits::registers(168)
    };
    vec![
        KernelSpec::new("merge", include_str!("../kernels/merge.cu"))
            .entry("merge_split", merge)
            .entry("merge_bf16", merge)
            .entry("dora_rows", Limits::registers(48)),
    ]
}

/// A low-rank term as the kernel reads it.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Term {
    pub(crate) scale: f64,
    pub(crate) row_scale: u64,
    pub(crate) first: u32,
    pub(crate) rank: u32,
}

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct Matrix {
    w0: u64,
    out: u64,
    left: u64,
    right: u64,
    terms: u64,
    gain: u64,
    rows: u32,
    columns: u32,
    rank: u32,
    n_terms: u32,
    first_item: u32,
    padding: u32,
}

/// What the kernel found out about one matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Report {
    pub(crate) not_finite: u64,
    pub(crate) recomputed: u64,
    pub(crate) differs: u64,
}

impl Report {
    pub(crate) const EMPTY: Self = Self {
        not_finite: u64::MAX,
        recomputed: 0,
        differs: 0,
    };
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Params {
    matrices: u64,
    reports: u64,
    n_matrices: u32,
    chunk: u32,
    rows_per_item: u32,
    padding: u32,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct DoraParams {
    w0: u64,
    left: u64,
    right: u64,
    magnitude: u64,
    row_scale: u64,
    gain: u64,
    zero_norm: u64,
    scale: f64,
    rows: u32,
    columns: u32,
    stride: u32,
    rank: u32,
    first: u32,
    padding: u32,
}

/// One matrix of a merge.
pub(crate) struct MergeArgs<'a> {
    /// `[rows, columns]`
    pub(crate) w0: DeviceSlice<'a, bf16>,
    /// `[rows, columns]`
    pub(crate) out: DeviceSlice<'a, bf16>,
    /// `[rows, rank]`
    pub(crate) left: DeviceSlice<'a, f32>,
    /// `[rank, columns]`
    pub(crate) right: DeviceSlice<'a, f32>,
    pub(crate) terms: DeviceSlice<'a, Term>,
    /// `[rows]`
    pub(crate) gain: Option<DeviceSlice<'a, f64>>,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) rank: usize,
}

impl MergeArgs<'_> {
    /// What the kernel relies on. The terms' own bounds are the caller's: see [`merge`].
    fn check(&self) -> Result<(), cuda_graphs::Error> {
        let elements = self.rows.checked_mul(self.columns);
        if elements != Some(self.w0.len()) || elements != Some(self.out.len()) || elements == Some(0) {
            return Err(refuse("the weights do not have the matrix's shape"));
        }
        if !self.columns.is_multiple_of(8) || !(self.w0.ptr() | self.out.ptr()).is_multiple_of(16) {
            return Err(refuse(
                "columns must be a multiple of 8, and weights begin at a multiple of 16 bytes",
            ));
        }
        if !self.rank.is_multiple_of(RANK_STEP)
            || self.left.len() != self.rows * self.rank
            || self.right.len() != self.rank * self.columns
            || !(self.left.ptr() | self.right.ptr()).is_multiple_of(16)
        {
            return Err(refuse("the factors do not have the matrix's shape"));
        }
        if self.terms.is_empty() || self.gain.is_some_and(|g| g.len() != self.rows) {
            return Err(refuse("a matrix needs a term, and as many gains as rows"));
        }
        if [self.rows, self.columns, self.rank]
            .iter()
            .any(|n| u32::try_from(*n).is_err())
        {
            return Err(refuse("a side of the matrix is too long"));
        }
        Ok(())
    }

    fn items(&self) -> usize {
        self.columns.div_ceil(TILE_COLUMNS) * self.rows.div_ceil(ROWS_PER_ITEM)
    }
}

fn refuse(why: &str) -> cuda_graphs::Error {
    cuda_graphs::Error::InvalidArgument {
        what: "merge kernel",
        why: why.to_owned(),
    }
}

/// Bytes of shared memory for `chunk` ranks.
fn shared_bytes(chunk: usize) -> usize {
    let left_stride = chunk + if chunk % 32 == 16 { 24 } else { 8 };
    4 * (chunk * (TILE_COLUMNS + 4) + TILE_ROWS * left_stride)
}

/// Merges all matrices in one launch. `reports` has one entry per matrix, set to [`Report::EMPTY`] before. Returns the
/// buffer of descriptors, to be kept until the launch is done.
///
/// Terms of a matrix must lie within its rank, each at a multiple of [`RANK_STEP`], in rising order, and their row
/// scalings must cover its rows; `crate::cuda` makes them so. Outputs must not overlap.
pub(crate) fn merge(
    kernel: &Kernel,
    stream: &Stream,
    matrices: &[MergeArgs<'_>],
    reports: DeviceSlice<'_, Report>,
) -> Result<DeviceBuffer<u64>, cuda_graphs::Error> {
    let mut table = Vec::with_capacity(matrices.len());
    let (mut items, mut widest) = (0usize, RANK_STEP);
    for m in matrices {
        m.check()?;
        table.push(Matrix {
            w0: m.w0.ptr(),
            out: m.out.ptr(),
            left: m.left.ptr(),
            right: m.right.ptr(),
            terms: m.terms.ptr(),
            gain: m.gain.map_or(0, |g| g.ptr()),
            rows: m.rows as u32,
            columns: m.columns as u32,
            rank: m.rank as u32,
            n_terms: m.terms.len() as u32,
            first_item: u32::try_from(items).map_err(|_| refuse("too many tiles"))?,
            padding: 0,
        });
        items += m.items();
        widest = widest.max(m.rank);
    }
    if reports.len() != matrices.len() {
        return Err(refuse("a report for each matrix is needed"));
    }
    let words: &[u64] = bytemuck::cast_slice(&table);
    let descriptors = DeviceBuffer::from_slice(stream, words)?;
    if matrices.is_empty() {
        return Ok(descriptors);
    }
    let limit = stream
        .device()
        .info()
        .shared_bytes_per_block
        .saturating_sub(STATIC_SHARED);
    let mut chunk = widest;
    while chunk > RANK_STEP && shared_bytes(chunk) > limit {
        chunk -= RANK_STEP;
    }
    let params = Params {
        matrices: descriptors.ptr(),
        reports: reports.ptr(),
        n_matrices: matrices.len() as u32,
        chunk: chunk as u32,
        rows_per_item: ROWS_PER_ITEM as u32,
        padding: 0,
    };
    let grid = u32::try_from(items).map_err(|_| refuse("too many tiles"))?;
    let config = LaunchConfig::new(grid, THREADS).dynamic_shared_bytes(shared_bytes(chunk) as u32);
    // SAFETY: every matrix's slices have the lengths that its shape implies, checked above, the terms are as described
    // above, and the tiles of the grid are those of the table. The slices are borrowed by the caller; freeing device
    // memory waits for the device.
    unsafe { kernel.launch(stream, &config, &params) }?;
    Ok(descriptors)
}

/// One DoRA term of a matrix.
pub(crate) struct DoraArgs<'a> {
    /// `[rows, columns]`
    pub(crate) w0: DeviceSlice<'a, bf16>,
    /// `[rows, rank of all terms]`
    pub(crate) left: DeviceSlice<'a, f32>,
    /// `[rank of all terms, columns]`
    pub(crate) right: DeviceSlice<'a, f32>,
    /// `[rows]`
    pub(crate) magnitude: DeviceSlice<'a, f32>,
    /// `[rows]`, written
    pub(crate) row_scale: DeviceSlice<'a, f64>,
    /// `[rows]`, written or added to
    pub(crate) gain: DeviceSlice<'a, f64>,
    /// The smallest row of norm 0
    pub(crate) zero_norm: DeviceSlice<'a, u64>,
    pub(crate) scale: f64,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) stride: usize,
    pub(crate) first_rank: usize,
    pub(crate) rank: usize,
    pub(crate) first: bool,
}

/// Computes the row factors of one DoRA term.
pub(crate) fn dora(kernel: &Kernel, stream: &Stream, args: &DoraArgs<'_>) -> Result<(), cuda_graphs::Error> {
    let per_row = [args.magnitude.len(), args.row_scale.len(), args.gain.len()];
    if args.w0.len() != args.rows * args.columns
        || args.left.len() != args.rows * args.stride
        || args.right.len() != args.stride * args.columns
        || per_row.iter().any(|n| *n != args.rows)
        || args.zero_norm.len() != 1
        || args.first_rank + args.rank > args.stride
        || args.rows == 0
        || [args.rows, args.columns, args.stride]
            .iter()
            .any(|n| u32::try_from(*n).is_err())
    {
        return Err(refuse(
            "the row factors' arguments do not have the matrix's shape",
        ));
    }
    let params = DoraParams {
        w0: args.w0.ptr(),
        left: args.left.ptr() + 4 * args.first_rank as u64,
        right: args.right.ptr() + 4 * (args.first_rank * args.columns) as u64,
        magnitude: args.magnitude.ptr(),
        row_scale: args.row_scale.ptr(),
        gain: args.gain.ptr(),
        zero_norm: args.zero_norm.ptr(),
        scale: args.scale,
        rows: args.rows as u32,
        columns: args.columns as u32,
        stride: args.stride as u32,
        rank: args.rank as u32,
        first: u32::from(args.first),
        padding: 0,
    };
    let config = LaunchConfig::new(args.rows.div_ceil(32) as u32, 256);
    // SAFETY: all slices have the lengths that the shape implies, checked above, and the term's ranks lie within the
    // stacked ones. The slices are borrowed by the caller; freeing device memory waits for the device.
    unsafe { kernel.launch(stream, &config, &params) }
}
