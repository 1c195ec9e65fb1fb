//! The launch of `kernels/nf4_layer.cu`: up to four products with matrices in 4 bits, and what lies between them in a decode
//! step, in one persistent kernel. See there for how it works and why.

use bytemuck::{Pod, Zeroable};
use cuda_graphs::{
    Arch, Archs, Compiler, Device, DeviceSlice, Kernel, KernelSpec, LaunchConfig, Limits, Stream, Swizzle,
    TensorElement, TensorMap, TensorMapSpec,
};
use half::bf16;

use super::decode_layers::HOPPER;
use super::stage_output::{OutputParams, StageOutput, accept_squares};
use super::unmerged::{HEADER as UNMERGED, LowRankTerm, UnmergedParams};
use super::{COMMON, FOUR_BIT_BLOCK, FourBitBuffer, MAX_BLOCKS, aligned, refuse, same, small};
use crate::Result;

/// Most stages in one launch.
pub const MAX_STAGES: usize = 4;
/// Most batch rows.
pub const FOUR_BIT_LAYER_ROWS: usize = 64;

/// Columns of a box of weights.
const BOX_COLUMNS: usize = 128;
const TABLE_BYTES: usize = 256 * 128;

/// What the kernel is compiled with.
#[derive(Debug, Clone, Copy)]
struct Form {
    /// Batch rows at most.
    columns: usize,
    /// Whether a launch may have adapters beside the weights.
    low_rank: bool,
    /// That multiply: 8 or 16.
    warps: usize,
    /// Of eight rows, in a box at most.
    tiles: usize,
    /// Boxes in a warp's ring.
    depth: usize,
    /// Boxes whose activations are in shared memory at once, and so most warps along K.
    x_ring: usize,
}

/// In the order in which they are looked for: the first one with room for the rows, and for adapters where there are any. With
/// twice the warps there are too few registers for adapters.
const FORMS: [Form; 5] = [
    Form::new(8, false, 16, 5, 2, 32),
    Form::new(8, true, 8, 5, 4, 32),
    Form::new(16, true, 8, 5, 4, 16),
    Form::new(32, true, 8, 5, 4, 8),
    Form::new(FOUR_BIT_LAYER_ROWS, true, 8, 3, 6, 4),
];

impl Form {
    const fn new(
        columns: usize,
        low_rank: bool,
        warps: usize,
        tiles: usize,
        depth: usize,
        x_ring: usize,
    ) -> Self {
        Self {
            columns,
            low_rank,
            warps,
            tiles,
            depth,
            x_ring,
        }
    }

    /// Of a block: one warp more brings activations.
    const fn threads(self) -> u32 {
        32 * (self.warps as u32 + 1)
    }

    /// Boxes that activations come for at a time.
    const fn x_boxes(self) -> usize {
        if self.columns <= 16 { 32 / self.columns } else { 1 }
    }

    /// Rows of a box of activations, and how many of these come at a time, for so many batch rows: of few no padding is brought.
    const fn boxes_of(self, rows: usize) -> (usize, usize) {
        let x_rows = if self.columns == 8 {
            rows.next_power_of_two()
        } else {
            self.columns
        };
        (x_rows, self.x_boxes() * (self.columns / x_rows))
    }

    const fn slot_bytes(self) -> usize {
        (8 * self.tiles * 72).next_multiple_of(512)
    }

    /// As `SHARED_BYTES` in the kernel.
    const fn shared_bytes(self) -> usize {
        let tokens = if self.columns < 16 { self.columns } else { 16 };
        let sums = self.warps * tokens * (8 * self.tiles + 4) * 4;
        let barriers = 2 * (self.x_ring / self.x_boxes()) + self.warps * self.depth;
        TABLE_BYTES
            + self.x_ring * self.columns * 256
            + self.warps * self.depth * self.slot_bytes()
            + sums
            + barriers * 8
    }
}

