//! The merge of some rows of a matrix, with the vectors of this machine.

use crate::ModuleUpdate;
use crate::merge::{RowFactors, Tally};
use crate::panels::{LEAST, Panels};
use crate::rounding::bf16_from_f64;
use crate::tile::{self, Line, MR, RUN, Row, place};
use half::bf16;
use pulp::{Simd, WithSimd};
use std::ops::Range;

/// Bytes of packed panels that stay in L2 while a task's rows pass.
const PANEL_BYTES: usize = 192 * 1024;
/// Ranks up to which rows are merged one by one.
const ROW_RANKS: usize = 4;

/// Calls `$method` of an object with parameters for the widest vectors of this machine: the vectors that hold half a panel's
/// line, and the panel's columns.
macro_rules! with_width {
    ($simd:ident, $S:ident, $($method:tt)*) => {
        match $S::F32_LANES {
            16 => $($method)*::<$S, 1, 32>($simd),
            8 => $($method)*::<$S, 1, 16>($simd),
            4 => $($method)*::<$S, 2, 16>($simd),
            _ => $($method)*::<$S, 8, 16>($simd),
        }
    };
}

/// The columns of a panel.
pub(crate) struct Width;

impl Width {
    #[inline(always)]
    fn of<S: Simd, const H: usize, const W: usize>(&self, _: S) -> usize {
        W
    }
}

impl WithSimd for Width {
    type Output = usize;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> usize {
        with_width!(simd, S, self.of)
    }
}

/// One task: some rows of the matrix.
pub(crate) struct Block<'a> {
    pub(crate) first_row: usize,
    pub(crate) w0: &'a [bf16],
    pub(crate) out: &'a mut [bf16],
    pub(crate) update: &'a ModuleUpdate,
    pub(crate) factors: &'a RowFactors,
    pub(crate) panels: &'a Panels,
    pub(crate) tally: &'a Tally,
}

/// What a task found.
#[derive(Default)]
struct Found {
    changed: bool,
    differs: bool,
    recomputed: u64,
    not_finite: Option<usize>,
}

impl Found {
    /// Whether it is known that something changed. Then nobody looks, and former values need not be read.
    #[inline(always)]
    fn all(&self) -> bool {
        self.changed && self.differs
    }

    /// Notes whether anything changed.
    #[inline(always)]
    fn compare<const W: usize>(&mut self, former: &[bf16; W], w0: &[bf16; W], new: &[bf16; W]) {
        let bits = |values: &[bf16; W]| values.map(bf16::to_bits);
        self.changed |= bits(former) != bits(new);
        self.differs |= bits(w0) != bits(new);
    }
}

/// The left factors of a task's rows.
struct Left {
    /// `[group of MR rows][k][MR]`: with their scaling, as the inner loop reads them.
    values: Vec<f32>,
    /// Bounds on the errors of the sums, to be multiplied by a column's norm; 0 for a row without any term.
    bounds: Vec<f32>,
    gains: Option<Vec<f32>>,
}

impl Left {
    /// Bound and factor on W₀ of a row of the task.
    #[inline(always)]
    fn factors(&self, row: usize) -> (f32, f32) {
        (self.bounds[row], self.gains.as_ref().map_or(1.0, |g| g[row]))
    }
}

impl WithSimd for Block<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        with_width!(simd, S, self.run)
    }
}

