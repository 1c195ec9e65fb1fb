//! The check that base weights never move, and that the same adapter always gives the same merged weights.

use crate::digest::{bf16_bytes, hex};
use crate::store::MergedStore;
use crate::{ActiveAdapter, Error, PristineSource, RefreshReport, Result};
use half::bf16;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::sync::Arc;

/// Something whose weights can be checked: a store, or a whole engine.
///
/// ```
/// # use half::bf16;
/// # use lora_merge::*;
/// use lora_merge::{ActiveAdapter, DriftOptions, DriftSubject, Error, verify_no_drift};
///
/// /// Serves its base whatever the adapter.
/// struct Deaf([u8; 32]);
///
/// impl DriftSubject for Deaf {
///     type Error = Error;
///     fn base_digest(&mut self) -> Result<[u8; 32], Error> { Ok(self.0) }
///     fn served_digest(&mut self) -> Result<[u8; 32], Error> { Ok(self.0) }
///     fn refresh(&mut self, _: &[ActiveAdapter]) -> Result<(), Error> { Ok(()) }
/// }
/// assert!(verify_no_drift(&mut Deaf([7; 32]), &[], &DriftOptions::default())?.passed());
/// # Ok::<(), lora_merge::Error>(())
/// ```
pub trait DriftSubject {
    /// The error of its operations.
    type Error: From<Error>;

    /// SHA-256 over all base parameters, sorted by name, each as its name's bytes and then its raw bytes.
    ///
    /// # Errors
    /// If the weights cannot be read.
    fn base_digest(&mut self) -> Result<[u8; 32], Self::Error>;

    /// SHA-256 in the same form over the weights that are served.
    ///
    /// # Errors
    /// If the weights cannot be read.
    fn served_digest(&mut self) -> Result<[u8; 32], Self::Error>;

    /// Makes the adapters the policy.
    ///
    /// # Errors
    /// If the policy could not be changed.
    fn refresh(&mut self, active: &[ActiveAdapter]) -> Result<(), Self::Error>;
}

/// What to check.
///
/// ```
/// # use half::bf16;
/// # use lora_merge::*;
/// # let tensor = |name, shape, values| TensorSlice { name, shape, values: TensorValues::F32(values) };
/// # let a = tensor("q_proj.lora_A.weight", &[1, 2], &[1.0, 2.0]);
/// # let b = tensor("q_proj.lora_B.weight", &[2, 1], &[0.5, 0.25]);
/// # let adapter = Adapter::from_tensors(AdapterConfig::new(1, 1.0, ["q_proj"]), &[a, b])?;
/// # let specs = vec![ModuleSpec::linear("q_proj", 2, 2)];
/// # let mut store = MergedStore::new(specs, OwnedWeights::new([vec![bf16::ONE; 4]]))?;
/// use lora_merge::{DriftOptions, verify_no_drift};
///
/// let mut options = DriftOptions::default();
/// options.iterations = 3;
/// options.noise_scale = 0.1;
/// let report = verify_no_drift(&mut store, &[ActiveAdapter::new(adapter)], &options)?;
/// assert_eq!((report.n_iters, report.noise_scale), (3, 0.1));
/// options.iterations = 0; // proves nothing
/// assert!(verify_no_drift(&mut store, &[], &options).is_err());
/// # Ok::<(), lora_merge::Error>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DriftOptions {
    /// Name of the way in which adapters are applied, for the report.
    pub mode: String,
    /// Perturb + refresh cycles, at least 1.
    pub iterations: usize,
    /// Standard deviation of the noise added to A and B in each cycle.
    pub noise_scale: f32,
    /// Seed of the noise.
    pub seed: u64,
}

impl Default for DriftOptions {
    /// 10 cycles with noise 0.01.
    fn default() -> Self {
        Self {
            mode: "merged".into(),
            iterations: 10,
            noise_scale: 0.01,
            seed: 0,
        }
    }
}

/// The check's result; serialises to the report's JSON.
///
/// ```
/// # use half::bf16;
/// # use lora_merge::*;
/// # let tensor = |name, shape, values| TensorSlice { name, shape, values: TensorValues::F32(values) };
/// # let a = tensor("q_proj.lora_A.weight", &[1, 2], &[1.0, 2.0]);
/// # let b = tensor("q_proj.lora_B.weight", &[2, 1], &[0.5, 0.25]);
/// # let adapter = Adapter::from_tensors(AdapterConfig::new(1, 1.0, ["q_proj"]), &[a, b])?;
/// # let specs = vec![ModuleSpec::linear("q_proj", 2, 2)];
/// # let mut store = MergedStore::new(specs, OwnedWeights::new([vec![bf16::ONE; 4]]))?;
/// use lora_merge::{DriftOptions, verify_no_drift};
///
/// let report = verify_no_drift(&mut store, &[ActiveAdapter::new(adapter)], &DriftOptions::default())?;
/// assert!(report.passed());
/// let json = serde_json::to_value(&report).expect("plain fields");
/// assert_eq!(json["base_bit_identical"], true);
/// assert_eq!(json["base_hash_before"], json["base_hash_after"]);
/// # Ok::<(), lora_merge::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DriftReport {
    /// Name of the way in which adapters are applied.
    pub mode: String,
    /// Perturb + refresh cycles.
    pub n_iters: usize,
    /// Standard deviation of the noise.
    pub noise_scale: f32,
    /// SHA-256 of the base before the cycles, hexadecimal.
    pub base_hash_before: String,
    /// SHA-256 of the base after the cycles.
    pub base_hash_after: String,
    /// Whether the two are equal.
    pub base_bit_identical: bool,
    /// SHA-256 of the served weights with the unperturbed adapters, before the cycles.
    pub inference_hash_initial_merged: String,
    /// The same after the cycles, with the unperturbed adapters restored.
    pub inference_hash_after_restore: String,
    /// Whether the two are equal.
    pub inference_deterministic: bool,
}

