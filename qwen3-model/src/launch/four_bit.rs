//! Products with matrices in 4 bits, and such matrices to bf16.

use std::ops::Range;

use bytemuck::{Pod, Zeroable};
use cuda_graphs::{
    Compiler, Device, DeviceBuffer, DeviceSlice, Header, Kernel, KernelSpec, LaunchConfig, Limits, Stream,
};
use half::bf16;

use super::four_bit_layer::rounded_map;
use super::{aligned, refuse, same, small, spec};
use crate::{QuantType, QuantizedMatrix, Result};

/// Most rows that [`FourBitKernels::multiply`] takes at once.
pub const FOUR_BIT_ROWS: usize = 64;
/// Elements that share a scale in the matrices that the kernels take.
pub const FOUR_BIT_BLOCK: usize = 64;

/// Tiles of eight rows that the product is compiled for.
const TILES: [usize; 4] = [1, 2, 4, 8];
const ROWS_PER_BLOCK: usize = 16;
const MAX_WARPS: usize = 16;
/// Most warps of a block of which several share a multiprocessor, or that fetches its input anew for every unit.
const FEW_WARPS: usize = 10;
/// Bytes of a row of fragments in shared memory, see the kernel.
const FRAGMENT_BYTES: usize = 528;
/// Bytes of the table of two weights, see the kernel.
const PAIRS_BYTES: usize = 256 * 16 * 8;
/// Columns that a warp takes at a time.
const UNIT: usize = 256;
const DEQUANTIZE_THREADS: u32 = 256;
/// Words that a thread takes at once.
const DEQUANTIZE_WORDS: usize = 4;
/// Blocks per multiprocessor: as many as their tables leave room for.
const DEQUANTIZE_BLOCKS: usize = 6;
const QUANTIZE_WARPS: usize = 8;

const PAIRS: Header = Header::new("nf4_pairs.cuh", include_str!("../../kernels/nf4_pairs.cuh"));

fn matmul_spec(tiles: usize) -> KernelSpec {
    // Two blocks of ten warps, or one of sixteen, ten or eight.
    let registers = [(1, 102), (2, 128), (4, 200), (8, 255)];
    let registers = registers
        .iter()
        .find(|(t, _)| *t == tiles)
        .map_or(128, |(_, r)| *r);
    spec(
        format!("nf4_matmul<{tiles}>"),
        include_str!("../../kernels/nf4_matmul.cu"),
    )
    .headers([PAIRS])
    .define("TILES", tiles)
    .entry("nf4_matmul", Limits::registers(registers))
}

/// The kernels of this file, in every specialisation.
pub(super) fn specs() -> Vec<KernelSpec> {
    let dequantize = spec("nf4_dequantize", include_str!("../../kernels/nf4_dequantize.cu"))
        .headers([PAIRS])
        .entry("nf4_dequantize", Limits::registers(64));
    let quantize = spec("nf4_quantize", include_str!("../../kernels/nf4_quantize.cu"))
        .entry("nf4_quantize", Limits::registers(64));
    let products = TILES.map(matmul_spec).into_iter();
    products.chain([dequantize, quantize]).collect()
}

/// A matrix `[rows, cols]` in 4 bits on the device, in blocks of [`FOUR_BIT_BLOCK`].
#[derive(Debug)]
pub struct FourBitBuffer {
    /// `[rows, cols / 8]`, as in files.
    packed: DeviceBuffer<u32>,
    /// `[cols / FOUR_BIT_BLOCK, rows]`: the scales of neighbouring rows are neighbours.
    absmax: DeviceBuffer<f32>,
    map: [f32; 16],
    /// What the persistent kernel multiplies by in its place.
    rounded_map: ([bf16; 16], f32),
    rows: usize,
    cols: usize,
}

impl FourBitBuffer {
    /// Whether the kernels take this matrix, alone or as a part of a fused one.
    pub fn supports(matrix: &QuantizedMatrix) -> bool {
        matrix.blocksize() == FOUR_BIT_BLOCK
            && matrix.rows().is_multiple_of(ROWS_PER_BLOCK)
            && matrix.cols().is_multiple_of(FOUR_BIT_BLOCK)
            && !matrix.casts_through_f16()
    }

