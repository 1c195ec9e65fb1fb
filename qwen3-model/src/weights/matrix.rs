//! One matrix of a model, in a mapped file, in memory, or in 4 bits.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use half::{bf16, f16};
use rayon::prelude::*;
use safetensors::tensor::Dtype;

use crate::mapped_file::MappedFile;
use crate::safetensors_file::TensorEntry;
use crate::{Error, QuantType, QuantizedMatrix, Result};

/// A matrix `[rows, cols]`, row-major: bf16, either in a mapped file or in memory, or in 4 bits.
///
/// Cloning is cheap: the bytes are shared.
///
/// ```
/// use half::bf16;
/// use qwen3_model::WeightMatrix;
///
/// let matrix = WeightMatrix::from_vec("w", 2, 3, (0..6).map(|i| bf16::from_f32(i as f32)).collect())?;
/// assert_eq!(matrix.row(1)[0].to_f32(), 3.0);
/// assert!(WeightMatrix::from_vec("w", 2, 3, vec![]).is_err());
/// # Ok::<(), qwen3_model::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct WeightMatrix {
    name: String,
    rows: usize,
    cols: usize,
    storage: Storage,
}

#[derive(Debug, Clone)]
enum Storage {
    Mapped {
        file: Arc<MappedFile>,
        bytes: Range<usize>,
    },
    Owned(Arc<Vec<bf16>>),
    FourBit(Arc<QuantizedMatrix>),
}

impl WeightMatrix {
    /// A matrix in memory.
    ///
    /// # Errors
    /// [`Error::Option`] if `data` does not hold `rows * cols` elements.
    pub fn from_vec(name: impl Into<String>, rows: usize, cols: usize, data: Vec<bf16>) -> Result<Self> {
        if rows.checked_mul(cols) != Some(data.len()) {
            let problem = format!("{} elements cannot be a matrix of {rows} x {cols}", data.len());
            return Err(Error::Option {
                option: "data",
                problem,
            });
        }
        Ok(Self::owned(name.into(), [rows, cols], data))
    }

    /// Of as many elements as the shape has.
    pub(super) fn owned(name: String, [rows, cols]: [usize; 2], data: Vec<bf16>) -> Self {
        Self {
            name,
            rows,
            cols,
            storage: Storage::Owned(Arc::new(data)),
        }
    }

    pub(super) fn four_bit(name: String, [rows, cols]: [usize; 2], matrix: QuantizedMatrix) -> Self {
        Self {
            name,
            rows,
            cols,
            storage: Storage::FourBit(Arc::new(matrix)),
        }
    }

    pub(super) fn from_file(
        name: String,
        file: Arc<MappedFile>,
        entry: TensorEntry,
        [rows, cols]: [usize; 2],
    ) -> Result<Self> {
        let bytes = &file.bytes()[entry.bytes.clone()];
        let zero_copy = entry.dtype == Dtype::BF16
            && cfg!(target_endian = "little")
            && bytemuck::try_cast_slice::<u8, bf16>(bytes).is_ok();
        let storage = if zero_copy {
            Storage::Mapped {
                file,
                bytes: entry.bytes,
            }
        } else {
            let values = convert(bytes, entry.dtype, bf16::from_f32);
            let not_finite = values.par_iter().position_first(|value| !value.is_finite());
            refuse_not_finite(&name, &file, &entry, not_finite)?;
            Storage::Owned(Arc::new(values))
        };
        Ok(Self {
            name,
            rows,
            cols,
            storage,
        })
    }

    /// Name in the file, for instance `model.layers.0.mlp.up_proj.weight`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Output features.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The elements, row-major, `rows * cols`. A matrix in 4 bits has none that lie in memory:
    /// the slice is empty, see [`quantized`](Self::quantized) and [`to_bf16`](Self::to_bf16).
    pub fn data(&self) -> &[bf16] {
        match &self.storage {
            Storage::Mapped { file, bytes } => bytemuck::cast_slice(&file.bytes()[bytes.clone()]),
            Storage::Owned(data) => data,
            Storage::FourBit(_) => &[],
        }
    }

