//! The merge kernels and their safe launches: the one module with `unsafe`.
#![allow(unsafe_code)]

use bytemuck::{Pod, Zeroable};
use cuda_graphs::{
    Arch, Archs, DeviceInfo, DeviceSlice, Header, Kernel, KernelSpec, LaunchConfig, Limits, Stream,
};
use half::bf16;

/// Rows and columns of a tile, ranks of a step; in step with the kernel.
const TILE_ROWS: usize = 16;
const TILE_COLUMNS: usize = 128;
/// Ranks are padded to a multiple of this, per term.
pub(crate) const RANK_STEP: usize = 16;
/// Rows of a warpgroup's tile, and ranks of a panel.
const GROUP_ROWS: usize = 64;
const PANEL_RANKS: usize = 64;
/// Registers of a thread of the kernels for warpgroups, and warpgroups of their largest block.
const GROUP_REGISTERS: u32 = 168;
const MOST_GROUPS: usize = 3;
/// Warps of a warpgroup.
const GROUP_WARPS: usize = 4;
/// Doubtful elements that a warp gathers before it takes places in the list, as in the kernel.
const GATHERED: usize = 96;
/// Doubtful elements that a launch for warpgroups can list: 0.35 % of those of six layers of Qwen3-4B. Others are computed
/// where they are found.
const DOUBTS: usize = 1 << 21;
const DOUBT_BYTES: usize = 8 * (DOUBTS + 1);
/// Blocks of the kernel that works off the list, per multiprocessor.
const SETTLING_BLOCKS: u32 = 8;
/// Matrices of a launch: the list has 14 bits for them.
pub(crate) const MOST_MATRICES: usize = 1 << 14;
/// Ranks from which on warpgroups are faster.
const GROUP_RANKS: usize = 32;
/// Rows of one block's item, roughly: its right factors stay in shared memory for that long.
const ROWS_PER_ITEM: usize = 1024;
const ROWS_PER_GROUPS_ITEM: usize = 4096;
/// Shared memory at the front of a block: norms and a counter.
const HEAD_BYTES: usize = 4 * TILE_COLUMNS + 16;
/// Sides of a matrix are shorter: the kernels keep a row and a column of a tile in 32 bits.
const MOST_ROWS: usize = 1 << 25;
/// Registers of a thread of the merge kernels, and warps of the largest block.
const REGISTERS: u32 = 128;
const MOST_WARPS: usize = 16;

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

/// Which form of the kernel a matrix takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Form {
    /// f32 factors in two parts.
    Split,
    /// As `Split`, for ranks above 32.
    Deep,
    /// Factors of at most 11 significant bits and one scaling.
    Whole,
    /// As `Split`, with gains, and of any rank.
    General,
    /// As `Deep`, by products of warpgroups.
    SplitGroups,
    /// As `Whole`, by products of warpgroups.
    WholeGroups,
}

impl Form {
    pub(crate) const ALL: [Self; 6] = [
        Self::Split,
        Self::Deep,
        Self::Whole,
        Self::General,
        Self::SplitGroups,
        Self::WholeGroups,
    ];

    fn parts(self) -> usize {
        match self {
            Self::Whole | Self::WholeGroups => 1,
            Self::Split | Self::Deep | Self::General | Self::SplitGroups => 2,
        }
    }

    fn is_for_groups(self) -> bool {
        matches!(self, Self::SplitGroups | Self::WholeGroups)
    }

