//! The workload: prompts that depend on nothing but their number, and rounds of them.

use std::fmt::Write as _;
use std::time::Instant;

use qwen3_model::Qwen3Config;
use qwen3_model::cuda::StageTime;
use serde::Serialize;
use sha2::{Digest, Sha256};

use super::BenchArgs;
use super::host_gap::HostGap;
use crate::cli::CliError;
use crate::completion::{Event, TokenCompletion};
use crate::request::SamplingParams;
use crate::runner::Runner;
use crate::scheduler::Scheduler;

/// Completions in the report, for a look at what was generated.
const SAMPLES: usize = 2;
/// Longest prompt of the workload.
pub(super) const LONGEST_PROMPT: usize = 64 + 192;

/// Points of a run at which the time of a step is reported.
const POINTS: usize = 5;

/// What one batch size gave.
pub(in crate::cli) struct Measured {
    pub(super) prompts: usize,
    pub(in crate::cli) tokens: usize,
    pub(in crate::cli) wall_s: Vec<f64>,
    pub(super) prefill_ms: Vec<f64>,
    /// Median of the middle half of a run's steps.
    pub(super) step_ms: f64,
    pub(super) steps_at: Vec<StepAt>,
    pub(super) checksum: String,
    pub(super) samples: Vec<TokenCompletion>,
    pub(super) profile: Vec<StageTime>,
    pub(super) host_gap: Option<HostGap>,
}

impl Measured {
    /// New tokens a second, of the median round.
    pub(in crate::cli) fn tokens_per_s(&self) -> f64 {
        let tokens = self.tokens as f64 / self.wall_s.len() as f64;
        tokens / median(&self.wall_s)
    }
}

/// The time of a step where sequences have got `new_tokens` new tokens.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct StepAt {
    pub(super) new_tokens: usize,
    pub(super) ms: f64,
}

/// Prompt `i`, of `tokens` tokens if that is given.
pub(in crate::cli) fn prompt(i: usize, tokens: Option<usize>, vocab: usize) -> Vec<u32> {
    // Ids of the common workload where the vocabulary has them, else wrapped into it.
    (0..tokens.unwrap_or_else(|| prompt_len(i)))
        .map(|j| ((1000 + (i * 7919 + j * 104_729) % 140_000) % vocab) as u32)
        .collect()
}

/// Lengths of the common workload's prompts come again after so many.
pub(super) const LENGTHS: usize = 193;

/// Tokens of prompt `i` of the common workload.
pub(super) fn prompt_len(i: usize) -> usize {
    64 + i * 37 % LENGTHS
}

/// Prompts that are submitted at once, and what one run of them gave.
pub(in crate::cli) struct Round {
    pub(super) wall_s: f64,
    /// Until every prompt had its first token.
    pub(super) prefill_ms: Option<f64>,
    /// From then on, each step.
    pub(super) steps_ms: Vec<f64>,
    /// In the order of the prompts.
    pub(in crate::cli) completions: Vec<TokenCompletion>,
}

impl Round {
    /// Each prompt is completed `group_size` times. `started` is called when every completion has its first token.
    pub(in crate::cli) fn run<R: Runner>(
        scheduler: &mut Scheduler<R>,
        prompts: &[Vec<u32>],
        group_size: usize,
        sampling: &SamplingParams,
        seed: u64,
        mut started: impl FnMut(&mut Scheduler<R>) -> Result<(), CliError>,
    ) -> Result<Self, CliError> {
        let begin = Instant::now();
        for (i, prompt) in prompts.iter().enumerate() {
            let sampling = SamplingParams {
                // Every round draws the same tokens.
                seed: Some(seed.wrapping_add(i as u64)),
                ..sampling.clone()
            };
            scheduler.submit_group(prompt.clone(), &sampling, group_size)?;
        }
        let mut events = Vec::new();
        let mut completions = Vec::with_capacity(prompts.len() * group_size);
        let mut first_tokens = std::collections::HashSet::new();
        let mut prefill_ms = None;
        // When each step's results were there, once every prompt has its first token.
        let mut laps = Vec::new();
        while scheduler.has_unfinished() {
            scheduler.step(&mut events)?;
            let now = begin.elapsed().as_secs_f64() * 1e3;
            if prefill_ms.is_some() {
                laps.push(now);
            }
            for event in events.drain(..) {
                match event {
                    Event::Token { request, index, .. } if prefill_ms.is_none() => {
                        first_tokens.insert((request, index));
                    }
                    Event::Finished {
                        request,
                        index,
                        result,
                    } => completions.push(((request, index), result?)),
                    _ => {}
                }
            }
            if prefill_ms.is_none() && first_tokens.len() == prompts.len() * group_size {
                prefill_ms = Some(now);
                started(scheduler)?;
            }
        }
        let wall_s = begin.elapsed().as_secs_f64();
        completions.sort_by_key(|(of, _)| *of);
        Ok(Self {
            wall_s,
            prefill_ms,
            steps_ms: laps.windows(2).map(|pair| pair[1] - pair[0]).collect(),
            completions: completions
                .into_iter()
                .map(|(_, completion)| completion)
                .collect(),
        })
    }

