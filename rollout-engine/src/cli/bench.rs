//! `rollout bench`: tokens per second on a fixed workload, without any model file; with `--arrival-rate` how long requests
//! wait that arrive one by one.
//!
//! Prompt `i` has `64 + 37 i mod 193` tokens, its token `j` is `1000 + (7919 i + 104729 j) mod 140000` (within the
//! vocabulary). All prompts of a batch are submitted at once; decoding is greedy and goes on past end-of-sequence ids.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::Args;
use lora_merge::ActiveAdapter;
use paged_kv::PageTable;
use qwen3_model::cuda::{DecodeRow, StageTime, WeightSource};
use qwen3_model::{MergeMode, PristineCopy, QuantType, Qwen3Config, Weights, random_adapter};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::CliError;
use super::args::positive;
use super::output::write_stdout;
use crate::builder::RunnerSettings;
use crate::completion::{Event, TokenCompletion};
use crate::cuda_runner::{CudaRunner, CudaSettings};
use crate::device::{self, DeviceChoice};
use crate::pool::PoolSettings;
use crate::request::SamplingParams;
use crate::runner::Runner;
use crate::scheduler::Scheduler;
use crate::{Error, bundled};

mod arrivals;

/// Bytes per second that a device was measured to read from its memory; the floor of a decode step follows from it.
const READ_RATES: [(&str, f64); 1] = [("H200", 4.39e12)];
/// Completions in the report, for a look at what was generated.
const SAMPLES: usize = 2;
/// Longest prompt of the workload.
const LONGEST_PROMPT: usize = 64 + 192;

#[derive(Debug, Args)]
pub(super) struct BenchArgs {
    /// Model folder, or random weights of a published shape: random:qwen3-0.6b, random:qwen3-1.7b, random:qwen3-4b,
    /// random:qwen3-8b. Default: the bundled model.
    #[arg(long, value_name = "DIR|random:SHAPE")]
    model: Option<String>,

    /// Prompts of a round, all submitted at once unless --arrival-rate is given.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = positive)]
    n_prompts: usize,

    /// Run once for each of these numbers of prompts, such as 1,8,64, and print a table.
    #[arg(long, value_name = "N,N,…", value_delimiter = ',', value_parser = positive, conflicts_with = "n_prompts")]
    batches: Vec<usize>,

    /// Measured rounds, after one that is not counted.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = positive)]
    n_rounds: usize,

    /// New tokens per prompt, in tokens.
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = positive)]
    max_new_tokens: usize,

    /// Most sequences at once, in sequences. Default: the largest number of prompts.
    #[arg(long, value_name = "N", value_parser = positive)]
    max_batch_size: Option<usize>,

    /// Longest sequence, in tokens. Default: what the workload needs.
    #[arg(long, value_name = "N", value_parser = positive)]
    max_seq_length: Option<usize>,

    /// Pages of the KV cache, one of them reserved. Default: what the workload needs.
    #[arg(long, value_name = "N", value_parser = positive)]
    n_pages: Option<usize>,

    /// Size of a page, in tokens.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = positive)]
    page_size: usize,

    /// Most prompt tokens per step, in tokens. Default: the device's choice.
    #[arg(long, value_name = "N", value_parser = positive)]
    max_prefill_tokens: Option<usize>,

    /// Most prompt tokens of a step in which other sequences decode, in tokens; more where more sequences wait to start
    /// than decode. Default: the device's choice with --arrival-rate, otherwise no limit.
    #[arg(long, value_name = "N", value_parser = positive)]
    mixed_prefill_tokens: Option<usize>,

    /// Let prompts arrive at random, so many a second on average, and report the times to first tokens and between tokens.
    #[arg(long, value_name = "R", value_parser = rate, conflicts_with_all = ["batches", "lora_rank"])]
    arrival_rate: Option<f64>,

    /// Quantise the projections to 4 bits: nf4 or fp4. Adapters are then applied at run time.
    #[arg(long, value_name = "TYPE")]
    quantize: Option<QuantType>,

    /// Serve a random adapter of this rank on all seven projections, merged, and time a refresh.
    #[arg(long, value_name = "N", value_parser = positive)]
    lora_rank: Option<usize>,

    /// Apply the adapter of --lora-rank at run time, beside the weights.
    #[arg(long, requires = "lora_rank")]
    no_merge_lora: bool,

    /// With --lora-rank, where pristine copies live: device, pinned or file.
    #[arg(long, value_name = "PLACE", default_value = "device", requires = "lora_rank")]
    lora_pristine: PristineCopy,

    /// Launch decode steps kernel by kernel instead of replaying CUDA graphs.
    #[arg(long)]
    no_capture_cudagraph: bool,

    /// Where to run: cuda:N, or cpu.
    #[arg(long, value_name = "DEVICE", default_value = "cuda:0")]
    device: DeviceChoice,

    /// Seed of random weights and of arrivals.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,

    /// Leave out the breakdown of a decode step by kind of operation.
    #[arg(long)]
    no_profile: bool,

    /// Write all numbers to this file as JSON: an object, or a list of objects with --batches.
    #[arg(long, value_name = "FILE")]
    stats_path: Option<PathBuf>,

    /// Draw throughput and steps against the number of prompts into this file; `rollout plot` draws --stats-path files
    /// later, without a GPU.
    #[arg(long, value_name = "FILE.svg", conflicts_with = "arrival_rate")]
    plot: Option<PathBuf>,

    /// With --plot, figures of other engines to draw beside: a JSON object from names to lists of [prompts, new tokens
    /// per second].
    #[arg(long, value_name = "FILE.json", requires = "plot")]
    plot_other: Option<PathBuf>,
}