fn spec(form: Form) -> KernelSpec {
    let Form {
        columns,
        low_rank,
        warps,
        tiles,
        depth,
        x_ring,
    } = form;
    let limits = Limits {
        // A few words of what a box, a stage's end and adapters need, outside the loop of products.
        spill_bytes: match (columns, warps) {
            (8, 8) => 0,
            (8, _) => 32,
            (16, _) => 160,
            (32, _) => 256,
            _ => 700,
        },
        stack_bytes: if (columns, warps) == (8, 8) { 0 } else { 112 },
        ..Limits::registers(168)
    };
    let beside = if low_rank { ", adapters" } else { "" };
    KernelSpec::new(
        format!("nf4_layer<{columns}{beside}>"),
        include_str!("../../kernels/nf4_layer.cu"),
    )
    .headers([COMMON, HOPPER, UNMERGED])
    .define("COLUMNS", columns)
    .define("LOW_RANK", u32::from(low_rank))
    .define("MATRIX_WARPS", warps)
    .define("MAX_TILES", tiles)
    .define("DEPTH", depth)
    .define("X_RING", x_ring)
    // Later consumer devices have the copy engine too, but less than half of the shared memory.
    // On 10.0 the compiler spills in the loop: products of their own are used there.
    .archs(Archs::Only(vec![Arch::SM_90A]))
    // One block per multiprocessor.
    .entry("nf4_layer", limits)
}

/// Every specialisation.
pub(super) fn specs() -> impl Iterator<Item = KernelSpec> {
    FORMS.into_iter().map(spec)
}

/// One product: `output = input · weightᵀ`.
#[derive(Debug, Clone, Copy)]
pub struct FourBitStage<'a> {
    /// `[N, K]`.
    pub weight: &'a FourBitBuffer,
    /// `[rows, K]`.
    pub input: DeviceSlice<'a, bf16>,
    /// `[rows, blocks]`, the sums of squares that belong to `input`: the product is divided by the root of their mean.
    pub squares: Option<DeviceSlice<'a, f32>>,
    /// Where it goes.
    pub output: StageOutput<'a>,
}

/// One launch.
#[derive(Debug, Clone, Copy)]
pub struct FourBitLayerOp<'a> {
    /// Batch rows, 1 to [`FOUR_BIT_LAYER_ROWS`].
    pub rows: usize,
    /// In order; each may read what those before wrote. All weights have the same map.
    pub stages: &'a [FourBitStage<'a>],
    /// Added to the only stage's product, which goes to `Bf16` or `F32`; without gains and biases.
    pub low_rank: Option<&'a LowRankTerm<'a>>,
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
    scale_map: TensorMap,
    x_map: TensorMap,
    out: u64,
    norm: u64,
    normed: u64,
    squares_out: u64,
    squares_in: u64,
    kind: u32,
    units: u32,
    boxes: u32,
    groups: u32,
    box_rows: u32,
    passes: u32,
    columns: f32,
    unused: [u32; 15],
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct LowRankParams {
    unmerged: UnmergedParams,
    h: u64,
    ends: [u32; 4],
    max_rank: u32,
    unused: u32,
}

#[repr(C, align(64))]
#[derive(Clone, Copy, Pod, Zeroable)]
struct LayerParams {
    stages: [StageParams; MAX_STAGES],
    counters: u64,
    clear: u64,
    clear_len: u32,
    n_stages: u32,
    rows: u32,
    eps: f32,
    scale: f32,
    x_boxes: u32,
    unused: [u32; 6],
    values: [u16; 16],
    low_rank: LowRankParams,
    unused_too: [u32; 6],
}

/// How a block's share of a matrix is cut into boxes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Boxes {
    /// Groups of rows that warps work on side by side: a power of two.
    groups: usize,
    /// A multiple of 8.
    rows: usize,
    passes: usize,
}

