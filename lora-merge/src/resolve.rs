//! From active adapters and a list of modules to what each module's weight becomes.
//!
//! Everything that can be wrong between an adapter and a model is found here, before any weight is touched: a
//! targeted module without tensors, a tensor without a use, a wrong shape, a combination that has no meaning.

use crate::adapter::Part;
use crate::module::{ModuleKind, check_unique};
use crate::target::{Selection, Selector};
use crate::tensors::Tensor;
use crate::{Adapter, AdapterConfig, Error, ModuleSpec, Result};
use rayon::prelude::*;
use sha2::{Digest, Sha256};
use std::collections::HashSet;
use std::sync::Arc;

/// An adapter and the factor on its scaling (1 is what the adapter was trained with).
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
/// use lora_merge::ActiveAdapter;
///
/// let half = ActiveAdapter { weight: 0.5, ..ActiveAdapter::new(adapter) };
/// store.refresh(&[half])?;
/// assert_eq!(store.weight(0), Some(&[1.25, 1.5, 1.125, 1.25].map(bf16::from_f32)[..]));
/// # Ok::<(), lora_merge::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ActiveAdapter {
    /// The adapter.
    pub adapter: Arc<Adapter>,
    /// Factor on its scaling, as PEFT's `set_scale`. Finite; 1 if the adapter replaces whole modules.
    pub weight: f32,
}

impl ActiveAdapter {
    /// The adapter at weight 1. Panics: none.
    pub fn new(adapter: impl Into<Arc<Adapter>>) -> Self {
        Self {
            adapter: adapter.into(),
            weight: 1.0,
        }
    }
}

/// One low-rank term `scaling · left · right` of a module's weight, in the orientation in which it is stored.
///
/// ```
/// # use half::bf16;
/// # use lora_merge::*;
/// use lora_merge::{LowRankTerm, ModuleUpdate};
///
/// let term = LowRankTerm {
///     r: 1,
///     left: vec![0.5, -0.5].into(),       // B, [2, 1]
///     right: vec![1.0, 0.0, 2.0].into(),  // A, [1, 3]
///     scaling: 2.0,
///     magnitude: None,
/// };
/// let update = ModuleUpdate::from_terms(2, 3, vec![term.clone()])?;
/// assert_eq!(update.terms()[0].scaling, 2.0);
/// assert!(ModuleUpdate::from_terms(3, 3, vec![term]).is_err(), "B has two rows");
/// # Ok::<(), lora_merge::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct LowRankTerm {
    /// Rank.
    pub r: usize,
    /// `[rows, r]`: B, or Aᵀ for a weight stored `[in, out]`.
    pub left: Arc<[f32]>,
    /// `[r, columns]`: A, or Bᵀ for a weight stored `[in, out]`.
    pub right: Arc<[f32]>,
    /// alpha / r or alpha / √r, times the adapter's weight.
    pub scaling: f64,
    /// DoRA's trained row norms, `[rows]`.
    pub magnitude: Option<Arc<[f32]>>,
}

/// What a set of adapters does to one module.
///
/// ```
/// # use half::bf16;
/// # use lora_merge::*;
/// use lora_merge::{LowRankTerm, ModuleUpdate, merge_into};
///
/// let term = LowRankTerm {
///     r: 1,
///     left: vec![0.5, -0.5].into(),       // B, [2, 1]
///     right: vec![1.0, 0.0, 2.0].into(),  // A, [1, 3]
///     scaling: 2.0,
///     magnitude: None,
/// };
/// let update = ModuleUpdate::from_terms(2, 3, vec![term])?;
/// let mut merged = [bf16::ZERO; 6];
/// merge_into(&[bf16::ONE; 6], &update, &mut merged)?;
/// assert_eq!(merged, [2.0, 1.0, 3.0, 0.0, 1.0, -1.0].map(bf16::from_f32));
/// # Ok::<(), lora_merge::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ModuleUpdate {
    rows: usize,
    columns: usize,
    pub(crate) terms: Vec<LowRankTerm>,
    /// The bits that any value of a term's left and right factor has, where that is known.
    pub(crate) bits: Vec<Option<[u32; 2]>>,
    pub(crate) replacement: Option<Arc<[f32]>>,
    pub(crate) bias_terms: Vec<(Arc<[f32]>, f64)>,
    pub(crate) bias_replacement: Option<Arc<[f32]>>,
}

