//! Flags that describe an engine.

use std::path::PathBuf;

use clap::Args;

use super::CliError;
use super::args::{device, positive};
use super::kernel_args::KernelArgs;
use crate::builder::EngineBuilder;
use crate::device::DeviceChoice;
use crate::engine::Engine;
use crate::pool::PoolSettings;

/// Flags that `rollout generate` and `serve` share, with vLLM's names beside ours.
#[derive(Debug, Args)]
pub(super) struct EngineArgs {
    /// Model folder in Hugging Face form (config.json, *.safetensors, tokenizer.json), or the id of a model in Hugging Face's
    /// cache, such as Qwen/Qwen3-0.6B. Default: the bundled model.
    #[arg(long, value_name = "DIR|ID")]
    pub(super) model: Option<PathBuf>,

    /// Turn a model in 4 bits into bf16 when it is loaded: four times the memory, and adapters are merged. Without effect
    /// on other models.
    #[arg(long)]
    pub(super) dequantize: bool,

    /// Most sequences generated at once, in sequences. Default: 64.
    #[arg(long, visible_alias = "max-num-seqs", value_name = "N", value_parser = positive)]
    pub(super) max_batch_size: Option<usize>,

    /// Pages of the KV cache, in pages, one of them reserved. Default: enough for the largest batch of the longest
    /// sequences, but at most half of the memory available.
    #[arg(long, value_name = "N", value_parser = positive)]
    pub(super) n_pages: Option<usize>,

    /// Size of a page, in tokens. Default: 64.
    #[arg(long, visible_alias = "block-size", value_name = "N", value_parser = positive)]
    pub(super) page_size: Option<usize>,

    /// Longest sequence, prompt and completion together, in tokens. Default: what the model's positions allow.
    #[arg(long, visible_alias = "max-model-len", value_name = "N", value_parser = positive)]
    pub(super) max_seq_length: Option<usize>,

    /// Where to run: auto (a GPU if there is a usable one, else the CPU), cpu, or cuda:N.
    #[arg(long, value_name = "DEVICE", default_value = "auto", value_parser = device)]
    pub(super) device: DeviceChoice,

    /// Keep pages of computed prompts and completions, such as a system prompt, for later prompts that start with the same
    /// tokens, under the same policy. The results are the same.
    #[arg(long, visible_alias = "enable-prefix-caching")]
    pub(super) prefix_cache: bool,

    /// The same bits for a request whatever else is in the batch, however its prompt is cut into chunks, and whether it is
    /// preempted; slower on a GPU. On a CPU that always holds.
    #[arg(long)]
    pub(super) batch_invariant: bool,

    /// On a GPU, launch decode steps kernel by kernel instead of replaying CUDA graphs. The results are the same.
    #[arg(long, visible_alias = "enforce-eager")]
    pub(super) no_capture_cudagraph: bool,

    #[command(flatten)]
    pub(super) kernels: KernelArgs,
}

impl EngineArgs {
    /// The engine that they ask for.
    pub(super) fn builder(&self) -> EngineBuilder {
        let builder = Engine::builder()
            .device(self.device)
            .pool(PoolSettings {
                max_batch_size: self.max_batch_size,
                max_seq_length: self.max_seq_length,
                n_pages: self.n_pages,
                page_size: self.page_size,
                max_prefill_tokens: None,
            })
            .capture_graphs(!self.no_capture_cudagraph)
            .kernel_options(self.kernels.options())
            .tuned_profile(self.kernels.tuned())
            .prefix_cache(self.prefix_cache)
            .batch_invariant(self.batch_invariant)
            .dequantize(self.dequantize);
        match &self.model {
            Some(model) => builder.model(model),
            None => builder,
        }
    }

    /// Flags that were given and say something about GPUs only. `pristine` tells whether `--lora-pristine` was.
    pub(super) fn gpu_flags(&self, pristine: bool) -> Vec<&'static str> {
        let flags = [
            (pristine, "--lora-pristine"),
            (self.no_capture_cudagraph, "--no-capture-cudagraph"),
        ];
        let given = flags
            .into_iter()
            .filter_map(|(given, flag)| given.then_some(flag));
        given.chain(self.kernels.given()).collect()
    }

    /// An error if one of these flags was given for the CPU.
    pub(super) fn refuse_what_has_no_effect(&self, pristine: bool) -> Result<(), CliError> {
        match self.gpu_flags(pristine).first() {
            Some(flag) if self.device == DeviceChoice::Cpu => Err(CliError::Usage(format!(
                "{flag} has no effect on the CPU: leave it out, or choose another --device"
            ))),
            _ => Ok(()),
        }
    }
}
