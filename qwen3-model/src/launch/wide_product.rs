//! The launch of `kernels/wide_product.cuh`: one matrix product of a decode step of 17 to 96 rows, with what lies between
//! it and its neighbours. See there for how it works and why.

use bytemuck::{Pod, Zeroable};
use cuda_graphs::{
    Arch, Archs, Compiler, Device, DeviceBuffer, DeviceSlice, Header, Kernel, KernelSpec, LaunchConfig,
    Limits, Stream, Swizzle, TensorElement, TensorMap, TensorMapSpec,
};
use half::bf16;

use super::decode_layers::HOPPER;
use super::rope_write::{QkvRopeWrite, QkvRopeWriteParams};
use super::stage_output::{OutputParams, StageOutput, accept_squares};
use super::wgmma::product_header;
use super::{COMMON, ROPE, ROPE_WRITE, aligned, refuse, same, small};
use crate::Result;

pub(super) const WGMMA: Header = Header::new("wgmma.cuh", include_str!("../../kernels/wgmma.cuh"));
pub(super) const WIDE_COMMON: Header =
    Header::new("wide_common.cuh", include_str!("../../kernels/wide_common.cuh"));
const WIDE: Header = Header::new("wide_product.cuh", include_str!("../../kernels/wide_product.cuh"));

/// Columns of X and W in one step of the kernel.
pub(super) const CHUNK: usize = 64;
/// Shared memory of a block at most.
pub(super) const SHARED_BYTES: usize = 227 * 1024;
/// Rows of the weight in a block's tile.
const TILE_ROWS: usize = 128;
/// Of the heads that a product can norm and rotate: a tile is one.
pub const WIDE_HEAD_DIM: usize = TILE_ROWS;
const THREADS: u32 = 256 + 96;
const W_SLOT_BYTES: usize = TILE_ROWS * 2 * CHUNK;
/// Entry points, in the order of the kernel's kinds.
const KINDS: [&str; 5] = [
    "wide_residual",
    "wide_gated",
    "wide_bf16",
    "wide_f32",
    "wide_heads",
];
const GATED: usize = 1;
const BF16: usize = 2;
const HEADS: usize = 4;

/// A specialisation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Form {
    /// Batch rows; fewer are padded.
    columns: usize,
    /// Slots of the rings of weights and of activations.
    w_slots: usize,
    x_slots: usize,
    /// Slots of weights that are on their way at once.
    flying: usize,
}

/// Measured on an H200: see docs/performance.md.
const FORMS: [Form; WIDE_COLUMNS.len()] = [
    Form::new(WIDE_COLUMNS[0], [12, 6], 3),
    Form::new(WIDE_COLUMNS[1], [9, 7], 3),
    Form::new(WIDE_COLUMNS[2], [8, 7], 3),
];
const WIDE_COLUMNS: [usize; 3] = [32, 64, 96];
/// Up to so many rows every kind of product has a kernel, beyond it [`StageOutput::Residual`] alone.
pub const WIDE_ALL_KINDS: usize = 64;

/// How many of `columns`, ascending numbers of batch rows, are needed for batches of `fewest` to `max_rows` rows.
pub(super) fn needed(columns: &[usize], fewest: usize, max_rows: usize) -> usize {
    let smallest = std::iter::once(fewest).chain(columns.iter().map(|columns| columns + 1));
    smallest
        .take(columns.len())
        .take_while(|&smallest| smallest <= max_rows)
        .count()
}

impl Form {
    const fn new(columns: usize, [w_slots, x_slots]: [usize; 2], flying: usize) -> Self {
        Self {
            columns,
            w_slots,
            x_slots,
            flying,
        }
    }

    /// As `WideMemory::BYTES` in the kernel.
    const fn shared_bytes(&self) -> usize {
        let rings = self.w_slots * W_SLOT_BYTES + self.x_slots * self.columns * 2 * CHUNK;
        rings + self.columns * 4 + 16 * (self.w_slots + self.x_slots) + 8
    }