/// Refreshes that are timed.
const REFRESHES: usize = 5;

/// Medians over [`REFRESHES`].
#[derive(serde::Serialize)]
struct Refresh {
    /// From adapters in host memory to the new policy.
    total_ms: f64,
    /// Of which the pass over the weights.
    merge_ms: f64,
}

/// Serves a random adapter, and times refreshes between two.
fn refresh(
    runner: &mut CudaRunner,
    config: &Qwen3Config,
    rank: usize,
    seed: u64,
    mode: MergeMode,
) -> Result<Refresh, CliError> {
    let adapter = |seed| {
        random_adapter(config, rank, seed)
            .map(ActiveAdapter::new)
            .map_err(Error::from)
    };
    let adapters = [[adapter(seed)?], [adapter(seed.wrapping_add(1))?]];
    let (mut total, mut merge) = (Vec::new(), Vec::new());
    for i in 0..=REFRESHES {
        let update = runner.set_adapters(&adapters[(i + REFRESHES) % 2], mode)?;
        // The first one takes the pristine copies and loads the kernels.
        if i > 0 {
            total.push(update.elapsed.as_secs_f64() * 1e3);
            merge.push(update.merge_elapsed.as_secs_f64() * 1e3);
        }
    }
    Ok(Refresh {
        total_ms: median(&total),
        merge_ms: median(&merge),
    })
}

/// What one batch size gave.
struct Measured {
    prompts: usize,
    tokens: usize,
    wall_s: Vec<f64>,
    prefill_ms: Vec<f64>,
    step_ms: f64,
    checksum: String,
    samples: Vec<TokenCompletion>,
    profile: Vec<StageTime>,
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate > 0.0 && rate.is_finite() => Ok(rate),
        _ => Err("use a number of prompts a second above 0, such as 2.5".into()),
    }
}

