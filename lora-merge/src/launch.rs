//! The merge kernels and their safe launches: the one module with `unsafe`.
#![allow(unsafe_code)]

mod form;

use bytemuck::{Pod, Zeroable};
use cuda_graphs::{
    Arch, Archs, DeviceInfo, DeviceSlice, Header, Kernel, KernelSpec, LaunchConfig, Limits, Stream,
};
use half::bf16;

use form::{
    DOUBTS, GROUP_REGISTERS, GROUP_ROWS, REGISTERS, TILE_COLUMNS, TILE_ROWS, block_warps, panels,
    right_bytes, scratch_parts, shared_bytes,
};
pub(crate) use form::{Form, RANK_STEP, launch_bytes, list_bytes, scratch_bytes};

/// Blocks of the kernel that works off the list of doubtful elements, per multiprocessor.
const SETTLING_BLOCKS: u32 = 8;
/// Matrices of a launch: the list has 14 bits for them.
pub(crate) const MOST_MATRICES: usize = 1 << 14;
/// Rows of one block's item, roughly: its right factors stay in shared memory for that long.
const ROWS_PER_ITEM: usize = 1024;
const ROWS_PER_GROUPS_ITEM: usize = 4096;
/// Sides of a matrix are shorter: the kernels keep a row and a column of a tile in 32 bits.
const MOST_ROWS: usize = 1 << 25;

/// Every kernel of this crate, for compiling ahead and for tests without a GPU.
pub fn kernel_specs() -> Vec<KernelSpec> {
    // 128 registers let 16 warps share a multiprocessor.
    let merge = Limits::registers(REGISTERS);
    // Few and outside the loops over ranks.
    let deep = Limits {
        spill_bytes: 96,
        stack_bytes: 48,
        ..merge
    };
    let headers = [
        (
            "merge_primitives.cuh",
            include_str!("../kernels/merge_primitives.cuh"),
        ),
        ("merge_prepare.cuh", include_str!("../kernels/merge_prepare.cuh")),
        ("merge_tile.cuh", include_str!("../kernels/merge_tile.cuh")),
    ];
    let headers = headers.map(|(name, text)| Header::new(name, text));
    let groups = Limits::registers(GROUP_REGISTERS);
    vec![
        KernelSpec::new("merge", include_str!("../kernels/merge.cu"))
            .headers(headers.clone())
            .entry("prepare", Limits::registers(128))
            .entry("merge_split", merge)
            .entry("merge_deep", deep)
            .entry("merge_whole", merge)
            .entry("merge_general", merge)
            .entry("dora_rows", Limits::registers(48)),
        KernelSpec::new("merge_wgmma", include_str!("../kernels/merge_wgmma.cu"))
            .headers(headers)
            .entry("merge_wgmma_split", groups)
            .entry("merge_wgmma_whole", groups)
            .entry("settle_doubts", Limits::registers(128))
            .archs(Archs::Only(vec![Arch::SM_90A])),
    ]
}

/// A low-rank term as the kernel reads it.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Term {
    pub(crate) scale: f64,
    pub(crate) row_scale: u64,
    pub(crate) left: u64,
    pub(crate) right: u64,
    pub(crate) unit: f32,
    pub(crate) bf16: u32,
    pub(crate) first: u32,
    pub(crate) rank: u32,
}

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct Matrix {
    w0: u64,
    out: u64,
    terms: u64,
    gain: u64,
    left: u64,
    right: u64,
    row_factors: u64,
    column_norms: u64,
    transposed: u64,
    rows: u32,
    columns: u32,
    rank: u32,
    n_terms: u32,
    parts: u32,
    first_item: u32,
    rows_per_item: u32,
    first_warp: u32,
    panels: u32,
    padding: u32,
}

/// Words of one matrix in a table.
pub(crate) const MATRIX_WORDS: usize = size_of::<Matrix>() / 8;

/// What the kernel found out about one matrix. All zeros before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Report {
    /// The complement of the smallest index of an element that is not finite; 0 if there is none.
    pub(crate) not_finite: u64,
    pub(crate) recomputed: u64,
    pub(crate) differs: u64,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Params {
    matrices: u64,
    reports: u64,
    /// The list of elements that are computed again; 0: there is none.
    doubts: u64,
    n_matrices: u32,
    n_warps: u32,
    right_bytes: u32,
    capacity: u32,
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
#[derive(Clone, Copy)]
pub(crate) struct MatrixArgs<'a> {
    /// `[rows, columns]`
    pub(crate) w0: DeviceSlice<'a, bf16>,
    /// `[rows, columns]`
    pub(crate) out: DeviceSlice<'a, bf16>,
    pub(crate) terms: DeviceSlice<'a, Term>,
    /// `[rows]`
    pub(crate) gain: Option<DeviceSlice<'a, f64>>,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) rank: usize,
}