impl ModuleUpdate {
    /// An update from low-rank terms alone, for a weight stored as `[rows, columns]`.
    ///
    /// The order of `terms` is kept, and it is the order of summation.
    ///
    /// # Errors
    /// [`Error::Length`] if a factor does not fit; [`Error::AdapterWeight`] for a scaling that is not finite.
    /// Panics: none.
    pub fn from_terms(rows: usize, columns: usize, terms: Vec<LowRankTerm>) -> Result<Self> {
        for term in &terms {
            check_length("left factor", rows.saturating_mul(term.r), term.left.len())?;
            check_length("right factor", columns.saturating_mul(term.r), term.right.len())?;
            if let Some(magnitude) = &term.magnitude {
                check_length("magnitude", rows, magnitude.len())?;
            }
            if !term.scaling.is_finite() {
                return Err(Error::AdapterWeight {
                    weight: term.scaling as f32,
                    reason: "the scaling is not finite",
                });
            }
        }
        Ok(Self {
            rows,
            columns,
            bits: vec![None; terms.len()],
            terms,
            replacement: None,
            bias_terms: Vec::new(),
            bias_replacement: None,
        })
    }

    /// The stored shape of the weight: rows, columns.
    pub fn shape(&self) -> (usize, usize) {
        (self.rows, self.columns)
    }

    /// The low-rank terms in the order of summation.
    pub fn terms(&self) -> &[LowRankTerm] {
        &self.terms
    }

    /// Sum of the ranks of all terms.
    pub fn total_rank(&self) -> usize {
        self.terms.iter().map(|t| t.r).sum()
    }

    /// The whole weight `[rows, columns]` in f32, where an adapter replaces it (`modules_to_save`).
    pub fn replacement(&self) -> Option<&[f32]> {
        self.replacement.as_deref()
    }

    /// Whether the weight changes (a bias may change alone).
    pub(crate) fn touches_weight(&self) -> bool {
        !self.terms.is_empty() || self.replacement.is_some()
    }

    /// Whether the bias changes.
    pub fn touches_bias(&self) -> bool {
        !self.bias_terms.is_empty() || self.bias_replacement.is_some()
    }

    /// The bias `[out]` with all adapters applied, starting from the base's bias if it has one (`None` is zeros):
    /// f64 sums, rounded once to f32. `None` if no adapter touches it.
    ///
    /// # Errors
    /// [`Error::Length`] if `base` has another length; [`Error::MergedNotFinite`] for a sum that f32 cannot hold, with
    /// `module` empty. Panics: none.
    pub fn bias(&self, base: Option<&[f32]>) -> Result<Option<Vec<f32>>> {
        if !self.touches_bias() {
            return Ok(None);
        }
        let base = self.bias_replacement.as_deref().or(base);
        let len = self
            .bias_terms
            .first()
            .map(|t| t.0.len())
            .or(base.map(<[f32]>::len))
            .unwrap_or(0);
        if let Some(base) = base {
            check_length("bias", len, base.len())?;
        }
        let value = |i: usize| {
            let sum = self
                .bias_terms
                .iter()
                .fold(0.0, |sum, (bias, scaling)| sum + scaling * f64::from(bias[i]));
            (base.map_or(0.0, |b| f64::from(b[i])) + sum) as f32
        };
        let bias: Vec<f32> = (0..len).map(value).collect();
        match bias.iter().position(|b| !b.is_finite()) {
            None => Ok(Some(bias)),
            Some(row) => Err(Error::MergedNotFinite {
                module: String::new(),
                row,
                column: 0,
            }),
        }
    }
}

/// The result of [`resolve`].
///
/// ```
/// # use half::bf16;
/// # use lora_merge::*;
/// # let tensor = |name, shape, values| TensorSlice { name, shape, values: TensorValues::F32(values) };
/// # let a = tensor("q_proj.lora_A.weight", &[1, 2], &[1.0, 2.0]);
/// # let b = tensor("q_proj.lora_B.weight", &[2, 1], &[0.5, 0.25]);
/// # let adapter = Adapter::from_tensors(AdapterConfig::new(1, 1.0, ["q_proj"]), &[a, b])?;
/// # let specs = vec![ModuleSpec::linear("q_proj", 2, 2)];
/// let resolved = lora_merge::resolve(&[ActiveAdapter::new(adapter)], &specs)?;
/// let update = resolved.updates()[0].as_ref().expect("q_proj is adapted");
/// assert_eq!((update.shape(), update.total_rank()), ((2, 2), 1));
/// assert_ne!(resolved.digest(), lora_merge::resolve(&[], &specs)?.digest());
/// # Ok::<(), lora_merge::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Resolved {
    updates: Vec<Option<ModuleUpdate>>,
    digest: [u8; 32],
    warnings: Vec<String>,
}

