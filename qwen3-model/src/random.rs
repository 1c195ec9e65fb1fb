//! Reproducible random weights, drawn in parallel and straight into their storage.
//!
//! Values are drawn from a table of 65,536 quantiles of the normal distribution, already rounded
//! to bf16, so that a draw is one table look-up and four of them share one 64-bit random number.

use std::sync::OnceLock;

use half::bf16;
use rayon::prelude::*;

const STD: f64 = 0.02;
const NORM_STD: f64 = 0.1;
const CHUNK: usize = 1 << 16;

pub(crate) fn matrix(seed: u64, name: &str, len: usize) -> Vec<bf16> {
    let quantiles = quantiles();
    let stream = stream(seed, name);
    let mut data = vec![bf16::ZERO; len];
    data.par_chunks_mut(CHUNK).enumerate().for_each(|(chunk, data)| {
        let mut state = mix(stream ^ mix(chunk as u64));
        for four in data.chunks_mut(4) {
            let mut bits = next(&mut state);
            for x in four {
                *x = quantiles[bits as u16 as usize];
                bits >>= 16;
            }
        }
    });
    data
}

pub(crate) fn norm(seed: u64, name: &str, len: usize) -> Vec<f32> {
    let mut state = stream(seed, name);
    let draw = |_| {
        let rank = (next(&mut state) >> 11) as f64 / (1u64 << 53) as f64;
        bf16::from_f64(1.0 + NORM_STD * normal_quantile(rank.clamp(1e-9, 1.0 - 1e-9))).to_f32()
    };
    (0..len).map(draw).collect()
}

pub(crate) fn quantiles() -> &'static [bf16; 1 << 16] {
    static TABLE: OnceLock<Box<[bf16; 1 << 16]>> = OnceLock::new();
    TABLE.get_or_init(|| {
        let mut table = Box::new([bf16::ZERO; 1 << 16]);
        for (i, x) in table.iter_mut().enumerate() {
            *x = bf16::from_f64(STD * normal_quantile((i as f64 + 0.5) / 65536.0));
        }
        table
    })
}

/// A stream of its own for every tensor, whatever the order in which they are drawn.
pub(crate) fn stream(seed: u64, name: &str) -> u64 {
    // FNV-1a.
    let hash = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    mix(seed ^ name.bytes().fold(0xcbf2_9ce4_8422_2325, hash))
}

/// SplitMix64.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mix(*state)
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Inverse of the normal distribution function by Acklam's rational approximation, whose relative
/// error of 1e-9 is far below bf16. `p` is strictly between 0 and 1.
fn normal_quantile(p: f64) -> f64 {
    const A: [f64; 6] = [
        -3.969_683_028_665_376e1,
        2.209_460_984_245_205e2,
        -2.759_285_104_469_687e2,
        1.383_577_518_672_69e2,
        -3.066_479_806_614_716e1,
        2.506_628_277_459_239,
    ];
    const B: [f64; 6] = [
        -5.447_609_879_822_406e1,
        1.615_858_368_580_409e2,
        -1.556_989_798_598_866e2,
        6.680_131_188_771_972e1,
        -1.328_068_155_288_572e1,
        1.0,
    ];
    const C: [f64; 6] = [
        -7.784_894_002_430_293e-3,
        -3.223_964_580_411_365e-1,
        -2.400_758_277_161_838,
        -2.549_732_539_343_734,
        4.374_664_141_464_968,
        2.938_163_982_698_783,
    ];
    const D: [f64; 5] = [
        7.784_695_709_041_462e-3,
        3.224_671_290_700_398e-1,
        2.445_134_137_142_996,
        3.754_408_661_907_416,
        1.0,
    ];
    let polynomial = |coefficients: &[f64], x: f64| coefficients.iter().fold(0.0, |sum, c| sum * x + c);
    let tail = |p: f64| {
        let q = (-2.0 * p.ln()).sqrt();
        polynomial(&C, q) / polynomial(&D, q)
    };
    if p < 0.02425 {
        tail(p)
    } else if p > 1.0 - 0.02425 {
        -tail(1.0 - p)
    } else {
        let q = p - 0.5;
        let r = q * q;
        q * polynomial(&A, r) / polynomial(&B, r)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_the_normal_distribution() {
        for (p, z) in [
            (0.5, 0.0),
            (0.975, 1.959_964),
            (0.001, -3.090_232),
            (0.841_344_746, 1.0),
        ] {
            assert!((normal_quantile(p) - z).abs() < 1e-6, "{p}");
        }
    }

    #[test]
    fn matrices_have_the_promised_spread_and_repeat() {
        let a = matrix(1, "a", 300_000);
        let mean = a.iter().map(|x| x.to_f64()).sum::<f64>() / a.len() as f64;
        let variance = a.iter().map(|x| x.to_f64().powi(2)).sum::<f64>() / a.len() as f64;
        assert!(mean.abs() < 2e-4, "{mean}");
        assert!((variance.sqrt() - STD).abs() < 2e-4, "{}", variance.sqrt());
        assert_eq!(a, matrix(1, "a", 300_000));
        assert_ne!(a, matrix(2, "a", 300_000));
        assert_ne!(a, matrix(1, "b", 300_000));
    }
}
