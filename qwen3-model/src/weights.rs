//! A model's weights as every backend receives them.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use half::{bf16, f16};
use rayon::prelude::*;
use safetensors::tensor::Dtype;

use crate::checkpoint::Checkpoint;
use crate::mapped_file::MappedFile;
use crate::random;
use crate::safetensors_file::TensorEntry;
use crate::{Error, Projection, Qwen3Config, Result};

/// A bf16 matrix `[rows, cols]`, row-major, either in a mapped file or in memory.
///
/// Cloning is cheap: the bytes are shared.
#[derive(Debug, Clone)]
pub struct WeightMatrix {
    name: String,
    rows: usize,
    cols: usize,
    storage: Storage,
}

#[derive(Debug, Clone)]
enum Storage {
    Mapped {
        file: Arc<MappedFile>,
        bytes: Range<usize>,
    },
    Owned(Arc<Vec<bf16>>),
}

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
/// f32 ones are rounded once into memory. Norms are f32.
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

impl WeightMatrix {
    /// A matrix in memory.
    ///
    /// # Errors
    /// [`Error::Option`] if `data` does not hold `rows * cols` elements.
    pub fn from_vec(name: impl Into<String>, rows: usize, cols: usize, data: Vec<bf16>) -> Result<Self> {
        if rows.checked_mul(cols) != Some(data.len()) {
            let problem = format!("{} elements cannot be a matrix of {rows} x {cols}", data.len());
            return Err(Error::Option {
                option: "data",
                problem,
            });
        }
        Ok(Self {
            name: name.into(),
            rows,
            cols,
            storage: Storage::Owned(Arc::new(data)),
        })
    }

    fn from_file(name: &str, file: Arc<MappedFile>, entry: TensorEntry, rows: usize, cols: usize) -> Self {
        let name = name.to_owned();
        let bytes = &file.bytes()[entry.bytes.clone()];
        let zero_copy = entry.dtype == Dtype::BF16
            && cfg!(target_endian = "little")
            && bytemuck::try_cast_slice::<u8, bf16>(bytes).is_ok();
        let storage = if zero_copy {
            Storage::Mapped {
                file,
                bytes: entry.bytes,
            }
        } else {
            Storage::Owned(Arc::new(convert(bytes, entry.dtype, bf16::from_f32)))
        };
        Self {
            name,
            rows,
            cols,
            storage,
        }
    }

    /// Name in the file, for instance `model.layers.0.mlp.up_proj.weight`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Output features.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The elements, row-major, `rows * cols`.
    pub fn data(&self) -> &[bf16] {
        match &self.storage {
            Storage::Mapped { file, bytes } => bytemuck::cast_slice(&file.bytes()[bytes.clone()]),
            Storage::Owned(data) => data,
        }
    }

    /// One row.
    ///
    /// Panics if `row` is not below [`rows`](Self::rows), as indexing does.
    pub fn row(&self, row: usize) -> &[bf16] {
        &self.data()[row * self.cols..][..self.cols]
    }

    /// Whether the elements lie in a mapped file rather than in memory of their own.
    pub fn is_mapped(&self) -> bool {
        matches!(self.storage, Storage::Mapped { .. })
    }
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