    fn spec(&self) -> KernelSpec {
        let spec = KernelSpec::new(
            format!("wide_product<{}>", self.columns),
            include_str!("../../kernels/wide_product.cu"),
        );
        let spec = spec
            .headers([
                COMMON,
                HOPPER,
                ROPE,
                ROPE_WRITE,
                WGMMA,
                product_header(self.columns / 8),
            ])
            .headers([WIDE_COMMON, WIDE])
            .define("OF_COLUMNS", self.columns)
            .define("OF_W_SLOTS", self.w_slots)
            .define("OF_X_SLOTS", self.x_slots)
            .define("OF_W_FLYING", self.flying)
            .archs(Archs::Only(vec![Arch::SM_90A]));
        // One block of 352 threads per multiprocessor.
        let kinds = KINDS.into_iter().take(self.kinds());
        kinds.fold(spec, |spec, kind| spec.entry(kind, Limits::registers(168)))
    }

    /// So many of [`KINDS`].
    const fn kinds(&self) -> usize {
        if self.columns <= WIDE_ALL_KINDS {
            KINDS.len()
        } else {
            1
        }
    }
}

/// Every specialisation.
pub(super) fn specs() -> impl Iterator<Item = KernelSpec> {
    FORMS.iter().map(Form::spec)
}

/// Fewest and most batch rows.
pub const WIDE_ROWS: std::ops::RangeInclusive<usize> = 1..=FORMS[FORMS.len() - 1].columns;

/// One product: `output = input · weightᵀ`.
#[derive(Debug, Clone, Copy)]
pub struct WideProductOp<'a> {
    /// Batch rows, one of [`WIDE_ROWS`].
    pub rows: usize,
    /// `[N, K]`, row-major; K a multiple of 64, N of 16.
    pub weight: DeviceSlice<'a, bf16>,
    /// `[rows, K]`.
    pub input: DeviceSlice<'a, bf16>,
    /// Sums of squares that belong to `input`: the product is divided by the root of their mean. See
    /// [`WideProducts::squares_len`].
    pub squares: Option<DeviceSlice<'a, f32>>,
    /// Added to the mean square.
    pub eps: f32,
    /// Where it goes; [`StageOutput::Residual`] beyond [`WIDE_ALL_KINDS`] rows.
    pub output: StageOutput<'a>,
    /// The product, which goes to [`StageOutput::Bf16`], is queries, keys and values of heads of [`WIDE_HEAD_DIM`]: norms and rotation of
    /// queries and keys and the write of keys and values are part of the launch. `qkv` of the operands is the output, of
    /// which queries alone are then written. The same bits as by the two launches.
    pub heads: Option<QkvRopeWrite<'a>>,
}

#[repr(C, align(64))]
#[derive(Clone, Copy, Pod, Zeroable)]
struct WideParams {
    w_map: TensorMap,
    x_map: TensorMap,
    out: u64,
    norm: u64,
    normed: u64,
    squares_out: u64,
    squares_in: u64,
    partial: u64,
    arrived: u64,
    rows: u32,
    units: u32,
    chunks: u32,
    tiles: u32,
    split_tiles: u32,
    split_units: u32,
    split_blocks: u32,
    inverse_k: f32,
    eps: f32,
    unused: [u32; 9],
}

/// As in `kernels/wide_product.cu`.
#[repr(C, align(64))]
#[derive(Clone, Copy, Pod, Zeroable)]
struct WideHeadsParams {
    product: WideParams,
    qkv: QkvRopeWriteParams,
}

/// How the tiles of a matrix are dealt to blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Deal {
    tiles: usize,
    /// Of which so many are cut into equal shares, the others given out whole.
    split_tiles: usize,
    /// Blocks that take a share.
    split_blocks: usize,
}

impl Deal {
    fn new(n: usize, chunks: usize, blocks: usize, all_split: bool) -> Self {
        let tiles = n.div_ceil(TILE_ROWS);
        let rest = tiles % blocks;
        let split_tiles = match all_split {
            true => tiles,
            // A nearly full round costs less than the exchange of sums.
            false if rest * 10 >= blocks * 9 => 0,
            false => rest,
        };
        Self {
            tiles,
            split_tiles,
            split_blocks: blocks.min(split_tiles * chunks),
        }
    }
}