    /// The rows of `parts`, one below the other, on the device.
    ///
    /// # Errors
    /// [`Error::Option`](crate::Error::Option) for parts that the kernels do not take or that do not fit each other;
    /// [`Error::Cuda`](crate::Error::Cuda). Panics: none.
    pub fn upload(stream: &Stream, parts: &[&QuantizedMatrix]) -> Result<Self> {
        let Some(first) = parts.first() else {
            return refuse("parts", "are none".into());
        };
        let (cols, map) = (first.cols(), *first.map());
        let fits =
            |part: &&QuantizedMatrix| Self::supports(part) && part.cols() == cols && *part.map() == map;
        if !parts.iter().all(fits) {
            return refuse("parts", "do not fit each other, or the kernels".into());
        }
        let rows: usize = parts.iter().map(|part| part.rows()).sum();
        let device = stream.device();
        let packed = DeviceBuffer::<u32>::zeroed(device, rows * cols / 8)?;
        let blocks = cols / FOUR_BIT_BLOCK;
        let mut scales = vec![0.0; rows * blocks];
        let mut first = 0;
        for part in parts {
            let words: Vec<u32> = part
                .packed()
                .chunks_exact(4)
                .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect();
            let end = first + part.rows();
            stream.upload(packed.slice(first * cols / 8..end * cols / 8)?, &words)?;
            for (row, of_row) in (first..end).zip(part.absmax().chunks_exact(blocks)) {
                let column = scales.iter_mut().skip(row).step_by(rows);
                column.zip(of_row).for_each(|(to, from)| *to = *from);
            }
            first = end;
        }
        let absmax = DeviceBuffer::from_slice(stream, &scales)?;
        // What was read must stay until it is there.
        stream.synchronize()?;
        Ok(Self {
            packed,
            absmax,
            map,
            rounded_map: rounded_map(&map),
            rows,
            cols,
        })
    }

    /// Zeros `[rows, cols]`, for [`FourBitKernels::quantize`] to fill.
    ///
    /// # Errors
    /// [`Error::Option`](crate::Error::Option) for a shape that the kernels do not take;
    /// [`Error::Cuda`](crate::Error::Cuda). Panics: none.
    pub fn zeroed(device: &Device, rows: usize, cols: usize, quant_type: QuantType) -> Result<Self> {
        if !rows.is_multiple_of(ROWS_PER_BLOCK) || !cols.is_multiple_of(FOUR_BIT_BLOCK) {
            let problem = format!("{rows} x {cols} is no multiple of {ROWS_PER_BLOCK} x {FOUR_BIT_BLOCK}");
            return refuse("shape", problem);
        }
        Ok(Self {
            packed: DeviceBuffer::zeroed(device, rows * cols / 8)?,
            absmax: DeviceBuffer::zeroed(device, rows * cols / FOUR_BIT_BLOCK)?,
            map: quant_type.map(),
            rounded_map: rounded_map(&quant_type.map()),
            rows,
            cols,
        })
    }

    /// Output features.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features.
    pub fn cols(&self) -> usize {
        self.cols
    }

    pub(crate) fn map(&self) -> &[f32; 16] {
        &self.map
    }

    /// See [`rounded_map`].
    pub(super) fn rounded_map(&self) -> ([bf16; 16], f32) {
        self.rounded_map
    }

    pub(super) fn packed(&self) -> DeviceSlice<'_, u32> {
        self.packed.as_slice()
    }

    pub(super) fn absmax(&self) -> DeviceSlice<'_, f32> {
        self.absmax.as_slice()
    }

    pub(super) fn keep(&self, stream: &Stream) {
        stream.keep_memory(&self.packed);
        stream.keep_memory(&self.absmax);
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> u64 {
        4 * (self.packed.len() + self.absmax.len()) as u64
    }
}

