//! Where completions go: JSON lines as they finish, or text in the order of the prompts.

use std::collections::BTreeMap;
use std::fs::{File, Metadata};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use serde::Serialize;
use serde_json::Value;

use super::CliError;
use super::input::Job;
use crate::adapters::PolicySpan;
use crate::completion::{Completion, FinishReason, StopReason};
use crate::runner::TokenLogprob;

/// Whether standard output was closed when the process began. Since then it is open, onto nothing.
static STDOUT_CLOSED: AtomicBool = AtomicBool::new(false);

/// A line of the output file.
#[derive(Serialize)]
struct Line<'a> {
    id: &'a Value,
    /// Index of the completion among those of its prompt.
    index: usize,
    prompt_token_ids: &'a [u32],
    token_ids: &'a [u32],
    text: &'a str,
    finish_reason: FinishReason,
    /// The id or the text that ended it, if not a limit.
    stop_reason: Option<&'a StopReason>,
    /// Of the policy: at temperature 1, over the whole vocabulary.
    logprobs: &'a [f32],
    /// As drawn: after penalties, temperature and truncation.
    sampled_logprobs: &'a [f32],
    /// For each new token a list of id and log-probability.
    #[serde(skip_serializing_if = "Option::is_none")]
    top_logprobs: Option<Vec<Vec<(u32, f32)>>>,
    /// Number of the policy of the last token.
    policy_version: u64,
    policies: &'a [PolicySpan],
}

/// Takes completions in any order.
pub(super) enum Output {
    /// JSON lines, each written at once as it comes.
    Json { target: Target, path: PathBuf },
    /// Text, held back until all earlier prompts are done.
    Text {
        /// By number, without those that were written.
        waiting: BTreeMap<usize, String>,
        next: usize,
    },
}

pub(super) enum Target {
    File(File),
    Stdout,
}

impl Output {
    /// Opens the output file (emptying it) or standard output.
    pub(super) fn open(path: Option<&Path>) -> Result<Self, CliError> {
        if path.is_none_or(|path| path == Path::new("-")) {
            stdout_is_open()?;
        }
        match path {
            None => Ok(Self::Text {
                waiting: BTreeMap::new(),
                next: 0,
            }),
            Some(path) if path == Path::new("-") => Ok(Self::Json {
                target: Target::Stdout,
                path: "standard output".into(),
            }),
            Some(path) => {
                let file = File::create(path)
                    .map_err(|e| CliError::Failed(format!("--output {}: {e}", path.display())))?;
                Ok(Self::Json {
                    target: Target::File(file),
                    path: path.into(),
                })
            }
        }
    }

    /// Takes the completion number `index` among all.
    pub(super) fn completion(
        &mut self,
        index: usize,
        job: &Job,
        completion: &Completion,
    ) -> Result<(), CliError> {
        match self {
            Self::Json { target, path } => {
                let line = Line {
                    id: &job.id,
                    index: completion.index,
                    prompt_token_ids: &completion.prompt_token_ids,
                    token_ids: &completion.token_ids,
                    text: &completion.text,
                    finish_reason: completion.finish_reason,
                    stop_reason: completion.stop_reason.as_ref(),
                    logprobs: &completion.logprobs,
                    sampled_logprobs: &completion.sampled_logprobs,
                    top_logprobs: pairs(&completion.top_logprobs),
                    policy_version: completion.policies.last().map_or(0, |span| span.version.number),
                    policies: &completion.policies,
                };
                let mut text = serde_json::to_string(&line)
                    .map_err(|e| CliError::Failed(format!("{}: {e}", path.display())))?;
                text.push('\n');
                // One write for the whole line, so that a run that is killed leaves whole lines.
                match target {
                    Target::File(file) => {
                        write_whole(file, text.as_bytes()).map_err(|e| write_error(path, e))
                    }
                    Target::Stdout => write_stdout(&text),
                }
            }
            Self::Text { .. } => {
                let cut = match completion.finish_reason {
                    FinishReason::Length => " […]",
                    FinishReason::Stop => "",
                };
                self.text(
                    index,
                    format!("> {}\n{}{cut}\n\n", job.title.trim_end(), completion.text),
                )
            }
        }
    }

    /// Completion number `index` among all will not come.
    pub(super) fn failure(&mut self, index: usize) -> Result<(), CliError> {
        match self {
            Self::Json { .. } => Ok(()),
            Self::Text { .. } => self.text(index, String::new()),
        }
    }

    fn text(&mut self, index: usize, text: String) -> Result<(), CliError> {
        let Self::Text { waiting, next } = self else {
            return Ok(());
        };
        waiting.insert(index, text);
        while let Some(text) = waiting.remove(next) {
            write_stdout(&text)?;
            *next += 1;
        }
        Ok(())
    }

