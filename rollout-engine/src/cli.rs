//! The `rollout` command, as a library so that it can be tested.

mod args;
#[cfg(feature = "cuda")]
mod bench;
mod engine_args;
mod generate;
mod input;
mod inspect;
mod interrupt;
mod kernel_args;
mod metrics;
mod output;
mod plot;
mod progress;
mod quantize;
mod sampling;
#[cfg(feature = "serve")]
mod serve;
mod telemetry;
mod trace;
#[cfg(feature = "cuda")]
mod tune;
mod verify_no_drift;

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

use clap::{CommandFactory, Parser};
use tracing::level_filters::LevelFilter;

use crate::Error;

/// A command that did not do what it was asked to do.
///
/// ```
/// use rollout_engine::cli::CliError;
///
/// assert_eq!(CliError::Usage("--top-p 2 cannot work".into()).exit_code(), 2);
/// assert_eq!(CliError::Failed("the disk is full".into()).exit_code(), 1);
/// assert_eq!(CliError::Interrupted { finished: 1, requests: 3 }.exit_code(), 130);
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CliError {
    /// The command line cannot work.
    #[error("{0}")]
    Usage(String),
    /// The command line was fine, and the run failed.
    #[error("{0}")]
    Failed(String),
    /// The run was interrupted; what was complete has been written.
    #[error("interrupted: {finished} of {requests} completions were written")]
    Interrupted {
        /// Completions written.
        finished: usize,
        /// Completions asked for.
        requests: usize,
    },
    /// The reader of a pipe that the output goes to went away: what it did not read is lost.
    #[error("the reader of the output has gone away")]
    OutputClosed,
}

impl CliError {
    /// 2 for bad usage, 1 for a failed run, 130 for an interrupted one. 141 if the reader of the output went away, as
    /// of a program that SIGPIPE ended: `rollout generate | head` is no error, and `set -o pipefail` sees that output
    /// was lost.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) => 2,
            Self::Failed(_) => 1,
            Self::Interrupted { .. } => 130,
            Self::OutputClosed => 141,
        }
    }
}

impl From<Error> for CliError {
    fn from(error: Error) -> Self {
        match &error {
            Error::InvalidSetting {
                setting,
                value,
                advice,
            } => {
                let flag = setting.replace('_', "-");
                Self::Usage(format!("--{flag} {value} cannot work: {advice}"))
            }
            Error::NoNewTokens | Error::DeviceUnavailable { .. } => Self::Usage(error.to_string()),
            _ => Self::Failed(error.to_string()),
        }
    }
}

/// Tells that standard output was closed when the process began. The standard library puts the null device in its place,
/// so that writing to it would lose the results and yet succeed; from now on it fails.
pub fn stdout_was_closed() {
    output::stdout_was_closed();
}

/// Runs the command with these arguments (the first is the program's name) and gives its exit code. Results go to
/// standard output; errors go to standard error, in one line each.
pub fn run(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let args: Vec<OsString> = args.into_iter().collect();
    let cli = match args::Cli::try_parse_from(&args) {
        Ok(cli) => cli,
        Err(error) => return report_parse_error(&error, &args),
    };
    output::let_size_limits_fail_writes();
    match run_command(&cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failed(&error),
    }
}

fn run_command(cli: &args::Cli) -> Result<(), CliError> {
    let quiet = match &cli.command {
        args::Command::Generate(args) => args.quiet,
        #[cfg(feature = "serve")]
        args::Command::Serve(args) => args.quiet(),
        _ => false,
    };
    // Before the work, not after it.
    match &cli.command {
        args::Command::VerifyNoDrift(_) | args::Command::Quantize(_) | args::Command::Inspect(_) => {
            output::stdout_is_open()?;
        }
        #[cfg(feature = "cuda")]
        args::Command::Bench(_) => output::stdout_is_open()?,
        _ => {}
    }
    let level = match &cli.command {
        #[cfg(feature = "serve")]
        args::Command::Serve(_) if quiet => LevelFilter::ERROR,
        #[cfg(feature = "serve")]
        args::Command::Serve(_) => LevelFilter::WARN,
        _ => LevelFilter::OFF,
    };
    let trace = telemetry::start(cli.trace.as_deref(), level, !quiet && progress::is_shown())?;
    let result = match &cli.command {
        args::Command::Generate(args) => generate::run(args, cli.trace.as_deref()),
        #[cfg(feature = "cuda")]
        args::Command::Bench(args) => bench::run(args, cli.trace.as_deref()),
        #[cfg(feature = "cuda")]
        args::Command::Tune(args) => tune::run(args, cli.trace.as_deref()),
        #[cfg(feature = "serve")]
        args::Command::Serve(args) => serve::run(args),
        args::Command::VerifyNoDrift(args) => verify_no_drift::run(args),
        args::Command::Plot(args) => plot::run(args),
        args::Command::Quantize(args) => quantize::run(args),
        args::Command::Inspect(args) => inspect::run(args),
    };
    // The run's own error says more than the trace's.
    let traced = trace.map_or(Ok(()), |trace| trace.finish());
    result.and(traced)
}

/// Says what went wrong, unless nobody is there to read on, as programs that SIGPIPE ends say nothing.
fn failed(error: &CliError) -> ExitCode {
    if !matches!(error, CliError::OutputClosed) {
        report(&error.to_string());
    }
    ExitCode::from(error.exit_code())
}

/// Help and version go to standard output in full; of a usage error its first line and the advice.
fn report_parse_error(error: &clap::Error, args: &[OsString]) -> ExitCode {
    if !error.use_stderr() {
        return match output::write_stdout(&error.render().to_string()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => failed(&error),
        };
    }
    if error.kind() == clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        report("no command was given: use `rollout generate`, or `rollout --help` for all");
        return ExitCode::from(2);
    }
    report(&in_one_line(&error.render().to_string(), &named_command(args)));
    ExitCode::from(2)
}

/// The program with the subcommand that the arguments name, if any.
fn named_command(args: &[OsString]) -> String {
    let program = args::Cli::command();
    let named = args.iter().skip(1).find_map(|arg| program.find_subcommand(arg));
    named.map_or("rollout".to_string(), |found| {
        format!("rollout {}", found.get_name())
    })
}

/// What clap says of a usage error in several lines, with the help to look into: of the command in the usage line, which
/// clap leaves out where a value is wrong, or else of this one.
fn in_one_line(text: &str, command: &str) -> String {
    let (mut message, mut command) = (String::new(), command.to_string());
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
        if let Some(usage) = line.strip_prefix("Usage:") {
            let words = usage.split_whitespace();
            let names = words.take_while(|word| !word.starts_with(['[', '<', '-']));
            command = names.collect::<Vec<_>>().join(" ");
        }
        if line.starts_with("Usage:") || line.starts_with("For more information") {
            break;
        }
        let line = line.strip_prefix("error: ").unwrap_or(line);
        message += match (message.is_empty(), line.starts_with("tip: ")) {
            (true, _) => "",
            (false, true) => "; ",
            (false, false) => " ",
        };
        message += line;
    }
    format!("{message}; see `{command} --help`")
}

/// One line on standard error.
fn report(message: &str) {
    let line = message
        .split(['\n', '\r'])
        .filter(|part| !part.is_empty())
        .collect::<Vec<_>>()
        .join(" ");
    // Nothing can be done if standard error is closed.
    let _ = writeln!(std::io::stderr(), "rollout: {line}");
}
