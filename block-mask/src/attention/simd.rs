//! The arithmetic: dot products, weighted sums and the exponential.
//!
//! The order of every sum depends only on the row and the keys it attends to, never on the neighbours computed in the
//! same tile, so that a query gives the same bits whether it is prefilled in a crowd or decoded alone.

use pulp::Simd;

/// Score rows are padded to whole runs of this many lanes, the widest vector there is.
pub(super) const LANES: usize = 16;

// Arrays are filled by loops below: the library's closures over arrays are compiled as functions of their own, outside
// the instruction set that the kernels are dispatched to.

/// `q[r] · k[t]` for all pairs: each key is read once for all rows.
#[inline(always)]
pub(super) fn dots<S: Simd, const R: usize, const T: usize>(
    simd: S,
    q: [&[f32]; R],
    k: [&[f32]; T],
) -> [[f32; T]; R] {
    let empty: &[S::f32s] = &[];
    let none: &[f32] = &[];
    let (mut q_body, mut q_tail) = ([empty; R], [none; R]);
    let (mut k_body, mut k_tail) = ([empty; T], [none; T]);
    let n = S::as_simd_f32s(q[0]).0.len();
    // Equal lengths, spelled out so that the loop needs no bounds checks.
    for r in 0..R {
        let (body, tail) = S::as_simd_f32s(q[r]);
        (q_body[r], q_tail[r]) = (&body[..n], tail);
    }
    for t in 0..T {
        let (body, tail) = S::as_simd_f32s(k[t]);
        (k_body[t], k_tail[t]) = (&body[..n], tail);
    }
    let mut sums = [[simd.splat_f32s(0.0); T]; R];
    for i in 0..n {
        for r in 0..R {
            for t in 0..T {
                sums[r][t] = simd.mul_add_f32s(q_body[r][i], k_body[t][i], sums[r][t]);
            }
        }
    }
    let mut result = [[0.0; T]; R];
    for r in 0..R {
        for t in 0..T {
            let mut sum = simd.reduce_sum_f32s(sums[r][t]);
            for (x, y) in q_tail[r].iter().zip(k_tail[t]) {
                sum = x.mul_add(*y, sum);
            }
            result[r][t] = sum;
        }
    }
    result
}

/// `acc[r] += Σ weights[r][t] · values[t]`, keys in order, for `R` rows that attend to the same keys. `acc` holds the rows
/// one after another, `weights` the first row's, with those of the next `stride` further; `values` is `[keys, dim]`.
#[inline(always)]
pub(super) fn accumulate<S: Simd, const R: usize, const C: usize>(
    simd: S,
    acc: &mut [f32],
    dim: usize,
    weights: &[f32],
    stride: usize,
    keys: usize,
    values: &[f32],
) {
    let none: &[f32] = &[];
    let mut rows = [none; R];
    for r in 0..R {
        rows[r] = &weights[r * stride..r * stride + keys];
    }
    let values = &values[..keys * dim];
    let (body, tail) = S::as_simd_f32s(&acc[..dim]);
    let (n, lanes) = (body.len(), dim - tail.len());
    let mut i = 0;
    // Sums of R rows × C vectors stay in registers while the keys pass by.
    while i + C <= n {
        accumulate_columns::<S, R, C>(simd, acc, dim, &rows, keys, values, i);
        i += C;
    }
    while i < n {
        accumulate_columns::<S, R, 1>(simd, acc, dim, &rows, keys, values, i);
        i += 1;
    }
    for d in lanes..dim {
        for r in 0..R {
            let mut sum = acc[r * dim + d];
            for t in 0..keys {
                sum = rows[r][t].mul_add(values[t * dim + d], sum);
            }
            acc[r * dim + d] = sum;
        }
    }
}

#[inline(always)]
fn accumulate_columns<S: Simd, const R: usize, const C: usize>(
    simd: S,
    acc: &mut [f32],
    dim: usize,
    rows: &[&[f32]; R],
    keys: usize,
    values: &[f32],
    i: usize,
) {
    let mut sums = [[simd.splat_f32s(0.0); C]; R];
    for r in 0..R {
        let acc = &S::as_simd_f32s(&acc[r * dim..(r + 1) * dim]).0[i..i + C];
        sums[r].copy_from_slice(acc);
    }
    for (t, values) in values.chunks_exact(dim).take(keys).enumerate() {
        let values = &S::as_simd_f32s(values).0[i..i + C];
        for r in 0..R {
            let weight = simd.splat_f32s(rows[r][t]);
            for c in 0..C {
                sums[r][c] = simd.mul_add_f32s(weight, values[c], sums[r][c]);
            }
        }
    }
    for r in 0..R {
        let acc = &mut S::as_mut_simd_f32s(&mut acc[r * dim..(r + 1) * dim]).0[i..i + C];
        acc.copy_from_slice(&sums[r]);
    }
}

/// The largest of whole runs of lanes; NaN entries are passed over.
#[inline(always)]
pub(super) fn largest(scores: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for chunk in scores.chunks_exact(LANES) {
        for (lane, &score) in lanes.iter_mut().zip(chunk) {
            *lane = if score > *lane { score } else { *lane };
        }
    }
    lanes.iter().fold(
        f32::NEG_INFINITY,
        |max, &lane| if lane > max { lane } else { max },
    )
}

/// Replaces whole runs of lanes by `exp(score − max)` and returns their sum.
#[inline(always)]
pub(super) fn exponentials(scores: &mut [f32], max: f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    for chunk in scores.chunks_exact_mut(LANES) {
        for (lane, score) in lanes.iter_mut().zip(chunk) {
            *score = exp(*score - max);
            *lane += *score;
        }
    }
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// eˣ for x ≤ 0 with a relative error of about 10⁻⁷; 0 below −87, NaN for NaN.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    const LOWEST: f32 = -87.0;
    // Adding this rounds to an integer, which is then found in the low bits of the sum.
    const ROUND: f32 = 12_582_912.0;
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let clamped = if x < LOWEST { LOWEST } else { x };
    let shifted = clamped.mul_add(std::f32::consts::LOG2_E, ROUND);
    let exponent = shifted - ROUND;
    let r = exponent.mul_add(-LN_2_LOW, exponent.mul_add(-LN_2_HIGH, clamped));
    let mut y = 1.987_569_1e-4f32;
    for coefficient in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        y = y.mul_add(r, coefficient);
    }
    y = y.mul_add(r * r, r) + 1.0;
    let scaled = f32::from_bits(y.to_bits().wrapping_add(shifted.to_bits() << 23));
    if x < LOWEST { 0.0 } else { scaled }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exponential_is_accurate_to_f32() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert!(exp(f32::NAN).is_nan());
        for i in 0..870_000 {
            let x = -(i as f32) * 1e-4;
            let expected = f64::from(x).exp();
            let error = (f64::from(exp(x)) - expected).abs() / expected;
            assert!(error < 2e-7, "exp({x}) is off by {error:e}");
        }
    }
}
