//! The launch of `kernels/decode_layers.cu`: the layers of a decode step of few rows in one persistent kernel. See there
//! for how it works and why.

mod operands;
mod params;
#[cfg(test)]
mod tests;

use bytemuck::Zeroable;
use cuda_graphs::{
    Arch, Archs, Compiler, Device, DeviceBuffer, DeviceSlice, Header, Kernel, KernelSpec, LaunchConfig,
    Limits, Stream,
};
use half::bf16;

use super::{COMMON, ROPE, refuse, small};
use crate::Result;

pub use operands::{DecodeLayersOp, LayerOperands, LayersShape};
use operands::{check, keep, tokens_per_head};
use params::{AttentionParams, DecodeLayersParams, ShapeParams, layer_params, tiles_of};

pub(super) const HOPPER: Header = Header::new("hopper.cuh", include_str!("../../kernels/hopper.cuh"));
const ATTENTION: Header = Header::new(
    "decode_attention.cuh",
    include_str!("../../kernels/decode_attention.cuh"),
);
const SINGLE: Header = Header::new(
    "decode_single.cuh",
    include_str!("../../kernels/decode_single.cuh"),
);
const STREAM: Header = Header::new(
    "decode_stream.cuh",
    include_str!("../../kernels/decode_stream.cuh"),
);

/// Batch rows that the kernel is compiled for; fewer are padded. What a single row's blocks find travels another way.
const ROWS: [usize; 3] = [1, 8, 16];
/// Most batch rows.
pub const MAX_ROWS: usize = ROWS[ROWS.len() - 1];
/// Most multiprocessors: each is one block, and the kernel holds a sum per block in registers.
pub const MAX_BLOCKS: usize = 160;
/// The head dimension that the kernel is written for.
const HEAD_DIM: usize = 128;
/// Most query heads of a K/V head.
const MAX_GROUP: usize = 8;
/// Layers that the parameters of a launch have room for; more take another launch.
const MAX_LAYERS: usize = 48;
/// Most tokens of a split of a row besides the newest, as in the kernel.
const MAX_SPLIT: usize = 8192;

const WARPS: usize = 8;
/// Eight warps multiply, one brings activations, three weights.
const THREADS: u32 = 32 * (WARPS as u32 + 4);
const MAX_BOX_ROWS: usize = 48;
const CHUNK: usize = 64;
/// Most boxes in a warp's ring.
const MAX_BOXES: usize = 12;
/// A number of launches, and a counter for each stage.
const SYNC_WORDS: usize = 8 + 5 * MAX_LAYERS + 1;
/// Bytes of shared memory for what a block knows of its part of attention.
const WORK_BYTES: usize = 40;

/// Most groups of activations at once.
const MAX_X_SLOTS: usize = 12;
/// Widest input of a stage, in chunks, that a block has room for beside the sums of products: of a single row only.
const MAX_CHUNKS: usize = (depths(8).1 - WARPS * 8 * (MAX_BOX_ROWS + 4) * 4) / 128;

/// Columns of the products for so many rows.
const fn columns(rows: usize) -> usize {
    if rows > 8 { rows } else { 8 }
}

/// Bytes of a warp's ring of weights, and of the block's activations.
const fn depths(columns: usize) -> (usize, usize) {
    if columns == 8 {
        (24_064, 37_888)
    } else {
        (20_608, 65_536)
    }
}

/// As `SHARED_BYTES` in the kernel.
fn shared_bytes(columns: usize) -> usize {
    let (ring, activations) = depths(columns);
    let barriers = (2 * MAX_X_SLOTS + 2 * WARPS * MAX_BOXES + 4) * 8;
    activations + WARPS * ring + barriers + WORK_BYTES
}

fn spec(rows: usize) -> KernelSpec {
    let (ring, activations) = depths(columns(rows));
    KernelSpec::new(
        format!("decode_layers<{rows}>"),
        include_str!("../../kernels/decode_layers.cu"),
    )
    .headers([COMMON, HOPPER, ROPE, ATTENTION, SINGLE, STREAM])
    .define("ROWS", rows)
    .define("RING_BYTES", ring)
    .define("X_REGION", activations)
    // Later consumer devices have the copy engine too, but less than half of the shared memory.
    .archs(Archs::Only(vec![Arch::SM_90A, Arch::SM_100A]))
    // One block of 384 threads per multiprocessor. The warps that multiply take more once they run.
    .entry("decode_layers", Limits::registers(168))
}

