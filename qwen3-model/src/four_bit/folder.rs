//! A model folder in 4 bits from one in bf16, as transformers with bitsandbytes would save it.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

use half::bf16;
use safetensors::tensor::{Dtype, View};
use serde_json::{Map, Value, json};

use super::QuantType;
use super::quantize::{Absmax, BLOCKSIZE, NESTED_BLOCKSIZE, nested_map, quantize};
use crate::json::read_object;
use crate::{Error, Projection, Qwen3Config, Result, WeightMatrix, Weights};

/// How [`quantize_folder`] quantises.
///
/// ```
/// use qwen3_model::{QuantizeOptions, QuantizeReport, quantize_folder};
///
/// # let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../rollout-engine/models/tiny-qwen3-math");
/// let folder = tempfile::tempdir()?;
/// let mut options = QuantizeOptions::default();
/// options.skip_modules = vec!["down_proj".into()];
/// let report: QuantizeReport = quantize_folder(dir.as_ref(), &folder.path().join("nf4"), &options)?;
/// assert!(report.kept_modules > 0 && report.bytes_after < report.bytes_before);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct QuantizeOptions {
    /// The sixteen values. Default: `nf4`.
    pub quant_type: QuantType,
    /// Whether scales are quantised too: 4.13 instead of 4.5 bits per weight. Default: true.
    pub double_quant: bool,
    /// Modules that stay in bf16: each entry is one or more whole parts of a module's dotted name, such as `down_proj`,
    /// `layers.0` or `model.layers.3.mlp`. Default: none. The output head always stays in bf16.
    pub skip_modules: Vec<String>,
}

impl Default for QuantizeOptions {
    fn default() -> Self {
        Self {
            quant_type: QuantType::Nf4,
            double_quant: true,
            skip_modules: Vec::new(),
        }
    }
}

/// What [`quantize_folder`] wrote.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct QuantizeReport {
    /// Matrices in 4 bits.
    pub quantized_modules: usize,
    /// Matrices of layers that stayed in bf16.
    pub kept_modules: usize,
    /// Bytes of the weights before, as this crate holds them.
    pub bytes_before: u64,
    /// Bytes of the tensors written.
    pub bytes_after: u64,
}

/// Quantises the model folder `from` into the new folder `to`, for transformers with bitsandbytes and for this crate:
/// `config.json` with a `quantization_config`, one `model.safetensors`, and copies of the other files (tokenizer, chat
/// template, generation settings). Needs memory for the quantised model.
///
/// # Errors
/// Those of [`Weights::open`]; [`Error::Option`] for a model that is quantised already, an entry of `skip_modules` that
/// fits no module, weights that are not finite, and a `to` that holds files; [`Error::Io`]. Panics: none.
pub fn quantize_folder(from: &Path, to: &Path, options: &QuantizeOptions) -> Result<QuantizeReport> {
    let config = Qwen3Config::from_dir(from)?;
    let skipped = Skipped::new(&config, &options.skip_modules)?;
    refuse_used_folder(to)?;
    let weights = Weights::open(from, &config)?;
    if weights.is_quantized() {
        return refuse("model", format!("{} is quantised already", from.display()));
    }
    let tensors = tensors(&weights, &skipped, options)?;
    let report = QuantizeReport {
        quantized_modules: config.n_layers * Projection::ALL.len() - skipped.0.len(),
        kept_modules: skipped.0.len(),
        bytes_before: weights.bytes(),
        bytes_after: tensors.iter().map(|(_, t)| t.bytes.len() as u64).sum(),
    };
    std::fs::create_dir_all(to).map_err(|source| io(to, source))?;
    copy_other_files(from, to)?;
    let mut object = read_object(&from.join("config.json"))?;
    describe(&mut object, &skipped, options);
    let text = format!("{:#}\n", Value::Object(object));
    let path = to.join("config.json");
    std::fs::write(&path, text).map_err(|source| io(&path, source))?;
    write_tensors(&to.join("model.safetensors"), tensors)?;
    Ok(report)
}

fn refuse<T>(option: &'static str, problem: String) -> Result<T> {
    Err(Error::Option { option, problem })
}

fn io(path: &Path, source: std::io::Error) -> Error {
    let path = path.to_owned();
    Error::Io { path, source }
}

