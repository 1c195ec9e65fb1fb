//! What the caller's model is made of: named matrices.

use crate::{Error, Result};

/// How a module stores and uses its matrix, as far as PEFT distinguishes it.
///
/// ```
/// use lora_merge::{ModuleKind, ModuleSpec};
///
/// assert_eq!(ModuleSpec::linear("q_proj", 4, 3).stored_shape(), (4, 3));
/// assert_eq!(ModuleSpec::new("c_attn", 4, 3, ModuleKind::Conv1d).stored_shape(), (3, 4));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ModuleKind {
    /// `nn.Linear`: stored `[out, in]`.
    Linear,
    /// The model's output head, an `nn.Linear` that `all-linear` leaves out.
    OutputHead,
    /// transformers' `Conv1D`: stored `[in, out]` (what PEFT calls `fan_in_fan_out`).
    Conv1d,
    /// `nn.Embedding`, stored `[vocabulary, dim]`: can be replaced through `modules_to_save`, not adapted.
    Embedding,
}

/// One named matrix of the base model.
///
/// `name` is the module's dotted path without `.weight`, for instance `model.layers.0.self_attn.q_proj`.
///
/// ```
/// use lora_merge::ModuleSpec;
///
/// let spec = ModuleSpec::linear("model.layers.0.self_attn.q_proj", 4096, 2560).with_bias();
/// assert_eq!(spec.elements(), 4096 * 2560);
/// assert!(spec.has_bias);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ModuleSpec {
    /// Dotted path of the module.
    pub name: String,
    /// Output features (rows of a `Linear`'s weight).
    pub out_features: usize,
    /// Input features (columns of a `Linear`'s weight).
    pub in_features: usize,
    /// Kind of module.
    pub kind: ModuleKind,
    /// Whether the base module has a bias vector `[out]`.
    pub has_bias: bool,
}

impl ModuleSpec {
    /// A module of any kind, without a bias. Panics: none.
    pub fn new(name: impl Into<String>, out_features: usize, in_features: usize, kind: ModuleKind) -> Self {
        Self {
            name: name.into(),
            out_features,
            in_features,
            kind,
            has_bias: false,
        }
    }

    /// An `nn.Linear` with weight `[out, in]` and no bias. Panics: none.
    pub fn linear(name: impl Into<String>, out_features: usize, in_features: usize) -> Self {
        Self::new(name, out_features, in_features, ModuleKind::Linear)
    }

    /// An output head with weight `[vocabulary, hidden]`. Panics: none.
    pub fn output_head(name: impl Into<String>, vocabulary: usize, hidden: usize) -> Self {
        Self::new(name, vocabulary, hidden, ModuleKind::OutputHead)
    }

    /// An embedding table `[vocabulary, dim]`. Panics: none.
    pub fn embedding(name: impl Into<String>, vocabulary: usize, dim: usize) -> Self {
        Self::new(name, vocabulary, dim, ModuleKind::Embedding)
    }

    /// The same module with a bias vector `[out]`. Panics: none.
    #[must_use]
    pub fn with_bias(mut self) -> Self {
        self.has_bias = true;
        self
    }

    /// Rows and columns as stored: `(out, in)`, or `(in, out)` for [`ModuleKind::Conv1d`].
    pub fn stored_shape(&self) -> (usize, usize) {
        match self.kind {
            ModuleKind::Conv1d => (self.in_features, self.out_features),
            _ => (self.out_features, self.in_features),
        }
    }

    /// Number of elements of the weight.
    pub fn elements(&self) -> usize {
        self.out_features.saturating_mul(self.in_features)
    }
}

/// Checks that no two modules share a name.
pub(crate) fn check_unique(specs: &[ModuleSpec]) -> Result<()> {
    let mut names: Vec<&str> = specs.iter().map(|s| s.name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|w| w[0] == w[1]) {
        Some(w) => Err(Error::DuplicateModule {
            module: w[0].to_owned(),
        }),
        None => Ok(()),
    }
}
