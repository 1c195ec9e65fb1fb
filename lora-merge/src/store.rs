//! Pristine and merged weights side by side, and the refresh between them.

mod report;

use crate::merge::{MergeOutcome, RowFactors, merge_with};
use crate::resolve::check_length;
use crate::{
    ActiveAdapter, Error, ModuleSpec, ModuleUpdate, PolicyVersion, PristineSource, Resolved, Resolver, Result,
};
use half::bf16;
use rayon::prelude::*;
use std::fmt;
use std::time::{Duration, Instant};

pub use report::{MemoryReport, RefreshReport, RefreshStep};

/// The hook that tests use to make a step fail: `true` fails the step.
type FaultHook = Box<dyn FnMut(RefreshStep) -> bool + Send>;

/// What is in force for one module.
#[derive(Default)]
struct Slot {
    /// Merged storage; once allocated it stays where it is.
    merged: Option<Box<[bf16]>>,
    /// The update that `merged` holds; `None` is the pristine weight.
    applied: Option<Applied>,
    bias: Option<Box<[f32]>>,
}

#[derive(Clone)]
struct Applied {
    update: ModuleUpdate,
    factors: RowFactors,
}

/// The pristine weights of a model and the merged ones that are served.
///
/// # Invariants
/// - Pristine weights are only read. A merge always starts from them, never from a merged weight.
/// - Merged storage exists only for modules that some adapter has targeted, and never moves once it exists.
/// - After an error everything served, and the version, are those from before the call.
///
/// ```
/// use half::bf16;
/// use lora_merge::{MergedStore, ModuleSpec, OwnedWeights};
///
/// let weights = vec![bf16::ONE; 6];
/// let mut store = MergedStore::new(vec![ModuleSpec::linear("q_proj", 2, 3)], OwnedWeights::new([weights.clone()]))?;
/// let report = store.refresh(&[])?; // no adapters: the base under a new number
/// assert_eq!((report.version.number, report.adapted_modules), (1, 0));
/// assert!(store.weight(0).is_none_or(|served| served == weights));
/// # Ok::<(), lora_merge::Error>(())
/// ```
pub struct MergedStore<S> {
    resolver: Resolver,
    source: S,
    slots: Vec<Slot>,
    active: Vec<ActiveAdapter>,
    version: PolicyVersion,
    hook: Option<FaultHook>,
}

/// A module's new state, computed but not yet served.
struct Planned {
    module: usize,
    applied: Option<Applied>,
    bias: Option<Box<[f32]>>,
    content: Content,
    outcome: MergeOutcome,
}

/// How a planned weight gets into place.
enum Content {
    /// The weight does not change hands: only the bias is touched.
    Untouched,
    /// Complete, in storage of its own that becomes the module's.
    Fresh(Box<[bf16]>),
    /// Complete, to be exchanged with the merged storage.
    Staged(Box<[bf16]>),
    /// To be merged straight from the pristine slice.
    InPlace,
}

impl<S: PristineSource> MergedStore<S> {
    /// A store that serves the base. Weights that are not in memory are read into merged storage at once.
    ///
    /// # Errors
    /// [`Error::DuplicateModule`], [`Error::Length`], [`Error::Pristine`], [`Error::OutOfMemory`]. Panics: none.
    pub fn new(specs: Vec<ModuleSpec>, source: S) -> Result<Self> {
        let mut resolver = Resolver::new(specs)?;
        let mut slots = Vec::with_capacity(resolver.specs().len());
        for (module, spec) in resolver.specs().iter().enumerate() {
            let mut slot = Slot::default();
            match source.slice(module) {
                _ if source.refusal(module).is_some() => {}
                Some(slice) => check_length("a pristine weight", spec.elements(), slice.len())?,
                None => {
                    let mut storage = allocate(spec)?;
                    read(&source, spec, module, &mut storage)?;
                    slot.merged = Some(storage);
                }
            }
            if let Some(bias) = source.bias(module) {
                check_length("a base bias", spec.out_features, bias.len())?;
            }
            slots.push(slot);
        }
        let sha256 = resolver.resolve(&[])?.digest();
        Ok(Self {
            resolver,
            source,
            slots,
            active: Vec::new(),
            version: PolicyVersion { number: 0, sha256 },
            hook: None,
        })
    }

    /// The modules.
    pub fn specs(&self) -> &[ModuleSpec] {
        self.resolver.specs()
    }

