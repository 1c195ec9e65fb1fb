//! The sweep itself: one choice after the other, from the best set of options so far, until nothing gets better.
//!
//! Each set is measured once, so the best of them is first of all the luckiest: on a busy machine, as most CPUs are, equal sets
//! differ by more than any choice gains. So at the end the best and the defaults are run again, in turn, and every run of
//! the best must be faster than all of the defaults.

use std::time::Instant;

use super::check::Probe;
use super::space::Dimension;
use super::state::{Duel, Entry, Outcome, State};
use crate::cli::CliError;
use crate::tuned::TunedOptions;

/// Runs of the best set of options at the end, and as many of the defaults. Of sets that are equal one in 252 passes.
pub(super) const RUNS: usize = 5;

/// What a set of options gave: new tokens a second of each part of the workload, and what it computed; or why it cannot be
/// run.
pub(super) type Trial = Result<(Vec<f64>, Probe), String>;

/// Is told of the choice at hand, of a set of options, and how many of the choice's sets are done of how many.
pub(super) type Tell<'a> = dyn FnMut(&str, &Entry, (usize, usize)) + 'a;

/// Runs the user's workload under a set of options.
pub(super) trait Workload {
    /// # Errors
    /// What ends the sweep: not an option that is refused.
    fn run(&mut self, options: &TunedOptions) -> Result<Trial, CliError>;
}

/// How a sweep decides.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Rules {
    /// Mean difference of log-probabilities from which a set of options is thrown out, in nats.
    pub(super) tolerance: f64,
    /// What a set of options must gain, as a factor: less is noise.
    pub(super) gain: f64,
    /// When to begin nothing more.
    pub(super) deadline: Option<Instant>,
}

/// What a sweep found.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Found {
    pub(super) best: Entry,
    pub(super) default: Entry,
    /// Whether it ended by itself rather than at the time limit.
    pub(super) complete: bool,
    /// What was the best when each set had been measured once, and not when it was run again: the defaults are kept.
    pub(super) refuted: Option<TunedOptions>,
}

/// Sweeps, and runs the best against the defaults; `state` has what earlier runs measured, and gets what this one does.
/// `tell` is called after every set of options.
pub(super) fn search(
    workload: &mut dyn Workload,
    dimensions: &[Dimension],
    rules: &Rules,
    state: &mut State,
    tell: &mut Tell<'_>,
) -> Result<Found, CliError> {
    let found = sweep(workload, dimensions, rules, state, tell)?;
    let (options, difference) = match found.best.outcome {
        Outcome::Measured(_, difference) if found.best != found.default => (found.best.options, difference),
        _ => return Ok(found),
    };
    let duel = match state.duel(&options) {
        Some(known) => known.clone(),
        None => {
            let duel = run_again(workload, options)?;
            state.add_duel(duel.clone())?;
            duel
        }
    };
    let default = Entry {
        outcome: Outcome::measured(&medians(&duel.defaults), 0.0),
        ..found.default
    };
    Ok(match duel.is_won() {
        true => Found {
            best: Entry {
                options,
                outcome: Outcome::measured(&medians(&duel.ours), difference),
            },
            default,
            ..found
        },
        false => Found {
            best: default.clone(),
            default,
            refuted: Some(options),
            ..found
        },
    })
}

/// Runs options and the defaults in turn, until it is clear that the options are no faster, at most [`RUNS`] times. Options that are
/// refused now, for want of memory say, are not faster.
fn run_again(workload: &mut dyn Workload, options: TunedOptions) -> Result<Duel, CliError> {
    let mut duel = Duel {
        options,
        ours: Vec::new(),
        defaults: Vec::new(),
    };
    while duel.ours.len() < RUNS && duel.is_won() {
        let refused =
            |reason| CliError::Failed(format!("the defaults ran before and are refused now: {reason}"));
        let (defaults, _) = workload.run(&TunedOptions::default())?.map_err(refused)?;
        let ours = match workload.run(&options)? {
            Ok((ours, _)) => ours,
            Err(_) => vec![0.0; defaults.len()],
        };
        duel.defaults.push(defaults);
        duel.ours.push(ours);
    }
    Ok(duel)
}

