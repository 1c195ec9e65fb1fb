//! Where a model's weights lie in its files: all checked before anything is read.

use std::path::Path;
use std::sync::Arc;

use half::bf16;

use super::matrix::{convert, refuse_not_finite};
use super::{
    EMBED, FINAL_NORM, HEAD, INPUT_NORM, K_NORM, LayerWeights, POST_ATTENTION_NORM, Q_NORM, WeightMatrix,
    Weights, tensor_name,
};
use crate::checkpoint::Checkpoint;
use crate::four_bit::{Place, is_quantized};
use crate::mapped_file::MappedFile;
use crate::safetensors_file::TensorEntry;
use crate::{Error, Projection, Qwen3Config, Result};

/// Where everything is, all checked and nothing read.
pub(super) struct Layout {
    embed: (Arc<MappedFile>, TensorEntry),
    /// `None` for the embedding.
    head: Option<MatrixPlace>,
    norm: (Arc<MappedFile>, TensorEntry),
    layers: Vec<LayerLayout>,
}

struct LayerLayout {
    /// Input, post-attention, q and k.
    norms: [(Arc<MappedFile>, TensorEntry); 4],
    /// In the order of [`Projection::ALL`].
    projections: [MatrixPlace; 7],
}

enum MatrixPlace {
    Dense(Arc<MappedFile>, TensorEntry),
    FourBit(Box<Place>),
}

impl MatrixPlace {
    fn take(checkpoint: &mut Checkpoint, module: &str, shape: [usize; 2]) -> Result<Self> {
        if is_quantized(checkpoint, module) {
            return Ok(Self::FourBit(Box::new(Place::take(checkpoint, module, shape)?)));
        }
        let (file, entry) = checkpoint.take(&format!("{module}.weight"), &shape)?;
        Ok(Self::Dense(file, entry))
    }

    fn path(&self) -> &Path {
        match self {
            Self::Dense(file, _) => file.path(),
            Self::FourBit(place) => place.path(),
        }
    }

    fn read(self, name: String, shape: [usize; 2]) -> Result<WeightMatrix> {
        match self {
            Self::Dense(file, entry) => WeightMatrix::from_file(name, file, entry, shape),
            Self::FourBit(place) => Ok(WeightMatrix::four_bit(name, shape, place.read()?)),
        }
    }
}

impl Layout {
    pub(super) fn take(checkpoint: &mut Checkpoint, config: &Qwen3Config) -> Result<Self> {
        let (hidden, head_dim) = (config.hidden_size, config.head_dim);
        let vocab = [config.vocab_size, hidden];
        let embed = checkpoint.take(EMBED, &vocab)?;
        let head = match config.tie_word_embeddings && !checkpoint.contains(HEAD) {
            true => None,
            // A tied head must equal the embedding, which is never in 4 bits.
            false if config.tie_word_embeddings => {
                let (file, entry) = checkpoint.take(HEAD, &vocab)?;
                Some(MatrixPlace::Dense(file, entry))
            }
            false => Some(MatrixPlace::take(checkpoint, "lm_head", vocab)?),
        };
        let norm = checkpoint.take(FINAL_NORM, &[hidden])?;
        let mut layers = Vec::new();
        for layer in 0..config.n_layers {
            let mut take =
                |module: &str, shape: &[usize]| checkpoint.take(&tensor_name(layer, module), shape);
            let norms = [
                take(INPUT_NORM, &[hidden])?,
                take(POST_ATTENTION_NORM, &[hidden])?,
                take(Q_NORM, &[head_dim])?,
                take(K_NORM, &[head_dim])?,
            ];
            let [q, k, v, o, gate, up, down] = Projection::ALL
                .map(|p| MatrixPlace::take(checkpoint, &p.module(layer), config.projection_shape(p)));
            let projections = [q?, k?, v?, o?, gate?, up?, down?];
            layers.push(LayerLayout { norms, projections });
        }
        Ok(Self {
            embed,
            head,
            norm,
            layers,
        })
    }

    pub(super) fn read(self, config: &Qwen3Config) -> Result<Weights> {
        let vocab = [config.vocab_size, config.hidden_size];
        let (file, entry) = self.embed;
        let embed_tokens = MatrixPlace::Dense(file, entry).read(EMBED.into(), vocab)?;
        let lm_head = match self.head {
            None => embed_tokens.clone(),
            Some(place) => {
                let path = place.path().to_owned();
                let head = place.read(HEAD.into(), vocab)?;
                match config.tie_word_embeddings {
                    false => head,
                    true if same_bytes(head.data(), embed_tokens.data()) => embed_tokens.clone(),
                    true => {
                        let problem =
                            format!("differs from `{EMBED}` although `tie_word_embeddings` is true");
                        return Err(Error::Tensor {
                            path,
                            tensor: HEAD.into(),
                            problem,
                        });
                    }
                }
            }
        };
        let layers = self.layers.into_iter().enumerate().map(|(layer, places)| {
            let [input, post_attention, q, k] = places.norms;
            let read = |place, name| read_norm(place, &tensor_name(layer, name));
            let (input_norm, post_attention_norm) = (
                read(input, INPUT_NORM)?,
                read(post_attention, POST_ATTENTION_NORM)?,
            );
            let (q_norm, k_norm) = (read(q, Q_NORM)?, read(k, K_NORM)?);
            let mut all = Projection::ALL.into_iter();
            let [q, k, v, o, gate, up, down] = places.projections.map(|place| {
                let p = all.next().unwrap_or(Projection::Down);
                place.read(tensor_name(layer, p.name()), config.projection_shape(p))
            });
            Ok(LayerWeights {
                input_norm,
                post_attention_norm,
                q_norm,
                k_norm,
                projections: [q?, k?, v?, o?, gate?, up?, down?],
            })
        });
        let layers = layers.collect::<Result<_>>()?;
        Ok(Weights {
            embed_tokens,
            lm_head,
            norm: read_norm(self.norm, FINAL_NORM)?,
            layers,
        })
    }
}

fn read_norm((file, entry): (Arc<MappedFile>, TensorEntry), name: &str) -> Result<Vec<f32>> {
    let values = convert(&file.bytes()[entry.bytes.clone()], entry.dtype, |x| x);
    let not_finite = values.iter().position(|value| !value.is_finite());
    refuse_not_finite(name, &file, &entry, not_finite)?;
    Ok(values)
}

fn same_bytes(a: &[bf16], b: &[bf16]) -> bool {
    bytemuck::cast_slice::<_, u8>(a) == bytemuck::cast_slice::<_, u8>(b)
}
