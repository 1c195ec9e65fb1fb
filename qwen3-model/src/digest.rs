//! SHA-256 over a model's parameters, in one form for every backend.
//!
//! Parameters are sorted by name; each contributes its name's bytes and then its raw bytes: matrices as bf16, norms as
//! bf16 where that loses nothing (they came from a bf16 file) and as f32 otherwise, biases as f32, all little-endian.
//! A head that is tied to the embedding and not adapted is the embedding and does not count again.

use std::borrow::Cow;

use half::bf16;
use sha2::{Digest, Sha256};

use crate::{Qwen3Config, Result, modules};

/// A parameter, for the backend to give its values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Parameter {
    Embedding,
    FinalNorm,
    InputNorm(usize),
    PostAttentionNorm(usize),
    QueryNorm(usize),
    KeyNorm(usize),
    /// Weight of a module, by its index among [`modules`].
    Weight(usize),
    /// Bias of a module, by its index.
    Bias(usize),
}

/// Values of a parameter.
pub(crate) enum Values<'a> {
    Matrix(Cow<'a, [bf16]>),
    Norm(Cow<'a, [f32]>),
    Bias(Cow<'a, [f32]>),
    /// The model has no such parameter.
    Absent,
}

/// All parameters that a model can have, by name.
fn parameters(config: &Qwen3Config) -> Vec<(String, Parameter)> {
    let mut all = vec![
        ("model.embed_tokens.weight".into(), Parameter::Embedding),
        ("model.norm.weight".into(), Parameter::FinalNorm),
    ];
    for layer in 0..config.n_layers {
        let name = |name: &str| format!("model.layers.{layer}.{name}.weight");
        all.push((name("input_layernorm"), Parameter::InputNorm(layer)));
        all.push((
            name("post_attention_layernorm"),
            Parameter::PostAttentionNorm(layer),
        ));
        all.push((name("self_attn.q_norm"), Parameter::QueryNorm(layer)));
        all.push((name("self_attn.k_norm"), Parameter::KeyNorm(layer)));
    }
    for (module, spec) in modules(config).into_iter().enumerate() {
        all.push((format!("{}.weight", spec.name), Parameter::Weight(module)));
        all.push((format!("{}.bias", spec.name), Parameter::Bias(module)));
    }
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

/// The digest of the parameters that `read` gives.
pub(crate) fn digest<'a>(
    config: &Qwen3Config,
    mut read: impl FnMut(Parameter) -> Result<Values<'a>>,
) -> Result<[u8; 32]> {
    let mut sha = Sha256::new();
    for (name, parameter) in parameters(config) {
        match read(parameter)? {
            Values::Absent => {}
            Values::Matrix(values) => {
                sha.update(name);
                update_bf16(&mut sha, &values);
            }
            Values::Norm(values) => {
                sha.update(name);
                let narrow: Vec<bf16> = values.iter().copied().map(bf16::from_f32).collect();
                if narrow.iter().zip(&*values).all(|(n, v)| n.to_f32() == *v) {
                    update_bf16(&mut sha, &narrow);
                } else {
                    update_f32(&mut sha, &values);
                }
            }
            Values::Bias(values) => {
                sha.update(name);
                update_f32(&mut sha, &values);
            }
        }
    }
    Ok(sha.finalize().into())
}

fn update_bf16(sha: &mut Sha256, values: &[bf16]) {
    if cfg!(target_endian = "little") {
        sha.update(bytemuck::cast_slice::<bf16, u8>(values));
    } else {
        values.iter().for_each(|value| sha.update(value.to_le_bytes()));
    }
}

fn update_f32(sha: &mut Sha256, values: &[f32]) {
    values.iter().for_each(|value| sha.update(value.to_le_bytes()));
}
