//! Matrices in 4 bits as bitsandbytes stores them: `nf4` and `fp4`, with or without double quantisation.
//!
//! ```text
//!   element i of the matrix, counted row by row    w[i] = cast(map[nibble i] · absmax[i / blocksize])
//!
//!   packed   u8  [ceil(n / 2)]     | e₀ e₁ | e₂ e₃ | …   the even element in the high nibble
//!   map      f32 [16]              from the file
//!   absmax   f32 [ceil(n / blocksize)], or in 8 bits (double quantisation):
//!            absmax[b] = nested_map[q[b]] · nested_absmax[b / nested_blocksize] + nested_offset
//! ```
//!
//! All arithmetic is in f32, with one cast at the end to the type that the file names, and every operation rounds on its
//! own, so that a value has the bits that bitsandbytes gives it. The last block may be short, and blocks run on from row
//! to row.

mod folder;
mod quantize;
mod read;

use std::ops::Range;
use std::sync::Arc;

use half::{bf16, f16};
use rayon::prelude::*;

use crate::mapped_file::MappedFile;
use crate::{Error, Result};

pub use folder::{QuantizeOptions, QuantizeReport, quantize_folder};
#[cfg(feature = "cuda")]
pub(crate) use quantize::bounds;
pub(crate) use read::{Place, is_quantized};

/// Which sixteen values a 4-bit matrix is made of.
///
/// ```
/// use qwen3_model::QuantType;
///
/// assert_eq!("fp4".parse(), Ok(QuantType::Fp4));
/// assert_eq!((QuantType::Nf4.map()[0], QuantType::Nf4.map()[15]), (-1.0, 1.0));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum QuantType {
    /// Quantiles of the normal distribution.
    #[default]
    Nf4,
    /// A sign, two bits of exponent and one of mantissa.
    Fp4,
}

impl QuantType {
    /// Name in bitsandbytes: `nf4` or `fp4`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nf4 => "nf4",
            Self::Fp4 => "fp4",
        }
    }

    /// The sixteen values, of magnitude up to 1, by nibble.
    pub fn map(self) -> [f32; 16] {
        match self {
            Self::Nf4 => NF4.map(f32::from_bits),
            Self::Fp4 => std::array::from_fn(|nibble| {
                let magnitude = [0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0][nibble & 7] / 12.0;
                if nibble & 8 == 0 { magnitude } else { -magnitude }
            }),
        }
    }
}

impl std::str::FromStr for QuantType {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "nf4" => Ok(Self::Nf4),
            "fp4" => Ok(Self::Fp4),
            _ => Err("use nf4 or fp4".into()),
        }
    }
}

const NF4: [u32; 16] = [
    0xbf80_0000,
    0xbf32_39b1,
    0xbf06_6b30,
    0xbeca_32a0,
    0xbe91_a24d,
    0xbe3d_353f,
    0xbdba_7871,
    0x0000_0000,
    0x3da2_faff,
    0x3e24_cae3,
    0x3e7c_04dd,
    0x3ead_033a,
    0x3ee1_a4b8,
    0x3f10_07ab,
    0x3f39_13b3,
    0x3f80_0000,
];

/// The type that a matrix had before it was quantised, and that its values are cast to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum ValueType {
    Bf16,
    F16,
    F32,
}

impl ValueType {
    /// The cast, and then what every weight of this crate goes through: one rounding to bf16.
    fn round(self, value: f32) -> bf16 {
        match self {
            Self::Bf16 | Self::F32 => bf16::from_f32(value),
            Self::F16 => bf16::from_f32(f16::from_f32(value).to_f32()),
        }
    }
}

