//! Merging on an NVIDIA GPU: one launch for all matrices of a refresh.
//!
//! A [`MergePlan`] holds what a set of adapters does to a list of modules, on the device: making one may fail and
//! touches no weight. [`MergePlan::run`] then writes every merged weight, straight into the storage that is served.
//! The former plan, kept, is the way back: running it again restores the former policy bit for bit.
//!
//! ```text
//! ModuleUpdate ─▶ MergePlan::new ── uploads A, B, scalings; DoRA's row norms ──▶ MergePlan
//!                                                                                  │ run (one launch)
//!   pristine W₀ [rows, columns] ──────────────────────────────────────────────▶ out: a module's rows of the
//!                                                                                fused QKV or gate+up storage
//! ```
//!
//! The bits are those of the CPU's merge: see the kernel's header in `kernels/merge.cu` for how.
//!
//! A module's rows lie together in a fused row-major matrix, so its part of the storage is a plain
//! [`DeviceSlice`], for instance `qkv.slice(q_rows * columns..)`.

pub use crate::launch::kernel_specs;

use crate::launch::{self, DoraArgs, MergeArgs, RANK_STEP, Report, Term};
use crate::{Error, MergeOutcome, ModuleUpdate, Result};
use cuda_graphs::{Compiler, Device, DeviceBuffer, DeviceSlice, Kernel, Stream};
use half::bf16;
use rayon::prelude::*;

/// The compiled kernels of this crate on one device.
#[derive(Clone, Debug)]
pub struct MergeKernels {
    split: Kernel,
    bf16: Kernel,
    dora: Kernel,
}

impl MergeKernels {
    /// Compiles (or takes from the cache) and loads the kernels.
    ///
    /// # Errors
    /// [`Error::Cuda`]. Panics: none.
    pub fn load(compiler: &Compiler, device: &Device) -> Result<Self> {
        let modules = compiler.load_all(device, &kernel_specs())?;
        let kernel = |name: &'static str| {
            let found = modules.iter().find_map(|m| m.kernel(name).ok());
            found.ok_or(Error::Cuda(cuda_graphs::Error::InvalidArgument {
                what: "kernel",
                why: name.to_owned(),
            }))
        };
        Ok(Self {
            split: kernel("merge_split")?,
            bf16: kernel("merge_bf16")?,
            dora: kernel("dora_rows")?,
        })
    }
}

/// Where one module's weights are on the device, both `[rows, columns]` as stored.
///
/// `columns` must be a multiple of 8, and both must begin at a multiple of 16 bytes.
#[derive(Clone, Copy, Debug)]
pub struct MergeTarget<'a> {
    /// The pristine weight; only read.
    pub pristine: DeviceSlice<'a, bf16>,
    /// The merged weight: the module's rows of the storage that is served.
    pub merged: DeviceSlice<'a, bf16>,
}

/// One module of a plan.
#[derive(Debug)]
struct Entry {
    name: String,
    rows: usize,
    columns: usize,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    /// Terms, by their places in the plan's buffers.
    LowRank {
        left: usize,
        right: usize,
        rank: usize,
        terms: usize,
        n_terms: usize,
        gain: Option<usize>,
        exact: bool,
    },
    /// A whole weight.
    Replace { weight: DeviceBuffer<bf16> },
}

/// What a set of adapters does to a list of modules, uploaded and checked.
#[derive(Debug)]
pub struct MergePlan {
    entries: Vec<Entry>,
    factors: DeviceBuffer<f32>,
    rows: DeviceBuffer<f64>,
    terms: DeviceBuffer<Term>,
    reports: DeviceBuffer<Report>,
    /// Which entry a report belongs to: those whose factors need splitting first.
    order: Vec<usize>,
    n_split: usize,
}

/// Host side of the buffers, while a plan is made.
#[derive(Default)]
struct Layout {
    factors: usize,
    rows: usize,
    terms: Vec<Term>,
    /// (term in `terms`, row-scale place)
    scales: Vec<(usize, usize)>,
}

