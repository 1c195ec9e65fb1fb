//! The layers of a small decode step through one persistent kernel: see `kernels/decode_layers.cu`.
//!
//! ```text
//!   embed, norm ─▶ [ QKV, rope, attention, O, MLP of every layer, head ] ─▶ sample
//! ```
//!
//! Brackets are one launch. The other operations of the layer walk are then part of it.

use cuda_graphs::{Compiler, Device};

use super::{CudaBackend, CudaOptions, Rows};
use crate::launch::{
    DecodeLayers, DecodeLayersOp, DecodeLayersScratch, LayerOperands, LayersShape, MAX_ROWS,
};
use crate::{FusedMatrix, Qwen3Config, Result};

/// The kernel and its buffers.
#[derive(Debug)]
pub(super) struct LayerKernel {
    kernel: DecodeLayers,
    scratch: DecodeLayersScratch,
}

impl LayerKernel {
    /// `None` where the device or the model's shape is not one for it.
    pub(super) fn new(
        device: &Device,
        compiler: &Compiler,
        config: &Qwen3Config,
        options: &CudaOptions,
    ) -> Result<Option<Self>> {
        let shape = LayersShape {
            hidden: config.hidden_size,
            heads: config.n_heads,
            kv_heads: config.n_kv_heads,
            intermediate: config.intermediate_size,
            vocab: config.vocab_size,
        };
        let table = options.page_table();
        let max_length = table.max_pages_per_slot * table.page_size;
        if !shape.is_supported(config.head_dim) {
            return Ok(None);
        }
        let Some(kernel) = DecodeLayers::load(compiler, device)? else {
            return Ok(None);
        };
        let scratch = DecodeLayersScratch::new(device, &kernel, shape, config.n_layers, max_length)?;
        Ok(Some(Self { kernel, scratch }))
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
            && matches!(self.rows, Rows::Decode { bucket } if bucket <= self.layer_kernel_rows())
    }

    /// The largest bucket that goes through the kernel.
    fn layer_kernel_rows(&self) -> usize {
        self.options.kernels.matrix.layer_kernel_rows.unwrap_or(MAX_ROWS)
    }

    /// From the first layer's normed input to the logits.
    pub(super) fn all_layers(&self) -> Result<()> {
        let (Some(layers), Rows::Decode { bucket: rows }) = (&self.layer_kernel, self.rows) else {
            return Ok(());
        };
        let (config, w) = (&self.config, &self.workspace);
        let weights = &self.weights.layers;
        let operands = weights.iter().enumerate().map(|(number, layer)| {
            let next_norm = weights
                .get(number + 1)
                .map_or(&self.weights.norm, |next| &next.input_norm);
            Ok(LayerOperands {
                qkv: layer.matrix(FusedMatrix::Qkv).as_slice(),
                o: layer.matrix(FusedMatrix::O).as_slice(),
                gate_up: layer.matrix(FusedMatrix::GateUp).as_slice(),
                down: layer.matrix(FusedMatrix::Down).as_slice(),
                q_norm: layer.q_norm.as_slice(),
                k_norm: layer.k_norm.as_slice(),
                post_norm: layer.post_attention_norm.as_slice(),
                next_norm: next_norm.as_slice(),
                keys: self.cache.keys(number)?,
                values: self.cache.values(number)?,
            })
        });
        let operands = operands.collect::<Result<Vec<_>>>()?;
        layers.kernel.run(
            &self.stream,
            &layers.scratch,
            &DecodeLayersOp {
                layers: &operands,
                head: self.weights.head().as_slice(),
                normed: w.normed.slice(..rows * config.hidden_size)?,
                residual: w.residual.slice(..rows * config.hidden_size)?,
                mixed: w.mixed.slice(..rows * config.q_size())?,
                gated: w.gated.slice(..rows * config.intermediate_size)?,
                logits: w.logits.slice(..rows * config.vocab_size)?,
                positions: self.decode.positions(rows)?,
                slots: self.decode.slots(rows)?,
                page_table: self.mirror.rows(),
                max_pages: self.mirror.max_pages_per_slot(),
                page_size: self.options.page_size,
                cos_sin: self.cos_sin.as_slice(),
                eps: config.rms_norm_eps as f32,
            },
        )
    }
}
