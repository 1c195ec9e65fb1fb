//! Biases that adapters bring: f32 vectors beside the fused matrices.

use std::collections::BTreeMap;

use cuda_graphs::Stream;
use lora_merge::{ModuleSpec, ModuleUpdate};

use super::weights::{DeviceWeights, fused_shape, projection_rows};
use crate::{FusedMatrix, Projection, Qwen3Config, Result};

/// Biases by module, f32 `[out]`.
pub(super) type Biases = BTreeMap<usize, Vec<f32>>;

/// The biases that updates make.
pub(super) fn of(updates: &[(usize, &ModuleUpdate)], specs: &[ModuleSpec]) -> Result<Biases> {
    let mut biases = Biases::new();
    for &(module, update) in updates {
        // Qwen3's linear modules have none of their own.
        let bias = update.bias(None).map_err(|e| e.in_module(&specs[module].name))?;
        let Some(bias) = bias else {
            continue;
        };
        biases.insert(module, bias);
    }
    Ok(biases)
}

/// Layer and fused matrix of a module; `None` is the head.
pub(super) fn place(config: &Qwen3Config, module: usize) -> Option<(usize, FusedMatrix)> {
    let n = Projection::ALL.len();
    (module / n < config.n_layers).then(|| (module / n, Projection::ALL[module % n].fused()))
}

/// Writes these biases, and zeros for all other modules, wherever there is room for biases.
pub(super) fn write(
    stream: &Stream,
    config: &Qwen3Config,
    weights: &DeviceWeights,
    biases: &Biases,
) -> Result<()> {
    let n = Projection::ALL.len();
    for layer in 0..config.n_layers {
        for matrix in FusedMatrix::ALL {
            let Some(buffer) = weights.layers[layer].bias(matrix) else {
                continue;
            };
            let mut values = vec![0f32; fused_shape(config, matrix)[0]];
            for &part in matrix.parts() {
                if let Some(bias) = biases.get(&(layer * n + part as usize)) {
                    values[projection_rows(config, part)].copy_from_slice(bias);
                }
            }
            stream.upload(buffer, &values)?;
        }
    }
    if let Some(buffer) = weights.head_bias() {
        match biases.get(&(config.n_layers * n)) {
            Some(bias) => stream.upload(buffer, bias)?,
            None => stream.fill_bytes(buffer, 0)?,
        }
    }
    Ok(())
}
