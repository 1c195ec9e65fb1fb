//! Adapters on a model: which matrices they may target, and how they are applied.

use std::time::Duration;

use half::bf16;
use lora_merge::{
    Adapter, AdapterConfig, LowRankTerm, MemoryReport, ModuleSpec, ModuleUpdate, PolicyVersion,
    PristineSource, Resolved, TensorSlice, TensorValues,
};
use rayon::prelude::*;
use sha2::{Digest, Sha256};

use crate::{Projection, Qwen3Config, Weights};

/// How active adapters take part in the model.
///
/// ```
/// use qwen3_model::MergeMode;
///
/// assert_eq!(MergeMode::default(), MergeMode::Merged);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum MergeMode {
    /// Targeted matrices are replaced by merged ones, rounded once to bf16 from the pristine
    /// weights: full speed, and what a policy is served with.
    #[default]
    Merged,
    /// `base + scaled B·A` at run time, in f32: slower, the reference for the merged form.
    Unmerged,
}

/// Where the pristine copy of adapted weights lives: memory against the time of a refresh. The merged bits are the same.
///
/// ```
/// use qwen3_model::PristineCopy;
///
/// assert_eq!("pinned".parse(), Ok(PristineCopy::Pinned));
/// assert!("disk".parse::<PristineCopy>().is_err());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum PristineCopy {
    /// In device memory: the quickest refresh.
    #[default]
    Device,
    /// In page-locked host memory: every refresh uploads it.
    Pinned,
    /// Nowhere: every refresh reads the mapped weight file again. Only for bf16 weights of a model folder.
    File,
}

impl std::str::FromStr for PristineCopy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "device" => Ok(Self::Device),
            "pinned" => Ok(Self::Pinned),
            "file" => Ok(Self::File),
            _ => Err("use device, pinned or file".into()),
        }
    }
}

/// What a change of adapters did.
///
/// ```
/// use qwen3_model::{AdapterReport, LoadOptions, MergeMode, Model, Qwen3Config, random_adapter};
///
/// # let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../rollout-engine/models/tiny-qwen3-math");
/// let config = Qwen3Config::from_dir(dir.as_ref())?;
/// let mut model = Model::load(dir, &LoadOptions::default())?;
/// let adapter = lora_merge::ActiveAdapter::new(random_adapter(&config, 4, 1)?);
/// let report: AdapterReport = model.set_adapters(&[adapter], MergeMode::Merged)?;
/// assert!(report.differs_from_base && report.changed_modules == report.adapted_modules);
/// assert_eq!(report.version.number, 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct AdapterReport {
    /// The policy now in force. The number rises with every change, whatever the mode.
    pub version: PolicyVersion,
    /// How the adapters are applied.
    pub mode: MergeMode,
    /// Modules that an adapter touches.
    pub adapted_modules: usize,
    /// Remarks on settings that are overridden as in PEFT.
    pub warnings: Vec<String>,
    /// Modules of which a served weight or bias changed, or, at run time, whose update changed.
    pub changed_modules: usize,
    /// Whether any module differs from the base. `false` with an adapter active means that it has no effect at all.
    pub differs_from_base: bool,
    /// Elements whose rounding needed f64.
    pub recomputed: u64,
    /// Bytes of both copies of the weights.
    pub memory: MemoryReport,
    /// Wall time of writing the weights.
    pub merge_elapsed: Duration,
    /// SHA-256 of the adapters of every policy that can be sampled under, in order: one for
    /// [`Backend::set_adapters`](crate::Backend::set_adapters).
    pub policies: Vec<[u8; 32]>,
    /// Wall time in all: with matching adapters and modules, and on a GPU the upload of the adapters.
    pub elapsed: Duration,
}

/// The policy of a model that no adapter has touched.
pub(crate) fn base_policy() -> PolicyVersion {
    let digest = lora_merge::resolve(&[], &[]).map(|resolved| resolved.digest());
    PolicyVersion {
        number: 0,
        sha256: digest.unwrap_or_default(),
    }
}

/// The digest of a single policy is that of its adapters; of several, one over theirs.
pub(crate) fn digest_of_policies(resolved: &[Resolved]) -> [u8; 32] {
    match resolved {
        [one] => one.digest(),
        many => {
            let mut sha = Sha256::new();
            many.iter().for_each(|one| sha.update(one.digest()));
            sha.finalize().into()
        }
    }
}

/// Whether an update at run time can change its module's result: a low-rank product of zeros cannot.
pub(crate) fn has_effect(update: &ModuleUpdate) -> bool {
    let nonzero = |values: &[f32]| values.iter().any(|value| *value != 0.0);
    let term = |term: &LowRankTerm| {
        term.magnitude.is_some() || (term.scaling != 0.0 && nonzero(&term.left) && nonzero(&term.right))
    };
    update.terms().iter().any(term) || update.replacement().is_some() || update.touches_bias()
}

