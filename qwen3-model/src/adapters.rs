//! Adapters on a model: which matrices they may target, and how they are applied.

use std::time::Duration;

use half::bf16;
use lora_merge::{LowRankTerm, MemoryReport, ModuleSpec, ModuleUpdate, PolicyVersion, PristineSource};

use crate::{Projection, Qwen3Config, Weights};

/// How active adapters take part in the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum MergeMode {
    /// Targeted matrices are replaced by merged ones, rounded once to bf16 from the pristine
    /// weights: full speed, and what a policy is served with.
    #[default]
    Merged,
    /// `base + scaled B·A` at run time, in f32: slower, the reference for the merged form.
    Unmerged,
}

/// What a change of adapters did.
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
    /// Wall time.
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

/// Index of a projection among [`modules`].
pub(crate) fn module_index(layer: usize, projection: Projection) -> usize {
    layer * Projection::ALL.len() + projection as usize
}

/// A model's weights as the pristine copy of a [`lora_merge::MergedStore`] over [`modules`].
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
        self.0.module(module).map(crate::WeightMatrix::data)
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
