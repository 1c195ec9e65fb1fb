//! The definition of the [module](super), for one row on the CPU. What CUDA samples is tested against it.

use super::{MAX_VOCAB, Philox, Sampling, TokenLogprob, TokenState};

/// Coefficients of `2^−f = 1 + f·(c₀ + f·(c₁ + …))` for |f| ≤ ½, within 1.1·10⁻⁷ in f32. The kernel has the same.
const EXP2: [f32; 6] = [
    -std::f32::consts::LN_2,
    0.240_226_48,
    -0.055_503_324,
    0.009_618_437,
    -0.001_339_887_5,
    0.000_153_533_62,
];
/// Binary digits of a weight after the point: the best token weighs `2^44`, a whole vocabulary less than `2^63`.
const WEIGHT_BITS: u32 = 44;
/// From here on weights are 0.
const MAX_DISTANCE: f32 = WEIGHT_BITS as f32;

/// A sampled token with both of its log-probabilities.
///
/// ```
/// use qwen3_model::sampling::{Sampled, Sampling, sample_row};
///
/// let sampling = Sampling { temperature: 1.0, top_k: 2, seed: 5, ..Sampling::GREEDY };
/// let Sampled { token, logprob, sampled_logprob } = sample_row(&[0.0, 2.0, 2.0], &sampling, 0, &[]);
/// assert!(token == 1 || token == 2);
/// assert!((sampled_logprob - 0.5f32.ln()).abs() < 1e-5, "one of two equals");
/// assert!(logprob < sampled_logprob, "the third has a part of the policy");
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampled {
    /// The token.
    pub token: u32,
    /// Natural logarithm of the probability that the model gives it, at temperature 1 over the whole vocabulary. NaN if
    /// the row holds NaN or +∞, or nothing above −∞.
    pub logprob: f32,
    /// Natural logarithm of the probability that it was drawn with, after penalties, temperature and truncation; 0 at
    /// temperature 0. NaN if `logprob` is, or if no token may come.
    pub sampled_logprob: f32,
}

impl Sampling {
    /// What `max y − y` is multiplied with to give a distance in powers of two: `log2(e) / temperature`.
    pub(crate) fn distance_scale(&self) -> f32 {
        (std::f64::consts::LOG2_E / f64::from(self.temperature)) as f32
    }

    /// Greatest distance of a candidate: where `min_p` or the weights end.
    pub(crate) fn distance_limit(&self) -> f32 {
        (-f64::from(self.min_p).log2() as f32).min(MAX_DISTANCE)
    }

    /// The logit of an id after bans and penalties.
    fn penalised(&self, logit: f32, state: TokenState, may_stop: bool) -> f32 {
        if state.is_stop() && !may_stop {
            return f32::NEG_INFINITY;
        }
        let mut logit = logit;
        if state.is_seen() {
            // A product, which costs a GPU less than a quotient.
            logit *= match logit > 0.0 {
                true => 1.0 / self.repetition_penalty,
                false => self.repetition_penalty,
            };
        }
        let count = state.count();
        if count > 0 {
            logit -= self.frequency_penalty * f32::from(count);
            logit -= self.presence_penalty;
        }
        logit
    }
}

/// Samples token number `index` of its completion from a row of logits `[vocab]`. `states` `[vocab]` is what is known of
/// each id in the sequence; it is read only if [`Sampling::uses_token_states`], missing entries count as default. Of more
/// than [`MAX_VOCAB`](super::MAX_VOCAB) logits the rest counts as −∞ where a token is drawn.
pub fn sample_row(logits: &[f32], sampling: &Sampling, index: u32, states: &[TokenState]) -> Sampled {
    let max = greatest(logits);
    let log_sum = log_sum_exp_above(logits, max);
    let may_stop = index >= sampling.min_new_tokens;
    let adjusted: Vec<f32>;
    let (y, y_max) = if sampling.has_penalties() || !may_stop {
        let states = states
            .iter()
            .copied()
            .chain(std::iter::repeat(TokenState::default()));
        adjusted = (logits.iter().zip(states))
            .map(|(&logit, state)| sampling.penalised(logit, state, may_stop))
            .collect();
        (adjusted.as_slice(), greatest(&adjusted))
    } else {
        (logits, max)
    };
    let (token, sampled_logprob) = if !(sampling.temperature > 0.0 && sampling.distance_scale().is_finite()) {
        let token = y.iter().position(|&y| y == y_max).unwrap_or(0);
        let sampled_logprob = if y_max.is_finite() { 0.0 } else { f32::NAN };
        (token, sampled_logprob)
    } else {
        let random = Philox {
            seed: sampling.seed,
            completion: sampling.completion,
        };
        let (y, y_max) = match y.get(..MAX_VOCAB) {
            Some(y) => (y, greatest(y)),
            None => (y, y_max),
        };
        draw(y, y_max, sampling, random.uniform(index))
    };
    let logprob = logits
        .get(token)
        .map_or(f32::NAN, |logit| (logit - max) - log_sum);
    Sampled {
        token: token as u32,
        logprob,
        sampled_logprob: if logprob.is_nan() {
            logprob
        } else {
            sampled_logprob
        },
    }
}

