//! Rounding to bf16, once.

use half::bf16;

/// The bf16 nearest to `value`, ties to even, rounded once.
///
/// Going through f32 would round twice. The detour taken here first rounds to *odd* in f32, which keeps the
/// information on which side of a bf16 tie the value lies. Overflow gives ±∞, NaN stays NaN. Panics: none.
pub fn bf16_from_f64(value: f64) -> bf16 {
    let nearest = value as f32;
    let back = f64::from(nearest);
    if back == value || value.is_nan() || nearest.is_infinite() {
        // Beyond f32's largest value all is beyond bf16's as well.
        return bf16::from_f32(nearest);
    }
    let bits = nearest.to_bits();
    // Truncate towards zero, then set the last bit, since the value is not representable.
    let truncated = if back.abs() > value.abs() { bits - 1 } else { bits };
    bf16::from_f32(f32::from_bits(truncated | 1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// By search: of the two neighbours of the truncated value, the nearer one, or the even one.
    fn oracle(value: f64) -> bf16 {
        let truncated = bf16::from_bits(((value as f32).to_bits() >> 16) as u16);
        let candidates = [-1i32, 0, 1].map(|d| bf16::from_bits((i32::from(truncated.to_bits()) + d) as u16));
        let mut best = candidates[1];
        for c in candidates {
            let (new, old) = ((f64::from(c) - value).abs(), (f64::from(best) - value).abs());
            if new < old || (new == old && c.to_bits() & 1 == 0) {
                best = c;
            }
        }
        best
    }

    #[test]
    fn a_value_just_off_a_tie_is_not_rounded_twice() {
        // 1 + 2⁻⁸ is the tie between 1 and 1 + 2⁻⁷; f32 cannot see the 2⁻⁴⁰.
        let above = 1.0 + 2f64.powi(-8) + 2f64.powi(-40);
        let below = 1.0 + 3.0 * 2f64.powi(-8) - 2f64.powi(-40);
        assert_eq!(bf16_from_f64(above).to_f64(), 1.0 + 2f64.powi(-7));
        assert_eq!(bf16_from_f64(below).to_f64(), 1.0 + 2f64.powi(-7));
        assert_eq!(bf16_from_f64(1.0 + 2f64.powi(-8)).to_f64(), 1.0);
        assert_eq!(bf16_from_f64(1e300), bf16::INFINITY);
        assert_eq!(bf16_from_f64(-1e300), bf16::NEG_INFINITY);
        assert!(bf16_from_f64(f64::NAN).is_nan());
        assert_eq!(bf16_from_f64(-0.0).to_bits(), 0x8000);
    }

    proptest! {
        #[test]
        fn nearest_even(mantissa in 1.0f64..2.0, exponent in -100i32..100, negative: bool) {
            let value = mantissa * 2f64.powi(exponent) * if negative { -1.0 } else { 1.0 };
            prop_assert_eq!(bf16_from_f64(value), oracle(value));
        }

        #[test]
        fn nearest_even_near_ties(high in 0x0100u16..0x7f00, offset in -3i32..=3) {
            let tie = f64::from(f32::from_bits((u32::from(high) << 16) | 0x8000));
            let value = tie * (1.0 + f64::from(offset) * f64::EPSILON);
            prop_assert_eq!(bf16_from_f64(value), oracle(value));
        }
    }
}