/// Every specialisation.
pub(super) fn specs() -> impl Iterator<Item = KernelSpec> {
    ROWS.into_iter().map(spec)
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
pub struct DecodeLayers {
    kernels: [Kernel; ROWS.len()],
    blocks: usize,
}

/// What the launches for one model need besides their operands.
#[derive(Debug)]
pub struct DecodeLayersScratch {
    shape: LayersShape,
    max_length: usize,
    max_splits: usize,
    /// `[launches, SYNC_WORDS]`.
    sync: DeviceBuffer<u32>,
    /// `[MAX_ROWS, hidden]`, input of gate+up.
    normed: DeviceBuffer<bf16>,
    /// `[MAX_ROWS * blocks]` each: of the residual after down and after O.
    squares: [DeviceBuffer<f32>; 2],
    /// `[hidden]`, `[q]`, `[hidden]` and `[intermediate]`: inputs of QKV and the head, O, gate+up and down for a single row. Each
    /// value has some bits of that number in its upper half.
    inputs: [DeviceBuffer<u32>; 4],
    /// As `squares`, for a single row, words as in `qkv`.
    square_words: [DeviceBuffer<u64>; 2],
    /// `[MAX_ROWS, q + 2 kv]`. Here and in the next two each value has the number of the layer and launch that wrote it in
    /// its upper half.
    qkv: DeviceBuffer<u64>,
    /// `[MAX_ROWS, kv_heads, max_splits, group, 128]`.
    partial: DeviceBuffer<u64>,
    /// `[MAX_ROWS, kv_heads, max_splits, group, 2]`.
    partial_sums: DeviceBuffer<u64>,
}

impl DecodeLayersScratch {
    /// For a model of `n_layers` layers and rows of up to `max_length` tokens.
    ///
    /// # Errors
    /// [`Error::Option`](crate::Error::Option) for a shape that no kernel is written for;
    /// [`Error::Cuda`](crate::Error::Cuda). Panics: none.
    pub fn new(
        device: &Device,
        kernel: &DecodeLayers,
        shape: LayersShape,
        n_layers: usize,
        max_length: usize,
    ) -> Result<Self> {
        if !shape.is_supported(HEAD_DIM) {
            return refuse("shape", format!("is {shape:?}, which no kernel is written for"));
        }
        // As many as the longest row needs, or as one that is cut finely has at most.
        let max_splits = max_length.div_ceil(MAX_SPLIT).max(Splits::MOST_FEW);
        let parts = MAX_ROWS * shape.heads * max_splits;
        let squares = || DeviceBuffer::zeroed(device, MAX_ROWS * kernel.blocks());
        Ok(Self {
            shape,
            max_length,
            max_splits,
            sync: DeviceBuffer::zeroed(device, n_layers.div_ceil(MAX_LAYERS) * SYNC_WORDS)?,
            normed: DeviceBuffer::zeroed(device, MAX_ROWS * shape.hidden)?,
            squares: [squares()?, squares()?],
            inputs: [
                DeviceBuffer::zeroed(device, shape.hidden)?,
                DeviceBuffer::zeroed(device, shape.q())?,
                DeviceBuffer::zeroed(device, shape.hidden)?,
                DeviceBuffer::zeroed(device, shape.intermediate)?,
            ],
            square_words: [
                DeviceBuffer::zeroed(device, kernel.blocks())?,
                DeviceBuffer::zeroed(device, kernel.blocks())?,
            ],
            qkv: DeviceBuffer::zeroed(device, MAX_ROWS * shape.qkv())?,
            partial: DeviceBuffer::zeroed(device, parts * HEAD_DIM)?,
            partial_sums: DeviceBuffer::zeroed(device, parts * 2)?,
        })
    }

    /// `[MAX_ROWS, q + 2 kv]`: what the last layer of the last step found, in rows that were there; the bits of a bf16 in
    /// the lower 16 of each word.
    pub fn qkv(&self) -> &DeviceBuffer<u64> {
        &self.qkv
    }
}

/// How rows are cut in attention: by how many there are and by each one's own length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Splits {
    /// Tokens of a split of a short row, a multiple of 16.
    tokens: usize,
    /// Splits of a longer one, of equal length up to [`MAX_SPLIT`] tokens.
    few: usize,
}

