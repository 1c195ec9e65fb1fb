//! Adapters on the GPU: merged from a pristine copy, in place, into the storage that graphs read.
//!
//! ```text
//!   served  qkv [ q rows | k rows | v rows ]   ◀── merge kernel ── pristine copy of the adapted rows, A, B
//!           gate_up [ gate | up ]                                  (device, page-locked host memory, or the file)
//! ```
//!
//! **Invariants.** A module's pristine copy is taken before its served rows are first written, and is only read from
//! then on. Addresses never change, so captured graphs compute with the new weights at their next replay. A refresh that
//! fails runs the former plans again, which gives the former bits.
//!
//! **What may surprise.** What is not targeted by any adapter is held once. With the pristine copy on the device all
//! modules are merged by one launch; with the other two the weights of one layer at a time go through a buffer on the
//! device.

use std::collections::BTreeMap;
use std::time::Instant;

use cuda_graphs::{Compiler, DeviceBuffer, DeviceSlice, PinnedBuffer, Stream};
use half::bf16;
use lora_merge::cuda::{MergeKernels, MergePlan, MergeTarget};
use lora_merge::{
    ActiveAdapter, MemoryReport, MergeOutcome, ModuleUpdate, PolicyVersion, RefreshStep, resolve,
};

use super::CudaBackend;
use super::weights::{DeviceWeights, projection_rows};
use crate::adapters::{IN_FOUR_BITS, base_policy};
use crate::digest::{Parameter, Values, digest};
use crate::launch::FourBitBuffer;
use crate::{
    AdapterReport, Error, MergeMode, PristineCopy, Projection, Qwen3Config, Result, Weights, modules,
};

/// A module's pristine weight.
#[derive(Debug)]
enum Pristine {
    Device(DeviceBuffer<bf16>),
    Pinned(PinnedBuffer<bf16>),
    File,
}

/// Modules that are merged by one launch.
#[derive(Debug)]
struct Group {
    modules: Vec<usize>,
    plan: MergePlan,
}

/// The hook that tests use to make a step fail: `true` fails the step.
type FaultHook = Box<dyn FnMut(RefreshStep) -> bool + Send>;

/// What a [`CudaBackend`] knows of its adapters.
pub(super) struct Adapters {
    compiler: Compiler,
    kernels: Option<MergeKernels>,
    place: PristineCopy,
    /// The weights as given, if they lie in a mapped file.
    file: Option<Weights>,
    /// Of every module that was ever adapted.
    pristine: BTreeMap<usize, Pristine>,
    /// One layer's pristine weights on their way to the kernel.
    transit: Option<DeviceBuffer<bf16>>,
    groups: Vec<Group>,
    /// Whether each adapted module differs from the base.
    differs: BTreeMap<usize, bool>,
    version: PolicyVersion,
    hook: Option<FaultHook>,
}

impl std::fmt::Debug for Adapters {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Adapters")
            .field("place", &self.place)
            .field("version", &self.version)
            .field("copied", &self.pristine.len())
            .finish_non_exhaustive()
    }
}

/// A module's rows of the storage that is served.
fn served<'a>(
    weights: &'a DeviceWeights,
    config: &Qwen3Config,
    module: usize,
) -> Result<DeviceSlice<'a, bf16>> {
    let n = Projection::ALL.len();
    let Some(layer) = weights.layers.get(module / n) else {
        return Ok(weights.head().as_slice());
    };
    let projection = Projection::ALL[module % n];
    let rows = projection_rows(config, projection);
    let cols = config.projection_shape(projection)[1];
    Ok(layer
        .matrix(projection.fused())
        .slice(rows.start * cols..rows.end * cols)?)
}

impl Adapters {
    pub(super) fn new(compiler: &Compiler, weights: Option<&Weights>) -> Self {
        Self {
            compiler: compiler.clone(),
            kernels: None,
            place: PristineCopy::default(),
            // Cloning shares the mapped bytes.
            file: weights.filter(|w| w.embed_tokens.is_mapped()).cloned(),
            pristine: BTreeMap::new(),
            transit: None,
            groups: Vec::new(),
            differs: BTreeMap::new(),
            version: base_policy(),
            hook: None,
        }
    }

    fn step(&mut self, step: RefreshStep) -> Result<()> {
        if self.hook.as_mut().is_some_and(|hook| hook(step)) {
            let step = format!("{step:?}");
            return Err(lora_merge::Error::Injected { step }.into());
        }
        Ok(())
    }