impl Boxes {
    /// For a share of `rows` rows, or of `rows` rows in each of two halves, and `along` boxes along K: the cut that keeps
    /// a warp busy for the shortest time.
    fn new(rows: usize, halves: usize, along: usize, form: Form) -> Self {
        let most = 8 * form.tiles;
        let cut = |groups: usize| {
            let side_by_side = groups / halves;
            let passes = rows.div_ceil(side_by_side * most).max(1);
            let rows = rows.div_ceil(side_by_side * passes).max(1).next_multiple_of(8);
            Self { groups, rows, passes }
        };
        // Accesses to shared memory: for the weights of a tile, and for activations, which all tiles of a box share.
        let time = |boxes: &Self| {
            let turns = boxes.passes * along.div_ceil(form.warps / boxes.groups);
            turns * (boxes.rows / 8 * 11 + form.columns + 4)
        };
        let ways_fit = |groups: &usize| form.warps / groups <= form.x_ring;
        let groups = [1, 2, 4, 8, 16].into_iter();
        let groups = groups.filter(|&groups| (halves..=form.warps).contains(&groups));
        let cuts = groups.filter(ways_fit).map(cut);
        // With as many groups as warps there is always room.
        cuts.min_by_key(time).unwrap_or_else(|| cut(form.warps))
    }
}

/// Values to multiply by instead of a map's, in bf16, and the factor of their sums: one factor on the whole map, chosen so that
/// rounding changes it least.
pub(super) fn rounded_map(map: &[f32; 16]) -> ([bf16; 16], f32) {
    const CANDIDATES: usize = 256;
    let mut best = ([bf16::ZERO; 16], 1.0, f64::INFINITY);
    for i in 0..CANDIDATES {
        let factor = 1.0 + i as f32 / CANDIDATES as f32;
        let rounded = map.map(|value| bf16::from_f32(value * factor));
        // The multiple of the rounded map that is nearest to the map, and how far that is.
        let dot = |f: &dyn Fn(f64, f64) -> f64| -> f64 {
            let pairs = map.iter().zip(&rounded);
            pairs.map(|(&m, r)| f(f64::from(m), r.to_f64())).sum()
        };
        let (mixed, square) = (dot(&|m, r| m * r), dot(&|_, r| r * r));
        if square > 0.0 {
            let scale = mixed / square;
            let off = dot(&|m, r| (m - scale * r).powi(2));
            if off < best.2 {
                best = (rounded, scale as f32, off);
            }
        }
    }
    (best.0, best.1)
}

/// The kernel, loaded on one device.
#[derive(Debug, Clone)]
pub struct FourBitLayer {
    /// In the order of [`FORMS`].
    kernels: Vec<Kernel>,
    blocks: usize,
}

impl FourBitLayer {
    /// Compiles and loads the kernel, or takes it from the compiler's cache. `None` on a device that cannot run it:
    /// of another architecture than 9.0, with too little shared memory, or with more than [`MAX_BLOCKS`]
    /// multiprocessors.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda). Panics: none.
    pub fn load(compiler: &Compiler, device: &Device) -> Result<Option<Self>> {
        let info = device.info();
        let blocks = info.multiprocessors as usize;
        let most = FORMS.into_iter().map(Form::shared_bytes).max().unwrap_or(0);
        if device.arch() != Arch::SM_90A || info.shared_bytes_per_block < most || blocks > MAX_BLOCKS {
            return Ok(None);
        }
        let modules = compiler.load_all(device, &specs().collect::<Vec<_>>())?;
        let kernels = modules.iter().map(|module| module.kernel("nf4_layer"));
        let kernels = kernels.collect::<cuda_graphs::Result<Vec<_>>>()?;
        for (kernel, form) in kernels.iter().zip(FORMS) {
            // All blocks wait for each other, so all must be resident.
            if kernel.blocks_per_multiprocessor(form.threads(), form.shared_bytes() as u32)? == 0 {
                return Ok(None);
            }
        }
        Ok(Some(Self { kernels, blocks }))
    }

