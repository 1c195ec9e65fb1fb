use std::path::Path;

use serde_json::Value;

use crate::json::{Fields, kind, parse_object, read_object};
use crate::rope::{RopeConfig, RopeScaling};
use crate::{Error, Projection, Result};

/// The shape of a Qwen3 model, from `config.json`.
///
/// Both the form that transformers 4 writes (`rope_theta`, `rope_scaling`, `torch_dtype`) and that
/// of transformers 5 (`rope_parameters`, `dtype`) are read. What Qwen3 models could ask for and
/// this crate does not compute is refused by name: attention biases, sliding windows in use,
/// quantised weights other than bitsandbytes' in 4 bits, activations other than SiLU, RoPE types
/// other than `default` and `yarn`.
///
/// ```
/// use qwen3_model::Qwen3Config;
///
/// let config = Qwen3Config::qwen3_4b();
/// assert_eq!(config.n_parameters(), 4_022_468_096);
/// assert_eq!((config.n_heads, config.n_kv_heads, config.head_dim), (32, 8, 128));
/// let error = Qwen3Config::from_json(br#"{"model_type": "llama"}"#).unwrap_err();
/// assert!(error.to_string().contains("llama"), "{error}");
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Qwen3Config {
    /// Rows of the embedding; may exceed the tokenizer's vocabulary.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the gated MLP.
    pub intermediate_size: usize,
    /// Number of layers.
    pub n_layers: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads; divides `n_heads`.
    pub n_kv_heads: usize,
    /// Dimensions of a head; even, and independent of `hidden_size / n_heads`.
    pub head_dim: usize,
    /// Added to the mean square in every RMS norm.
    pub rms_norm_eps: f64,
    /// Rotary embedding.
    pub rope: RopeConfig,
    /// Positions the configuration promises.
    pub max_position_embeddings: usize,
    /// Whether the output head is the embedding.
    pub tie_word_embeddings: bool,
    /// Ids that end a completion according to `config.json`; `generation_config.json` comes first.
    pub eos_token_ids: Vec<u32>,
}

/// A size of the model, and what it can be.
#[derive(Clone, Copy)]
struct Size {
    /// Its name in [`Qwen3Config`].
    field: &'static str,
    /// Its name in `config.json`.
    key: &'static str,
    value: fn(&Qwen3Config) -> usize,
    max: usize,
    even: bool,
}

impl Size {
    /// The value in a file, of any size; `None` where it is absent.
    fn read(self, fields: &Fields<'_>) -> Result<Option<usize>> {
        fields.count(self.key)
    }

    fn required(self, fields: &Fields<'_>) -> Result<usize> {
        self.read(fields)?
            .ok_or_else(|| fields.error(self.key, "is missing"))
    }
}

/// Larger dimensions than this are a broken file, not a model.
const MAX_DIM: usize = 1 << 24;
const MAX_POSITIONS: usize = 1 << 30;

/// `even` is for what rotary embedding and kernels take in pairs.
const fn size(
    field: &'static str,
    key: &'static str,
    value: fn(&Qwen3Config) -> usize,
    max: usize,
    even: bool,
) -> Size {
    Size {
        field,
        key,
        value,
        max,
        even,
    }
}

const N_LAYERS: Size = size("n_layers", "num_hidden_layers", |c| c.n_layers, 4096, false);
const N_HEADS: Size = size("n_heads", "num_attention_heads", |c| c.n_heads, 4096, false);
const N_KV_HEADS: Size = size("n_kv_heads", "num_key_value_heads", |c| c.n_kv_heads, 4096, false);
const HEAD_DIM: Size = size("head_dim", "head_dim", |c| c.head_dim, 1024, true);
const HIDDEN: Size = size("hidden_size", "hidden_size", |c| c.hidden_size, MAX_DIM, true);
const INTERMEDIATE: Size = size(
    "intermediate_size",
    "intermediate_size",
    |c| c.intermediate_size,
    MAX_DIM,
    true,
);
/// A whole vocabulary's weights must fit the sampler's 64 bits.
const VOCAB: Size = size(
    "vocab_size",
    "vocab_size",
    |c| c.vocab_size,
    crate::sampling::MAX_VOCAB,
    false,
);
const POSITIONS: Size = size(
    "max_position_embeddings",
    "max_position_embeddings",
    |c| c.max_position_embeddings,
    MAX_POSITIONS,
    false,
);
const SIZES: [Size; 8] = [
    N_LAYERS,
    N_HEADS,
    N_KV_HEADS,
    HEAD_DIM,
    HIDDEN,
    INTERMEDIATE,
    VOCAB,
    POSITIONS,
];