impl Splits {
    const MOST_FEW: usize = 16;

    /// For `pairs` of a row and a K/V head. A split costs a block about two microseconds besides its tokens, so that there
    /// are at most 128 of them in all, one for each multiprocessor, however long the rows are: more would mean a second
    /// round.
    fn new(pairs: usize) -> Self {
        Self {
            tokens: 64,
            few: (128 / pairs.max(1)).clamp(1, Self::MOST_FEW),
        }
    }
}

impl DecodeLayers {
    /// Compiles and loads the kernel, or takes it from the compiler's cache. `None` on a device that cannot run it:
    /// without a tensor memory accelerator, with too little shared memory, or with more than [`MAX_BLOCKS`]
    /// multiprocessors.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda). Panics: none.
    pub fn load(compiler: &Compiler, device: &Device) -> Result<Option<Self>> {
        let info = device.info();
        let blocks = info.multiprocessors as usize;
        let shared = ROWS.map(|rows| shared_bytes(columns(rows)));
        let most = shared.into_iter().max().unwrap_or(0);
        if !info.has_tma() || info.shared_bytes_per_block < most || blocks > MAX_BLOCKS {
            return Ok(None);
        }
        let modules = compiler.load_all(device, &specs().collect::<Vec<_>>())?;
        let kernels = [
            modules[0].kernel("decode_layers")?,
            modules[1].kernel("decode_layers")?,
            modules[2].kernel("decode_layers")?,
        ];
        for (kernel, shared) in kernels.iter().zip(shared) {
            // All blocks wait for each other, so all must be resident.
            if kernel.blocks_per_multiprocessor(THREADS, shared as u32)? == 0 {
                return Ok(None);
            }
        }
        Ok(Some(Self { kernels, blocks }))
    }

    /// Blocks of a launch: one per multiprocessor.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// Gives a step's layers to `stream`: one launch, or one for every 48 layers. Steps that share `scratch` must follow
    /// each other on one stream.
    ///
    /// Weights may be read before the kernels ahead in the stream have ended: whoever writes weights must wait for the
    /// device before more work is given to the stream.
    ///
    /// # Errors
    /// [`Error::Option`](crate::Error::Option) for lengths that do not fit each other;
    /// [`Error::Cuda`](crate::Error::Cuda). Panics: none.
    pub fn run(&self, stream: &Stream, scratch: &DecodeLayersScratch, op: &DecodeLayersOp<'_>) -> Result<()> {
        let rows = op.positions.len();
        let single = scratch.shape.is_narrow() && op.layers.len() > 1;
        let fits = |most: usize| (1..=most).contains(&rows) && (most > 1 || single);
        let Some(which) = ROWS.into_iter().position(fits) else {
            return refuse(
                "rows",
                format!("{rows} rows at once, 1 to {MAX_ROWS} are possible"),
            );
        };
        let launches = op.layers.len().div_ceil(MAX_LAYERS);
        if launches == 0 || scratch.sync.len() < launches * SYNC_WORDS {
            return refuse(
                "layers",
                format!("are {}, not what the scratch is for", op.layers.len()),
            );
        }
        check(scratch, op)?;
        keep(stream, scratch, op);
        let columns = columns(ROWS[which]);
        let config = LaunchConfig::new(self.blocks as u32, THREADS)
            .dynamic_shared_bytes(shared_bytes(columns) as u32)
            .programmatic(true);
        let mut params = Box::new(self.params(scratch, op, columns)?);
        let box_rows: Vec<usize> = params
            .shapes
            .iter()
            .map(|shape| shape.box_rows as usize)
            .collect();
        for (launch, layers) in op.layers.chunks(MAX_LAYERS).enumerate() {
            let sync = scratch.sync.ptr() + (launch * SYNC_WORDS * 4) as u64;
            params.epoch = sync;
            params.counters = sync + 32;
            params.first_squares = u32::from(launch > 0);
            params.first_layer = (launch * MAX_LAYERS) as u32;
            params.n_layers = layers.len() as u32;
            params.n_stages = 4 * params.n_layers + u32::from(launch + 1 == launches);
            for (layer, params) in layers.iter().zip(&mut params.layers) {
                *params = layer_params(&scratch.shape, layer, &box_rows)?;
            }
            // SAFETY: every buffer has the length that the kernel gives it, checked in `check` and made in
            // `DecodeLayersScratch::new`, and is kept by a capture; the kernel checks slots, positions and pages against
            // `n_slots`, `n_positions` and `tokens_per_head`; the grid is one block per multiprocessor, all resident, as
            // `load` made sure.
            unsafe { self.kernels[which].launch(stream, &config, &*params) }?;
        }
        Ok(())
    }

