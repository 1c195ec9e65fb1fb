//! The buffers of a step, taken once for the largest step.
//!
//! ```text
//!   residual  f32  [rows, hidden]            the residual stream, see kernels/embed.cu for why f32
//!   delta     f32  [rows, hidden]            what the next norm adds to it
//!   normed    bf16 [rows, hidden]            input of QKV, gate+up and head
//!   qkv       bf16 [rows, q + 2 kv]          mixed  bf16 [rows, q]
//!   gate_up   bf16 [rows, 2 * intermediate]  gated  bf16 [rows, intermediate]
//!   logits    f32  [logit rows, vocab]
//! ```

use cuda_graphs::{Device, DeviceBuffer};
use half::bf16;

use super::weights::fused_shape;
use crate::launch::SampleScratch;
use crate::{FusedMatrix, Qwen3Config, Result};

#[derive(Debug)]
pub(crate) struct Workspace {
    pub(crate) residual: DeviceBuffer<f32>,
    pub(crate) delta: DeviceBuffer<f32>,
    pub(crate) normed: DeviceBuffer<bf16>,
    pub(crate) qkv: DeviceBuffer<bf16>,
    pub(crate) mixed: DeviceBuffer<bf16>,
    pub(crate) gate_up: DeviceBuffer<bf16>,
    pub(crate) gated: DeviceBuffer<bf16>,
    pub(crate) logits: DeviceBuffer<f32>,
    pub(crate) sample: SampleScratch,
    /// Rows that `logits` has room for.
    pub(crate) logit_rows: usize,
}

impl Workspace {
    /// For `rows` rows and the logits of `logit_rows`; products may be given more rows, up to `padded(rows)` of each.
    pub(crate) fn new(
        device: &Device,
        config: &Qwen3Config,
        rows: usize,
        logit_rows: usize,
        padded: impl Fn(usize) -> usize,
    ) -> Result<Self> {
        // The inputs of the head share a buffer with those of the layers.
        let (rows, product_logits) = (padded(rows.max(logit_rows)), padded(logit_rows));
        let q = config.n_heads * config.head_dim;
        let [qkv, hidden] = fused_shape(config, FusedMatrix::Qkv);
        let [gate_up, _] = fused_shape(config, FusedMatrix::GateUp);
        let bf16s = |width: usize| DeviceBuffer::<bf16>::zeroed(device, rows * width);
        Ok(Self {
            residual: DeviceBuffer::zeroed(device, rows * hidden)?,
            delta: DeviceBuffer::zeroed(device, rows * hidden)?,
            normed: bf16s(hidden)?,
            qkv: bf16s(qkv)?,
            mixed: bf16s(q)?,
            gate_up: bf16s(gate_up)?,
            gated: bf16s(config.intermediate_size)?,
            logits: DeviceBuffer::zeroed(device, product_logits * config.vocab_size)?,
            sample: SampleScratch::new(device, logit_rows, config.vocab_size)?,
            logit_rows,
        })
    }
}
