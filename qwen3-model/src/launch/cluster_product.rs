//! The launch of `kernels/cluster_product.cuh`: a product of a decode step of 33 to 256 rows whose inner dimension is shared by
//! the blocks of a cluster, with what lies between it and its neighbours.

use bytemuck::{Pod, Zeroable};
use cuda_graphs::{
    Arch, Archs, Compiler, Device, DeviceSlice, Header, Kernel, KernelSpec, LaunchConfig, Limits, Stream,
    TensorMap,
};
use half::bf16;

use super::batch_rings::{BatchRings, barrier_bytes, batch_headers, inner_columns, load_forms};
use super::stage_output::StageOutput;
use super::wide_product::{CHUNK, SHARED_BYTES, needed, rows_map};
use super::{aligned, refuse, small};
use crate::Result;

pub(super) const CLUSTER_PRIMITIVES: Header =
    Header::new("cluster.cuh", include_str!("../../kernels/cluster.cuh"));
pub(super) const CLUSTER_RINGS: Header = Header::new(
    "cluster_rings.cuh",
    include_str!("../../kernels/cluster_rings.cuh"),
);
const CLUSTER: Header = Header::new(
    "cluster_product.cuh",
    include_str!("../../kernels/cluster_product.cuh"),
);

/// Batch rows that kernels are compiled for.
const ROWS: [usize; 4] = [64, 128, 192, 256];
/// Batch rows of a block at most: beyond, two blocks share the weights of a tile.
const MOST_COLUMNS: usize = 128;
/// Most rows of the weight in a tile: half as many registers hold a thread's sums.
const MOST_TILE_ROWS: usize = 192;
/// Blocks that share the inner dimension; measured on an H200, see docs/performance.md.
const SPLITS: usize = 4;
/// Registers of a thread at most: up to ten warps, which are given registers by fours.
const REGISTERS: u32 = 168;

/// Fewest and most batch rows. With fewer, and on an H200 from 65 to 96, [`WideProducts`](super::WideProducts) are faster.
pub const CLUSTER_ROWS: std::ops::RangeInclusive<usize> = 33..=ROWS[ROWS.len() - 1];

/// A specialisation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Form {
    /// Batch rows; fewer are padded.
    rows: usize,
    /// Rows of the weight in a tile.
    tile_rows: usize,
    /// Blocks that share the inner dimension.
    splits: usize,
}

impl Form {
    /// The form for a weight of `n` rows on a device of so many multiprocessors.
    fn new(rows: usize, n: usize, multiprocessors: usize) -> Self {
        let mut form = Self {
            rows,
            tile_rows: 0,
            splits: SPLITS,
        };
        let (clusters, quantum) = (
            clusters_at_once(form.blocks(), multiprocessors),
            8 * form.halves(),
        );
        let rounds = n.div_ceil(clusters * MOST_TILE_ROWS);
        form.tile_rows = n.div_ceil(clusters * rounds).next_multiple_of(quantum);
        form
    }

    /// Blocks that share the weights of a tile, each with so many of the batch rows.
    const fn halves(&self) -> usize {
        if self.rows > MOST_COLUMNS { 2 } else { 1 }
    }

    const fn columns(&self) -> usize {
        self.rows / self.halves()
    }

    /// Of a cluster.
    const fn blocks(&self) -> usize {
        self.splits * self.halves()
    }

    const fn rings(&self) -> BatchRings {
        BatchRings {
            columns: self.columns(),
            tile_rows: self.tile_rows,
        }
    }

    /// As `ClusterMemory::THREADS` in the kernel.
    const fn threads(&self) -> usize {
        self.rings().groups() * 128 + 64
    }

    /// Slots of the ring of activations and of the ring of weights: about as many of each as fit, eight at most.
    fn slots(&self) -> (usize, usize) {
        let (w_slot, x_slot) = (self.rings().w_slot(), self.rings().x_slot());
        let room = SHARED_BYTES - 1024 - self.rings().padding();
        let x_slots = (room / (w_slot + x_slot)).min(8);
        let w_slots = ((room - x_slots * x_slot) / w_slot).min(8);
        let more = room - w_slots * w_slot - x_slots * x_slot;
        (w_slots, (x_slots + more / x_slot).min(8))
    }

    /// Slots of weights that are on their way at once; measured on an H200: more delay what comes after them.
    const fn flying(&self) -> usize {
        if self.tile_rows > 128 { 3 } else { 4 }
    }