pub(super) fn run(args: &BenchArgs) -> Result<(), CliError> {
    let batches = if args.batches.is_empty() {
        vec![args.n_prompts]
    } else {
        args.batches.clone()
    };
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
    let floor = Floor::new(&device, &config, memory.weight_bytes);
    let reports: Vec<Value> = measured
        .iter()
        .map(|batch| {
            let mut report = report(args, batch, &floor);
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
    match args.mixed_prefill_tokens {
        Some(tokens) => scheduler.set_mixed_prefill_tokens(tokens),
        None if args.arrival_rate.is_some() => scheduler.favor_latency(),
        None => {}
    }
    Ok(scheduler)
}

/// The same workload through the CPU runner, without what only a GPU has.
fn run_on_cpu(args: &BenchArgs, batches: &[usize], largest: usize) -> Result<(), CliError> {
    let only_gpu = [
        ("--lora-rank", args.lora_rank.is_some()),
        ("--quantize", args.quantize.is_some()),
        ("--no-capture-cudagraph", args.no_capture_cudagraph),
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
    let (mut report, text) = arrivals::measure(args, rate, scheduler, config.vocab_size)?;
    let device = scheduler.device();
    write_stdout(&format!("{device}, ready in {load_s:.2} s\n\n{text}"))?;
    report["backend"] = json!(backend);
    report["device"] = json!(device);
    report["commit"] = json!(option_env!("ROLLOUT_COMMIT"));
    report["load_s"] = json!(load_s);
    write_reports(args, vec![report])
}

fn write_reports(args: &BenchArgs, mut reports: Vec<Value>) -> Result<(), CliError> {
    if let Some(path) = &args.plot {
        super::plot::write_reports(&reports, args.plot_other.as_deref(), path)?;
    }
    let Some(path) = &args.stats_path else {
        return Ok(());
    };
    let value = if args.batches.is_empty() {
        reports.remove(0)
    } else {
        Value::Array(reports)
    };
    let text = serde_json::to_string_pretty(&value).map_err(|error| CliError::Failed(error.to_string()))?;
    std::fs::write(path, text + "\n")
        .map_err(|error| CliError::Failed(format!("{}: {error}", path.display())))
}

fn pool(args: &BenchArgs, largest: usize) -> PoolSettings {
    let max_seq_length = args
        .max_seq_length
        .unwrap_or(LONGEST_PROMPT + args.max_new_tokens);
    let max_batch_size = args.max_batch_size.unwrap_or(largest);
    let pages = max_batch_size
        .saturating_mul(max_seq_length.div_ceil(args.page_size))
        .saturating_add(1);
    PoolSettings {
        max_batch_size: Some(max_batch_size),
        max_seq_length: Some(max_seq_length),
        n_pages: Some(args.n_pages.unwrap_or(pages)),
        page_size: Some(args.page_size),
        max_prefill_tokens: args.max_prefill_tokens,
    }
}

fn open(
    args: &BenchArgs,
    pool: &PoolSettings,
    settings: &CudaSettings,
) -> Result<(CudaRunner, Qwen3Config, String), CliError> {
    let name = args.model.as_deref().unwrap_or_default();
    if let Some(shape) = name.strip_prefix("random:") {
        let config = Qwen3Config::published_shape(shape).ok_or_else(|| {
            let known = Qwen3Config::PUBLISHED.join(", random:");
            CliError::Usage(format!(
                "--model random:{shape} is not known; there are random:{known}"
            ))
        })?;
        let (source, how) = match args.quantize {
            Some(t) => (
                WeightSource::RandomQuantized(args.seed, t),
                format!(" in {}", t.name()),
            ),
            None => (WeightSource::Random(args.seed), String::new()),
        };
        let runner = CudaRunner::open(&config, source, pool, settings)?;
        return Ok((runner, config, format!("cuda, {name}{how}")));
    }
    let dir = if name.is_empty() {
        bundled::model_dir()?
    } else {
        Path::new(name).to_owned()
    };
    let config = Qwen3Config::from_dir(&dir).map_err(Error::from)?;
    CudaRunner::check_device(settings.ordinal)?;
    let mut weights = Weights::open(&dir, &config).map_err(Error::from)?;
    if let Some(quant_type) = args.quantize {
        weights = weights.quantized(quant_type, false).map_err(Error::from)?;
    }
    let runner = CudaRunner::open(&config, WeightSource::Given(&weights), pool, settings)?;
    Ok((runner, config, format!("cuda, {}", dir.display())))
}

fn prompt(i: usize, vocab: usize) -> Vec<u32> {
    // Ids of the common workload where the vocabulary has them, else wrapped into it.
    (0..64 + i * 37 % 193)
        .map(|j| ((1000 + (i * 7919 + j * 104_729) % 140_000) % vocab) as u32)
        .collect()
}

fn measure<R: Runner>(
    args: &BenchArgs,
    scheduler: &mut Scheduler<R>,
    config: &Qwen3Config,
    prompts: usize,
) -> Result<Measured, CliError> {
    let sampling = SamplingParams {
        max_new_tokens: args.max_new_tokens,
        ignore_eos: true,
        ..SamplingParams::default()
    };
    let mut measured = Measured {
        prompts,
        tokens: 0,
        wall_s: Vec::new(),
        prefill_ms: Vec::new(),
        step_ms: 0.0,
        checksum: String::new(),
        samples: Vec::new(),
        profile: Vec::new(),
    };
    let mut middle = Vec::new();
    for round in 0..=args.n_rounds {
        let begin = Instant::now();
        for i in 0..prompts {
            scheduler.submit(prompt(i, config.vocab_size), &sampling)?;
        }
        let mut events = Vec::new();
        let mut completions = Vec::with_capacity(prompts);
        let mut started = std::collections::HashSet::new();
        let mut prefill_ms = None;
        // When each step's results were there, once every prompt has its first token.
        let mut laps = Vec::new();
        while scheduler.has_unfinished() {
            scheduler.step(&mut events)?;
            let now = begin.elapsed().as_secs_f64() * 1e3;
            if prefill_ms.is_some() {
                laps.push(now);
            }
            for event in events.drain(..) {
                match event {
                    Event::Token { request, .. } if prefill_ms.is_none() => {
                        started.insert(request);
                    }
                    Event::Finished { request, result, .. } => completions.push((request, result?)),
                    _ => {}
                }
            }
            if prefill_ms.is_none() && started.len() == prompts {
                prefill_ms = Some(now);
            }
        }
        let wall = begin.elapsed().as_secs_f64();
        completions.sort_by_key(|(request, _)| *request);
        let completions: Vec<TokenCompletion> = completions
            .into_iter()
            .map(|(_, completion)| completion)
            .collect();
        let checksum = checksum(&completions);
        if round > 0 && checksum != measured.checksum {
            let advice = "two rounds of the same prompts gave different tokens";
            return Err(CliError::Failed(format!("{advice} at {prompts} prompts")));
        }
        measured.checksum = checksum;
        if round == 0 {
            // The first round chooses algorithms and grows buffers.
            measured.samples = completions.into_iter().take(SAMPLES).collect();
            continue;
        }
        measured.tokens += completions
            .iter()
            .map(|completion| completion.token_ids.len())
            .sum::<usize>();
        measured.wall_s.push(wall);
        measured.prefill_ms.extend(prefill_ms);
        // The middle half: all sequences run, contexts are half grown.
        let steps: Vec<f64> = laps.windows(2).map(|pair| pair[1] - pair[0]).collect();
        middle.extend_from_slice(&steps[steps.len() / 4..steps.len() - steps.len() / 4]);
    }
    measured.step_ms = median(&middle);
    Ok(measured)
}

/// Times the kinds of operations of a decode step with the contexts of the middle of a run.
fn profile(args: &BenchArgs, runner: &mut CudaRunner, rows: usize) -> Result<Vec<StageTime>, CliError> {
    let backend = runner.backend_mut();
    let options = *backend.options();
    let mut pages = PageTable::new(options.page_table()).map_err(Error::from)?;
    let mut decode = Vec::new();
    for i in 0..rows {
        let position = (64 + i * 37 % 193 + args.max_new_tokens / 2).min(options.max_seq_length - 1);
        let slot = pages.allocate_slot().map_err(Error::from)?;
        // Room for the positions that the timed replays move on by.
        let len = (position + 64).min(options.max_seq_length);
        if !pages.can_reserve(slot, len) {
            break;
        }
        let _ = pages.reserve(slot, len).map_err(Error::from)?;
        decode.push(DecodeRow::greedy(slot.index(), position));
    }
    backend.sync_pages(&mut pages).map_err(Error::from)?;
    Ok(backend.profile_decode(&decode).map_err(Error::from)?)
}

fn checksum(completions: &[TokenCompletion]) -> String {
    let mut hash = Sha256::new();
    for completion in completions {
        completion
            .token_ids
            .iter()
            .for_each(|token| hash.update(token.to_le_bytes()));
    }
    hash.finalize()
        .iter()
        .take(8)
        .fold(String::new(), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The least time a decode step can take: all weights and the context read once.
struct Floor {
    rate: Option<f64>,
    weight_bytes: f64,
    bytes_per_token: f64,
}

impl Floor {
    fn new(device: &str, config: &Qwen3Config, weight_bytes: u64) -> Self {
        // Of an untied embedding only the rows of the batch are read.
        let unread = if config.tie_word_embeddings {
            0
        } else {
            2 * config.vocab_size * config.hidden_size
        };
        Self {
            rate: READ_RATES
                .iter()
                .find(|(name, _)| device.contains(name))
                .map(|(_, rate)| *rate),
            weight_bytes: weight_bytes as f64 - unread as f64,
            bytes_per_token: (4 * config.n_layers * config.kv_size()) as f64,
        }
    }

    /// Milliseconds of a step of `prompts` rows at mid-run.
    fn step_ms(&self, prompts: usize, max_new_tokens: usize) -> Option<f64> {
        let context: usize = (0..prompts).map(|i| 64 + i * 37 % 193 + max_new_tokens / 2).sum();
        let bytes = self.weight_bytes + self.bytes_per_token * context as f64;
        self.rate.map(|rate| bytes / rate * 1e3)
    }
}

fn report(args: &BenchArgs, batch: &Measured, floor: &Floor) -> Value {
    let best = batch.wall_s.iter().copied().fold(f64::INFINITY, f64::min);
    let (median_wall, tokens) = (
        median(&batch.wall_s),
        batch.tokens as f64 / batch.wall_s.len() as f64,
    );
    let floor_ms = floor.step_ms(batch.prompts, args.max_new_tokens);
    let samples = batch.samples.iter().map(|completion| {
        let tokens: Vec<u32> = completion.token_ids.iter().copied().take(16).collect();
        json!({ "prompt_tokens": completion.prompt_token_ids.len(), "first_token_ids": tokens })
    });
    let stages = batch.profile.iter().map(|time| {
        let name = time.stage.map_or("step", |stage| stage.name());
        json!({ "stage": name, "ms": time.ms, "nodes": time.nodes })
    });
    json!({
        "capture_cudagraph": !args.no_capture_cudagraph,
        "lora_adapter": null,
        "n_prompts": batch.prompts,
        "n_decoded_tokens": tokens as u64,
        "wall_times_s": batch.wall_s,
        "median_wall_s": median_wall,
        "best_wall_s": best,
        "decode_tps_median": tokens / median_wall,
        "decode_tps_best": tokens / best,
        "max_new_tokens": args.max_new_tokens,
        "page_size": args.page_size,
        "prefill_ms": median(&batch.prefill_ms),
        "step_ms": batch.step_ms,
        "floor_ms": floor_ms,
        "percent_of_floor": floor_ms.map(|floor| 100.0 * floor / batch.step_ms),
        "stages": stages.collect::<Vec<_>>(),
        "token_checksum": batch.checksum,
        "sample_completions": samples.collect::<Vec<_>>(),
    })
}

fn table(device: &str, load_s: f64, peak: Option<u64>, reports: &[Value]) -> String {
    let mut out = format!("{device}, ready in {load_s:.2} s");
    if let Some(peak) = peak {
        let _ = write!(out, ", {:.2} GB of device memory", peak as f64 / 1e9);
    }
    out += "\n\n";
    out += "prompts  tok/s median    best  prefill ms  step ms  floor ms  % of floor  tokens\n";
    let number = |report: &Value, key: &str| report[key].as_f64().unwrap_or(f64::NAN);
    for report in reports {
        let _ = writeln!(
            out,
            "{:>7}  {:>12.0}  {:>6.0}  {:>10.1}  {:>7.3}  {:>8.3}  {:>10.1}  {}",
            report["n_prompts"],
            number(report, "decode_tps_median"),
            number(report, "decode_tps_best"),
            number(report, "prefill_ms"),
            number(report, "step_ms"),
            number(report, "floor_ms"),
            number(report, "percent_of_floor"),
            report["token_checksum"].as_str().unwrap_or_default(),
        );
    }
    let stages = |report: &Value| report["stages"].as_array().cloned().unwrap_or_default();
    if let Some(first) = reports.first().map(&stages).filter(|stages| !stages.is_empty()) {
        out += "\nmilliseconds of a decode step by stage, each alone in a graph\nprompts";
        for stage in &first {
            let _ = write!(out, "  {:>10}", stage["stage"].as_str().unwrap_or_default());
        }
        for report in reports {
            let _ = write!(out, "\n{:>7}", report["n_prompts"]);
            for stage in stages(report) {
                let _ = write!(out, "  {:>10.4}", number(&stage, "ms"));
            }
        }
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_workload_is_the_common_one_and_stays_in_the_vocabulary() {
        assert_eq!(prompt(0, 151_936)[..3], [1000, 105_729, 70_458]);
        assert_eq!(prompt(1, 151_936).len(), 101);
        assert!((0..300).all(|i| (64..=LONGEST_PROMPT).contains(&prompt(i, 151_936).len())));
        assert!((0..300).flat_map(|i| prompt(i, 571)).all(|id| id < 571));
    }

    #[test]
    fn the_floor_of_a_step_is_bytes_over_the_read_rate() {
        let config = Qwen3Config::qwen3_4b();
        let floor = Floor::new("cuda:0 (NVIDIA H200)", &config, 2 * config.n_parameters());
        assert_eq!(floor.bytes_per_token, 147_456.0);
        let one = floor.step_ms(1, 512).unwrap();
        assert!((one - 1.85).abs() < 0.02, "{one}");
        let many = floor.step_ms(64, 512).unwrap();
        assert!((many - 2.73).abs() < 0.05, "{many}");
        assert!(Floor::new("another device", &config, 1).step_ms(1, 1).is_none());
    }

    #[test]
    fn the_median_of_an_odd_number_is_the_middle_one() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert!(median(&[]).is_nan());
    }
}
