//! The launch of `kernels/decode_layer.cu`: up to four matrix products of a decode step, and what lies between them, in
//! one persistent kernel. See there for how it works and why.

use bytemuck::{Pod, Zeroable};
use cuda_graphs::{
    Arch, Archs, Compiler, Device, DeviceSlice, Header, Kernel, KernelSpec, LaunchConfig, Limits, Stream,
    Swizzle, TensorElement, TensorMap, TensorMapSpec,
};
use half::bf16;

use super::{COMMON, aligned, refuse, same, small};
use crate::Result;

const HOPPER: Header = Header::new("hopper.cuh", include_str!("../../kernels/hopper.cuh"));

/// Batch rows that the kernel is compiled for; fewer are padded.
const COLUMNS: [usize; 2] = [8, 16];
/// Most batch rows.
pub const MAX_ROWS: usize = COLUMNS[COLUMNS.len() - 1];
/// Most stages in one launch.
pub const MAX_STAGES: usize = 4;
/// Most multiprocessors: each is one block, and the kernel holds a sum per block in registers.
pub const MAX_BLOCKS: usize = 160;

const WARPS: usize = 8;
const THREADS: u32 = 32 * (WARPS as u32 + 1);
const MAX_BOX_ROWS: usize = 48;
const CHUNK: usize = 64;
const SLOT_BYTES: usize = MAX_BOX_ROWS * 2 * CHUNK;

/// Slots in a warp's ring of weights, and groups of activations in the block's.
const fn depths(columns: usize) -> (usize, usize) {
    if columns == 8 { (3, 8) } else { (3, 4) }
}

/// As `SHARED_BYTES` in the kernel.
fn shared_bytes(columns: usize) -> usize {
    let (depth, x_slots) = depths(columns);
    let sums = WARPS * columns * (MAX_BOX_ROWS + 4) * 4;
    x_slots * 64 * 2 * CHUNK + WARPS * depth * SLOT_BYTES + sums + (2 * x_slots + WARPS * depth) * 8
}

fn spec(columns: usize) -> KernelSpec {
    let (depth, x_slots) = depths(columns);
    KernelSpec::new(
        format!("decode_layer<{columns}>"),
        include_str!("../../kernels/decode_layer.cu"),
    )
    .headers([COMMON, HOPPER])
    .define("COLUMNS", columns)
    .define("DEPTH", depth)
    .define("X_SLOTS", x_slots)
    // Later consumer devices have the copy engine too, but less than half of the shared memory.
    .archs(Archs::Only(vec![Arch::SM_90A, Arch::SM_100A]))
    // One block of 288 threads per multiprocessor.
    .entry("decode_layer", Limits::registers(168))
}

/// Every specialisation.
pub(super) fn specs() -> impl Iterator<Item = KernelSpec> {
    COLUMNS.into_iter().map(spec)
}

/// What becomes of a product.
#[derive(Debug, Clone, Copy)]
pub enum StageOutput<'a> {
    /// `residual += product`, `normed = bf16(residual * norm)`, and the sums of squares by which the consumer of
    /// `normed` must scale.
    Residual {
        /// `[rows, N]`.
        residual: DeviceSlice<'a, f32>,
        /// `[N]`, weight of the norm that follows.
        norm: DeviceSlice<'a, f32>,
        /// `[rows, N]`.
        normed: DeviceSlice<'a, bf16>,
        /// `[rows, blocks]`, see [`DecodeLayer::blocks`].
        squares: DeviceSlice<'a, f32>,
    },
    /// `silu(gate) * up`, the weight being gate above up; `[rows, N / 2]`.
    Gated(DeviceSlice<'a, bf16>),
    /// The product, `[rows, N]`.
    Bf16(DeviceSlice<'a, bf16>),
    /// The product, `[rows, N]`.
    F32(DeviceSlice<'a, f32>),
}

/// One product: `output = input · weightᵀ`.
#[derive(Debug, Clone, Copy)]
pub struct LayerStage<'a> {
    /// `[N, K]`, row-major; K a multiple of 64.
    pub weight: DeviceSlice<'a, bf16>,
    /// `[rows, K]`.
    pub input: DeviceSlice<'a, bf16>,
    /// `[rows, blocks]`, the sums of squares that belong to `input`: the product is divided by the root of their mean.
    pub squares: Option<DeviceSlice<'a, f32>>,
    /// Where it goes.
    pub output: StageOutput<'a>,
}

/// One launch.
#[derive(Debug, Clone, Copy)]
pub struct DecodeLayerOp<'a> {
    /// Batch rows, 1 to [`MAX_ROWS`].
    pub rows: usize,
    /// In order; each may read what those before wrote.
    pub stages: &'a [LayerStage<'a>],
    /// `[MAX_STAGES]`, zero, and not touched by any other launch under way.
    pub counters: DeviceSlice<'a, u32>,
    /// Counters of launches that have ended, set to zero.
    pub clear: DeviceSlice<'a, u32>,
    /// Added to the mean square.
    pub eps: f32,
}

