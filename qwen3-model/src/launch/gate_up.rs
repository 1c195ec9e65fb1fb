//! The launch of `kernels/gate_up.cuh`: gate and up of a decode step, with the norm before and the gated unit behind them.

use bytemuck::{Pod, Zeroable};
use cuda_graphs::{
    Arch, Archs, Compiler, Device, DeviceSlice, Kernel, KernelSpec, LaunchConfig, Limits, Stream, TensorMap,
};
use half::bf16;

use super::batch_rings::{BatchRings, barrier_bytes, batch_headers, inner_columns, load_forms};
use super::stage_output::accept_squares;
use super::wide_product::{CHUNK, SHARED_BYTES, WIDE_ALL_KINDS, needed, rows_map, weight_map};
use super::{aligned, refuse, same, small};
use crate::Result;

/// Batch rows that kernels are compiled for.
const COLUMNS: [usize; 4] = [96, 128, 192, 256];
/// Rows of the weight in a tile are a multiple of this: four of gate and four of up.
const GROUP: usize = 8;
/// Most rows of the weight in a tile: half as many registers hold a thread's sums.
const MOST_TILE_ROWS: usize = 160;
/// The tile of Qwen3-4B on an H200, by which the kernel is checked where there is no device.
const USUAL_TILE_ROWS: usize = 152;

/// What becomes of a tile's sums, in the order of the kernel's OF_OUTPUT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Output {
    Gated,
    /// With the roundings of a product in bf16 and the unit apart.
    GatedApart,
    /// The product itself.
    Plain,
}

/// A specialisation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Form {
    /// Batch rows; fewer are padded.
    pub(super) columns: usize,
    /// Rows of the weight in a tile.
    pub(super) tile_rows: usize,
    pub(super) output: Output,
}

impl Form {
    const fn rings(&self) -> BatchRings {
        BatchRings {
            columns: self.columns,
            tile_rows: self.tile_rows,
        }
    }

    /// As `GateUpMemory::THREADS` in the kernel.
    const fn threads(&self) -> usize {
        match self.rings().groups() {
            4 => 512,
            groups => groups * 128 + 64,
        }
    }

    /// Of a thread at most: warps are given registers by fours.
    const fn registers(&self) -> u32 {
        let most = 65_536 / self.threads().next_multiple_of(128) / 8 * 8;
        if most < 255 { most as u32 } else { 255 }
    }

    /// Slots of the ring of activations; measured on an H200, see docs/performance.md.
    const fn x_slots(&self) -> usize {
        match (self.output, self.columns) {
            // Low tiles, which need activations as fast as a multiprocessor can take them.
            (Output::Plain, _) => 12,
            (_, ..=96) => 5,
            _ => 4,
        }
    }

    /// Slots of the ring of weights: what is left.
    const fn w_slots(&self) -> usize {
        let fit = (SHARED_BYTES - 1024 - self.rings().bytes(0, self.x_slots())) / self.rings().w_slot();
        let most = match self.output {
            Output::Plain => 40,
            _ => 10,
        };
        if fit < most { fit } else { most }
    }

    /// Slots of weights that are on their way at once: about 58 KB of them.
    const fn w_flying(&self) -> usize {
        match self.output {
            Output::Plain => (3 * USUAL_TILE_ROWS).div_ceil(self.tile_rows),
            _ => 3,
        }
    }

    /// As `GateUpMemory::BYTES` in the kernel.
    pub(super) const fn shared_bytes(&self) -> usize {
        let (w_slots, x_slots) = (self.w_slots(), self.x_slots());
        self.rings().bytes(w_slots, x_slots) + barrier_bytes(w_slots, x_slots)
    }

    pub(super) fn spec(&self) -> KernelSpec {
        KernelSpec::new(
            format!(
                "wide_gate_up<{}, {}, {:?}>",
                self.columns, self.tile_rows, self.output
            ),
            include_str!("../../kernels/gate_up.cu"),
        )
        .headers(batch_headers(self.tile_rows))
        .headers([cuda_graphs::Header::new(
            "gate_up.cuh",
            include_str!("../../kernels/gate_up.cuh"),
        )])
        .define("OF_COLUMNS", self.columns)
        .define("OF_TILE", self.tile_rows)
        .define("OF_W_SLOTS", self.w_slots())
        .define("OF_X_SLOTS", self.x_slots())
        .define("OF_W_FLYING", self.w_flying())
        .define("OF_OUTPUT", self.output as usize)
        .archs(Archs::Only(vec![Arch::SM_90A]))
        // One block per multiprocessor.
        .entry("wide_gate_up", Limits::registers(self.registers()))
    }
}

