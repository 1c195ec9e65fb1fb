//! Six rows by some columns: sums in registers, added to W₀, rounded, and tested, without a way through memory.
//!
//! # Even and odd columns
//! A word of 32 bits holds two neighbouring bf16. Shifted left it is the even one as an f32, masked the odd one; and two
//! rounded f32 make a word again. So a panel's line has its even columns first, then its odd ones:
//!
//! ```text
//! columns    0  1  2  3 … 15        word   [ odd | even ]      little-endian, which `column` and `place` hide
//! line       0  2  4 … 14 | 1  3  5 … 15
//! ```
//!
//! # How an element is tested
//! The f32 sum v is rounded by adding half the distance between two bf16 to its bits and cutting them off. So are the
//! magnitudes |v| ± error. Two units in the last place of f32 more than the error cover the roundings of v and of the two
//! ends. Where both ends give the same bf16, so does every value between them: it is the correctly rounded one. A tie
//! between two bf16 lies strictly inside every interval that touches it, so ties need no care. 0 and what is not finite are
//! left open.

use half::bf16;
use pulp::Simd;

/// Rows held in registers.
pub(crate) const MR: usize = 6;
/// Products that are added in one go; longer sums are cut, which keeps the error bound small.
pub(crate) const RUN: usize = 16;
/// Units in the last place that cover the roundings of a value and of its ends.
pub(crate) const SLACK: u32 = 2;
/// The same, if W₀ has a factor, for which and for whose product they are rounded as well.
pub(crate) const GAIN_SLACK: u32 = 8;
/// Half the distance between two bf16 in bits of an f32.
const HALF: u32 = 0x8000;
/// The bits of an f32 that are a bf16.
const UPPER: u32 = 0xffff_0000;
/// The greatest f32 that is rounded to a finite bf16, its bits.
const GREATEST: i32 = 0x7f7f_7fff;

/// `H` vectors of even columns and as many of odd ones.
pub(crate) type Line<S, const H: usize> = [[<S as Simd>::f32s; H]; 2];

/// The place of a column in a panel's line.
pub(crate) const fn place(column: usize, width: usize) -> usize {
    let odd = (column % 2 == 1) != cfg!(target_endian = "big");
    column / 2 + if odd { width / 2 } else { 0 }
}

/// `left · right`, of `[k][MR]` and `[k][W]`.
#[inline(always)]
pub(crate) fn multiply<S: Simd, const H: usize>(simd: S, left: &[f32], right: &[f32]) -> [Line<S, H>; MR] {
    let (right, _) = S::as_simd_f32s(right);
    let first = (left.len().min(MR * RUN), right.len().min(2 * H * RUN));
    let mut sums = multiply_run(simd, &left[..first.0], &right[..first.1]);
    let runs = left[first.0..]
        .chunks(MR * RUN)
        .zip(right[first.1..].chunks(2 * H * RUN));
    for (left, right) in runs {
        let more = multiply_run::<S, H>(simd, left, right);
        for row in 0..MR {
            for parity in 0..2 {
                for i in 0..H {
                    sums[row][parity][i] = simd.add_f32s(sums[row][parity][i], more[row][parity][i]);
                }
            }
        }
    }
    sums
}

#[inline(always)]
fn multiply_run<S: Simd, const H: usize>(simd: S, left: &[f32], right: &[S::f32s]) -> [Line<S, H>; MR] {
    let mut sums = [[[simd.splat_f32s(0.0); H]; 2]; MR];
    for (l, r) in left.chunks_exact(MR).zip(right.chunks_exact(2 * H)) {
        for row in 0..MR {
            let l = simd.splat_f32s(l[row]);
            for parity in 0..2 {
                for i in 0..H {
                    sums[row][parity][i] = simd.mul_add_e_f32s(l, r[parity * H + i], sums[row][parity][i]);
                }
            }
        }
    }
    sums
}

/// A line's values.
#[inline(always)]
pub(crate) fn line<S: Simd, const H: usize, const W: usize>(values: &Line<S, H>) -> [f32; W] {
    let mut line = [0.0; W];
    line.copy_from_slice(bytemuck::cast_slice(values.as_flattened()));
    line
}

/// One row of a panel, `W` columns.
pub(crate) struct Row<'a, const W: usize> {
    pub(crate) w0: &'a [bf16; W],
    /// In the order of a line.
    pub(crate) norms: &'a [f32; W],
    /// Bound on the error of the sums, to be multiplied by a column's norm.
    pub(crate) bound: f32,
    /// Factor on W₀.
    pub(crate) gain: f32,
    /// Units in the last place to be added to the error.
    pub(crate) slack: u32,
}