    /// As `ClusterMemory::BYTES` in the kernel.
    fn shared_bytes(&self) -> usize {
        let (w_slots, x_slots) = self.slots();
        let share = self.tile_rows.div_ceil(8 * self.splits);
        let sums = (self.splits - 1) * share * self.rings().groups() * 128 * 16;
        self.rings().bytes(w_slots, x_slots).max(sums) + barrier_bytes(w_slots, x_slots) + 8
    }

    fn spec(&self) -> KernelSpec {
        let (w_slots, x_slots) = self.slots();
        KernelSpec::new(
            format!(
                "cluster_product<{}, {}, {}>",
                self.rows, self.tile_rows, self.splits
            ),
            include_str!("../../kernels/cluster_product.cu"),
        )
        .headers(batch_headers(self.tile_rows))
        .headers([CLUSTER_PRIMITIVES, CLUSTER_RINGS, CLUSTER])
        .define("OF_COLUMNS", self.columns())
        .define("OF_TILE", self.tile_rows)
        .define("OF_SPLITS", self.splits)
        .define("OF_HALVES", self.halves())
        .define("OF_W_SLOTS", w_slots)
        .define("OF_X_SLOTS", x_slots)
        .define("OF_W_FLYING", self.flying())
        .archs(Archs::Only(vec![Arch::SM_90A]))
        .entry("cluster_product", Limits::registers(REGISTERS))
    }
}

/// Clusters of so many blocks that a device runs at once, one block a multiprocessor: those of a cluster are neighbours, so
/// that a few are left over. Of an H200's 132 there are 15 of eight and 30 of four.
pub(super) fn clusters_at_once(blocks: usize, multiprocessors: usize) -> usize {
    (multiprocessors / blocks * 15 / 16).max(1)
}

/// Every specialisation, for Qwen3-4B on an H200: kernels are checked by these where there is no device.
pub(super) fn specs() -> impl Iterator<Item = KernelSpec> {
    ROWS.into_iter().map(|rows| Form::new(rows, 2560, 132).spec())
}

/// One product with what is around it: `residual += input · weightᵀ`, and what the norm that follows needs.
#[derive(Debug, Clone, Copy)]
pub struct ClusterProductOp<'a> {
    /// Batch rows, one of [`CLUSTER_ROWS`].
    pub rows: usize,
    /// `[n, K]`, row-major; K a multiple of 64.
    pub weight: DeviceSlice<'a, bf16>,
    /// `[rows, K]`.
    pub input: DeviceSlice<'a, bf16>,
    /// Where it goes: [`StageOutput::Residual`], with squares of [`ClusterProduct::squares_len`].
    pub output: StageOutput<'a>,
}

#[repr(C, align(64))]
#[derive(Clone, Copy, Pod, Zeroable)]
struct ClusterParams {
    w_map: TensorMap,
    x_map: TensorMap,
    residual: u64,
    norm: u64,
    normed: u64,
    squares: u64,
    rows: u32,
    units: u32,
    chunks: u32,
    unused: [u32; 5],
}

/// The kernels for weights of one number of rows, loaded on one device.
#[derive(Debug)]
pub struct ClusterProduct {
    kernels: Vec<(Form, Kernel)>,
    n: usize,
}

impl ClusterProduct {
    /// Compiles and loads the kernels for weights of `n` rows and up to `max_rows` batch rows (those of [`CLUSTER_ROWS`] if it
    /// is more), or takes them from the compiler's cache. `None` on a device that cannot run them and for an `n` that is
    /// no multiple of 8.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda). Panics: none.
    pub fn load(compiler: &Compiler, device: &Device, n: usize, max_rows: usize) -> Result<Option<Self>> {
        let multiprocessors = device.info().multiprocessors as usize;
        if device.arch() != Arch::SM_90A || n == 0 || !n.is_multiple_of(8) || multiprocessors < 8 {
            return Ok(None);
        }
        let rows = &ROWS[..needed(&ROWS, *CLUSTER_ROWS.start(), max_rows)];
        let form = |&rows| Form::new(rows, n, multiprocessors);
        let forms = rows.iter().map(form).collect();
        let kernels = load_forms(compiler, device, forms, Form::spec, "cluster_product")?;
        Ok(Some(Self { kernels, n }))
    }

    fn form(&self, rows: usize) -> Option<&(Form, Kernel)> {
        let fits = |form: &Form| CLUSTER_ROWS.contains(&rows) && rows <= form.rows;
        self.kernels.iter().find(|(form, _)| fits(form))
    }