impl Resolved {
    /// Per module, in the order of the specs: its update, or `None` if no adapter touches it.
    pub fn updates(&self) -> &[Option<ModuleUpdate>] {
        &self.updates
    }

    /// SHA-256 over the digests and weights of all active adapters, sorted.
    pub fn digest(&self) -> [u8; 32] {
        self.digest
    }

    /// Remarks on settings that PEFT also overrides with a warning.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }
}

/// Configurations whose matches a [`Resolver`] remembers.
const REMEMBERED: usize = 8;

/// What one configuration does to each module.
type Selections = Arc<[Selection]>;

/// A model's modules, and which of them the configurations seen lately select.
///
/// Which modules an adapter applies to depends on its configuration and the modules' names alone, and matching names
/// against PEFT's patterns is most of the work of resolving. A trainer sends the same configuration with every
/// update, so that the matches of the first one serve them all.
///
/// ```
/// use lora_merge::{ActiveAdapter, Adapter, AdapterConfig, ModuleSpec, Resolver, TensorSlice, TensorValues};
///
/// let mut resolver = Resolver::new(vec![ModuleSpec::linear("q_proj", 2, 2), ModuleSpec::linear("o_proj", 2, 2)])?;
/// let tensor = |name, shape, values| TensorSlice { name, shape, values: TensorValues::F32(values) };
/// let a = tensor("q_proj.lora_A.weight", &[1, 2], &[1.0, 2.0]);
/// let b = tensor("q_proj.lora_B.weight", &[2, 1], &[0.5, 0.25]);
/// let adapter = Adapter::from_tensors(AdapterConfig::new(1, 1.0, ["q_proj"]), &[a, b])?;
/// let resolved = resolver.resolve(&[ActiveAdapter::new(adapter)])?;
/// assert!(resolved.updates()[0].is_some() && resolved.updates()[1].is_none());
/// # Ok::<(), lora_merge::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Resolver {
    specs: Vec<ModuleSpec>,
    /// The most recent last.
    known: Vec<(AdapterConfig, Selections)>,
}

impl Resolver {
    /// A resolver for a model's modules.
    ///
    /// # Errors
    /// [`Error::DuplicateModule`]. Panics: none.
    pub fn new(specs: Vec<ModuleSpec>) -> Result<Self> {
        check_unique(&specs)?;
        Ok(Self {
            specs,
            known: Vec::new(),
        })
    }

    /// The modules.
    pub fn specs(&self) -> &[ModuleSpec] {
        &self.specs
    }

    /// Applies PEFT's rules to every (adapter, module) pair; the result is that of [`resolve`].
    ///
    /// # Errors
    /// As [`resolve`]. Panics: none.
    pub fn resolve(&mut self, active: &[ActiveAdapter]) -> Result<Resolved> {
        let mut ordered: Vec<&ActiveAdapter> = active.iter().collect();
        ordered.sort_by_key(|a| (a.adapter.digest(), a.weight.to_bits()));
        let mut updates: Vec<Option<ModuleUpdate>> = vec![None; self.specs.len()];
        let mut warnings = Vec::new();
        for active in &ordered {
            if !active.weight.is_finite() {
                return Err(Error::AdapterWeight {
                    weight: active.weight,
                    reason: "it must be finite",
                });
            }
            let config = active.adapter.config();
            let selections = self.selections(config)?;
            apply(active, &self.specs, &selections, &mut updates)?;
            if config.fan_in_fan_out && self.specs.iter().any(|s| s.kind == ModuleKind::Linear) {
                warnings.push(
                    "`fan_in_fan_out` is set but the modules store [out, in]: as in PEFT it is ignored"
                        .into(),
                );
            }
        }
        Ok(Resolved {
            updates,
            digest: policy_digest(&ordered),
            warnings,
        })
    }