    /// Blocks of a launch: one per multiprocessor.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// Gives one launch to `stream`. A row's result depends on the other rows only in whether there are more than 8, 16 or 32.
    ///
    /// Weights may be read before the kernels ahead in the stream have ended: whoever writes weights must wait for the
    /// device before more work is given to the stream.
    ///
    /// # Errors
    /// [`Error::Option`](crate::Error::Option) for lengths that do not fit each other, and maps that differ;
    /// [`Error::Cuda`](crate::Error::Cuda). Panics: none.
    pub fn run(&self, stream: &Stream, op: &FourBitLayerOp<'_>) -> Result<()> {
        let rows = op.rows;
        let fits = |(form, _): &(Form, &Kernel)| {
            (1..=form.columns).contains(&rows) && (form.low_rank || op.low_rank.is_none())
        };
        let Some((form, kernel)) = FORMS.into_iter().zip(&self.kernels).find(fits) else {
            return refuse(
                "rows",
                format!("{rows} rows at once, 1 to {FOUR_BIT_LAYER_ROWS} are possible"),
            );
        };
        let Some(first) = op.stages.first().filter(|_| op.stages.len() <= MAX_STAGES) else {
            return refuse(
                "stages",
                format!("are {}, 1 to {MAX_STAGES} are possible", op.stages.len()),
            );
        };
        let map = first.weight.map();
        if op.stages.iter().any(|stage| stage.weight.map() != map) {
            return refuse("stages", "have weights with different maps".into());
        }
        same("counters", op.counters.len(), MAX_STAGES)?;
        stream.keep_memory(op.counters);
        stream.keep_memory(op.clear);
        let (values, scale) = first.weight.rounded_map();
        let mut params = LayerParams {
            counters: op.counters.ptr(),
            clear: op.clear.ptr(),
            clear_len: small("clear", op.clear.len())?,
            n_stages: op.stages.len() as u32,
            rows: rows as u32,
            eps: op.eps,
            scale,
            x_boxes: form.boxes_of(rows).1 as u32,
            values: values.map(bf16::to_bits),
            ..Zeroable::zeroed()
        };
        if let Some(term) = op.low_rank {
            let plain =
                matches!(first.output, StageOutput::Bf16(_) | StageOutput::F32(_)) && op.stages.len() == 1;
            if !plain || !term.low_rank {
                return refuse(
                    "low_rank",
                    "goes with one plain product, and without gains and biases".into(),
                );
            }
            same("low_rank rows", term.unmerged.m as usize, rows)?;
            same("low_rank columns", term.n, first.weight.rows())?;
            term.keep(stream);
            params.low_rank = LowRankParams {
                unmerged: term.unmerged,
                h: term.h.ptr(),
                ends: term.ends,
                max_rank: term.max_rank,
                unused: 0,
            };
        }
        for (stage, params) in op.stages.iter().zip(&mut params.stages) {
            *params = self.stage(stream, stage, rows, form)?;
        }
        let config = LaunchConfig::new(self.blocks as u32, form.threads())
            .dynamic_shared_bytes(form.shared_bytes() as u32)
            .programmatic(true);
        // SAFETY: every buffer has the length that the kernel gives it, checked in `stage`, and is kept by a capture;
        // the grid is one block per multiprocessor, all resident, as `load` made sure.
        Ok(unsafe { kernel.launch(stream, &config, &params) }?)
    }