    /// Takes the pristine copy of a module whose served rows were never written.
    fn copy(&mut self, stream: &Stream, module: usize, from: DeviceSlice<'_, bf16>) -> Result<()> {
        if self.pristine.contains_key(&module) {
            return Ok(());
        }
        self.step(RefreshStep::Allocate(module))?;
        let copy = match self.place {
            PristineCopy::Device => {
                let copy = DeviceBuffer::zeroed(stream.device(), from.len())?;
                stream.copy(&copy, from)?;
                Pristine::Device(copy)
            }
            PristineCopy::Pinned => {
                let copy = PinnedBuffer::zeroed(stream.device(), from.len())?;
                stream.download_async(copy.as_slice(), from)?;
                Pristine::Pinned(copy)
            }
            PristineCopy::File => {
                let lies_there = self.file.as_ref().and_then(|w| w.module(module));
                if !lies_there.is_some_and(|m| m.is_mapped() && m.data().len() == from.len()) {
                    return Err(Error::Option {
                        option: "pristine",
                        problem: "is `file`, but these weights do not lie in a file as bf16".into(),
                    });
                }
                Pristine::File
            }
        };
        // A copy that is under way must have ended before anything counts on it.
        stream.synchronize()?;
        self.pristine.insert(module, copy);
        Ok(())
    }

    /// Queues the copy of a module's pristine weight to the device.
    fn fetch(&self, stream: &Stream, module: usize, to: DeviceSlice<'_, bf16>) -> Result<()> {
        match self.pristine.get(&module) {
            Some(Pristine::Device(copy)) => stream.copy(to, copy)?,
            Some(Pristine::Pinned(copy)) => stream.upload_async(to, copy.as_slice())?,
            Some(Pristine::File) => {
                let matrix = self.file.as_ref().and_then(|w| w.module(module));
                stream.upload(to, matrix.map_or(&[], |m| m.data()))?;
            }
            None => {}
        }
        Ok(())
    }

    /// Where the kernel finds the pristine weights of a group and writes the merged ones. Fills the transit buffer if the
    /// copies are not on the device and `fill` is set.
    fn targets<'a>(
        &'a self,
        stream: &Stream,
        config: &Qwen3Config,
        weights: &'a DeviceWeights,
        members: &[usize],
        fill: bool,
    ) -> Result<Vec<MergeTarget<'a>>> {
        let mut targets = Vec::with_capacity(members.len());
        let mut at = 0;
        for &module in members {
            let merged = served(weights, config, module)?;
            let pristine = match (self.pristine.get(&module), &self.transit) {
                (Some(Pristine::Device(copy)), _) => copy.as_slice(),
                (_, Some(transit)) => {
                    let place = transit.slice(at..at + merged.len())?;
                    at += merged.len();
                    if fill {
                        self.fetch(stream, module, place)?;
                    }
                    place
                }
                (_, None) => {
                    return Err(Error::Option {
                        option: "pristine",
                        problem: "has no buffer on the device".into(),
                    });
                }
            };
            targets.push(MergeTarget { pristine, merged });
        }
        Ok(targets)
    }

    /// Queues the merge of every group, and the base for `restored` modules.
    fn run(
        &mut self,
        stream: &Stream,
        config: &Qwen3Config,
        weights: &DeviceWeights,
        groups: &[Group],
        restored: &[usize],
        may_fail: bool,
    ) -> Result<()> {
        let Some(kernels) = self.kernels.clone() else {
            return Ok(());
        };
        for &module in restored {
            if may_fail {
                self.step(RefreshStep::Commit(module))?;
            }
            self.fetch(stream, module, served(weights, config, module)?)?;
        }
        for group in groups {
            if may_fail {
                self.step(RefreshStep::Commit(group.modules.first().copied().unwrap_or(0)))?;
            }
            let targets = self.targets(stream, config, weights, &group.modules, true)?;
            group.plan.run(&kernels, stream, &targets)?;
        }
        Ok(())
    }
}

/// How modules are cut into launches: all at once, or layer by layer through the transit buffer.
fn cut(place: PristineCopy, members: &[usize]) -> Vec<Vec<usize>> {
    match place {
        PristineCopy::Device => vec![members.to_vec()],
        PristineCopy::Pinned | PristineCopy::File => {
            let mut layers: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
            for &module in members {
                layers
                    .entry(module / Projection::ALL.len())
                    .or_default()
                    .push(module);
            }
            layers.into_values().collect()
        }
    }
}