    /// What a configuration does to each module, remembered or matched now.
    fn selections(&mut self, config: &AdapterConfig) -> Result<Selections> {
        let known = match self.known.iter().position(|(known, _)| known == config) {
            Some(index) => self.known.remove(index),
            None => {
                let selector = Selector::new(config)?;
                let matches = self.specs.par_iter().map(|spec| selector.select(spec));
                (config.clone(), matches.collect::<Result<Vec<_>>>()?.into())
            }
        };
        if self.known.len() == REMEMBERED {
            self.known.remove(0);
        }
        let selections = known.1.clone();
        self.known.push(known);
        Ok(selections)
    }
}

/// Applies PEFT's rules to every (adapter, module) pair.
///
/// The result does not depend on the order of `active`: terms are sorted by their adapters' digests and weights. Who
/// resolves again and again keeps a [`Resolver`].
///
/// # Errors
/// [`Error::MissingTensor`], [`Error::UnusedTensors`], [`Error::TensorShape`], [`Error::NoTarget`],
/// [`Error::Module`], [`Error::ReplacedTwice`], [`Error::AdapterWeight`], [`Error::DuplicateModule`],
/// [`Error::Pattern`]. Panics: none.
pub fn resolve(active: &[ActiveAdapter], specs: &[ModuleSpec]) -> Result<Resolved> {
    Resolver::new(specs.to_vec())?.resolve(active)
}

/// SHA-256 over (adapter digest, weight) of an ordered set.
fn policy_digest(ordered: &[&ActiveAdapter]) -> [u8; 32] {
    let mut sha = Sha256::new();
    for active in ordered {
        sha.update(active.adapter.digest());
        sha.update(active.weight.to_bits().to_le_bytes());
    }
    sha.finalize().into()
}

/// Adds what one adapter does.
fn apply(
    active: &ActiveAdapter,
    specs: &[ModuleSpec],
    selections: &[Selection],
    updates: &mut [Option<ModuleUpdate>],
) -> Result<()> {
    let adapter = active.adapter.as_ref();
    let config = adapter.config();
    let mut used: HashSet<(&str, Part)> = HashSet::new();
    let mut any = false;
    for ((spec, selection), slot) in specs.iter().zip(selections).zip(updates.iter_mut()) {
        let (rows, columns) = spec.stored_shape();
        let take = |part: Part, shape: &[usize]| take(adapter, spec, part, shape);
        let update = || ModuleUpdate {
            rows,
            columns,
            terms: Vec::new(),
            bits: Vec::new(),
            replacement: None,
            bias_terms: Vec::new(),
            bias_replacement: None,
        };
        match *selection {
            Selection::None => {}
            Selection::Saved => {
                any = true;
                whole(active)?;
                let weight = take(Part::Weight, &[rows, columns])?;
                let update = slot.get_or_insert_with(update);
                replace(&mut update.replacement, weight, spec, "weight")?;
                used.insert((&spec.name, Part::Weight));
                if spec.has_bias {
                    let bias = take(Part::Bias, &[spec.out_features])?;
                    replace(&mut update.bias_replacement, bias, spec, "bias")?;
                    used.insert((&spec.name, Part::Bias));
                }
            }
            Selection::Adapted { r, scaling } => {
                any = true;
                refuse_combinations(spec, adapter)?;
                let a = take(Part::A, &[r, spec.in_features])?;
                let b = take(Part::B, &[spec.out_features, r])?;
                used.extend([(spec.name.as_str(), Part::A), (&spec.name, Part::B)]);
                let scaling = scaling * f64::from(active.weight);
                if !scaling.is_finite() {
                    return Err(Error::AdapterWeight {
                        weight: active.weight,
                        reason: "the scaling is not finite",
                    });
                }
                let mut magnitude = None;
                if config.use_dora {
                    magnitude = Some(take(Part::Magnitude, &[spec.out_features])?.values.clone());
                    used.insert((&spec.name, Part::Magnitude));
                }
                let (left, right, bits) = match spec.kind {
                    ModuleKind::Conv1d => (
                        transpose(&a.values, r, spec.in_features),
                        transpose(&b.values, spec.out_features, r),
                        [a.bits, b.bits],
                    ),
                    _ => (b.values.clone(), a.values.clone(), [b.bits, a.bits]),
                };
                let update = slot.get_or_insert_with(update);
                update.bits.push(Some(bits));
                update.terms.push(LowRankTerm {
                    r,
                    left,
                    right,
                    scaling,
                    magnitude,
                });
                if config.lora_bias {
                    let bias = take(Part::BBias, &[spec.out_features])?;
                    update.bias_terms.push((bias.values.clone(), scaling));
                    used.insert((&spec.name, Part::BBias));
                }
            }
        }
        let trained_bias = match config.bias {
            crate::BiasMode::None => false,
            crate::BiasMode::All => true,
            crate::BiasMode::LoraOnly => matches!(selection, Selection::Adapted { .. }),
        };
        if trained_bias
            && spec.has_bias
            && *selection != Selection::Saved
            && adapter.tensor(&spec.name, Part::Bias).is_some()
        {
            whole(active)?;
            let bias = take(Part::Bias, &[spec.out_features])?;
            replace(
                &mut slot.get_or_insert_with(update).bias_replacement,
                bias,
                spec,
                "bias",
            )?;
            used.insert((&spec.name, Part::Bias));
        }
        if let Some(update) = slot.as_ref()
            && update.replacement.is_some()
            && !update.terms.is_empty()
        {
            return Err(Error::Module {
                module: spec.name.clone(),
                field: "modules_to_save",
                reason: "another active adapter adapts the module that this one replaces",
            });
        }
    }
    let unused = adapter
        .parts()
        .filter(|(module, part, _)| !used.contains(&(*module, *part)));
    let mut unused: Vec<String> = unused.map(|(_, _, name)| name.to_owned()).collect();
    if !any && !adapter.only_replaces() {
        return Err(Error::NoTarget { modules: specs.len() });
    }
    if !unused.is_empty() {
        unused.sort();
        return Err(Error::UnusedTensors { tensors: unused });
    }
    Ok(())
}