#[repr(C, align(64))]
#[derive(Clone, Copy, Pod, Zeroable)]
struct StageParams {
    w_map: TensorMap,
    x_map: TensorMap,
    out: u64,
    norm: u64,
    normed: u64,
    squares_out: u64,
    squares_in: u64,
    kind: u32,
    units: u32,
    chunks: u32,
    groups: u32,
    box_rows: u32,
    row_tiles: u32,
    passes: u32,
    columns: f32,
    unused: [u32; 14],
}

#[repr(C, align(64))]
#[derive(Clone, Copy, Pod, Zeroable)]
struct DecodeLayerParams {
    stages: [StageParams; MAX_STAGES],
    counters: u64,
    clear: u64,
    clear_len: u32,
    n_stages: u32,
    rows: u32,
    eps: f32,
    unused: [u32; 8],
}

/// How a block's share of a matrix is cut into boxes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Boxes {
    /// Groups of rows that warps work on side by side: 1, 2, 4 or 8.
    groups: usize,
    rows: usize,
    passes: usize,
}

impl Boxes {
    /// For a share of `rows` rows, or of `rows` rows in each of two halves.
    fn new(rows: usize, halves: usize) -> Self {
        let mut groups = halves;
        while groups < WARPS && rows.div_ceil(groups / halves) > MAX_BOX_ROWS {
            groups *= 2;
        }
        let passes = rows.div_ceil(groups / halves * MAX_BOX_ROWS);
        if passes > 1 {
            // Fewer groups and so more warps along K gain nothing when a pass is long; eight would leave no second
            // warp to work while one waits.
            groups = groups.min(4);
        }
        let per_pass = groups / halves;
        let passes = rows.div_ceil(per_pass * MAX_BOX_ROWS).max(1);
        // The kernel divides by the rows of a box through their inverse, which 1 does not have.
        let rows = rows.div_ceil(per_pass * passes).max(8);
        Self { groups, rows, passes }
    }
}

/// The kernel, loaded on one device.
#[derive(Debug, Clone)]
pub struct DecodeLayer {
    kernels: [Kernel; COLUMNS.len()],
    blocks: usize,
}

impl DecodeLayer {
    /// Compiles and loads the kernel, or takes it from the compiler's cache. `None` on a device that cannot run it:
    /// without a tensor memory accelerator, with too little shared memory, or with more than [`MAX_BLOCKS`]
    /// multiprocessors.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda). Panics: none.
    pub fn load(compiler: &Compiler, device: &Device) -> Result<Option<Self>> {
        let info = device.info();
        let blocks = info.multiprocessors as usize;
        let most = COLUMNS.into_iter().map(shared_bytes).max().unwrap_or(0);
        if !info.has_tma() || info.shared_bytes_per_block < most || blocks > MAX_BLOCKS {
            return Ok(None);
        }
        let modules = compiler.load_all(device, &specs().collect::<Vec<_>>())?;
        let kernels = [
            modules[0].kernel("decode_layer")?,
            modules[1].kernel("decode_layer")?,
        ];
        for (kernel, columns) in kernels.iter().zip(COLUMNS) {
            // All blocks wait for each other, so all must be resident.
            if kernel.blocks_per_multiprocessor(THREADS, shared_bytes(columns) as u32)? == 0 {
                return Ok(None);
            }
        }
        Ok(Some(Self { kernels, blocks }))
    }

    /// Blocks of a launch: one per multiprocessor.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// Gives one launch to `stream`.
    ///
    /// Weights may be read before the kernels ahead in the stream have ended: whoever writes weights must wait for the
    /// device before more work is given to the stream.
    ///
    /// # Errors
    /// [`Error::Option`](crate::Error::Option) for lengths that do not fit each other;
    /// [`Error::Cuda`](crate::Error::Cuda). Panics: none.
    pub fn run(&self, stream: &Stream, op: &DecodeLayerOp<'_>) -> Result<()> {
        let rows = op.rows;
        let Some(which) = COLUMNS.iter().position(|&columns| (1..=columns).contains(&rows)) else {
            return refuse(
                "rows",
                format!("{rows} rows at once, 1 to {MAX_ROWS} are possible"),
            );
        };
        let columns = COLUMNS[which];
        if !(1..=MAX_STAGES).contains(&op.stages.len()) {
            return refuse(
                "stages",
                format!("are {}, 1 to {MAX_STAGES} are possible", op.stages.len()),
            );
        }
        same("counters", op.counters.len(), MAX_STAGES)?;
        stream.keep_memory(op.counters);
        stream.keep_memory(op.clear);
        let mut params = DecodeLayerParams {
            counters: op.counters.ptr(),
            clear: op.clear.ptr(),
            clear_len: small("clear", op.clear.len())?,
            n_stages: op.stages.len() as u32,
            rows: rows as u32,
            eps: op.eps,
            ..Zeroable::zeroed()
        };
        for (stage, params) in op.stages.iter().zip(&mut params.stages) {
            *params = self.stage(stream, stage, rows, columns)?;
        }
        let config = LaunchConfig::new(self.blocks as u32, THREADS)
            .dynamic_shared_bytes(shared_bytes(columns) as u32)
            .programmatic(true);
        // SAFETY: every buffer has the length that the kernel gives it, checked in `stage`, and is kept by a capture;
        // the grid is one block per multiprocessor, all resident, as `load` made sure.
        Ok(unsafe { self.kernels[which].launch(stream, &config, &params) }?)
    }