/// A 4-bit matrix `[rows, cols]`, row-major, as bitsandbytes stores it: element `i`, counted row by row, is
/// `cast(map[nibble i] · absmax[i / blocksize])` in f32 arithmetic, with one cast at the end to the type that the file
/// names. Cloning shares the bytes.
///
/// ```
/// use half::bf16;
/// use qwen3_model::{QuantType, QuantizedMatrix};
///
/// // Values that nf4 has: -1, 0 and 1, in blocks of 64.
/// let data: Vec<bf16> = (0..2 * 64).map(|i| bf16::from_f32((i % 3) as f32 - 1.0)).collect();
/// let matrix = QuantizedMatrix::quantize(2, 64, &data, QuantType::Nf4, false)?;
/// assert_eq!(matrix.dequantize(), data);
/// assert_eq!(matrix.packed().len(), 64, "two values a byte");
/// # Ok::<(), qwen3_model::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct QuantizedMatrix {
    rows: usize,
    cols: usize,
    packed: Bytes,
    absmax: Arc<Vec<f32>>,
    map: [f32; 16],
    blocksize: usize,
    quant_type: QuantType,
    value_type: ValueType,
}

#[derive(Debug, Clone)]
enum Bytes {
    Mapped {
        file: Arc<MappedFile>,
        bytes: Range<usize>,
    },
    Owned(Arc<Vec<u8>>),
}