fn refuse_combinations(spec: &ModuleSpec, adapter: &Adapter) -> Result<()> {
    let refuse = |field, reason| {
        Err(Error::Module {
            module: spec.name.clone(),
            field,
            reason,
        })
    };
    match spec.kind {
        ModuleKind::Embedding => refuse("target_modules", "adapters on embeddings are not supported"),
        ModuleKind::Conv1d if adapter.config().use_dora => {
            refuse("use_dora", "DoRA on a weight stored [in, out] is not supported")
        }
        _ => Ok(()),
    }
}

/// Whole tensors cannot be scaled.
fn whole(active: &ActiveAdapter) -> Result<()> {
    if active.weight == 1.0 {
        return Ok(());
    }
    Err(Error::AdapterWeight {
        weight: active.weight,
        reason: "it must be 1 for an adapter that replaces whole tensors",
    })
}

fn replace(
    slot: &mut Option<Arc<[f32]>>,
    tensor: &Tensor,
    spec: &ModuleSpec,
    what: &'static str,
) -> Result<()> {
    if slot.is_some() {
        return Err(Error::ReplacedTwice {
            module: spec.name.clone(),
            tensor: what,
        });
    }
    *slot = Some(tensor.values.clone());
    Ok(())
}

/// A tensor of the adapter in the shape that the module implies.
fn take<'a>(adapter: &'a Adapter, spec: &ModuleSpec, part: Part, shape: &[usize]) -> Result<&'a Tensor> {
    let Some((name, tensor)) = adapter.tensor(&spec.name, part) else {
        let suffix = match part {
            Part::A => "lora_A.weight",
            Part::B => "lora_B.weight",
            Part::BBias => "lora_B.bias",
            Part::Magnitude => "lora_magnitude_vector",
            Part::Weight => "weight",
            Part::Bias => "bias",
        };
        let tensor = format!("base_model.model.{}.{suffix}", spec.name);
        return Err(Error::MissingTensor {
            module: spec.name.clone(),
            tensor,
        });
    };
    if tensor.shape != shape {
        return Err(Error::TensorShape {
            tensor: name.to_owned(),
            expected: shape.to_vec(),
            found: tensor.shape.clone(),
        });
    }
    Ok(tensor)
}

fn transpose(values: &[f32], rows: usize, columns: usize) -> Arc<[f32]> {
    (0..rows * columns)
        .map(|i| values[(i % rows) * columns + i / rows])
        .collect()
}

pub(crate) fn check_length(what: &'static str, expected: usize, found: usize) -> Result<()> {
    if expected == found {
        Ok(())
    } else {
        Err(Error::Length {
            what,
            expected,
            found,
        })
    }
}