    /// What a set of adapters does to the modules, as [`MergedStore::refresh`] would find it; changes nothing that is
    /// served.
    ///
    /// # Errors
    /// Those of [`crate::resolve`]. Panics: none.
    pub fn resolve(&mut self, active: &[ActiveAdapter]) -> Result<Resolved> {
        self.resolver.resolve(active)
    }

    /// The pristine weights.
    pub fn source(&self) -> &S {
        &self.source
    }

    /// The adapters in force.
    pub fn active(&self) -> &[ActiveAdapter] {
        &self.active
    }

    /// The policy in force.
    pub fn version(&self) -> PolicyVersion {
        self.version
    }

    /// Index of the module with this name.
    pub fn module(&self, name: &str) -> Option<usize> {
        self.resolver.specs().iter().position(|s| s.name == name)
    }

    /// The weight to compute with, row-major as stored: merged where an adapter has ever targeted the module,
    /// pristine elsewhere. `None` if there is no such module, or it has no weight that could be merged into.
    pub fn weight(&self, module: usize) -> Option<&[bf16]> {
        match &self.slots.get(module)?.merged {
            Some(merged) => Some(merged),
            None => self.source.slice(module),
        }
    }

    /// The bias `[out]` to compute with: the one that adapters made, else the base's, else none.
    pub fn bias(&self, module: usize) -> Option<&[f32]> {
        match &self.slots.get(module)?.bias {
            Some(bias) => Some(bias),
            None => self.source.bias(module),
        }
    }

    /// Allocates merged storage for modules ahead of the first refresh, so that their addresses never change.
    ///
    /// # Errors
    /// [`Error::NoSuchModule`], [`Error::OutOfMemory`]; what was allocated before stays. Panics: none.
    pub fn reserve(&mut self, modules: impl IntoIterator<Item = usize>) -> Result<()> {
        for module in modules {
            let spec = self
                .resolver
                .specs()
                .get(module)
                .ok_or_else(|| Error::NoSuchModule {
                    module: module.to_string(),
                })?;
            if self.slots[module].merged.is_none() && self.source.refusal(module).is_none() {
                let mut storage = allocate(spec)?;
                pristine(&self.source, spec, module, &mut storage)?;
                self.slots[module].merged = Some(storage);
            }
        }
        Ok(())
    }

    /// Makes `active` the policy: merges every module it touches from the pristine weights, puts every other module
    /// back to pristine, and raises the version. The order of `active` does not matter; an empty list is the base.
    ///
    /// # Errors
    /// Those of [`crate::resolve`], [`Error::ZeroNorm`], [`Error::MergedNotFinite`], [`Error::Pristine`],
    /// [`Error::OutOfMemory`], [`Error::Injected`]. The previous policy is then fully in force. Panics: none.
    pub fn refresh(&mut self, active: &[ActiveAdapter]) -> Result<RefreshReport> {
        let start = Instant::now();
        self.step(RefreshStep::Resolve)?;
        let resolved = self.resolve(active)?;
        let mut plan = self.plan(&resolved)?;
        self.commit(&mut plan)?;
        let mut report = RefreshReport {
            version: PolicyVersion {
                number: self.version.number + 1,
                sha256: resolved.digest(),
            },
            adapted_modules: resolved.updates().iter().flatten().count(),
            restored_modules: 0,
            changed_modules: 0,
            differs_from_base: false,
            recomputed: 0,
            elapsed: Duration::ZERO,
            warnings: resolved.warnings().to_vec(),
        };
        for planned in plan {
            let slot = &mut self.slots[planned.module];
            if let Content::Fresh(storage) = planned.content {
                slot.merged = Some(storage);
            }
            let restored = planned.applied.is_none() && slot.applied.is_some();
            let bias_changed = slot.bias != planned.bias;
            let base_bias = self.source.bias(planned.module);
            let bias_differs = planned.bias.as_deref().is_some_and(|b| match base_bias {
                Some(base) => b != base,
                None => b.iter().any(|v| *v != 0.0),
            });
            report.restored_modules += usize::from(restored);
            report.changed_modules += usize::from(planned.outcome.changed || bias_changed);
            report.differs_from_base |= planned.outcome.differs_from_base || bias_differs;
            report.recomputed += planned.outcome.recomputed;
            // A bias vector keeps its address while its length stays.
            match (&mut slot.bias, planned.bias) {
                (Some(old), Some(new)) if old.len() == new.len() => old.copy_from_slice(&new),
                (old, new) => *old = new,
            }
            slot.applied = planned.applied;
        }
        self.version = report.version;
        self.active = active.to_vec();
        report.elapsed = start.elapsed();
        Ok(report)
    }

