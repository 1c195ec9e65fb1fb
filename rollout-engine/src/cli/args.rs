//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use qwen3_model::PristineCopy;

use super::engine_args::EngineArgs;
use super::sampling::SamplingArgs;
use crate::device::DeviceChoice;
use crate::scheduler::MAX_GROUP;

/// Rollouts for reinforcement learning on Qwen3 language models.
#[derive(Debug, Parser)]
#[command(
    name = "rollout",
    version,
    subcommand_required = true,
    arg_required_else_help = true
)]
pub(super) struct Cli {
    #[command(subcommand)]
    pub(super) command: Command,

    /// Write what the command spends its time on (loading, compilation, capture, prefill, decode, refresh) to this file, in
    /// the trace event format of chrome://tracing and Perfetto.
    #[arg(long, value_name = "FILE.json", global = true)]
    pub(super) trace: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Generate completions, by default for a few maths prompts with the small model that ships with the command.
    Generate(GenerateArgs),
    /// Measure tokens per second, or how long requests wait, on a fixed workload; by default the bundled model on a GPU.
    #[cfg(feature = "cuda")]
    Bench(super::bench::BenchArgs),
    /// Look for the page size and kernel options with which a workload is fastest, on this device and for this model's shape, and
    /// leave them for later runs.
    #[cfg(feature = "cuda")]
    Tune(super::tune::TuneArgs),
    /// Draw what `rollout bench --stats-path` measured, as an SVG.
    Plot(super::plot::PlotArgs),
    /// Serve completions over HTTP, to clients of OpenAI's API and to trainers.
    #[cfg(feature = "serve")]
    Serve(super::serve::ServeArgs),
    /// Prove that merging adapters leaves the base weights as they are: perturb and merge many times, compare
    /// SHA-256 digests, print a JSON report. Exit code 1 on drift.
    VerifyNoDrift(super::verify_no_drift::VerifyArgs),
    /// Write a model in 4 bits (nf4 or fp4), in the form of transformers with bitsandbytes.
    Quantize(super::quantize::QuantizeArgs),
    /// Print a model's shape, its parameter count, the KV cache's bytes per token, and what fits in memory.
    Inspect(InspectArgs),
}

#[derive(Debug, Args)]
pub(super) struct GenerateArgs {
    #[command(flatten)]
    pub(super) engine: EngineArgs,

    /// LoRA adapter to generate with, a PEFT folder (adapter_config.json, adapter_model.safetensors). May be given
    /// several times: the adapters then apply together.
    #[arg(long, value_name = "DIR")]
    pub(super) adapter: Vec<PathBuf>,

    /// Apply adapters at run time, next to the base weights, instead of merging them: slower, the reference for the
    /// merged form. Always so for a model in 4 bits, whose weights cannot be merged into.
    #[arg(long, requires = "adapter")]
    pub(super) no_merge_lora: bool,

    /// On a GPU, where pristine copies of the weights that adapters target live: device, pinned (page-locked host memory)
    /// or file (read again at every refresh). The results are the same. Default: device.
    #[arg(long, value_name = "PLACE", requires = "adapter")]
    pub(super) lora_pristine: Option<PristineCopy>,

    /// One prompt, as text. Default: a few bundled maths prompts.
    #[arg(
        long,
        value_name = "TEXT",
        conflicts_with = "prompts",
        allow_hyphen_values = true
    )]
    pub(super) prompt: Option<String>,

    /// File of prompts, one JSON object a line with `id` (optional) and one of `prompt` (text, as is), `messages`
    /// (with `tools` and `chat_template_kwargs`, both optional) and `prompt_token_ids`; `-` is standard input.
    #[arg(long, value_name = "FILE.jsonl")]
    pub(super) prompts: Option<PathBuf>,

    /// Put text prompts through the chat template as a user's message. Default for --prompt if the model has a
    /// template.
    #[arg(long, conflicts_with = "raw")]
    pub(super) chat: bool,

    /// Continue text prompts as they are, without a template. Default for lines of --prompts.
    #[arg(long)]
    pub(super) raw: bool,

    /// Most new tokens per completion, in tokens.
    #[arg(long, visible_alias = "max-tokens", value_name = "N", default_value_t = 256, value_parser = positive)]
    pub(super) max_new_tokens: usize,

    /// Completions of each prompt. They share its pages; their lines and texts come apart by `index`.
    #[arg(short = 'n', long = "n", value_name = "N", default_value_t = 1, value_parser = group_size)]
    pub(super) n: usize,

    /// Write one JSON object a line to this file, each as its completion finishes; `-` is standard output. Default:
    /// text on standard output.
    #[arg(long, value_name = "FILE.jsonl")]
    pub(super) output: Option<PathBuf>,

    /// Write counters, times and memory of the run to this file, as a JSON object; also if the run fails or is interrupted.
    #[arg(long, value_name = "FILE.json")]
    pub(super) metrics: Option<PathBuf>,

    /// Print results and errors only: no progress bar, no notices, no closing line.
    #[arg(long)]
    pub(super) quiet: bool,

    /// Seed of the random numbers: the same seed with the same prompts in the same order gives the same completions. No two
    /// prompts of a run draw the same numbers.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(super) seed: u64,

    #[command(flatten)]
    pub(super) sampling: SamplingArgs,
}

#[derive(Debug, Args)]
pub(super) struct InspectArgs {
    /// Model folder in Hugging Face form, or the id of a model in Hugging Face's cache. Default: the bundled model.
    #[arg(long, value_name = "DIR|ID")]
    pub(super) model: Option<PathBuf>,

    /// Memory to divide between weights and KV cache, as a number with a unit, such as 16GB, 80GiB or 500MB.
    /// Default: the memory available now.
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    pub(super) memory: Option<u64>,
}

pub(super) fn positive(text: &str) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(0) => Err("0 cannot work, use at least 1".into()),
        Ok(n) => Ok(n),
        Err(_) => Err("not a whole number from 1".into()),
    }
}

/// Completions of one prompt.
fn group_size(text: &str) -> Result<usize, String> {
    match positive(text)? {
        n if n > MAX_GROUP => Err(format!("use at most {MAX_GROUP}")),
        n => Ok(n),
    }
}

pub(super) fn device(text: &str) -> Result<DeviceChoice, String> {
    text.parse()
        .map_err(|_| "use auto, cpu or cuda:N, such as cuda:0".to_string())
}

fn bytes(text: &str) -> Result<u64, String> {
    let advice = || "use a number with a unit, such as 16GB, 80GiB or 500MB".to_string();
    let digits = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: f64 = number.parse().map_err(|_| advice())?;
    let scale = match unit.trim().to_ascii_lowercase().as_str() {
        "kb" => 1e3,
        "mb" => 1e6,
        "gb" => 1e9,
        "tb" => 1e12,
        "kib" => 1024.0,
        "mib" => 1024f64.powi(2),
        "gib" => 1024f64.powi(3),
        "tib" => 1024f64.powi(4),
        _ => return Err(advice()),
    };
    let bytes = number * scale;
    if (1.0..1e18).contains(&bytes) {
        Ok(bytes as u64)
    } else {
        Err(advice())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn memory_sizes_need_a_unit() {
        assert_eq!(bytes("16GB"), Ok(16_000_000_000));
        assert_eq!(bytes("1.5 GiB"), Ok(3 << 29));
        for bad in [
            "",
            "16",
            "GB",
            "-1GB",
            "1e3GB",
            "0GB",
            "16XB",
            "1..2GB",
            "99999999999TB",
        ] {
            assert!(bytes(bad).is_err(), "{bad}");
        }
    }
}
