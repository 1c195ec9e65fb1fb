//! What a set of adapters does to a list of modules, on the device.

use super::layout::{ALIGN, Entry, Kind, Launch, Layout, TermPlace, launches};
use super::pack::{Format, SEGMENT, Segment, Values, unit};
use super::plans::Packed;
use super::{MergeKernels, MergeTarget, MergeWorkspace};
use crate::launch::{self, DoraArgs, MATRIX_WORDS, MatrixArgs, Report, Table, Term};
use crate::{Error, MergeOutcome, ModuleUpdate, Result};
use cuda_graphs::{DeviceBuffer, Stream};
use half::bf16;
use rayon::prelude::*;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

/// What a set of adapters does to a list of modules, uploaded and checked.
#[derive(Debug)]
pub struct MergePlan {
    entries: Vec<Entry>,
    /// Factors, terms, tables, reports.
    memory: DeviceBuffer<u8>,
    places: Vec<TermPlace>,
    terms_at: usize,
    reports: Range<usize>,
    /// Gains and row scalings of DoRA.
    rows: Option<DeviceBuffer<f64>>,
    launches: Vec<Launch>,
    scratch_bytes: usize,
}

/// A plan that is not on the device yet.
#[derive(Debug)]
pub(super) struct Draft {
    entries: Vec<Entry>,
    places: Vec<TermPlace>,
    bytes: usize,
    terms_at: usize,
    reports: Range<usize>,
    /// Elements of gains and row scalings.
    rows: usize,
    launches: Vec<Launch>,
    pub(super) scratch_bytes: usize,
}

impl Draft {
    /// Finds places for everything. `formats` are those of each module's terms.
    pub(super) fn new(
        modules: &[(&str, &ModuleUpdate)],
        formats: &[Vec<Format>],
        device: &cuda_graphs::DeviceInfo,
    ) -> Self {
        let mut layout = Layout::default();
        let mut entries = Vec::with_capacity(modules.len());
        for ((name, update), formats) in modules.iter().zip(formats) {
            let (rows, columns) = update.shape();
            entries.push(Entry {
                name: (*name).to_owned(),
                rows,
                columns,
                kind: match update.replacement {
                    Some(_) => Kind::Replace { weight: None },
                    None => layout.place(update, formats, device),
                },
            });
        }
        let terms_at = layout.bytes;
        layout.reserve(size_of::<Term>() * layout.places.len());
        let mut launches = launches(&entries);
        for launch in &mut launches {
            launch.at = layout.bytes;
            layout.reserve(8 * MATRIX_WORDS * launch.entries.len());
        }
        let n_reports = launches.last().map_or(0, |l| l.reports.end);
        let reports = layout.bytes..layout.bytes + size_of::<Report>() * n_reports;
        layout.bytes = reports.end.max(ALIGN);
        Self {
            scratch_bytes: launches.iter().map(|l| l.scratch(&entries)).max().unwrap_or(0),
            entries,
            places: layout.places,
            bytes: layout.bytes,
            terms_at,
            reports,
            rows: layout.rows,
            launches,
        }
    }

    /// Terms.
    pub(super) fn terms(&self) -> usize {
        self.places.len()
    }

    /// Bytes of the tables of terms and launches.
    pub(super) fn table_bytes(&self) -> usize {
        self.reports.start - self.terms_at
    }

    /// The factors to be packed, in the order of their places. `greatest` has an element per term.
    pub(super) fn segments<'a>(
        &self,
        modules: &[(&'a str, &'a ModuleUpdate)],
        greatest: &'a [AtomicU32],
    ) -> Vec<Segment<'a>> {
        let mut segments = Vec::new();
        for (entry, (_, update)) in self.entries.iter().zip(modules) {
            let Kind::LowRank { terms, .. } = &entry.kind else {
                continue;
            };
            let places = self.places[terms.clone()].iter().zip(&greatest[terms.clone()]);
            for (term, (place, greatest)) in update.terms.iter().zip(places) {
                let (left, right) = (place.format.left_bf16, place.format.right_bf16);
                cut(&mut segments, place.left, &term.left, left, None);
                cut(&mut segments, place.right, &term.right, right, Some(greatest));
            }
        }
        segments
    }
}