    /// Everything that can fail without touching what is served.
    fn plan(&mut self, resolved: &Resolved) -> Result<Vec<Planned>> {
        let mut plan = Vec::new();
        for (module, update) in resolved.updates().iter().enumerate() {
            let slot = &self.slots[module];
            if update.is_none() && slot.applied.is_none() && slot.bias.is_none() {
                continue;
            }
            let weight = update.as_ref().filter(|u| u.touches_weight());
            if let (Some(_), Some(reason)) = (weight, self.source.refusal(module)) {
                return Err(Error::Module {
                    module: self.resolver.specs()[module].name.clone(),
                    field: "merge",
                    reason,
                });
            }
            let (merged, was_applied) = (slot.merged.is_some(), slot.applied.is_some());
            let named = |error: Error| error.in_module(&self.resolver.specs()[module].name);
            let bias = match update {
                Some(update) => update.bias(self.source.bias(module)).map_err(named)?,
                None => None,
            };
            let mut planned = Planned {
                module,
                applied: None,
                bias: bias.map(Vec::into_boxed_slice),
                content: Content::Untouched,
                outcome: MergeOutcome::default(),
            };
            if weight.is_some() || was_applied {
                let mut scratch = None;
                let reread = self.source.slice(module).is_none();
                if reread {
                    self.step(RefreshStep::Read(module))?;
                    let mut w0 = allocate(&self.resolver.specs()[module])?;
                    read(&self.source, &self.resolver.specs()[module], module, &mut w0)?;
                    scratch = Some(w0);
                }
                if let Some(update) = weight {
                    self.step(RefreshStep::Prepare(module))?;
                    let w0 = scratch.as_deref().or(self.source.slice(module)).unwrap_or(&[]);
                    let named = |error: Error| error.in_module(&self.resolver.specs()[module].name);
                    let factors = RowFactors::new(w0, update).map_err(named)?;
                    planned.applied = Some(Applied {
                        update: update.clone(),
                        factors,
                    });
                }
                planned.content = if merged && !reread {
                    Content::InPlace
                } else {
                    self.step(RefreshStep::Allocate(module))?;
                    self.complete(&mut planned, scratch, merged)?
                };
            }
            plan.push(planned);
        }
        Ok(plan)
    }

    /// Computes a planned weight in storage of its own.
    fn complete(&self, planned: &mut Planned, w0: Option<Box<[bf16]>>, merged: bool) -> Result<Content> {
        let module = planned.module;
        let spec = &self.resolver.specs()[module];
        let storage = match &planned.applied {
            Some(applied) => {
                let mut storage = allocate(spec)?;
                let w0 = w0.as_deref().or(self.source.slice(module)).unwrap_or(&[]);
                let outcome = merge_with(w0, &applied.update, &applied.factors, &mut storage);
                planned.outcome = outcome.map_err(|e| e.in_module(&spec.name))?;
                storage
            }
            // Only a weight that is read again comes here without an update: it goes back to what was read.
            None => w0.map_or_else(|| allocate(spec), Ok)?,
        };
        planned.outcome.changed = match &self.slots[module].merged {
            Some(old) => differ(old, &storage),
            None => planned.outcome.differs_from_base,
        };
        Ok(if merged {
            Content::Staged(storage)
        } else {
            Content::Fresh(storage)
        })
    }

    /// Writes the planned weights; on an error puts back what was written.
    fn commit(&mut self, plan: &mut [Planned]) -> Result<()> {
        let mut result = Ok(());
        let mut written = 0;
        for planned in plan.iter_mut() {
            result = self.step(RefreshStep::Commit(planned.module)).and_then(|()| {
                written += 1;
                self.write(planned)
            });
            if result.is_err() {
                break;
            }
        }
        let result = result.and_then(|()| self.step(RefreshStep::Publish));
        if result.is_err() {
            for planned in &mut plan[..written] {
                self.put_back(planned);
            }
        }
        result
    }

    fn write(&mut self, planned: &mut Planned) -> Result<()> {
        let module = planned.module;
        let slot = &mut self.slots[module];
        let Some(merged) = slot.merged.as_deref_mut() else {
            return Ok(());
        };
        match &mut planned.content {
            Content::Untouched | Content::Fresh(_) => {}
            Content::Staged(storage) => merged.swap_with_slice(storage),
            Content::InPlace => {
                let w0 = self.source.slice(module).unwrap_or(&[]);
                planned.outcome = match &planned.applied {
                    Some(applied) => merge_with(w0, &applied.update, &applied.factors, merged)
                        .map_err(|e| e.in_module(&self.resolver.specs()[module].name))?,
                    None => copy(w0, merged),
                };
            }
        }
        Ok(())
    }

