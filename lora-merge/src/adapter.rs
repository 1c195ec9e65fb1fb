//! One LoRA adapter in memory: its configuration, its tensors by module, its digest.

use crate::config::{MAX_CONFIG_BYTES, Targets};
use crate::tensors::{self, Tensor, TensorSlice};
use crate::{AdapterConfig, Error, Result};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

/// The part of a module that a tensor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Part {
    /// `lora_A.weight` `[r, in]`.
    A,
    /// `lora_B.weight` `[out, r]`.
    B,
    /// `lora_B.bias` `[out]`.
    BBias,
    /// `lora_magnitude_vector` `[out]`.
    Magnitude,
    /// `weight` of a saved module.
    Weight,
    /// `bias` of the base.
    Bias,
}

/// A loaded adapter. Immutable: a trainer's next version is a new `Adapter`.
///
/// All tensors are finite and of a supported type; whether they fit a model is decided by [`crate::resolve`].
///
/// ```
/// use lora_merge::{Adapter, AdapterConfig, TensorSlice, TensorValues};
///
/// let tensor = |name, shape, values| TensorSlice { name, shape, values: TensorValues::F32(values) };
/// let a = tensor("q_proj.lora_A.weight", &[1, 2], &[1.0, 2.0]);
/// let b = tensor("q_proj.lora_B.weight", &[2, 1], &[0.5, 0.25]);
/// Adapter::from_tensors(AdapterConfig::new(1, 1.0, ["q_proj"]), &[a, b])?;
/// let not_finite = tensor("q_proj.lora_A.weight", &[1, 2], &[1.0, f32::NAN]);
/// let error = Adapter::from_tensors(AdapterConfig::new(1, 1.0, ["q_proj"]), &[not_finite, b]).unwrap_err();
/// assert!(error.to_string().contains("q_proj.lora_A"), "{error}");
/// # Ok::<(), lora_merge::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Adapter {
    config: AdapterConfig,
    tensors: BTreeMap<(String, Part), (String, Tensor)>,
    digest: [u8; 32],
}

impl Adapter {
    /// Reads a PEFT folder: `adapter_config.json` and `adapter_model.safetensors`.
    ///
    /// # Errors
    /// Names the file, field or tensor at fault; an `adapter_model.bin` without a safetensors file beside it is
    /// refused with advice. Panics: none.
    pub fn load(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let config_path = folder.join("adapter_config.json");
        let weights_path = folder.join("adapter_model.safetensors");
        let missing = |name| Error::NotAnAdapterFolder {
            folder: folder.to_owned(),
            missing: name,
        };
        if !config_path.is_file() {
            return Err(missing("adapter_config.json"));
        }
        if !weights_path.is_file() {
            let pickle = folder.join("adapter_model.bin");
            return Err(if pickle.is_file() {
                Error::PickleRefused { path: pickle }
            } else {
                missing("adapter_model.safetensors")
            });
        }
        let read = |path: &Path, limit: u64| {
            let fail = |source| Error::Read {
                path: path.to_owned(),
                source,
            };
            let mut bytes = Vec::new();
            fs::File::open(path)
                .map_err(fail)?
                .take(limit)
                .read_to_end(&mut bytes)
                .map_err(fail)?;
            Ok::<_, Error>(bytes)
        };
        let config = read(&config_path, MAX_CONFIG_BYTES as u64 + 1)?;
        let config = String::from_utf8(config).map_err(|e| Error::ConfigSyntax {
            reason: e.to_string(),
        })?;
        // The configuration is checked before the weights are read.
        let config = AdapterConfig::from_json(&config)?;
        Self::build(
            config,
            tensors::from_safetensors(&read(&weights_path, u64::MAX)?)?,
        )
    }

    /// Reads the two files' contents from memory.
    ///
    /// # Errors
    /// As [`Adapter::load`]. Panics: none.
    pub fn from_bytes(config_json: &str, safetensors: &[u8]) -> Result<Self> {
        Self::build(
            AdapterConfig::from_json(config_json)?,
            tensors::from_safetensors(safetensors)?,
        )
    }