    /// Random weights for measurements: matrices from N(0, 0.02), norms from N(1, 0.1). The same
    /// seed gives the same weights on every machine. Needs no more memory than the weights.
    pub fn random(config: &Qwen3Config, seed: u64) -> Self {
        let matrix = |name: String, [rows, cols]: [usize; 2]| {
            let data = random::matrix(seed, &name, rows * cols);
            WeightMatrix {
                name,
                rows,
                cols,
                storage: Storage::Owned(Arc::new(data)),
            }
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
        let matrix = |m: &WeightMatrix| 2 * m.rows as u64 * m.cols as u64;
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
        std::ptr::eq(self.embed_tokens.data(), self.lm_head.data())
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

/// Where everything is, all checked and nothing read.
struct Layout {
    embed: (Arc<MappedFile>, TensorEntry),
    head: Option<(Arc<MappedFile>, TensorEntry)>,
    norm: (Arc<MappedFile>, TensorEntry),
    layers: Vec<LayerLayout>,
}

struct LayerLayout {
    /// Input, post-attention, q and k.
    norms: [(Arc<MappedFile>, TensorEntry); 4],
    /// In the order of [`Projection::ALL`].
    projections: Vec<(Arc<MappedFile>, TensorEntry)>,
}

impl Layout {
    fn take(checkpoint: &mut Checkpoint, config: &Qwen3Config) -> Result<Self> {
        let (hidden, head_dim) = (config.hidden_size, config.head_dim);
        let vocab = [config.vocab_size, hidden];
        let embed = checkpoint.take(EMBED, &vocab)?;
        let head = match config.tie_word_embeddings && !checkpoint.contains(HEAD) {
            true => None,
            false => Some(checkpoint.take(HEAD, &vocab)?),
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
            let projections = Projection::ALL
                .iter()
                .map(|&p| take(p.name(), &config.projection_shape(p)))
                .collect::<Result<_>>()?;
            layers.push(LayerLayout { norms, projections });
        }
        Ok(Self {
            embed,
            head,
            norm,
            layers,
        })
    }

    fn read(self, config: &Qwen3Config) -> Result<Weights> {
        let matrix = |name: &str, (file, entry): (Arc<MappedFile>, TensorEntry)| {
            let (rows, cols) = (entry.shape[0], entry.shape[1]);
            WeightMatrix::from_file(name, file, entry, rows, cols)
        };
        let embed_tokens = matrix(EMBED, self.embed);
        let lm_head = match self.head {
            None => embed_tokens.clone(),
            Some(place) => {
                let path = place.0.path().to_owned();
                let head = matrix(HEAD, place);
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
            let [input_norm, post_attention_norm, q_norm, k_norm] = places.norms.map(read_norm);
            let mut places = places.projections.into_iter();
            let mut next = |p: Projection| {
                places
                    .next()
                    .map(|place| matrix(&tensor_name(layer, p.name()), place))
            };
            Some(LayerWeights {
                input_norm,
                post_attention_norm,
                q_norm,
                k_norm,
                projections: [
                    next(Projection::Q)?,
                    next(Projection::K)?,
                    next(Projection::V)?,
                    next(Projection::O)?,
                    next(Projection::Gate)?,
                    next(Projection::Up)?,
                    next(Projection::Down)?,
                ],
            })
        });
        let layers = layers.flatten().collect();
        Ok(Weights {
            embed_tokens,
            lm_head,
            norm: read_norm(self.norm),
            layers,
        })
    }
}

fn read_norm((file, entry): (Arc<MappedFile>, TensorEntry)) -> Vec<f32> {
    convert(&file.bytes()[entry.bytes], entry.dtype, |x| x)
}

/// Every element through f32. `dtype` is one of the three that [`Checkpoint::take`] lets pass.
fn convert<T: Send>(bytes: &[u8], dtype: Dtype, f: impl Fn(f32) -> T + Sync) -> Vec<T> {
    let pair = |b: &[u8]| u16::from_le_bytes([b[0], b[1]]);
    match dtype {
        Dtype::BF16 => bytes
            .par_chunks_exact(2)
            .map(|b| f(bf16::from_bits(pair(b)).to_f32()))
            .collect(),
        Dtype::F16 => bytes
            .par_chunks_exact(2)
            .map(|b| f(f16::from_bits(pair(b)).to_f32()))
            .collect(),
        _ => bytes
            .par_chunks_exact(4)
            .map(|b| f(f32::from_le_bytes([b[0], b[1], b[2], b[3]])))
            .collect(),
    }
}

fn same_bytes(a: &[bf16], b: &[bf16]) -> bool {
    bytemuck::cast_slice::<_, u8>(a) == bytemuck::cast_slice::<_, u8>(b)
}
