//! A model's weights as every backend receives them.

use std::borrow::Cow;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use half::{bf16, f16};
use rayon::prelude::*;
use safetensors::tensor::Dtype;

use crate::checkpoint::Checkpoint;
use crate::four_bit::{Place, is_quantized};
use crate::mapped_file::MappedFile;
use crate::random;
use crate::safetensors_file::TensorEntry;
use crate::{Error, Projection, QuantType, QuantizedMatrix, Qwen3Config, Result};

/// A matrix `[rows, cols]`, row-major: bf16, either in a mapped file or in memory, or in 4 bits.
///
/// Cloning is cheap: the bytes are shared.
///
/// ```
/// use half::bf16;
/// use qwen3_model::WeightMatrix;
///
/// let matrix = WeightMatrix::from_vec("w", 2, 3, (0..6).map(|i| bf16::from_f32(i as f32)).collect())?;
/// assert_eq!(matrix.row(1)[0].to_f32(), 3.0);
/// assert!(WeightMatrix::from_vec("w", 2, 3, vec![]).is_err());
/// # Ok::<(), qwen3_model::Error>(())
/// ```
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
    FourBit(Arc<QuantizedMatrix>),
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

    fn from_file(
        name: String,
        file: Arc<MappedFile>,
        entry: TensorEntry,
        [rows, cols]: [usize; 2],
    ) -> Result<Self> {
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
            let values = convert(bytes, entry.dtype, bf16::from_f32);
            let not_finite = values.par_iter().position_first(|value| !value.is_finite());
            refuse_not_finite(&name, &file, &entry, not_finite)?;
            Storage::Owned(Arc::new(values))
        };
        Ok(Self {
            name,
            rows,
            cols,
            storage,
        })
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

    /// The elements, row-major, `rows * cols`. A matrix in 4 bits has none that lie in memory:
    /// the slice is empty, see [`quantized`](Self::quantized) and [`to_bf16`](Self::to_bf16).
    pub fn data(&self) -> &[bf16] {
        match &self.storage {
            Storage::Mapped { file, bytes } => bytemuck::cast_slice(&file.bytes()[bytes.clone()]),
            Storage::Owned(data) => data,
            Storage::FourBit(_) => &[],
        }
    }

    /// The matrix in 4 bits, if it is in 4 bits.
    pub fn quantized(&self) -> Option<&QuantizedMatrix> {
        match &self.storage {
            Storage::FourBit(matrix) => Some(matrix),
            _ => None,
        }
    }

    /// The elements, row-major, `rows * cols`: as they lie, or dequantised.
    pub fn to_bf16(&self) -> Cow<'_, [bf16]> {
        match &self.storage {
            Storage::FourBit(matrix) => Cow::Owned(matrix.dequantize()),
            _ => Cow::Borrowed(self.data()),
        }
    }

    /// The same matrix in bf16.
    #[must_use]
    pub fn dequantized(&self) -> Self {
        match &self.storage {
            Storage::FourBit(matrix) => Self {
                storage: Storage::Owned(Arc::new(matrix.dequantize())),
                ..self.clone()
            },
            _ => self.clone(),
        }
    }

    /// The same matrix in 4 bits, see [`QuantizedMatrix::quantize`]; as it is if it is in 4 bits already.
    ///
    /// # Errors
    /// [`Error::Option`] for an element that is not finite.
    pub fn quantize(&self, quant_type: QuantType, double: bool) -> Result<Self> {
        if self.quantized().is_some() {
            return Ok(self.clone());
        }
        let matrix = QuantizedMatrix::quantize(self.rows, self.cols, self.data(), quant_type, double)?;
        Ok(Self {
            storage: Storage::FourBit(Arc::new(matrix)),
            ..self.clone()
        })
    }

    /// Bytes of the elements.
    pub fn bytes(&self) -> usize {
        match &self.storage {
            Storage::FourBit(matrix) => matrix.bytes(),
            _ => 2 * self.rows * self.cols,
        }
    }

    /// One row.
    ///
    /// Panics if `row` is not below [`rows`](Self::rows), as indexing does, or the matrix is in 4 bits.
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

    /// Whether the weights are those of a model of this shape.
    pub(crate) fn check(&self, config: &Qwen3Config) -> Result<()> {
        let wrong = |what: &str, found: String, expected: String| {
            Err(Error::Option {
                option: "weights",
                problem: format!("{what} has {found}, the configuration asks for {expected}"),
            })
        };
        let matrix = |matrix: &WeightMatrix, expected: [usize; 2]| match [matrix.rows, matrix.cols] {
            found if found == expected => Ok(()),
            found => wrong(
                &format!("`{}`", matrix.name),
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

/// Where everything is, all checked and nothing read.
struct Layout {
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

    fn read(self, name: String, [rows, cols]: [usize; 2]) -> Result<WeightMatrix> {
        match self {
            Self::Dense(file, entry) => WeightMatrix::from_file(name, file, entry, [rows, cols]),
            Self::FourBit(place) => Ok(WeightMatrix {
                name,
                rows,
                cols,
                storage: Storage::FourBit(Arc::new(place.read()?)),
            }),
        }
    }
}

impl Layout {
    fn take(checkpoint: &mut Checkpoint, config: &Qwen3Config) -> Result<Self> {
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

    fn read(self, config: &Qwen3Config) -> Result<Weights> {
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

/// An error for an element that is not finite, or that no bf16 can hold.
fn refuse_not_finite(
    name: &str,
    file: &MappedFile,
    entry: &TensorEntry,
    element: Option<usize>,
) -> Result<()> {
    let Some(element) = element else {
        return Ok(());
    };
    let width = entry.dtype.bitsize() / 8;
    let bytes = &file.bytes()[entry.bytes.clone()][element * width..][..width];
    let value = convert(bytes, entry.dtype, |x| x)[0];
    Err(Error::Tensor {
        path: file.path().to_owned(),
        tensor: name.to_owned(),
        problem: format!("element {element} is {value}, which is no weight in bf16"),
    })
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
