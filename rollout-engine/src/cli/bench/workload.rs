//! The workload: prompts that depend on nothing but their number, and rounds of them.

use std::fmt::Write as _;
use std::time::Instant;

use qwen3_model::Qwen3Config;
use qwen3_model::cuda::StageTime;
use sha2::{Digest, Sha256};

use super::BenchArgs;
use crate::cli::CliError;
use crate::completion::{Event, TokenCompletion};
use crate::runner::Runner;
use crate::scheduler::Scheduler;

/// Completions in the report, for a look at what was generated.
const SAMPLES: usize = 2;
/// Longest prompt of the workload.
pub(super) const LONGEST_PROMPT: usize = 64 + 192;

/// What one batch size gave.
pub(super) struct Measured {
    pub(super) prompts: usize,
    pub(super) tokens: usize,
    pub(super) wall_s: Vec<f64>,
    pub(super) prefill_ms: Vec<f64>,
    pub(super) step_ms: f64,
    pub(super) checksum: String,
    pub(super) samples: Vec<TokenCompletion>,
    pub(super) profile: Vec<StageTime>,
}

/// Prompt `i`, of `tokens` tokens if that is given.
pub(super) fn prompt(i: usize, tokens: Option<usize>, vocab: usize) -> Vec<u32> {
    // Ids of the common workload where the vocabulary has them, else wrapped into it.
    (0..tokens.unwrap_or(64 + i * 37 % 193))
        .map(|j| ((1000 + (i * 7919 + j * 104_729) % 140_000) % vocab) as u32)
        .collect()
}

pub(super) fn measure<R: Runner>(
    args: &BenchArgs,
    scheduler: &mut Scheduler<R>,
    config: &Qwen3Config,
    prompts: usize,
) -> Result<Measured, CliError> {
    let mut sampling = args.sampling()?;
    let mut measured = Measured {
        prompts,
        tokens: 0,
        wall_s: Vec::new(),
        prefill_ms: Vec::new(),
        step_ms: 0.0,
        checksum: String::new(),
        samples: Vec::new(),
        profile: Vec::new(),
    };
    let mut middle = Vec::new();
    for round in 0..=args.n_rounds {
        let begin = Instant::now();
        for i in 0..prompts / args.group_size {
            // Every round draws the same tokens.
            sampling.seed = Some(args.seed.wrapping_add(i as u64));
            let prompt = prompt(i, args.prompt_tokens, config.vocab_size);
            scheduler.submit_group(prompt, &sampling, args.group_size)?;
        }
        let mut events = Vec::new();
        let mut completions = Vec::with_capacity(prompts);
        let mut started = std::collections::HashSet::new();
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
                        started.insert((request, index));
                    }
                    Event::Finished {
                        request,
                        index,
                        result,
                    } => completions.push(((request, index), result?)),
                    _ => {}
                }
            }
            if prefill_ms.is_none() && started.len() == prompts {
                prefill_ms = Some(now);
            }
        }
        let wall = begin.elapsed().as_secs_f64();
        completions.sort_by_key(|(of, _)| *of);
        let completions: Vec<TokenCompletion> = completions
            .into_iter()
            .map(|(_, completion)| completion)
            .collect();
        let checksum = checksum(&completions);
        if round > 0 && checksum != measured.checksum {
            let advice = "two rounds of the same prompts gave different tokens";
            return Err(CliError::Failed(format!("{advice} at {prompts} prompts")));
        }
        measured.checksum = checksum;
        if round == 0 {
            // The first round chooses algorithms and grows buffers.
            measured.samples = completions.into_iter().take(SAMPLES).collect();
            continue;
        }
        measured.tokens += completions
            .iter()
            .map(|completion| completion.token_ids.len())
            .sum::<usize>();
        measured.wall_s.push(wall);
        measured.prefill_ms.extend(prefill_ms);
        // The middle half: all sequences run, contexts are half grown.
        let steps: Vec<f64> = laps.windows(2).map(|pair| pair[1] - pair[0]).collect();
        middle.extend_from_slice(&steps[steps.len() / 4..steps.len() - steps.len() / 4]);
    }
    measured.step_ms = median(&middle);
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
}
