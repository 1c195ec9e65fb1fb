//! Flags of `rollout bench`.

use std::path::PathBuf;

use clap::Args;
use qwen3_model::{PristineCopy, QuantType};
use serde_json::{Value, json};

use super::workload::LONGEST_PROMPT;
use crate::cli::CliError;
use crate::cli::args::positive;
use crate::cli::kernel_args::KernelArgs;
use crate::cli::sampling::DrawArgs;
use crate::device::DeviceChoice;
use crate::request::SamplingParams;
use crate::tuned::TunedOptions;

#[derive(Debug, Args)]
pub(in crate::cli) struct BenchArgs {
    /// Model folder, or random weights of a published shape: random:qwen3-0.6b, random:qwen3-1.7b, random:qwen3-4b,
    /// random:qwen3-8b. Default: the bundled model.
    #[arg(long, value_name = "DIR|random:SHAPE")]
    pub(super) model: Option<String>,

    /// Prompts of a round, all submitted at once unless --arrival-rate is given.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = positive)]
    pub(super) n_prompts: usize,

    /// Run once for each of these numbers of prompts, such as 1,8,64, and print a table.
    #[arg(long, value_name = "N,N,…", value_delimiter = ',', value_parser = positive, conflicts_with = "n_prompts")]
    pub(super) batches: Vec<usize>,

    /// Completions of each prompt, which share its pages: --n-prompts 64 --group-size 8 decodes 8 prompts 8 times each. Divides
    /// every number of prompts.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = positive, conflicts_with = "arrival_rate")]
    pub(super) group_size: usize,

    /// Length of every prompt, in tokens. Default: 64 to 256, as in the common workload.
    #[arg(long, value_name = "N", value_parser = positive)]
    pub(super) prompt_tokens: Option<usize>,

    /// Read the keys and values of a prompt once for each of its completions, as if they shared no pages.
    #[arg(long)]
    pub(super) no_shared_reads: bool,

    /// Compute with the same bits whatever else is in the batch.
    #[arg(long)]
    pub(super) batch_invariant: bool,

    /// Measured rounds, after one that is not counted.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = positive)]
    pub(super) n_rounds: usize,

    /// New tokens per prompt, in tokens.
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = positive)]
    pub(super) max_new_tokens: usize,

    /// Most sequences at once, in sequences. Default: the largest number of prompts.
    #[arg(long, value_name = "N", value_parser = positive)]
    pub(super) max_batch_size: Option<usize>,

    /// Longest sequence, in tokens. Default: what the workload needs.
    #[arg(long, value_name = "N", value_parser = positive)]
    pub(super) max_seq_length: Option<usize>,

    /// Pages of the KV cache, one of them reserved. Default: what the workload needs.
    #[arg(long, value_name = "N", value_parser = positive)]
    pub(super) n_pages: Option<usize>,

    /// Size of a page, in tokens. Default: the tuned profile's, or 64.
    #[arg(long, value_name = "N", value_parser = positive)]
    pub(super) page_size: Option<usize>,

    /// Most prompt tokens per step, in tokens. Default: the device's choice.
    #[arg(long, value_name = "N", value_parser = positive)]
    pub(super) max_prefill_tokens: Option<usize>,

    /// Most prompt tokens of a step in which other sequences decode, in tokens; more where more sequences wait to start
    /// than decode. Several, such as 128,256, are measured one after the other with --arrival-rate. Default: the device's
    /// choice with --arrival-rate, otherwise no limit.
    #[arg(long, value_name = "N,N,…", value_delimiter = ',', value_parser = positive)]
    pub(super) mixed_prefill_tokens: Vec<usize>,

    /// Compute the decode rows of a step with prompts in a pass of their own, which reads all weights again.
    #[arg(long)]
    pub(super) separate_decode: bool,

    /// Let prompts arrive at random, so many a second on average, and report the times to first tokens and between tokens.
    #[arg(long, value_name = "R", value_parser = rate, conflicts_with_all = ["batches", "lora_rank"])]
    pub(super) arrival_rate: Option<f64>,

    /// Instead of whole runs, time decode steps of sequences with so many tokens of context, such as 1024,4096,32768. On a
    /// GPU contexts are random numbers, not computed.
    #[arg(long, value_name = "N,N,…", value_delimiter = ',', value_parser = positive, conflicts_with_all = ["arrival_rate", "lora_rank"])]
    pub(super) context_lengths: Vec<usize>,

    /// Quantise the projections to 4 bits: nf4 or fp4. Adapters are then applied at run time.
    #[arg(long, value_name = "TYPE")]
    pub(super) quantize: Option<QuantType>,

    /// Serve this adapter, a PEFT folder (adapter_config.json, adapter_model.safetensors).
    #[arg(
        long,
        value_name = "DIR",
        group = "served",
        conflicts_with = "context_lengths"
    )]
    pub(super) lora_adapter: Option<PathBuf>,

    /// Serve a random adapter of this rank on all seven projections, merged, and time a refresh.
    #[arg(long, value_name = "N", value_parser = positive, group = "served")]
    pub(super) lora_rank: Option<usize>,

    /// Apply the adapter at run time, beside the weights.
    #[arg(long, requires = "served")]
    pub(super) no_merge_lora: bool,

    /// With --lora-rank, where pristine copies live: device, pinned or file.
    #[arg(long, value_name = "PLACE", default_value = "device", requires = "lora_rank")]
    pub(super) lora_pristine: PristineCopy,

    #[command(flatten)]
    pub(super) kernels: KernelArgs,

    /// Launch decode steps kernel by kernel instead of replaying CUDA graphs.
    #[arg(long)]
    pub(super) no_capture_cudagraph: bool,

    /// Where to run: cuda:N, or cpu.
    #[arg(long, value_name = "DEVICE", default_value = "cuda:0")]
    pub(super) device: DeviceChoice,

    /// Seed of random weights, of arrivals and of drawn tokens.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(super) seed: u64,

    #[command(flatten)]
    pub(super) draw: DrawArgs,

    /// Report the N most likely tokens at each new one, at most 20, with their log-probabilities.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(super) top_logprobs: usize,

    /// Leave out the breakdown of a decode step by kind of operation.
    #[arg(long)]
    pub(super) no_profile: bool,

    /// Write all numbers to this file as JSON: an object, or a list of objects with --batches or several budgets.
    #[arg(long, value_name = "FILE")]
    pub(super) stats_path: Option<PathBuf>,

    /// Compare with the measurements of this file, which --stats-path has written before: exit code 1 if any has become slower
    /// by more than the file's tolerance.
    #[arg(long, value_name = "FILE.json", conflicts_with_all = ["arrival_rate", "context_lengths"])]
    pub(super) compare: Option<PathBuf>,

    /// With --compare, exit code 1 also where tokens differ from the file's. (On a GPU they may, where products' algorithms
    /// were chosen anew or kernels add in another order.)
    #[arg(long, requires = "compare")]
    pub(super) compare_tokens: bool,

    /// What is written to --stats-path as the tolerance of later comparisons with it, in percent of tokens a second.
    #[arg(long, value_name = "PERCENT", default_value_t = 3.0, value_parser = percent)]
    pub(super) compare_tolerance: f64,

    /// Draw throughput and steps against the number of prompts into this file; `rollout plot` draws --stats-path files
    /// later, without a GPU.
    #[arg(long, value_name = "FILE.svg", conflicts_with = "arrival_rate")]
    pub(super) plot: Option<PathBuf>,

    /// With --plot, figures of other engines to draw beside: a JSON object from names to lists of [prompts, new tokens
    /// per second].
    #[arg(long, value_name = "FILE.json", requires = "plot")]
    pub(super) plot_other: Option<PathBuf>,
}

