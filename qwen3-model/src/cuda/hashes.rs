//! Digests over all parameters on the device.

use cuda_graphs::DeviceBuffer;
use lora_merge::ActiveAdapter;

use super::CudaBackend;
use super::adapters::{Pristine, served};
use super::biases;
use super::weights::projection_rows;
use crate::digest::{Parameter, Values, digest};
use crate::{Error, MergeMode, Projection, Result};

impl CudaBackend {
    /// Digest over the base's parameters or, with `as_served`, over those that steps are computed with.
    pub(super) fn sha256(&self, as_served: bool) -> Result<[u8; 32]> {
        let (stream, weights) = (&self.stream, &self.weights);
        let norm = |values: &DeviceBuffer<f32>| -> Result<Values<'static>> {
            Ok(Values::Norm(stream.download(values)?.into()))
        };
        let head = weights.layers.len() * Projection::ALL.len();
        digest(&self.config, |parameter| match parameter {
            Parameter::Embedding => Ok(Values::Matrix(stream.download(&weights.embed)?.into())),
            Parameter::FinalNorm => norm(&weights.norm),
            Parameter::InputNorm(layer) => norm(&weights.layers[layer].input_norm),
            Parameter::PostAttentionNorm(layer) => norm(&weights.layers[layer].post_attention_norm),
            Parameter::QueryNorm(layer) => norm(&weights.layers[layer].q_norm),
            Parameter::KeyNorm(layer) => norm(&weights.layers[layer].k_norm),
            Parameter::Bias(module) if as_served && self.adapters.biases.contains_key(&module) => {
                Ok(Values::Bias(self.bias(module)?.into()))
            }
            Parameter::Bias(_) => Ok(Values::Absent),
            // As on the CPU, a tied head counts once an adapter has made it another matrix than the embedding.
            Parameter::Weight(module)
                if module == head && weights.is_tied() && !(as_served && self.adapters.own_head) =>
            {
                Ok(Values::Absent)
            }
            Parameter::Weight(module) => {
                let values = match self.adapters.pristine.get(&module) {
                    _ if self.four_bit_module(module).is_some() => self.base_values(module)?,
                    Some(Pristine::Device(copy)) if !as_served => stream.download(copy)?,
                    Some(Pristine::Pinned(copy)) if !as_served => copy.to_vec(),
                    Some(Pristine::File) if !as_served => {
                        let matrix = self.adapters.file.as_ref().and_then(|w| w.module(module));
                        matrix.map_or(Vec::new(), |m| m.data().to_vec())
                    }
                    _ => stream.download(served(weights, &self.config, module)?)?,
                };
                Ok(Values::Matrix(values.into()))
            }
        })
    }

    /// A module's bias as steps add it, `[out]`.
    fn bias(&self, module: usize) -> Result<Vec<f32>> {
        let place = biases::place(&self.config, module);
        let Some(buffer) = self.weights.bias(place) else {
            return Ok(Vec::new());
        };
        match place {
            Some(_) => {
                let rows = projection_rows(&self.config, Projection::ALL[module % Projection::ALL.len()]);
                Ok(self.stream.download(buffer.slice(rows)?)?)
            }
            None => Ok(self.stream.download(buffer)?),
        }
    }
}

/// `verify_no_drift` over all parameters on the device.
impl lora_merge::DriftSubject for CudaBackend {
    type Error = Error;

    fn base_digest(&mut self) -> Result<[u8; 32]> {
        self.sha256(false)
    }

    fn served_digest(&mut self) -> Result<[u8; 32]> {
        self.sha256(true)
    }

    fn refresh(&mut self, active: &[ActiveAdapter]) -> Result<()> {
        self.merge_adapters(active, MergeMode::Merged).map(|_| ())
    }
}
