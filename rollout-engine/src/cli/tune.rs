//! `rollout tune`: looks for the options with which the user's own workload is fastest, and leaves them for later runs.
//!
//! What counts is new tokens a second of whole runs, prompts included, not the time of one kernel: an option that makes
//! one faster can make its neighbours slower. From the best set of options so far one choice after the other is tried,
//! until no choice makes it faster. A set of options whose numbers differ from the defaults' by more than the order of
//! sums explains is thrown out, however fast it is. What is best in the end must also be faster than the defaults whenever
//! both are run again, or the defaults are kept.

mod check;
mod search;
mod space;
mod state;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;

use self::check::Probe;
use self::search::{Rules, Trial, Workload, search};
use self::state::{About, Entry, Outcome, State};
use super::CliError;
use super::bench::{self, BenchArgs, Subject};
use super::output::{distinct_files, write_stdout};
use super::progress::Steps;
use crate::Error;
use crate::runner::Runner;
use crate::tuned::{TunedBy, TunedOptions, TunedProfile};

/// What a set of options must gain over the best so far. Equal sets differ by 0.4 % on an H200, and the best of thirty by a little
/// more.
const GAIN: f64 = 1.01;

#[derive(Debug, Args)]
pub(super) struct TuneArgs {
    #[command(flatten)]
    workload: BenchArgs,

    /// Try no more options after so long, such as 90s, 10m or 2h; the best until then is still run against the defaults, and
    /// written. Default: no limit.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    time_limit: Option<Duration>,

    /// Keep what was measured in this file after every set of options, and go on from it.
    #[arg(long, value_name = "FILE.json")]
    state: Option<PathBuf>,

    /// Write the profile to this file. Default: where later runs look for it.
    #[arg(long, value_name = "FILE.json")]
    profile: Option<PathBuf>,

    /// Throw out options that change log-probabilities by more than this on average, in nats.
    #[arg(long, value_name = "X", default_value_t = 0.05, value_parser = tolerance)]
    tolerance: f64,
}

fn duration(text: &str) -> Result<Duration, String> {
    let advice = || "use a number with a unit, such as 90s, 10m or 2h".to_string();
    let (number, seconds) = match text.char_indices().last() {
        Some((at, 's')) => (&text[..at], 1.0),
        Some((at, 'm')) => (&text[..at], 60.0),
        Some((at, 'h')) => (&text[..at], 3600.0),
        _ => return Err(advice()),
    };
    match number.parse::<f64>() {
        Ok(n) if n > 0.0 && n * seconds < 1e9 => Ok(Duration::from_secs_f64(n * seconds)),
        _ => Err(advice()),
    }
}

fn tolerance(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(x) if (0.0..10.0).contains(&x) => Ok(x),
        _ => Err("use a number from 0 to 10".into()),
    }
}

/// `trace` is the file of `--trace`, which has been opened.
pub(super) fn run(args: &TuneArgs, trace: Option<&Path>) -> Result<(), CliError> {
    distinct_files(&[
        ("--trace", trace),
        ("--state", args.state.as_deref()),
        ("--profile", args.profile.as_deref()),
    ])?;
    let of = &args.workload;
    let sampling = of.sampling()?;
    if let Some(flag) = of.not_a_workload() {
        return Err(CliError::Usage(format!(
            "{flag} is for `rollout bench`: leave it out"
        )));
    }
    of.check_groups(&of.batches())?;
    let begin = Instant::now();
    let subject = Subject::of(of)?;
    let about = About {
        device: subject.device.clone(),
        model: subject.shape(),
        backend: subject.backend.clone(),
        batches: of.batches(),
        max_new_tokens: sampling.max_new_tokens,
        n_rounds: of.rounds(),
        fixed: of.fixed_options(),
        tolerance: args.tolerance,
    };
    // Without a file the state lives as long as the run.
    let scratch = tempfile_path(args.state.is_none());
    let path = args.state.clone().or_else(|| scratch.clone());
    let mut state = match &path {
        Some(path) => State::open(path, about)?,
        None => {
            return Err(CliError::Failed(
                "there is no place for the state of the sweep".into(),
            ));
        }
    };
    let dimensions = match subject.on_gpu() {
        true => space::of_gpu(),
        false => space::of_cpu(),
    };
    let rules = Rules {
        tolerance: args.tolerance,
        gain: GAIN,
        deadline: args.time_limit.map(|limit| begin + limit),
    };
    let mut workload = Measured {
        args: of,
        subject: &subject,
    };
    let progress = Steps::new(args.time_limit);
    let mut lines = String::new();
    let found = search(&mut workload, &dimensions, &rules, &mut state, &mut |dimension,
                                                                             entry,
                                                                             (
        done,
        of,
    )| {
        let line = describe(dimension, entry);
        progress.update(begin.elapsed(), &format!("{line} ({done} of {of})"));
        lines += &line;
        lines.push('\n');
    });
    progress.clear();
    if let Some(scratch) = scratch {
        // Nobody asked for it; what is left over lies in the system's folder for such files.
        let _ = std::fs::remove_file(scratch);
    }
    let found = found?;
    write_stdout(&lines)?;
    let (Some(best), Some(default)) = (found.best.rates(), found.default.rates()) else {
        return Err(CliError::Failed("the defaults were not measured".into()));
    };
    let profile = TunedProfile::new(
        subject.device.clone(),
        subject.shape(),
        found.best.options,
        TunedBy {
            n_prompts: of.batches(),
            max_new_tokens: sampling.max_new_tokens,
            tokens_per_s: best.to_vec(),
            default_tokens_per_s: default.to_vec(),
            measured: state.entries().len(),
            thrown_out: state.thrown_out().count(),
            commit: bench::commit(),
        },
    );
    let path = profile.write(args.profile.as_deref())?;
    let end = match found.complete {
        true => "nothing is faster",
        false => "the time is over",
    };
    let refuted = found.refuted.map_or(String::new(), |options| {
        format!(
            "\nrun again, {} is not always faster than the defaults\n",
            options_text(&options)
        )
    });
    write_stdout(&format!(
        "{refuted}\n{end}: {:.3} times the defaults with {}\nwritten to {}\n",
        found.best.over(&found.default),
        options_text(&found.best.options),
        path.display()
    ))
}