/// Every specialisation, for the usual tile.
pub(super) fn specs() -> impl Iterator<Item = KernelSpec> {
    let form = |columns| Form {
        columns,
        tile_rows: USUAL_TILE_ROWS,
        output: Output::Gated,
    };
    COLUMNS.into_iter().map(move |columns| form(columns).spec())
}

/// The height of tiles with which `n` rows of weights are spread most evenly over `blocks` blocks.
fn tile_rows(n: usize, blocks: usize) -> usize {
    let rounds = n.div_ceil(blocks * MOST_TILE_ROWS);
    n.div_ceil(blocks * rounds).next_multiple_of(GROUP)
}

/// Fewest and most batch rows. With fewer [`WideProducts`](super::WideProducts) are faster.
pub const GATE_UP_ROWS: std::ops::RangeInclusive<usize> = WIDE_ALL_KINDS + 1..=COLUMNS[COLUMNS.len() - 1];

/// One product with what is around it: `out = silu(gate) * up`.
#[derive(Debug, Clone, Copy)]
pub struct GateUpOp<'a> {
    /// Batch rows, one of [`GATE_UP_ROWS`].
    pub rows: usize,
    /// `[2 * inner, K]`, gate above up, row-major; K a multiple of 64.
    pub weight: DeviceSlice<'a, bf16>,
    /// `[rows, K]`.
    pub input: DeviceSlice<'a, bf16>,
    /// Sums of squares that belong to `input`: the product is divided by the root of their mean. `[parts, columns]` with any
    /// number of parts, and as many columns as `rows` are padded to: 96, 128, 192 or 256.
    pub squares: Option<DeviceSlice<'a, f32>>,
    /// Added to the mean square.
    pub eps: f32,
    /// `[rows, inner]`.
    pub out: DeviceSlice<'a, bf16>,
}

#[repr(C, align(64))]
#[derive(Clone, Copy, Pod, Zeroable)]
struct GateUpParams {
    w_map: TensorMap,
    x_map: TensorMap,
    out: u64,
    squares_in: u64,
    rows: u32,
    units: u32,
    chunks: u32,
    tiles: u32,
    inverse_k: f32,
    eps: f32,
    parts: u32,
    unused: [u32; 5],
}

/// The kernels for weights of one number of rows and one kind of output, loaded on one device, whatever the product is for.
#[derive(Debug)]
pub(super) struct TileKernels {
    kernels: Vec<(Form, Kernel)>,
    output: Output,
    n: usize,
    blocks: usize,
}

/// One launch of them: a [`GateUpOp`] or a [`WholeProductOp`](super::WholeProductOp).
#[derive(Debug, Clone, Copy)]
pub(super) struct TileOp<'a> {
    pub(super) rows: usize,
    /// Fewest batch rows that are possible.
    pub(super) fewest: usize,
    /// `[n, K]`.
    pub(super) weight: DeviceSlice<'a, bf16>,
    /// `[rows, K]`.
    pub(super) input: DeviceSlice<'a, bf16>,
    /// As in [`GateUpOp::squares`].
    pub(super) squares: Option<DeviceSlice<'a, f32>>,
    pub(super) eps: f32,
    /// `[rows, n]`, or half as wide where gate and up become one.
    pub(super) out: DeviceSlice<'a, bf16>,
}

impl TileKernels {
    /// Compiles and loads the kernels for weights of `n` rows and these numbers of batch rows. `None` on a device that cannot
    /// run them and for an `n` that is no multiple of 8.
    pub(super) fn load(
        compiler: &Compiler,
        device: &Device,
        output: Output,
        n: usize,
        columns: &[usize],
    ) -> Result<Option<Self>> {
        let blocks = device.info().multiprocessors as usize;
        if device.arch() != Arch::SM_90A || n == 0 || !n.is_multiple_of(GROUP) {
            return Ok(None);
        }
        let tile_rows = tile_rows(n, blocks);
        let form = |&columns| Form {
            columns,
            tile_rows,
            output,
        };
        let forms = columns.iter().map(form).collect();
        Ok(Some(Self {
            kernels: load_forms(compiler, device, forms, Form::spec, "wide_gate_up")?,
            output,
            n,
            blocks,
        }))
    }

    /// The numbers of batch rows that kernels were loaded for, ascending; fewer are padded.
    pub(super) fn columns(&self) -> impl Iterator<Item = usize> {
        self.kernels.iter().map(|(form, _)| form.columns)
    }

