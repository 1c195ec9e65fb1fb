//! A model's weights as every backend receives them.

mod layout;
mod matrix;

use std::path::Path;

use crate::checkpoint::Checkpoint;
use crate::random;
use crate::{Error, Projection, QuantType, Qwen3Config, Result};
use layout::Layout;

pub use matrix::WeightMatrix;

/// Weights of one layer.
#[derive(Debug, Clone)]
pub struct LayerWeights {
    /// `[hidden]`, norm before attention.
    pub input_norm: Vec<f32>,
    /// `[hidden]`, norm before the MLP.
    pub post_attention_norm: Vec<f32>,
    /// `[head_dim]`, norm of every query head.
    pub q_norm: Vec<f32>,
    /// `[head_dim]`, norm of every key head.
    pub k_norm: Vec<f32>,
    projections: [WeightMatrix; 7],
}

/// All weights of a model. Matrices are bf16: those of bf16 files stay in the mapped file, f16 and
/// f32 ones are rounded once into memory. Those that bitsandbytes quantised stay in 4 bits. Norms
/// are f32. What is converted must be finite; matrices that stay in the file are not looked at.
///
/// ```
/// use qwen3_model::{LayerWeights, Projection, Qwen3Config, Weights};
///
/// # let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../rollout-engine/models/tiny-qwen3-math");
/// let config = Qwen3Config::from_dir(dir.as_ref())?;
/// let weights = Weights::open(dir.as_ref(), &config)?;
/// let layer: &LayerWeights = &weights.layers[0];
/// let q = layer.projection(Projection::Q);
/// assert_eq!([q.rows(), q.cols()], config.projection_shape(Projection::Q));
/// assert!(q.is_mapped(), "bf16 stays in the file");
/// # Ok::<(), qwen3_model::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Weights {
    /// `[vocab, hidden]`.
    pub embed_tokens: WeightMatrix,
    /// `[vocab, hidden]`; shares the embedding's bytes when the head is tied.
    pub lm_head: WeightMatrix,
    /// `[hidden]`, norm before the head.
    pub norm: Vec<f32>,
    /// The layers, first to last.
    pub layers: Vec<LayerWeights>,
}

impl LayerWeights {
    /// The matrix of a projection.
    pub fn projection(&self, projection: Projection) -> &WeightMatrix {
        &self.projections[projection as usize]
    }
}

impl Weights {
    /// Reads the weights of a model folder. Names, shapes and types of all tensors are checked
    /// before the first byte of a weight is read.
    ///
    /// A tied model may carry an `lm_head.weight` of its own if it equals the embedding.
    ///
    /// # Errors
    /// Those of [`Error`] that concern files and tensors.
    pub fn open(dir: &Path, config: &Qwen3Config) -> Result<Self> {
        let _span = tracing::info_span!("read", what = "weights").entered();
        let mut checkpoint = Checkpoint::open(dir)?;
        let layout = Layout::take(&mut checkpoint, config)?;
        checkpoint.finish()?;
        layout.read(config)
    }

    /// Whether the weights are those of a model of this shape.
    pub(crate) fn check(&self, config: &Qwen3Config) -> Result<()> {
        let wrong = |what: &str, found: String, expected: String| {
            Err(Error::Option {
                option: "weights",
                problem: format!("{what} has {found}, the configuration asks for {expected}"),
            })
        };
        let matrix = |matrix: &WeightMatrix, expected: [usize; 2]| match [matrix.rows(), matrix.cols()] {
            found if found == expected => Ok(()),
            found => wrong(
                &format!("`{}`", matrix.name()),
                format!("{found:?}"),
                format!("{expected:?}"),
            ),
        };
        let norm = |name: &str, values: &[f32], expected: usize| match values.len() {
            found if found == expected => Ok(()),
            found => wrong(&format!("`{name}`"), found.to_string(), expected.to_string()),
        };
        let vocab = [config.vocab_size, config.hidden_size];
        matrix(&self.embed_tokens, vocab)?;
        matrix(&self.lm_head, vocab)?;
        norm(FINAL_NORM, &self.norm, config.hidden_size)?;
        if self.layers.len() != config.n_layers {
            let layers = |n: usize| format!("{n} layers");
            return wrong("the model", layers(self.layers.len()), layers(config.n_layers));
        }
        for (index, layer) in self.layers.iter().enumerate() {
            for (name, values, expected) in [
                (INPUT_NORM, &layer.input_norm, config.hidden_size),
                (
                    POST_ATTENTION_NORM,
                    &layer.post_attention_norm,
                    config.hidden_size,
                ),
                (Q_NORM, &layer.q_norm, config.head_dim),
                (K_NORM, &layer.k_norm, config.head_dim),
            ] {
                norm(&tensor_name(index, name), values, expected)?;
            }
            for projection in Projection::ALL {
                matrix(layer.projection(projection), config.projection_shape(projection))?;
            }
        }
        Ok(())
    }

