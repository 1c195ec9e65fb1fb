//! Products with matrices in 4 bits: decode steps through one persistent kernel per layer, other steps of few rows through a
//! kernel that decodes in registers, many rows by a bf16 copy of some rows of the matrix at a time: the copy is small enough
//! to stay in the second-level cache until its product has read it.
//!
//! ```text
//!   embed, norm ─▶ [QKV 0] ─▶ rope, attention 0 ─▶ [O 0, MLP 0, QKV 1] ─▶ … ─▶ [O, MLP] ─▶ final norm, head
//! ```
//!
//! Brackets are launches of that kernel. With adapters beside the weights, or other matrices among those in 4 bits, each
//! product is a launch of its own.

use std::ops::Range;

use cuda_graphs::{Compiler, DeviceBuffer, DeviceSlice, Matmul, MatmulDims, Stream};
use half::bf16;

use super::weights::{DeviceWeights, fused_shape};
use super::{CudaBackend, Rows};
use crate::launch::{
    FOUR_BIT_LAYER_ROWS, FOUR_BIT_ROWS, FourBitBuffer, FourBitKernels, FourBitLayer, FourBitLayerOp,
    FourBitStage, LowRankTerm, MAX_STAGES, ProductOutput, StageOutput,
};
use crate::{FusedMatrix, Qwen3Config, Result};

/// Most rows for which decoding in registers without the persistent kernel is faster than a product with a bf16 copy, as
/// measured on an H200.
const FUSED_ROWS: usize = 16;
const _: () = assert!(FUSED_ROWS <= FOUR_BIT_ROWS);
/// Most rows for which the persistent kernel is faster than products with a bf16 copy. Beside adapters, whose second product it
/// takes along, it always is.
const LAYER_ROWS: usize = 32;
/// Bytes that the copy of a slab may take, so that it stays in a second-level cache of 50 MB: larger slabs make better products.
const SLAB_BYTES: usize = 50 << 20;
/// Rows of a slab are a multiple of this, the rows of a product's tiles.
const SLAB_QUANTUM: usize = 128;

#[derive(Debug)]
pub(super) struct FourBit {
    kernels: FourBitKernels,
    layers: Option<Layers>,
    /// Room for the largest slab, `[rows, cols]`.
    slab: DeviceBuffer<bf16>,
}

/// The persistent kernel and its buffers.
#[derive(Debug)]
struct Layers {
    kernel: FourBitLayer,
    /// Whether every matrix of every layer is in 4 bits, so that a layer is one launch.
    whole: bool,
    /// Two sets, for even and odd layers, so that a launch can clear the other's.
    counters: DeviceBuffer<u32>,
    /// `[FOUR_BIT_LAYER_ROWS, hidden]`, input of gate+up.
    normed: DeviceBuffer<bf16>,
    /// `[2][FOUR_BIT_LAYER_ROWS * blocks]`: after O and after down.
    squares: [DeviceBuffer<f32>; 2],
}

impl FourBit {
    /// `None` if no matrix is in 4 bits.
    pub(super) fn for_weights(
        stream: &Stream,
        compiler: &Compiler,
        config: &Qwen3Config,
        weights: &DeviceWeights,
    ) -> Result<Option<Self>> {
        let all = || {
            let of_layer = |layer: usize| {
                FusedMatrix::ALL.map(|matrix| (matrix, weights.layers[layer].four_bit(matrix)))
            };
            (0..weights.layers.len()).flat_map(of_layer)
        };
        let sizes = all().filter_map(|(matrix, four_bit)| {
            let [rows, cols] = fused_shape(config, matrix);
            four_bit.map(|_| slab_rows(rows, cols) * cols)
        });
        let Some(largest) = sizes.max() else {
            return Ok(None);
        };
        let maps: Option<Vec<_>> = all()
            .map(|(_, four_bit)| four_bit.map(FourBitBuffer::map))
            .collect();
        let whole = maps.is_some_and(|maps| maps.iter().all(|map| *map == maps[0]));
        Ok(Some(Self {
            kernels: FourBitKernels::load(compiler, stream.device())?,
            layers: Layers::new(stream, compiler, config, whole)?,
            slab: DeviceBuffer::zeroed(stream.device(), largest)?,
        }))
    }