impl CudaBackend {
    /// Chooses where pristine copies of adapted weights live; for the time before the first adapter. Panics: none.
    ///
    /// # Errors
    /// [`Error::Option`] once a copy exists.
    pub fn set_pristine_copy(&mut self, place: PristineCopy) -> Result<()> {
        if !self.adapters.pristine.is_empty() && place != self.adapters.place {
            return Err(Error::Option {
                option: "pristine",
                problem: "cannot change once an adapter was served".into(),
            });
        }
        self.adapters.place = place;
        Ok(())
    }

    /// Sets a hook that is asked before every step of a refresh whether the step shall fail, for tests of what happens
    /// then. Panics: none.
    pub fn set_fault_hook(&mut self, hook: Option<Box<dyn FnMut(RefreshStep) -> bool + Send>>) {
        self.adapters.hook = hook;
    }

    pub(super) fn policy_in_force(&self) -> PolicyVersion {
        self.adapters.version
    }

    pub(super) fn set_policy_version(&mut self, version: PolicyVersion) {
        self.adapters.version = version;
    }

    pub(super) fn compiler(&self) -> &Compiler {
        &self.adapters.compiler
    }

    /// Whether any served weight holds an adapter.
    pub(super) fn adapters_are_merged(&self) -> bool {
        !self.adapters.differs.is_empty()
    }

    /// The fused matrix in 4 bits that a module is part of, and its rows.
    fn four_bit_module(&self, module: usize) -> Option<(&FourBitBuffer, std::ops::Range<usize>)> {
        let n = Projection::ALL.len();
        let layer = self.weights.layers.get(module / n)?;
        let projection = Projection::ALL[module % n];
        let matrix = layer.four_bit(projection.fused())?;
        Some((matrix, projection_rows(&self.config, projection)))
    }

    /// The pristine values of a module, `[out, in]`; of one in 4 bits, dequantised.
    pub(super) fn base_values(&self, module: usize) -> Result<Vec<bf16>> {
        if let (Some((matrix, rows)), Some(four_bit)) = (self.four_bit_module(module), &self.four_bit) {
            let values = four_bit.dequantized(&self.stream, matrix)?;
            let values = values.slice(rows.start * matrix.cols()..rows.end * matrix.cols())?;
            return Ok(self.stream.download(values)?);
        }
        Ok(match self.adapters.pristine.get(&module) {
            Some(Pristine::Device(copy)) => self.stream.download(copy)?,
            Some(Pristine::Pinned(copy)) => copy.to_vec(),
            Some(Pristine::File) => {
                let matrix = self.adapters.file.as_ref().and_then(|w| w.module(module));
                matrix.map_or(Vec::new(), |m| m.data().to_vec())
            }
            None => self
                .stream
                .download(served(&self.weights, &self.config, module)?)?,
        })
    }