/// The matrices that adapters may target: the seven of every layer in the order of
/// [`Projection::ALL`], then `lm_head`. The embedding is not among them; a tied head is adapted
/// without it.
pub fn modules(config: &Qwen3Config) -> Vec<ModuleSpec> {
    let layer = |layer| {
        Projection::ALL.map(|projection| {
            let [rows, cols] = config.projection_shape(projection);
            ModuleSpec::linear(projection.module(layer), rows, cols)
        })
    };
    let mut specs: Vec<ModuleSpec> = (0..config.n_layers).flat_map(layer).collect();
    specs.push(ModuleSpec::output_head(
        "lm_head",
        config.vocab_size,
        config.hidden_size,
    ));
    specs
}

/// An adapter of this rank on all seven projections of every layer, with random values of a trained adapter's size: for
/// measurements.
///
/// # Errors
/// [`Error::Adapter`](crate::Error::Adapter) for a rank of 0, [`Error::Option`](crate::Error::Option) for one beyond 2¹⁶,
/// [`Error::Field`](crate::Error::Field) for a configuration that no model has. Panics: none.
pub fn random_adapter(config: &Qwen3Config, rank: usize, seed: u64) -> crate::Result<Adapter> {
    const MAX_RANK: usize = 1 << 16;
    if rank > MAX_RANK {
        return Err(crate::Error::Option {
            option: "rank",
            problem: format!("is {rank}, more than {MAX_RANK}"),
        });
    }
    config.check()?;
    let names = Projection::ALL.map(|p| p.name().rsplit('.').next().unwrap_or_default());
    let settings = AdapterConfig::new(rank, 2.0 * rank as f64, names);
    let tensors = (0..config.n_layers).flat_map(|layer| {
        Projection::ALL.into_iter().flat_map(move |projection| {
            let [out, columns] = config.projection_shape(projection);
            let name = projection.module(layer);
            // A as at the start of training, B after some of it: a change of a few per cent of the weights.
            let bound = 1.0 / (columns as f32).sqrt();
            [
                (format!("{name}.lora_A.weight"), [rank, columns], bound),
                (format!("{name}.lora_B.weight"), [out, rank], 0.02 * bound),
            ]
        })
    });
    let tensors: Vec<_> = tensors.collect();
    let values: Vec<Vec<f32>> = tensors
        .par_iter()
        .map(|(name, shape, bound)| uniform(seed, name, shape[0] * shape[1], *bound))
        .collect();
    let slices: Vec<TensorSlice<'_>> = tensors
        .iter()
        .zip(&values)
        .map(|((name, shape, _), values)| TensorSlice {
            name,
            shape,
            values: TensorValues::F32(values),
        })
        .collect();
    Ok(Adapter::from_tensors(settings, &slices)?)
}

/// Values between −bound and bound.
fn uniform(seed: u64, name: &str, n: usize, bound: f32) -> Vec<f32> {
    // xorshift64*: quick, and good enough for measurements.
    let mut state = crate::random::stream(seed, name) | 1;
    let next = || {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        let bits = state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 40;
        bound * (bits as f32 / (1u64 << 23) as f32 - 1.0)
    };
    std::iter::repeat_with(next).take(n).collect()
}

/// Index of a projection among [`modules`].
pub(crate) fn module_index(layer: usize, projection: Projection) -> usize {
    layer * Projection::ALL.len() + projection as usize
}

/// Why a matrix in 4 bits takes no merge.
pub(crate) const IN_FOUR_BITS: &str = "its weight is in 4 bits, and rounding to 4 bits again would lose most of an adapter; \
     apply adapters at run time, or dequantise the model to bf16 when it is loaded";

/// A model's weights as the pristine copy of a [`lora_merge::MergedStore`] over [`modules`].
///
/// ```
/// use lora_merge::PristineSource;
/// use qwen3_model::{PristineWeights, Qwen3Config, Weights};
///
/// # let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../rollout-engine/models/tiny-qwen3-math");
/// let config = Qwen3Config::from_dir(dir.as_ref())?;
/// let pristine = PristineWeights::new(Weights::open(dir.as_ref(), &config)?);
/// assert!(pristine.slice(0).is_some(), "q_proj of layer 0");
/// assert_eq!(pristine.resident_bytes(0), 0, "it lies in a mapped file");
/// # Ok::<(), qwen3_model::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct PristineWeights(Weights);

impl PristineWeights {
    /// The weights; nothing is copied.
    pub fn new(weights: Weights) -> Self {
        Self(weights)
    }

    /// The weights.
    pub fn weights(&self) -> &Weights {
        &self.0
    }
}

impl PristineSource for PristineWeights {
    fn slice(&self, module: usize) -> Option<&[bf16]> {
        let matrix = self.0.module(module)?;
        matrix.quantized().is_none().then(|| matrix.data())
    }

    fn refusal(&self, module: usize) -> Option<&'static str> {
        self.0.module(module)?.quantized().map(|_| IN_FOUR_BITS)
    }

    /// Mapped files and a tied head take no memory of their own.
    fn resident_bytes(&self, module: usize) -> usize {
        let tied_head = module == self.0.layers.len() * Projection::ALL.len() && self.0.is_tied();
        match self.0.module(module) {
            Some(matrix) if !matrix.is_mapped() && !tied_head => size_of_val(matrix.data()),
            _ => 0,
        }
    }
}