/// The kernels, loaded on one device, and the memory through which their blocks exchange sums.
#[derive(Debug)]
pub struct WideProducts {
    /// By form, then by kind.
    kernels: Vec<Vec<Kernel>>,
    blocks: usize,
    /// f32, four per entry: `[blocks, 2, 2, columns / 8, 128]`.
    partial: DeviceBuffer<f32>,
    /// `[blocks]`.
    arrived: DeviceBuffer<u32>,
}

impl WideProducts {
    /// Compiles and loads the kernels for up to `max_rows` batch rows (those of [`WIDE_ROWS`] if it is more), or takes them
    /// from the compiler's cache. `None` on a device that cannot run them.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda). Panics: none.
    pub fn load(compiler: &Compiler, device: &Device, max_rows: usize) -> Result<Option<Self>> {
        let info = device.info();
        if device.arch() != Arch::SM_90A {
            return Ok(None);
        }
        let forms = &FORMS[..needed(&WIDE_COLUMNS, 0, max_rows)];
        let specs: Vec<_> = forms.iter().map(Form::spec).collect();
        let modules = compiler.load_all(device, &specs)?;
        let mut kernels = Vec::with_capacity(forms.len());
        for (form, module) in forms.iter().zip(&modules) {
            let kinds = KINDS.iter().take(form.kinds());
            let of_form = kinds
                .map(|kind| Ok(module.kernel(kind)?))
                .collect::<Result<Vec<_>>>()?;
            for kernel in &of_form {
                // Blocks wait for each other, so all must be resident.
                if kernel.blocks_per_multiprocessor(THREADS, form.shared_bytes() as u32)? == 0 {
                    return Ok(None);
                }
            }
            kernels.push(of_form);
        }
        let blocks = info.multiprocessors as usize;
        let columns = forms.last().map_or(0, |form| form.columns);
        Ok(Some(Self {
            kernels,
            blocks,
            partial: DeviceBuffer::zeroed(device, blocks * 2 * TILE_ROWS * columns)?,
            arrived: DeviceBuffer::zeroed(device, blocks)?,
        }))
    }

    /// Whether a product of `n` rows of weights and `k` columns can run here; `split`: with [`StageOutput::Residual`] or
    /// [`WideProductOp::heads`].
    pub fn takes(&self, n: usize, k: usize, split: bool) -> bool {
        let units = n.div_ceil(TILE_ROWS) * (k / CHUNK);
        // Products of a block's number and all chunks are 32 bits.
        let fits = (!split || n <= self.blocks * TILE_ROWS) && units < u32::MAX as usize / (self.blocks + 1);
        n > 0 && k > 0 && n.is_multiple_of(16) && k.is_multiple_of(CHUNK) && fits
    }

    /// Batch rows that `rows` are padded to; `None` if they are too many for what was loaded.
    fn form(&self, rows: usize) -> Option<(usize, &'static Form)> {
        let found = FORMS
            .iter()
            .take(self.kernels.len())
            .position(|form| rows <= form.columns)?;
        Some((found, &FORMS[found]))
    }

    /// Elements of the sums of squares of `rows` rows of `k` columns: `[k / 64, rows rounded up to a form]`, 0 for too
    /// many rows.
    pub fn squares_len(&self, rows: usize, k: usize) -> usize {
        self.form(rows)
            .map_or(0, |(_, form)| k.div_ceil(CHUNK) * form.columns)
    }