/// A file of the system's folder for such, if one is wanted.
fn tempfile_path(wanted: bool) -> Option<PathBuf> {
    wanted.then(|| std::env::temp_dir().join(format!("rollout-tune-{}.json", std::process::id())))
}

fn options_text(options: &TunedOptions) -> String {
    match serde_json::to_string(options) {
        Ok(text) if text != "{}" => text,
        _ => "the defaults".into(),
    }
}

fn describe(dimension: &str, entry: &Entry) -> String {
    let outcome = match &entry.outcome {
        Outcome::Measured(rates, difference) => {
            let rates: Vec<String> = rates.iter().map(|rate| format!("{rate:.0}")).collect();
            format!("{} tok/s, differs by {difference:.4}", rates.join(" / "))
        }
        Outcome::ThrownOut(difference) => format!("thrown out: changes numbers by {difference:.4}"),
        Outcome::Refused(reason) => format!("refused: {reason}"),
    };
    format!("{dimension}: {}: {outcome}", options_text(&entry.options))
}

/// Whole runs of the workload, on a runner that is opened anew for each set of options.
struct Measured<'a> {
    args: &'a BenchArgs,
    subject: &'a Subject,
}

impl Measured<'_> {
    fn measure<R: Runner>(&self, runner: R) -> Result<(Vec<f64>, Probe), CliError> {
        let (args, config) = (self.args, &self.subject.config);
        let mut scheduler = bench::scheduler(args, runner)?;
        let largest = args.batches().into_iter().max().unwrap_or(1);
        let prompts: Vec<_> = (0..largest)
            .map(|i| bench::prompt(i, args.prompt_length(), config.vocab_size))
            .collect();
        let probe = Probe::take(&mut scheduler, &prompts)?;
        let mut rates = Vec::new();
        for prompts in args.batches() {
            let measured = bench::measure(args, &mut scheduler, config, prompts)?;
            rates.push(measured.tokens_per_s());
        }
        Ok((rates, probe))
    }
}

impl Workload for Measured<'_> {
    fn run(&mut self, options: &TunedOptions) -> Result<Trial, CliError> {
        let largest = self.args.batches().into_iter().max().unwrap_or(1);
        let measured = if self.subject.on_gpu() {
            let runner = self.subject.open_gpu(self.args, largest, options);
            runner.map(|runner| self.measure(runner))
        } else {
            let runner = self.subject.open_cpu(self.args, largest, options);
            runner.map(|runner| self.measure(runner))
        };
        match measured {
            Ok(measured) => measured.map(Ok),
            // The device or the shape cannot run it: no reason to end the sweep.
            Err(error @ (Error::InvalidSetting { .. } | Error::Model(_))) => Ok(Err(error.to_string())),
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_of_time_have_units() {
        assert_eq!(duration("90s"), Ok(Duration::from_secs(90)));
        assert_eq!(duration("1.5m"), Ok(Duration::from_secs(90)));
        assert_eq!(duration("2h"), Ok(Duration::from_secs(7200)));
        for wrong in ["", "90", "s", "-1s", "0s", "1d", "1e9h", "µs", "NaNs"] {
            assert!(duration(wrong).is_err(), "{wrong}");
        }
        assert!(tolerance("0.1").is_ok() && tolerance("-1").is_err() && tolerance("NaN").is_err());
    }
}
