//! The merge of one matrix on the CPU.
//!
//! # What is computed
//! With terms i of rank rᵢ, `left` Lᵢ `[rows, rᵢ]`, `right` Rᵢ `[rᵢ, columns]`:
//!
//! ```text
//! out[o, j] = round_bf16( g[o]·W₀[o, j] + Σᵢ t[i, o] · Σₖ Lᵢ[o, k]·Rᵢ[k, j] )
//! plain:  g = 1,            t[i, o] = sᵢ
//! DoRA:   g = 1 + Σ (c−1),  t[i, o] = cᵢ[o]·sᵢ     cᵢ[o] = mᵢ[o] / ‖W₀[o] + sᵢ·(LᵢRᵢ)[o]‖₂
//! ```
//! Each DoRA norm is taken over the unmerged W₀ and its own term, as in PEFT's forward pass with several adapters.
//!
//! # How it is exact
//! The sum is accumulated in f32, together with a bound on its error. Where every value within the bound rounds to
//! the same bf16, that bf16 is the correctly rounded one. The others (around one in a thousand, those that lie very
//! close to the middle between two bf16 values) are computed again in f64, where products of f32 are exact. So each
//! element is the correctly rounded one whatever the blocking, the vector width, the number of threads or the order
//! of the adapters, and the same bits come out on another machine. Where f64 errs as well (the sum is next to a tie, or
//! terms cancel, by less than about 2⁻⁵³ of what was added), its sum in the order of the terms decides, which is the
//! same everywhere.
//!
//! # How it is fast
//! ```text
//! right:  packed once into panels of 16 columns  [panel][k][16]     read through L2, reused by all rows
//! task:   96 rows (rayon), 6 at a time × 16 columns: sums stay in registers until they are rounded
//! W₀, out: each element is read once and written once
//! ```
//! With AVX2 what was rounded is tested afterwards, 128 columns of a row at a time: two loops of short dependencies
//! keep a processor busier than one of long ones.

use crate::block::{Block, width};
use crate::panels::Panels;
use crate::resolve::check_length;
use crate::{Error, LowRankTerm, ModuleUpdate, Result};
use half::bf16;
use pulp::Arch;
use rayon::prelude::*;
use std::sync::atomic::{AtomicU64, Ordering};

/// Rows of a task.
const ROWS_PER_TASK: usize = 96;

/// What a merge found out while writing.
///
/// ```
/// # use half::bf16;
/// # use lora_merge::*;
/// use lora_merge::{ModuleUpdate, merge_into};
///
/// let term = LowRankTerm {
///     r: 1,
///     left: vec![0.5, -0.5].into(),       // B, [2, 1]
///     right: vec![1.0, 0.0, 2.0].into(),  // A, [1, 3]
///     scaling: 2.0,
///     magnitude: None,
/// };
/// let update = ModuleUpdate::from_terms(2, 3, vec![term])?;
/// let w0 = [bf16::ONE; 6];
/// let mut merged = [bf16::ZERO; 6];
/// let outcome = merge_into(&w0, &update, &mut merged)?;
/// assert!(outcome.changed && outcome.differs_from_base);
/// assert!(!merge_into(&w0, &update, &mut merged)?.changed, "the same again");
/// # Ok::<(), lora_merge::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MergeOutcome {
    /// Whether an element of the output differs from what it held before.
    pub changed: bool,
    /// Whether an element of the output differs from W₀.
    pub differs_from_base: bool,
    /// Elements whose rounding needed f64.
    pub recomputed: u64,
}

/// Merges an update into a copy of the pristine weight: `out = round_bf16(W₀ + update)`.
///
/// `w0` and `out` are `[rows, columns]` of [`ModuleUpdate::shape`], row-major. `out`'s former values are only
/// compared with. Every element is the correctly rounded one. Without DoRA a row whose left factors are all 0 stays as it
/// is, be it or the right factors finite or not. Uses rayon's current thread pool; allocates the packed right factors
/// (4 bytes × total rank × columns), never a delta.
///
/// # Errors
/// [`Error::Length`]; [`Error::ZeroNorm`] before anything is written; [`Error::MergedNotFinite`] after `out` was
/// overwritten (with `module` empty: a [`crate::MergedStore`] fills it in and rolls back). Panics: none.
pub fn merge_into(w0: &[bf16], update: &ModuleUpdate, out: &mut [bf16]) -> Result<MergeOutcome> {
    let factors = RowFactors::new(w0, update)?;
    merge_with(w0, update, &factors, out)
}