    /// Gives one launch to `stream`. Launches of one `WideProducts` must be in one stream.
    ///
    /// Weights may be read before the kernels ahead in the stream have ended: whoever writes weights must wait for the
    /// device before more work is given to the stream.
    ///
    /// # Errors
    /// [`Error::Option`](crate::Error::Option) for lengths that do not fit each other;
    /// [`Error::Cuda`](crate::Error::Cuda). Panics: none.
    pub fn run(&self, stream: &Stream, op: &WideProductOp<'_>) -> Result<()> {
        let rows = op.rows;
        let Some((which, form)) = self.form(rows).filter(|_| rows > 0) else {
            return refuse("rows", format!("{rows} rows at once are not possible"));
        };
        let k = op.input.len() / rows;
        same("input", op.input.len(), rows * k)?;
        let n = op.weight.len().checked_div(k).unwrap_or(0);
        same("weight", op.weight.len(), n * k)?;
        let split = op.heads.is_some() || matches!(op.output, StageOutput::Residual { .. });
        if !self.takes(n, k, split) {
            return refuse("weight", format!("of {n} rows of {k} columns is not possible"));
        }
        aligned("weight", op.weight.ptr(), 16)?;
        let squares_in = accept_squares(stream, op.squares, self.squares_len(rows, k))?;
        for buffer in [op.weight, op.input] {
            stream.keep_memory(buffer);
        }
        stream.keep_memory(self.partial.as_slice());
        stream.keep_memory(self.arrived.as_slice());

        let chunks = k / CHUNK;
        let deal = Deal::new(n, chunks, self.blocks, split);
        let OutputParams {
            kind,
            units,
            out,
            norm,
            normed,
            squares_out,
        } = op.output.accept(stream, rows, n, self.squares_len(rows, n))?;
        let params = WideParams {
            w_map: weight_map(op.weight, n, k, kind as usize == GATED, 8, TILE_ROWS)?,
            x_map: rows_map(op.input, rows, k, form.columns)?,
            out,
            norm,
            normed,
            squares_out,
            squares_in,
            partial: self.partial.as_slice().ptr(),
            arrived: self.arrived.as_slice().ptr(),
            rows: small("rows", rows)?,
            units: small("columns", units)?,
            chunks: small("chunks", chunks)?,
            tiles: small("tiles", deal.tiles)?,
            split_tiles: small("tiles", deal.split_tiles)?,
            split_units: small("chunks", deal.split_tiles * chunks)?,
            split_blocks: small("blocks", deal.split_blocks)?,
            inverse_k: 1.0 / k as f32,
            eps: op.eps,
            ..Zeroable::zeroed()
        };
        let config = LaunchConfig::new(self.blocks as u32, THREADS)
            .dynamic_shared_bytes(form.shared_bytes() as u32)
            .programmatic(true);
        let kernel = |kind: usize| match self.kernels[which].get(kind) {
            Some(kernel) => Ok(kernel),
            None => refuse("output", format!("is not possible for {rows} rows")),
        };
        let Some(heads) = op.heads else {
            // SAFETY: every buffer has the length that the kernel gives it, checked here and in `StageOutput::accept`, and is
            // kept by a capture; `partial` and `arrived` are made for this many blocks, all of which are resident, as `load`
            // made sure.
            return Ok(unsafe { kernel(kind as usize)?.launch(stream, &config, &params) }?);
        };
        if kind as usize != BF16 || heads.qkv.ptr() != out {
            return refuse(
                "heads",
                "are not those of a product that goes to their `qkv` in bf16".into(),
            );
        }
        let params = WideHeadsParams {
            product: params,
            qkv: heads.accept(stream, WIDE_HEAD_DIM)?,
        };
        same("positions", heads.positions.len(), rows)?;
        // SAFETY: as above; of heads, what `qkv_rope_write` checks is checked in `QkvRopeWrite::accept` and in the kernel.
        Ok(unsafe { kernel(HEADS)?.launch(stream, &config, &params) }?)
    }
}

/// A row-major `[n, k]` matrix in boxes of 64 columns and `tile_rows` rows, in groups of `group` rows, 4 or 8: neighbouring
/// groups, or for gate above up a group of each in turn.
pub(super) fn weight_map(
    matrix: DeviceSlice<'_, bf16>,
    n: usize,
    k: usize,
    gated: bool,
    group: usize,
    tile_rows: usize,
) -> Result<TensorMap> {
    let row = 2 * k as u64;
    let of_group = group as u64 * row;
    let (second, pair) = match gated {
        true => (n as u64 / 2 * row, of_group),
        false => (of_group, 2 * of_group),
    };
    let spec = TensorMapSpec {
        element: TensorElement::Bf16,
        dims: &[k as u64, group as u64, 2, (n / (2 * group)) as u64],
        strides: &[row, second, pair],
        box_dims: &[CHUNK as u32, group as u32, 2, (tile_rows / (2 * group)) as u32],
        swizzle: Swizzle::Bytes128,
    };
    Ok(TensorMap::tiled(matrix, &spec)?)
}