    /// What all launches of a step have in common.
    fn params(
        &self,
        scratch: &DecodeLayersScratch,
        op: &DecodeLayersOp<'_>,
        columns: usize,
    ) -> Result<DecodeLayersParams> {
        let (shape, rows) = (&scratch.shape, op.positions.len());
        let x_rows = rows.next_power_of_two();
        let input = |matrix: DeviceSlice<'_, bf16>, k: usize| tiles_of(matrix, rows, k, x_rows, 64 / columns);
        let mlp_normed = scratch.normed.slice(..rows * shape.hidden)?;
        let shapes = [
            self.shape(shape.qkv(), shape.hidden, 1)?,
            self.shape(shape.hidden, shape.q(), 1)?,
            self.shape(shape.intermediate, shape.hidden, 2)?,
            self.shape(shape.hidden, shape.intermediate, 1)?,
            self.shape(shape.vocab, shape.hidden, 1)?,
        ];
        let head_rows = shapes[4].box_rows as usize;
        let splits = Splits::new(rows.next_power_of_two() * shape.kv_heads);
        Ok(DecodeLayersParams {
            x_maps: [
                input(op.normed, shape.hidden)?,
                input(op.mixed, shape.q())?,
                input(mlp_normed, shape.hidden)?,
                input(op.gated, shape.intermediate)?,
            ],
            head_map: tiles_of(op.head, shape.vocab, shape.hidden, head_rows, 1)?,
            shapes,
            rows: rows as u32,
            x_rows: x_rows as u32,
            residual: op.residual.ptr(),
            normed: [op.normed.ptr(), mlp_normed.ptr()],
            squares: [scratch.squares[0].ptr(), scratch.squares[1].ptr()],
            qkv: scratch.qkv.ptr(),
            gated: op.gated.ptr(),
            inputs: scratch.inputs.each_ref().map(DeviceBuffer::ptr),
            square_words: scratch.square_words.each_ref().map(DeviceBuffer::ptr),
            logits: op.logits.ptr(),
            columns: shape.hidden as f32,
            eps: op.eps,
            attention: AttentionParams {
                qkv: scratch.qkv.ptr(),
                mixed: op.mixed.ptr(),
                mixed_words: scratch.inputs[1].ptr(),
                positions: op.positions.ptr(),
                slots: op.slots.ptr(),
                page_table: op.page_table.ptr(),
                cos_sin: op.cos_sin.ptr(),
                partial: scratch.partial.ptr(),
                partial_sums: scratch.partial_sums.ptr(),
                tokens_per_head: tokens_per_head(shape, op) as u64,
                kv_heads: small("kv_heads", shape.kv_heads)?,
                group: shape.group() as u32,
                page_shift: op.page_size.trailing_zeros(),
                n_slots: small("slots", op.page_table.len() / op.max_pages)?,
                max_pages: small("max_pages", op.max_pages)?,
                n_positions: small("positions", op.cos_sin.len() / HEAD_DIM)?,
                split: splits.tokens as u32,
                few_splits: splits.few as u32,
                max_splits: small("splits", scratch.max_splits)?,
                scale: std::f32::consts::LOG2_E / (HEAD_DIM as f32).sqrt(),
            },
            ..Zeroable::zeroed()
        })
    }

    /// `units` rows of a product, or of each half of one.
    fn shape(&self, units: usize, k: usize, halves: usize) -> Result<ShapeParams> {
        let boxes = Boxes::new(units.div_ceil(self.blocks), halves);
        Ok(ShapeParams {
            units: small("rows of a weight", units)?,
            chunks: small("columns of a weight", k / CHUNK)?,
            groups: boxes.groups as u32,
            box_rows: boxes.rows as u32,
            row_tiles: boxes.rows.div_ceil(16) as u32,
            passes: boxes.passes as u32,
        })
    }
}
