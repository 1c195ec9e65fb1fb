//! The layers of a small decode step through one persistent kernel per layer: see `kernels/decode_layer.cu`.
//!
//! ```text
//!   embed, norm ─▶ [QKV 0] ─▶ rope, attention 0 ─▶ [O 0, MLP 0, QKV 1] ─▶ rope, attention 1 ─▶ … ─▶ [O, MLP, head]
//! ```
//!
//! Brackets are launches of that kernel. The other operations of the layer walk are then part of one of them.

use cuda_graphs::{Compiler, Device, DeviceBuffer};
use half::bf16;

use super::{CudaBackend, Rows};
use crate::launch::{DecodeLayer, DecodeLayerOp, LayerStage, MAX_ROWS, MAX_STAGES, StageOutput};
use crate::{FusedMatrix, Qwen3Config, Result};

/// The kernel and its buffers.
#[derive(Debug)]
pub(super) struct LayerKernel {
    kernel: DecodeLayer,
    /// Two sets, for even and odd layers, so that a launch can clear the other's.
    counters: DeviceBuffer<u32>,
    /// `[MAX_ROWS, hidden]`, input of gate+up.
    normed: DeviceBuffer<bf16>,
    /// `[2][MAX_ROWS * blocks]`: after O and after down.
    squares: [DeviceBuffer<f32>; 2],
}

impl LayerKernel {
    /// `None` where the device or the model's shape is not one for it.
    pub(super) fn new(device: &Device, compiler: &Compiler, config: &Qwen3Config) -> Result<Option<Self>> {
        let widths = [config.hidden_size, config.q_size(), config.intermediate_size];
        if widths.iter().any(|width| !width.is_multiple_of(64)) {
            return Ok(None);
        }
        let Some(kernel) = DecodeLayer::load(compiler, device)? else {
            return Ok(None);
        };
        let squares = || DeviceBuffer::zeroed(device, MAX_ROWS * kernel.blocks());
        Ok(Some(Self {
            counters: DeviceBuffer::zeroed(device, 2 * MAX_STAGES)?,
            normed: DeviceBuffer::zeroed(device, MAX_ROWS * config.hidden_size)?,
            squares: [squares()?, squares()?],
            kernel,
        }))
    }
}

impl CudaBackend {
    /// Whether the present rows go through the persistent kernel: few enough, and all weights bf16 with nothing beside
    /// them.
    pub(super) fn in_layers(&self) -> bool {
        self.layer_kernel.is_some()
            && self.four_bit.is_none()
            && self.unmerged.is_none()
            && !self.weights.has_biases()
            && matches!(self.rows, Rows::Decode { bucket } if bucket <= MAX_ROWS)
    }

    /// The first layer's QKV, from `normed`.
    pub(super) fn first_product(&self) -> Result<()> {
        let (Some(layers), Rows::Decode { bucket: rows }) = (&self.layer_kernel, self.rows) else {
            return Ok(());
        };
        let (config, w) = (&self.config, &self.workspace);
        let stage = LayerStage {
            weight: self.weights.layers[0].matrix(FusedMatrix::Qkv).as_slice(),
            input: w.normed.slice(..rows * config.hidden_size)?,
            squares: None,
            output: StageOutput::Bf16(w.qkv.slice(..rows * config.qkv_size())?),
        };
        layers.kernel.run(
            &self.stream,
            &DecodeLayerOp {
                rows,
                stages: &[stage],
                // A single stage counts nothing.
                counters: layers.counters.slice(..MAX_STAGES)?,
                clear: layers.counters.as_slice(),
                eps: 0.0,
            },
        )
    }

    /// From attention's output in `layer` to the next layer's QKV, or to the logits.
    pub(super) fn layer_products(&self, layer: usize) -> Result<()> {
        let (Some(layers), Rows::Decode { bucket: rows }) = (&self.layer_kernel, self.rows) else {
            return Ok(());
        };
        let (config, w, kernel) = (&self.config, &self.workspace, &layers.kernel);
        let (hidden, weights) = (config.hidden_size, &self.weights.layers[layer]);
        let residual = w.residual.slice(..rows * hidden)?;
        let [after_o, after_down] = [&layers.squares[0], &layers.squares[1]];
        let after_o = after_o.slice(..rows * kernel.blocks())?;
        let after_down = after_down.slice(..rows * kernel.blocks())?;
        let mlp_normed = layers.normed.slice(..rows * hidden)?;
        let normed = w.normed.slice(..rows * hidden)?;
        let gated = w.gated.slice(..rows * config.intermediate_size)?;
        let (next_norm, next, output) = match self.weights.layers.get(layer + 1) {
            Some(next) => (
                &next.input_norm,
                next.matrix(FusedMatrix::Qkv),
                StageOutput::Bf16(w.qkv.slice(..rows * config.qkv_size())?),
            ),
            None => (
                &self.weights.norm,
                self.weights.head(),
                StageOutput::F32(w.logits.slice(..rows * config.vocab_size)?),
            ),
        };
        let stages = [
            LayerStage {
                weight: weights.matrix(FusedMatrix::O).as_slice(),
                input: w.mixed.slice(..rows * config.q_size())?,
                squares: None,
                output: StageOutput::Residual {
                    residual,
                    norm: weights.post_attention_norm.as_slice(),
                    normed: mlp_normed,
                    squares: after_o,
                },
            },
            LayerStage {
                weight: weights.matrix(FusedMatrix::GateUp).as_slice(),
                input: mlp_normed,
                squares: Some(after_o),
                output: StageOutput::Gated(gated),
            },
            LayerStage {
                weight: weights.matrix(FusedMatrix::Down).as_slice(),
                input: gated,
                squares: None,
                output: StageOutput::Residual {
                    residual,
                    norm: next_norm.as_slice(),
                    normed,
                    squares: after_down,
                },
            },
            LayerStage {
                weight: next.as_slice(),
                input: normed,
                squares: Some(after_down),
                output,
            },
        ];
        let set = |number: usize| {
            layers
                .counters
                .slice(number * MAX_STAGES..(number + 1) * MAX_STAGES)
        };
        kernel.run(
            &self.stream,
            &DecodeLayerOp {
                rows,
                stages: &stages,
                counters: set(layer % 2)?,
                clear: set(1 - layer % 2)?,
                eps: config.rms_norm_eps as f32,
            },
        )
    }
}
