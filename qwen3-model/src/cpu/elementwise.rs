//! The operations between the products: norms, rotary embedding, gating.
//!
//! Loops are written over arrays of [`LANES`] so that the compiler turns them into vector code
//! under [`dispatch`]; sums keep that many partial sums, in an order that does not depend on the
//! processor.

use half::bf16;
use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::simd::dispatch;

const LANES: usize = 16;
/// Below this many elements an operation is not worth sharing among threads.
const PARALLEL: usize = 1 << 14;

/// Calls `f(i, row i)` for the rows of `data`, shared among threads if there is enough to do.
pub(crate) fn for_rows(data: &mut [f32], cols: usize, f: impl Fn(usize, &mut [f32]) + Sync + Send) {
    if data.len() < PARALLEL {
        data.chunks_exact_mut(cols)
            .enumerate()
            .for_each(|(i, row)| f(i, row));
    } else {
        data.par_chunks_exact_mut(cols)
            .enumerate()
            .for_each(|(i, row)| f(i, row));
    }
}

/// Defines an operation whose body is compiled for the processor's vector instructions. A body is
/// plain loops: a closure in it that is not inlined would lose those instructions.
macro_rules! vectorized {
    ($(#[$doc:meta])* fn $name:ident<$a:lifetime>($($arg:ident: $type:ty),*) $body:block) => {
        $(#[$doc])*
        pub(crate) fn $name<$a>($($arg: $type),*) {
            struct Operation<$a> { $($arg: $type),* }
            impl<$a> WithSimd for Operation<$a> {
                type Output = ();
                #[inline(always)]
                fn with_simd<S: Simd>(self, _: S) {
                    let Self { $($arg),* } = self;
                    $body
                }
            }
            dispatch(Operation { $($arg),* })
        }
    };
}

vectorized! {
    /// Widens a row.
    fn widen<'a>(to: &'a mut [f32], from: &'a [bf16]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = f32::from_bits(u32::from(from.to_bits()) << 16);
        }
    }
}

vectorized! {
    /// `to += from`.
    fn add<'a>(to: &'a mut [f32], from: &'a [f32]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to += from;
        }
    }
}

vectorized! {
    /// `to *= by`.
    fn multiply<'a>(to: &'a mut [f32], by: &'a [f32]) {
        for (to, by) in to.iter_mut().zip(by) {
            *to *= by;
        }
    }
}

vectorized! {
    /// `to += matrix · x` for a matrix `[to, x]`.
    fn multiply_add<'a>(to: &'a mut [f32], matrix: &'a [f32], x: &'a [f32]) {
        for (to, row) in to.iter_mut().zip(matrix.chunks_exact(x.len())) {
            *to += dot(row, x);
        }
    }
}

vectorized! {
    /// `to = x / rms(x) * weight`, all of one length.
    fn rms_norm<'a>(to: &'a mut [f32], x: &'a [f32], weight: &'a [f32], eps: f32) {
        let scale = inverse_rms(x, eps);
        for ((to, x), weight) in to.iter_mut().zip(x).zip(weight) {
            *to = weight * (x * scale);
        }
    }
}

vectorized! {
    /// Norm of one head and its rotation by the angles of its position, in place. `cos` and `sin`
    /// are half as long as `head`.
    fn norm_rope<'a>(head: &'a mut [f32], weight: &'a [f32], eps: f32, cos: &'a [f32], sin: &'a [f32]) {
        let scale = inverse_rms(head, eps);
        let half = head.len() / 2;
        let (first, second) = head.split_at_mut(half);
        let (weight_1, weight_2) = weight.split_at(half);
        let weights = weight_1.iter().zip(weight_2);
        let angles = cos.iter().zip(sin);
        for (((a, b), (w1, w2)), (cos, sin)) in first.iter_mut().zip(second).zip(weights).zip(angles) {
            let (x, y) = (w1 * (*a * scale), w2 * (*b * scale));
            *a = x * cos - y * sin;
            *b = y * cos + x * sin;
        }
    }
}

vectorized! {
    /// `to = silu(gate) * up`, all of one length.
    fn silu_mul<'a>(to: &'a mut [f32], gate: &'a [f32], up: &'a [f32]) {
        for ((to, gate), up) in to.iter_mut().zip(gate).zip(up) {
            *to = gate / (1.0 + exp(-gate)) * up;
        }
    }
}

