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
//! **What may surprise.** What is not targeted by any adapter is held once. Some layers at a time are packed, uploaded and
//! merged, each while the next ones are packed; where the pristine copy is not on the device, the weights of one layer at
//! a time go through a buffer there. An adapter on a tied head gives the head storage of its own, and one with biases adds
//! a small kernel behind the products: both change what a step launches, so the graphs are captured again, once.

mod groups;

use std::collections::BTreeMap;
use std::time::Instant;

use cuda_graphs::{Compiler, DeviceBuffer, DeviceSlice, PinnedBuffer, Stream};
use half::bf16;
use lora_merge::cuda::{MergeKernels, MergeTarget, MergeWorkspace};
use lora_merge::{
    ActiveAdapter, MemoryReport, ModuleSpec, ModuleUpdate, PolicyVersion, RefreshStep, Resolver,
};

use super::CudaBackend;
use super::biases::{self, Biases};
use super::weights::{DeviceWeights, projection_rows};
use crate::adapters::{IN_FOUR_BITS, base_policy};
use crate::launch::FourBitBuffer;
use crate::{
    AdapterReport, Error, MergeMode, PristineCopy, Projection, Qwen3Config, Result, Weights, modules,
};
use groups::{Group, Outcomes, cut, outcomes};

/// A module's pristine weight.
#[derive(Debug)]
pub(super) enum Pristine {
    Device(DeviceBuffer<bf16>),
    Pinned(PinnedBuffer<bf16>),
    File,
    /// Of a tied head: the embedding.
    Embedding,
}

/// The hook that tests use to make a step fail: `true` fails the step.
type FaultHook = Box<dyn FnMut(RefreshStep) -> bool + Send>;

/// What a [`CudaBackend`] knows of its adapters.
pub(super) struct Adapters {
    compiler: Compiler,
    /// The model's modules and what adapters seen before do to them.
    pub(super) resolver: Resolver,
    kernels: Option<(MergeKernels, MergeWorkspace)>,
    place: PristineCopy,
    /// The weights as given, if they lie in a mapped file.
    pub(super) file: Option<Weights>,
    /// Of every module that was ever adapted.
    pub(super) pristine: BTreeMap<usize, Pristine>,
    /// One layer's pristine weights on their way to the kernel.
    transit: Option<DeviceBuffer<bf16>>,
    groups: Vec<Group>,
    /// Whether each adapted module differs from the base.
    pub(super) differs: BTreeMap<usize, bool>,
    /// The biases in force.
    pub(super) biases: Biases,
    /// Whether the head was ever adapted.
    pub(super) own_head: bool,
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
pub(super) fn served<'a>(
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
    pub(super) fn new(compiler: &Compiler, config: &Qwen3Config, weights: Option<&Weights>) -> Result<Self> {
        Ok(Self {
            compiler: compiler.clone(),
            resolver: Resolver::new(modules(config))?,
            kernels: None,
            place: PristineCopy::default(),
            // Cloning shares the mapped bytes.
            file: weights.filter(|w| w.embed_tokens.is_mapped()).cloned(),
            pristine: BTreeMap::new(),
            transit: None,
            groups: Vec::new(),
            differs: BTreeMap::new(),
            biases: Biases::new(),
            own_head: false,
            version: base_policy(),
            hook: None,
        })
    }

    fn step(&mut self, step: RefreshStep) -> Result<()> {
        if self.hook.as_mut().is_some_and(|hook| hook(step)) {
            let step = format!("{step:?}");
            return Err(lora_merge::Error::Injected { step }.into());
        }
        Ok(())
    }