    /// The middle half of its steps: all sequences run, contexts are half grown.
    pub(super) fn middle(&self) -> &[f64] {
        let steps = &self.steps_ms;
        &steps[steps.len() / 4..steps.len() - steps.len() / 4]
    }
}

/// Medians around some points of the rounds.
fn steps_at(rounds: &[Vec<f64>]) -> Vec<StepAt> {
    let shortest = rounds.iter().map(Vec::len).min().unwrap_or(0);
    let mut points: Vec<StepAt> = Vec::new();
    for point in 0..POINTS.min(shortest) {
        let at = shortest * (2 * point + 1) / (2 * POINTS);
        let reach = shortest / (4 * POINTS);
        let around = at - reach..(at + reach + 1).min(shortest);
        let steps: Vec<f64> = rounds
            .iter()
            .flat_map(|steps| steps[around.clone()].iter().copied())
            .collect();
        points.push(StepAt {
            // Step 0 follows the first token.
            new_tokens: at + 2,
            ms: median(&steps),
        });
    }
    points
}

/// One round that is not counted, then those that are.
pub(in crate::cli) fn measure<R: Runner>(
    args: &BenchArgs,
    scheduler: &mut Scheduler<R>,
    config: &Qwen3Config,
    prompts: usize,
) -> Result<Measured, CliError> {
    let sampling = args.sampling()?;
    let of_batch: Vec<_> = (0..prompts / args.group_size)
        .map(|i| prompt(i, args.prompt_tokens, config.vocab_size))
        .collect();
    let mut measured = Measured {
        prompts,
        tokens: 0,
        wall_s: Vec::new(),
        prefill_ms: Vec::new(),
        step_ms: 0.0,
        steps_at: Vec::new(),
        checksum: String::new(),
        samples: Vec::new(),
        profile: Vec::new(),
        host_gap: None,
    };
    let (mut middle, mut steps) = (Vec::new(), Vec::new());
    for round in 0..=args.n_rounds {
        let run = Round::run(
            scheduler,
            &of_batch,
            args.group_size,
            &sampling,
            args.seed,
            |_| Ok(()),
        )?;
        let checksum = checksum(&run.completions);
        if round > 0 && checksum != measured.checksum {
            let advice = "two rounds of the same prompts gave different tokens";
            return Err(CliError::Failed(format!("{advice} at {prompts} prompts")));
        }
        measured.checksum = checksum;
        if round == 0 {
            // The first round chooses algorithms and grows buffers.
            measured.samples = run.completions.into_iter().take(SAMPLES).collect();
            continue;
        }
        let tokens = run
            .completions
            .iter()
            .map(|completion| completion.token_ids.len());
        measured.tokens += tokens.sum::<usize>();
        measured.wall_s.push(run.wall_s);
        measured.prefill_ms.extend(run.prefill_ms);
        middle.extend_from_slice(run.middle());
        steps.push(run.steps_ms);
    }
    measured.step_ms = median(&middle);
    measured.steps_at = steps_at(&steps);
    Ok(measured)
}

fn checksum(completions: &[TokenCompletion]) -> String {
    let mut hash = Sha256::new();
    for completion in completions {
        completion
            .token_ids
            .iter()
            .for_each(|token| hash.update(token.to_le_bytes()));
    }
    hash.finalize()
        .iter()
        .take(8)
        .fold(String::new(), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
}

pub(super) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_workload_is_the_common_one_and_stays_in_the_vocabulary() {
        assert_eq!(prompt(0, None, 151_936)[..3], [1000, 105_729, 70_458]);
        assert_eq!(prompt(1, None, 151_936).len(), 101);
        assert!((0..300).all(|i| (64..=LONGEST_PROMPT).contains(&prompt(i, None, 151_936).len())));
        assert_eq!(prompt(1, Some(2000), 571).len(), 2000);
        assert!((0..300).flat_map(|i| prompt(i, None, 571)).all(|id| id < 571));
    }

    #[test]
    fn the_median_of_an_odd_number_is_the_middle_one() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn points_are_spread_over_a_run_and_robust_against_single_steps() {
        let mut rounds = vec![(0..500).map(f64::from).collect::<Vec<_>>(); 3];
        rounds[1][50] = 1e9;
        let points = steps_at(&rounds);
        let expected = [50.0, 150.0, 250.0, 350.0, 450.0];
        assert_eq!(points.len(), expected.len());
        for (point, ms) in points.iter().zip(expected) {
            assert!((point.ms - ms).abs() <= 1.0, "{point:?}");
            assert_eq!(point.new_tokens, ms as usize + 2);
        }
        assert_eq!(steps_at(&[vec![1.0], vec![2.0]]).len(), 1);
        assert!(steps_at(&[]).is_empty() && steps_at(&[vec![]]).is_empty());
    }
}
