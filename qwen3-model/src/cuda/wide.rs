//! The products of a decode step of 17 to 256 rows by kernels of our own, with norms, SiLU and residual sums within them, where
//! these are faster than cuBLASLt with kernels between: see `kernels/wide_product.cuh` and `kernels/gate_up.cuh`.
//!
//! ```text
//!   embed, norm ─▶ QKV, rope 0 ─▶ attention 0 ─▶ O 0 ─▶ gate+up 0 ─▶ down 0 ─▶ QKV, rope 1 ─▶ … ─▶ head
//! ```
//!
//! Our O and down leave `normed` not yet scaled, and the sums of squares by which what comes after them scales: gate+up and QKV
//! of our own as part of the product, after a QKV of cuBLASLt the kernel that rotates. A head of cuBLASLt has the norm anew.

use cuda_graphs::{Compiler, Device, DeviceBuffer, DeviceSlice};

use super::{CudaBackend, CudaOptions, Rows};
use crate::launch::{
    GATE_UP_ROWS, GateUp, GateUpOp, RowScale, StageOutput, WIDE_ALL_KINDS, WIDE_HEAD_DIM, WIDE_ROWS,
    WideProductOp, WideProducts,
};
use crate::{FusedMatrix, Qwen3Config, Result};

/// Rows that anything of this serves.
const ROWS: std::ops::RangeInclusive<usize> = 17..=*GATE_UP_ROWS.end();

/// Which products of a step go through our kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Served {
    pub qkv: bool,
    /// Only with `gate_up`, which then scales.
    pub o: bool,
    pub gate_up: bool,
    pub down: bool,
    pub head: bool,
}

impl Served {
    /// What is faster by our kernels for so many rows; measured on an H200, see docs/performance.md.
    const fn of(rows: usize) -> Self {
        let few = rows <= WIDE_ALL_KINDS;
        Self {
            qkv: few,
            o: rows <= 96,
            gate_up: rows <= 224,
            down: rows <= 128,
            head: few,
        }
    }

    pub(super) const fn has(self, matrix: FusedMatrix) -> bool {
        match matrix {
            FusedMatrix::Qkv => self.qkv,
            FusedMatrix::O => self.o,
            FusedMatrix::GateUp => self.gate_up,
            FusedMatrix::Down => self.down,
        }
    }
}

/// The kernels and their buffers.
#[derive(Debug)]
pub(super) struct Wide {
    products: WideProducts,
    gate_up: GateUp,
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
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let Some(gate_up) = GateUp::load(compiler, device, inner, rows)? else {
            return Ok(None);
        };
        let Some(products) = WideProducts::load(compiler, device, rows)? else {
            return Ok(None);
        };
        let ropes = config.head_dim == WIDE_HEAD_DIM && products.takes(config.qkv_size(), hidden, true);
        let all = products.takes(config.qkv_size(), hidden, false)
            && products.takes(hidden, config.q_size(), true)
            && products.takes(2 * inner, hidden, false)
            && products.takes(hidden, inner, true)
            && products.takes(config.vocab_size, hidden, false);
        if !all {
            return Ok(None);
        }
        let most = rows.min(*WIDE_ROWS.end());
        let squares = DeviceBuffer::zeroed(device, products.squares_len(most, hidden))?;
        Ok(Some(Self {
            products,
            gate_up,
            squares,
            ropes,
        }))
    }

    fn squares(&self, rows: usize, hidden: usize) -> Result<DeviceSlice<'_, f32>> {
        Ok(self.squares.slice(..self.products.squares_len(rows, hidden))?)
    }
}

impl CudaBackend {
    /// The kernels, the present rows and which products go through them, if these rows do: a number for which they are
    /// faster, and all weights bf16 with nothing beside them.
    pub(super) fn wide(&self) -> Option<(&Wide, usize, Served)> {
        let Rows::Decode { bucket } = self.rows else {
            return None;
        };
        let plain = self.four_bit.is_none() && self.unmerged.is_none() && !self.weights.has_biases();
        match &self.wide_products {
            Some(wide) if plain && ROWS.contains(&bucket) => Some((wide, bucket, Served::of(bucket))),
            _ => None,
        }
    }

    /// Which products of the present rows go through our kernels.
    pub(super) fn wide_served(&self) -> Served {
        const NONE: Served = Served {
            qkv: false,
            o: false,
            gate_up: false,
            down: false,
            head: false,
        };
        self.wide().map_or(NONE, |(_, _, served)| served)
    }

    /// Whether QKV of the present rows has the rotation and the write of keys and values inside.
    pub(super) fn in_wide_qkv(&self) -> bool {
        self.wide()
            .is_some_and(|(wide, _, served)| served.qkv && wide.ropes)
    }

    /// By what the rows of a QKV product of cuBLASLt have yet to be scaled: our down projection has left them so.
    pub(super) fn wide_row_scale(&self, layer: usize) -> Result<Option<RowScale<'_>>> {
        let Some((wide, rows, _)) = self.wide().filter(|(_, _, served)| served.down && !served.qkv) else {
            return Ok(None);
        };
        if layer == 0 {
            return Ok(None);
        }
        let width = self.config.hidden_size;
        Ok(Some(RowScale {
            squares: wide.squares(rows, width)?,
            width,
            eps: self.config.rms_norm_eps as f32,
        }))
    }

    /// A layer's product.
    pub(super) fn wide_project(
        &self,
        wide: &Wide,
        rows: usize,
        served: Served,
        layer: usize,
        matrix: FusedMatrix,
    ) -> Result<()> {
        let (config, w) = (&self.config, &self.workspace);
        let (hidden, weights) = (config.hidden_size, &self.weights.layers[layer]);
        let normed = w.normed.slice(..rows * hidden)?;
        // None of so many rows that nothing leaves any.
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
            // The first norm is a kernel of its own, which scales; so is every norm before a product of cuBLASLt's.
            FusedMatrix::Qkv => (
                normed,
                (layer > 0 && served.down).then_some(squares),
                StageOutput::Bf16(w.qkv.slice(..rows * config.qkv_size())?),
            ),
            FusedMatrix::O => (
                w.mixed.slice(..rows * config.q_size())?,
                None,
                to_residual(weights.post_attention_norm.as_slice())?,
            ),
            FusedMatrix::GateUp if rows <= WIDE_ALL_KINDS => {
                (normed, served.o.then_some(squares), StageOutput::Gated(gated))
            }
            FusedMatrix::GateUp => {
                let op = GateUpOp {
                    rows,
                    weight: weights.matrix(matrix).as_slice(),
                    input: normed,
                    squares: served.o.then_some(squares),
                    eps: config.rms_norm_eps as f32,
                    out: gated,
                };
                return wide.gate_up.run(&self.stream, &op);
            }
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
    pub(super) fn wide_head(&self, wide: &Wide, rows: usize, served: Served) -> Result<()> {
        let (config, w) = (&self.config, &self.workspace);
        let hidden = config.hidden_size;
        let op = WideProductOp {
            rows,
            weight: self.weights.head().as_slice(),
            input: w.normed.slice(..rows * hidden)?,
            squares: match served.down {
                true => Some(wide.squares(rows, hidden)?),
                false => None,
            },
            eps: config.rms_norm_eps as f32,
            output: StageOutput::F32(w.logits.slice(..rows * config.vocab_size)?),
            heads: None,
        };
        wide.products.run(&self.stream, &op)
    }
}
