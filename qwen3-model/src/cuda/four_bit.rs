//! Products with matrices in 4 bits: few rows by the kernel that decodes in registers, many by a bf16 copy that lives as long
//! as the product, in one buffer for all matrices.

use cuda_graphs::{Compiler, DeviceBuffer, DeviceSlice, MatmulDims, Stream};
use half::bf16;

use super::CudaBackend;
use super::weights::{DeviceWeights, fused_shape};
use crate::launch::{FOUR_BIT_ROWS, FourBitBuffer, FourBitKernels, ProductOutput};
use crate::{FusedMatrix, Qwen3Config, Result};

/// Most rows for which decoding in registers is faster than a product with a bf16 copy, as measured on an H200.
const FUSED_ROWS: usize = 16;
const _: () = assert!(FUSED_ROWS <= FOUR_BIT_ROWS);

#[derive(Debug)]
pub(super) struct FourBit {
    kernels: FourBitKernels,
    /// Room for the largest matrix, `[rows, cols]`.
    dequantized: DeviceBuffer<bf16>,
}

impl FourBit {
    /// `None` if no matrix is in 4 bits.
    pub(super) fn for_weights(
        stream: &Stream,
        compiler: &Compiler,
        config: &Qwen3Config,
        weights: &DeviceWeights,
    ) -> Result<Option<Self>> {
        let in_four_bits = |m: &FusedMatrix| weights.layers.iter().any(|layer| layer.four_bit(*m).is_some());
        let matrices = FusedMatrix::ALL.into_iter().filter(in_four_bits);
        let sizes = matrices.map(|m| fused_shape(config, m).iter().product());
        let Some(largest) = sizes.max() else {
            return Ok(None);
        };
        Ok(Some(Self {
            kernels: FourBitKernels::load(compiler, stream.device())?,
            dequantized: DeviceBuffer::zeroed(stream.device(), largest)?,
        }))
    }

    /// The values of `matrix`, whole: valid until the next call for the stream's work.
    pub(super) fn dequantized(
        &self,
        stream: &Stream,
        matrix: &FourBitBuffer,
    ) -> Result<DeviceSlice<'_, bf16>> {
        let out = self.dequantized.slice(..matrix.rows() * matrix.cols())?;
        self.kernels.dequantize(stream, matrix, out)?;
        Ok(out)
    }
}

impl CudaBackend {
    /// Input and output of a product for the rows at hand.
    pub(super) fn operands(&self, matrix: FusedMatrix) -> Result<(DeviceSlice<'_, bf16>, ProductOutput<'_>)> {
        let [n, k] = fused_shape(&self.config, matrix);
        let (m, w) = (self.n_rows(), &self.workspace);
        let input = match matrix {
            FusedMatrix::Qkv | FusedMatrix::GateUp => &w.normed,
            FusedMatrix::O => &w.mixed,
            FusedMatrix::Down => &w.gated,
        };
        let output = match matrix {
            FusedMatrix::Qkv => ProductOutput::Bf16(w.qkv.slice(..m * n)?),
            FusedMatrix::GateUp => ProductOutput::Bf16(w.gate_up.slice(..m * n)?),
            FusedMatrix::O | FusedMatrix::Down => ProductOutput::F32(w.delta.slice(..m * n)?),
        };
        Ok((input.slice(..m * k)?, output))
    }

    /// The product with a matrix in 4 bits; `false` if the matrix is not in 4 bits.
    pub(super) fn project_four_bit(&self, layer: usize, matrix: FusedMatrix) -> Result<bool> {
        let weight = self.weights.layers[layer].four_bit(matrix);
        let (Some(weight), Some(four_bit)) = (weight, &self.four_bit) else {
            return Ok(false);
        };
        let m = self.n_rows();
        let (x, y) = self.operands(matrix)?;
        if m <= FUSED_ROWS {
            four_bit.kernels.multiply(&self.stream, m, x, weight, y)?;
            return Ok(true);
        }
        let w = four_bit.dequantized(&self.stream, weight)?;
        let (n, k) = (weight.rows(), weight.cols());
        let dims = MatmulDims { m, n, k };
        match y {
            ProductOutput::Bf16(y) => self.matmul.multiply(dims, x, w, y, None)?,
            ProductOutput::F32(y) => self.matmul.multiply(dims, x, w, y, None)?,
        }
        Ok(true)
    }
}