/// Per-row factors of the terms and of W₀.
#[derive(Clone, Debug)]
pub(crate) struct RowFactors {
    /// g, `[rows]`; `None` is all ones.
    gain: Option<Vec<f64>>,
    /// t, per term `[rows]`; `None` is the term's scaling for every row.
    scale: Vec<Option<Vec<f64>>>,
}

impl RowFactors {
    /// Computes DoRA's factors, if there are any, which takes a pass over `w0`.
    pub(crate) fn new(w0: &[bf16], update: &ModuleUpdate) -> Result<Self> {
        let (rows, columns) = update.shape();
        check_length("the pristine weight", rows.saturating_mul(columns), w0.len())?;
        let mut gain: Option<Vec<f64>> = None;
        let mut scale = Vec::with_capacity(update.terms.len());
        for term in &update.terms {
            let Some(magnitude) = &term.magnitude else {
                scale.push(None);
                continue;
            };
            let norms = row_norms(w0, term, magnitude.len(), columns);
            if let Some(row) = norms.iter().position(|n| *n == 0.0) {
                return Err(Error::ZeroNorm {
                    module: String::new(),
                    row,
                });
            }
            let factor: Vec<f64> = magnitude
                .iter()
                .zip(&norms)
                .map(|(m, n)| f64::from(*m) / n)
                .collect();
            scale.push(Some(factor.iter().map(|c| c * term.scaling).collect()));
            gain = Some(match gain {
                None => factor,
                Some(sum) => sum.iter().zip(&factor).map(|(g, c)| g + (c - 1.0)).collect(),
            });
        }
        Ok(Self { gain, scale })
    }

    /// The factors of an update without DoRA.
    pub(crate) fn plain(update: &ModuleUpdate) -> Self {
        Self {
            gain: None,
            scale: vec![None; update.terms.len()],
        }
    }

    /// g, `[rows]`, where DoRA changes it.
    pub(crate) fn gain(&self) -> Option<&[f64]> {
        self.gain.as_deref()
    }

    /// t of a term at a row.
    #[inline(always)]
    pub(crate) fn scale(&self, update: &ModuleUpdate, term: usize, row: usize) -> f64 {
        self.scale[term]
            .as_ref()
            .map_or(update.terms[term].scaling, |s| s[row])
    }
}

/// ‖W₀[o] + s·(L·R)[o]‖₂ per row, in f64 with one order of operations on every machine.
fn row_norms(w0: &[bf16], term: &LowRankTerm, rows: usize, columns: usize) -> Vec<f64> {
    /// Partial sums, so that a vector unit can work on them.
    const LANES: usize = 8;
    let row_norm = |(row, w0): (usize, &[bf16])| {
        Arch::new().dispatch(
            #[inline(always)]
            || {
                let left = &term.left[row * term.r..][..term.r];
                let mut sums = [0f64; LANES];
                for start in (0..columns).step_by(LANES) {
                    let width = LANES.min(columns - start);
                    let mut delta = [0f64; LANES];
                    for (k, l) in left.iter().enumerate() {
                        let right = &term.right[k * columns + start..][..width];
                        for (d, r) in delta.iter_mut().zip(right) {
                            *d += f64::from(*l) * f64::from(*r);
                        }
                    }
                    for ((sum, d), w) in sums.iter_mut().zip(&delta).zip(&w0[start..][..width]) {
                        let v = f64::from(f32::from_bits(u32::from(w.to_bits()) << 16)) + term.scaling * d;
                        *sum += v * v;
                    }
                }
                sums.iter().sum::<f64>().sqrt()
            },
        )
    };
    if columns == 0 {
        return vec![0.0; rows];
    }
    w0.par_chunks(columns).enumerate().map(row_norm).collect()
}