    /// The values of `rows` of `matrix`, not more than a slab: valid until the next call for the stream's work.
    fn dequantized(
        &self,
        stream: &Stream,
        matrix: &FourBitBuffer,
        rows: Range<usize>,
    ) -> Result<DeviceSlice<'_, bf16>> {
        let out = self.slab.slice(..rows.len() * matrix.cols())?;
        self.kernels.dequantize(stream, matrix, rows, out)?;
        Ok(out)
    }

    /// The values of `rows` of `matrix` on the host.
    pub(super) fn values(
        &self,
        stream: &Stream,
        matrix: &FourBitBuffer,
        rows: Range<usize>,
    ) -> Result<Vec<bf16>> {
        let mut values = Vec::with_capacity(rows.len() * matrix.cols());
        for rows in slabs(rows, slab_rows(matrix.rows(), matrix.cols())) {
            values.extend(stream.download(self.dequantized(stream, matrix, rows)?)?);
        }
        Ok(values)
    }

    /// `y = x · Wᵀ` for any number of rows `m`, slab by slab.
    fn multiply_slabs(
        &self,
        matmul: &Matmul,
        m: usize,
        x: DeviceSlice<'_, bf16>,
        weight: &FourBitBuffer,
        y: ProductOutput<'_>,
    ) -> Result<()> {
        let (n, k) = (weight.rows(), weight.cols());
        for rows in slabs(0..n, slab_rows(n, k)) {
            let w = self.dequantized(matmul.stream(), weight, rows.clone())?;
            let (n, first, stride) = (rows.len(), rows.start, n);
            let dims = MatmulDims { m, n, k };
            match y {
                ProductOutput::Bf16(y) => matmul.multiply_columns(dims, x, w, y, first, stride)?,
                ProductOutput::F32(y) => matmul.multiply_columns(dims, x, w, y, first, stride)?,
            }
        }
        Ok(())
    }
}

/// Rows of a slab of a matrix `[rows, cols]`: of equal ones, if it takes several.
fn slab_rows(rows: usize, cols: usize) -> usize {
    let slabs = (rows * cols * size_of::<bf16>()).div_ceil(SLAB_BYTES).max(1);
    rows.min(rows.div_ceil(slabs).next_multiple_of(SLAB_QUANTUM))
}

/// `rows` in pieces of at most `most`.
fn slabs(rows: Range<usize>, most: usize) -> impl Iterator<Item = Range<usize>> {
    let end = rows.end;
    rows.step_by(most.max(1))
        .map(move |first| first..end.min(first + most))
}

impl Layers {
    /// `None` where the device is not one for the kernel.
    fn new(stream: &Stream, compiler: &Compiler, config: &Qwen3Config, whole: bool) -> Result<Option<Self>> {
        let device = stream.device();
        let Some(kernel) = FourBitLayer::load(compiler, device)? else {
            return Ok(None);
        };
        let squares = || DeviceBuffer::zeroed(device, FOUR_BIT_LAYER_ROWS * kernel.blocks());
        Ok(Some(Self {
            whole,
            counters: DeviceBuffer::zeroed(device, 2 * MAX_STAGES)?,
            normed: DeviceBuffer::zeroed(device, FOUR_BIT_LAYER_ROWS * config.hidden_size)?,
            squares: [squares()?, squares()?],
            kernel,
        }))
    }

