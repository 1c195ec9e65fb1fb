//! Whether options changed numbers.
//!
//! A probe generates a few greedy tokens of the workload's prompts and keeps, at each, the log-probabilities of the most
//! likely ids. Two sets of options may differ in the order of sums, so in last bits, and now and then in a token where two ids
//! are nearly as likely; up to and including such a token both have seen the same text, and there the distributions
//! are compared.

use crate::cli::CliError;
use crate::cli::bench::Round;
use crate::completion::TokenCompletion;
use crate::request::SamplingParams;
use crate::runner::Runner;
use crate::scheduler::Scheduler;

/// New tokens of each prompt of a probe.
const NEW_TOKENS: usize = 8;
/// Alternatives that are compared at each.
const TOP: usize = 20;
/// Prompts of a probe at most.
const PROMPTS: usize = 16;

/// What a set of options computed, `[prompts][tokens]`.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Probe(Vec<Vec<Position>>);

/// One new token, and the most likely ids there.
#[derive(Clone, Debug, PartialEq)]
struct Position {
    token: u32,
    top: Vec<(u32, f32)>,
}

impl Probe {
    /// Of the first prompts of a workload.
    pub(super) fn take<R: Runner>(
        scheduler: &mut Scheduler<R>,
        prompts: &[Vec<u32>],
    ) -> Result<Self, CliError> {
        let sampling = SamplingParams {
            max_new_tokens: NEW_TOKENS,
            ignore_eos: true,
            top_logprobs: TOP,
            ..SamplingParams::default()
        };
        let prompts = &prompts[..prompts.len().min(PROMPTS)];
        let round = Round::run(scheduler, prompts, 1, &sampling, 0, |_| Ok(()))?;
        Ok(Self(round.completions.iter().map(positions).collect()))
    }

    /// Mean |difference| of log-probabilities, in nats; infinite for what is not comparable.
    pub(super) fn difference(&self, other: &Self) -> f64 {
        let (mut sum, mut count) = (0.0, 0usize);
        if self.0.len() != other.0.len() {
            return f64::INFINITY;
        }
        for (ours, theirs) in self.0.iter().zip(&other.0) {
            if ours.len() != theirs.len() {
                return f64::INFINITY;
            }
            for (a, b) in ours.iter().zip(theirs) {
                for (x, y) in [(a, b), (b, a)] {
                    let last = y.top.iter().map(|(_, p)| *p).fold(f32::INFINITY, f32::min);
                    for (id, p) in &x.top {
                        let found = y.top.iter().find(|(other, _)| other == id);
                        // What the other does not list is at most as likely as its last.
                        let difference = match found {
                            Some((_, q)) => (p - q).abs(),
                            None => (p - last).max(0.0),
                        };
                        sum += f64::from(difference);
                        count += 1;
                    }
                }
                if a.token != b.token {
                    break;
                }
            }
        }
        match (count, sum.is_nan()) {
            (0, _) | (_, true) => f64::INFINITY,
            (count, false) => sum / count as f64,
        }
    }
}

fn positions(completion: &TokenCompletion) -> Vec<Position> {
    let tops = completion.top_logprobs.iter();
    completion
        .token_ids
        .iter()
        .zip(tops)
        .map(|(&token, top)| Position {
            token,
            top: top.iter().map(|of| (of.token, of.logprob)).collect(),
        })
        .collect()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A probe of one prompt, with all log-probabilities moved by `by`.
    pub(in crate::cli::tune) fn moved(by: f32) -> Probe {
        let position = |token: u32| Position {
            token,
            top: (0..20).map(|id| (id, -1.0 - id as f32 / 10.0 + by)).collect(),
        };
        Probe(vec![(0..8).map(position).collect()])
    }

    #[test]
    fn differences_are_of_distributions_after_the_same_text() {
        let base = moved(0.0);
        assert_eq!(base.difference(&base), 0.0);
        assert!((base.difference(&moved(0.01)) - 0.01).abs() < 1e-5);
        // After another token all is another text: not compared.
        let mut parted = base.clone();
        parted.0[0][3].token = 99;
        for position in &mut parted.0[0][4..] {
            position.top.iter_mut().for_each(|(_, p)| *p -= 100.0);
        }
        assert_eq!(base.difference(&parted), 0.0);
        // Other ids altogether.
        let mut foreign = base.clone();
        for position in &mut foreign.0[0] {
            position.top.iter_mut().for_each(|(id, _)| *id += 1000);
        }
        assert!(base.difference(&foreign) > 0.5);
        let mut broken = base.clone();
        broken.0[0][2].top[5].1 = f32::NAN;
        assert_eq!(base.difference(&broken), f64::INFINITY);
        broken.0[0].truncate(3);
        assert_eq!(base.difference(&broken), f64::INFINITY);
        assert_eq!(Probe(vec![]).difference(&Probe(vec![])), f64::INFINITY);
    }
}