    fn stage(
        &self,
        stream: &Stream,
        stage: &LayerStage<'_>,
        rows: usize,
        columns: usize,
    ) -> Result<StageParams> {
        let k = stage.input.len() / rows;
        same("input", stage.input.len(), rows * k)?;
        if k == 0 || !k.is_multiple_of(CHUNK) {
            return refuse(
                "input",
                format!("has {k} columns; a multiple of {CHUNK} is needed"),
            );
        }
        let n = stage.weight.len() / k;
        same("weight", stage.weight.len(), n * k)?;
        if n == 0 {
            return refuse("weight", "has no rows".into());
        }
        stream.keep_memory(stage.weight);
        stream.keep_memory(stage.input);
        if let Some(squares) = stage.squares {
            same("squares", squares.len(), rows * self.blocks)?;
            stream.keep_memory(squares);
        }
        let mut params = StageParams {
            squares_in: stage.squares.map_or(0, |squares| squares.ptr()),
            columns: k as f32,
            chunks: small("chunks", k / CHUNK)?,
            ..Zeroable::zeroed()
        };
        let (kind, units, halves) = match stage.output {
            StageOutput::Residual {
                residual,
                norm,
                normed,
                squares,
            } => {
                same("residual", residual.len(), rows * n)?;
                same("norm", norm.len(), n)?;
                same("normed", normed.len(), rows * n)?;
                same("squares", squares.len(), rows * self.blocks)?;
                for buffer in [residual, norm, squares] {
                    stream.keep_memory(buffer);
                }
                stream.keep_memory(normed);
                params.out = residual.ptr();
                params.norm = norm.ptr();
                params.normed = normed.ptr();
                params.squares_out = squares.ptr();
                (0, n, 1)
            }
            StageOutput::Gated(out) => {
                if !n.is_multiple_of(2) {
                    return refuse("weight", format!("has {n} rows, which are no gate and up"));
                }
                same("output", out.len(), rows * (n / 2))?;
                stream.keep_memory(out);
                params.out = out.ptr();
                (1, n / 2, 2)
            }
            StageOutput::Bf16(out) => {
                same("output", out.len(), rows * n)?;
                stream.keep_memory(out);
                params.out = out.ptr();
                (2, n, 1)
            }
            StageOutput::F32(out) => {
                same("output", out.len(), rows * n)?;
                stream.keep_memory(out);
                params.out = out.ptr();
                (3, n, 1)
            }
        };
        let boxes = Boxes::new(units.div_ceil(self.blocks), halves);
        params.kind = kind;
        params.units = small("rows of the weight", units)?;
        params.groups = boxes.groups as u32;
        params.box_rows = boxes.rows as u32;
        params.row_tiles = boxes.rows.div_ceil(16) as u32;
        params.passes = boxes.passes as u32;
        params.w_map = tiles_of(stage.weight, n, k, boxes.rows, 1)?;
        params.x_map = tiles_of(stage.input, rows, k, columns, 64 / columns)?;
        aligned("weight", stage.weight.ptr(), 16)?;
        Ok(params)
    }
}

/// A row-major `[rows, k]` matrix as chunks of 64 columns, in boxes of `box_rows` rows by `tiles` chunks.
fn tiles_of(
    matrix: DeviceSlice<'_, bf16>,
    rows: usize,
    k: usize,
    box_rows: usize,
    tiles: usize,
) -> Result<TensorMap> {
    let spec = TensorMapSpec {
        element: TensorElement::Bf16,
        dims: &[CHUNK as u64, rows as u64, (k / CHUNK) as u64],
        strides: &[2 * k as u64, 2 * CHUNK as u64],
        box_dims: &[CHUNK as u32, box_rows as u32, tiles as u32],
        swizzle: Swizzle::Bytes128,
    };
    Ok(TensorMap::tiled(matrix, &spec)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boxes_cover_every_share_and_fit_a_slot() {
        for halves in [1, 2] {
            for rows in 1..3000 {
                let boxes = Boxes::new(rows, halves);
                let side_by_side = boxes.groups / halves;
                assert!(side_by_side >= 1 && boxes.groups <= WARPS && WARPS.is_multiple_of(boxes.groups));
                assert!(
                    boxes.rows * side_by_side * boxes.passes >= rows,
                    "{rows}: {boxes:?}"
                );
                assert!(boxes.rows <= MAX_BOX_ROWS);
                assert!(boxes.rows * 2 * CHUNK <= SLOT_BYTES);
                // What the ring of activations is made for.
                assert!(WARPS / boxes.groups <= 16);
            }
        }
    }

    #[test]
    fn shared_memory_fits_a_multiprocessor() {
        for columns in COLUMNS {
            assert!(shared_bytes(columns) <= 227 * 1024, "{columns}");
        }
        assert_eq!(size_of::<StageParams>(), 384);
        assert_eq!(size_of::<DecodeLayerParams>(), 4 * 384 + 64);
    }
}