    /// Writes what is held back. To be called when no more will come.
    pub(super) fn finish(&mut self) -> Result<(), CliError> {
        match self {
            Self::Json {
                target: Target::File(file),
                path,
            } => {
                // Some file systems tell only now that a disk is full. A pipe or device cannot be synchronised, which
                // is fine.
                match file.sync_all() {
                    Err(e)
                        if !matches!(e.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported) =>
                    {
                        Err(write_error(path, e))
                    }
                    _ => Ok(()),
                }
            }
            Self::Json { .. } => Ok(()),
            Self::Text { waiting, .. } => std::mem::take(waiting)
                .into_values()
                .try_for_each(|text| write_stdout(&text)),
        }
    }
}

/// Lists of alternatives for JSON; `None` if there are none.
fn pairs(top_logprobs: &[Vec<TokenLogprob>]) -> Option<Vec<Vec<(u32, f32)>>> {
    let pairs = |list: &Vec<TokenLogprob>| list.iter().map(|top| (top.token, top.logprob)).collect();
    (!top_logprobs.is_empty()).then(|| top_logprobs.iter().map(pairs).collect())
}

/// From now on writing to standard output is an error.
pub(super) fn stdout_was_closed() {
    STDOUT_CLOSED.store(true, Ordering::Relaxed);
}

/// An error if what is written to standard output would be lost.
pub(super) fn stdout_is_open() -> Result<(), CliError> {
    match STDOUT_CLOSED.load(Ordering::Relaxed) {
        true => Err(CliError::Failed(
            "standard output is closed: what should be written there would be lost".into(),
        )),
        false => Ok(()),
    }
}

/// Writes to standard output at once.
pub(super) fn write_stdout(text: &str) -> Result<(), CliError> {
    stdout_is_open()?;
    let written = match stdout_file() {
        // Nothing else of this process writes to it, so that std's own buffer is empty.
        Ok(mut file) => write_whole(&mut file, text.as_bytes()),
        Err(_) => {
            let mut stdout = io::stdout().lock();
            stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush())
        }
    };
    written.map_err(|e| write_error(Path::new("standard output"), e))
}

/// Writes all of `text`, or, to a regular file, nothing: a line that a full disk or a size limit cuts off is taken back.
fn write_whole(file: &mut File, text: &[u8]) -> io::Result<()> {
    let before = file
        .metadata()
        .ok()
        .filter(|meta| meta.is_file())
        .map(|meta| meta.len());
    let result = file.write_all(text);
    if let (Err(_), Some(before)) = (&result, before) {
        let after = file.metadata().map_or(before, |meta| meta.len());
        if after > before && after - before < text.len() as u64 {
            // The write's own error is the one to tell.
            let _ = file.set_len(before);
            let _ = file.seek(SeekFrom::Start(before));
        }
    }
    result
}

/// Refuses to write two results into one file: `files` are the flags and what they name. Files that are not there yet are
/// told by their names alone.
pub(super) fn distinct_files(files: &[(&str, Option<&Path>)]) -> Result<(), CliError> {
    for (i, (name, file)) in files.iter().enumerate() {
        for (earlier, other) in &files[..i] {
            let (Some(file), Some(other)) = (file, other) else {
                continue;
            };
            let same = match (file.metadata(), other.metadata()) {
                (Ok(a), Ok(b)) => same_file(&a, &b),
                _ => file == other,
            };
            if same {
                let message = format!("{name} is the file of {earlier}: name another one");
                return Err(CliError::Usage(message));
            }
        }
    }
    Ok(())
}

/// Whether both are one regular file, also by links.
#[cfg(unix)]
pub(super) fn same_file(a: &Metadata, b: &Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    a.is_file() && (a.dev(), a.ino()) == (b.dev(), b.ino())
}

/// Files have no number to tell them by here.
#[cfg(not(unix))]
pub(super) fn same_file(_: &Metadata, _: &Metadata) -> bool {
    false
}

/// Standard output as a file, past std's buffer.
pub(super) fn stdout_file() -> io::Result<File> {
    duplicate(&io::stdout())
}

/// Standard input as a file.
pub(super) fn stdin_file() -> io::Result<File> {
    duplicate(&io::stdin())
}

#[cfg(unix)]
fn duplicate(stream: &impl std::os::fd::AsFd) -> io::Result<File> {
    stream.as_fd().try_clone_to_owned().map(File::from)
}

#[cfg(not(unix))]
fn duplicate<T>(_: &T) -> io::Result<File> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Beyond the system's limit on the size of files a write then fails, where it would end the process otherwise.
pub(super) fn let_size_limits_fail_writes() {
    #[cfg(unix)]
    {
        // Without the handler the process ends as it would have: nothing to report.
        let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Default::default());
    }
}

fn write_error(path: &Path, error: io::Error) -> CliError {
    match error.kind() {
        io::ErrorKind::BrokenPipe => CliError::OutputClosed,
        _ => CliError::Failed(format!(
            "{}: {error}: what was written before is complete",
            path.display()
        )),
    }
}