    /// Whether any matrix is in 4 bits. Adapters cannot be merged into such a matrix.
    pub fn is_quantized(&self) -> bool {
        let layers = self.layers.iter().flat_map(|layer| &layer.projections);
        layers.chain([&self.lm_head]).any(|m| m.quantized().is_some())
    }

    /// The same weights with every matrix in bf16.
    #[must_use]
    pub fn dequantized(&self) -> Self {
        let mut weights = self.clone();
        weights.lm_head = weights.lm_head.dequantized();
        for matrix in weights.layers.iter_mut().flat_map(|layer| &mut layer.projections) {
            *matrix = matrix.dequantized();
        }
        weights
    }

    /// The same weights with the projections of all layers in 4 bits.
    ///
    /// # Errors
    /// [`Error::Option`] for an element that is not finite.
    pub fn quantized(&self, quant_type: QuantType, double: bool) -> Result<Self> {
        let mut weights = self.clone();
        for matrix in weights.layers.iter_mut().flat_map(|layer| &mut layer.projections) {
            *matrix = matrix.quantize(quant_type, double)?;
        }
        Ok(weights)
    }

    /// Random weights for measurements: matrices from N(0, 0.02), norms from N(1, 0.1). The same
    /// seed gives the same weights on every machine. Needs no more memory than the weights.
    pub fn random(config: &Qwen3Config, seed: u64) -> Self {
        let matrix = |name: String, [rows, cols]: [usize; 2]| {
            let data = random::matrix(seed, &name, rows * cols);
            WeightMatrix::owned(name, [rows, cols], data)
        };
        let vocab = [config.vocab_size, config.hidden_size];
        let embed_tokens = matrix(EMBED.into(), vocab);
        let lm_head = if config.tie_word_embeddings {
            embed_tokens.clone()
        } else {
            matrix(HEAD.into(), vocab)
        };
        let layers = (0..config.n_layers).map(|layer| {
            let norm = |name, size| random::norm(seed, &tensor_name(layer, name), size);
            LayerWeights {
                input_norm: norm(INPUT_NORM, config.hidden_size),
                post_attention_norm: norm(POST_ATTENTION_NORM, config.hidden_size),
                q_norm: norm(Q_NORM, config.head_dim),
                k_norm: norm(K_NORM, config.head_dim),
                projections: Projection::ALL
                    .map(|p| matrix(tensor_name(layer, p.name()), config.projection_shape(p))),
            }
        });
        Self {
            embed_tokens,
            lm_head,
            layers: layers.collect(),
            norm: random::norm(seed, FINAL_NORM, config.hidden_size),
        }
    }

    /// The matrix of a module, counted as in [`modules`](crate::modules).
    pub fn module(&self, module: usize) -> Option<&WeightMatrix> {
        let (layer, projection) = (module / Projection::ALL.len(), module % Projection::ALL.len());
        match self.layers.get(layer) {
            Some(layer) => layer.projections.get(projection),
            None if layer == self.layers.len() && projection == 0 => Some(&self.lm_head),
            None => None,
        }
    }

    /// Bytes of all matrices and norms, a tied head counted once.
    pub fn bytes(&self) -> u64 {
        let matrix = |m: &WeightMatrix| m.bytes() as u64;
        let layer = |l: &LayerWeights| {
            let norms = l.input_norm.len() + l.post_attention_norm.len() + l.q_norm.len() + l.k_norm.len();
            l.projections.iter().map(matrix).sum::<u64>() + 4 * norms as u64
        };
        let head = if self.is_tied() { 0 } else { matrix(&self.lm_head) };
        self.layers.iter().map(layer).sum::<u64>()
            + matrix(&self.embed_tokens)
            + head
            + 4 * self.norm.len() as u64
    }

    /// Whether head and embedding share their bytes.
    pub fn is_tied(&self) -> bool {
        // An empty slice, of a head in 4 bits, is nowhere.
        !self.lm_head.data().is_empty() && std::ptr::eq(self.embed_tokens.data(), self.lm_head.data())
    }
}

const EMBED: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";
const FINAL_NORM: &str = "model.norm.weight";
const INPUT_NORM: &str = "input_layernorm";
const POST_ATTENTION_NORM: &str = "post_attention_layernorm";
const Q_NORM: &str = "self_attn.q_norm";
const K_NORM: &str = "self_attn.k_norm";

fn tensor_name(layer: usize, module: &str) -> String {
    format!("model.layers.{layer}.{module}.weight")
}