impl Qwen3Config {
    /// Reads `dir/config.json`.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io), [`Error::Json`](crate::Error::Json), and
    /// [`Error::Field`](crate::Error::Field) naming what is missing, out of range or not supported.
    pub fn from_dir(dir: &Path) -> Result<Self> {
        let path = dir.join("config.json");
        Self::from_fields(&Fields::new(&path, &read_object(&path)?))
    }

    /// Reads the text of a `config.json`.
    ///
    /// # Errors
    /// As [`Qwen3Config::from_dir`].
    pub fn from_json(json: &[u8]) -> Result<Self> {
        let path = Path::new("config.json");
        Self::from_fields(&Fields::new(path, &parse_object(path, json)?))
    }

    fn from_fields(fields: &Fields<'_>) -> Result<Self> {
        refuse_other_architectures(fields)?;
        let mut config = Self {
            vocab_size: VOCAB.required(fields)?,
            hidden_size: HIDDEN.required(fields)?,
            intermediate_size: INTERMEDIATE.required(fields)?,
            n_layers: N_LAYERS.required(fields)?,
            n_heads: N_HEADS.required(fields)?,
            n_kv_heads: N_KV_HEADS.required(fields)?,
            // Not hidden_size / heads: transformers' Qwen3 has its own default.
            head_dim: HEAD_DIM.read(fields)?.unwrap_or(128),
            rms_norm_eps: fields.positive("rms_norm_eps")?.unwrap_or(1e-6),
            // Read below: what it says depends on a size.
            rope: RopeConfig {
                theta: 1.0,
                scaling: RopeScaling::Default,
            },
            max_position_embeddings: POSITIONS.read(fields)?.unwrap_or(32_768),
            tie_word_embeddings: fields.boolean("tie_word_embeddings")?.unwrap_or(false),
            eos_token_ids: fields.token_ids("eos_token_id")?,
        };
        config
            .check_sizes(|size| size.key)
            .map_err(|(key, problem)| fields.error(key, problem))?;
        refuse_unsupported(fields, config.n_layers)?;
        config.rope = RopeConfig::from_fields(fields, config.max_position_embeddings)?;
        config.check_rope().map_err(|problem| {
            let field = ["rope_scaling", "rope_parameters"]
                .into_iter()
                .find(|field| fields.value(field).is_some())
                .unwrap_or("rope_theta");
            fields.error(field, problem)
        })?;
        Ok(config)
    }

    /// Whether the shape is one that [`from_dir`](Self::from_dir) could have read: fields may have been set since.
    ///
    /// # Errors
    /// [`Error::Field`], with the field's name in this struct.
    pub(crate) fn check(&self) -> Result<()> {
        let wrong = |(field, problem): (&str, String)| Error::Field {
            path: "Qwen3Config".into(),
            field: field.into(),
            problem,
        };
        self.check_sizes(|size| size.field).map_err(wrong)?;
        self.check_rope()
            .map_err(|problem| wrong(("rope", problem.into())))
    }

    /// The first size that no model has, as `name` calls it, and what is wrong with it.
    fn check_sizes(&self, name: fn(&Size) -> &'static str) -> Result<(), (&'static str, String)> {
        for size in &SIZES {
            let value = (size.value)(self);
            if value == 0 || value > size.max {
                let problem = format!("is {value}, expected a whole number from 1 to {}", size.max);
                return Err((name(size), problem));
            }
            if size.even && value % 2 != 0 {
                return Err((name(size), format!("is {value}, expected an even number")));
            }
        }
        if !self.n_heads.is_multiple_of(self.n_kv_heads) {
            let heads = name(&N_HEADS);
            let problem = format!(
                "is {}, which does not divide `{heads}` = {}",
                self.n_kv_heads, self.n_heads
            );
            return Err((name(&N_KV_HEADS), problem));
        }
        Ok(())
    }