    /// Copies borrowed tensors, for a trainer in the same process. Names are those of a PEFT file; the prefix
    /// `base_model.model.` may be left out.
    ///
    /// # Errors
    /// As [`Adapter::load`]. Panics: none.
    pub fn from_tensors(config: AdapterConfig, tensors: &[TensorSlice<'_>]) -> Result<Self> {
        config.validate()?;
        Self::build(config, tensors::from_slices(tensors)?)
    }

    fn build(config: AdapterConfig, list: Vec<(String, Tensor)>) -> Result<Self> {
        let mut tensors = BTreeMap::new();
        for (name, tensor) in list {
            let (module, part) = parse_name(&name)?;
            if let Some((name, _)) = tensors.insert((module.to_owned(), part), (name.clone(), tensor)) {
                return Err(Error::DuplicateTensor { tensor: name });
            }
        }
        let digest = digest(&config, &tensors);
        Ok(Self {
            config,
            tensors,
            digest,
        })
    }

    /// The configuration.
    pub fn config(&self) -> &AdapterConfig {
        &self.config
    }

    /// SHA-256 over the configuration's [canonical form](AdapterConfig::canonical_json) and, sorted by name, every
    /// tensor's name, type, shape and stored bytes. Equal digests mean equal merges.
    pub fn digest(&self) -> [u8; 32] {
        self.digest
    }

    /// Bytes of the tensors as held in memory (f32).
    pub fn bytes(&self) -> usize {
        self.tensors.values().map(|(_, t)| 4 * t.values.len()).sum()
    }

    /// Number of tensors.
    pub fn n_tensors(&self) -> usize {
        self.tensors.len()
    }

    /// The same adapter with Gaussian noise of standard deviation `noise` added to every A and B, drawn from `seed`.
    ///
    /// This stands in for a trainer's step in [`crate::verify_no_drift`]. Panics: none.
    #[must_use]
    pub fn perturbed(&self, noise: f32, seed: u64) -> Self {
        let mut random = crate::random::Gaussian::new(seed);
        let mut tensors = self.tensors.clone();
        for ((_, part), (_, tensor)) in &mut tensors {
            if matches!(part, Part::A | Part::B) {
                let moved = tensor.values.iter().map(|v| {
                    let moved = v + noise * random.next();
                    if moved.is_finite() { moved } else { *v }
                });
                let moved: Arc<[f32]> = moved.collect();
                let bytes = tensors::little_endian(&moved);
                tensor.digest = crate::digest::tensor_digest("F32", &tensor.shape, &bytes);
                tensor.bits = tensors::bits(&moved);
                tensor.values = moved.clone();
            }
        }
        let digest = digest(&self.config, &tensors);
        Self {
            config: self.config.clone(),
            tensors,
            digest,
        }
    }

    /// One tensor and its full name.
    pub(crate) fn tensor(&self, module: &str, part: Part) -> Option<(&str, &Tensor)> {
        // The key borrows nothing from the map, so it is built; lookups happen once per module and refresh.
        self.tensors
            .get(&(module.to_owned(), part))
            .map(|(name, tensor)| (name.as_str(), tensor))
    }

    /// Every (module, part, full name) the adapter holds, sorted.
    pub(crate) fn parts(&self) -> impl Iterator<Item = (&str, Part, &str)> {
        self.tensors
            .iter()
            .map(|((module, part), (name, _))| (module.as_str(), *part, name.as_str()))
    }

    /// Whether nothing is targeted on purpose: an adapter may only replace modules.
    pub(crate) fn only_replaces(&self) -> bool {
        matches!(&self.config.target_modules, Targets::List(list) if list.is_empty())
    }
}

/// Splits a tensor's name into module and part.
fn parse_name(name: &str) -> Result<(&str, Part)> {
    let refuse = |reason| {
        Err(Error::TensorName {
            tensor: name.to_owned(),
            reason,
        })
    };
    let path = name.strip_prefix("base_model.model.").unwrap_or(name);
    let parts: [(&str, Part); 7] = [
        (".lora_A.weight", Part::A),
        (".lora_B.weight", Part::B),
        (".lora_B.bias", Part::BBias),
        (".lora_magnitude_vector", Part::Magnitude),
        (".lora_magnitude_vector.weight", Part::Magnitude),
        (".weight", Part::Weight),
        (".bias", Part::Bias),
    ];
    if path.contains(".lora_embedding_") {
        return refuse("embedding adapters (`lora_embedding_A`, `lora_embedding_B`) are not supported");
    }
    for (suffix, part) in parts {
        let Some(module) = path.strip_suffix(suffix) else {
            continue;
        };
        if matches!(part, Part::Weight | Part::Bias) {
            if module.contains(".lora_") {
                return refuse("this part of an adapter is not known (is an adapter's name left in it?)");
            }
            let module = module.strip_suffix(".base_layer").unwrap_or(module);
            return if module.is_empty() {
                refuse("it names no module")
            } else {
                Ok((module, part))
            };
        }
        return if module.is_empty() {
            refuse("it names no module")
        } else {
            Ok((module, part))
        };
    }
    refuse("no part of a supported adapter has such a name")
}

fn digest(config: &AdapterConfig, tensors: &BTreeMap<(String, Part), (String, Tensor)>) -> [u8; 32] {
    let mut sha = Sha256::new();
    let config = config.canonical_json();
    sha.update((config.len() as u64).to_le_bytes());
    sha.update(config.as_bytes());
    let mut named: Vec<_> = tensors.values().map(|(name, tensor)| (name, tensor)).collect();
    named.sort_by_key(|(name, _)| *name);
    for (name, tensor) in named {
        sha.update((name.len() as u64).to_le_bytes());
        sha.update(name.as_bytes());
        sha.update(tensor.digest);
    }
    sha.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TensorValues;

    /// Factors are packed as narrow types by their bits: those from before the noise would round what was added.
    #[test]
    fn a_perturbed_adapter_knows_the_bits_of_its_new_values() {
        let tensor = |name, shape, values| TensorSlice {
            name,
            shape,
            values: TensorValues::F32(values),
        };
        let a = tensor("q_proj.lora_A.weight", &[1, 2], &[1.0, 2.0]);
        let b = tensor("q_proj.lora_B.weight", &[2, 1], &[0.5, 0.25]);
        let adapter = Adapter::from_tensors(AdapterConfig::new(1, 1.0, ["q_proj"]), &[a, b]).unwrap();
        for adapter in [adapter.perturbed(0.01, 7), adapter] {
            for (_, tensor) in adapter.tensors.values() {
                let bits = tensor.values.iter().fold(0, |bits, v| bits | v.to_bits());
                assert_eq!(tensor.bits, bits);
            }
        }
    }
}