/// The `n` greatest of a row of logits `[vocab]` with their log-probabilities, the greatest first, of equals the lowest id.
/// Fewer if the row has fewer than `n` numbers.
pub fn top_logprobs(logits: &[f32], n: usize) -> Vec<TokenLogprob> {
    if n == 0 {
        return Vec::new();
    }
    let max = greatest(logits);
    let log_sum = log_sum_exp_above(logits, max);
    let mut best: Vec<(u32, f32)> = (0u32..)
        .zip(logits.iter().copied())
        .filter(|(_, x)| !x.is_nan())
        .collect();
    let order = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    // -0 and 0 are equals.
    best.iter_mut().for_each(|(_, x)| *x += 0.0);
    if n < best.len() {
        best.select_nth_unstable_by(n, order);
        best.truncate(n);
    }
    best.sort_unstable_by(order);
    best.into_iter()
        .map(|(token, logit)| TokenLogprob {
            token,
            logprob: (logit - max) - log_sum,
        })
        .collect()
}

fn greatest(row: &[f32]) -> f32 {
    row.iter().copied().fold(f32::NEG_INFINITY, f32::max)
}

/// ln Σ exp(x − max). The exponentials are f32, their sum is f64.
fn log_sum_exp_above(row: &[f32], max: f32) -> f32 {
    let sum: f64 = row
        .chunks(256)
        .map(|chunk| f64::from(chunk.iter().map(|&x| (x - max).exp()).sum::<f32>()))
        .sum();
    sum.ln() as f32
}

/// `⌊2^44 · 2^−distance⌋` for distances up to [`MAX_DISTANCE`].
fn weight(distance: f32) -> u64 {
    let n = (distance + 0.5) as u32;
    let f = distance - n as f32;
    let power = EXP2.iter().rev().fold(0.0, |sum: f32, &c| sum * f + c) * f + 1.0;
    // 24 bits, exact: `power` lies between ½ and 2.
    let digits = (power * (1 << 24) as f32) as u64;
    (digits << (WEIGHT_BITS - 24)) >> n
}

/// A token and its log-probability in the truncated distribution; token 0 and NaN if no token may come.
fn draw(y: &[f32], y_max: f32, sampling: &Sampling, uniform: u64) -> (usize, f32) {
    let (scale, limit) = (sampling.distance_scale(), sampling.distance_limit());
    // NaN is not within the limit.
    let within = |y: f32| Some((y_max - y) * scale).filter(|&distance| distance <= limit);
    let mut keys = Vec::new();
    let mut total: u64 = 0;
    let truncates = sampling.top_k > 0 || sampling.top_p < 1.0;
    for distance in y.iter().filter_map(|&y| within(y)) {
        total += weight(distance);
        if truncates {
            keys.push(distance);
        }
    }
    let mut threshold = limit;
    if truncates {
        let top_k = sampling.top_k as usize;
        if top_k > 0 && top_k < keys.len() {
            threshold = *keys.select_nth_unstable_by(top_k - 1, f32::total_cmp).1;
            keys.retain(|&distance| distance <= threshold);
            total = keys.iter().map(|&distance| weight(distance)).sum();
        }
        if sampling.top_p < 1.0 && !keys.is_empty() {
            let wanted = (f64::from(sampling.top_p) * total as f64).ceil() as u64;
            threshold = smallest_reaching(&mut keys, wanted.clamp(1, total));
            keys.retain(|&distance| distance <= threshold);
            total = keys.iter().map(|&distance| weight(distance)).sum();
        }
    }
    let target = ((u128::from(uniform) * u128::from(total)) >> 64) as u64;
    let mut sum = 0;
    for (token, &y) in y.iter().enumerate() {
        if let Some(distance) = within(y).filter(|&distance| distance <= threshold) {
            sum += weight(distance);
            if sum > target {
                let log_total = (total as f64 / (1u64 << WEIGHT_BITS) as f64).ln();
                let logprob = -f64::from(distance) * std::f64::consts::LN_2 - log_total;
                return (token, logprob as f32);
            }
        }
    }
    (0, f32::NAN)
}

/// The smallest distance up to which weights sum to at least `wanted`, which all together do.
fn smallest_reaching(mut keys: &mut [f32], mut wanted: u64) -> f32 {
    while keys.len() > 1 {
        let middle = (keys.len() - 1) / 2;
        keys.select_nth_unstable_by(middle, f32::total_cmp);
        let (nearer, farther) = keys.split_at_mut(middle + 1);
        let sum: u64 = nearer.iter().map(|&distance| weight(distance)).sum();
        if sum >= wanted {
            keys = nearer;
        } else {
            wanted -= sum;
            keys = farther;
        }
    }
    keys[0]
}
