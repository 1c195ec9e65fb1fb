//! Where a plan's parts lie in its memory, and how its modules are cut into launches.

use super::pack::Format;
use crate::ModuleUpdate;
use crate::launch::{self, Form, RANK_STEP};
use cuda_graphs::DeviceBuffer;
use half::bf16;
use std::ops::Range;

/// Parts of a plan's memory begin at multiples of this.
pub(super) const ALIGN: usize = 256;

/// One module of a plan.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) kind: Kind,
}

#[derive(Debug)]
pub(super) enum Kind {
    /// Terms, by their places in the plan's table and buffers.
    LowRank {
        /// Of all terms, each padded.
        rank: usize,
        terms: Range<usize>,
        gain: Option<usize>,
        form: Form,
    },
    /// A whole weight, once it is on the device.
    Replace { weight: Option<DeviceBuffer<bf16>> },
}

/// Where one term's factors are, and how they travel.
#[derive(Debug)]
pub(super) struct TermPlace {
    /// Offsets in bytes.
    pub(super) left: usize,
    pub(super) right: usize,
    pub(super) format: Format,
    /// Place of DoRA's row scalings.
    pub(super) row_scale: Option<usize>,
    pub(super) scale: f64,
    pub(super) first: usize,
    pub(super) rank: usize,
}

/// Modules that are merged by one launch.
#[derive(Debug)]
pub(super) struct Launch {
    pub(super) form: Form,
    pub(super) entries: Vec<usize>,
    /// Offset of its table in bytes, and what was uploaded there.
    pub(super) at: usize,
    pub(super) words: Vec<u64>,
    /// Its place among the reports.
    pub(super) reports: Range<usize>,
}

/// Sizes, while a plan is made.
#[derive(Default)]
pub(super) struct Layout {
    pub(super) bytes: usize,
    pub(super) rows: usize,
    pub(super) places: Vec<TermPlace>,
}

impl Layout {
    /// Takes room; where it begins.
    pub(super) fn reserve(&mut self, bytes: usize) -> usize {
        let at = self.bytes;
        self.bytes += bytes.next_multiple_of(ALIGN);
        at
    }

    /// Finds places for an update's factors, terms and row factors.
    pub(super) fn place(
        &mut self,
        update: &ModuleUpdate,
        formats: &[Format],
        device: &cuda_graphs::DeviceInfo,
    ) -> Kind {
        let (rows, _) = update.shape();
        let first_term = self.places.len();
        let mut rank = 0;
        let has_dora = update.terms.iter().any(|t| t.magnitude.is_some());
        let mut reserve_rows = |n: usize| {
            let place = self.rows;
            self.rows += n;
            place
        };
        let gain = has_dora.then(|| reserve_rows(rows));
        let row_scales: Vec<_> = update
            .terms
            .iter()
            .map(|t| t.magnitude.is_some().then(|| reserve_rows(rows)))
            .collect();
        for ((term, format), row_scale) in update.terms.iter().zip(formats).zip(row_scales) {
            let bytes = |bf16: bool, values: &[f32]| values.len() * if bf16 { 2 } else { 4 };
            let left = self.reserve(bytes(format.left_bf16, &term.left));
            let right = self.reserve(bytes(format.right_bf16, &term.right));
            self.places.push(TermPlace {
                left,
                right,
                format: *format,
                row_scale,
                scale: term.scaling,
                first: rank,
                rank: term.r,
            });
            rank += term.r.next_multiple_of(RANK_STEP);
        }
        // A matrix without terms keeps its weights: one term of nothing.
        if update.terms.is_empty() {
            self.places.push(TermPlace {
                left: 0,
                right: 0,
                format: Format::default(),
                row_scale: None,
                scale: 0.0,
                first: 0,
                rank: 0,
            });
        }
        let rank = rank.max(RANK_STEP);
        let whole = !has_dora && formats.len() == 1 && formats[0].whole;
        Kind::LowRank {
            rank,
            terms: first_term..self.places.len(),
            gain,
            form: Form::of(rank, whole, has_dora, device),
        }
    }
}

impl Launch {
    /// Bytes of scratch memory.
    pub(super) fn scratch(&self, entries: &[Entry]) -> usize {
        let matrices: usize = self.entries.iter().map(|i| entries[*i].scratch()).sum();
        matrices + launch::list_bytes(self.form)
    }
}

impl Entry {
    pub(super) fn scratch(&self) -> usize {
        match &self.kind {
            Kind::LowRank { rank, form, .. } => launch::scratch_bytes(*form, self.rows, self.columns, *rank),
            Kind::Replace { .. } => 0,
        }
    }
}

/// Cuts modules into launches of one form each, with a bounded amount of scratch memory.
pub(super) fn launches(entries: &[Entry]) -> Vec<Launch> {
    let mut launches: Vec<Launch> = Vec::new();
    let mut reports = 0;
    for wanted in Form::ALL {
        let mut used = usize::MAX;
        for (index, entry) in entries.iter().enumerate() {
            if !matches!(&entry.kind, Kind::LowRank { form, .. } if *form == wanted) {
                continue;
            }
            let bytes = entry.scratch();
            match launches.last_mut() {
                Some(last)
                    if used.saturating_add(bytes) <= launch::launch_bytes(wanted)
                        && last.entries.len() < launch::MOST_MATRICES =>
                {
                    last.entries.push(index);
                    last.reports.end += 1;
                    used += bytes;
                }
                _ => {
                    launches.push(Launch {
                        form: wanted,
                        entries: vec![index],
                        at: 0,
                        words: Vec::new(),
                        reports: reports..reports + 1,
                    });
                    used = bytes;
                }
            }
            reports += 1;
        }
    }
    launches
}