    /// One product alone.
    fn product(
        &self,
        stream: &Stream,
        rows: usize,
        stage: FourBitStage<'_>,
        low_rank: Option<&LowRankTerm<'_>>,
    ) -> Result<()> {
        let op = FourBitLayerOp {
            rows,
            stages: &[stage],
            low_rank,
            // A single stage counts nothing.
            counters: self.counters.slice(..MAX_STAGES)?,
            clear: self.counters.as_slice(),
            eps: 0.0,
        };
        self.kernel.run(stream, &op)
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

    /// The product with a matrix in 4 bits, and what adapters beside it add; `false` if the matrix is not in 4 bits.
    pub(super) fn project_four_bit(&self, layer: usize, matrix: FusedMatrix) -> Result<bool> {
        let weight = self.weights.layers[layer].four_bit(matrix);
        let (Some(weight), Some(four_bit)) = (weight, &self.four_bit) else {
            return Ok(false);
        };
        let m = self.n_rows();
        let (x, y) = self.operands(matrix)?;
        match &four_bit.layers {
            Some(layers) if m <= self.four_bit_rows() => {
                let output = match y {
                    ProductOutput::Bf16(y) => StageOutput::Bf16(y),
                    ProductOutput::F32(y) => StageOutput::F32(y),
                };
                let stage = FourBitStage {
                    weight,
                    input: x,
                    squares: None,
                    output,
                };
                let term = self.low_rank(layer, matrix)?;
                let fused = term.as_ref().filter(|_| self.adds_low_rank_only());
                layers.product(&self.stream, m, stage, fused)?;
                if let (Some(term), None) = (&term, fused) {
                    self.add_low_rank(term, y)?;
                }
                return Ok(true);
            }
            None if m <= FUSED_ROWS => {
                four_bit.kernels.multiply(&self.stream, m, x, weight, y)?;
                self.add_unmerged(layer, matrix)?;
                return Ok(true);
            }
            _ => {}
        }
        four_bit.multiply_slabs(&self.matmul, m, x, weight, y)?;
        self.add_unmerged(layer, matrix)?;
        Ok(true)
    }

    /// Most rows of the persistent kernel.
    fn four_bit_rows(&self) -> usize {
        match self.unmerged {
            Some(_) => FOUR_BIT_LAYER_ROWS,
            None => LAYER_ROWS,
        }
    }

    /// The kernel and the number of rows, if the present rows go through the persistent kernel: few enough, and all weights
    /// in 4 bits with nothing beside them. The other operations of the layer walk are then part of it.
    fn four_bit_layers(&self) -> Option<(&Layers, usize)> {
        let Rows::Decode { bucket: rows } = self.rows else {
            return None;
        };
        let layers = self.four_bit.as_ref()?.layers.as_ref()?;
        let alone = self.unmerged.is_none() && !self.weights.has_biases();
        (alone && layers.whole && rows <= self.four_bit_rows()).then_some((layers, rows))
    }

    /// Whether the present rows go through the persistent kernel.
    pub(super) fn in_four_bit_layers(&self) -> bool {
        self.four_bit_layers().is_some()
    }

    /// What the persistent kernel does at a product of the layer walk.
    pub(super) fn project_in_four_bit_layers(&self, layer: usize, matrix: FusedMatrix) -> Result<()> {
        match (self.four_bit_layers(), matrix) {
            (Some((layers, rows)), FusedMatrix::Qkv) if layer == 0 => self.first_four_bit(layers, rows),
            (Some((layers, rows)), FusedMatrix::O) => self.four_bit_layer(layers, rows, layer),
            _ => Ok(()),
        }
    }

    /// The first layer's QKV, from `normed`.
    fn first_four_bit(&self, layers: &Layers, rows: usize) -> Result<()> {
        let (config, w) = (&self.config, &self.workspace);
        let Some(weight) = self.weights.layers[0].four_bit(FusedMatrix::Qkv) else {
            return Ok(());
        };
        let stage = FourBitStage {
            weight,
            input: w.normed.slice(..rows * config.hidden_size)?,
            squares: None,
            output: StageOutput::Bf16(w.qkv.slice(..rows * config.qkv_size())?),
        };
        layers.product(&self.stream, rows, stage, None)
    }

    /// From attention's output in `layer` to the next layer's QKV, or to the residual before the final norm.
    fn four_bit_layer(&self, layers: &Layers, rows: usize, layer: usize) -> Result<()> {
        let (config, w, kernel) = (&self.config, &self.workspace, &layers.kernel);
        let (hidden, weights) = (config.hidden_size, &self.weights.layers[layer]);
        let residual = w.residual.slice(..rows * hidden)?;
        let [after_o, after_down] = &layers.squares;
        let after_o = after_o.slice(..rows * kernel.blocks())?;
        let after_down = after_down.slice(..rows * kernel.blocks())?;
        let mlp_normed = layers.normed.slice(..rows * hidden)?;
        let normed = w.normed.slice(..rows * hidden)?;
        let gated = w.gated.slice(..rows * config.intermediate_size)?;
        let next = self.weights.layers.get(layer + 1);
        let matrices = FusedMatrix::ALL.map(|matrix| weights.four_bit(matrix));
        let [_, Some(o), Some(gate_up), Some(down)] = matrices else {
            return Ok(());
        };
        let mut stages = vec![
            FourBitStage {
                weight: o,
                input: w.mixed.slice(..rows * config.q_size())?,
                squares: None,
                output: StageOutput::Residual {
                    residual,
                    norm: weights.post_attention_norm.as_slice(),
                    normed: mlp_normed,
                    squares: after_o,
                },
            },
            FourBitStage {
                weight: gate_up,
                input: mlp_normed,
                squares: Some(after_o),
                output: StageOutput::Gated(gated),
            },
            FourBitStage {
                weight: down,
                input: gated,
                squares: None,
                output: StageOutput::Residual {
                    residual,
                    norm: next
                        .map_or(&self.weights.norm, |next| &next.input_norm)
                        .as_slice(),
                    normed,
                    squares: after_down,
                },
            },
        ];
        if let Some(weight) = next.and_then(|next| next.four_bit(FusedMatrix::Qkv)) {
            stages.push(FourBitStage {
                weight,
                input: normed,
                squares: Some(after_down),
                output: StageOutput::Bf16(w.qkv.slice(..rows * config.qkv_size())?),
            });
        }
        let set = |number: usize| {
            layers
                .counters
                .slice(number * MAX_STAGES..(number + 1) * MAX_STAGES)
        };
        kernel.run(
            &self.stream,
            &FourBitLayerOp {
                rows,
                stages: &stages,
                low_rank: None,
                counters: set(layer % 2)?,
                clear: set(1 - layer % 2)?,
                eps: config.rms_norm_eps as f32,
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slabs_cover_every_row_once_and_stay_small() {
        let of = |rows, cols| slabs(0..rows, slab_rows(rows, cols)).collect::<Vec<_>>();
        let shapes = [
            (6144, 2560, 1),
            (2560, 4096, 1),
            (19_456, 2560, 2),
            (2560, 9728, 1),
            (51_200, 5120, 10),
            (16, 64, 1),
        ];
        for (rows, cols, pieces) in shapes {
            let slabs = of(rows, cols);
            assert_eq!(slabs.len(), pieces, "{rows} x {cols}");
            assert_eq!((slabs[0].start, slabs[pieces - 1].end), (0, rows));
            assert!(slabs.windows(2).all(|pair| pair[0].end == pair[1].start));
            let most = slabs.iter().map(|rows| rows.len() * cols * 2).max();
            assert!(most.is_some_and(|bytes| bytes <= SLAB_BYTES + SLAB_QUANTUM * cols * 2));
        }
        assert_eq!(slabs(5..9, 3).collect::<Vec<_>>(), [5..8, 8..9]);
    }
}