    /// What `rows` are rounded up to: 64, 128, 192 or 256; 0 for a number that is not possible.
    pub fn padded_rows(&self, rows: usize) -> usize {
        self.form(rows).map_or(0, |(form, _)| form.rows)
    }

    /// Sums of squares of a row that [`StageOutput::Residual`] leaves; 0 for a number of rows that is not possible.
    pub fn squares_parts(&self, rows: usize) -> usize {
        self.form(rows)
            .map_or(0, |(form, _)| self.n.div_ceil(form.tile_rows) * form.splits)
    }

    /// Elements of the sums of squares that [`StageOutput::Residual`] leaves: `[parts, padded rows]`.
    pub fn squares_len(&self, rows: usize) -> usize {
        self.squares_parts(rows) * self.padded_rows(rows)
    }

    /// Gives one launch to `stream`. Weights may be read before the kernels ahead in the stream have ended: whoever writes
    /// weights must wait for the device before more work is given to the stream.
    ///
    /// # Errors
    /// [`Error::Option`](crate::Error::Option) for lengths that do not fit each other;
    /// [`Error::Cuda`](crate::Error::Cuda). Panics: none.
    pub fn run(&self, stream: &Stream, op: &ClusterProductOp<'_>) -> Result<()> {
        let rows = op.rows;
        let Some((form, kernel)) = self.form(rows) else {
            return refuse("rows", format!("{rows} rows at once are not possible"));
        };
        let k = inner_columns(op.input, op.weight, rows, self.n)?;
        if !matches!(op.output, StageOutput::Residual { .. }) {
            return refuse("output", "is not the residual stream".into());
        }
        let output = op.output.accept(stream, rows, self.n, self.squares_len(rows))?;
        // Four elements at once are read and written of each.
        for (what, at, bytes) in [
            ("residual", output.out, 16),
            ("norm", output.norm, 16),
            ("normed", output.normed, 8),
        ] {
            aligned(what, at, bytes)?;
        }
        for buffer in [op.weight, op.input] {
            stream.keep_memory(buffer);
        }
        let params = ClusterParams {
            w_map: rows_map(op.weight, self.n, k, form.tile_rows / form.halves())?,
            x_map: rows_map(op.input, rows, k, form.columns())?,
            residual: output.out,
            norm: output.norm,
            normed: output.normed,
            squares: output.squares_out,
            rows: small("rows", rows)?,
            units: small("columns", self.n)?,
            chunks: small("chunks", k / CHUNK)?,
            unused: [0; 5],
        };
        let grid = self.n.div_ceil(form.tile_rows) * form.blocks();
        let config = LaunchConfig::new(small("blocks", grid)?, form.threads() as u32)
            .dynamic_shared_bytes(form.shared_bytes() as u32)
            .cluster([form.blocks() as u32, 1, 1])
            .programmatic(true);
        // SAFETY: every buffer has the length that the kernel gives it, checked here and in `StageOutput::accept`, and is kept
        // by a capture; the kernel writes rows and columns that exist alone. Blocks wait for those of their cluster, which run
        // at the same time, and for no others.
        Ok(unsafe { kernel.launch(stream, &config, &params) }?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_the_weight_and_shared_memory_fits_a_multiprocessor() {
        for n in [8, 64, 1024, 2560, 4096, 5120, 6144, 10_240] {
            for rows in ROWS {
                for multiprocessors in [8, 78, 132] {
                    let form = Form::new(rows, n, multiprocessors);
                    assert!(form.blocks() <= 8, "{form:?}");
                    assert!(
                        form.tile_rows.is_multiple_of(8 * form.halves()) && form.tile_rows <= MOST_TILE_ROWS,
                        "{n}: {form:?}"
                    );
                    let (w_slots, x_slots) = form.slots();
                    assert!(
                        w_slots > form.flying() && x_slots >= 4,
                        "{form:?}: {w_slots}, {x_slots}"
                    );
                    assert!(form.shared_bytes() <= SHARED_BYTES, "{form:?}");
                }
            }
        }
        assert_eq!(size_of::<ClusterParams>(), 320);
    }

    #[test]
    fn tiles_of_an_h200_fill_its_clusters_once() {
        let tiles = |rows| {
            let form = Form::new(rows, 2560, 132);
            (2560_usize.div_ceil(form.tile_rows), form.tile_rows, form.blocks())
        };
        assert_eq!(tiles(64), (30, 88, 4));
        assert_eq!(tiles(128), (30, 88, 4));
        assert_eq!(tiles(192), (15, 176, 8));
        assert_eq!(tiles(256), (15, 176, 8));
    }
}