impl DriftReport {
    /// Whether neither base nor merged weights drifted.
    pub fn passed(&self) -> bool {
        self.base_bit_identical && self.inference_deterministic
    }
}

/// Hashes, perturbs and refreshes `iterations` times, restores the adapters, hashes again.
///
/// Afterwards `active` is in force. A drift is reported, not an error.
///
/// # Errors
/// [`Error::DriftOptions`], and those of the subject. Panics: none.
pub fn verify_no_drift<D: DriftSubject>(
    subject: &mut D,
    active: &[ActiveAdapter],
    options: &DriftOptions,
) -> Result<DriftReport, D::Error> {
    if options.iterations == 0 {
        return Err(Error::DriftOptions {
            field: "iterations",
            expected: "at least 1",
        }
        .into());
    }
    if !(options.noise_scale.is_finite() && options.noise_scale >= 0.0) {
        return Err(Error::DriftOptions {
            field: "noise_scale",
            expected: "a finite number ≥ 0",
        }
        .into());
    }
    let before = subject.base_digest()?;
    subject.refresh(active)?;
    let initial = subject.served_digest()?;
    for iteration in 0..options.iterations {
        let seed = options
            .seed
            .wrapping_add(iteration as u64)
            .wrapping_mul(0x2545_f491_4f6c_dd1d);
        let moved = active.iter().enumerate().map(|(i, a)| ActiveAdapter {
            adapter: Arc::new(a.adapter.perturbed(options.noise_scale, seed ^ i as u64)),
            weight: a.weight,
        });
        subject.refresh(&moved.collect::<Vec<_>>())?;
    }
    let after = subject.base_digest()?;
    subject.refresh(active)?;
    let restored = subject.served_digest()?;
    Ok(DriftReport {
        mode: options.mode.clone(),
        n_iters: options.iterations,
        noise_scale: options.noise_scale,
        base_hash_before: hex(&before),
        base_hash_after: hex(&after),
        base_bit_identical: before == after,
        inference_hash_initial_merged: hex(&initial),
        inference_hash_after_restore: hex(&restored),
        inference_deterministic: initial == restored,
    })
}

impl<S: PristineSource> DriftSubject for MergedStore<S> {
    type Error = Error;

    fn base_digest(&mut self) -> Result<[u8; 32]> {
        MergedStore::base_digest(self)
    }

    fn served_digest(&mut self) -> Result<[u8; 32]> {
        Ok(MergedStore::served_digest(self))
    }

    fn refresh(&mut self, active: &[ActiveAdapter]) -> Result<()> {
        let _: RefreshReport = MergedStore::refresh(self, active)?;
        Ok(())
    }
}

impl<S: PristineSource> MergedStore<S> {
    /// SHA-256 over the pristine weights as `{module}.weight` (and biases, as f32, `{module}.bias`), sorted by name,
    /// each as its name's bytes and then its raw bytes.
    ///
    /// # Errors
    /// [`Error::Pristine`] if a weight cannot be read. Panics: none.
    pub fn base_digest(&self) -> Result<[u8; 32]> {
        let mut sha = Sha256::new();
        let mut scratch = Vec::new();
        for (module, name, is_bias) in self.sorted_names(|m| self.source().bias(m).is_some()) {
            sha.update(name.as_bytes());
            if is_bias {
                sha.update(crate::tensors::little_endian(
                    self.source().bias(module).unwrap_or(&[]),
                ));
            } else if let Some(slice) = self.source().slice(module) {
                sha.update(bf16_bytes(slice));
            } else {
                scratch.resize(self.specs()[module].elements(), bf16::ZERO);
                let read = self.source().read(module, &mut scratch);
                read.map_err(|reason| Error::Pristine {
                    module: self.specs()[module].name.clone(),
                    reason,
                })?;
                sha.update(bf16_bytes(&scratch));
            }
        }
        Ok(sha.finalize().into())
    }

    /// SHA-256 in the same form over the weights and biases that are served. Panics: none.
    pub fn served_digest(&self) -> [u8; 32] {
        let mut sha = Sha256::new();
        for (module, name, is_bias) in self.sorted_names(|m| self.bias(m).is_some()) {
            sha.update(name.as_bytes());
            if is_bias {
                sha.update(crate::tensors::little_endian(self.bias(module).unwrap_or(&[])));
            } else {
                sha.update(bf16_bytes(self.weight(module).unwrap_or(&[])));
            }
        }
        sha.finalize().into()
    }

    /// [`crate::parallel_digest`] of the served weights: the quick fingerprint of the policy's bits. Panics: none.
    pub fn fingerprint(&self) -> [u8; 32] {
        let weights = self
            .specs()
            .iter()
            .enumerate()
            .map(|(module, spec)| (spec.name.as_str(), bf16_bytes(self.weight(module).unwrap_or(&[]))));
        let weights: Vec<_> = weights.collect();
        crate::parallel_digest(
            &weights
                .iter()
                .map(|(name, bytes)| (*name, &bytes[..]))
                .collect::<Vec<_>>(),
        )
    }

    /// (module, parameter name, whether it is a bias), sorted by parameter name.
    fn sorted_names(&self, has_bias: impl Fn(usize) -> bool) -> Vec<(usize, String, bool)> {
        let mut names = Vec::new();
        for (module, spec) in self.specs().iter().enumerate() {
            names.push((module, format!("{}.weight", spec.name), false));
            if has_bias(module) {
                names.push((module, format!("{}.bias", spec.name), true));
            }
        }
        names.sort_by(|a, b| a.1.cmp(&b.1));
        names
    }
}