fn refuse_used_folder(to: &Path) -> Result<()> {
    match std::fs::read_dir(to) {
        Ok(mut entries) => match entries.next() {
            Some(_) => refuse("output", format!("{} holds files already", to.display())),
            None => Ok(()),
        },
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(source) => Err(io(to, source)),
    }
}

/// Full names of the modules that stay in bf16.
struct Skipped(Vec<String>);

impl Skipped {
    fn new(config: &Qwen3Config, entries: &[String]) -> Result<Self> {
        let names: Vec<String> = (0..config.n_layers)
            .flat_map(|layer| Projection::ALL.map(|p| p.module(layer)))
            .collect();
        let fits = |name: &str, entry: &str| format!(".{name}.").contains(&format!(".{entry}."));
        for entry in entries {
            // The head is never quantised, so that naming it is no mistake.
            if entry.is_empty() || (entry != "lm_head" && !names.iter().any(|name| fits(name, entry))) {
                return refuse("skip_modules", format!("{entry:?} is part of no module's name"));
            }
        }
        let skipped = names
            .into_iter()
            .filter(|name| entries.iter().any(|entry| fits(name, entry)));
        Ok(Self(skipped.collect()))
    }

    fn contains(&self, module: &str) -> bool {
        self.0.iter().any(|name| name == module)
    }
}

/// A tensor of the new file.
struct Tensor<'a> {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Cow<'a, [u8]>,
}

impl View for Tensor<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

impl<'a> Tensor<'a> {
    fn u8s(shape: &[usize], bytes: Vec<u8>) -> Self {
        Self {
            dtype: Dtype::U8,
            shape: shape.to_vec(),
            bytes: Cow::Owned(bytes),
        }
    }

    fn f32s(values: &[f32]) -> Self {
        Self {
            dtype: Dtype::F32,
            shape: vec![values.len()],
            bytes: Cow::Owned(values.iter().flat_map(|x| x.to_le_bytes()).collect()),
        }
    }

    fn bf16s(shape: &[usize], values: &'a [bf16]) -> Self {
        let bytes = match cfg!(target_endian = "little") {
            true => Cow::Borrowed(bytemuck::cast_slice(values)),
            false => Cow::Owned(values.iter().flat_map(|x| x.to_le_bytes()).collect()),
        };
        Self {
            dtype: Dtype::BF16,
            shape: shape.to_vec(),
            bytes,
        }
    }

    fn norm(values: &[f32]) -> Self {
        let bytes = values
            .iter()
            .flat_map(|x| bf16::from_f32(*x).to_le_bytes())
            .collect();
        Self {
            dtype: Dtype::BF16,
            shape: vec![values.len()],
            bytes: Cow::Owned(bytes),
        }
    }
}

type Tensors<'a> = Vec<(String, Tensor<'a>)>;

fn tensors<'a>(weights: &'a Weights, skipped: &Skipped, options: &QuantizeOptions) -> Result<Tensors<'a>> {
    let mut tensors: Tensors<'a> = Vec::new();
    let dense = |m: &'a WeightMatrix| {
        (
            m.name().to_owned(),
            Tensor::bf16s(&[m.rows(), m.cols()], m.data()),
        )
    };
    tensors.push(dense(&weights.embed_tokens));
    if !weights.is_tied() {
        tensors.push(dense(&weights.lm_head));
    }
    tensors.push(("model.norm.weight".into(), Tensor::norm(&weights.norm)));
    for (layer, of) in weights.layers.iter().enumerate() {
        for (name, values) in [
            ("input_layernorm", &of.input_norm),
            ("post_attention_layernorm", &of.post_attention_norm),
            ("self_attn.q_norm", &of.q_norm),
            ("self_attn.k_norm", &of.k_norm),
        ] {
            let name = format!("model.layers.{layer}.{name}.weight");
            tensors.push((name, Tensor::norm(values)));
        }
        for projection in Projection::ALL {
            let matrix = of.projection(projection);
            match skipped.contains(&projection.module(layer)) {
                true => tensors.push(dense(matrix)),
                false => add_quantized(&mut tensors, matrix, options)?,
            }
        }
    }
    Ok(tensors)
}