    /// Undoes [`Self::write`]: the former weight is computed again, which gives the same bits.
    fn put_back(&mut self, planned: &mut Planned) {
        let module = planned.module;
        let slot = &mut self.slots[module];
        let Some(merged) = slot.merged.as_deref_mut() else {
            return;
        };
        match &mut planned.content {
            Content::Untouched | Content::Fresh(_) => {}
            Content::Staged(storage) => merged.swap_with_slice(storage),
            Content::InPlace => {
                let w0 = self.source.slice(module).unwrap_or(&[]);
                match &slot.applied {
                    // It succeeded before with the same inputs, and has no other way to fail.
                    Some(old) => drop(merge_with(w0, &old.update, &old.factors, merged)),
                    None => drop(copy(w0, merged)),
                }
            }
        }
    }

    /// Bytes of the two copies.
    pub fn memory(&self) -> MemoryReport {
        let merged = self.slots.iter().filter_map(|s| s.merged.as_deref());
        MemoryReport {
            modules: self.resolver.specs().len(),
            merged_modules: merged.clone().count(),
            weight_bytes: self
                .resolver
                .specs()
                .iter()
                .fold(0, |sum, s| s.elements().saturating_mul(2).saturating_add(sum)),
            pristine_bytes: (0..self.resolver.specs().len())
                .map(|m| self.source.resident_bytes(m))
                .sum(),
            merged_bytes: merged.map(size_of_val).sum(),
        }
    }

    /// Sets a hook that is asked before every step of a refresh whether the step shall fail. For tests of what
    /// happens then. Panics: none.
    pub fn set_fault_hook(&mut self, hook: Option<Box<dyn FnMut(RefreshStep) -> bool + Send>>) {
        self.hook = hook;
    }

    fn step(&mut self, step: RefreshStep) -> Result<()> {
        if self.hook.as_mut().is_some_and(|hook| hook(step)) {
            return Err(Error::Injected {
                step: format!("{step:?}"),
            });
        }
        Ok(())
    }
}

impl<S> fmt::Debug for MergedStore<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let merged = self.slots.iter().filter(|s| s.merged.is_some()).count();
        f.debug_struct("MergedStore")
            .field("version", &self.version)
            .field("modules", &self.resolver.specs().len())
            .field("merged", &merged)
            .finish_non_exhaustive()
    }
}

fn allocate(spec: &ModuleSpec) -> Result<Box<[bf16]>> {
    let mut storage = Vec::new();
    let fail = |_| Error::OutOfMemory {
        module: spec.name.clone(),
        bytes: spec.elements().saturating_mul(2),
    };
    storage.try_reserve_exact(spec.elements()).map_err(fail)?;
    storage.resize(spec.elements(), bf16::ZERO);
    Ok(storage.into_boxed_slice())
}

fn read<S: PristineSource>(source: &S, spec: &ModuleSpec, module: usize, out: &mut [bf16]) -> Result<()> {
    source.read(module, out).map_err(|reason| Error::Pristine {
        module: spec.name.clone(),
        reason,
    })
}

/// The pristine weight, from memory or read.
fn pristine<S: PristineSource>(source: &S, spec: &ModuleSpec, module: usize, out: &mut [bf16]) -> Result<()> {
    match source.slice(module) {
        Some(slice) => {
            copy(slice, out);
            Ok(())
        }
        None => read(source, spec, module, out),
    }
}

/// Elements per task of a copy or comparison.
const CHUNK: usize = 1 << 16;

fn copy(from: &[bf16], to: &mut [bf16]) -> MergeOutcome {
    let chunks = to.par_chunks_mut(CHUNK).zip(from.par_chunks(CHUNK));
    let changed = chunks.map(|(to, from)| {
        let changed = differ_here(to, from);
        to.copy_from_slice(from);
        changed
    });
    MergeOutcome {
        changed: changed.reduce(|| false, |a, b| a | b),
        ..MergeOutcome::default()
    }
}

fn differ(a: &[bf16], b: &[bf16]) -> bool {
    a.par_chunks(CHUNK)
        .zip(b.par_chunks(CHUNK))
        .any(|(a, b)| differ_here(a, b))
}

fn differ_here(a: &[bf16], b: &[bf16]) -> bool {
    bytemuck::cast_slice::<bf16, u16>(a) != bytemuck::cast_slice::<bf16, u16>(b)
}
