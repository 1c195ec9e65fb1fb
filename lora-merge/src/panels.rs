//! Right factors in the order in which the merge of a matrix reads them.

use crate::ModuleUpdate;
use crate::tile::place;
use rayon::prelude::*;
use std::ops::Range;

/// Columns of a panel at most.
pub(crate) const WIDEST: usize = 32;
/// Least factor of a bound: the product of two covers results that are too small for relative bounds.
pub(crate) const LEAST: f64 = 1e-20;

/// All right factors, stacked along k and cut into panels of `width` columns, and the norm of each column; a panel's lines
/// and norms are laid out as [`place`] says.
pub(crate) struct Panels {
    pub(crate) total_rank: usize,
    pub(crate) values: Vec<f32>,
    pub(crate) norms: Vec<f32>,
}

impl Panels {
    pub(crate) fn pack(update: &ModuleUpdate, columns: usize, width: usize) -> Self {
        let total_rank = update.total_rank();
        let n_panels = columns.div_ceil(width);
        let mut values = vec![0f32; n_panels * total_rank * width];
        let mut norms = vec![0f32; n_panels * width];
        let pack = |(panel, (values, norms)): (usize, (&mut [f32], &mut [f32]))| {
            let start = panel * width;
            let used = width.min(columns - start);
            let mut squares = [0f64; WIDEST];
            let lines = update.terms.iter().flat_map(|t| t.right.chunks_exact(columns));
            for (target, line) in values.chunks_exact_mut(width).zip(lines) {
                for (column, value) in line[start..][..used].iter().enumerate() {
                    target[place(column, width)] = *value;
                    squares[column] += f64::from(*value) * f64::from(*value);
                }
            }
            for (column, square) in squares[..width].iter().enumerate() {
                norms[place(column, width)] =
                    (square.sqrt() * 1.000_001).clamp(LEAST, f64::from(f32::MAX)) as f32;
            }
        };
        if total_rank > 0 {
            let parts = values
                .par_chunks_mut(total_rank * width)
                .zip(norms.par_chunks_mut(width));
            parts.enumerate().for_each(pack);
        }
        Self {
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