impl MergePlan {
    /// Packs and uploads the updates of the given modules and computes DoRA's row factors from the pristine weights in
    /// `targets` (one per module, in the same order). Nothing that is served is touched. Waits for the device with DoRA
    /// or replaced weights alone. Many modules are done sooner in several plans: see [`MergeWorkspace::make_plans`].
    ///
    /// # Errors
    /// [`Error::Length`] if a target has another size than its module; [`Error::ZeroNorm`];
    /// [`Error::MergedNotFinite`] for a replacing weight beyond bf16's range; [`Error::Cuda`]. Panics: none.
    pub fn new(
        kernels: &MergeKernels,
        workspace: &mut MergeWorkspace,
        stream: &Stream,
        modules: &[(&str, &ModuleUpdate)],
        targets: &[MergeTarget<'_>],
    ) -> Result<Self> {
        workspace.make_plans(&[modules], |plans| plans.next(kernels, stream, targets))
    }

    /// Takes memory for a draft whose factors are being packed, as chunks of `packing`. `tables_at` is the place of its
    /// tables in the workspace's page-locked memory.
    pub(super) fn of_draft(
        draft: Draft,
        kernels: &MergeKernels,
        workspace: &mut MergeWorkspace,
        stream: &Stream,
        modules: &[(&str, &ModuleUpdate)],
        targets: &[MergeTarget<'_>],
        packed: Packed<'_>,
    ) -> Result<Self> {
        crate::resolve::check_length("the list of targets", modules.len(), targets.len())?;
        let mut entries = draft.entries;
        for ((entry, (name, update)), target) in entries.iter_mut().zip(modules).zip(targets) {
            let elements = entry.rows * entry.columns;
            crate::resolve::check_length("a pristine weight", elements, target.pristine.len())?;
            crate::resolve::check_length("a merged weight", elements, target.merged.len())?;
            if let Some(values) = &update.replacement {
                let weight = DeviceBuffer::from_slice(stream, &rounded(name, values, entry.columns)?)?;
                entry.kind = Kind::Replace { weight: Some(weight) };
            }
        }
        let mut plan = Self {
            entries,
            memory: workspace.take(draft.bytes)?,
            places: draft.places,
            terms_at: draft.terms_at,
            reports: draft.reports,
            rows: match draft.rows {
                0 => None,
                n => Some(DeviceBuffer::<f64>::zeroed(stream.device(), n)?),
            },
            launches: draft.launches,
            scratch_bytes: draft.scratch_bytes,
        };
        workspace.begin(stream)?;
        packed.packing.upload(workspace, packed.chunks, &plan.memory)?;
        plan.upload_tables(workspace, targets, packed.greatest, packed.tables_at)?;
        workspace.end(stream)?;
        plan.dora(kernels, stream, modules, targets)?;
        Ok(plan)
    }

    /// Uploads the tables of terms and launches, which need the factors' greatest values.
    fn upload_tables(
        &mut self,
        workspace: &MergeWorkspace,
        targets: &[MergeTarget<'_>],
        greatest: &[AtomicU32],
        at: usize,
    ) -> Result<()> {
        let base = self.memory.ptr();
        let term = |(place, greatest): (&TermPlace, &AtomicU32)| Term {
            scale: place.scale,
            row_scale: match (&self.rows, place.row_scale) {
                (Some(rows), Some(at)) => rows.ptr() + 8 * at as u64,
                _ => 0,
            },
            left: base + place.left as u64,
            right: base + place.right as u64,
            unit: unit(greatest.load(Ordering::Relaxed)),
            bf16: u32::from(place.format.left_bf16) | u32::from(place.format.right_bf16) << 1,
            first: place.first as u32,
            rank: place.rank as u32,
        };
        let terms: Vec<Term> = self.places.iter().zip(greatest).map(term).collect();
        let tables = self.tables(workspace, targets)?;
        let mut bytes = vec![0u8; self.reports.start - self.terms_at];
        let mut put = |at: usize, values: &[u8]| {
            if let Some(to) = bytes.get_mut(at - self.terms_at..at - self.terms_at + values.len()) {
                to.copy_from_slice(values);
            }
        };
        put(self.terms_at, bytemuck::cast_slice(&terms));
        for (launch, table) in self.launches.iter().zip(&tables) {
            put(launch.at, bytemuck::cast_slice(&table.words));
        }
        workspace.upload_tables(at, &bytes, self.memory.slice(self.terms_at..self.reports.start)?)?;
        for (launch, table) in self.launches.iter_mut().zip(tables) {
            launch.words = table.words;
        }
        Ok(())
    }

    /// The launches as the kernels read them.
    fn tables(&self, workspace: &MergeWorkspace, targets: &[MergeTarget<'_>]) -> Result<Vec<Table>> {
        let terms = self.terms_at..self.terms_at + size_of::<Term>() * self.places.len();
        let terms = self.memory.slice(terms)?.cast::<Term>()?;
        let Some(scratch) = workspace.scratch() else {
            return Ok(Vec::new());
        };
        let mut tables = Vec::with_capacity(self.launches.len());
        for launch in &self.launches {
            let mut matrices = Vec::with_capacity(launch.entries.len());
            for &index in &launch.entries {
                let (entry, target) = (&self.entries[index], &targets[index]);
                let Kind::LowRank {
                    rank,
                    terms: range,
                    gain,
                    ..
                } = &entry.kind
                else {
                    continue;
                };
                let gain = match (&self.rows, gain) {
                    (Some(rows), Some(at)) => Some(rows.slice(*at..at + entry.rows)?),
                    _ => None,
                };
                matrices.push(MatrixArgs {
                    w0: target.pristine,
                    out: target.merged,
                    terms: terms.slice(range.clone())?,
                    gain,
                    rows: entry.rows,
                    columns: entry.columns,
                    rank: *rank,
                });
            }
            tables.push(launch::table(
                &matrices,
                launch.form,
                scratch,
                self.memory.device().info(),
            )?);
        }
        Ok(tables)
    }

    /// Computes the row factors of DoRA terms, in the order of the terms.
    fn dora(
        &self,
        kernels: &MergeKernels,
        stream: &Stream,
        modules: &[(&str, &ModuleUpdate)],
        targets: &[MergeTarget<'_>],
    ) -> Result<()> {
        let Some(row_values) = &self.rows else {
            return Ok(());
        };
        let mut zero_norms = Vec::new();
        let mut magnitudes = Vec::new();
        for ((entry, (_, update)), target) in self.entries.iter().zip(modules).zip(targets) {
            let Kind::LowRank {
                terms,
                gain: Some(gain),
                ..
            } = &entry.kind
            else {
                continue;
            };
            let zero = DeviceBuffer::from_slice(stream, &[u64::MAX])?;
            let mut first = true;
            for (term, place) in update.terms.iter().zip(&self.places[terms.clone()]) {
                let (Some(magnitude), Some(row_scale)) = (&term.magnitude, place.row_scale) else {
                    continue;
                };
                let magnitude = DeviceBuffer::from_slice(stream, magnitude)?;
                let factors = |at: usize, n: usize| self.memory.slice(at..at + 4 * n)?.cast::<f32>();
                launch::dora(
                    &kernels.dora,
                    stream,
                    &DoraArgs {
                        w0: target.pristine,
                        left: factors(place.left, entry.rows * term.r)?,
                        right: factors(place.right, term.r * entry.columns)?,
                        magnitude: magnitude.as_slice(),
                        row_scale: row_values.slice(row_scale..row_scale + entry.rows)?,
                        gain: row_values.slice(*gain..gain + entry.rows)?,
                        zero_norm: zero.as_slice(),
                        scale: term.scaling,
                        rows: entry.rows,
                        columns: entry.columns,
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

    /// Writes all merged weights: two launches for some hundred megabytes of them, and a copy for each replaced weight.
    /// Does not wait for the device. Can be repeated.
    ///
    /// # Errors
    /// [`Error::Length`], [`Error::Cuda`] for targets that do not fit; then nothing was written. A [`Error::Cuda`] of
    /// the driver may leave some weights written: run the former plan again. Panics: none.
    pub fn run(
        &mut self,
        kernels: &MergeKernels,
        workspace: &mut MergeWorkspace,
        stream: &Stream,
        targets: &[MergeTarget<'_>],
    ) -> Result<()> {
        crate::resolve::check_length("the list of targets", self.entries.len(), targets.len())?;
        for (entry, target) in self.entries.iter().zip(targets) {
            crate::resolve::check_length("a merged weight", entry.rows * entry.columns, target.merged.len())?;
        }
        workspace.reserve_scratch(self.scratch_bytes)?;
        let tables = self.tables(workspace, targets)?;
        let reports = self.memory.slice(self.reports.clone())?;
        stream.fill_bytes(reports, 0)?;
        let reports = reports.cast::<Report>()?;
        for (launch, table) in self.launches.iter_mut().zip(&tables) {
            let words = self
                .memory
                .slice(launch.at..launch.at + 8 * table.words.len())?
                .cast::<u64>()?;
            // Other targets, or another scratch memory, than before.
            if launch.words != table.words {
                stream.upload(words, &table.words)?;
                launch.words.clone_from(&table.words);
            }
            launch::merge(
                &kernels.merge,
                stream,
                table,
                words,
                reports.slice(launch.reports.clone())?,
            )?;
        }
        for (entry, target) in self.entries.iter().zip(targets) {
            if let Kind::Replace { weight: Some(weight) } = &entry.kind {
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
        let reports = stream.download(self.memory.slice(self.reports.clone())?.cast::<Report>()?)?;
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
        let order = self.launches.iter().flat_map(|l| &l.entries);
        for (report, index) in reports.iter().zip(order) {
            let entry = &self.entries[*index];
            if report.not_finite != 0 {
                let at = !report.not_finite as usize;
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
            Kind::Replace { weight } => weight.as_ref().map_or(0, |w| 2 * w.len()),
            Kind::LowRank { .. } => 0,
        });
        self.memory.len() + self.rows.as_ref().map_or(0, |r| 8 * r.len()) + replaced.sum::<usize>()
    }

    /// Its memory, for another plan.
    pub(super) fn into_memory(self) -> DeviceBuffer<u8> {
        self.memory
    }
}

/// Cuts a factor into segments.
fn cut<'a>(
    segments: &mut Vec<Segment<'a>>,
    at: usize,
    values: &'a [f32],
    bf16: bool,
    greatest: Option<&'a AtomicU32>,
) {
    for (i, piece) in values.chunks(SEGMENT).enumerate() {
        segments.push(Segment {
            at: at + i * SEGMENT * if bf16 { 2 } else { 4 },
            values: if bf16 {
                Values::Bf16(piece)
            } else {
                Values::F32(piece)
            },
            greatest,
        });
    }
}

/// A replacing weight, rounded.
fn rounded(name: &str, values: &[f32], columns: usize) -> Result<Vec<bf16>> {
    let values: Vec<bf16> = values.par_iter().map(|v| bf16::from_f32(*v)).collect();
    match values.iter().position(|v| !v.is_finite()) {
        None => Ok(values),
        Some(index) => Err(Error::MergedNotFinite {
            module: name.to_owned(),
            row: index / columns,
            column: index % columns,
        }),
    }
}
