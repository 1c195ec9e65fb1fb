//! A model's weights on the device, fused as the products use them.
//!
//! ```text
//!   qkv      [q + k + v, hidden]        rows of q_proj, then k_proj, then v_proj
//!   gate_up  [2 * intermediate, hidden] rows of gate_proj, then up_proj
//! ```
//!
//! Everything stays row-major, as in the file: a projection is a range of whole rows of its fused
//! matrix, so it can be rewritten in place while addresses stay the same.

use std::ops::Range;

use cuda_graphs::{DeviceBuffer, DeviceSlice, Stream};
use half::bf16;

use crate::launch::{FourBitBuffer, FourBitKernels, Kernels};
use crate::random;
use crate::{FusedMatrix, LayerWeights, Projection, QuantType, Qwen3Config, Result, Weights};

const EMBED: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";
const FINAL_NORM: &str = "model.norm.weight";

/// Weights of one layer on the device.
#[derive(Debug)]
pub(crate) struct DeviceLayer {
    /// In the order of [`FusedMatrix::ALL`], row-major `[rows, cols]`; empty where the matrix is in 4 bits.
    matrices: [DeviceBuffer<bf16>; 4],
    four_bit: [Option<FourBitBuffer>; 4],
    /// Added to the products, in the same order, f32 `[rows]`. The model has none: an adapter brings them.
    biases: [Option<DeviceBuffer<f32>>; 4],
    pub(crate) input_norm: DeviceBuffer<f32>,
    pub(crate) post_attention_norm: DeviceBuffer<f32>,
    pub(crate) q_norm: DeviceBuffer<f32>,
    pub(crate) k_norm: DeviceBuffer<f32>,
}

impl DeviceLayer {
    pub(crate) fn matrix(&self, matrix: FusedMatrix) -> &DeviceBuffer<bf16> {
        &self.matrices[matrix as usize]
    }

    /// The matrix, if it is in 4 bits.
    pub(crate) fn four_bit(&self, matrix: FusedMatrix) -> Option<&FourBitBuffer> {
        self.four_bit[matrix as usize].as_ref()
    }

    pub(crate) fn bias(&self, matrix: FusedMatrix) -> Option<&DeviceBuffer<f32>> {
        self.biases[matrix as usize].as_ref()
    }
}

/// All weights of a model on the device.
#[derive(Debug)]
pub(crate) struct DeviceWeights {
    pub(crate) embed: DeviceBuffer<bf16>,
    /// `None` while the head is the embedding: the two then share their storage.
    head: Option<DeviceBuffer<bf16>>,
    /// Whether the model's head is the embedding; an adapter may have given it storage of its own.
    tied: bool,
    head_bias: Option<DeviceBuffer<f32>>,
    pub(crate) norm: DeviceBuffer<f32>,
    pub(crate) layers: Vec<DeviceLayer>,
}

/// Rows and columns of a fused matrix.
pub(crate) fn fused_shape(config: &Qwen3Config, matrix: FusedMatrix) -> [usize; 2] {
    let parts = matrix.parts();
    let cols = config.projection_shape(parts[0])[1];
    [
        parts.iter().map(|&part| config.projection_shape(part)[0]).sum(),
        cols,
    ]
}

/// The rows of a projection within its fused matrix.
pub(crate) fn projection_rows(config: &Qwen3Config, projection: Projection) -> Range<usize> {
    let rows = |part: &Projection| config.projection_shape(*part)[0];
    let parts = projection.fused().parts();
    let start = parts
        .iter()
        .take_while(|&&part| part != projection)
        .map(rows)
        .sum();
    start..start + rows(&projection)
}

impl DeviceWeights {
    /// Copies the weights to the device, fused.
    pub(crate) fn upload(stream: &Stream, config: &Qwen3Config, weights: &Weights) -> Result<Self> {
        let layers = weights.layers.iter().enumerate().map(|(index, layer)| {
            let of = config.n_layers;
            let _span = tracing::debug_span!("upload", what = "layer", index, of).entered();
            Self::layer(
                stream,
                config,
                |matrix| four_bit(stream, layer, matrix),
                |projection, rows| Ok(stream.upload(rows, &layer.projection(projection).to_bf16())?),
                [
                    &layer.input_norm,
                    &layer.post_attention_norm,
                    &layer.q_norm,
                    &layer.k_norm,
                ],
            )
        });
        let layers = layers.collect::<Result<_>>()?;
        let head = match weights.is_tied() {
            true => None,
            false => Some(DeviceBuffer::from_slice(stream, &weights.lm_head.to_bf16())?),
        };
        Ok(Self {
            embed: DeviceBuffer::from_slice(stream, weights.embed_tokens.data())?,
            head,
            tied: weights.is_tied(),
            head_bias: None,
            norm: DeviceBuffer::from_slice(stream, &weights.norm)?,
            layers,
        })
    }

