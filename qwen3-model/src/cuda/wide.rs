//! The products of a decode step of 17 to 64 rows by kernels of our own, with norms, SiLU and residual sums within them:
//! see `kernels/wide_product.cuh`.
//!
//! ```text
//!   embed, norm ─▶ QKV, rope 0 ─▶ attention 0 ─▶ O 0 ─▶ gate+up 0 ─▶ down 0 ─▶ QKV, rope 1 ─▶ … ─▶ head
//! ```
//!
//! O and down leave `normed` not yet scaled, and the sums of squares by which the product after them scales.

use cuda_graphs::{Compiler, Device, DeviceBuffer, DeviceSlice};

use super::{CudaBackend, CudaOptions, Rows};
use crate::launch::{StageOutput, WIDE_HEAD_DIM, WIDE_ROWS, WideProductOp, WideProducts};
use crate::{FusedMatrix, Qwen3Config, Result};

/// Rows from which on these kernels are faster than cuBLASLt with kernels between, and up to which; measured on an H200.
const ROWS: std::ops::RangeInclusive<usize> = 17..=*WIDE_ROWS.end();

/// The kernels and their buffers.
#[derive(Debug)]
pub(super) struct Wide {
    products: WideProducts,
    /// After O and after down.
    squares: DeviceBuffer<f32>,
    /// Whether QKV has the rotation and the write of keys and values inside.
    ropes: bool,
}

impl Wide {
    /// `None` where the device, the model's shape or the largest batch is not one for them.
    pub(super) fn new(
        device: &Device,
        compiler: &Compiler,
        config: &Qwen3Config,
        options: &CudaOptions,
    ) -> Result<Option<Self>> {
        let rows = options.max_batch_size.min(*ROWS.end());
        if rows < *ROWS.start() {
            return Ok(None);
        }
        let Some(products) = WideProducts::load(compiler, device, rows)? else {
            return Ok(None);
        };
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let ropes = config.head_dim == WIDE_HEAD_DIM && products.takes(config.qkv_size(), hidden, true);
        let all = products.takes(config.qkv_size(), hidden, false)
            && products.takes(hidden, config.q_size(), true)
            && products.takes(2 * inner, hidden, false)
            && products.takes(hidden, inner, true)
            && products.takes(config.vocab_size, hidden, false);
        if !all {
            return Ok(None);
        }
        let squares = DeviceBuffer::zeroed(device, products.squares_len(rows, hidden))?;
        Ok(Some(Self {
            products,
            squares,
            ropes,
        }))
    }

    fn squares(&self, rows: usize, hidden: usize) -> Result<DeviceSlice<'_, f32>> {
        Ok(self.squares.slice(..self.products.squares_len(rows, hidden))?)
    }
}

impl CudaBackend {
    /// The kernels, if the present rows go through them: a number for which they are faster, and all weights bf16 with
    /// nothing beside them.
    pub(super) fn wide(&self) -> Option<(&Wide, usize)> {
        let Rows::Decode { bucket } = self.rows else {
            return None;
        };
        let plain = self.four_bit.is_none() && self.unmerged.is_none() && !self.weights.has_biases();
        match &self.wide_products {
            Some(wide) if plain && ROWS.contains(&bucket) => Some((wide, bucket)),
            _ => None,
        }
    }

    /// Whether QKV of the present rows has the rotation and the write of keys and values inside.
    pub(super) fn in_wide_qkv(&self) -> bool {
        self.wide().is_some_and(|(wide, _)| wide.ropes)
    }

    /// A layer's product.
    pub(super) fn wide_project(
        &self,
        wide: &Wide,
        rows: usize,
        layer: usize,
        matrix: FusedMatrix,
    ) -> Result<()> {
        let (config, w) = (&self.config, &self.workspace);
        let (hidden, weights) = (config.hidden_size, &self.weights.layers[layer]);
        let normed = w.normed.slice(..rows * hidden)?;
        let squares = wide.squares(rows, hidden)?;
        let to_residual = |norm| -> Result<StageOutput<'_>> {
            Ok(StageOutput::Residual {
                residual: w.residual.slice(..rows * hidden)?,
                norm,
                normed,
                squares,
            })
        };
        let gated = w.gated.slice(..rows * config.intermediate_size)?;
        let next_norm = match self.weights.layers.get(layer + 1) {
            Some(next) => &next.input_norm,
            None => &self.weights.norm,
        };
        let (input, squares, output) = match matrix {
            // The first norm is a kernel of its own, which scales.
            FusedMatrix::Qkv => (
                normed,
                (layer > 0).then_some(squares),
                StageOutput::Bf16(w.qkv.slice(..rows * config.qkv_size())?),
            ),
            FusedMatrix::O => (
                w.mixed.slice(..rows * config.q_size())?,
                None,
                to_residual(weights.post_attention_norm.as_slice())?,
            ),
            FusedMatrix::GateUp => (normed, Some(squares), StageOutput::Gated(gated)),
            FusedMatrix::Down => (gated, None, to_residual(next_norm.as_slice())?),
        };
        let op = WideProductOp {
            rows,
            weight: weights.matrix(matrix).as_slice(),
            input,
            squares,
            eps: config.rms_norm_eps as f32,
            output,
            heads: match (matrix, wide.ropes) {
                (FusedMatrix::Qkv, true) => Some(self.rope_write(layer)?),
                _ => None,
            },
        };
        wide.products.run(&self.stream, &op)
    }

    /// The logits of all rows.
    pub(super) fn wide_head(&self, wide: &Wide, rows: usize) -> Result<()> {
        let (config, w) = (&self.config, &self.workspace);
        let hidden = config.hidden_size;
        let op = WideProductOp {
            rows,
            weight: self.weights.head().as_slice(),
            input: w.normed.slice(..rows * hidden)?,
            squares: Some(wide.squares(rows, hidden)?),
            eps: config.rms_norm_eps as f32,
            output: StageOutput::F32(w.logits.slice(..rows * config.vocab_size)?),
            heads: None,
        };
        wide.products.run(&self.stream, &op)
    }
}