impl BenchArgs {
    /// Refuses numbers of prompts that are no whole groups.
    pub(in crate::cli) fn check_groups(&self, batches: &[usize]) -> Result<(), CliError> {
        match batches
            .iter()
            .find(|prompts| !prompts.is_multiple_of(self.group_size))
        {
            None => Ok(()),
            Some(prompts) => Err(CliError::Usage(format!(
                "--group-size {} does not divide {prompts} prompts",
                self.group_size
            ))),
        }
    }

    /// Tokens of the longest prompt.
    pub(super) fn longest_prompt(&self) -> usize {
        self.prompt_tokens.unwrap_or(LONGEST_PROMPT)
    }

    /// Prompts at once, one after the other.
    pub(in crate::cli) fn batches(&self) -> Vec<usize> {
        match self.batches.is_empty() {
            true => vec![self.n_prompts],
            false => self.batches.clone(),
        }
    }

    /// Tokens of each prompt, if they are not those of the common workload.
    pub(in crate::cli) fn prompt_length(&self) -> Option<usize> {
        self.prompt_tokens
    }

    /// Rounds that are measured.
    pub(in crate::cli) fn rounds(&self) -> usize {
        self.n_rounds
    }

    /// What the flags set of what `rollout tune` would choose.
    pub(in crate::cli) fn fixed_options(&self) -> TunedOptions {
        let mut options = TunedOptions::default();
        options.page_size = self.page_size;
        options.max_prefill_tokens = self.max_prefill_tokens;
        options.kernels = self.kernels.options();
        options
    }

    /// The first flag that was given and says something else than how to run the workload.
    pub(in crate::cli) fn not_a_workload(&self) -> Option<&'static str> {
        [
            (self.arrival_rate.is_some(), "--arrival-rate"),
            (!self.context_lengths.is_empty(), "--context-lengths"),
            (self.lora_rank.is_some(), "--lora-rank"),
            (self.lora_adapter.is_some(), "--lora-adapter"),
            (self.compare.is_some(), "--compare"),
            (self.stats_path.is_some(), "--stats-path"),
            (self.plot.is_some(), "--plot"),
            (self.no_profile, "--no-profile"),
        ]
        .into_iter()
        .find_map(|(given, flag)| given.then_some(flag))
    }

    /// How the workload's tokens are chosen.
    pub(in crate::cli) fn sampling(&self) -> Result<SamplingParams, CliError> {
        let mut sampling = self.draw.workload(self.max_new_tokens)?;
        sampling.top_logprobs = self.top_logprobs;
        sampling
            .validate()
            .map_err(|error| CliError::Usage(error.to_string()))?;
        Ok(sampling)
    }

    /// The same for the report.
    pub(super) fn sampling_report(&self) -> Result<Value, CliError> {
        let of = self.sampling()?;
        Ok(json!({
            "temperature": of.temperature,
            "top_k": of.top_k,
            "top_p": of.top_p,
            "min_p": of.min_p,
            "repetition_penalty": of.repetition_penalty,
            "presence_penalty": of.presence_penalty,
            "frequency_penalty": of.frequency_penalty,
            "top_logprobs": of.top_logprobs,
        }))
    }
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        // At fewer a second the wait for the next one could last longer than a time can say.
        Ok(rate) if rate >= 1e-6 && rate.is_finite() => Ok(rate),
        _ => Err("use a number of prompts a second from 0.000001, such as 2.5".into()),
    }
}

fn percent(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(x) if (0.0..100.0).contains(&x) => Ok(x),
        _ => Err("use a number from 0 to 100, such as 3".into()),
    }
}