/// The merge with given row factors. See [`merge_into`].
pub(crate) fn merge_with(
    w0: &[bf16],
    update: &ModuleUpdate,
    factors: &RowFactors,
    out: &mut [bf16],
) -> Result<MergeOutcome> {
    let (rows, columns) = update.shape();
    check_length("the pristine weight", rows.saturating_mul(columns), w0.len())?;
    check_length("the merged weight", w0.len(), out.len())?;
    if w0.is_empty() {
        return Ok(MergeOutcome::default());
    }
    if let Some(replacement) = &update.replacement {
        return replace(w0, replacement, columns, out);
    }
    merge_tasks(w0, update, factors, out, width(), |block| block.merge())
}

/// The merge in tasks, with panels of `width` columns.
pub(crate) fn merge_tasks(
    w0: &[bf16],
    update: &ModuleUpdate,
    factors: &RowFactors,
    out: &mut [bf16],
    width: usize,
    merge: impl Fn(Block<'_>) + Sync,
) -> Result<MergeOutcome> {
    let (_, columns) = update.shape();
    let panels = Panels::pack(update, columns, width, factors.gain.is_some());
    let tally = Tally::new();
    out.par_chunks_mut(ROWS_PER_TASK * columns)
        .zip(w0.par_chunks(ROWS_PER_TASK * columns))
        .enumerate()
        .for_each(|(task, (out, w0))| {
            merge(Block {
                first_row: task * ROWS_PER_TASK,
                w0,
                out,
                update,
                factors,
                panels: &panels,
                tally: &tally,
            });
        });
    tally.outcome(columns)
}

/// `modules_to_save`: the tensor itself, rounded.
fn replace(w0: &[bf16], replacement: &[f32], columns: usize, out: &mut [bf16]) -> Result<MergeOutcome> {
    check_length("the replacing weight", out.len(), replacement.len())?;
    let tally = Tally::new();
    let chunks = out
        .par_chunks_mut(columns)
        .zip(w0.par_chunks(columns))
        .zip(replacement.par_chunks(columns));
    chunks.enumerate().for_each(|(row, ((out, w0), new))| {
        let (mut changed, mut differs) = (0, 0);
        for (j, ((out, w0), new)) in out.iter_mut().zip(w0).zip(new).enumerate() {
            let new = bf16::from_f32(*new);
            if !new.is_finite() {
                tally.not_finite(row * columns + j);
            }
            changed |= out.to_bits() ^ new.to_bits();
            differs |= w0.to_bits() ^ new.to_bits();
            *out = new;
        }
        tally.add(changed != 0, differs != 0, 0);
    });
    tally.outcome(columns)
}

/// What tasks report, order-independently.
pub(crate) struct Tally {
    /// Bit 0: changed; bit 1: differs from the base.
    flags: AtomicU64,
    recomputed: AtomicU64,
    /// Smallest index of an element that is not finite.
    not_finite: AtomicU64,
}

impl Tally {
    fn new() -> Self {
        Self {
            flags: AtomicU64::new(0),
            recomputed: AtomicU64::new(0),
            not_finite: AtomicU64::new(u64::MAX),
        }
    }

    pub(crate) fn add(&self, changed: bool, differs: bool, recomputed: u64) {
        let flags = u64::from(changed) | u64::from(differs) << 1;
        self.flags.fetch_or(flags, Ordering::Relaxed);
        self.recomputed.fetch_add(recomputed, Ordering::Relaxed);
    }

    /// Keeps the smallest index.
    pub(crate) fn not_finite(&self, index: usize) {
        self.not_finite.fetch_min(index as u64, Ordering::Relaxed);
    }

    fn outcome(self, columns: usize) -> Result<MergeOutcome> {
        let index = self.not_finite.into_inner();
        if index != u64::MAX {
            let index = index as usize;
            return Err(Error::MergedNotFinite {
                module: String::new(),
                row: index / columns,
                column: index % columns,
            });
        }
        let flags = self.flags.into_inner();
        Ok(MergeOutcome {
            changed: flags & 1 != 0,
            differs_from_base: flags & 2 != 0,
            recomputed: self.recomputed.into_inner(),
        })
    }
}