    /// Draws the weights of [`Weights::random`] on the device: the same values, without the host memory. With
    /// `quantized`, the projections are then in 4 bits, without double quantisation.
    pub(crate) fn random(
        stream: &Stream,
        kernels: &Kernels,
        config: &Qwen3Config,
        seed: u64,
        quantized: Option<(&FourBitKernels, QuantType)>,
    ) -> Result<Self> {
        let quantiles = DeviceBuffer::from_slice(stream, random::quantiles().as_slice())?;
        let draw = |name: &str, to: DeviceSlice<'_, bf16>| {
            kernels.random_matrix(stream, to, &quantiles, random::stream(seed, name))
        };
        let norm = |name: &str, len| random::norm(seed, name, len);
        let layers = (0..config.n_layers).map(|layer| {
            let of = config.n_layers;
            let _span = tracing::debug_span!("upload", what = "random layer", index = layer, of).entered();
            let name = |module: &str| format!("model.layers.{layer}.{module}.weight");
            let four_bit = |matrix: FusedMatrix| -> Result<Option<FourBitBuffer>> {
                let Some((kernels, quant_type)) = quantized else {
                    return Ok(None);
                };
                let [rows, cols] = fused_shape(config, matrix);
                let buffer = FourBitBuffer::zeroed(stream.device(), rows, cols, quant_type)?;
                for &part in matrix.parts() {
                    let rows = projection_rows(config, part);
                    let drawn = DeviceBuffer::zeroed(stream.device(), rows.len() * cols)?;
                    draw(&name(part.name()), drawn.as_slice())?;
                    kernels.quantize(stream, drawn.as_slice(), &buffer, rows.start, quant_type)?;
                    // Before `drawn` is freed.
                    stream.synchronize()?;
                }
                Ok(Some(buffer))
            };
            Self::layer(
                stream,
                config,
                four_bit,
                |projection, rows| draw(&name(projection.name()), rows),
                [
                    &norm(&name("input_layernorm"), config.hidden_size),
                    &norm(&name("post_attention_layernorm"), config.hidden_size),
                    &norm(&name("self_attn.q_norm"), config.head_dim),
                    &norm(&name("self_attn.k_norm"), config.head_dim),
                ],
            )
        });
        let layers = layers.collect::<Result<_>>()?;
        let vocab = config.vocab_size * config.hidden_size;
        let matrix = |name: &str| -> Result<DeviceBuffer<bf16>> {
            let buffer = DeviceBuffer::zeroed(stream.device(), vocab)?;
            draw(name, buffer.as_slice())?;
            Ok(buffer)
        };
        let weights = Self {
            embed: matrix(EMBED)?,
            head: if config.tie_word_embeddings {
                None
            } else {
                Some(matrix(HEAD)?)
            },
            tied: config.tie_word_embeddings,
            head_bias: None,
            norm: DeviceBuffer::from_slice(stream, &norm(FINAL_NORM, config.hidden_size))?,
            layers,
        };
        // The quantiles are freed on return.
        stream.synchronize()?;
        Ok(weights)
    }

    fn layer(
        stream: &Stream,
        config: &Qwen3Config,
        four_bit: impl Fn(FusedMatrix) -> Result<Option<FourBitBuffer>>,
        fill: impl Fn(Projection, DeviceSlice<'_, bf16>) -> Result<()>,
        norms: [&Vec<f32>; 4],
    ) -> Result<DeviceLayer> {
        let four_bit = [
            four_bit(FusedMatrix::Qkv)?,
            four_bit(FusedMatrix::O)?,
            four_bit(FusedMatrix::GateUp)?,
            four_bit(FusedMatrix::Down)?,
        ];
        let matrix = |matrix: FusedMatrix| -> Result<DeviceBuffer<bf16>> {
            if four_bit[matrix as usize].is_some() {
                return Ok(DeviceBuffer::zeroed(stream.device(), 0)?);
            }
            let [rows, cols] = fused_shape(config, matrix);
            let buffer = DeviceBuffer::zeroed(stream.device(), rows * cols)?;
            for &part in matrix.parts() {
                let rows = projection_rows(config, part);
                fill(part, buffer.slice(rows.start * cols..rows.end * cols)?)?;
            }
            Ok(buffer)
        };
        let norm = |values: &Vec<f32>| DeviceBuffer::from_slice(stream, values);
        let [input_norm, post_attention_norm, q_norm, k_norm] = norms;
        Ok(DeviceLayer {
            matrices: [
                matrix(FusedMatrix::Qkv)?,
                matrix(FusedMatrix::O)?,
                matrix(FusedMatrix::GateUp)?,
                matrix(FusedMatrix::Down)?,
            ],
            four_bit,
            biases: [const { None }; 4],
            input_norm: norm(input_norm)?,
            post_attention_norm: norm(post_attention_norm)?,
            q_norm: norm(q_norm)?,
            k_norm: norm(k_norm)?,
        })
    }

    /// The output head, `[vocab, hidden]`.
    pub(crate) fn head(&self) -> &DeviceBuffer<bf16> {
        self.head.as_ref().unwrap_or(&self.embed)
    }

    /// Whether the model's head is the embedding.
    pub(crate) fn is_tied(&self) -> bool {
        self.tied
    }

    /// Added to the logits, f32 `[vocab]`.
    pub(crate) fn head_bias(&self) -> Option<&DeviceBuffer<f32>> {
        self.head_bias.as_ref()
    }

    /// Gives a tied head storage of its own, with the embedding's values, so that it can be written. Returns whether that
    /// moved the head.
    pub(crate) fn untie(&mut self, stream: &Stream) -> Result<bool> {
        if self.head.is_some() {
            return Ok(false);
        }
        let head = DeviceBuffer::zeroed(stream.device(), self.embed.len())?;
        stream.copy(&head, &self.embed)?;
        stream.synchronize()?;
        self.head = Some(head);
        Ok(true)
    }

    /// Makes room for a bias, of zeros, if there is none yet: of a layer's fused matrix, or of the head (`None`). Returns
    /// whether it is new.
    pub(crate) fn reserve_bias(
        &mut self,
        stream: &Stream,
        config: &Qwen3Config,
        at: Option<(usize, FusedMatrix)>,
    ) -> Result<bool> {
        let (slot, len) = match at {
            Some((layer, matrix)) => (
                &mut self.layers[layer].biases[matrix as usize],
                fused_shape(config, matrix)[0],
            ),
            None => (&mut self.head_bias, config.vocab_size),
        };
        if slot.is_some() {
            return Ok(false);
        }
        *slot = Some(DeviceBuffer::zeroed(stream.device(), len)?);
        Ok(true)
    }

    /// Whether there is room for any bias: steps then add biases.
    pub(crate) fn has_biases(&self) -> bool {
        let any = |layer: &DeviceLayer| layer.biases.iter().any(Option::is_some);
        self.head_bias.is_some() || self.layers.iter().any(any)
    }

    /// A bias by its place: see [`Self::reserve_bias`].
    pub(crate) fn bias(&self, at: Option<(usize, FusedMatrix)>) -> Option<&DeviceBuffer<f32>> {
        match at {
            Some((layer, matrix)) => self.layers.get(layer)?.bias(matrix),
            None => self.head_bias(),
        }
    }

    /// Bytes on the device.
    pub(crate) fn bytes(&self) -> u64 {
        let head = self.head.as_ref().map_or(0, DeviceBuffer::len);
        let layer = |layer: &DeviceLayer| {
            let matrices: usize = layer.matrices.iter().map(DeviceBuffer::len).sum();
            let norms = [
                &layer.input_norm,
                &layer.post_attention_norm,
                &layer.q_norm,
                &layer.k_norm,
            ];
            let four_bit: u64 = layer.four_bit.iter().flatten().map(FourBitBuffer::bytes).sum();
            four_bit + 2 * matrices as u64 + 4 * norms.iter().map(|norm| norm.len() as u64).sum::<u64>()
        };
        let matrices = (self.embed.len() + head) as u64;
        2 * matrices + 4 * self.norm.len() as u64 + self.layers.iter().map(layer).sum::<u64>()
    }
}

