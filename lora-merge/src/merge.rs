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
//! of the adapters, and the same bits come out on another machine.
//!
//! # How it is fast
//! ```text
//! right:  packed once into panels of 16 columns  [panel][k][16]     read through L2, reused by all row groups
//! task:   96 rows (rayon); 6 rows × 16 columns are in registers at a time
//! W₀, out: each element is read once and written once, row by row
//! ```

use crate::resolve::check_length;
use crate::rounding::bf16_from_f64;
use crate::strip::{Found, STRIP, Strip};
use crate::{Error, LowRankTerm, ModuleUpdate, Result};
use half::bf16;
use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;
use std::sync::atomic::{AtomicU64, Ordering};

/// Columns of a panel.
const NR: usize = 16;
/// Rows held in registers.
const MR: usize = 6;
/// Rows of a task: a multiple of `MR`.
const ROWS_PER_TASK: usize = 96;
/// Products that are added in one go; longer sums are cut, which keeps the error bound small.
const RUN: usize = 16;
/// Bytes of packed panels that stay in L2 while a task's rows pass.
const PANEL_BYTES: usize = 192 * 1024;
/// Least factor of a bound: the product of two covers results that are too small for relative bounds.
const LEAST: f64 = 1e-20;

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
/// compared with. Every element is the correctly rounded one. Uses rayon's current thread pool; allocates the packed
/// right factors (4 bytes × total rank × columns), never a delta.
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
        check_length("the pristine weight", rows * columns, w0.len())?;
        let mut gain: Option<Vec<f64>> = None;
        let mut scale = Vec::with_capacity(update.terms.len());
        for term in &update.terms {
            let Some(magnitude) = &term.magnitude else {
                scale.push(None);
                continue;
            };
            let norms = row_norms(w0, term, columns);
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
fn row_norms(w0: &[bf16], term: &LowRankTerm, columns: usize) -> Vec<f64> {
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
        return vec![0.0; term.left.len() / term.r.max(1)];
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
    check_length("the pristine weight", rows * columns, w0.len())?;
    check_length("the merged weight", rows * columns, out.len())?;
    if rows * columns == 0 {
        return Ok(MergeOutcome::default());
    }
    if let Some(replacement) = &update.replacement {
        return replace(w0, replacement, columns, out);
    }
    let panels = Panels::pack(update, columns);
    let tally = Tally::new();
    out.par_chunks_mut(ROWS_PER_TASK * columns)
        .zip(w0.par_chunks(ROWS_PER_TASK * columns))
        .enumerate()
        .for_each(|(task, (out, w0))| {
            let block = Block {
                first_row: task * ROWS_PER_TASK,
                w0,
                out,
                update,
                factors,
                panels: &panels,
                tally: &tally,
            };
            Arch::new().dispatch(block);
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
        tally.add(changed, differs, 0);
    });
    tally.outcome(columns)
}

/// What tasks report, order-independently.
struct Tally {
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

    fn add(&self, changed: u16, differs: u16, recomputed: u64) {
        let flags = u64::from(changed != 0) | u64::from(differs != 0) << 1;
        self.flags.fetch_or(flags, Ordering::Relaxed);
        self.recomputed.fetch_add(recomputed, Ordering::Relaxed);
    }

    /// Keeps the smallest index.
    fn not_finite(&self, index: usize) {
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

/// All right factors, stacked along k and cut into panels of `NR` columns, and the norm of each column.
struct Panels {
    total_rank: usize,
    values: Vec<f32>,
    norms: Vec<f32>,
}

impl Panels {
    fn pack(update: &ModuleUpdate, columns: usize) -> Self {
        let total_rank = update.total_rank();
        let n_panels = columns.div_ceil(NR);
        let mut values = vec![0f32; n_panels * total_rank * NR];
        let mut norms = vec![0f32; n_panels * NR];
        let pack = |(panel, (values, norms)): (usize, (&mut [f32], &mut [f32]))| {
            let start = panel * NR;
            let width = NR.min(columns - start);
            let mut squares = [0f64; NR];
            let lines = update.terms.iter().flat_map(|t| t.right.chunks_exact(columns));
            for (target, line) in values.chunks_exact_mut(NR).zip(lines) {
                target[..width].copy_from_slice(&line[start..][..width]);
                for (s, v) in squares.iter_mut().zip(&*target) {
                    *s += f64::from(*v) * f64::from(*v);
                }
            }
            for (norm, square) in norms.iter_mut().zip(squares) {
                *norm = (square.sqrt() * 1.000_001).clamp(LEAST, f64::from(f32::MAX)) as f32;
            }
        };
        if total_rank > 0 {
            let parts = values
                .par_chunks_mut(total_rank * NR)
                .zip(norms.par_chunks_mut(NR));
            parts.enumerate().for_each(pack);
        }
        Self {
            total_rank,
            values,
            norms,
        }
    }
}

/// One task: some rows of the matrix.
struct Block<'a> {
    first_row: usize,
    w0: &'a [bf16],
    out: &'a mut [bf16],
    update: &'a ModuleUpdate,
    factors: &'a RowFactors,
    panels: &'a Panels,
    tally: &'a Tally,
}

impl WithSimd for Block<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        match S::F32_LANES {
            16 => self.run::<S, 1>(simd),
            8 => self.run::<S, 2>(simd),
            4 => self.run::<S, 4>(simd),
            _ => self.run::<S, NR>(simd),
        }
    }
}