    pub(super) fn merge_adapters(
        &mut self,
        active: &[ActiveAdapter],
        mode: MergeMode,
    ) -> Result<AdapterReport> {
        let start = Instant::now();
        self.adapters.step(RefreshStep::Resolve)?;
        let specs = modules(&self.config);
        let resolved = resolve(active, &specs)?;
        let updates: Vec<(usize, &ModuleUpdate)> = resolved
            .updates()
            .iter()
            .enumerate()
            .filter_map(|(module, update)| Some((module, update.as_ref()?)))
            .collect();
        for &(module, update) in &updates {
            let refuse = |field, reason| {
                let module = specs[module].name.clone();
                Err(lora_merge::Error::Module {
                    module,
                    field,
                    reason,
                }
                .into())
            };
            if self.four_bit_module(module).is_some() {
                return refuse("merge", IN_FOUR_BITS);
            }
            if update.touches_bias() {
                return refuse("lora_bias", "biases are not added on a GPU so far; use the CPU");
            }
            if module + 1 == specs.len() && self.weights.is_tied() {
                return refuse(
                    "target_modules",
                    "the head is tied to the embedding, and has no storage of its own on a GPU; use the CPU",
                );
            }
        }
        let members: Vec<usize> = updates.iter().map(|(module, _)| *module).collect();
        let before: Vec<usize> = self.adapters.differs.keys().copied().collect();
        let restored: Vec<usize> = before.iter().filter(|m| !members.contains(m)).copied().collect();

        // Everything that can fail without touching what is served.
        let stream = self.stream.clone();
        if self.adapters.kernels.is_none() && !members.is_empty() {
            let kernels = MergeKernels::load(&self.adapters.compiler, stream.device())?;
            self.adapters.kernels = Some(kernels);
        }
        for &module in &members {
            let from = served(&self.weights, &self.config, module)?;
            self.adapters.copy(&stream, module, from)?;
        }
        let cuts = cut(self.adapters.place, &members);
        self.reserve_transit(&cuts)?;
        let groups = self.plan(&stream, &cuts, &specs, &updates)?;

        // From here on served weights are written.
        let writing = Instant::now();
        let (config, weights) = (&self.config, &self.weights);
        let outcomes = self
            .adapters
            .run(&stream, config, weights, &groups, &restored, true)
            .and_then(|()| outcomes(&stream, &groups))
            .and_then(|outcomes| self.adapters.step(RefreshStep::Publish).map(|()| outcomes));
        let outcomes = match outcomes {
            Ok(outcomes) => outcomes,
            Err(error) => {
                let added: Vec<usize> = members.iter().filter(|m| !before.contains(m)).copied().collect();
                let former = std::mem::take(&mut self.adapters.groups);
                let put_back = self
                    .adapters
                    .run(&stream, config, weights, &former, &added, false);
                self.adapters.groups = former;
                if let Err(lost) = put_back.and_then(|()| Ok(stream.synchronize()?)) {
                    tracing::error!(%lost, "the former policy could not be put back");
                }
                return Err(error);
            }
        };

        let merge_elapsed = writing.elapsed();
        let differs: BTreeMap<usize, bool> =
            outcomes.iter().map(|(m, o)| (*m, o.differs_from_base)).collect();
        let sha256 = resolved.digest();
        let was = |module: &usize| self.adapters.differs.get(module).copied().unwrap_or(false);
        let changed = match sha256 == self.adapters.version.sha256 {
            true => 0,
            false => {
                let moved = members.iter().filter(|m| was(m) || differs.get(m) == Some(&true));
                moved.count() + restored.iter().filter(|m| was(m)).count()
            }
        };
        self.adapters.groups = groups;
        self.adapters.differs = differs;
        self.drop_unmerged()?;
        self.adapters.version = PolicyVersion {
            number: self.adapters.version.number + 1,
            sha256,
        };
        Ok(AdapterReport {
            version: self.adapters.version,
            mode,
            adapted_modules: updates.len(),
            warnings: resolved.warnings().to_vec(),
            changed_modules: changed,
            differs_from_base: self.adapters.differs.values().any(|d| *d),
            recomputed: outcomes.iter().map(|(_, o)| o.recomputed).sum(),
            memory: self.adapter_memory()?,
            merge_elapsed,
            elapsed: start.elapsed(),
        })
    }

    /// The buffer for pristine weights on their way to the kernel, large enough for the largest launch.
    fn reserve_transit(&mut self, cuts: &[Vec<usize>]) -> Result<()> {
        if self.adapters.place == PristineCopy::Device {
            return Ok(());
        }
        let mut needed = 0;
        for members in cuts {
            let mut sum = 0;
            for &module in members {
                sum += served(&self.weights, &self.config, module)?.len();
            }
            needed = needed.max(sum);
        }
        if self.adapters.transit.as_ref().is_none_or(|t| t.len() < needed) {
            let transit = DeviceBuffer::zeroed(self.stream.device(), needed)?;
            // Work that reads the old one has ended: the last refresh waited for it.
            self.adapters.transit = Some(transit);
        }
        Ok(())
    }

