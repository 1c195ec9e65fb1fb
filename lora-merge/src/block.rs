//! The merge of some rows of a matrix, with the vectors of this machine.

use crate::ModuleUpdate;
use crate::merge::{RowFactors, Tally};
use crate::panels::{Panels, bound};
use crate::portable::{Portable, Tiles};
use crate::rounding::bf16_from_f64;
use crate::tile::{self, Line, MR, Row, place};
use half::bf16;
#[cfg(target_arch = "x86_64")]
use pulp::x86::V3;
use pulp::{Arch, Simd, WithSimd};
use std::ops::Range;

/// Bytes of packed panels that stay in L2 while a task's rows pass.
const PANEL_BYTES: usize = 192 * 1024;

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

/// The columns of a panel, as [`Block::merge`] needs them.
pub(crate) fn width() -> usize {
    #[cfg(target_arch = "x86_64")]
    if V3::try_new().is_some() {
        return crate::avx2::COLUMNS;
    }
    Arch::new().dispatch(Width)
}

/// The columns of a panel with any vectors.
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
pub(crate) struct Found {
    pub(crate) changed: bool,
    pub(crate) differs: bool,
    recomputed: u64,
    not_finite: Option<usize>,
}

impl Found {
    /// Whether it is known that something changed. Then nobody looks, and former values need not be read.
    #[inline(always)]
    pub(crate) fn all(&self) -> bool {
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
pub(crate) struct Left {
    /// `[group of MR rows][k][MR]`: with their scaling, as the inner loop reads them.
    values: Vec<f32>,
    /// Bounds on the errors of the sums, to be multiplied by a column's norm; 0 for a row without any term or gain.
    pub(crate) bounds: Vec<f32>,
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
    /// Merges, with what this machine has.
    pub(crate) fn merge(self) {
        #[cfg(target_arch = "x86_64")]
        if let Some(simd) = V3::try_new() {
            return simd.vectorize(crate::avx2::WithAvx2(simd, self));
        }
        Arch::new().dispatch(self);
    }

    #[inline(always)]
    fn slack(&self) -> u32 {
        match self.factors.gain() {
            None => tile::SLACK,
            Some(_) => tile::GAIN_SLACK,
        }
    }

    #[inline(always)]
    fn run<S: Simd, const H: usize, const W: usize>(self, simd: S) {
        let left = self.pack_left();
        self.run_with::<S, H, W, _>(simd, &left, Portable);
    }

    #[inline(always)]
    pub(crate) fn run_with<S: Simd, const H: usize, const W: usize, T: Tiles<S, H, W>>(
        mut self,
        simd: S,
        left: &Left,
        tiles: T,
    ) {
        let out = std::mem::take(&mut self.out);
        let (_, columns) = self.update.shape();
        let mut found = Found::default();
        let n_panels = columns.div_ceil(W);
        // Panels that stay in L2 while this task's rows pass.
        let most = (PANEL_BYTES / (4 * W * self.panels.total_rank.max(1))).max(1);
        let stride = MR * columns;
        for pass in (0..n_panels).step_by(most) {
            let pass = pass..(pass + most).min(n_panels);
            let (mut w0, mut out) = (self.w0, &mut *out);
            let mut first = 0;
            while !w0.is_empty() {
                let (own, rest) = w0.split_at(stride.min(w0.len()));
                let (own_out, rest_out) = out.split_at_mut(stride.min(out.len()));
                self.group::<S, H, W, T>(simd, left, first, pass.clone(), (own, own_out), tiles, &mut found);
                first += MR;
                (w0, out) = (rest, rest_out);
            }
        }
        self.tally.add(found.changed, found.differs, found.recomputed);
        if let Some(index) = found.not_finite {
            self.tally.not_finite(index);
        }
    }

    /// Some panels of up to `MR` rows, whole rows of which are given.
    #[inline(always)]
    fn group<S: Simd, const H: usize, const W: usize, T: Tiles<S, H, W>>(
        &self,
        simd: S,
        left: &Left,
        first: usize,
        panels: Range<usize>,
        (w0, out): (&[bf16], &mut [bf16]),
        tiles: T,
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
        if rank > 0 && factors.iter().all(|(bound, _)| *bound != 0.0) {
            rest.start = panels.end.min(columns / W).max(panels.start);
            let full = panels.start..rest.start;
            let out = out.each_mut().map(|row| &mut **row);
            let rows = (w0, out);
            match (left.gains.is_some(), found.all()) {
                (false, true) => {
                    tiles.tiles::<false, false>(simd, self, own, first, &factors, full, rows, found)
                }
                (false, false) => {
                    tiles.tiles::<false, true>(simd, self, own, first, &factors, full, rows, found)
                }
                (true, _) => tiles.tiles::<true, true>(simd, self, own, first, &factors, full, rows, found),
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
            slack: self.slack(),
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
    pub(crate) fn settle<const W: usize>(
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
            out[i] = self.settle_one::<W>((at.0, at.1 + i), row.w0[i], found);
        }
    }

    /// Computes one element again. `at` is the row within the task and the column.
    pub(crate) fn settle_one<const W: usize>(&self, at: (usize, usize), w0: bf16, found: &mut Found) -> bf16 {
        let new = self.exact::<W>(at.0, at.1, w0);
        found.recomputed += 1;
        if !new.is_finite() {
            let (_, columns) = self.update.shape();
            let index = (self.first_row + at.0) * columns + at.1;
            found.not_finite = Some(found.not_finite.map_or(index, |first| first.min(index)));
        }
        new
    }

    /// Scales the left factors into place and bounds the error of a row's sums (to be multiplied by a column's norm).
    #[inline(always)]
    pub(crate) fn pack_left(&self) -> Left {
        let rows = self.w0.len() / self.update.shape().1;
        let groups = rows.div_ceil(MR);
        let mut left = vec![0f32; groups * self.panels.total_rank * MR];
        let mut bounds = vec![0f32; groups * MR];
        let rank = self.panels.total_rank;
        let gains = self.factors.gain();
        let weights = crate::panels::weights(rank, gains.is_some());
        for row in 0..rows {
            let group = &mut left[row / MR * rank * MR..][..rank * MR];
            let mut k = 0;
            let mut square = 0f64;
            let mut any = gains.is_some();
            for (i, term) in self.update.terms.iter().enumerate() {
                let scale = self.factors.scale(self.update, i, self.first_row + row);
                for l in &term.left[(self.first_row + row) * term.r..][..term.r] {
                    let scaled = scale * f64::from(*l);
                    any |= scaled != 0.0;
                    let scaled = scaled as f32;
                    square += weights[k] * f64::from(scaled) * f64::from(scaled);
                    group[k * MR + row % MR] = scaled;
                    k += 1;
                }
            }
            // 0 says that the row stays as it is.
            if any {
                bounds[row] = bound(square);
            }
        }
        // One that f32 has no relative precision for leaves everything to f64.
        let gain = |gain: &f64| match *gain as f32 {
            rounded if rounded.is_normal() || *gain == 0.0 => rounded,
            _ => f32::NAN,
        };
        Left {
            values: left,
            bounds,
            gains: gains.map(|g| g[self.first_row..][..rows].iter().map(gain).collect()),
        }
    }

    /// One element in f64: products of f32 are exact there, and the order of additions is fixed.
    fn exact<const W: usize>(&self, row: usize, column: usize, w0: bf16) -> bf16 {
        let row = self.first_row + row;
        let (right, _) = self.panels.range::<W>(column / W..column / W + 1);
        let at = place(column % W, W);
        let (mut right, _) = right.as_chunks::<W>();
        let base = f64::from(w0.to_f32());
        let mut value = self.factors.gain().map_or(base, |g| g[row] * base);
        for (i, term) in self.update.terms.iter().enumerate() {
            let left = &term.left[row * term.r..][..term.r];
            // Four sums, since one would wait for each addition.
            let mut sums = [0f64; 4];
            let (own, others) = right.split_at(left.len());
            right = others;
            let ((left, left_rest), (own, own_rest)) = (left.as_chunks::<4>(), own.as_chunks::<4>());
            for (left, right) in left.iter().zip(own) {
                for i in 0..4 {
                    sums[i] += f64::from(left[i]) * f64::from(right[i][at]);
                }
            }
            for (i, (left, right)) in left_rest.iter().zip(own_rest).enumerate() {
                sums[i] += f64::from(*left) * f64::from(right[at]);
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

/// A row that no term and no gain touches, or some of its columns.
#[inline(always)]
fn keep(w0: &[bf16], out: &mut [bf16], found: &mut Found) {
    found.changed |= bytemuck::cast_slice::<_, u16>(out) != bytemuck::cast_slice::<_, u16>(w0);
    out.copy_from_slice(w0);
}
