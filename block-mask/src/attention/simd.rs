//! The arithmetic: dot products, weighted sums and the exponential.
//!
//! The order of every sum depends only on the row and the keys it attends to, never on the neighbours computed in the
//! same tile, so that a query gives the same bits whether it is prefilled in a crowd or decoded alone.

use pulp::Simd;

/// Score rows are padded to whole runs of this many lanes, the widest vector there is.
pub(super) const LANES: usize = 16;

/// `q[r] · k[t]` for all pairs: each key is read once for all rows.
#[inline(always)]
pub(super) fn dots<S: Simd, const R: usize, const T: usize>(
    simd: S,
    q: [&[f32]; R],
    k: [&[f32]; T],
) -> [[f32; T]; R] {
    let (q_body, q_tail) = (q.map(|x| S::as_simd_f32s(x).0), q.map(|x| S::as_simd_f32s(x).1));
    let (k_body, k_tail) = (k.map(|x| S::as_simd_f32s(x).0), k.map(|x| S::as_simd_f32s(x).1));
    let n = q_body[0].len();
    // Equal lengths, spelled out so that the loop needs no bounds checks.
    let q_body = q_body.map(|x| &x[..n]);
    let k_body = k_body.map(|x| &x[..n]);
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
            let tail = q_tail[r].iter().zip(k_tail[t]);
            result[r][t] = tail.fold(simd.reduce_sum_f32s(sums[r][t]), |sum, (x, y)| x.mul_add(*y, sum));
        }
    }
    result
}

/// `acc += Σ weights[t] · values[t]`, keys in order; `values` is `[weights.len(), acc.len()]`.
#[inline(always)]
pub(super) fn accumulate<S: Simd>(simd: S, acc: &mut [f32], weights: &[f32], values: &[f32]) {
    let dim = acc.len();
    let mut key = 0;
    macro_rules! take {
        ($count:literal, $keyword:ident) => {
            $keyword weights.len() - key >= $count {
                let end = key + $count;
                accumulate_keys::<S, $count>(simd, acc, &weights[key..end], &values[key * dim..end * dim]);
                key = end;
            }
        };
    }
    take!(8, while);
    take!(4, if);
    take!(2, if);
    take!(1, if);
    debug_assert_eq!(key, weights.len());
}

#[inline(always)]
fn accumulate_keys<S: Simd, const T: usize>(simd: S, acc: &mut [f32], weights: &[f32], values: &[f32]) {
    let dim = acc.len();
    let (body, tail) = S::as_mut_simd_f32s(acc);
    let n = body.len();
    let lanes = dim - tail.len();
    let rows: [&[f32]; T] = std::array::from_fn(|t| &values[t * dim..(t + 1) * dim]);
    let splat: [S::f32s; T] = std::array::from_fn(|t| simd.splat_f32s(weights[t]));
    let vectors = rows.map(|row| &S::as_simd_f32s(row).0[..n]);
    for i in 0..n {
        let mut sum = body[i];
        for t in 0..T {
            sum = simd.mul_add_f32s(splat[t], vectors[t][i], sum);
        }
        body[i] = sum;
    }
    for (i, sum) in tail.iter_mut().enumerate() {
        for t in 0..T {
            *sum = weights[t].mul_add(rows[t][lanes + i], *sum);
        }
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
