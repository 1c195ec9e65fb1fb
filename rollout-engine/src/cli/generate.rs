//! `rollout generate`.

use std::collections::HashMap;
use std::fs::Metadata;
use std::ops::Range;
use std::path::Path;
use std::time::Instant;

use qwen3_model::MergeMode;

use super::args::GenerateArgs;
use super::input::{self, Job};
use super::output::{Output, distinct_files, same_file, stdin_file, stdout_file};
use super::progress::Progress;
use super::{CliError, interrupt, metrics, report};
use crate::completion::{Event, RequestId};
use crate::engine::Engine;
use crate::memory::{format_bytes, peak_memory};
use crate::text::ChatTemplates;
use crate::{Error, model_folder};

/// `trace` is the file of `--trace`, which has been opened.
pub(super) fn run(args: &GenerateArgs, trace: Option<&Path>) -> Result<(), CliError> {
    interrupt::install();
    args.engine
        .refuse_what_has_no_effect(args.lora_pristine.is_some())?;
    refuse_to_overwrite_the_input(args)?;
    refuse_one_file_for_two(args, trace)?;
    let model_dir = model_folder::find(args.engine.model.as_deref())?;
    // Prompts first: a mistake in them shows before a large model is loaded.
    let has_template = args.prompts.is_none() && !ChatTemplates::from_dir(&model_dir)?.is_empty();
    let sampling = args.sampling.params(args.max_new_tokens, &model_dir)?;
    let jobs = input::jobs(args, &sampling, has_template)?;
    let begin = Instant::now();
    let mut builder = args
        .engine
        .builder()
        .pristine_copy(args.lora_pristine.unwrap_or_default())
        .seed(args.seed);
    for dir in &args.adapter {
        builder = builder.adapter(dir);
    }
    if args.no_merge_lora {
        builder = builder.merge_mode(MergeMode::Unmerged);
    }
    let mut built = builder.build_with_notice()?;
    let load = begin.elapsed();
    if let (Some(notice), false) = (&built.notice, args.quiet) {
        report(notice);
        for flag in args.engine.gpu_flags(args.lora_pristine.is_some()) {
            report(&format!("{flag} has no effect on the CPU"));
        }
    }
    if let (Some(policy), false) = (&built.policy, args.quiet) {
        policy.warnings.iter().for_each(|warning| report(warning));
        policy.remark().into_iter().for_each(report);
    }
    let total = jobs.iter().map(|job| job.request.n).sum();
    let output = Output::open(args.output.as_deref())?;
    // Only now is every file there that can be told by more than its name.
    refuse_one_file_for_two(args, trace)?;
    let mut run = Run {
        jobs: &jobs,
        source: source_name(args),
        output,
        progress: Progress::new(args.quiet, total),
        total,
        finished: 0,
        failed: 0,
    };
    let begin = Instant::now();
    let result = run.run(&mut built.engine, args.quiet);
    let Some(path) = &args.metrics else {
        return result;
    };
    let run = metrics::Run {
        prompts: jobs.len(),
        completions: run.finished,
        failed: run.failed,
        interrupted: interrupt::requested(),
        load,
        generate: begin.elapsed(),
    };
    // The run's own error says more than that of its metrics.
    result.and(metrics::write(path, &model_dir, &built.engine, &run))
}

struct Run<'a> {
    jobs: &'a [Job],
    source: String,
    output: Output,
    progress: Progress,
    /// Completions asked for.
    total: usize,
    finished: usize,
    failed: usize,
}

