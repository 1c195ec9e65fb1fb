//! `rollout bench --arrival-rate`: prompts that arrive at random times while others decode, and how long each waits.
//!
//! Arrivals are a Poisson process with a fixed seed. The time to a first token counts from the arrival, so it holds the
//! wait for a slot and the wait for the end of the step under way. The time between two tokens of a request holds
//! whatever prompts were computed in between: its maximum is the longest stall of a decoding sequence.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::{Value, json};

use super::workload::{median, prompt};
use super::{BenchArgs, CliError};
use crate::completion::{Event, RequestId};
use crate::request::SamplingParams;
use crate::runner::Runner;
use crate::scheduler::Scheduler;

/// Of times in milliseconds.
#[derive(Serialize)]
struct Spread {
    p50: f64,
    p99: f64,
    max: f64,
}

impl Spread {
    fn new(times: &mut [f64]) -> Self {
        times.sort_by(f64::total_cmp);
        Self {
            p50: percentile(times, 50),
            p99: percentile(times, 99),
            max: percentile(times, 100),
        }
    }
}

/// The least of the sorted values that `percent` % of them do not exceed; NaN of none.
fn percentile(sorted: &[f64], percent: usize) -> f64 {
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied().unwrap_or(f64::NAN)
}

/// Seconds after the start at which each of `n` prompts arrives: gaps are exponential with mean `1 / rate`.
fn arrival_times(n: usize, rate: f64, seed: u64) -> Vec<f64> {
    let mut state = seed;
    let mut now = 0.0;
    (0..n)
        .map(|_| {
            // splitmix64; of its 53 upper bits a number in (0, 1].
            state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let z = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            let uniform = (((z ^ (z >> 31)) >> 11) + 1) as f64 / (1u64 << 53) as f64;
            now -= uniform.ln() / rate;
            now
        })
        .collect()
}

/// What the rounds gave, in milliseconds unless said otherwise.
#[derive(Default)]
struct Times {
    first_token: Vec<f64>,
    between_tokens: Vec<f64>,
    /// Of steps without prompt tokens, and of those with.
    plain_steps: Vec<f64>,
    mixed_steps: Vec<f64>,
    tokens: usize,
    wall_s: f64,
}

/// A request on its way.
struct Served {
    arrival_ms: f64,
    last_token_ms: Option<f64>,
}

/// One round: submits each prompt when it is due, steps as long as there is work, and sleeps otherwise.
fn serve<R: Runner>(
    scheduler: &mut Scheduler<R>,
    prompts: &[Vec<u32>],
    due_s: &[f64],
    sampling: &SamplingParams,
    times: &mut Times,
) -> Result<(), CliError> {
    let begin = Instant::now();
    let now_ms = || begin.elapsed().as_secs_f64() * 1e3;
    let mut due = prompts.iter().zip(due_s.iter().map(|s| s * 1e3)).peekable();
    let mut requests: BTreeMap<RequestId, Served> = BTreeMap::new();
    // Whether each submitted step computes prompts; the time of the last result, while the runner is busy.
    let mut under_way = VecDeque::new();
    let mut last_ms = None;
    let mut events = Vec::new();
    while due.peek().is_some() || scheduler.has_unfinished() {
        while let Some((prompt, arrival_ms)) = due.next_if(|(_, ms)| *ms <= now_ms()) {
            let request = scheduler.submit(prompt.clone(), sampling)?;
            let last_token_ms = None;
            requests.insert(
                request,
                Served {
                    arrival_ms,
                    last_token_ms,
                },
            );
        }
        if !scheduler.has_unfinished() {
            if let Some((_, ms)) = due.peek() {
                std::thread::sleep(Duration::from_secs_f64((ms - now_ms()).max(0.0) / 1e3));
            }
            last_ms = None;
            continue;
        }
        let before = *scheduler.statistics();
        scheduler.step(&mut events)?;
        let now = now_ms();
        let after = *scheduler.statistics();
        // Where two steps were submitted at once, both count as having what either had.
        let prompts = after.prefill_tokens > before.prefill_tokens;
        under_way.extend((before.steps..after.steps).map(|_| prompts));
        if let (Some(mixed), Some(last)) = (under_way.pop_front(), last_ms.replace(now)) {
            match mixed {
                true => times.mixed_steps.push(now - last),
                false => times.plain_steps.push(now - last),
            }
        }
        for event in events.drain(..) {
            match event {
                Event::Token { request, .. } => {
                    times.tokens += 1;
                    let Some(served) = requests.get_mut(&request) else {
                        continue;
                    };
                    match served.last_token_ms.replace(now) {
                        Some(last) => times.between_tokens.push(now - last),
                        None => times.first_token.push(now - served.arrival_ms),
                    }
                }
                Event::Finished { request, result, .. } => {
                    result?;
                    requests.remove(&request);
                }
                Event::GroupFinished { .. } => {}
            }
        }
    }
    times.wall_s += begin.elapsed().as_secs_f64();
    Ok(())
}

