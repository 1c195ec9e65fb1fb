//! Right factors in the order in which the merge of a matrix reads them.

use crate::ModuleUpdate;
use crate::tile::{RUN, place};
use rayon::prelude::*;
use std::ops::Range;

/// Columns of a panel at most.
pub(crate) const WIDEST: usize = 32;
/// Least factor of a bound: the product of two covers results that are too small for relative bounds.
const LEAST: f64 = 1e-20;

/// The square root of a bound on one rounding of f32, relative, and a little more for those of the bounds themselves.
const PER_FACTOR: f64 = 1.001 / (1 << 12) as f64;

/// A row's or a column's factor of the bound on the error of a sum, from its sum of weighted squares; see [`weights`].
/// Nothing is sure where there is a NaN, so the bound is as great as can be.
pub(crate) fn bound(square: f64) -> f32 {
    let bound = square.sqrt() * PER_FACTOR;
    match bound < f64::from(f32::MAX) {
        true => bound.max(LEAST) as f32,
        false => f32::MAX,
    }
}

/// The number of roundings that a product passes through, for each of `rank` products in order.
///
/// The error of a sum is at most `2⁻²⁴ · Σ weightₖ·|lₖ·rₖ|`: each addition errs by that part of its result, in which the
/// products so far take part. By Cauchy and Schwarz that is at most `2⁻¹²·√(Σ weightₖ·lₖ²) · 2⁻¹²·√(Σ weightₖ·rₖ²)`, one
/// factor for a row and one for a column, which both stay below f32's greatest value. With `gain`, W₀ has a factor: its
/// roundings, relative to the result, are covered by units in the last place, and what W₀ may exceed the result by is at
/// most the sum.
pub(crate) fn weights(rank: usize, gain: bool) -> Vec<f64> {
    let runs = rank.div_ceil(RUN);
    // The scaled left factor is rounded, and so is the product, where there is no fused operation.
    let others = if gain { 4 } else { 2 };
    let weight = |k: usize| {
        let run = k / RUN;
        let length = RUN.min(rank - run * RUN);
        let within = length - k % RUN;
        // Sums of runs are added in order, to the first.
        let between = if run == 0 { runs - 1 } else { runs - run };
        (within + between + others) as f64
    };
    (0..rank).map(weight).collect()
}

/// All right factors, stacked along k and cut into panels of `width` columns, and the norm of each column, with
/// [`weights`]; a panel's lines and norms are laid out as [`place`] says.
pub(crate) struct Panels {
    pub(crate) total_rank: usize,
    pub(crate) values: Vec<f32>,
    pub(crate) norms: Vec<f32>,
    /// For each column, in order, padded to whole panels: the exponent of a power of two that its norm does not exceed, as in
    /// an f32's bits.
    #[cfg_attr(
        not(target_arch = "x86_64"),
        expect(dead_code, reason = "only AVX2 needs them")
    )]
    pub(crate) exponents: Vec<u8>,
}

/// The exponent of the next power of two, as in an f32's bits.
fn exponent(norm: f32) -> u8 {
    ((norm.to_bits() + 0x7f_ffff) >> 23) as u8
}

impl Panels {
    pub(crate) fn pack(update: &ModuleUpdate, columns: usize, width: usize, gain: bool) -> Self {
        let total_rank = update.total_rank();
        let n_panels = columns.div_ceil(width);
        let mut values = vec![0f32; n_panels * total_rank * width];
        let mut norms = vec![LEAST as f32; n_panels * width];
        let weights = weights(total_rank, gain);
        let pack = |(panel, (values, norms)): (usize, (&mut [f32], &mut [f32]))| {
            let start = panel * width;
            let used = width.min(columns - start);
            let mut squares = [0f64; WIDEST];
            let lines = update.terms.iter().flat_map(|t| t.right.chunks_exact(columns));
            for ((target, line), weight) in values.chunks_exact_mut(width).zip(lines).zip(&weights) {
                for (column, value) in line[start..][..used].iter().enumerate() {
                    target[place(column, width)] = *value;
                    squares[column] += weight * f64::from(*value) * f64::from(*value);
                }
            }
            for (column, square) in squares[..width].iter().enumerate() {
                norms[place(column, width)] = bound(*square);
            }
        };
        if total_rank > 0 {
            let parts = values
                .par_chunks_mut(total_rank * width)
                .zip(norms.par_chunks_mut(width));
            parts.enumerate().for_each(pack);
        }
        let exponents = (0..norms.len())
            .map(|c| exponent(norms[c / width * width + place(c % width, width)]))
            .collect();
        Self {
            exponents,
            total_rank,
            values,
            norms,
        }
    }

    /// Values `[panel][k][W]` and norms `[panel][W]` of some panels.
    #[inline(always)]
    pub(crate) fn range<const W: usize>(&self, panels: Range<usize>) -> (&[f32], &[[f32; W]]) {
        let line = self.total_rank * W;
        let (norms, _) = self.norms.as_chunks::<W>();
        (
            &self.values[panels.start * line..panels.end * line],
            &norms[panels],
        )
    }
}
