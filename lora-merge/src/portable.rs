//! How whole panels of whole groups of rows are merged, on any machine.

use crate::block::{Block, Found};
use crate::tile::{self, MR, Row};
use half::bf16;
use pulp::Simd;
use std::ops::Range;

/// How panels whose columns are all there are merged, of rows that all have terms.
pub(crate) trait Tiles<S: Simd, const H: usize, const W: usize>: Copy {
    /// Merges `panels` of rows that are given whole, the first of
    /// which is the task's row `first`.
    fn tiles<const GAIN: bool, const LOOK: bool>(
        self,
        simd: S,
        block: &Block<'_>,
        left: &[f32],
        first: usize,
        factors: &[(f32, f32); MR],
        panels: Range<usize>,
        rows: ([&[bf16]; MR], [&mut [bf16]; MR]),
        found: &mut Found,
    );
}

/// With any vectors.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

impl<S: Simd, const H: usize, const W: usize> Tiles<S, H, W> for Portable {
    #[inline(always)]
    fn tiles<const GAIN: bool, const LOOK: bool>(
        self,
        simd: S,
        block: &Block<'_>,
        left: &[f32],
        first: usize,
        factors: &[(f32, f32); MR],
        panels: Range<usize>,
        (w0, out): ([&[bf16]; MR], [&mut [bf16]; MR]),
        found: &mut Found,
    ) {
        let elements = panels.start * W..panels.end * W;
        let (right, norms) = block.panels.range::<W>(panels.clone());
        let line = W * block.panels.total_rank;
        let n = norms.len();
        let w0 = w0.map(|row| &row[elements.clone()].as_chunks::<W>().0[..n]);
        let out = out.map(|row| &mut row[elements.clone()].as_chunks_mut::<W>().0[..n]);
        let mut changed = simd.splat_u32s(0);
        let mut differs = simd.splat_u32s(0);
        for (panel, right) in right.chunks_exact(line).enumerate().take(n) {
            let sums = tile::multiply::<S, H>(simd, left, right);
            let norms = &norms[panel];
            for pair in 0..MR / 2 {
                let row_of = |row: usize| Row {
                    w0: &w0[row][panel],
                    norms,
                    bound: factors[row].0,
                    gain: factors[row].1,
                    slack: if GAIN { tile::GAIN_SLACK } else { tile::SLACK },
                };
                let rows = [2 * pair, 2 * pair + 1];
                let mut open = simd.splat_u32s(0);
                let former = rows.map(|row| if LOOK { out[row][panel] } else { [bf16::ONE; W] });
                for row in rows {
                    open = simd.or_u32s(
                        open,
                        row_of(row).round::<S, H, GAIN>(simd, sums[row], &mut out[row][panel]),
                    );
                }
                if tile::any_open(simd, open) {
                    for row in rows {
                        let at = (first + row, (panels.start + panel) * W);
                        let line = tile::line::<S, H, W>(&sums[row]);
                        block.settle(at, &row_of(row), &line, &mut out[row][panel], found);
                    }
                }
                if LOOK {
                    for (row, former) in rows.into_iter().zip(&former) {
                        let new = &out[row][panel];
                        changed = tile::differences(simd, changed, former, new);
                        differs = tile::differences(simd, differs, &w0[row][panel], new);
                    }
                }
            }
        }
        if LOOK {
            found.changed |= tile::any(changed);
            found.differs |= tile::any(differs);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::block::Width;
    use crate::merge::{RowFactors, merge_tasks};
    use crate::{Error, LowRankTerm, MergeOutcome, ModuleUpdate, bf16_from_f64, merge_into};
    use half::bf16;
    use proptest::prelude::*;
    use pulp::{Arch, Scalar, Simd};

    /// Merges with this machine's own way, with any vectors, and without vectors. Each result is compared with the formula in
    /// f64, but for elements whose f64 sum lies within 1e-11 of it of a tie; all results with one another.
    fn check(w0: &[bf16], update: &ModuleUpdate) -> Result<MergeOutcome, Error> {
        let (_, columns) = update.shape();
        let factors = RowFactors::plain(update);
        let empty = || vec![bf16::from_f32(0.77); w0.len()];
        let (mut own, mut any, mut scalar) = (empty(), empty(), empty());
        let outcome = merge_into(w0, update, &mut own);
        let width = Arch::new().dispatch(Width);
        let of_any = merge_tasks(w0, update, &factors, &mut any, width, |block| {
            Arch::new().dispatch(block)
        });
        let width = Scalar.vectorize(Width);
        let of_scalar = merge_tasks(w0, update, &factors, &mut scalar, width, |block| {
            Scalar.vectorize(block)
        });
        let message = |r: &Result<MergeOutcome, Error>| {
            r.as_ref()
                .map(|o| (o.changed, o.differs_from_base))
                .map_err(Error::to_string)
        };
        assert_eq!(message(&outcome), message(&of_any));
        assert_eq!(message(&outcome), message(&of_scalar));
        let term = &update.terms[0];
        for (i, own) in own.iter().enumerate() {
            let product = |k: usize| {
                f64::from(term.left[i / columns * term.r + k])
                    * f64::from(term.right[k * columns + i % columns])
            };
            let exact = w0[i].to_f64() + (0..term.r).map(product).sum::<f64>();
            let near = [1.0 - 1e-11, 1.0 + 1e-11].map(|factor| bf16_from_f64(exact * factor));
            let same = |a: bf16, b: bf16| a.to_bits() == b.to_bits() || a == b || a.is_nan() && b.is_nan();
            assert!(
                near.iter().any(|near| same(*near, *own)),
                "{i}: {own:?} for {exact:e}"
            );
            assert!(
                same(*own, any[i]) && same(*own, scalar[i]),
                "{i}: {own:?}, {:?}, {:?}",
                any[i],
                scalar[i]
            );
        }
        outcome
    }

    fn update(rows: usize, columns: usize, left: Vec<f32>, right: Vec<f32>) -> ModuleUpdate {
        let term = LowRankTerm {
            r: left.len() / rows,
            left: left.into(),
            right: right.into(),
            scaling: 1.0,
            magnitude: None,
        };
        ModuleUpdate::from_terms(rows, columns, vec![term]).unwrap()
    }

    proptest! {
        /// Any weights, sums of any size beside them.
        #[test]
        fn all_ways_agree_on_any_bits(
            bits in proptest::collection::vec(any::<u16>(), 9 * 150), not_finite in any::<bool>(), r in 1usize..40,
            left in -60i32..60, right in -60i32..60, seed: u64,
        ) {
            let mut random = crate::random::Gaussian::new(seed);
            let mut draw = |n: usize, exponent: i32| (0..n).map(|_| random.next() * 2f32.powi(exponent)).collect::<Vec<_>>();
            let finite = |bits: &u16| if bits & 0x7f80 == 0x7f80 && !not_finite { bits & 0xbfff } else { *bits };
            let w0: Vec<bf16> = bits.iter().map(|bits| bf16::from_bits(finite(bits))).collect();
            let update = update(9, 150, draw(9 * r, left), draw(150 * r, right));
            let outcome = check(&w0, &update);
            prop_assert!(not_finite || outcome.is_ok() || left + right > 90);
        }

        /// Powers of two less what makes a tie below them, and a little: the result's exponent is the greater one, or not.
        /// Large terms that cancel make the sums inexact.
        #[test]
        fn ties_below_powers_of_two(exponent in -40i32..40, large in 0i32..12, wiggle in -40i32..40, noise in -2i32..3) {
            let power = 2f32.powi(exponent);
            let tie = power * 2f32.powi(-9);
            let right = |k: usize| match k {
                0 => power * 2f32.powi(large) * 1.37,
                3 => -power * 2f32.powi(large) * 1.37,
                1 => -tie,
                _ => tie * 2f32.powi(-12) * wiggle as f32 + tie * 2f32.powi(-22) * noise as f32,
            };
            let right = (0..4).flat_map(|k| [right(k); 144]).collect();
            let w0: Vec<bf16> = (0..8 * 144).map(|i| bf16::from_f32(if i % 3 == 0 { power } else { power * 1.5 })).collect();
            prop_assert!(check(&w0, &update(8, 144, vec![1.0; 8 * 4], right)).is_ok());
        }
    }
}