    /// Whether the rotary embedding can be computed; the sizes are known to be possible.
    fn check_rope(&self) -> Result<(), &'static str> {
        let frequencies = self.rope.frequencies(self.head_dim);
        let mut values = frequencies.inv_freq.iter().chain([&frequencies.attention_factor]);
        match values.all(|x| x.is_finite()) {
            true => Ok(()),
            false => Err("gives frequencies that are not finite"),
        }
    }

    /// Number of positions that the model can encode: `max_position_embeddings`, or what yarn
    /// extends the trained context to if that is more.
    pub fn max_positions(&self) -> usize {
        match self.rope.scaling {
            RopeScaling::Default => self.max_position_embeddings,
            RopeScaling::Yarn {
                factor,
                original_max_position_embeddings,
                ..
            } => {
                let extended = (factor * original_max_position_embeddings as f64) as usize;
                self.max_position_embeddings.max(extended.min(MAX_POSITIONS))
            }
        }
    }

    /// Columns of a fused query, key and value product: `(n_heads + 2 * n_kv_heads) * head_dim`.
    pub fn qkv_size(&self) -> usize {
        (self.n_heads + 2 * self.n_kv_heads) * self.head_dim
    }

    /// Width of the queries and of the attention output: `n_heads * head_dim`.
    pub fn q_size(&self) -> usize {
        self.n_heads * self.head_dim
    }

    /// Width of the keys, and of the values: `n_kv_heads * head_dim`.
    pub fn kv_size(&self) -> usize {
        self.n_kv_heads * self.head_dim
    }

    /// Shape `[out_features, in_features]` of a projection.
    pub fn projection_shape(&self, projection: Projection) -> [usize; 2] {
        match projection {
            Projection::Q => [self.q_size(), self.hidden_size],
            Projection::K | Projection::V => [self.kv_size(), self.hidden_size],
            Projection::O => [self.hidden_size, self.q_size()],
            Projection::Gate | Projection::Up => [self.intermediate_size, self.hidden_size],
            Projection::Down => [self.hidden_size, self.intermediate_size],
        }
    }

    /// Number of parameters, a tied head counted once.
    pub fn n_parameters(&self) -> u64 {
        let matrices: u64 = Projection::ALL
            .iter()
            .map(|&projection| {
                let [rows, cols] = self.projection_shape(projection);
                rows as u64 * cols as u64
            })
            .sum();
        let norms = 2 * self.hidden_size as u64 + 2 * self.head_dim as u64;
        let embedding = self.vocab_size as u64 * self.hidden_size as u64;
        let heads = if self.tie_word_embeddings { 1 } else { 2 };
        self.n_layers as u64 * (matrices + norms) + heads * embedding + self.hidden_size as u64
    }

    /// Published shape of Qwen3-0.6B, for benchmarks with random weights.
    pub fn qwen3_0_6b() -> Self {
        Self::published(1024, 3072, 28, 16)
    }

    /// Published shape of Qwen3-4B, for benchmarks with random weights.
    pub fn qwen3_4b() -> Self {
        Self::published(2560, 9728, 36, 32)
    }

    /// Names that [`published_shape`](Self::published_shape) knows.
    pub const PUBLISHED: [&str; 4] = ["qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b"];

    /// A published shape by its name, such as `qwen3-4b`; case does not matter.
    pub fn published_shape(name: &str) -> Option<Self> {
        match name.to_ascii_lowercase().as_str() {
            "qwen3-0.6b" => Some(Self::qwen3_0_6b()),
            "qwen3-1.7b" => Some(Self::published(2048, 6144, 28, 16)),
            "qwen3-4b" => Some(Self::qwen3_4b()),
            "qwen3-8b" => Some(Self {
                tie_word_embeddings: false,
                ..Self::published(4096, 12_288, 36, 32)
            }),
            _ => None,
        }
    }

    fn published(hidden_size: usize, intermediate_size: usize, n_layers: usize, n_heads: usize) -> Self {
        Self {
            vocab_size: 151_936,
            hidden_size,
            intermediate_size,
            n_layers,
            n_heads,
            n_kv_heads: 8,
            head_dim: 128,
            rms_norm_eps: 1e-6,
            rope: RopeConfig {
                theta: 1e6,
                scaling: RopeScaling::Default,
            },
            max_position_embeddings: 40_960,
            tie_word_embeddings: true,
            eos_token_ids: vec![151_645],
        }
    }
}

