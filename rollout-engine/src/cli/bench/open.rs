//! Opening the device and the model of a benchmark.

use std::path::{Path, PathBuf};

use qwen3_model::cuda::WeightSource;
use qwen3_model::{KernelOptions, QuantType, Qwen3Config, Weights};

use super::BenchArgs;
use super::growth::TIMED;
use super::workload::{LENGTHS, prompt_len};
use crate::builder::RunnerSettings;
use crate::cli::CliError;
use crate::cuda_runner::{CudaRunner, CudaSettings};
use crate::device::{self, DeviceChoice};
use crate::pool::PoolSettings;
use crate::runner::Runner;
use crate::tuned::{self, ModelShape, TunedChoice, TunedOptions};
use crate::{Error, model_folder};

/// Tokens of a page unless set otherwise.
const PAGE_SIZE: usize = 64;

/// The model and the device that are measured.
pub(in crate::cli) struct Subject {
    pub(in crate::cli) config: Qwen3Config,
    /// For reports.
    pub(in crate::cli) backend: String,
    /// As tuned profiles name it.
    pub(in crate::cli) device: String,
    /// The GPU's ordinal, or `None` for the CPU.
    ordinal: Option<usize>,
    source: Source,
}

enum Source {
    /// Of a seed, perhaps in 4 bits.
    Random(u64, Option<QuantType>),
    Folder(PathBuf, Box<Weights>),
}

impl Subject {
    /// What the flags name. Reads no weights, and needs no memory on the device.
    pub(in crate::cli) fn of(args: &BenchArgs) -> Result<Self, CliError> {
        let name = args.model.as_deref().unwrap_or_default();
        let ordinal = match args.device {
            DeviceChoice::Cuda(ordinal) => Some(ordinal),
            DeviceChoice::Cpu => None,
            DeviceChoice::Auto => {
                let advice = "one device is measured: use --device cuda:N or --device cpu";
                return Err(CliError::Usage(advice.into()));
            }
        };
        if ordinal.is_none() {
            refuse_on_cpu(args, name)?;
        }
        let shape = name.strip_prefix("random:").map(published).transpose()?;
        let dir = match (name, &shape) {
            ("", _) => model_folder::find(None)?,
            (_, Some(_)) => PathBuf::new(),
            (name, None) => model_folder::find(Some(Path::new(name)))?,
        };
        let config = match &shape {
            Some(config) => config.clone(),
            None => Qwen3Config::from_dir(&dir).map_err(Error::from)?,
        };
        let device = match ordinal {
            Some(ordinal) => tuned::gpu_name(&CudaRunner::device_info(ordinal)?),
            None => tuned::cpu_name(),
        };
        let kind = if ordinal.is_some() { "cuda" } else { "cpu" };
        let (source, backend) = match shape {
            Some(_) => {
                let how = args
                    .quantize
                    .map_or(String::new(), |t| format!(" in {}", t.name()));
                (
                    Source::Random(args.seed, args.quantize),
                    format!("{kind}, {name}{how}"),
                )
            }
            None => {
                let mut weights = Weights::open(&dir, &config).map_err(Error::from)?;
                if let Some(quant_type) = args.quantize {
                    weights = weights.quantized(quant_type, false).map_err(Error::from)?;
                }
                let backend = format!("{kind}, {}", dir.display());
                (Source::Folder(dir, Box::new(weights)), backend)
            }
        };
        Ok(Self {
            config,
            backend,
            device,
            ordinal,
            source,
        })
    }

    pub(in crate::cli) fn shape(&self) -> ModelShape {
        let quantized = match &self.source {
            Source::Random(_, quant_type) => quant_type.is_some(),
            Source::Folder(_, weights) => weights.is_quantized(),
        };
        ModelShape::of(&self.config, quantized)
    }

    pub(in crate::cli) fn on_gpu(&self) -> bool {
        self.ordinal.is_some()
    }

    /// A runner on the GPU with the sizes and options of the flags, and those of `options` where there is no flag.
    pub(in crate::cli) fn open_gpu(
        &self,
        args: &BenchArgs,
        largest: usize,
        options: &TunedOptions,
    ) -> Result<CudaRunner, Error> {
        let (pool, kernels) = settings(args, largest, options);
        let settings = CudaSettings {
            ordinal: self.ordinal.unwrap_or(0),
            capture: !args.no_capture_cudagraph,
            pristine: args.lora_pristine,
            mixed_steps: CudaSettings::default().mixed_steps && !args.separate_decode,
            share_reads: !args.no_shared_reads,
            batch_invariant: args.batch_invariant,
            kernels,
        };
        let source = match &self.source {
            Source::Random(seed, None) => WeightSource::Random(*seed),
            Source::Random(seed, Some(quant_type)) => WeightSource::RandomQuantized(*seed, *quant_type),
            Source::Folder(_, weights) => WeightSource::Given(weights),
        };
        CudaRunner::open(&self.config, source, &pool, &settings)
    }