impl QuantizedMatrix {
    /// Quantises a bf16 matrix `[rows, cols]` in blocks of 64, as bitsandbytes does on a CPU; with `double`, the blocks'
    /// largest magnitudes are kept in 8 bits.
    ///
    /// # Errors
    /// [`Error::Option`] if `data` does not hold `rows * cols` elements, or one of them is not finite. Panics: none.
    pub fn quantize(
        rows: usize,
        cols: usize,
        data: &[bf16],
        quant_type: QuantType,
        double: bool,
    ) -> Result<Self> {
        let refuse = |problem: String| {
            Err(Error::Option {
                option: "data",
                problem,
            })
        };
        if rows.checked_mul(cols) != Some(data.len()) {
            return refuse(format!(
                "{} elements cannot be a matrix of {rows} x {cols}",
                data.len()
            ));
        }
        if let Some(at) = data.par_iter().position_any(|w| !w.is_finite()) {
            return refuse(format!("element {at} is {}, which no block can hold", data[at]));
        }
        let quantized = quantize::quantize(data, quant_type, double);
        Ok(Self {
            rows,
            cols,
            absmax: Arc::new(quantized.decoded_absmax()),
            packed: Bytes::Owned(Arc::new(quantized.packed)),
            map: quant_type.map(),
            blocksize: quantize::BLOCKSIZE,
            quant_type,
            value_type: ValueType::Bf16,
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

    /// Elements that share a scale.
    pub fn blocksize(&self) -> usize {
        self.blocksize
    }

    /// Which values it is made of.
    pub fn quant_type(&self) -> QuantType {
        self.quant_type
    }

    /// The nibbles, `[ceil(rows * cols / 2)]`.
    pub fn packed(&self) -> &[u8] {
        match &self.packed {
            Bytes::Mapped { file, bytes } => &file.bytes()[bytes.clone()],
            Bytes::Owned(bytes) => bytes,
        }
    }

    /// The scale of every block, `[ceil(rows * cols / blocksize)]`.
    pub fn absmax(&self) -> &[f32] {
        &self.absmax
    }

    /// The sixteen values by nibble.
    pub fn map(&self) -> &[f32; 16] {
        &self.map
    }

    /// Bytes of nibbles and scales.
    pub fn bytes(&self) -> usize {
        self.packed().len() + 4 * self.absmax.len()
    }

    /// Whether values are cast through f16, which only [`dequantize_rows`](Self::dequantize_rows) does.
    #[cfg(feature = "cuda")]
    pub(crate) fn casts_through_f16(&self) -> bool {
        self.value_type == ValueType::F16
    }

    /// The values of `rows`, `[rows.len(), cols]`, into `out`.
    ///
    /// # Errors
    /// [`Error::Option`] for rows that are not there or an `out` of another size. Panics: none.
    pub fn dequantize_rows(&self, rows: Range<usize>, out: &mut [bf16]) -> Result<()> {
        if rows.start > rows.end || rows.end > self.rows || rows.len() * self.cols != out.len() {
            let problem = format!(
                "{} elements for rows {rows:?} of {} x {}",
                out.len(),
                self.rows,
                self.cols
            );
            return Err(Error::Option {
                option: "rows",
                problem,
            });
        }
        self.fill(rows.start * self.cols, out);
        Ok(())
    }

    /// All values, `[rows, cols]`.
    pub fn dequantize(&self) -> Vec<bf16> {
        const CHUNK: usize = 1 << 16;
        let mut out = vec![bf16::ZERO; self.rows * self.cols];
        let fill = |(i, out): (usize, &mut [bf16])| self.fill(i * CHUNK, out);
        out.par_chunks_mut(CHUNK).enumerate().for_each(fill);
        out
    }

    /// The values from element `start` on.
    ///
    /// Panics past the end, as indexing does.
    pub(crate) fn fill(&self, start: usize, mut out: &mut [bf16]) {
        let packed = self.packed();
        let mut at = start;
        while !out.is_empty() {
            let block = at / self.blocksize;
            let n = ((block + 1) * self.blocksize - at).min(out.len());
            let (now, later) = out.split_at_mut(n);
            let absmax = self.absmax[block];
            let values = self.map.map(|value| self.value_type.round(value * absmax));
            let value = |nibble: u8| values[usize::from(nibble & 15)];
            // Only rows of an odd length begin in the middle of a byte.
            let odd = at % 2;
            let (first, whole) = now.split_at_mut(odd);
            if let [first] = first {
                *first = value(packed[at / 2]);
            }
            for (pair, byte) in whole.chunks_mut(2).zip(&packed[(at + odd) / 2..]) {
                pair[0] = value(byte >> 4);
                if let Some(second) = pair.get_mut(1) {
                    *second = value(*byte);
                }
            }
            out = later;
            at += n;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::random;

    /// Element by element, straight from the definition.
    fn oracle(matrix: &QuantizedMatrix) -> Vec<bf16> {
        let element = |i: usize| {
            let byte = matrix.packed()[i / 2];
            let nibble = if i.is_multiple_of(2) { byte >> 4 } else { byte & 15 };
            let value = matrix.map()[usize::from(nibble)] * matrix.absmax()[i / matrix.blocksize()];
            matrix.value_type.round(value)
        };
        (0..matrix.rows * matrix.cols).map(element).collect()
    }

    proptest! {
        #[test]
        fn any_range_of_rows_has_the_defined_values(
            rows in 1usize..40, cols in 1usize..150, fp4: bool, double: bool, seed: u64, cut in 0usize..1000,
        ) {
            let data = random::matrix(seed, "w", rows * cols);
            let quant_type = if fp4 { QuantType::Fp4 } else { QuantType::Nf4 };
            let mut matrix = QuantizedMatrix::quantize(rows, cols, &data, quant_type, double).unwrap();
            for value_type in [ValueType::Bf16, ValueType::F16, ValueType::F32] {
                matrix.value_type = value_type;
                let expected = oracle(&matrix);
                prop_assert_eq!(&matrix.dequantize(), &expected);
                let (from, to) = (cut % rows, cut % rows + (cut / 7) % (rows - cut % rows) + 1);
                let mut some = vec![bf16::NAN; (to - from) * cols];
                matrix.dequantize_rows(from..to, &mut some).unwrap();
                prop_assert_eq!(&some[..], &expected[from * cols..to * cols]);
            }
        }
    }

    #[test]
    fn wrong_sizes_are_refused() {
        let data = random::matrix(1, "w", 12);
        let matrix = QuantizedMatrix::quantize(3, 4, &data, QuantType::Nf4, true).unwrap();
        let backwards = Range { start: 3, end: 2 };
        for (rows, len) in [(0..4, 16), (0..2, 7), (backwards, 0), (usize::MAX..usize::MAX, 0)] {
            assert!(matrix.dequantize_rows(rows, &mut vec![bf16::ZERO; len]).is_err());
        }
        assert!(QuantizedMatrix::quantize(3, 5, &data, QuantType::Nf4, true).is_err());
        assert!(QuantizedMatrix::quantize(usize::MAX, 2, &data, QuantType::Nf4, true).is_err());
        assert!(QuantizedMatrix::quantize(1, 1, &[bf16::NAN], QuantType::Nf4, true).is_err());
    }
}