    fn stage(
        &self,
        stream: &Stream,
        stage: &FourBitStage<'_>,
        rows: usize,
        form: Form,
    ) -> Result<StageParams> {
        let (n, k) = (stage.weight.rows(), stage.weight.cols());
        same("input", stage.input.len(), rows * k)?;
        stage.weight.keep(stream);
        stream.keep_memory(stage.input);
        let squares_in = accept_squares(stream, stage.squares, rows * self.blocks)?;
        let OutputParams {
            kind,
            units,
            out,
            norm,
            normed,
            squares_out,
        } = stage.output.accept(stream, rows, n, rows * self.blocks)?;
        let mut params = StageParams {
            out,
            norm,
            normed,
            squares_out,
            squares_in,
            kind,
            columns: k as f32,
            ..Zeroable::zeroed()
        };
        let halves = if matches!(stage.output, StageOutput::Gated(_)) {
            2
        } else {
            1
        };
        let along = k.div_ceil(BOX_COLUMNS);
        // Blocks begin at multiples of 4 rows.
        let most = (units / 4).div_ceil(self.blocks) * 4;
        let boxes = Boxes::new(most, halves, along, form);
        if kind == 0 && boxes.passes > 1 {
            return refuse("weight", format!("has {n} rows, too many for a residual"));
        }
        params.units = small("rows of the weight", units)?;
        params.boxes = small("boxes", along)?;
        params.groups = boxes.groups as u32;
        params.box_rows = boxes.rows as u32;
        params.passes = boxes.passes as u32;
        aligned("input", stage.input.ptr(), 16)?;
        let (n, k, box_rows) = (n as u64, k as u64, boxes.rows as u32);
        let (packed, scales) = (stage.weight.packed(), stage.weight.absmax());
        params.w_map = TensorMap::tiled(
            packed,
            &TensorMapSpec {
                element: TensorElement::U8,
                dims: &[k / 2, n, 1],
                strides: &[k / 2, n * k / 2],
                box_dims: &[BOX_COLUMNS as u32 / 2, box_rows, 1],
                swizzle: Swizzle::Bytes64,
            },
        )?;
        params.scale_map = TensorMap::tiled(
            scales,
            &TensorMapSpec {
                element: TensorElement::F32,
                dims: &[n, k / FOUR_BIT_BLOCK as u64, 1],
                strides: &[4 * n, 4 * n * k / FOUR_BIT_BLOCK as u64],
                box_dims: &[box_rows, (BOX_COLUMNS / FOUR_BIT_BLOCK) as u32, 1],
                swizzle: Swizzle::None,
            },
        )?;
        let chunk = (FOUR_BIT_BLOCK) as u64;
        let (x_rows, x_boxes) = form.boxes_of(rows);
        params.x_map = TensorMap::tiled(
            stage.input,
            &TensorMapSpec {
                element: TensorElement::Bf16,
                dims: &[chunk, rows as u64, k / chunk],
                strides: &[2 * k, 2 * chunk],
                box_dims: &[chunk as u32, x_rows as u32, 2 * x_boxes as u32],
                swizzle: Swizzle::Bytes128,
            },
        )?;
        Ok(params)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::QuantType;

    #[test]
    fn boxes_cover_every_share_and_fit_a_slot() {
        for form in FORMS {
            for halves in [1, 2] {
                for rows in 1..1500 {
                    let boxes = Boxes::new(rows, halves, 1 + rows % 80, form);
                    let side_by_side = boxes.groups / halves;
                    assert!(
                        side_by_side >= 1
                            && boxes.groups <= form.warps
                            && form.warps.is_multiple_of(boxes.groups)
                    );
                    assert!(
                        boxes.rows * side_by_side * boxes.passes >= rows,
                        "{rows}: {boxes:?}"
                    );
                    assert!(boxes.rows.is_multiple_of(8) && boxes.rows <= 8 * form.tiles);
                    assert!(form.warps / boxes.groups <= form.x_ring);
                }
            }
        }
    }

    #[test]
    fn shared_memory_fits_a_multiprocessor() {
        for form in FORMS {
            assert!(
                form.shared_bytes() <= 227 * 1024,
                "{form:?}: {}",
                form.shared_bytes()
            );
            // Boxes of one warp are at most as far apart as the ring is long.
            assert!(form.x_ring.is_multiple_of(form.x_boxes()) && form.x_ring >= 4);
        }
        assert_eq!(size_of::<StageParams>(), 512);
        assert_eq!(size_of::<LayerParams>(), 4 * 512 + 192);
    }

    #[test]
    fn a_rounded_map_is_nearer_than_rounding_every_value() {
        for quant_type in [QuantType::Nf4, QuantType::Fp4] {
            let map = quant_type.map();
            let (values, scale) = rounded_map(&map);
            let off = |of: &dyn Fn(usize) -> f32| -> f32 { (0..16).map(|i| (of(i) - map[i]).powi(2)).sum() };
            let ours = off(&|i| values[i].to_f32() * scale);
            let plain = off(&|i| bf16::from_f32(map[i]).to_f32());
            assert!(ours <= 0.4 * plain, "{quant_type:?}: {ours} and {plain}");
        }
    }
}