    /// The same on the CPU.
    pub(in crate::cli) fn open_cpu(
        &self,
        args: &BenchArgs,
        largest: usize,
        options: &TunedOptions,
    ) -> Result<Box<dyn Runner + Send>, Error> {
        let (pool, kernels) = settings(args, largest, options);
        let settings = RunnerSettings {
            pool,
            kernels,
            tuned: TunedChoice::Off,
            batch_invariant: args.batch_invariant,
            ..RunnerSettings::default()
        };
        match &self.source {
            Source::Folder(dir, _) => {
                Ok(device::open(DeviceChoice::Cpu, dir, &self.config, &settings)?.runner)
            }
            Source::Random(..) => Err(Error::InvalidSetting {
                setting: "model",
                value: self.backend.clone(),
                advice: RANDOM_ON_CPU.into(),
            }),
        }
    }
}

const RANDOM_ON_CPU: &str =
    "random weights are drawn on a GPU: give a model folder, or none for the bundled model";

fn published(shape: &str) -> Result<Qwen3Config, CliError> {
    Qwen3Config::published_shape(shape).ok_or_else(|| {
        let known = Qwen3Config::PUBLISHED.join(", random:");
        CliError::Usage(format!(
            "--model random:{shape} is not known; there are random:{known}"
        ))
    })
}

/// What only a GPU has.
fn refuse_on_cpu(args: &BenchArgs, model: &str) -> Result<(), CliError> {
    let only_gpu = [
        args.lora_rank.map(|_| "--lora-rank"),
        args.quantize.map(|_| "--quantize"),
        args.no_capture_cudagraph.then_some("--no-capture-cudagraph"),
        args.no_shared_reads.then_some("--no-shared-reads"),
        args.kernels.given(),
    ];
    if let Some(flag) = only_gpu.into_iter().flatten().next() {
        return Err(CliError::Usage(format!(
            "{flag} is for a GPU: use --device cuda:N"
        )));
    }
    if model.starts_with("random:") {
        return Err(CliError::Usage(format!(
            "--model {model} with --device cpu: {RANDOM_ON_CPU}"
        )));
    }
    Ok(())
}

fn settings(args: &BenchArgs, largest: usize, options: &TunedOptions) -> (PoolSettings, KernelOptions) {
    let page_size = args.page_size.or(options.page_size).unwrap_or(PAGE_SIZE);
    let longest = match args.context_lengths.iter().max() {
        Some(context) => context.saturating_add(TIMED),
        None => args.longest_prompt().saturating_add(args.max_new_tokens),
    };
    let max_seq_length = args.max_seq_length.unwrap_or(longest);
    let max_batch_size = args.max_batch_size.unwrap_or(largest);
    let pages = pages(args, largest, max_batch_size, page_size);
    let pool = PoolSettings {
        max_batch_size: Some(max_batch_size),
        max_seq_length: Some(max_seq_length),
        // Long contexts of many sequences need more than there is: then as much as fits.
        n_pages: args
            .n_pages
            .or_else(|| args.context_lengths.is_empty().then_some(pages)),
        page_size: Some(page_size),
        max_prefill_tokens: args.max_prefill_tokens.or(options.max_prefill_tokens),
    };
    (pool, args.kernels.options().or(options.kernels))
}

/// Pages that the `at_once` longest of `sequences` sequences fill, those that completions share counted for each, and page 0.
fn pages(args: &BenchArgs, sequences: usize, at_once: usize, page_size: usize) -> usize {
    let pages_of = |i: usize| {
        let prompt = args
            .prompt_tokens
            .unwrap_or_else(|| prompt_len(i / args.group_size));
        prompt.saturating_add(args.max_new_tokens).div_ceil(page_size)
    };
    // Among so many there are `at_once` of the greatest length; more at once are refused later.
    let enough = at_once
        .min(1 << 16)
        .saturating_mul(LENGTHS)
        .saturating_mul(args.group_size);
    let mut each: Vec<usize> = (0..sequences.min(enough)).map(pages_of).collect();
    each.sort_unstable_by(|a, b| b.cmp(a));
    let longest = each.into_iter().take(at_once);
    longest.fold(1, usize::saturating_add)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        args: BenchArgs,
    }

    #[test]
    fn the_pool_holds_the_sequences_that_run_at_once() {
        let pages_of = |flags: &str, sequences, at_once, page_size| {
            let args = Command::parse_from(std::iter::once("bench").chain(flags.split_whitespace())).args;
            pages(&args, sequences, at_once, page_size)
        };
        // By adding up the pages of each prompt of the common workload.
        assert_eq!(pages_of("", 64, 64, 64), 704);
        assert_eq!(
            pages_of("", 64, 64, 1),
            1 + (0..64).map(|i| prompt_len(i) + 512).sum::<usize>()
        );
        assert_eq!(
            pages_of("--prompt-tokens 2000 --max-new-tokens 96", 64, 64, 64),
            1 + 64 * 33
        );
        // The longest of those that come one after the other; completions of one prompt are as long as each other.
        assert_eq!(pages_of("", 193, 2, 64), 1 + 2 * 12);
        assert_eq!(pages_of("", usize::MAX, 2, 64), 1 + 2 * 12);
        assert_eq!(pages_of("--group-size 8", 8, 8, 64), 1 + 8 * 9);
    }
}