/// A fused matrix in 4 bits, if all its parts are, in a form that the kernels take. Where only some are, all of it is
/// dequantised.
fn four_bit(stream: &Stream, layer: &LayerWeights, matrix: FusedMatrix) -> Result<Option<FourBitBuffer>> {
    let parts = matrix
        .parts()
        .iter()
        .map(|&part| layer.projection(part).quantized());
    let Some(parts) = parts.collect::<Option<Vec<_>>>() else {
        return Ok(None);
    };
    match parts
        .iter()
        .all(|part| FourBitBuffer::supports(part) && part.map() == parts[0].map())
    {
        true => FourBitBuffer::upload(stream, &parts).map(Some),
        false => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn projections_tile_their_fused_matrix_in_order() {
        let config = Qwen3Config::from_dir(std::path::Path::new(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../rollout-engine/models/tiny-qwen3-math"
        )))
        .expect("the bundled model");
        for matrix in FusedMatrix::ALL {
            let [rows, cols] = fused_shape(&config, matrix);
            let mut next = 0;
            for &part in matrix.parts() {
                let range = projection_rows(&config, part);
                assert_eq!(range.start, next);
                assert_eq!([range.len(), cols], config.projection_shape(part));
                next = range.end;
            }
            assert_eq!(next, rows);
        }
        assert_eq!(fused_shape(&config, FusedMatrix::Qkv), [(8 + 2 * 2) * 128, 256]);
    }
}