impl Block<'_> {
    #[inline(always)]
    fn run<S: Simd, const H: usize, const W: usize>(mut self, simd: S) {
        let out = std::mem::take(&mut self.out);
        let (_, columns) = self.update.shape();
        let left = self.pack_left(self.w0.len() / columns);
        let mut found = Found::default();
        if self.panels.total_rank <= ROW_RANKS {
            let rows = self.w0.chunks(columns).zip(out.chunks_mut(columns));
            for (row, (w0, out)) in rows.enumerate() {
                self.row::<S, H, W>(simd, &left, row, w0, out, &mut found);
            }
        } else {
            let n_panels = columns.div_ceil(W);
            // Panels that stay in L2 while this task's rows pass.
            let most = (PANEL_BYTES / (4 * W * self.panels.total_rank)).max(1);
            for pass in (0..n_panels).step_by(most) {
                let pass = pass..(pass + most).min(n_panels);
                let groups = self.w0.chunks(MR * columns).zip(out.chunks_mut(MR * columns));
                for (index, (w0, out)) in groups.enumerate() {
                    self.group::<S, H, W>(simd, &left, index * MR, pass.clone(), (w0, out), &mut found);
                }
            }
        }
        self.tally.add(found.changed, found.differs, found.recomputed);
        if let Some(index) = found.not_finite {
            self.tally.not_finite(index);
        }
    }

    /// One whole row.
    #[inline(always)]
    fn row<S: Simd, const H: usize, const W: usize>(
        &self,
        simd: S,
        left: &Left,
        row: usize,
        w0: &[bf16],
        out: &mut [bf16],
        found: &mut Found,
    ) {
        let rank = self.panels.total_rank;
        let factors = left.factors(row);
        if factors.0 == 0.0 {
            return keep(w0, out, found);
        }
        let mut own = [0f32; ROW_RANKS];
        let group = &left.values[row / MR * rank * MR..][..rank * MR];
        for (own, line) in own.iter_mut().zip(group.chunks_exact(MR)) {
            *own = line[row % MR];
        }
        let own = &own[..rank];
        let pairs = w0.len() / (2 * W);
        match (left.gains.is_some(), found.all()) {
            (false, true) => {
                self.pairs::<S, H, W, false, false>(simd, own, row, factors, (w0, out), found);
            }
            (false, false) => {
                self.pairs::<S, H, W, false, true>(simd, own, row, factors, (w0, out), found);
            }
            (true, _) => self.pairs::<S, H, W, true, true>(simd, own, row, factors, (w0, out), found),
        }
        for panel in 2 * pairs..w0.len().div_ceil(W) {
            let (right, norms) = self.panels.range::<W>(panel..panel + 1);
            let [sums] = tile::multiply_row::<S, H, 1>(simd, own, [right]);
            let columns = panel * W..(panel * W + W).min(w0.len());
            let (w0, out) = (&w0[columns.clone()], &mut out[columns.clone()]);
            self.edge(
                simd,
                (row, columns.start),
                factors,
                sums,
                &norms[0],
                (w0, out),
                found,
            );
        }
    }

    /// The columns of a row that make up whole pairs of panels.
    #[inline(always)]
    fn pairs<S: Simd, const H: usize, const W: usize, const GAIN: bool, const LOOK: bool>(
        &self,
        simd: S,
        left: &[f32],
        row: usize,
        (bound, gain): (f32, f32),
        (w0, out): (&[bf16], &mut [bf16]),
        found: &mut Found,
    ) {
        let (w0, _) = w0.as_chunks::<W>();
        let (w0, _) = w0.as_chunks::<2>();
        let (out, _) = out.as_chunks_mut::<W>();
        let (out, _) = out.as_chunks_mut::<2>();
        let (right, norms) = self.panels.range::<W>(0..2 * w0.len());
        let (norms, _) = norms.as_chunks::<2>();
        let line = left.len() * W;
        let each = w0.iter().zip(out).zip(norms).zip(right.chunks_exact(2 * line));
        for (pair, (((w0, out), norms), right)) in each.enumerate() {
            let (right0, right1) = right.split_at(line);
            let sums = tile::multiply_row::<S, H, 2>(simd, left, [right0, right1]);
            let former = *out;
            let row_of = |i: usize| Row {
                w0: &w0[i],
                norms: &norms[i],
                bound,
                gain,
            };
            let open0 = row_of(0).round::<S, H, GAIN>(simd, sums[0], &mut out[0]);
            let open1 = row_of(1).round::<S, H, GAIN>(simd, sums[1], &mut out[1]);
            if tile::any_open(simd, simd.or_u32s(open0, open1)) {
                for i in 0..2 {
                    let line = tile::line::<S, H, W>(&sums[i]);
                    self.settle((row, (2 * pair + i) * W), &row_of(i), &line, &mut out[i], found);
                }
            }
            if LOOK {
                found.compare(&former[0], &w0[0], &out[0]);
                found.compare(&former[1], &w0[1], &out[1]);
            }
        }
    }

    /// Some panels of up to `MR` rows, whole rows of which are given.
    #[inline(always)]
    fn group<S: Simd, const H: usize, const W: usize>(
        &self,
        simd: S,
        left: &Left,
        first: usize,
        panels: Range<usize>,
        (w0, out): (&[bf16], &mut [bf16]),
        found: &mut Found,
    ) {
        let (_, columns) = self.update.shape();
        let rank = self.panels.total_rank;
        let rows = w0.len() / columns;
        let own = &left.values[first * rank..][..rank * MR];
        let factors: [(f32, f32); MR] = std::array::from_fn(|i| match i < rows {
            true => left.factors(first + i),
            false => (0.0, 1.0),
        });
        let (mut each_w0, mut each_out) = (w0.chunks(columns), out.chunks_mut(columns));
        let w0: [&[bf16]; MR] = std::array::from_fn(|_| each_w0.next().unwrap_or_default());
        let mut out: [&mut [bf16]; MR] = std::array::from_fn(|_| each_out.next().unwrap_or_default());
        // Whole panels of rows that all have terms go the short way.
        let mut rest = panels.clone();
        if factors.iter().all(|(bound, _)| *bound != 0.0) {
            rest.start = panels.end.min(columns / W).max(panels.start);
            let full = panels.start..rest.start;
            let out = out.each_mut().map(|row| &mut **row);
            match (left.gains.is_some(), found.all()) {
                (false, true) => {
                    self.tiles::<S, H, W, false, false>(simd, own, first, &factors, full, (w0, out), found);
                }
                (false, false) => {
                    self.tiles::<S, H, W, false, true>(simd, own, first, &factors, full, (w0, out), found);
                }
                (true, _) => {
                    self.tiles::<S, H, W, true, true>(simd, own, first, &factors, full, (w0, out), found)
                }
            }
        }
        for panel in rest {
            let (right, norms) = self.panels.range::<W>(panel..panel + 1);
            let sums = match factors.iter().all(|(bound, _)| *bound == 0.0) {
                true => tile::multiply::<S, H>(simd, &[], &[]),
                false => tile::multiply::<S, H>(simd, own, right),
            };
            let columns = panel * W..(panel * W + W).min(columns);
            for row in 0..rows {
                let (w0, out) = (&w0[row][columns.clone()], &mut out[row][columns.clone()]);
                match factors[row].0 == 0.0 {
                    true => keep(w0, out, found),
                    false => {
                        let at = (first + row, columns.start);
                        self.edge(simd, at, factors[row], sums[row], &norms[0], (w0, out), found);
                    }
                }
            }
        }
    }

    /// Panels whose columns are all there, of rows that all have terms.
    #[inline(always)]
    fn tiles<S: Simd, const H: usize, const W: usize, const GAIN: bool, const LOOK: bool>(
        &self,
        simd: S,
        left: &[f32],
        first: usize,
        factors: &[(f32, f32); MR],
        panels: Range<usize>,
        (w0, out): ([&[bf16]; MR], [&mut [bf16]; MR]),
        found: &mut Found,
    ) {
        let elements = panels.start * W..panels.end * W;
        let (right, norms) = self.panels.range::<W>(panels.clone());
        let right = right.chunks_exact(W * self.panels.total_rank);
        let w0 = w0.map(|row| row[elements.clone()].as_chunks::<W>().0);
        let out = out.map(|row| row[elements.clone()].as_chunks_mut::<W>().0);
        // Written out, so that all rows' sums stay in registers, and zipped, so that no place is checked.
        macro_rules! each_panel {
            ($(($($row:literal $w0:ident $out:ident),*))*) => {{
                const { assert!([$($($row),*),*].len() == MR) };
                let ([$($($w0),*),*], [$($($out),*),*]) = (w0, out);
                let rows = each_panel!(@zip $($(($w0.iter().zip($out)))*)*);
                for (panel, ((right, norms), rows)) in right.zip(norms).zip(rows).enumerate() {
                    let sums = tile::multiply::<S, H>(simd, left, right);
                    let each_panel!(@pattern $($(($w0, $out))*)*) = rows;
                    let row_of = |row: usize, w0| Row {
                        w0,
                        norms,
                        bound: factors[row].0,
                        gain: factors[row].1,
                    };
                    // Some rows are looked at together.
                    $({
                        let former = [$(*$out),*];
                        let mut open = simd.splat_u32s(0);
                        $(open = simd.or_u32s(open, row_of($row, $w0).round::<S, H, GAIN>(simd, sums[$row], $out));)*
                        if tile::any_open(simd, open) {
                            $(
                                let at = (first + $row, (panels.start + panel) * W);
                                let line = tile::line::<S, H, W>(&sums[$row]);
                                self.settle(at, &row_of($row, $w0), &line, $out, found);
                            )*
                        }
                        if LOOK {
                            let mut formers = former.iter();
                            $(if let Some(former) = formers.next() {
                                found.compare(former, $w0, $out);
                            })*
                        }
                    })*
                }
            }};
            (@zip $a:tt $($more:tt)+) => { $a.zip(each_panel!(@zip $($more)+)) };
            (@zip $a:tt) => { $a };
            (@pattern $a:tt $($more:tt)+) => { ($a, each_panel!(@pattern $($more)+)) };
            (@pattern $a:tt) => { $a };
        }
        each_panel!((0 w0 out0, 1 w1 out1) (2 w2 out2, 3 w3 out3) (4 w4 out4, 5 w5 out5));
    }

    /// One panel of one row, of which not all columns need be there.
    #[inline(always)]
    fn edge<S: Simd, const H: usize, const W: usize>(
        &self,
        simd: S,
        at: (usize, usize),
        (bound, gain): (f32, f32),
        sums: Line<S, H>,
        norms: &[f32; W],
        (w0, out): (&[bf16], &mut [bf16]),
        found: &mut Found,
    ) {
        // What is behind the last column is not looked at.
        let (mut padded, mut former) = ([bf16::ONE; W], [bf16::ONE; W]);
        padded[..w0.len()].copy_from_slice(w0);
        former[..w0.len()].copy_from_slice(out);
        let mut new = padded;
        let row = Row {
            w0: &padded,
            norms,
            bound,
            gain,
        };
        let open = match self.factors.gain().is_some() {
            false => row.round::<S, H, false>(simd, sums, &mut new),
            true => row.round::<S, H, true>(simd, sums, &mut new),
        };
        if tile::any_open(simd, open) {
            self.settle(at, &row, &tile::line::<S, H, W>(&sums), &mut new, found);
        }
        new[w0.len()..].fill(bf16::ONE);
        found.compare(&former, &padded, &new);
        out.copy_from_slice(&new[..w0.len()]);
    }

    /// Computes those elements of a row again that are open. `at` is the row within the task and the first column.
    #[cold]
    #[inline(never)]
    fn settle<const W: usize>(
        &self,
        at: (usize, usize),
        row: &Row<'_, W>,
        sums: &[f32; W],
        out: &mut [bf16; W],
        found: &mut Found,
    ) {
        let (_, columns) = self.update.shape();
        for i in 0..W.min(columns - at.1) {
            if !row.is_open(i, sums[place(i, W)]) {
                continue;
            }
            out[i] = self.exact::<W>(at.0, at.1 + i, row.w0[i]);
            found.recomputed += 1;
            if !out[i].is_finite() {
                let index = (self.first_row + at.0) * columns + at.1 + i;
                found.not_finite = Some(found.not_finite.map_or(index, |first| first.min(index)));
            }
        }
    }

    /// Scales the left factors into place and bounds the error of a row's sums (to be multiplied by a column's norm).
    #[inline(always)]
    fn pack_left(&self, rows: usize) -> Left {
        let groups = rows.div_ceil(MR);
        let mut left = vec![0f32; groups * self.panels.total_rank * MR];
        let mut bounds = vec![0f32; groups * MR];
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
        let gains = self.factors.gain();
        Left {
            values: left,
            bounds,
            gains: gains.map(|g| g[self.first_row..][..rows].iter().map(|g| *g as f32).collect()),
        }
    }

    /// One element in f64: products of f32 are exact there, and the order of additions is fixed.
    fn exact<const W: usize>(&self, row: usize, column: usize, w0: bf16) -> bf16 {
        let row = self.first_row + row;
        let (right, _) = self.panels.range::<W>(column / W..column / W + 1);
        let at = place(column % W, W);
        let mut right = right.chunks_exact(W).map(|line| f64::from(line[at]));
        let base = f64::from(w0.to_f32());
        let mut value = self.factors.gain().map_or(base, |g| g[row] * base);
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

/// A row that no term touches, or some of its columns.
#[inline(always)]
fn keep(w0: &[bf16], out: &mut [bf16], found: &mut Found) {
    found.changed |= bytemuck::cast_slice::<_, u16>(out) != bytemuck::cast_slice::<_, u16>(w0);
    out.copy_from_slice(w0);
}
