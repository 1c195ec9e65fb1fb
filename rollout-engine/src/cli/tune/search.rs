//! The sweep itself: one choice after the other, from the best set of options so far, until nothing gets better.

use std::time::Instant;

use super::check::Probe;
use super::space::Dimension;
use super::state::{Entry, Outcome, State};
use crate::cli::CliError;
use crate::tuned::TunedOptions;

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
}

/// Sweeps; `state` has what earlier runs measured, and gets what this one does. `tell` is called after every set of
/// options.
pub(super) fn search(
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
                        let complete = false;
                        return Ok(Found {
                            best: winner,
                            default,
                            complete,
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
            let complete = true;
            return Ok(Found {
                best,
                default,
                complete,
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

    fn sweep(state: &mut State, rules: &Rules) -> (Found, Formula) {
        let mut workload = Formula::default();
        let found = search(&mut workload, &space::of_cpu(), rules, state, &mut |_, _, _| ());
        (found.unwrap(), workload)
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
        // But for the defaults, of which the first run warms the device up.
        let runs = &workload.runs[1..];
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