    /// The form for a matrix whose ranks, padded, sum up to `rank`: right factors of a high rank do not fit into shared
    /// memory.
    pub(crate) fn of(rank: usize, whole: bool, gains: bool, device: &DeviceInfo) -> Self {
        let groups = match whole {
            true => Self::WholeGroups,
            false => Self::SplitGroups,
        };
        // One warpgroup alone would wait for itself.
        let fits = |form| {
            let shared = shared_bytes(form, right_bytes(form, rank), 2 * GROUP_WARPS);
            shared <= device.shared_bytes_per_block
        };
        if device.compute_capability == (9, 0) && !gains && rank >= GROUP_RANKS && fits(groups) {
            return groups;
        }
        let form = match (whole, rank > 2 * RANK_STEP) {
            (true, _) => Self::Whole,
            (false, false) => Self::Split,
            (false, true) => Self::Deep,
        };
        if gains || shared_bytes(form, right_bytes(form, rank), 4) > device.shared_bytes_per_block {
            return Self::General;
        }
        form
    }
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

/// Bytes of right factors of one column tile.
fn right_bytes(form: Form, rank: usize) -> usize {
    match form {
        Form::General => 0,
        Form::Split | Form::Deep | Form::Whole => rank / RANK_STEP * form.parts() * 4096,
        Form::SplitGroups | Form::WholeGroups => form.parts() * panels(rank) * TILE_COLUMNS * 2 * PANEL_RANKS,
    }
}

/// Panels that hold this many ranks.
fn panels(rank: usize) -> usize {
    rank.div_ceil(PANEL_RANKS)
}

/// Shared memory of a block.
fn shared_bytes(form: Form, right_bytes: usize, warps: usize) -> usize {
    let w0 = 2 * TILE_ROWS * TILE_COLUMNS;
    if form.is_for_groups() {
        // Per warpgroup W₀ and left factors of one tile: half as many rows as the right factors have columns.
        let per_group = GROUP_ROWS * TILE_COLUMNS * 2 + right_bytes / 2;
        return right_bytes + warps / GROUP_WARPS * per_group + 4 * TILE_COLUMNS + warps * 4 * GATHERED;
    }
    let per_warp = match form {
        // All left factors of a tile, an eighth of the right ones.
        Form::Deep => w0 + right_bytes / 8,
        // Two places for W₀ and for two steps of left factors.
        _ => 2 * w0 + 2 * form.parts() * 1024,
    };
    // A list of doubtful elements.
    HEAD_BYTES + right_bytes + warps * (per_warp + 32)
}

/// Warps of a block: as many as possible on a multiprocessor, in blocks as small as possible.
fn block_warps(form: Form, right_bytes: usize, device: &DeviceInfo) -> Option<usize> {
    let registers = match form.is_for_groups() {
        true => GROUP_REGISTERS,
        false => REGISTERS,
    };
    let resident = |warps: usize| {
        let shared = shared_bytes(form, right_bytes, warps);
        if shared > device.shared_bytes_per_block {
            return 0;
        }
        let by_shared = device.shared_bytes_per_multiprocessor / (shared + 1024);
        let by_registers = device.registers_per_multiprocessor as usize / (registers as usize * 32 * warps);
        by_shared.min(by_registers).max(1) * warps
    };
    let sizes: &[usize] = match form.is_for_groups() {
        true => &[GROUP_WARPS, 2 * GROUP_WARPS, MOST_GROUPS * GROUP_WARPS],
        false => &[8, 12, MOST_WARPS, 6, 4],
    };
    let sizes = sizes.iter().copied().filter(|w| resident(*w) > 0);
    // The first of several equal ones.
    sizes.rev().max_by_key(|warps| resident(*warps))
}

/// Bytes of each part of what `prepare` writes for one matrix, each padded to 256.
fn scratch_parts(form: Form, rows: usize, columns: usize, rank: usize) -> [usize; 5] {
    let (row_tiles, column_tiles) = (rows.div_ceil(TILE_ROWS), columns.div_ceil(TILE_COLUMNS));
    let steps = rank / RANK_STEP;
    let (left, right, rows) = match form.is_for_groups() {
        // Whole tiles of warpgroups, also behind the last row.
        true => {
            let tiles = rows.div_ceil(GROUP_ROWS);
            let left = tiles * form.parts() * panels(rank) * GROUP_ROWS * 2 * PANEL_RANKS;
            (left, column_tiles * right_bytes(form, rank), tiles * GROUP_ROWS)
        }
        false => {
            let left = row_tiles * form.parts() * steps * 512;
            let right = column_tiles * form.parts() * steps * 4096;
            (left, right, row_tiles * TILE_ROWS)
        }
    };
    [
        left,
        right,
        rows * 8,
        column_tiles * TILE_COLUMNS * 4,
        columns * rank * 4,
    ]
    .map(|bytes| bytes.next_multiple_of(256))
}

/// Bytes of scratch memory that a matrix needs while it is merged.
pub(crate) fn scratch_bytes(form: Form, rows: usize, columns: usize, rank: usize) -> usize {
    scratch_parts(form, rows, columns, rank).iter().sum()
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

/// Scratch memory of one launch, about. More launches cost time, those for warpgroups more of it: each ends with
/// multiprocessors that wait for the last. More memory at once leaves the L2 cache.
pub(crate) fn launch_bytes(form: Form) -> usize {
    if form.is_for_groups() { 264 << 20 } else { 96 << 20 }
}

/// Bytes of scratch memory that a launch needs besides its matrices'.
pub(crate) fn list_bytes(form: Form) -> usize {
    if form.is_for_groups() { DOUBT_BYTES } else { 0 }
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