impl Run<'_> {
    fn run(&mut self, engine: &mut Engine, quiet: bool) -> Result<(), CliError> {
        let start = Instant::now();
        let result = self.submit_and_generate(engine, start);
        self.progress.clear();
        // Completions held back are written even if the run failed.
        let written = self.output.finish();
        result?;
        written?;
        let (finished, failed, total) = (self.finished, self.failed, self.total);
        if !quiet {
            report(&closing_line(engine, finished, start.elapsed().as_secs_f64()));
        }
        if interrupt::requested() && finished + failed < total {
            return Err(CliError::Interrupted {
                finished,
                requests: total,
            });
        }
        match failed {
            0 => Ok(()),
            _ => Err(CliError::Failed(format!(
                "{failed} of {total} completions are missing"
            ))),
        }
    }

    fn submit_and_generate(&mut self, engine: &mut Engine, start: Instant) -> Result<(), CliError> {
        let mut open = HashMap::new();
        // Until the first step there is nothing to keep: an interruption ends the command at once.
        for (index, job) in self.jobs.iter().enumerate() {
            match engine.submit(&job.request) {
                Ok(id) => {
                    open.insert(id, index);
                }
                Err(error) => self.fail(index, 0..job.request.n, &error)?,
            }
        }
        interrupt::finish_steps();
        self.generate(engine, &open, start)
    }

    fn generate(
        &mut self,
        engine: &mut Engine,
        open: &HashMap<RequestId, usize>,
        start: Instant,
    ) -> Result<(), CliError> {
        while engine.has_unfinished() && !interrupt::requested() {
            for event in engine.step()? {
                let Event::Finished {
                    request,
                    index: completion,
                    result,
                } = event
                else {
                    continue;
                };
                let Some(&index) = open.get(&request) else {
                    continue;
                };
                let place = self.place(index, completion);
                match result {
                    Ok(completion) => {
                        self.finished += 1;
                        let (output, job) = (&mut self.output, &self.jobs[index]);
                        self.progress
                            .suspend(|| output.completion(place, job, &completion))?;
                    }
                    Err(error) => self.fail(index, completion..completion + 1, &error)?,
                }
            }
            let tokens = engine.statistics().new_tokens;
            self.progress
                .update(self.finished + self.failed, tokens, start.elapsed().as_secs_f64());
        }
        Ok(())
    }

    /// Where a completion of job number `index` stands among all completions.
    fn place(&self, index: usize, completion: usize) -> usize {
        // All jobs ask for the same number of completions.
        index * self.jobs[index].request.n + completion
    }

    /// Reports why completions of one prompt are missing and goes on with the others.
    fn fail(&mut self, index: usize, completions: Range<usize>, error: &Error) -> Result<(), CliError> {
        self.failed += completions.len();
        let place = match self.jobs[index].line {
            Some(line) => format!("{} line {line}: ", self.source),
            None => String::new(),
        };
        self.progress.suspend(|| report(&format!("{place}{error}")));
        for completion in completions {
            self.output.failure(self.place(index, completion))?;
        }
        Ok(())
    }
}

fn closing_line(engine: &Engine, completions: usize, seconds: f64) -> String {
    let tokens = engine.statistics().new_tokens;
    let peak = peak_memory().map_or("unknown".to_string(), format_bytes);
    format!(
        "{completions} completions, {tokens} tokens in {seconds:.2} s: {:.0} tok/s, peak memory {peak}, device {}",
        tokens as f64 / seconds.max(1e-9),
        engine.scheduler().device()
    )
}

fn source_name(args: &GenerateArgs) -> String {
    args.prompts
        .as_ref()
        .map_or(String::new(), |path| path.display().to_string())
}

fn refuse_to_overwrite_the_input(args: &GenerateArgs) -> Result<(), CliError> {
    let file = args.output.as_deref().filter(|path| *path != Path::new("-"));
    match file {
        Some(path) => refuse_input(args, "--output", path.metadata(), Some(path))?,
        None => {
            let stdout = stdout_file().and_then(|file| file.metadata());
            refuse_input(args, "standard output", stdout, None)?;
        }
    }
    if let Some(path) = args.metrics.as_deref() {
        refuse_input(args, "--metrics", path.metadata(), Some(path))?;
    }
    Ok(())
}

/// Refuses to write two results into one file.
fn refuse_one_file_for_two(args: &GenerateArgs, trace: Option<&Path>) -> Result<(), CliError> {
    let output = args.output.as_deref().filter(|path| *path != Path::new("-"));
    distinct_files(&[
        ("--trace", trace),
        ("--output", output),
        ("--metrics", args.metrics.as_deref()),
    ])
}

/// Refuses `output`, of the flag `name`, if it is a file that is read. `path` is where it was named, if it was.
fn refuse_input(
    args: &GenerateArgs,
    name: &str,
    output: std::io::Result<Metadata>,
    path: Option<&Path>,
) -> Result<(), CliError> {
    // Only a file that is there can be one that is read.
    let Ok(output) = output else {
        return Ok(());
    };
    let advice = match path {
        Some(_) => "name another one",
        None => "send it elsewhere",
    };
    let prompts = match &args.prompts {
        None => None,
        Some(path) if path == Path::new("-") => stdin_file().and_then(|file| file.metadata()).ok(),
        Some(path) => path.metadata().ok(),
    };
    if prompts.is_some_and(|prompts| same_file(&prompts, &output)) {
        return Err(CliError::Usage(format!(
            "{name} is the file of --prompts: {advice}"
        )));
    }
    let path = path.and_then(|path| path.canonicalize().ok());
    // Weights are mapped while the command runs: truncating them would end it, and lose them.
    let model = args.engine.model.as_deref();
    let model = model.and_then(|model| model_folder::find(Some(model)).ok());
    for folder in model.iter().chain(&args.adapter) {
        let inside = path
            .as_ref()
            .zip(folder.canonicalize().ok())
            .is_some_and(|(path, folder)| path.starts_with(folder));
        let is_output = |file: std::io::Result<std::fs::DirEntry>| {
            file.and_then(|file| file.path().metadata())
                .is_ok_and(|file| same_file(&file, &output))
        };
        if inside || std::fs::read_dir(folder).is_ok_and(|mut files| files.any(is_output)) {
            return Err(CliError::Usage(format!(
                "{name} is a file of {}, which is read: {advice}",
                folder.display()
            )));
        }
    }
    Ok(())
}