impl Block<'_> {
    /// `NV` vectors make up a panel's line.
    #[inline(always)]
    fn run<S: Simd, const NV: usize>(mut self, simd: S) {
        let all_out = std::mem::take(&mut self.out);
        let (_, columns) = self.update.shape();
        let rank = self.panels.total_rank;
        let rows = self.w0.len() / columns;
        let groups = rows.div_ceil(MR);
        // [group][k][MR]: the left factors with their scaling, as the inner loop reads them.
        let mut left = vec![0f32; groups * rank * MR];
        let mut bounds = vec![0f32; groups * MR];
        self.pack_left(rows, &mut left, &mut bounds);
        let n_panels = columns.div_ceil(NR);
        // Panels that stay in L2 while this task's rows pass, in whole strips.
        let strips_per_pass = (PANEL_BYTES / (4 * STRIP * rank.max(1))).max(1);
        let panels_per_pass = strips_per_pass * STRIP / NR;
        let mut found = Found::default();
        let mut sums = [[0f32; STRIP]; MR];
        let mut doubt = [0u8; STRIP];
        for pass in (0..n_panels).step_by(panels_per_pass) {
            let pass_end = (pass + panels_per_pass).min(n_panels);
            for group in 0..groups {
                let left = &left[group * rank * MR..][..rank * MR];
                for first in (pass..pass_end).step_by(STRIP / NR) {
                    let last = (first + STRIP / NR).min(pass_end);
                    let right = &self.panels.values[first * rank * NR..last * rank * NR];
                    if rank > 0 {
                        for (i, right) in right.chunks_exact(rank * NR).enumerate() {
                            multiply::<S, NV>(simd, left, right, &mut sums, i * NR);
                        }
                    }
                    let start = first * NR;
                    let width = STRIP.min(columns - start);
                    let norms = &self.panels.norms[start..][..width];
                    for (row, sums) in (group * MR..rows).zip(&sums) {
                        let at = row * columns + start;
                        let w0 = &self.w0[at..][..width];
                        let out = &mut all_out[at..][..width];
                        let strip = Strip {
                            w0,
                            sums: &sums[..width],
                            norms,
                            bound: bounds[row],
                        };
                        let any = match self.factors.gain.as_ref().map(|g| g[self.first_row + row] as f32) {
                            None if bounds[row] == 0.0 => {
                                strip.keep(out, &mut found);
                                false
                            }
                            None => strip.round::<false>(1.0, out, &mut doubt, &mut found),
                            Some(gain) => strip.round::<true>(gain, out, &mut doubt, &mut found),
                        };
                        if any {
                            self.settle(row, start, &doubt, w0, right, out, &mut found);
                            doubt = [0; STRIP];
                        }
                    }
                }
            }
        }
        self.tally.add(found.changed, found.differs, found.recomputed);
        if let Some(index) = found.not_finite {
            self.tally.not_finite(index);
        }
    }

    /// Computes the doubtful elements of a strip again.
    #[inline(always)]
    fn settle(
        &self,
        row: usize,
        start: usize,
        doubt: &[u8; STRIP],
        w0: &[bf16],
        right: &[f32],
        out: &mut [bf16],
        found: &mut Found,
    ) {
        let rank = self.panels.total_rank;
        for (chunk, bytes) in doubt.chunks_exact(8).enumerate() {
            if bytes == [0; 8] {
                continue;
            }
            for j in chunk * 8..(chunk * 8 + 8).min(w0.len()) {
                if doubt[j] != 0 {
                    let panel = &right[j / NR * rank * NR..][..rank * NR];
                    let new = self.exact(row, j % NR, w0[j], panel);
                    found.recomputed += 1;
                    found.changed |= out[j].to_bits() ^ new.to_bits();
                    found.differs |= w0[j].to_bits() ^ new.to_bits();
                    out[j] = new;
                    if !new.is_finite() {
                        let (_, columns) = self.update.shape();
                        let index = (self.first_row + row) * columns + start + j;
                        found.not_finite = Some(found.not_finite.map_or(index, |first| first.min(index)));
                    }
                }
            }
        }
    }

    /// Scales the left factors into place and bounds the error of a row's sums (to be multiplied by a column's norm).
    #[inline(always)]
    fn pack_left(&self, rows: usize, left: &mut [f32], bounds: &mut [f32]) {
        let rank = self.panels.total_rank;
        // Roundings of the scaled factors and of the additions that a product passes through, each at most 2⁻²⁴ of the sum of magnitudes, which
        // the product of the two norms bounds. Products may be rounded too, where there is no fused operation.
        let additions = rank.min(RUN) + rank.div_ceil(RUN);
        let per_norm = (additions as f64 + 5.0) * 2f64.powi(-24) * 1.001;
        for row in 0..rows {
            let group = &mut left[row / MR * rank * MR..][..rank * MR];
            let mut k = 0;
            let mut square = 0f64;
            let mut any = false;
            for (i, term) in self.update.terms.iter().enumerate() {
                let scale = self.factors.scale(self.update, i, self.first_row + row);
                for l in &term.left[(self.first_row + row) * term.r..][..term.r] {
                    let scaled = scale * f64::from(*l);
                    any |= scaled != 0.0;
                    let scaled = scaled as f32;
                    square += f64::from(scaled) * f64::from(scaled);
                    group[k * MR + row % MR] = scaled;
                    k += 1;
                }
            }
            // 0 says that the row has no term at all.
            if any {
                bounds[row] = (square.sqrt() * per_norm).clamp(LEAST, f64::from(f32::MAX)) as f32;
            }
        }
    }

    /// One element in f64: products of f32 are exact there, and the order of additions is fixed.
    #[inline(never)]
    fn exact(&self, row: usize, column: usize, w0: bf16, right: &[f32]) -> bf16 {
        let row = self.first_row + row;
        let mut right = right.chunks_exact(NR).map(|line| f64::from(line[column]));
        let base = f64::from(w0.to_f32());
        let mut value = self.factors.gain.as_ref().map_or(base, |g| g[row] * base);
        for (i, term) in self.update.terms.iter().enumerate() {
            let left = &term.left[row * term.r..][..term.r];
            // Four sums, since one would wait for each addition.
            let mut sums = [0f64; 4];
            for (k, l) in left.iter().enumerate() {
                sums[k % 4] += f64::from(*l) * right.next().unwrap_or(0.0);
            }
            let sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
            let scaled = self.factors.scale(self.update, i, row) * sum;
            // A weight of -0 stays -0 where nothing is added.
            if scaled != 0.0 {
                value += scaled;
            }
        }
        bf16_from_f64(value)
    }
}

/// sums[.., at..at + NR] = left · right for `MR` rows and one panel.
#[inline(always)]
fn multiply<S: Simd, const NV: usize>(
    simd: S,
    left: &[f32],
    right: &[f32],
    sums: &mut [[f32; STRIP]; MR],
    at: usize,
) {
    let (right, _) = S::as_simd_f32s(right);
    let runs = left.chunks(MR * RUN).zip(right.chunks(NV * RUN));
    for (run, (left, right)) in runs.enumerate() {
        let mut acc = [[simd.splat_f32s(0.0); NV]; MR];
        for (l, r) in left.chunks_exact(MR).zip(right.chunks_exact(NV)) {
            for i in 0..MR {
                let l = simd.splat_f32s(l[i]);
                for v in 0..NV {
                    acc[i][v] = simd.mul_add_e_f32s(l, r[v], acc[i][v]);
                }
            }
        }
        for (sums, acc) in sums.iter_mut().zip(acc) {
            let (sums, _) = S::as_mut_simd_f32s(&mut sums[at..at + NR]);
            for (s, a) in sums.iter_mut().zip(acc) {
                *s = if run == 0 { a } else { simd.add_f32s(*s, a) };
            }
        }
    }
}