    /// The matrix in 4 bits, if it is in 4 bits.
    pub fn quantized(&self) -> Option<&QuantizedMatrix> {
        match &self.storage {
            Storage::FourBit(matrix) => Some(matrix),
            _ => None,
        }
    }

    /// The elements, row-major, `rows * cols`: as they lie, or dequantised.
    pub fn to_bf16(&self) -> Cow<'_, [bf16]> {
        match &self.storage {
            Storage::FourBit(matrix) => Cow::Owned(matrix.dequantize()),
            _ => Cow::Borrowed(self.data()),
        }
    }

    /// The same matrix in bf16.
    #[must_use]
    pub fn dequantized(&self) -> Self {
        match &self.storage {
            Storage::FourBit(matrix) => Self {
                storage: Storage::Owned(Arc::new(matrix.dequantize())),
                ..self.clone()
            },
            _ => self.clone(),
        }
    }

    /// The same matrix in 4 bits, see [`QuantizedMatrix::quantize`]; as it is if it is in 4 bits already.
    ///
    /// # Errors
    /// [`Error::Option`] for an element that is not finite.
    pub fn quantize(&self, quant_type: QuantType, double: bool) -> Result<Self> {
        if self.quantized().is_some() {
            return Ok(self.clone());
        }
        let matrix = QuantizedMatrix::quantize(self.rows, self.cols, self.data(), quant_type, double)?;
        Ok(Self {
            storage: Storage::FourBit(Arc::new(matrix)),
            ..self.clone()
        })
    }

    /// Bytes of the elements.
    pub fn bytes(&self) -> usize {
        match &self.storage {
            Storage::FourBit(matrix) => matrix.bytes(),
            _ => 2 * self.rows * self.cols,
        }
    }

    /// One row.
    ///
    /// Panics if `row` is not below [`rows`](Self::rows), as indexing does, or the matrix is in 4 bits.
    pub fn row(&self, row: usize) -> &[bf16] {
        &self.data()[row * self.cols..][..self.cols]
    }

    /// Whether the elements lie in a mapped file rather than in memory of their own.
    pub fn is_mapped(&self) -> bool {
        matches!(self.storage, Storage::Mapped { .. })
    }
}

/// An error for an element that is not finite, or that no bf16 can hold.
pub(super) fn refuse_not_finite(
    name: &str,
    file: &MappedFile,
    entry: &TensorEntry,
    element: Option<usize>,
) -> Result<()> {
    let Some(element) = element else {
        return Ok(());
    };
    let width = entry.dtype.bitsize() / 8;
    let bytes = &file.bytes()[entry.bytes.clone()][element * width..][..width];
    let value = convert(bytes, entry.dtype, |x| x)[0];
    Err(Error::Tensor {
        path: file.path().to_owned(),
        tensor: name.to_owned(),
        problem: format!("element {element} is {value}, which is no weight in bf16"),
    })
}

/// Every element through f32. `dtype` is one of the three that [`Checkpoint::take`] lets pass.
pub(super) fn convert<T: Send>(bytes: &[u8], dtype: Dtype, f: impl Fn(f32) -> T + Sync) -> Vec<T> {
    let pair = |b: &[u8]| u16::from_le_bytes([b[0], b[1]]);
    match dtype {
        Dtype::BF16 => bytes
            .par_chunks_exact(2)
            .map(|b| f(bf16::from_bits(pair(b)).to_f32()))
            .collect(),
        Dtype::F16 => bytes
            .par_chunks_exact(2)
            .map(|b| f(f16::from_bits(pair(b)).to_f32()))
            .collect(),
        _ => bytes
            .par_chunks_exact(4)
            .map(|b| f(f32::from_le_bytes([b[0], b[1], b[2], b[3]])))
            .collect(),
    }
}