/// Runs the rounds; gives the report and its lines for a reader.
pub(super) fn measure<R: Runner>(
    args: &BenchArgs,
    rate: f64,
    scheduler: &mut Scheduler<R>,
    vocab_size: usize,
) -> Result<(Value, String), CliError> {
    let sampling = SamplingParams {
        seed: Some(args.seed),
        ..args.sampling()?
    };
    let prompts: Vec<Vec<u32>> = (0..args.n_prompts)
        .map(|i| prompt(i, args.prompt_tokens, vocab_size))
        .collect();
    let due = arrival_times(args.n_prompts, rate, args.seed);
    let mut times = Times::default();
    for round in 0..=args.n_rounds {
        if round == 1 {
            // The first round chooses algorithms and grows buffers.
            times = Times::default();
        }
        serve(scheduler, &prompts, &due, &sampling, &mut times)?;
    }
    let first = Spread::new(&mut times.first_token);
    let between = Spread::new(&mut times.between_tokens);
    let (plain, mixed) = (median(&times.plain_steps), median(&times.mixed_steps));
    let ratio = between.p99 / plain;
    let budgets = (
        scheduler.shape().max_prefill_tokens,
        scheduler.mixed_prefill_tokens(1),
    );
    let tokens_per_s = times.tokens as f64 / times.wall_s;
    let mut text = format!(
        "{} prompts, {rate} a second, {} new tokens each, {} rounds; at most {} prompt tokens a step, {} beside decoding\n\n",
        args.n_prompts, args.max_new_tokens, args.n_rounds, budgets.0, budgets.1
    );
    text += "milliseconds            p50      p99      max\n";
    for (name, of) in [("to the first token", &first), ("between tokens", &between)] {
        let _ = writeln!(text, "{name:<18} {:>8.3} {:>8.3} {:>8.3}", of.p50, of.p99, of.max);
    }
    let _ = writeln!(
        text,
        "\nstep without prompts {plain:.3} ms, with prompts {mixed:.3} ms (medians); p99 between tokens is {ratio:.2} times a step \
         without prompts\n{tokens_per_s:.0} tok/s",
    );
    let report = json!({
        "arrival_rate_per_s": rate,
        "seed": args.seed,
        "n_prompts": args.n_prompts,
        "n_rounds": args.n_rounds,
        "max_new_tokens": args.max_new_tokens,
        "max_prefill_tokens": budgets.0,
        "mixed_prefill_tokens": budgets.1,
        "max_running": scheduler.statistics().max_running,
        "first_token_ms": first,
        "inter_token_ms": between,
        "longest_decode_stall_ms": between.max,
        "step_without_prefill_ms": plain,
        "step_with_prefill_ms": mixed,
        "p99_over_step_without_prefill": ratio,
        "n_decoded_tokens": times.tokens,
        "wall_s": times.wall_s,
        "tokens_per_s": tokens_per_s,
    });
    Ok((report, text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FakeRunner;

    #[test]
    fn arrivals_have_the_rate_asked_for_and_are_the_same_for_a_seed() {
        let times = arrival_times(20_000, 40.0, 7);
        assert!(times.windows(2).all(|pair| pair[0] < pair[1]));
        let rate = times.len() as f64 / times.last().unwrap();
        assert!((rate - 40.0).abs() < 1.0, "{rate}");
        // Of exponential gaps 1 - 1/e are shorter than the mean.
        let short = times
            .windows(2)
            .filter(|pair| pair[1] - pair[0] < 1.0 / 40.0)
            .count();
        assert!((short as f64 / 20_000.0 - 0.632).abs() < 0.015, "{short}");
        assert_eq!(times, arrival_times(20_000, 40.0, 7));
        assert_ne!(times[0], arrival_times(1, 40.0, 8)[0]);
    }

    #[test]
    fn percentiles_are_values_that_occurred() {
        let values: Vec<f64> = (1..=200).map(f64::from).collect();
        assert_eq!(percentile(&values, 50), 100.0);
        assert_eq!(percentile(&values, 99), 198.0);
        assert_eq!(percentile(&values, 100), 200.0);
        assert_eq!(percentile(&[5.0], 50), 5.0);
        assert!(percentile(&[], 99).is_nan());
    }

    #[test]
    fn every_token_of_every_request_is_timed() {
        let mut scheduler = Scheduler::new(FakeRunner::new(FakeRunner::small_shape()), vec![]).unwrap();
        let prompts: Vec<Vec<u32>> = (1..=9).map(|i| vec![i; 1 + i as usize % 3]).collect();
        let sampling = SamplingParams {
            max_new_tokens: 7,
            ignore_eos: true,
            ..SamplingParams::default()
        };
        let mut times = Times::default();
        let due = arrival_times(9, 2000.0, 1);
        serve(&mut scheduler, &prompts, &due, &sampling, &mut times).unwrap();
        assert_eq!(times.tokens, 9 * 7);
        assert_eq!(times.first_token.len(), 9);
        assert_eq!(times.between_tokens.len(), 9 * 6);
        assert!(times.first_token.iter().all(|ms| *ms >= 0.0));
        assert!(times.wall_s >= due[8]);
    }
}
