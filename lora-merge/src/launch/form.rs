//! Which form of the merge kernel a matrix takes, and the memory that blocks and launches of it need.
#![forbid(unsafe_code)]

use cuda_graphs::DeviceInfo;

/// Rows and columns of a tile, ranks of a step; in step with the kernel.
pub(super) const TILE_ROWS: usize = 16;
pub(super) const TILE_COLUMNS: usize = 128;
/// Ranks are padded to a multiple of this, per term.
pub(crate) const RANK_STEP: usize = 16;
/// Rows of a warpgroup's tile, and ranks of a panel.
pub(super) const GROUP_ROWS: usize = 64;
const PANEL_RANKS: usize = 64;
/// Registers of a thread of the kernels for warpgroups, and warpgroups of their largest block.
pub(super) const GROUP_REGISTERS: u32 = 168;
const MOST_GROUPS: usize = 3;
/// Warps of a warpgroup.
const GROUP_WARPS: usize = 4;
/// Doubtful elements that a warp gathers before it takes places in the list, as in the kernel.
const GATHERED: usize = 96;
/// Doubtful elements that a launch for warpgroups can list: 0.35 % of those of six layers of Qwen3-4B. Others are computed
/// where they are found.
pub(super) const DOUBTS: usize = 1 << 21;
const DOUBT_BYTES: usize = 8 * (DOUBTS + 1);
/// Ranks from which on warpgroups are faster.
const GROUP_RANKS: usize = 32;
/// Shared memory at the front of a block: norms and a counter.
const HEAD_BYTES: usize = 4 * TILE_COLUMNS + 16;
/// Registers of a thread of the merge kernels, and warps of the largest block.
pub(super) const REGISTERS: u32 = 128;
const MOST_WARPS: usize = 16;

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

    pub(super) fn parts(self) -> usize {
        match self {
            Self::Whole | Self::WholeGroups => 1,
            Self::Split | Self::Deep | Self::General | Self::SplitGroups => 2,
        }
    }

    pub(super) fn is_for_groups(self) -> bool {
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

/// Bytes of right factors of one column tile.
pub(super) fn right_bytes(form: Form, rank: usize) -> usize {
    match form {
        Form::General => 0,
        Form::Split | Form::Deep | Form::Whole => rank / RANK_STEP * form.parts() * 4096,
        Form::SplitGroups | Form::WholeGroups => form.parts() * panels(rank) * TILE_COLUMNS * 2 * PANEL_RANKS,
    }
}

/// Panels that hold this many ranks.
pub(super) fn panels(rank: usize) -> usize {
    rank.div_ceil(PANEL_RANKS)
}

/// Shared memory of a block.
pub(super) fn shared_bytes(form: Form, right_bytes: usize, warps: usize) -> usize {
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
pub(super) fn block_warps(form: Form, right_bytes: usize, device: &DeviceInfo) -> Option<usize> {
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
pub(super) fn scratch_parts(form: Form, rows: usize, columns: usize, rank: usize) -> [usize; 5] {
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

/// Scratch memory of one launch, about. More launches cost time, those for warpgroups more of it: each ends with
/// multiprocessors that wait for the last. More memory at once leaves the L2 cache.
pub(crate) fn launch_bytes(form: Form) -> usize {
    if form.is_for_groups() { 264 << 20 } else { 96 << 20 }
}

/// Bytes of scratch memory that a launch needs besides its matrices'.
pub(crate) fn list_bytes(form: Form) -> usize {
    if form.is_for_groups() { DOUBT_BYTES } else { 0 }
}
