//! Small model folders, made as Hugging Face writes them, to be damaged by tests.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use qwen3_model::{Projection, Qwen3Config};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

/// A tensor as it will stand in a file.
#[derive(Clone)]
pub struct RawTensor {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

impl RawTensor {
    /// Small reproducible values, exact in bf16 and f16.
    pub fn new(dtype: Dtype, shape: &[usize], seed: usize) -> Self {
        let values =
            (0..shape.iter().product()).map(|i: usize| ((i * 7 + seed * 13) % 31) as f32 / 64.0 - 0.25);
        let bytes = match dtype {
            Dtype::BF16 => values.flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect(),
            Dtype::F16 => values.flat_map(|x| f16::from_f32(x).to_le_bytes()).collect(),
            Dtype::F32 => values.flat_map(f32::to_le_bytes).collect(),
            _ => values.flat_map(|x| [(x * 64.0) as i8 as u8]).collect(),
        };
        Self {
            dtype,
            shape: shape.to_vec(),
            bytes,
        }
    }
}

/// A model of 2 layers that is a few kilobytes large.
#[derive(Clone)]
pub struct Folder {
    pub config: Value,
    pub tensors: BTreeMap<String, RawTensor>,
}

impl Folder {
    /// transformers 5 form, bf16, tied head.
    pub fn new() -> Self {
        let config = json!({
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": false,
            "dtype": "bfloat16",
            "eos_token_id": 3,
            "head_dim": 8,
            "hidden_act": "silu",
            "hidden_size": 16,
            "intermediate_size": 32,
            "layer_types": ["full_attention", "full_attention"],
            "max_position_embeddings": 64,
            "model_type": "qwen3",
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "sliding_window": null,
            "tie_word_embeddings": true,
            "use_sliding_window": false,
            "vocab_size": 24
        });
        let mut folder = Self {
            config,
            tensors: BTreeMap::new(),
        };
        folder.fill(Dtype::BF16);
        folder
    }

    /// Replaces all tensors by what the configuration asks for.
    pub fn fill(&mut self, dtype: Dtype) {
        let config = Qwen3Config::from_json(self.config.to_string().as_bytes()).unwrap();
        let hidden = config.hidden_size;
        self.tensors.clear();
        let mut add = |name: String, shape: &[usize]| {
            let tensor = RawTensor::new(dtype, shape, self.tensors.len());
            self.tensors.insert(name, tensor);
        };
        add("model.embed_tokens.weight".into(), &[config.vocab_size, hidden]);
        if !config.tie_word_embeddings {
            add("lm_head.weight".into(), &[config.vocab_size, hidden]);
        }
        add("model.norm.weight".into(), &[hidden]);
        for layer in 0..config.n_layers {
            let name = |module: &str| format!("model.layers.{layer}.{module}.weight");
            add(name("input_layernorm"), &[hidden]);
            add(name("post_attention_layernorm"), &[hidden]);
            add(name("self_attn.q_norm"), &[config.head_dim]);
            add(name("self_attn.k_norm"), &[config.head_dim]);
            for projection in Projection::ALL {
                add(name(projection.name()), &config.projection_shape(projection));
            }
        }
    }

    /// Writes `config.json` and one `model.safetensors`.
    pub fn write(&self, dir: &Path) {
        self.write_config(dir);
        write_tensors(&dir.join("model.safetensors"), self.tensors.iter());
    }

    pub fn write_config(&self, dir: &Path) {
        std::fs::write(dir.join("config.json"), self.config.to_string()).unwrap();
    }

    /// Writes `config.json`, an index and `n` shards.
    pub fn write_sharded(&self, dir: &Path, n: usize) {
        self.write_config(dir);
        let mut weight_map = serde_json::Map::new();
        for shard in 0..n {
            let name = format!("model-{:05}-of-{n:05}.safetensors", shard + 1);
            let mine = || {
                self.tensors
                    .iter()
                    .enumerate()
                    .filter(|(i, _)| i % n == shard)
                    .map(|(_, t)| t)
            };
            write_tensors(&dir.join(&name), mine());
            weight_map.extend(mine().map(|(tensor, _)| (tensor.clone(), json!(name))));
        }
        let index = json!({"metadata": {"total_size": 1}, "weight_map": weight_map});
        std::fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
    }
}

pub fn write_tensors<'a>(path: &Path, tensors: impl Iterator<Item = (&'a String, &'a RawTensor)>) {
    let views = tensors.map(|(name, t)| (name, TensorView::new(t.dtype, t.shape.clone(), &t.bytes).unwrap()));
    std::fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// A safetensors file with any header.
pub fn write_raw(path: PathBuf, header: &str, data: &[u8]) {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(data);
    std::fs::write(path, bytes).unwrap();
}
