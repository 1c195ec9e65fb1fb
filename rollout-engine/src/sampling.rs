//! Choosing a token from a row of logits, on the CPU.

use rayon::prelude::*;

use crate::runner::{SampledToken, Sampling};

/// Samples one token per row of `logits` `[rows, vocab]`, `rows` being the length of `sampling`.
pub(crate) fn sample_rows(logits: &[f32], vocab: usize, sampling: &[Sampling]) -> Vec<SampledToken> {
    debug_assert_eq!(logits.len(), vocab * sampling.len());
    logits
        .par_chunks_exact(vocab.max(1))
        .zip(sampling)
        .map(|(row, sampling)| match sampling {
            Sampling::Greedy => greedy(row),
        })
        .collect()
}

/// The greatest logit, of equals the first, with its log-softmax. NaN for a row that holds NaN or +∞, or nothing
/// above −∞.
fn greedy(row: &[f32]) -> SampledToken {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let token = row.iter().position(|&logit| logit == max).unwrap_or(0) as u32;
    SampledToken {
        token,
        logprob: -log_sum_exp_above(row, max),
    }
}

/// ln Σ exp(x − max). The exponentials are f32, their sum is f64.
fn log_sum_exp_above(row: &[f32], max: f32) -> f32 {
    let sum: f64 = row
        .chunks(256)
        .map(|chunk| f64::from(chunk.iter().map(|&x| (x - max).exp()).sum::<f32>()))
        .sum();
    sum.ln() as f32
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn of_equal_logits_the_first_wins() {
        let sampled = greedy(&[0.0, 3.0, 3.0, -1.0]);
        assert_eq!(sampled.token, 1);
        assert!((sampled.logprob - (-(2.0f32 + (-3f32).exp() + (-4f32).exp()).ln())).abs() < 1e-6);
    }

    #[test]
    fn rows_that_are_not_finite_are_marked() {
        for row in [
            vec![0.0, f32::NAN, 1.0],
            vec![f32::NEG_INFINITY; 4],
            vec![0.0, f32::INFINITY],
            vec![f32::NAN; 3],
        ] {
            assert!(greedy(&row).logprob.is_nan(), "{row:?}");
        }
        assert_eq!(
            greedy(&[f32::NEG_INFINITY, -2.0]),
            SampledToken {
                token: 1,
                logprob: 0.0
            }
        );
    }

    proptest! {
        #[test]
        fn logprobs_agree_with_f64(row in proptest::collection::vec(-30f32..30.0, 1..2000)) {
            let sampled = greedy(&row);
            let (best, max) = row.iter().enumerate().rev().fold((0, f32::MIN), |(i, m), (j, &x)| {
                if x >= m { (j, x) } else { (i, m) }
            });
            let sum: f64 = row.iter().map(|&x| (f64::from(x) - f64::from(max)).exp()).sum();
            prop_assert_eq!(sampled.token as usize, best);
            prop_assert!((f64::from(sampled.logprob) + sum.ln()).abs() < 1e-6);
        }
    }
}
