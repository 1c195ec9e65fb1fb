//! `rollout bench`: tokens per second on a fixed workload, without any model file; with `--arrival-rate` how long requests
//! wait that arrive one by one.
//!
//! Prompt `i` has `64 + 37 i mod 193` tokens, its token `j` is `1000 + (7919 i + 104729 j) mod 140000` (within the
//! vocabulary). All prompts of a batch are submitted at once; decoding is greedy unless sampling flags are given, and goes
//! on past end-of-sequence ids.

mod args;
mod arrivals;
mod commit;
mod compare;
mod floor;
mod growth;
mod host_gap;
mod open;
mod prefill;
mod profile;
mod refresh;
mod report;
mod workload;

use std::path::Path;
use std::time::Instant;

use qwen3_model::MergeMode;
use serde_json::{Value, json};

pub(super) use args::BenchArgs;
pub(super) use commit::commit;
pub(super) use open::Subject;
pub(super) use workload::{Round, measure, prompt};

use super::CliError;
use super::output::{distinct_files, write_stdout};
use crate::Error;
use crate::runner::Runner;
use crate::scheduler::Scheduler;
use crate::tuned::{TunedOptions, TunedProfile};
use floor::Floor;
use host_gap::host_gap;
use profile::profile;
use refresh::{REFRESHES, refresh, serve_adapter};
use report::{report, table, write_reports};

/// What all reports of a run have in common.
struct Run<'a> {
    args: &'a BenchArgs,
    /// What --compare names.
    baseline: Option<&'a compare::Baseline<'a>>,
    subject: &'a Subject,
    /// What a tuned profile chose.
    options: TunedOptions,
    batches: Vec<usize>,
    device: String,
    page_size: usize,
    load_s: f64,
}

impl Run<'_> {
    fn describe(&self, mut report: Value) -> Value {
        report["backend"] = json!(self.subject.backend);
        report["device"] = json!(self.device);
        report["commit"] = json!(commit());
        report["load_s"] = json!(self.load_s);
        report["page_size"] = json!(self.page_size);
        report["kernel_options"] = json!(self.args.kernels.options().or(self.options.kernels));
        report["tuned"] = json!((self.options != TunedOptions::default()).then_some(self.options));
        report
    }

    fn heading(&self) -> String {
        format!("{}, ready in {:.2} s", self.device, self.load_s)
    }

    fn floor(&self, memory: u64) -> Floor {
        Floor::new(&self.device, &self.subject.config, memory)
    }
}

/// `trace` is the file of `--trace`, which has been opened.
pub(super) fn run(args: &BenchArgs, trace: Option<&Path>) -> Result<(), CliError> {
    // Before anything is loaded.
    let _ = args.sampling()?;
    distinct_files(&[
        ("--trace", trace),
        ("--stats-path", args.stats_path.as_deref()),
        ("--plot", args.plot.as_deref()),
    ])?;
    for read in [("--plot-other", &args.plot_other), ("--compare", &args.compare)] {
        distinct_files(&[(read.0, read.1.as_deref()), ("--plot", args.plot.as_deref())])?;
    }
    // Now, not after the measurements: --stats-path may be the same file.
    let baseline = args.compare.as_deref().map(compare::Baseline::read);
    let baseline = baseline.transpose()?;
    let begin = Instant::now();
    let subject = Subject::of(args)?;
    let profile = TunedProfile::find(&args.kernels.tuned(), &subject.device, &subject.shape())?;
    let batches = args.batches();
    args.check_groups(&batches)?;
    let largest = batches.iter().copied().max().unwrap_or(1);
    let options = profile.map(|profile| profile.options).unwrap_or_default();
    let run = |runner: &dyn Runner| Run {
        args,
        baseline: baseline.as_ref(),
        subject: &subject,
        options,
        batches: batches.clone(),
        device: runner.device(),
        page_size: runner.shape().page_size,
        load_s: begin.elapsed().as_secs_f64(),
    };
    if subject.on_gpu() {
        let runner = subject.open_gpu(args, largest, &options)?;
        run_on_gpu(&run(&runner), runner)
    } else {
        let runner = subject.open_cpu(args, largest, &options)?;
        run_on_cpu(&run(&*runner), runner)
    }
}