    /// Uploads what the kernel needs, and computes DoRA's norms.
    fn plan(
        &mut self,
        stream: &Stream,
        cuts: &[Vec<usize>],
        specs: &[lora_merge::ModuleSpec],
        updates: &[(usize, &ModuleUpdate)],
    ) -> Result<Vec<Group>> {
        let updates: BTreeMap<usize, &ModuleUpdate> = updates.iter().copied().collect();
        let mut groups = Vec::with_capacity(cuts.len());
        for members in cuts.iter().filter(|members| !members.is_empty()) {
            self.adapters.step(RefreshStep::Prepare(members[0]))?;
            let of_group: Vec<(&str, &ModuleUpdate)> = members
                .iter()
                .filter_map(|m| Some((specs[*m].name.as_str(), *updates.get(m)?)))
                .collect();
            let needs_weights = |u: &ModuleUpdate| u.terms().iter().any(|t| t.magnitude.is_some());
            let fill = of_group.iter().any(|(_, u)| needs_weights(u));
            let targets = self
                .adapters
                .targets(stream, &self.config, &self.weights, members, fill)?;
            let Some(kernels) = &self.adapters.kernels else {
                break;
            };
            let plan = MergePlan::new(kernels, stream, &of_group, &targets)?;
            groups.push(Group {
                modules: members.clone(),
                plan,
            });
        }
        Ok(groups)
    }

    /// Bytes of the pristine copies and of what is merged.
    fn adapter_memory(&self) -> Result<MemoryReport> {
        let mut report = MemoryReport::default();
        let specs = modules(&self.config);
        report.modules = specs.len();
        report.merged_modules = self.adapters.pristine.len();
        report.weight_bytes = specs.iter().map(|s| 2 * s.elements()).sum();
        for (module, copy) in &self.adapters.pristine {
            let bytes = 2 * served(&self.weights, &self.config, *module)?.len();
            report.merged_bytes += bytes;
            if !matches!(copy, Pristine::File) {
                report.pristine_bytes += bytes;
            }
        }
        Ok(report)
    }

    /// Digest over the base's parameters or, with `as_served`, over those that steps are computed with.
    pub(super) fn sha256(&self, as_served: bool) -> Result<[u8; 32]> {
        let (stream, weights) = (&self.stream, &self.weights);
        let norm = |values: &DeviceBuffer<f32>| -> Result<Values<'static>> {
            Ok(Values::Norm(stream.download(values)?.into()))
        };
        let n_projections = weights.layers.len() * Projection::ALL.len();
        digest(&self.config, |parameter| match parameter {
            Parameter::Embedding => Ok(Values::Matrix(stream.download(&weights.embed)?.into())),
            Parameter::FinalNorm => norm(&weights.norm),
            Parameter::InputNorm(layer) => norm(&weights.layers[layer].input_norm),
            Parameter::PostAttentionNorm(layer) => norm(&weights.layers[layer].post_attention_norm),
            Parameter::QueryNorm(layer) => norm(&weights.layers[layer].q_norm),
            Parameter::KeyNorm(layer) => norm(&weights.layers[layer].k_norm),
            Parameter::Bias(_) => Ok(Values::Absent),
            Parameter::Weight(module) if module == n_projections && weights.is_tied() => Ok(Values::Absent),
            Parameter::Weight(module) => {
                let values = match self.adapters.pristine.get(&module) {
                    _ if self.four_bit_module(module).is_some() => self.base_values(module)?,
                    Some(Pristine::Device(copy)) if !as_served => stream.download(copy)?,
                    Some(Pristine::Pinned(copy)) if !as_served => copy.to_vec(),
                    Some(Pristine::File) if !as_served => {
                        let matrix = self.adapters.file.as_ref().and_then(|w| w.module(module));
                        matrix.map_or(Vec::new(), |m| m.data().to_vec())
                    }
                    _ => stream.download(served(weights, &self.config, module)?)?,
                };
                Ok(Values::Matrix(values.into()))
            }
        })
    }
}

/// Waits for all groups; what happened to each module.
fn outcomes(stream: &Stream, groups: &[Group]) -> Result<Vec<(usize, MergeOutcome)>> {
    let mut all = Vec::new();
    for group in groups {
        all.extend(group.modules.iter().copied().zip(group.plan.outcomes(stream)?));
    }
    stream.synchronize()?;
    Ok(all)
}

/// `verify_no_drift` over all parameters on the device.
impl lora_merge::DriftSubject for CudaBackend {
    type Error = Error;

    fn base_digest(&mut self) -> Result<[u8; 32]> {
        self.sha256(false)
    }

    fn served_digest(&mut self) -> Result<[u8; 32]> {
        self.sha256(true)
    }

    fn refresh(&mut self, active: &[ActiveAdapter]) -> Result<()> {
        self.merge_adapters(active, MergeMode::Merged).map(|_| ())
    }
}