#[inline(always)]
fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    1.0 / (dot(x, x) / x.len() as f32 + eps).sqrt()
}

/// Sum of products of two slices of one length.
#[inline(always)]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; LANES];
    let (chunks_a, chunks_b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest = chunks_a.remainder().iter().zip(chunks_b.remainder());
    for (a, b) in chunks_a.zip(chunks_b) {
        for i in 0..LANES {
            sums[i] = a[i].mul_add(b[i], sums[i]);
        }
    }
    let mut width = LANES;
    while width > 1 {
        width /= 2;
        for i in 0..width {
            sums[i] += sums[i + width];
        }
    }
    let mut sum = sums[0];
    for (a, b) in rest {
        sum = a.mul_add(*b, sum);
    }
    sum
}

/// e^x to about one unit in the last place; 0 or a huge finite number out of range. NaN stays NaN.
#[inline(always)]
fn exp(x: f32) -> f32 {
    // Adding this leaves x / ln 2, rounded to an integer, in the low bits.
    const ROUND: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_145_75;
    const LN2_LOW: f32 = 1.428_606_8e-6;
    // Comparisons, not clamp: NaN must pass through.
    let x = if x < -87.0 { -87.0 } else { x };
    let x = if x > 88.0 { 88.0 } else { x };
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN2_HIGH, x);
    let r = n.mul_add(-LN2_LOW, r);
    let p = 1.987_569_1e-4f32;
    let p = p.mul_add(r, 1.398_199_9e-3);
    let p = p.mul_add(r, 8.333_452e-3);
    let p = p.mul_add(r, 4.166_579_6e-2);
    let p = p.mul_add(r, 1.666_666_5e-1);
    let p = p.mul_add(r, 0.5);
    let p = p.mul_add(r * r, r) + 1.0;
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
    p * scale
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_exact_to_two_units_in_the_last_place() {
        for i in -870_000..880_000 {
            let x = i as f32 * 1e-4;
            let exact = f64::from(x).exp();
            let error = (f64::from(exp(x)) - exact).abs() / exact;
            assert!(error < 2.4e-7, "{x}: {error}");
        }
        assert!(exp(f32::NAN).is_nan());
        assert!(exp(f32::NEG_INFINITY) < 1e-37);
    }

    #[test]
    fn silu_keeps_zeros_and_large_values() {
        let gate = [0.0, 100.0, -100.0, 1.0, f32::MAX, f32::MIN];
        let mut out = [f32::NAN; 6];
        silu_mul(&mut out, &gate, &[2.0; 6]);
        assert_eq!((out[0], out[1]), (0.0, 200.0));
        assert!(out[2].abs() < 1e-30, "{}", out[2]);
        assert!((out[3] - 2.0 * 0.731_058_6).abs() < 1e-6);
        assert!(out[4].is_infinite() && out[5].abs() < 10.0, "{out:?}");
    }

    #[test]
    fn norm_of_rows_of_any_length_agrees_with_f64() {
        for len in [2, 15, 16, 17, 64, 128, 250] {
            let x: Vec<f32> = (0..len).map(|i| (i as f32 * 0.7).sin() * 3.0).collect();
            let weight: Vec<f32> = (0..len).map(|i| 1.0 + 0.01 * i as f32).collect();
            let mut out = vec![f32::NAN; len];
            rms_norm(&mut out, &x, &weight, 1e-6);
            let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / len as f64;
            for ((out, x), weight) in out.iter().zip(&x).zip(&weight) {
                let exact = f64::from(*weight) * f64::from(*x) / (mean + 1e-6).sqrt();
                assert!((f64::from(*out) - exact).abs() < 1e-5, "{len}");
            }
        }
    }

    #[test]
    fn rotation_turns_pairs_half_a_head_apart() {
        let mut head = [1.0, 0.0, 0.0, 1.0];
        // Norm: rms of the head is √½, weights undo it.
        let weight = [0.5f32.sqrt(); 4];
        let (cos, sin) = ([0.6, 1.0], [0.8, 0.0]);
        norm_rope(&mut head, &weight, 0.0, &cos, &sin);
        for (got, want) in head.iter().zip([0.6, 0.0, 0.8, 1.0]) {
            assert!((got - want).abs() < 1e-6, "{head:?}");
        }
    }
}