fn run_on_gpu(of: &Run<'_>, mut runner: crate::CudaRunner) -> Result<(), CliError> {
    let (args, config) = (of.args, &of.subject.config);
    let mode = match args.no_merge_lora || of.subject.shape().quantized {
        true => MergeMode::Unmerged,
        false => MergeMode::Merged,
    };
    let refresh = match args.lora_rank {
        Some(rank) => Some(refresh(&mut runner, config, rank, args.seed, mode)?),
        None => None,
    };
    if let Some(dir) = &args.lora_adapter {
        serve_adapter(&mut runner, dir, mode)?;
    }
    let start = *runner.start();
    let memory = runner.memory();
    let max_batch_size = runner.shape().max_batch_size;
    let mut scheduler = scheduler(args, runner)?;
    if let Some(rate) = args.arrival_rate {
        return serve_arrivals(of, rate, &mut scheduler);
    }
    let floor = of.floor(memory.weight_bytes);
    if !args.context_lengths.is_empty() {
        let mut runner = scheduler.into_runner();
        let backend = runner.backend_mut();
        let points = growth::on_gpu(backend, &floor, &of.batches, &args.context_lengths, args.seed)?;
        return report_growth(of, &points, &floor);
    }
    let mut measured = Vec::new();
    for &prompts in &of.batches {
        let mut batch = measure(args, &mut scheduler, config, prompts)?;
        if !args.no_profile {
            batch.host_gap = host_gap(args, &mut scheduler, config, prompts)?;
        }
        measured.push(batch);
    }
    let mut runner = scheduler.into_runner();
    if !args.no_profile {
        for batch in &mut measured {
            batch.profile = profile(args, &mut runner, batch.prompts.min(max_batch_size))?;
        }
    }
    let peak = runner.memory_used()?;
    let matrix_rate = match args.no_profile {
        true => None,
        false => Some(
            runner
                .backend()
                .matrix_rate(prefill::MATRIX)
                .map_err(Error::from)?,
        ),
    };
    let reports: Vec<Value> = measured
        .iter()
        .map(|batch| {
            let mut report = of.describe(report(args, batch, &floor));
            let lens = prefill::prompt_lens(args, config, batch.prompts);
            prefill::add_rates(&mut report, config, &lens, matrix_rate);
            report["open_s"] = json!(start.open_s);
            report["weights_and_kernels_s"] = json!(start.load_s);
            report["compile_s"] = json!(start.compile_s);
            report["capture_s"] = json!(start.capture_s);
            let adapted = args.lora_rank.is_some() || args.lora_adapter.is_some();
            report["lora_merged"] = json!(adapted.then_some(mode == MergeMode::Merged));
            report["refresh"] = json!(refresh);
            report["graphs"] = json!(start.graphs);
            report["peak_memory_gb"] = json!(peak as f64 / 1e9);
            report["weight_gb"] = json!(memory.weight_bytes as f64 / 1e9);
            report["kv_gb"] = json!(memory.kv_bytes as f64 / 1e9);
            report
        })
        .collect();
    write_stdout(&table(&of.heading(), Some(peak), &reports))?;
    write_stdout(&prefill::table(&reports))?;
    if let (Some(refresh), Some(rank)) = (&refresh, args.lora_rank) {
        write_stdout(&format!(
            "refresh of rank {rank} on all projections: {:.2} ms, of which writing weights {:.2} ms (median of {REFRESHES})\n",
            refresh.total_ms, refresh.merge_ms
        ))?;
    }
    write_reports(of, reports)
}

/// With the limits that were asked for.
pub(super) fn scheduler<R: Runner>(args: &BenchArgs, runner: R) -> Result<Scheduler<R>, CliError> {
    let mut scheduler = Scheduler::new(runner, Vec::new())?;
    match args.mixed_prefill_tokens[..] {
        [] if args.arrival_rate.is_some() => scheduler.favor_latency(),
        [] => {}
        [tokens] => scheduler.set_mixed_prefill_tokens(tokens),
        _ if args.arrival_rate.is_some() => {}
        _ => {
            return Err(CliError::Usage(
                "several numbers for --mixed-prefill-tokens need --arrival-rate".into(),
            ));
        }
    }
    Ok(scheduler)
}

/// The same workload through the CPU runner, without what only a GPU has.
fn run_on_cpu<R: Runner>(of: &Run<'_>, mut runner: R) -> Result<(), CliError> {
    let (args, config) = (of.args, &of.subject.config);
    let mode = match args.no_merge_lora || of.subject.shape().quantized {
        true => MergeMode::Unmerged,
        false => MergeMode::Merged,
    };
    if let Some(dir) = &args.lora_adapter {
        serve_adapter(&mut runner, dir, mode)?;
    }
    let memory = runner.memory();
    let mut scheduler = scheduler(args, runner)?;
    if let Some(rate) = args.arrival_rate {
        return serve_arrivals(of, rate, &mut scheduler);
    }
    let floor = of.floor(memory.weight_bytes);
    if !args.context_lengths.is_empty() {
        let contexts = &args.context_lengths;
        let points = growth::with_prompts(args, &mut scheduler, config, &floor, &of.batches, contexts)?;
        return report_growth(of, &points, &floor);
    }
    let mut reports = Vec::new();
    for &prompts in &of.batches {
        let measured = measure(args, &mut scheduler, config, prompts)?;
        let mut report = of.describe(report(args, &measured, &floor));
        report["lora_merged"] = json!(args.lora_adapter.as_ref().map(|_| mode == MergeMode::Merged));
        report["peak_memory_gb"] = json!(crate::memory::peak_memory().map(|bytes| bytes as f64 / 1e9));
        report["weight_gb"] = json!(memory.weight_bytes as f64 / 1e9);
        report["kv_gb"] = json!(memory.kv_bytes as f64 / 1e9);
        reports.push(report);
    }
    write_stdout(&table(&of.heading(), None, &reports))?;
    write_reports(of, reports)
}

fn report_growth(of: &Run<'_>, points: &[growth::Point], floor: &Floor) -> Result<(), CliError> {
    write_stdout(&format!("{}\n\n{}", of.heading(), growth::table(points)))?;
    let report = of.describe(growth::report(points, floor.rate.map(|rate| rate / 1e12)));
    // What was measured comes first, whatever there is to draw.
    report::write_json(of.args, &report)?;
    match &of.args.plot {
        Some(path) => super::plot::write_growth(&report, path),
        None => Ok(()),
    }
}

fn serve_arrivals<R: Runner>(of: &Run<'_>, rate: f64, scheduler: &mut Scheduler<R>) -> Result<(), CliError> {
    write_stdout(&format!("{}\n", of.heading()))?;
    let mut reports = Vec::new();
    let args = of.args;
    let budgets: Vec<_> = match args.mixed_prefill_tokens[..] {
        [] => vec![None],
        ref budgets => budgets.iter().copied().map(Some).collect(),
    };
    for tokens in budgets {
        if let Some(tokens) = tokens {
            scheduler.set_mixed_prefill_tokens(tokens);
        }
        let (report, text) = arrivals::measure(args, rate, scheduler, of.subject.config.vocab_size)?;
        write_stdout(&format!("\n{text}"))?;
        reports.push(of.describe(report));
    }
    write_reports(of, reports)
}