fn add_quantized(tensors: &mut Tensors<'_>, matrix: &WeightMatrix, options: &QuantizeOptions) -> Result<()> {
    if let Some(at) = matrix.data().iter().position(|w| !w.is_finite()) {
        let problem = format!("element {at} of `{}` is {}", matrix.name(), matrix.data()[at]);
        return refuse("model", problem);
    }
    let quantized = quantize(matrix.data(), options.quant_type, options.double_quant);
    let name = |suffix: &str| format!("{}{suffix}", matrix.name());
    let mut state = format!(
        r#"{{"quant_type": "{}", "blocksize": {BLOCKSIZE}, "dtype": "bfloat16", "shape": [{}, {}]"#,
        options.quant_type.name(),
        matrix.rows(),
        matrix.cols()
    );
    match quantized.absmax {
        Absmax::Plain(absmax) => tensors.push((name(".absmax"), Tensor::f32s(&absmax))),
        Absmax::Nested {
            quantized,
            absmax,
            offset,
        } => {
            state += &format!(
                r#", "nested_blocksize": {NESTED_BLOCKSIZE}, "nested_dtype": "float32", "nested_offset": {:?}"#,
                f64::from(offset)
            );
            tensors.push((name(".absmax"), Tensor::u8s(&[quantized.len()], quantized)));
            tensors.push((name(".nested_absmax"), Tensor::f32s(&absmax)));
            tensors.push((name(".nested_quant_map"), Tensor::f32s(nested_map())));
        }
    }
    state.push('}');
    let packed = quantized.packed;
    tensors.push((name(".quant_map"), Tensor::f32s(&options.quant_type.map())));
    let suffix = format!(".quant_state.bitsandbytes__{}", options.quant_type.name());
    tensors.push((name(&suffix), Tensor::u8s(&[state.len()], state.into_bytes())));
    tensors.push((name(""), Tensor::u8s(&[packed.len(), 1], packed)));
    Ok(())
}

/// Adds to a `config.json` what transformers needs to know of the weights.
fn describe(config: &mut Map<String, Value>, skipped: &Skipped, options: &QuantizeOptions) {
    let dtype = if config.contains_key("torch_dtype") {
        "torch_dtype"
    } else {
        "dtype"
    };
    config.insert(dtype.into(), json!("bfloat16"));
    // Full names mean the same in every version of transformers. A list replaces its default, the head alone.
    let skip: Option<Vec<&str>> = match skipped.0.is_empty() {
        true => None,
        false => Some(skipped.0.iter().map(String::as_str).chain(["lm_head"]).collect()),
    };
    let quantization = json!({
        "_load_in_4bit": true,
        "_load_in_8bit": false,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": options.quant_type.name(),
        "bnb_4bit_use_double_quant": options.double_quant,
        "llm_int8_enable_fp32_cpu_offload": false,
        "llm_int8_has_fp16_weight": false,
        "llm_int8_skip_modules": skip,
        "llm_int8_threshold": 6.0,
        "load_in_4bit": true,
        "load_in_8bit": false,
        "quant_method": "bitsandbytes"
    });
    config.insert("quantization_config".into(), quantization);
}

/// Tokenizer, templates and settings, by the endings that they have.
fn copy_other_files(from: &Path, to: &Path) -> Result<()> {
    let entries = std::fs::read_dir(from).map_err(|source| io(from, source))?;
    for entry in entries {
        let path = entry.map_err(|source| io(from, source))?.path();
        let name = path
            .file_name()
            .and_then(|name| name.to_str())
            .unwrap_or_default();
        let wanted = [".json", ".jinja", ".txt", ".model"]
            .iter()
            .any(|end| name.ends_with(end));
        if wanted && name != "config.json" && !name.ends_with(".index.json") && path.is_file() {
            std::fs::copy(&path, to.join(name)).map_err(|source| io(&path, source))?;
        }
    }
    Ok(())
}

/// Under another name first, so that a folder never holds half a file.
fn write_tensors(path: &PathBuf, tensors: Tensors<'_>) -> Result<()> {
    let unfinished = path.with_extension("unfinished");
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    safetensors::serialize_to_file(tensors, Some(metadata), &unfinished).map_err(|error| match error {
        safetensors::SafeTensorError::IoError(source) => io(&unfinished, source),
        other => io(&unfinished, std::io::Error::other(other.to_string())),
    })?;
    std::fs::rename(&unfinished, path).map_err(|source| io(path, source))
}