    /// Takes the pristine copy of a module whose served rows were never written. A tied head's is the embedding.
    fn copy(
        &mut self,
        stream: &Stream,
        module: usize,
        from: DeviceSlice<'_, bf16>,
        tied: bool,
    ) -> Result<()> {
        if self.pristine.contains_key(&module) {
            return Ok(());
        }
        self.step(RefreshStep::Allocate(module))?;
        let copy = match self.place {
            _ if tied => Pristine::Embedding,
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
    fn fetch(
        &self,
        stream: &Stream,
        weights: &DeviceWeights,
        module: usize,
        to: DeviceSlice<'_, bf16>,
    ) -> Result<()> {
        match self.pristine.get(&module) {
            Some(Pristine::Embedding) => stream.copy(to, &weights.embed)?,
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
                (Some(Pristine::Embedding), _) => weights.embed.as_slice(),
                (_, Some(transit)) => {
                    let place = transit.slice(at..at + merged.len())?;
                    at += merged.len();
                    if fill {
                        self.fetch(stream, weights, module, place)?;
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

    /// Queues what makes the present policy again: the merge of every group, the base for `others`, the biases.
    fn put_back(
        &mut self,
        stream: &Stream,
        config: &Qwen3Config,
        weights: &DeviceWeights,
        others: &[usize],
    ) -> Result<()> {
        for &module in others {
            self.fetch(stream, weights, module, served(weights, config, module)?)?;
        }
        let mut groups = std::mem::take(&mut self.groups);
        let run = groups
            .iter_mut()
            .try_for_each(|group| self.merge(stream, config, weights, group));
        self.groups = groups;
        run?;
        biases::write(stream, config, weights, &self.biases)?;
        Ok(stream.synchronize()?)
    }

    /// Queues the merge of a group.
    fn merge(
        &mut self,
        stream: &Stream,
        config: &Qwen3Config,
        weights: &DeviceWeights,
        group: &mut Group,
    ) -> Result<()> {
        let Some((kernels, mut workspace)) = self.kernels.take() else {
            return Ok(());
        };
        let run = self
            .targets(stream, config, weights, &group.modules, true)
            .and_then(|targets| Ok(group.plan.run(&kernels, &mut workspace, stream, &targets)?));
        self.kernels = Some((kernels, workspace));
        run
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
    pub(super) fn four_bit_module(&self, module: usize) -> Option<(&FourBitBuffer, std::ops::Range<usize>)> {
        let n = Projection::ALL.len();
        let layer = self.weights.layers.get(module / n)?;
        let projection = Projection::ALL[module % n];
        let matrix = layer.four_bit(projection.fused())?;
        Some((matrix, projection_rows(&self.config, projection)))
    }

    /// The pristine values of a module, `[out, in]`; of one in 4 bits, dequantised.
    pub(super) fn base_values(&self, module: usize) -> Result<Vec<bf16>> {
        if let (Some((matrix, rows)), Some(four_bit)) = (self.four_bit_module(module), &self.four_bit) {
            return four_bit.values(&self.stream, matrix, rows);
        }
        Ok(match self.adapters.pristine.get(&module) {
            Some(Pristine::Device(copy)) => self.stream.download(copy)?,
            Some(Pristine::Pinned(copy)) => copy.to_vec(),
            Some(Pristine::File) => {
                let matrix = self.adapters.file.as_ref().and_then(|w| w.module(module));
                matrix.map_or(Vec::new(), |m| m.data().to_vec())
            }
            Some(Pristine::Embedding) => self.stream.download(&self.weights.embed)?,
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
        let resolved = self.adapters.resolver.resolve(active)?;
        let specs = self.adapters.resolver.specs().to_vec();
        let updates: Vec<(usize, &ModuleUpdate)> = resolved
            .updates()
            .iter()
            .enumerate()
            .filter_map(|(module, update)| Some((module, update.as_ref()?)))
            .collect();
        if let Some((module, _)) = updates.iter().find(|(m, _)| self.four_bit_module(*m).is_some()) {
            return Err(lora_merge::Error::Module {
                module: specs[*module].name.clone(),
                field: "merge",
                reason: IN_FOUR_BITS,
            }
            .into());
        }
        let members: Vec<usize> = updates.iter().map(|(module, _)| *module).collect();
        let before: Vec<usize> = self.adapters.differs.keys().copied().collect();
        let restored: Vec<usize> = before.iter().filter(|m| !members.contains(m)).copied().collect();

        // Much of what can fail does so without touching what is served.
        let stream = self.stream.clone();
        let biases = biases::of(&updates, &specs)?;
        if self.adapters.kernels.is_none() && !members.is_empty() {
            let kernels = MergeKernels::load(&self.adapters.compiler, stream.device())?;
            self.adapters.kernels = Some((kernels, MergeWorkspace::new(stream.device())?));
        }
        self.make_room(&stream, &members, &biases)?;
        for &module in &members {
            let from = served(&self.weights, &self.config, module)?;
            let tied = module + 1 == specs.len() && self.weights.is_tied();
            self.adapters.copy(&stream, module, from, tied)?;
        }
        let cuts = cut(self.adapters.place, &members, |module| specs[module].elements());
        self.reserve_transit(&cuts)?;

        // From here on served weights are written.
        let writing = Instant::now();
        let (groups, outcomes) = match self.write(&stream, &cuts, &specs, &updates, &restored, &biases) {
            Ok(written) => written,
            Err(error) => {
                let added: Vec<usize> = members.iter().filter(|m| !before.contains(m)).copied().collect();
                let (config, weights) = (&self.config, &self.weights);
                if let Err(lost) = self.adapters.put_back(&stream, config, weights, &added) {
                    tracing::error!(%lost, "the former policy could not be put back");
                }
                return Err(error);
            }
        };

        let merge_elapsed = writing.elapsed();
        let biased = |m: &usize| biases.get(m).is_some_and(|b| b.iter().any(|v| *v != 0.0));
        let differs: BTreeMap<usize, bool> = outcomes
            .iter()
            .map(|(m, o)| (*m, o.differs_from_base || biased(m)))
            .collect();
        let sha256 = resolved.digest();
        let was = |module: &usize| self.adapters.differs.get(module).copied().unwrap_or(false);
        let changed = match sha256 == self.adapters.version.sha256 {
            true => 0,
            false => {
                let moved = members.iter().filter(|m| was(m) || differs.get(m) == Some(&true));
                moved.count() + restored.iter().filter(|m| was(m)).count()
            }
        };
        let former = std::mem::replace(&mut self.adapters.groups, groups);
        if let Some((_, workspace)) = &mut self.adapters.kernels {
            // What the refresh before last left has not been needed.
            workspace.trim();
            former.into_iter().for_each(|group| workspace.recycle(group.plan));
        }
        self.adapters.differs = differs;
        self.adapters.biases = biases;
        self.adapters.own_head |= members.last().is_some_and(|m| m + 1 == specs.len());
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
            policies: vec![sha256],
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

    /// Makes room for what the adapters need besides merged rows. What is new is without effect, but another address or
    /// another kernel in a step: graphs are captured again.
    fn make_room(&mut self, stream: &Stream, members: &[usize], biases: &Biases) -> Result<()> {
        let head = self.config.n_layers * Projection::ALL.len();
        let mut moved = false;
        if members.contains(&head) && self.weights.is_tied() {
            moved |= self.weights.untie(stream)?;
        }
        for &module in biases.keys() {
            moved |= self
                .weights
                .reserve_bias(stream, &self.config, biases::place(&self.config, module))?;
        }
        if moved && self.graphs.is_some() {
            self.capture()?;
        }
        Ok(())
    }

    /// Puts the base into `restored` modules, then packs, uploads and queues group after group, and waits for all. Also
    /// computes DoRA's norms.
    fn write(
        &mut self,
        stream: &Stream,
        cuts: &[Vec<usize>],
        specs: &[ModuleSpec],
        updates: &[(usize, &ModuleUpdate)],
        restored: &[usize],
        biases: &Biases,
    ) -> Result<(Vec<Group>, Outcomes)> {
        let (config, weights, adapters) = (&self.config, &self.weights, &mut self.adapters);
        let updates: BTreeMap<usize, &ModuleUpdate> = updates.iter().copied().collect();
        for &module in restored {
            adapters.step(RefreshStep::Commit(module))?;
            adapters.fetch(stream, weights, module, served(weights, config, module)?)?;
        }
        let cuts: Vec<&Vec<usize>> = cuts.iter().filter(|members| !members.is_empty()).collect();
        let of_groups: Vec<Vec<(&str, &ModuleUpdate)>> = cuts
            .iter()
            .map(|members| {
                let updates = members
                    .iter()
                    .filter_map(|m| Some((specs[*m].name.as_str(), *updates.get(m)?)));
                updates.collect()
            })
            .collect();
        let mut groups = Vec::with_capacity(cuts.len());
        if let Some((kernels, mut workspace)) = adapters.kernels.take() {
            let plans: Vec<_> = of_groups.iter().map(Vec::as_slice).collect();
            let made = workspace.make_plans(&plans, |plans| -> Result<()> {
                for (members, updates) in cuts.iter().zip(&of_groups) {
                    adapters.step(RefreshStep::Prepare(members[0]))?;
                    let needs_weights = |u: &ModuleUpdate| u.terms().iter().any(|t| t.magnitude.is_some());
                    let fill = updates.iter().any(|(_, u)| needs_weights(u));
                    let targets = adapters.targets(stream, config, weights, members, fill)?;
                    let mut plan = plans.next(&kernels, stream, &targets)?;
                    adapters.step(RefreshStep::Commit(members[0]))?;
                    let targets = adapters.targets(stream, config, weights, members, true)?;
                    plan.run(&kernels, plans.workspace(), stream, &targets)?;
                    groups.push(Group {
                        modules: (*members).clone(),
                        plan,
                    });
                }
                Ok(())
            });
            adapters.kernels = Some((kernels, workspace));
            made?;
        }
        if let Some(&module) = biases.keys().chain(adapters.biases.keys()).next() {
            adapters.step(RefreshStep::Commit(module))?;
            biases::write(stream, config, weights, biases)?;
        }
        let outcomes = outcomes(stream, &groups)?;
        adapters.step(RefreshStep::Publish)?;
        Ok((groups, outcomes))
    }

    /// Bytes of the pristine copies and of what is merged.
    fn adapter_memory(&self) -> Result<MemoryReport> {
        let mut report = MemoryReport::default();
        let specs = self.adapters.resolver.specs();
        report.modules = specs.len();
        report.merged_modules = self.adapters.pristine.len();
        report.weight_bytes = specs.iter().map(|s| 2 * s.elements()).sum();
        for (module, copy) in &self.adapters.pristine {
            let bytes = 2 * served(&self.weights, &self.config, *module)?.len();
            report.merged_bytes += bytes;
            if !matches!(copy, Pristine::File | Pristine::Embedding) {
                report.pristine_bytes += bytes;
            }
        }
        Ok(report)
    }
}