impl MatrixArgs<'_> {
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
        if self.rank == 0 || !self.rank.is_multiple_of(RANK_STEP) {
            return Err(refuse("the rank must be a multiple of 16"));
        }
        if self.terms.is_empty() || self.gain.is_some_and(|g| g.len() != self.rows) {
            return Err(refuse("a matrix needs a term, and as many gains as rows"));
        }
        if [self.rows, self.columns, self.rank]
            .iter()
            .any(|n| *n >= MOST_ROWS)
        {
            return Err(refuse("a side of the matrix is too long"));
        }
        Ok(())
    }
}

fn refuse(why: &str) -> cuda_graphs::Error {
    cuda_graphs::Error::InvalidArgument {
        what: "merge kernel",
        why: why.to_owned(),
    }
}

/// The matrices of one launch as the kernels read them, and the launch's geometry.
pub(crate) struct Table {
    /// To be on the device before [`merge`].
    pub(crate) words: Vec<u64>,
    form: Form,
    items: usize,
    prepare_warps: usize,
    block_warps: usize,
    right_bytes: usize,
    /// Address of the list of doubtful elements, for warpgroups.
    doubts: u64,
    settling_blocks: u32,
}

/// Describes a launch. Its matrices' scratch memory is laid out one after the other in `scratch`.
pub(crate) fn table(
    matrices: &[MatrixArgs<'_>],
    form: Form,
    scratch: DeviceSlice<'_, u8>,
    device: &DeviceInfo,
) -> Result<Table, cuda_graphs::Error> {
    let mut words = Vec::with_capacity(matrices.len() * MATRIX_WORDS);
    let (mut items, mut warps, mut used, mut widest) = (0usize, 0usize, 0usize, RANK_STEP);
    for m in matrices {
        m.check()?;
        let mut place = || -> [u64; 5] {
            scratch_parts(form, m.rows, m.columns, m.rank).map(|bytes| {
                let at = scratch.ptr() + used as u64;
                used += bytes;
                at
            })
        };
        let [left, right, row_factors, column_norms, transposed] = place();
        // Items of a matrix are equally large.
        let (most, unit, panels) = match form.is_for_groups() {
            true => (ROWS_PER_GROUPS_ITEM, GROUP_ROWS, panels(m.rank)),
            false => (ROWS_PER_ITEM, TILE_ROWS, 0),
        };
        let row_items = m.rows.div_ceil(most);
        let rows_per_item = m.rows.div_ceil(row_items).next_multiple_of(unit);
        let column_tiles = m.columns.div_ceil(TILE_COLUMNS);
        let matrix = Matrix {
            w0: m.w0.ptr(),
            out: m.out.ptr(),
            terms: m.terms.ptr(),
            gain: m.gain.map_or(0, |g| g.ptr()),
            left,
            right,
            row_factors,
            column_norms,
            transposed,
            rows: m.rows as u32,
            columns: m.columns as u32,
            rank: m.rank as u32,
            n_terms: m.terms.len() as u32,
            parts: form.parts() as u32,
            first_item: u32::try_from(items).map_err(|_| refuse("too many tiles"))?,
            rows_per_item: rows_per_item as u32,
            first_warp: u32::try_from(warps).map_err(|_| refuse("too many tiles"))?,
            panels: panels as u32,
            padding: 0,
        };
        words.extend_from_slice(bytemuck::cast_slice(&[matrix]));
        items += column_tiles * m.rows.div_ceil(rows_per_item);
        warps += m.rows.div_ceil(TILE_ROWS) + 4 * column_tiles;
        widest = widest.max(m.rank);
    }
    let doubts = if form.is_for_groups() {
        scratch.ptr() + used as u64
    } else {
        0
    };
    if used + list_bytes(form) > scratch.len() {
        return Err(refuse("the scratch memory is too small"));
    }
    if matrices.len() > MOST_MATRICES {
        return Err(refuse("too many matrices for one launch"));
    }
    let right_bytes = right_bytes(form, widest);
    let block_warps = block_warps(form, right_bytes, device);
    Ok(Table {
        words,
        form,
        items,
        prepare_warps: warps,
        block_warps: block_warps.ok_or_else(|| refuse("the rank is too high for this form"))?,
        right_bytes,
        doubts,
        settling_blocks: SETTLING_BLOCKS * device.multiprocessors,
    })
}

/// The kernels that [`merge`] launches.
#[derive(Clone, Debug)]
pub(crate) struct Kernels {
    pub(crate) prepare: Kernel,
    pub(crate) split: Kernel,
    pub(crate) deep: Kernel,
    pub(crate) whole: Kernel,
    pub(crate) general: Kernel,
    /// Split and whole, and what works off their list, where there are warpgroups.
    pub(crate) groups: Option<[Kernel; 3]>,
}

/// Merges the matrices of a table, which must be on the device in `words`. `reports` has one entry per matrix.
///
/// Terms of a matrix must lie within its rank, each at a multiple of [`RANK_STEP`], in rising order; their factors must
/// have the matrix's shape, and row scalings must cover its rows; `crate::cuda` makes them so. Outputs must not overlap.
pub(crate) fn merge(
    kernels: &Kernels,
    stream: &Stream,
    table: &Table,
    words: DeviceSlice<'_, u64>,
    reports: DeviceSlice<'_, Report>,
) -> Result<(), cuda_graphs::Error> {
    let n_matrices = table.words.len() / MATRIX_WORDS;
    if words.len() != table.words.len() || reports.len() != n_matrices {
        return Err(refuse("a table and a report for each matrix are needed"));
    }
    if n_matrices == 0 {
        return Ok(());
    }
    let params = Params {
        matrices: words.ptr(),
        reports: reports.ptr(),
        n_matrices: n_matrices as u32,
        n_warps: u32::try_from(table.prepare_warps).map_err(|_| refuse("too many tiles"))?,
        right_bytes: table.right_bytes as u32,
        doubts: table.doubts,
        capacity: DOUBTS as u32,
    };
    let grid = u32::try_from(table.items).map_err(|_| refuse("too many tiles"))?;
    let prepare = LaunchConfig::new(table.prepare_warps.div_ceil(8) as u32, 256);
    let shared = shared_bytes(table.form, table.right_bytes, table.block_warps);
    let merge = LaunchConfig::new(grid, 32 * table.block_warps as u32).dynamic_shared_bytes(shared as u32);
    let groups = || {
        let groups = kernels.groups.as_ref();
        groups.ok_or_else(|| refuse("this device has no products of warpgroups"))
    };
    let kernel = match table.form {
        Form::Split => &kernels.split,
        Form::Deep => &kernels.deep,
        Form::Whole => &kernels.whole,
        Form::General => &kernels.general,
        Form::SplitGroups => &groups()?[0],
        Form::WholeGroups => &groups()?[1],
    };
    // SAFETY: every matrix's slices have the lengths that its shape implies and its part of the scratch memory is as long
    // as the kernels take it to be, both checked where the table was made; the terms are as described above, and the
    // tiles of the grids are those of the table. The slices are borrowed by the caller; freeing device memory waits for
    // the device. What one kernel writes is read by those behind it on the same stream. The list lies behind the matrices'
    // parts of the scratch memory and is as long as its capacity says.
    unsafe {
        kernels.prepare.launch(stream, &prepare, &params)?;
        kernel.launch(stream, &merge, &params)?;
        if table.form.is_for_groups() {
            let settle = LaunchConfig::new(table.settling_blocks, 256);
            groups()?[2].launch(stream, &settle, &params)?;
        }
        Ok(())
    }
}

/// One DoRA term of a matrix.
pub(crate) struct DoraArgs<'a> {
    /// `[rows, columns]`
    pub(crate) w0: DeviceSlice<'a, bf16>,
    /// `[rows, rank]`
    pub(crate) left: DeviceSlice<'a, f32>,
    /// `[rank, columns]`
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
    pub(crate) rank: usize,
    pub(crate) first: bool,
}