/// Of each part of the workload.
fn medians(runs: &[Vec<f64>]) -> Vec<f64> {
    let parts = runs.first().map_or(0, Vec::len);
    let median = |part: usize| {
        let mut rates: Vec<f64> = runs.iter().map(|run| run[part]).collect();
        rates.sort_by(f64::total_cmp);
        rates[rates.len() / 2]
    };
    (0..parts).map(median).collect()
}

/// One measurement of each set of options.
fn sweep(
    workload: &mut dyn Workload,
    dimensions: &[Dimension],
    rules: &Rules,
    state: &mut State,
    tell: &mut Tell<'_>,
) -> Result<Found, CliError> {
    let start = TunedOptions::default();
    // What all others are held against is computed by every run of the program anew.
    let mut run_defaults = || {
        workload.run(&start)?.map_err(|reason| {
            CliError::Failed(format!(
                "the workload cannot be run without any options: {reason}"
            ))
        })
    };
    let (_, reference) = run_defaults()?;
    let default = match state.find(&start) {
        Some(known) => known.clone(),
        // The first run of all finds a device that is cool and clocks higher than it will from then on.
        None => {
            let (rates, _) = run_defaults()?;
            state.add(start, Outcome::measured(&rates, 0.0))?
        }
    };
    tell("defaults", &default, (0, 0));
    let mut best = default.clone();
    let late = || rules.deadline.is_some_and(|deadline| Instant::now() >= deadline);
    loop {
        let before = best.clone();
        for dimension in dimensions {
            let neighbours = dimension.neighbours(&best.options);
            let mut winner = best.clone();
            for (i, options) in neighbours.iter().enumerate() {
                let entry = match state.find(options) {
                    Some(known) => known.clone(),
                    None if late() => {
                        return Ok(Found {
                            best: winner,
                            default,
                            complete: false,
                            refuted: None,
                        });
                    }
                    None => {
                        let outcome = match workload.run(options)? {
                            Err(reason) => Outcome::Refused(reason),
                            Ok((rates, probe)) => match reference.difference(&probe) {
                                difference if difference <= rules.tolerance => {
                                    Outcome::measured(&rates, difference)
                                }
                                difference => Outcome::ThrownOut(difference),
                            },
                        };
                        state.add(*options, outcome)?
                    }
                };
                tell(dimension.name, &entry, (i + 1, neighbours.len()));
                if entry.over(&winner) > if winner == best { rules.gain } else { 1.0 } {
                    winner = entry;
                }
            }
            best = winner;
        }
        if best == before {
            return Ok(Found {
                best,
                default,
                complete: true,
                refuted: None,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::check::tests::moved;
    use super::super::space;
    use super::*;

    /// Rates by a formula; pages of 16 are fastest of all and change numbers, 1,024 prompt tokens are refused.
    #[derive(Default)]
    struct Formula {
        runs: Vec<TunedOptions>,
    }

    impl Workload for Formula {
        fn run(&mut self, options: &TunedOptions) -> Result<Trial, CliError> {
            self.runs.push(*options);
            let mut rate = 100.0;
            rate *= match options.page_size {
                Some(16) => 3.0,
                Some(32) => 1.1,
                Some(128) => 1.2,
                _ => 1.0,
            };
            rate *= match options.max_prefill_tokens {
                // Only together with large pages.
                Some(256) if options.page_size == Some(128) => 1.5,
                Some(256) => 0.9,
                Some(1024) => return Ok(Err("too many".into())),
                // Within the noise.
                Some(128) => 1.001,
                _ => 1.0,
            };
            let wrong = if options.page_size == Some(16) { 0.3 } else { 0.01 };
            let changed = if options.page_size.is_some() { wrong } else { 0.0 };
            Ok(Ok((vec![rate, 2.0 * rate], moved(changed))))
        }
    }

    const RULES: Rules = Rules {
        tolerance: 0.05,
        gain: 1.005,
        deadline: None,
    };

    fn sweep_of<W: Workload>(mut workload: W, state: &mut State, rules: &Rules) -> (Found, W) {
        let found = search(&mut workload, &space::of_cpu(), rules, state, &mut |_, _, _| ());
        (found.unwrap(), workload)
    }

    fn sweep(state: &mut State, rules: &Rules) -> (Found, Formula) {
        sweep_of(Formula::default(), state, rules)
    }

    /// A machine with other work: rates of equal runs differ by up to a half.
    struct Noise {
        /// What pages of 32 gain.
        gain: f64,
        runs: u32,
    }

    impl Workload for Noise {
        fn run(&mut self, options: &TunedOptions) -> Result<Trial, CliError> {
            self.runs += 1;
            let random = self.runs.wrapping_mul(0x9e37_79b9).rotate_left(7) % 1000;
            let gain = match options.page_size {
                Some(32) => self.gain,
                _ => 1.0,
            };
            Ok(Ok((vec![gain * (100.0 + f64::from(random) / 20.0)], moved(0.0))))
        }
    }

    /// Later runs would load it for ever.
    #[test]
    fn what_was_luckiest_is_not_kept_and_what_is_faster_is() {
        let mut state = State::in_memory();
        let noise = |gain| Noise { gain, runs: 0 };
        let (found, workload) = sweep_of(noise(1.0), &mut state, &RULES);
        assert!(found.refuted.is_some(), "nothing seemed faster: no test");
        assert_eq!(found.best, found.default);
        // A run that goes on from there does not ask again until it is lucky.
        let (again, second) = sweep_of(noise(1.0), &mut state, &RULES);
        assert_eq!((&again, second.runs), (&found, 1));
        assert!(workload.runs > 2);
        let (found, _) = sweep_of(noise(2.0), &mut State::in_memory(), &RULES);
        assert_eq!((found.best.options.page_size, found.refuted), (Some(32), None));
        assert!((1.4..2.8).contains(&found.best.over(&found.default)));
    }

    #[test]
    fn the_fastest_that_computes_the_same_numbers_is_found() {
        let mut state = State::in_memory();
        let (found, workload) = sweep(&mut state, &RULES);
        let best = found.best.options;
        assert_eq!((best.page_size, best.max_prefill_tokens), (Some(128), Some(256)));
        assert!(found.complete && (found.best.over(&found.default) - 1.8).abs() < 1e-9);
        // The option that was injected is the fastest of all and was thrown out, wherever it was tried.
        let thrown: Vec<_> = state.thrown_out().collect();
        assert!(!thrown.is_empty() && thrown.iter().all(|entry| entry.options.page_size == Some(16)));
        for entry in thrown {
            assert!(matches!(entry.outcome, Outcome::ThrownOut(difference) if difference > 0.25));
        }
        assert!(
            state
                .entries()
                .iter()
                .any(|entry| matches!(&entry.outcome, Outcome::Refused(why) if why == "too many"))
        );
        // But for the defaults, of which the first run warms the device up, and the last ones, which are to be sure.
        let runs = &workload.runs[1..workload.runs.len() - 2 * RUNS];
        for (i, options) in runs.iter().enumerate() {
            assert!(!runs[..i].contains(options), "{options:?} was measured twice");
        }
    }

    #[test]
    fn a_sweep_that_was_cut_short_goes_on_where_it_was() {
        let mut state = State::in_memory();
        let now = Instant::now();
        let cut = Rules {
            deadline: Some(now.checked_sub(Duration::from_secs(1)).unwrap_or(now)),
            ..RULES
        };
        let (found, workload) = sweep(&mut state, &cut);
        assert!(!found.complete && workload.runs.len() == 2, "the defaults alone");
        assert_eq!(found.best, found.default);
        let (whole, first) = sweep(&mut state, &RULES);
        let (again, second) = sweep(&mut state, &RULES);
        assert_eq!(whole, again);
        assert!(first.runs.len() > 5);
        assert_eq!(second.runs.len(), 1, "only what the others are held against");
    }
}
