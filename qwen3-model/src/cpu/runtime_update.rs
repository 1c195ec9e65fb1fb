//! Adapters that are not merged: `y = gain ⊙ (W₀·x) + B·(A·x) + bias`, in f32.

use half::bf16;
use lora_merge::{ModuleUpdate, UnmergedUpdate};

use super::elementwise::{add, for_rows, multiply, multiply_add};
use crate::{Result, WeightMatrix};

/// Where a module's outputs lie in rows of a fused product.
#[derive(Clone, Copy)]
pub(super) struct Columns {
    pub(super) stride: usize,
    pub(super) first: usize,
    pub(super) size: usize,
}

/// What one module computes besides its base product.
pub(super) struct RuntimeUpdate {
    /// Takes the place of the base matrix.
    pub(super) replacement: Option<Vec<bf16>>,
    low_rank: UnmergedUpdate,
    bias: Option<Vec<f32>>,
}

impl RuntimeUpdate {
    pub(super) fn new(update: &ModuleUpdate, base: &WeightMatrix) -> Result<Self> {
        // Only DoRA's norms need the base's values.
        let dora = update.terms().iter().any(|term| term.magnitude.is_some());
        let base = dora.then(|| base.to_bf16());
        let replacement = update
            .replacement()
            .map(|w| w.iter().copied().map(bf16::from_f32).collect());
        Ok(Self {
            replacement,
            low_rank: update.unmerged(base.as_deref())?,
            bias: update.bias(None)?,
        })
    }

    /// Completes the module's columns of `out` `[tokens, stride]`, which hold the base product. `x`
    /// is `[tokens, in]`.
    pub(super) fn apply(&self, x: &[f32], out: &mut [f32], columns: Columns) {
        let UnmergedUpdate { rank, a, b, gain, .. } = &self.low_rank;
        let Columns { stride, first, size } = columns;
        let cols = x.len() / (out.len() / stride);
        for_rows(out, stride, |row, out| {
            let out = &mut out[first..first + size];
            if let Some(gain) = gain {
                multiply(out, gain);
            }
            if *rank > 0 {
                let mut inner = vec![0.0; *rank];
                multiply_add(&mut inner, a, &x[row * cols..][..cols]);
                multiply_add(out, b, &inner);
            }
            if let Some(bias) = &self.bias {
                add(out, bias);
            }
        });
    }
}