    /// Checks the lengths and gives one launch to `stream`.
    pub(super) fn run(&self, stream: &Stream, op: &TileOp<'_>) -> Result<()> {
        let (rows, n) = (op.rows, self.n);
        let fits = |form: &Form| (op.fewest..=form.columns).contains(&rows);
        let Some((form, kernel)) = self.kernels.iter().find(|(form, _)| fits(form)) else {
            return refuse("rows", format!("{rows} rows at once are not possible"));
        };
        let k = inner_columns(op.input, op.weight, rows, n)?;
        let gated = self.output != Output::Plain;
        let width = if gated { n / 2 } else { n };
        same("output", op.out.len(), rows * width)?;
        aligned("output", op.out.ptr(), 8)?;
        let parts = op.squares.map_or(0, |squares| squares.len() / form.columns);
        let squares_in = accept_squares(stream, op.squares, parts.max(1) * form.columns)?;
        for buffer in [op.weight, op.input, op.out] {
            stream.keep_memory(buffer);
        }
        let tiles = n.div_ceil(form.tile_rows);
        let params = GateUpParams {
            w_map: weight_map(op.weight, n, k, gated, GROUP / 2, form.tile_rows)?,
            x_map: rows_map(op.input, rows, k, form.columns)?,
            out: op.out.ptr(),
            squares_in,
            rows: small("rows", rows)?,
            units: small("columns", width)?,
            chunks: small("chunks", k / CHUNK)?,
            tiles: small("tiles", tiles)?,
            inverse_k: 1.0 / k as f32,
            eps: op.eps,
            parts: small("parts", parts)?,
            ..Zeroable::zeroed()
        };
        let config = LaunchConfig::new(self.blocks.min(tiles) as u32, form.threads() as u32)
            .dynamic_shared_bytes(form.shared_bytes() as u32)
            .programmatic(true);
        // SAFETY: every buffer has the length that the kernel gives it, checked here, and is kept by a capture; the kernel
        // writes rows and columns that exist alone.
        Ok(unsafe { kernel.launch(stream, &config, &params) }?)
    }
}

/// The kernels for one width, loaded on one device.
#[derive(Debug)]
pub struct GateUp {
    kernels: TileKernels,
}

impl GateUp {
    /// Compiles and loads the kernels for weights of `2 * inner` rows and up to `max_rows` batch rows (those of
    /// [`GATE_UP_ROWS`] if it is more), or takes them from the compiler's cache. `None` on a device that
    /// cannot run them and for an `inner` that is no multiple of 4.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda). Panics: none.
    pub fn load(compiler: &Compiler, device: &Device, inner: usize, max_rows: usize) -> Result<Option<Self>> {
        let columns = &COLUMNS[..needed(&COLUMNS, *GATE_UP_ROWS.start(), max_rows)];
        let kernels = TileKernels::load(compiler, device, Output::Gated, 2 * inner, columns)?;
        Ok(kernels.map(|kernels| Self { kernels }))
    }

    /// Gives one launch to `stream`. Weights may be read before the kernels ahead in the stream have ended: whoever writes
    /// weights must wait for the device before more work is given to the stream.
    ///
    /// # Errors
    /// [`Error::Option`](crate::Error::Option) for lengths that do not fit each other;
    /// [`Error::Cuda`](crate::Error::Cuda). Panics: none.
    pub fn run(&self, stream: &Stream, op: &GateUpOp<'_>) -> Result<()> {
        let op = TileOp {
            rows: op.rows,
            fewest: *GATE_UP_ROWS.start(),
            weight: op.weight,
            input: op.input,
            squares: op.squares,
            eps: op.eps,
            out: op.out,
        };
        self.kernels.run(stream, &op)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_fill_whole_rounds_of_the_device() {
        for (inner, expected) in [
            (3072, 48),
            (6144, 96),
            (9728, 152),
            (12_288, 96),
            (17_408, 136),
            (25_600, 136),
        ] {
            let rows = tile_rows(2 * inner, 132);
            assert_eq!(rows, expected);
            let tiles = (2 * inner).div_ceil(rows);
            let rounds = tiles.div_ceil(132);
            assert!(
                tiles * 100 >= rounds * 132 * 92,
                "{inner}: {tiles} tiles of {rows}"
            );
        }
        for n in 1..3000 {
            let rows = tile_rows(8 * n, 132);
            assert!(
                rows.is_multiple_of(GROUP) && (GROUP..=MOST_TILE_ROWS).contains(&rows),
                "{n}: {rows}"
            );
        }
    }

    #[test]
    fn shared_memory_fits_a_multiprocessor() {
        for columns in COLUMNS {
            for tile_rows in (GROUP..=MOST_TILE_ROWS).step_by(GROUP) {
                let form = Form {
                    columns,
                    tile_rows,
                    output: Output::Gated,
                };
                assert!(form.shared_bytes() <= SHARED_BYTES, "{form:?}");
                assert!(form.w_slots() >= 4, "{form:?}");
            }
        }
        assert_eq!(size_of::<GateUpParams>(), 320);
    }
}