/// Computes the row factors of one DoRA term.
pub(crate) fn dora(kernel: &Kernel, stream: &Stream, args: &DoraArgs<'_>) -> Result<(), cuda_graphs::Error> {
    let per_row = [args.magnitude.len(), args.row_scale.len(), args.gain.len()];
    if args.w0.len() != args.rows * args.columns
        || args.left.len() != args.rows * args.rank
        || args.right.len() != args.rank * args.columns
        || per_row.iter().any(|n| *n != args.rows)
        || args.zero_norm.len() != 1
        || args.rows == 0
        || [args.rows, args.columns, args.rank]
            .iter()
            .any(|n| u32::try_from(*n).is_err())
    {
        return Err(refuse(
            "the row factors' arguments do not have the matrix's shape",
        ));
    }
    let params = DoraParams {
        w0: args.w0.ptr(),
        left: args.left.ptr(),
        right: args.right.ptr(),
        magnitude: args.magnitude.ptr(),
        row_scale: args.row_scale.ptr(),
        gain: args.gain.ptr(),
        zero_norm: args.zero_norm.ptr(),
        scale: args.scale,
        rows: args.rows as u32,
        columns: args.columns as u32,
        stride: args.rank as u32,
        rank: args.rank as u32,
        first: u32::from(args.first),
        padding: 0,
    };
    let config = LaunchConfig::new(args.rows.div_ceil(32) as u32, 256);
    // SAFETY: all slices have the lengths that the shape implies, checked above. They are borrowed by the caller; freeing
    // device memory waits for the device.
    unsafe { kernel.launch(stream, &config, &params) }
}
