//! `rollout generate`.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use qwen3_model::MergeMode;

use super::args::GenerateArgs;
use super::input::{self, Job};
use super::output::Output;
use super::progress::Progress;
use super::{CliError, report};
use crate::completion::{Event, RequestId};
use crate::engine::Engine;
use crate::memory::{format_bytes, peak_memory};
use crate::text::ChatTemplates;
use crate::{Error, bundled};

/// Set by Ctrl-C.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

pub(super) fn run(args: &GenerateArgs) -> Result<(), CliError> {
    refuse_to_overwrite_the_input(args)?;
    let model_dir = match &args.model {
        Some(dir) => dir.clone(),
        None => bundled::model_dir()?,
    };
    // Prompts first: a mistake in them shows before a large model is loaded.
    let has_template = args.prompts.is_none() && !ChatTemplates::from_dir(&model_dir)?.is_empty();
    let jobs = input::jobs(args, has_template)?;
    let progress = Progress::new(args.quiet);
    progress.spinner("loading the model");
    let mut builder = Engine::builder()
        .model(&model_dir)
        .device(args.device)
        .pool(args.pool())
        .capture_graphs(!args.no_capture_cudagraph)
        .pristine_copy(args.lora_pristine);
    for dir in &args.adapter {
        builder = builder.adapter(dir);
    }
    if args.no_merge_lora {
        builder = builder.merge_mode(MergeMode::Unmerged);
    }
    let built = builder.build_with_notice();
    progress.clear();
    let mut built = built?;
    if let (Some(notice), false) = (&built.notice, args.quiet) {
        report(notice);
    }
    if let (Some(policy), false) = (&built.policy, args.quiet) {
        policy.warnings.iter().for_each(|warning| report(warning));
        policy.remark().into_iter().for_each(report);
    }
    // A second signal does not wait for the step to end. That no handler can be set only takes the grace away.
    let _ = ctrlc::set_handler(|| {
        if INTERRUPTED.swap(true, Ordering::SeqCst) {
            std::process::exit(130);
        }
    });
    let output = Output::open(args.output.as_deref(), jobs.len())?;
    let run = Run {
        jobs: &jobs,
        source: source_name(args),
        output,
        progress,
        finished: 0,
        failed: 0,
    };
    run.run(&mut built.engine, args.quiet)
}

struct Run<'a> {
    jobs: &'a [Job],
    source: String,
    output: Output,
    progress: Progress,
    finished: usize,
    failed: usize,
}

impl Run<'_> {
    fn run(mut self, engine: &mut Engine, quiet: bool) -> Result<(), CliError> {
        let start = Instant::now();
        self.progress.start(self.jobs.len());
        let mut open = HashMap::new();
        for (index, job) in self.jobs.iter().enumerate() {
            if INTERRUPTED.load(Ordering::SeqCst) {
                break;
            }
            match engine.submit(&job.request) {
                Ok(id) => {
                    open.insert(id, index);
                }
                Err(error) => self.fail(index, &error)?,
            }
        }
        let result = self.generate(engine, &open, start);
        self.progress.clear();
        // Completions held back are written even if the run failed.
        let Self {
            output,
            finished,
            failed,
            jobs,
            ..
        } = self;
        let written = output.finish();
        result?;
        written?;
        if !quiet {
            report(&closing_line(engine, finished, start.elapsed().as_secs_f64()));
        }
        if INTERRUPTED.load(Ordering::SeqCst) && finished + failed < jobs.len() {
            return Err(CliError::Interrupted {
                finished,
                requests: jobs.len(),
            });
        }
        match failed {
            0 => Ok(()),
            _ => Err(CliError::Failed(format!(
                "{failed} of {} prompts have no completion",
                jobs.len()
            ))),
        }
    }

    fn generate(
        &mut self,
        engine: &mut Engine,
        open: &HashMap<RequestId, usize>,
        start: Instant,
    ) -> Result<(), CliError> {
        while engine.has_unfinished() && !INTERRUPTED.load(Ordering::SeqCst) {
            for event in engine.step()? {
                let Event::Finished { request, result } = event else {
                    continue;
                };
                let Some(&index) = open.get(&request) else {
                    continue;
                };
                match result {
                    Ok(completion) => {
                        self.finished += 1;
                        let (output, job) = (&mut self.output, &self.jobs[index]);
                        self.progress
                            .suspend(|| output.completion(index, job, &completion))?;
                    }
                    Err(error) => self.fail(index, &error)?,
                }
            }
            let tokens = engine.statistics().new_tokens;
            self.progress
                .update(self.finished + self.failed, tokens, start.elapsed().as_secs_f64());
        }
        Ok(())
    }

    /// Reports one prompt's error and goes on with the others.
    fn fail(&mut self, index: usize, error: &Error) -> Result<(), CliError> {
        self.failed += 1;
        let place = match self.jobs[index].line {
            Some(line) => format!("{} line {line}: ", self.source),
            None => String::new(),
        };
        self.progress.suspend(|| report(&format!("{place}{error}")));
        self.output.failure(index)
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
    // Only a file that is there can be one that is read.
    let Some(output) = args.output.as_ref().and_then(|path| path.canonicalize().ok()) else {
        return Ok(());
    };
    if args
        .prompts
        .as_ref()
        .is_some_and(|prompts| same_file(prompts, &output))
    {
        return Err(CliError::Usage(
            "--output is the file of --prompts: name another one".into(),
        ));
    }
    // Weights are mapped while the command runs: truncating them would end it, and lose them.
    for folder in args.model.iter().chain(&args.adapter) {
        let inside = folder
            .canonicalize()
            .is_ok_and(|folder| output.starts_with(folder));
        let linked = std::fs::read_dir(folder)
            .is_ok_and(|mut files| files.any(|file| file.is_ok_and(|file| same_file(&file.path(), &output))));
        if inside || linked {
            return Err(CliError::Usage(format!(
                "--output is a file of {}, which is read: name another one",
                folder.display()
            )));
        }
    }
    Ok(())
}

/// Whether both paths lead to one file, also by links.
fn same_file(a: &Path, b: &Path) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        if let (Ok(a), Ok(b)) = (a.metadata(), b.metadata()) {
            return a.is_file() && (a.dev(), a.ino()) == (b.dev(), b.ino());
        }
    }
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}