impl MergePlan {
    /// Uploads the updates of the given modules and computes DoRA's row factors from the pristine weights in
    /// `targets` (one per module, in the same order). Nothing that is served is touched. Waits for the device.
    ///
    /// # Errors
    /// [`Error::Length`] if a target has another size than its module; [`Error::ZeroNorm`];
    /// [`Error::MergedNotFinite`] for a replacing weight beyond bf16's range; [`Error::Cuda`]. Panics: none.
    pub fn new(
        kernels: &MergeKernels,
        stream: &Stream,
        modules: &[(&str, &ModuleUpdate)],
        targets: &[MergeTarget<'_>],
    ) -> Result<Self> {
        crate::resolve::check_length("the list of targets", modules.len(), targets.len())?;
        let device = stream.device();
        let mut layout = Layout::default();
        let mut entries = Vec::with_capacity(modules.len());
        for ((name, update), target) in modules.iter().zip(targets) {
            let (rows, columns) = update.shape();
            crate::resolve::check_length("a pristine weight", rows * columns, target.pristine.len())?;
            crate::resolve::check_length("a merged weight", rows * columns, target.merged.len())?;
            let kind = match &update.replacement {
                Some(values) => {
                    let values: Vec<bf16> = values.par_iter().map(|v| bf16::from_f32(*v)).collect();
                    if let Some(index) = values.iter().position(|v| !v.is_finite()) {
                        let (row, column) = (index / columns, index % columns);
                        return Err(Error::MergedNotFinite {
                            module: (*name).to_owned(),
                            row,
                            column,
                        });
                    }
                    Kind::Replace {
                        weight: DeviceBuffer::from_slice(stream, &values)?,
                    }
                }
                None => layout.place(update),
            };
            entries.push(Entry {
                name: (*name).to_owned(),
                rows,
                columns,
                kind,
            });
        }
        let mut host = vec![0f32; layout.factors];
        fill(&mut host, &entries, modules);
        let factors = DeviceBuffer::from_slice(stream, &host)?;
        let row_values = DeviceBuffer::<f64>::zeroed(device, layout.rows)?;
        for (term, place) in &layout.scales {
            layout.terms[*term].row_scale = row_values.ptr() + 8 * *place as u64;
        }
        let terms = DeviceBuffer::from_slice(stream, &layout.terms)?;
        let split = |e: &Entry| matches!(e.kind, Kind::LowRank { exact: false, .. });
        let whole = |e: &Entry| matches!(e.kind, Kind::LowRank { exact: true, .. });
        let places = |keep: &dyn Fn(&Entry) -> bool| {
            entries
                .iter()
                .enumerate()
                .filter(|(_, e)| keep(e))
                .map(|(i, _)| i)
                .collect::<Vec<_>>()
        };
        let (mut order, rest) = (places(&split), places(&whole));
        let n_split = order.len();
        order.extend(rest);
        let reports = DeviceBuffer::from_slice(stream, &vec![Report::EMPTY; order.len()])?;
        let plan = Self {
            entries,
            factors,
            rows: row_values,
            terms,
            reports,
            order,
            n_split,
        };
        plan.dora(kernels, stream, modules, targets, &layout)?;
        Ok(plan)
    }

    /// Computes the row factors of DoRA terms, in the order of the terms.
    fn dora(
        &self,
        kernels: &MergeKernels,
        stream: &Stream,
        modules: &[(&str, &ModuleUpdate)],
        targets: &[MergeTarget<'_>],
        layout: &Layout,
    ) -> Result<()> {
        let mut zero_norms = Vec::new();
        let mut magnitudes = Vec::new();
        for ((entry, (_, update)), target) in self.entries.iter().zip(modules).zip(targets) {
            let Kind::LowRank {
                left,
                right,
                rank,
                terms,
                gain: Some(gain),
                ..
            } = entry.kind
            else {
                continue;
            };
            let zero = DeviceBuffer::from_slice(stream, &[u64::MAX])?;
            let mut first = true;
            for (i, term) in update.terms.iter().enumerate() {
                let Some(magnitude) = &term.magnitude else {
                    continue;
                };
                let magnitude = DeviceBuffer::from_slice(stream, magnitude)?;
                let scale_place = layout
                    .scales
                    .iter()
                    .find(|(t, _)| *t == terms + i)
                    .map_or(0, |(_, place)| *place);
                launch::dora(
                    &kernels.dora,
                    stream,
                    &DoraArgs {
                        w0: target.pristine,
                        left: self.factors.slice(left..left + entry.rows * rank)?,
                        right: self.factors.slice(right..right + rank * entry.columns)?,
                        magnitude: magnitude.as_slice(),
                        row_scale: self.rows.slice(scale_place..scale_place + entry.rows)?,
                        gain: self.rows.slice(gain..gain + entry.rows)?,
                        zero_norm: zero.as_slice(),
                        scale: term.scaling,
                        rows: entry.rows,
                        columns: entry.columns,
                        stride: rank,
                        first_rank: layout.terms[terms + i].first as usize,
                        rank: term.r,
                        first,
                    },
                )?;
                magnitudes.push(magnitude);
                first = false;
            }
            zero_norms.push((entry, zero));
        }
        for (entry, zero) in zero_norms {
            let row = stream.download(&zero)?[0];
            if row != u64::MAX {
                return Err(Error::ZeroNorm {
                    module: entry.name.clone(),
                    row: row as usize,
                });
            }
        }
        Ok(())
    }

    /// Writes all merged weights: one launch (two, if some adapters are stored in bf16 and others are not), and a copy
    /// for each replaced weight. Does not wait for the device. Can be repeated.
    ///
    /// # Errors
    /// [`Error::Length`], [`Error::Cuda`] for targets that do not fit; then nothing was written. A [`Error::Cuda`] of
    /// the driver may leave some weights written: run the former plan again. Panics: none.
    pub fn run(&self, kernels: &MergeKernels, stream: &Stream, targets: &[MergeTarget<'_>]) -> Result<()> {
        crate::resolve::check_length("the list of targets", self.entries.len(), targets.len())?;
        let mut matrices = Vec::with_capacity(self.order.len());
        for index in &self.order {
            let (entry, target) = (&self.entries[*index], &targets[*index]);
            let Kind::LowRank {
                left,
                right,
                rank,
                terms,
                n_terms,
                gain,
                ..
            } = entry.kind
            else {
                continue;
            };
            matrices.push(MergeArgs {
                w0: target.pristine,
                out: target.merged,
                left: self.factors.slice(left..left + entry.rows * rank)?,
                right: self.factors.slice(right..right + rank * entry.columns)?,
                terms: self.terms.slice(terms..terms + n_terms)?,
                gain: gain.map(|g| self.rows.slice(g..g + entry.rows)).transpose()?,
                rows: entry.rows,
                columns: entry.columns,
                rank,
            });
        }
        for (entry, target) in self.entries.iter().zip(targets) {
            crate::resolve::check_length("a merged weight", entry.rows * entry.columns, target.merged.len())?;
        }
        stream.upload(&self.reports, &vec![Report::EMPTY; self.order.len()])?;
        let (split, exact) = matrices.split_at(self.n_split);
        for (kernel, part, reports) in [
            (&kernels.split, split, self.reports.slice(..self.n_split)?),
            (&kernels.bf16, exact, self.reports.slice(self.n_split..)?),
        ] {
            launch::merge(kernel, stream, part, reports)?;
        }
        for (entry, target) in self.entries.iter().zip(targets) {
            if let Kind::Replace { weight } = &entry.kind {
                stream.copy(target.merged, weight)?;
            }
        }
        Ok(())
    }

    /// Waits for the last run and tells what it did, per module. `changed` is whether the weight differs from the
    /// base, since what the storage held before is not read; a replaced weight counts as different.
    ///
    /// # Errors
    /// [`Error::MergedNotFinite`]: run the former plan again; [`Error::Cuda`]. Panics: none.
    pub fn outcomes(&self, stream: &Stream) -> Result<Vec<MergeOutcome>> {
        let reports = stream.download(&self.reports)?;
        let replaced = |e: &Entry| matches!(e.kind, Kind::Replace { .. });
        let mut outcomes: Vec<MergeOutcome> = self
            .entries
            .iter()
            .map(|e| MergeOutcome {
                changed: replaced(e),
                differs_from_base: replaced(e),
                recomputed: 0,
            })
            .collect();
        for (report, index) in reports.iter().zip(&self.order) {
            let entry = &self.entries[*index];
            if report.not_finite != u64::MAX {
                let at = report.not_finite as usize;
                return Err(Error::MergedNotFinite {
                    module: entry.name.clone(),
                    row: at / entry.columns,
                    column: at % entry.columns,
                });
            }
            let differs = report.differs != 0;
            outcomes[*index] = MergeOutcome {
                changed: differs,
                differs_from_base: differs,
                recomputed: report.recomputed,
            };
        }
        Ok(outcomes)
    }

    /// Bytes of device memory that the plan holds.
    pub fn bytes(&self) -> usize {
        let replaced = self.entries.iter().map(|e| match &e.kind {
            Kind::Replace { weight } => 2 * weight.len(),
            Kind::LowRank { .. } => 0,
        });
        4 * self.factors.len() + 8 * self.rows.len() + 24 * self.terms.len() + replaced.sum::<usize>()
    }
}

impl Layout {
    /// Finds places for an update's factors, terms and row factors.
    fn place(&mut self, update: &ModuleUpdate) -> Kind {
        let (rows, columns) = update.shape();
        let first_term = self.terms.len();
        let mut rank = 0;
        let has_dora = update.terms.iter().any(|t| t.magnitude.is_some());
        let mut reserve_rows = |n: usize| {
            let place = self.rows;
            self.rows += n;
            place
        };
        let gain = has_dora.then(|| reserve_rows(rows));
        for term in &update.terms {
            if term.magnitude.is_some() {
                self.scales.push((self.terms.len(), reserve_rows(rows)));
            }
            self.terms.push(Term {
                scale: term.scaling,
                row_scale: 0,
                first: rank as u32,
                rank: term.r as u32,
            });
            rank += term.r.next_multiple_of(RANK_STEP);
        }
        // A matrix without terms keeps its weights: one term of zeros.
        if update.terms.is_empty() {
            self.terms.push(Term {
                scale: 0.0,
                row_scale: 0,
                first: 0,
                rank: 0,
            });
            rank = RANK_STEP;
        }
        let left = self.factors;
        let right = left + rows * rank;
        self.factors = right + rank * columns;
        let exact = !has_dora && update.terms.iter().all(is_exact);
        Kind::LowRank {
            left,
            right,
            rank,
            terms: first_term,
            n_terms: self.terms.len() - first_term,
            gain,
            exact,
        }
    }
}

/// Whether scaled factors are bf16 values, so that their products need no splitting: the scaling is a power of two,
/// and nothing comes near the ends of the exponent's range.
fn is_exact(term: &crate::LowRankTerm) -> bool {
    let power =
        term.scaling.to_bits() & 0x000f_ffff_ffff_ffff == 0 && (1e-9..1e9).contains(&term.scaling.abs());
    let fits = |v: &f32| v.to_bits() & 0xffff == 0 && (*v == 0.0 || (1e-15..1e15).contains(&v.abs()));
    power && term.left.par_iter().all(fits) && term.right.par_iter().all(fits)
}

/// Stacks all factors: per module left `[rows, rank]`, then right `[rank, columns]`, each term padded with zeros.
fn fill(mut host: &mut [f32], entries: &[Entry], modules: &[(&str, &ModuleUpdate)]) {
    let mut parts = Vec::with_capacity(entries.len());
    for (entry, (_, update)) in entries.iter().zip(modules) {
        if let Kind::LowRank { rank, .. } = entry.kind {
            let (left, rest) = std::mem::take(&mut host).split_at_mut(entry.rows * rank);
            let (right, rest) = rest.split_at_mut(rank * entry.columns);
            host = rest;
            parts.push((left, right, rank, entry.columns, *update));
        }
    }
    parts
        .into_par_iter()
        .for_each(|(left, right, rank, columns, update)| {
            let mut first = 0;
            for term in &update.terms {
                for (to, from) in left.chunks_exact_mut(rank).zip(term.left.chunks_exact(term.r)) {
                    to[first..first + term.r].copy_from_slice(from);
                }
                right[first * columns..(first + term.r) * columns].copy_from_slice(&term.right);
                first += term.r.next_multiple_of(RANK_STEP);
            }
        });
}