/// Where a product goes.
#[derive(Debug, Clone, Copy)]
pub enum ProductOutput<'a> {
    /// Rounded once.
    Bf16(DeviceSlice<'a, bf16>),
    /// As summed.
    F32(DeviceSlice<'a, f32>),
}

impl ProductOutput<'_> {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Bf16(y) => y.len(),
            Self::F32(y) => y.len(),
        }
    }

    fn slice(&self, range: Range<usize>) -> Result<Self> {
        Ok(match self {
            Self::Bf16(y) => Self::Bf16(y.slice(range)?),
            Self::F32(y) => Self::F32(y.slice(range)?),
        })
    }

    pub(super) fn ptr(&self) -> u64 {
        match self {
            Self::Bf16(y) => y.ptr(),
            Self::F32(y) => y.ptr(),
        }
    }

    pub(super) fn is_f32(&self) -> u32 {
        u32::from(matches!(self, Self::F32(_)))
    }

    pub(super) fn keep(&self, stream: &Stream) {
        match self {
            Self::Bf16(y) => stream.keep_memory(*y),
            Self::F32(y) => stream.keep_memory(*y),
        }
    }
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct MatmulParams {
    packed: u64,
    absmax: u64,
    x: u64,
    y: u64,
    n: u32,
    k: u32,
    m: u32,
    y_is_f32: u32,
    resident: u32,
    unused: u32,
    map: [f32; 16],
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct DequantizeParams {
    packed: u64,
    absmax: u64,
    out: u64,
    rows: u32,
    blocks: u32,
    stride: u32,
    unused: u32,
    map: [f32; 16],
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct QuantizeParams {
    input: u64,
    packed: u64,
    absmax: u64,
    n_blocks: u64,
    blocks: u32,
    stride: u32,
    bounds: [f32; 15],
    unused: u32,
    nibbles: [u8; 16],
}

/// The kernels for matrices in 4 bits, loaded on one device.
#[derive(Debug, Clone)]
pub struct FourBitKernels {
    /// In the order of [`TILES`].
    matmul: Vec<Kernel>,
    dequantize: Kernel,
    quantize: Kernel,
    /// Of a block, at most.
    shared_bytes: usize,
    multiprocessors: usize,
}

impl FourBitKernels {
    /// Compiles the kernels, or takes them from the compiler's cache, and loads them.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda). Panics: none.
    pub fn load(compiler: &Compiler, device: &Device) -> Result<Self> {
        let modules = compiler.load_all(device, &specs())?;
        let (products, others) = modules.split_at(TILES.len());
        let matmul = products.iter().map(|module| module.kernel("nf4_matmul"));
        Ok(Self {
            matmul: matmul.collect::<Result<_, _>>()?,
            dequantize: others[0].kernel("nf4_dequantize")?,
            quantize: others[1].kernel("nf4_quantize")?,
            shared_bytes: device.info().shared_bytes_per_block,
            multiprocessors: device.info().multiprocessors as usize,
        })
    }

    /// `y = x · Wᵀ` for `m` up to [`FOUR_BIT_ROWS`] rows: `x` is `[m, cols]`, `y` `[m, rows]`. The sums are in f32, in an
    /// order that depends on the shape of W and on whether there are up to 8, 16, 32 or 64 rows.
    ///
    /// # Errors
    /// [`Error::Option`](crate::Error::Option) for lengths that do not fit each other or too many rows;
    /// [`Error::Cuda`](crate::Error::Cuda). Panics: none.
    pub fn multiply(
        &self,
        stream: &Stream,
        m: usize,
        x: DeviceSlice<'_, bf16>,
        w: &FourBitBuffer,
        y: ProductOutput<'_>,
    ) -> Result<()> {
        same("x", x.len(), m * w.cols)?;
        same("y", y.len(), m * w.rows)?;
        aligned("x", x.ptr(), 16)?;
        stream.keep_memory(x);
        w.keep(stream);
        y.keep(stream);
        if m == 0 {
            return Ok(());
        }
        let Some((tiles, kernel)) = TILES.iter().zip(&self.matmul).find(|(tiles, _)| m <= 8 * **tiles) else {
            return refuse(
                "rows",
                format!("{m} rows at once, at most {FOUR_BIT_ROWS} are possible"),
            );
        };
        let tiles_per_multiprocessor = w.rows / ROWS_PER_BLOCK / self.multiprocessors.max(1);
        let plan = Plan::new(*tiles, w.cols, self.shared_bytes, tiles_per_multiprocessor);
        if *tiles == 2 && !plan.resident {
            // Twice eight rows whose input fits are quicker than sixteen whose input is fetched anew for every tile.
            for rows in [0..8, 8..m] {
                let x = x.slice(rows.start * w.cols..rows.end * w.cols)?;
                let y = y.slice(rows.start * w.rows..rows.end * w.rows)?;
                self.multiply(stream, rows.len(), x, w, y)?;
            }
            return Ok(());
        }
        let blocks = match plan.resident {
            true => (w.rows / ROWS_PER_BLOCK).min(self.multiprocessors * plan.blocks),
            false => w.rows / ROWS_PER_BLOCK,
        };
        let params = MatmulParams {
            packed: w.packed.ptr(),
            absmax: w.absmax.ptr(),
            x: x.ptr(),
            y: y.ptr(),
            n: small("rows", w.rows)?,
            k: small("cols", w.cols)?,
            m: small("m", m)?,
            y_is_f32: y.is_f32(),
            resident: u32::from(plan.resident),
            unused: 0,
            map: w.map,
        };
        let config = LaunchConfig::new(small("rows", blocks)?, plan.warps as u32 * 32)
            .dynamic_shared_bytes(small("shared memory", plan.shared)?)
            .programmatic(true);
        // SAFETY: every buffer has the length that the kernel's header gives it, checked above and in `upload`, and is
        // kept by a capture; shared memory holds a stage per warp.
        Ok(unsafe { kernel.launch(stream, &config, &params) }?)
    }

    /// The values of `rows` of `w` as bf16, `[rows, cols]`, into `out`.
    ///
    /// # Errors
    /// [`Error::Option`](crate::Error::Option) for rows that are not there and an `out` of another size;
    /// [`Error::Cuda`](crate::Error::Cuda). Panics: none.
    pub fn dequantize(
        &self,
        stream: &Stream,
        w: &FourBitBuffer,
        rows: Range<usize>,
        out: DeviceSlice<'_, bf16>,
    ) -> Result<()> {
        if rows.start >= rows.end || rows.end > w.rows {
            return refuse("rows", format!("are {rows:?} of {}", w.rows));
        }
        same("out", out.len(), rows.len() * w.cols)?;
        aligned("out", out.ptr(), 16)?;
        stream.keep_memory(out);
        w.keep(stream);
        let packed = w.packed.slice(rows.start * w.cols / 8..rows.end * w.cols / 8)?;
        let params = DequantizeParams {
            packed: packed.ptr(),
            absmax: w.absmax.slice(rows.start..)?.ptr(),
            out: out.ptr(),
            rows: small("rows", rows.len())?,
            blocks: small("cols", w.cols / FOUR_BIT_BLOCK)?,
            stride: small("rows", w.rows)?,
            unused: 0,
            map: w.map,
        };
        let work = (rows.len() * w.cols).div_ceil(8 * DEQUANTIZE_WORDS * DEQUANTIZE_THREADS as usize);
        let blocks = work.clamp(1, self.multiprocessors.max(1) * DEQUANTIZE_BLOCKS);
        let config = LaunchConfig::new(small("blocks", blocks)?, DEQUANTIZE_THREADS).programmatic(true);
        // SAFETY: as in `multiply`.
        Ok(unsafe { self.dequantize.launch(stream, &config, &params) }?)
    }
}

impl FourBitKernels {
    /// The bf16 matrix `data`, whole rows, in 4 bits as rows `first..` of `w`: the bits of
    /// [`QuantizedMatrix::quantize`] without double quantisation.
    ///
    /// # Errors
    /// [`Error::Option`](crate::Error::Option) for rows that are not there or a fraction of one;
    /// [`Error::Cuda`](crate::Error::Cuda). Panics: none.
    pub fn quantize(
        &self,
        stream: &Stream,
        data: DeviceSlice<'_, bf16>,
        w: &FourBitBuffer,
        first: usize,
        quant_type: QuantType,
    ) -> Result<()> {
        let rows = data.len() / w.cols;
        same("data", data.len(), rows * w.cols)?;
        if quant_type.map() != w.map || first.saturating_add(rows) > w.rows {
            let problem = format!("{first}.. for {rows} rows of {} in {}", w.rows, quant_type.name());
            return refuse("rows", problem);
        }
        aligned("data", data.ptr(), 4)?;
        let (from, n) = (first * w.cols, rows * w.cols);
        let packed = w.packed.slice(from / 8..(from + n) / 8)?;
        let absmax = w.absmax.slice(first.min(w.absmax.len())..)?;
        stream.keep_memory(data);
        stream.keep_memory(packed);
        stream.keep_memory(absmax);
        if n == 0 {
            return Ok(());
        }
        let (bounds, nibbles) = crate::four_bit::bounds(quant_type);
        let n_blocks = n / FOUR_BIT_BLOCK;
        let params = QuantizeParams {
            input: data.ptr(),
            packed: packed.ptr(),
            absmax: absmax.ptr(),
            n_blocks: n_blocks as u64,
            blocks: small("cols", w.cols / FOUR_BIT_BLOCK)?,
            stride: small("rows", w.rows)?,
            bounds,
            unused: 0,
            nibbles,
        };
        let blocks = small("rows", n_blocks.div_ceil(QUANTIZE_WARPS))?;
        let config = LaunchConfig::new(blocks, QUANTIZE_WARPS as u32 * 32).programmatic(true);
        // SAFETY: as in `multiply`; both slices hold what `n_blocks` blocks need.
        Ok(unsafe { self.quantize.launch(stream, &config, &params) }?)
    }
}

/// How a product is cut into blocks.
#[derive(Debug, PartialEq, Eq)]
struct Plan {
    warps: usize,
    /// Blocks per multiprocessor.
    blocks: usize,
    /// Whether a block holds all of its input at once.
    resident: bool,
    /// Bytes of shared memory of a block.
    shared: usize,
}

impl Plan {
    /// For `tiles` times eight rows of `cols` columns on a device with `available` bytes of shared memory per block, and
    /// `work` tiles of weights for each multiprocessor.
    fn new(tiles: usize, cols: usize, available: usize, work: usize) -> Self {
        let units = cols.div_ceil(UNIT).max(1);
        let depth = if tiles == 1 { 8 } else { 16 / tiles };
        let stage = tiles * depth * FRAGMENT_BYTES;
        // Of a warp: [8 tiles][16 rows] f32.
        let sums = tiles * 8 * 16 * 4;
        let resident = |warps: usize| PAIRS_BYTES + units * stage + 2 * warps * sums;
        let few = warps_for(units, if tiles == 8 { 8 } else { FEW_WARPS });
        // Two blocks hide each other's waits, but both fetch the input; what the system takes of each is a kibibyte.
        if tiles == 1 && work >= 6 && 2 * (resident(few) + 1024) <= available {
            let (warps, shared) = (few, resident(few));
            return Self {
                warps,
                blocks: 2,
                resident: true,
                shared,
            };
        }
        let many = warps_for(units, MAX_WARPS);
        if tiles <= 2 && resident(many) <= available {
            let (warps, shared) = (many, resident(many));
            return Self {
                warps,
                blocks: 1,
                resident: true,
                shared,
            };
        }
        // A device with little room holds fewer stages.
        let warps = few
            .min(available.saturating_sub(PAIRS_BYTES) / stage.max(sums))
            .max(1);
        let shared = PAIRS_BYTES + warps * stage.max(sums);
        Self {
            warps,
            blocks: 1,
            resident: false,
            shared,
        }
    }
}

/// Warps of a block: those that leave the fewest idle in the last turn, and more rather than fewer.
fn warps_for(units: usize, most: usize) -> usize {
    let quality = |warps: &usize| {
        let turns = units.div_ceil(*warps);
        // In thousandths: the share of turns that have work, and a little for every warp.
        1000 * units / (turns * warps) + 20 * warps
    };
    (1..=most).max_by_key(quality).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_fit_and_have_as_many_warps_as_have_work() {
        for (cols, warps) in [(2560usize, 10), (4096, 8), (9728, 10), (64, 1)] {
            assert_eq!(warps_for(cols.div_ceil(UNIT), FEW_WARPS), warps);
        }
        for available in [99 << 10, 163 << 10, 227 << 10] {
            for cols in [64, 256, 1024, 2560, 4096, 9728, 12_288, 25_600] {
                for tiles in TILES {
                    let plan = Plan::new(tiles, cols, available, cols % 13);
                    assert!(plan.blocks * plan.shared <= available, "{plan:?}");
                    assert!(plan.warps >= 1 && plan.warps <= [0, 16, 16, 0, 10, 0, 0, 0, 8][tiles]);
                    assert!(plan.warps <= cols.div_ceil(UNIT));
                }
            }
        }
        let h200 = |tiles, cols| Plan::new(tiles, cols, 227 << 10, 9);
        assert_eq!((h200(1, 2560).blocks, h200(1, 9728).blocks), (2, 1));
        assert_eq!(Plan::new(1, 2560, 227 << 10, 2).blocks, 1);
        assert!(h200(1, 9728).resident && h200(2, 4096).resident && !h200(2, 9728).resident);
    }
}