/// A row-major `[rows, k]` matrix in boxes of 64 columns and `box_rows` rows.
pub(super) fn rows_map(
    matrix: DeviceSlice<'_, bf16>,
    rows: usize,
    k: usize,
    box_rows: usize,
) -> Result<TensorMap> {
    let spec = TensorMapSpec {
        element: TensorElement::Bf16,
        dims: &[k as u64, rows as u64],
        strides: &[2 * k as u64],
        box_dims: &[CHUNK as u32, box_rows as u32],
        swizzle: Swizzle::Bytes128,
    };
    Ok(TensorMap::tiled(matrix, &spec)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The shares as the kernel computes them: tile, first chunk and number of chunks, by block.
    fn shares(deal: &Deal, chunks: usize, blocks: usize) -> Vec<Vec<(usize, usize, usize)>> {
        let units = deal.split_tiles * chunks;
        let share = |block: usize| {
            let mut parts = Vec::new();
            if block < deal.split_blocks {
                let (mut unit, end) = (
                    block * units / deal.split_blocks,
                    (block + 1) * units / deal.split_blocks,
                );
                while unit < end {
                    let n = (chunks - unit % chunks).min(end - unit);
                    parts.push((unit / chunks, unit % chunks, n));
                    unit += n;
                }
            }
            let whole = (deal.split_tiles + block..deal.tiles).step_by(blocks);
            parts.extend(whole.map(|tile| (tile, 0, chunks)));
            parts
        };
        (0..blocks).map(share).collect()
    }

    #[test]
    fn every_chunk_of_every_tile_is_multiplied_once_and_a_share_has_at_most_two_split_tiles() {
        for blocks in [1, 2, 66, 132] {
            for (n, k) in [
                (16, 64),
                (2560, 4096),
                (2560, 9728),
                (6144, 2560),
                (19_456, 2560),
                (151_936, 2560),
                (30_000, 128),
            ] {
                for residual in [false, true] {
                    let (chunks, residual) = (k / CHUNK, residual && n <= TILE_ROWS * blocks);
                    let deal = Deal::new(n, chunks, blocks, residual);
                    assert!(deal.split_tiles <= blocks, "{deal:?}");
                    let mut seen = vec![0; deal.tiles * chunks];
                    for share in shares(&deal, chunks, blocks) {
                        for &(tile, first, n) in &share {
                            seen[tile * chunks + first..][..n]
                                .iter_mut()
                                .for_each(|seen| *seen += 1);
                        }
                        let split = share.iter().filter(|part| part.0 < deal.split_tiles);
                        assert!(split.count() <= 2, "{share:?}");
                    }
                    assert!(seen.iter().all(|&seen| seen == 1), "{deal:?}");
                }
            }
        }
    }

    #[test]
    fn a_batch_has_a_form_for_each_number_of_its_rows_and_none_beyond() {
        for (columns, fewest) in [(vec![32, 64, 96, 128], 0), (vec![96, 128, 192, 256], 65)] {
            for max_rows in fewest..300 {
                let loaded = &columns[..needed(&columns, fewest, max_rows)];
                let last = max_rows.min(columns[columns.len() - 1]);
                assert!(
                    loaded.last().is_some_and(|&most| most >= last),
                    "{max_rows}: {loaded:?}"
                );
                let others = loaded.len() - 1;
                assert!(
                    loaded[..others].iter().all(|&most| most < max_rows),
                    "{max_rows}: {loaded:?}"
                );
            }
        }
        assert_eq!(needed(&[96, 128, 192, 256], 65, 64), 0);
    }

    #[test]
    fn shared_memory_fits_a_multiprocessor() {
        for form in FORMS {
            assert!(form.shared_bytes() <= SHARED_BYTES, "{form:?}");
            assert!(
                form.shared_bytes() >= 16 * form.columns * 4,
                "sums of squares need room: {form:?}"
            );
        }
        assert_eq!(size_of::<WideParams>(), 384);
        assert_eq!(size_of::<WideHeadsParams>(), 512);
    }
}