fn refuse_other_architectures(fields: &Fields<'_>) -> Result<()> {
    match fields.string("model_type")? {
        Some("qwen3") => {}
        Some(other) => return Err(fields.error("model_type", format!("is {other:?}, expected \"qwen3\""))),
        None => return Err(fields.error("model_type", "is missing, expected \"qwen3\"")),
    }
    let architectures = fields
        .array("architectures")?
        .map(Vec::as_slice)
        .unwrap_or_default();
    match architectures
        .iter()
        .find(|name| name.as_str() != Some("Qwen3ForCausalLM"))
    {
        Some(other) => {
            let problem = format!("holds {}, expected \"Qwen3ForCausalLM\"", kind(other));
            Err(fields.error("architectures", problem))
        }
        None => Ok(()),
    }
}

fn refuse_unsupported(fields: &Fields<'_>, n_layers: usize) -> Result<()> {
    if fields.boolean("attention_bias")? == Some(true) {
        return Err(fields.error(
            "attention_bias",
            "is true; projections with a bias are not supported",
        ));
    }
    if let Some(activation) = fields.string("hidden_act")?
        && activation != "silu"
    {
        return Err(fields.error("hidden_act", format!("is {activation:?}, expected \"silu\"")));
    }
    refuse_other_quantization(fields)?;
    for field in ["dtype", "torch_dtype"] {
        match fields.string(field)? {
            None | Some("bfloat16" | "float16" | "float32" | "auto") => {}
            Some(other) => {
                let problem = format!("is {other:?}; bfloat16, float16 and float32 can be read");
                return Err(fields.error(field, problem));
            }
        }
    }
    refuse_sliding_window(fields, n_layers)
}

/// Which modules are quantised, and how, the weight files tell.
fn refuse_other_quantization(fields: &Fields<'_>) -> Result<()> {
    let Some(quantization) = fields.object("quantization_config")? else {
        return Ok(());
    };
    match quantization.string("quant_method")? {
        Some("bitsandbytes") => {}
        Some(other) => {
            let problem =
                format!("is {other:?}; of quantised weights, those of bitsandbytes in 4 bits can be read");
            return Err(quantization.error("quant_method", problem));
        }
        None => return Err(quantization.error("quant_method", "is missing, expected \"bitsandbytes\"")),
    }
    if quantization.boolean("load_in_8bit")? == Some(true) {
        let problem = "is true; of bitsandbytes' formats those in 4 bits can be read";
        return Err(quantization.error("load_in_8bit", problem));
    }
    Ok(())
}

/// A window counts only where a layer uses it, as in transformers: files of full-attention models
/// often carry a size that `use_sliding_window: false` switches off.
fn refuse_sliding_window(fields: &Fields<'_>, n_layers: usize) -> Result<()> {
    let layer_types = fields.array("layer_types")?;
    if let Some(types) = layer_types {
        if types.len() != n_layers {
            let problem = format!("has {} entries for {n_layers} layers", types.len());
            return Err(fields.error("layer_types", problem));
        }
        if let Some((layer, other)) = types
            .iter()
            .enumerate()
            .find(|(_, t)| t.as_str() != Some("full_attention"))
        {
            let problem = format!(
                "is {} for layer {layer}; only \"full_attention\" is supported",
                kind(other)
            );
            return Err(fields.error("layer_types", problem));
        }
        return Ok(());
    }
    let used = fields.boolean("use_sliding_window")?.unwrap_or(false);
    // transformers' defaults where the fields are absent; an explicit null is no window.
    let window = match fields.raw("sliding_window") {
        Some(Value::Null) => None,
        Some(_) => fields.size("sliding_window", MAX_POSITIONS)?,
        None => Some(4096),
    };
    let first_windowed = fields.count("max_window_layers")?.unwrap_or(28);
    if used && window.is_some() && first_windowed < n_layers {
        let problem = format!(
            "is true for layers {first_windowed} to {}; sliding windows are not supported",
            n_layers - 1
        );
        return Err(fields.error("use_sliding_window", problem));
    }
    Ok(())
}
