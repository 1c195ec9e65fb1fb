//! `rollout bench`: tokens per second on a fixed workload, without any model file; with `--arrival-rate` how long requests
//! wait that arrive one by one.
//!
//! Prompt `i` has `64 + 37 i mod 193` tokens, its token `j` is `1000 + (7919 i + 104729 j) mod 140000` (within the
//! vocabulary). All prompts of a batch are submitted at once; decoding is greedy unless sampling flags are given, and goes
//! on past end-of-sequence ids.

mod args;
mod arrivals;
mod floor;
mod open;
mod prefill;
mod profile;
mod refresh;
mod report;
mod workload;

use std::path::Path;
use std::time::Instant;

use qwen3_model::{MergeMode, QuantType, Qwen3Config};
use serde_json::{Value, json};

pub(super) use args::BenchArgs;

use super::CliError;
use super::output::write_stdout;
use crate::builder::RunnerSettings;
use crate::cuda_runner::CudaSettings;
use crate::device::{self, DeviceChoice};
use crate::runner::Runner;
use crate::scheduler::Scheduler;
use crate::{Error, bundled};
use floor::Floor;
use open::{open, pool};
use profile::profile;
use refresh::{REFRESHES, refresh};
use report::{report, table, write_reports};
use workload::measure;

pub(super) fn run(args: &BenchArgs) -> Result<(), CliError> {
    // Before anything is loaded.
    let _ = args.sampling()?;
    let batches = if args.batches.is_empty() {
        vec![args.n_prompts]
    } else {
        args.batches.clone()
    };
    args.check_groups(&batches)?;
    let largest = batches.iter().copied().max().unwrap_or(1);
    let ordinal = match args.device {
        DeviceChoice::Cuda(ordinal) => ordinal,
        DeviceChoice::Cpu => return run_on_cpu(args, &batches, largest),
        DeviceChoice::Auto => {
            return Err(CliError::Usage(
                "rollout bench measures one device: use --device cuda:N or --device cpu".into(),
            ));
        }
    };
    let settings = CudaSettings {
        ordinal,
        capture: !args.no_capture_cudagraph,
        pristine: args.lora_pristine,
        mixed_steps: CudaSettings::default().mixed_steps && !args.separate_decode,
        share_reads: !args.no_shared_reads,
        batch_invariant: args.batch_invariant,
    };
    let pool = pool(args, largest);
    let begin = Instant::now();
    let (mut runner, config, backend) = open(args, &pool, &settings)?;
    let load_s = begin.elapsed().as_secs_f64();
    let mode = match args.no_merge_lora || args.quantize.is_some() {
        true => MergeMode::Unmerged,
        false => MergeMode::Merged,
    };
    let refresh = match args.lora_rank {
        Some(rank) => Some(refresh(&mut runner, &config, rank, args.seed, mode)?),
        None => None,
    };
    let start = *runner.start();
    let device = runner.device();
    let memory = runner.memory();
    let mut scheduler = scheduler(args, runner)?;
    if let Some(rate) = args.arrival_rate {
        return serve_arrivals(args, rate, &mut scheduler, &config, &backend, load_s);
    }
    let mut measured = Vec::new();
    for &prompts in &batches {
        measured.push(measure(args, &mut scheduler, &config, prompts)?);
    }
    let mut runner = scheduler.into_runner();
    if !args.no_profile {
        for batch in &mut measured {
            batch.profile = profile(
                args,
                &mut runner,
                batch.prompts.min(pool.max_batch_size.unwrap_or(largest)),
            )?;
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
    let floor = Floor::new(&device, &config, memory.weight_bytes);
    let reports: Vec<Value> = measured
        .iter()
        .map(|batch| {
            let mut report = report(args, batch, &floor);
            let lens = prefill::prompt_lens(args, &config, batch.prompts);
            prefill::add_rates(&mut report, &config, &lens, matrix_rate);
            report["backend"] = json!(backend);
            report["device"] = json!(device);
            report["commit"] = json!(option_env!("ROLLOUT_COMMIT"));
            report["load_s"] = json!(load_s);
            report["open_s"] = json!(start.open_s);
            report["weights_and_kernels_s"] = json!(start.load_s);
            report["capture_s"] = json!(start.capture_s);
            report["lora_rank"] = json!(args.lora_rank);
            report["lora_merged"] = json!(args.lora_rank.map(|_| mode == MergeMode::Merged));
            report["quantize"] = json!(args.quantize.map(QuantType::name));
            report["refresh"] = json!(refresh);
            report["graphs"] = json!(start.graphs);
            report["peak_memory_gb"] = json!(peak as f64 / 1e9);
            report["weight_gb"] = json!(memory.weight_bytes as f64 / 1e9);
            report["kv_gb"] = json!(memory.kv_bytes as f64 / 1e9);
            report
        })
        .collect();
    write_stdout(&table(&device, load_s, Some(peak), &reports))?;
    write_stdout(&prefill::table(&reports))?;
    if let (Some(refresh), Some(rank)) = (&refresh, args.lora_rank) {
        write_stdout(&format!(
            "refresh of rank {rank} on all projections: {:.2} ms, of which writing weights {:.2} ms (median of {REFRESHES})\n",
            refresh.total_ms, refresh.merge_ms
        ))?;
    }
    write_reports(args, reports)
}

/// With the limits that were asked for.
fn scheduler<R: Runner>(args: &BenchArgs, runner: R) -> Result<Scheduler<R>, CliError> {
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
fn run_on_cpu(args: &BenchArgs, batches: &[usize], largest: usize) -> Result<(), CliError> {
    let only_gpu = [
        ("--lora-rank", args.lora_rank.is_some()),
        ("--quantize", args.quantize.is_some()),
        ("--no-capture-cudagraph", args.no_capture_cudagraph),
        ("--no-shared-reads", args.no_shared_reads),
    ];
    if let Some((flag, _)) = only_gpu.iter().find(|(_, given)| *given) {
        return Err(CliError::Usage(format!(
            "{flag} is for a GPU: use --device cuda:N"
        )));
    }
    let name = args.model.as_deref().unwrap_or_default();
    if name.starts_with("random:") {
        let advice = "random weights are drawn on a GPU: give a model folder, or none for the bundled model";
        return Err(CliError::Usage(format!(
            "--model {name} with --device cpu: {advice}"
        )));
    }
    let dir = match name {
        "" => bundled::model_dir()?,
        name => Path::new(name).to_owned(),
    };
    let begin = Instant::now();
    let config = Qwen3Config::from_dir(&dir).map_err(Error::from)?;
    let settings = RunnerSettings {
        pool: pool(args, largest),
        batch_invariant: args.batch_invariant,
        ..RunnerSettings::default()
    };
    let opened = device::open(DeviceChoice::Cpu, &dir, &config, &settings)?;
    let load_s = begin.elapsed().as_secs_f64();
    let backend = format!("cpu, {}", dir.display());
    let memory = opened.runner.memory();
    let mut scheduler = scheduler(args, opened.runner)?;
    if let Some(rate) = args.arrival_rate {
        return serve_arrivals(args, rate, &mut scheduler, &config, &backend, load_s);
    }
    let device = scheduler.device();
    let floor = Floor::new(&device, &config, memory.weight_bytes);
    let mut reports = Vec::new();
    for &prompts in batches {
        let mut report = report(args, &measure(args, &mut scheduler, &config, prompts)?, &floor);
        report["backend"] = json!(backend);
        report["device"] = json!(device);
        report["commit"] = json!(option_env!("ROLLOUT_COMMIT"));
        report["load_s"] = json!(load_s);
        report["weight_gb"] = json!(memory.weight_bytes as f64 / 1e9);
        report["kv_gb"] = json!(memory.kv_bytes as f64 / 1e9);
        reports.push(report);
    }
    write_stdout(&table(&device, load_s, None, &reports))?;
    write_reports(args, reports)
}

fn serve_arrivals<R: Runner>(
    args: &BenchArgs,
    rate: f64,
    scheduler: &mut Scheduler<R>,
    config: &Qwen3Config,
    backend: &str,
    load_s: f64,
) -> Result<(), CliError> {
    let device = scheduler.device();
    write_stdout(&format!("{device}, ready in {load_s:.2} s\n"))?;
    let mut reports = Vec::new();
    let budgets: Vec<_> = match args.mixed_prefill_tokens[..] {
        [] => vec![None],
        ref budgets => budgets.iter().copied().map(Some).collect(),
    };
    for tokens in budgets {
        if let Some(tokens) = tokens {
            scheduler.set_mixed_prefill_tokens(tokens);
        }
        let (mut report, text) = arrivals::measure(args, rate, scheduler, config.vocab_size)?;
        write_stdout(&format!("\n{text}"))?;
        report["backend"] = json!(backend);
        report["device"] = json!(device);
        report["commit"] = json!(option_env!("ROLLOUT_COMMIT"));
        report["load_s"] = json!(load_s);
        reports.push(report);
    }
    write_reports(args, reports)
}