impl<const W: usize> Row<'_, W> {
    /// Writes sums, added to W₀ and rounded, be they sure or not. Returns bits in which the two ends differ; see [`any_open`].
    #[inline(always)]
    pub(crate) fn round<S: Simd, const H: usize, const GAIN: bool>(
        &self,
        simd: S,
        sums: Line<S, H>,
        out: &mut [bf16; W],
    ) -> S::u32s {
        debug_assert_eq!(W, 2 * H * S::F32_LANES);
        let (half, upper, sixteen) = (simd.splat_u32s(HALF), simd.splat_u32s(UPPER), simd.splat_u32s(16));
        let outward = simd.splat_u32s(HALF + self.slack);
        let inward = simd.splat_u32s(HALF - self.slack);
        let finite = simd.splat_i32s(GREATEST);
        let bound = simd.splat_f32s(self.bound);
        let (norms, _) = S::as_simd_f32s(self.norms);
        let size = size_of::<S::u32s>();
        let w0: &[u8] = bytemuck::cast_slice(self.w0);
        let to: &mut [u8] = bytemuck::cast_slice_mut(out);
        let mut open = simd.splat_u32s(0);
        for i in 0..H {
            let word: S::u32s = bytemuck::pod_read_unaligned(&w0[i * size..][..size]);
            let mut new = [word; 2];
            for parity in 0..2 {
                let base = match parity {
                    0 => simd.wrapping_dyn_shl_u32s(word, sixteen),
                    _ => simd.and_u32s(word, upper),
                };
                let mut base = simd.transmute_f32s_u32s(base);
                if GAIN {
                    base = simd.mul_f32s(base, simd.splat_f32s(self.gain));
                }
                let value = simd.add_f32s(base, sums[parity][i]);
                let size = simd.abs_f32s(value);
                let norm = norms[parity * H + i];
                let far = simd.mul_add_e_f32s(bound, norm, size);
                let near = simd.negate_mul_add_e_f32s(bound, norm, size);
                // Infinity and NaN become finite in one of the two alone.
                let near = simd.transmute_i32s_u32s(simd.transmute_u32s_f32s(near));
                let near = simd.transmute_u32s_i32s(simd.min_i32s(near, finite));
                let near = simd.add_u32s(near, inward);
                let far = simd.add_u32s(simd.transmute_u32s_f32s(far), outward);
                open = simd.or_u32s(open, simd.xor_u32s(far, near));
                new[parity] = simd.add_u32s(simd.transmute_u32s_f32s(value), half);
            }
            let word = simd.or_u32s(
                simd.wrapping_dyn_shr_u32s(new[0], sixteen),
                simd.and_u32s(new[1], upper),
            );
            to[i * size..][..size].copy_from_slice(bytemuck::bytes_of(&word));
        }
        open
    }

    /// Whether `round` found that a column is open, given its sum. May also be true of one that is barely sure.
    pub(crate) fn is_open(&self, column: usize, sum: f32) -> bool {
        let base = self.gain * self.w0[column].to_f32();
        // A little more than above, where operations are fused or not.
        let error = 1.000_01 * (self.bound * self.norms[place(column, W)]);
        let size = (base + sum).abs();
        let (far, near) = ((size + error).to_bits(), (size - error).to_bits());
        let near = (near as i32).min(GREATEST) as u32;
        (far.wrapping_add(HALF + self.slack + 1) ^ near.wrapping_add(HALF - self.slack - 1)) & UPPER != 0
    }
}

/// Whether `round` left anything open that gave these bits, or some of them together.
#[inline(always)]
pub(crate) fn any_open<S: Simd>(simd: S, open: S::u32s) -> bool {
    let upper = simd.and_u32s(open, simd.splat_u32s(UPPER));
    any(upper)
}

/// `all`, and bits in which the two differ.
#[inline(always)]
pub(crate) fn differences<S: Simd, const W: usize>(
    simd: S,
    mut all: S::u32s,
    one: &[bf16; W],
    other: &[bf16; W],
) -> S::u32s {
    let size = size_of::<S::u32s>();
    let (one, other): (&[u8], &[u8]) = (bytemuck::cast_slice(one), bytemuck::cast_slice(other));
    for i in 0..2 * W / size {
        let one: S::u32s = bytemuck::pod_read_unaligned(&one[i * size..][..size]);
        let other: S::u32s = bytemuck::pod_read_unaligned(&other[i * size..][..size]);
        all = simd.or_u32s(all, simd.xor_u32s(one, other));
    }
    all
}

/// Whether any bit is set.
#[inline(always)]
pub(crate) fn any<V: bytemuck::NoUninit>(bits: V) -> bool {
    let words: &[u32] = bytemuck::cast_slice(std::slice::from_ref(&bits));
    words.iter().fold(0, |all, word| all | word) != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_taken_apart_as_a_line_is_laid_out() {
        for width in [2usize, 16, 32] {
            let columns: Vec<bf16> = (0..width).map(|c| bf16::from_f32(c as f32)).collect();
            let words: Vec<u32> = bytemuck::pod_collect_to_vec(&columns);
            let mut line: Vec<f32> = words.iter().map(|w| f32::from_bits(w << 16)).collect();
            line.extend(words.iter().map(|w| f32::from_bits(w & UPPER)));
            for column in 0..width {
                assert_eq!(line[place(column, width)], column as f32);
            }
        }
    }
}
