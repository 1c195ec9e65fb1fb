//! Opening the device and the model of a benchmark.

use std::path::Path;

use qwen3_model::cuda::WeightSource;
use qwen3_model::{Qwen3Config, Weights};

use super::BenchArgs;
use crate::cli::CliError;
use crate::cuda_runner::{CudaRunner, CudaSettings};
use crate::pool::PoolSettings;
use crate::{Error, bundled};

pub(super) fn pool(args: &BenchArgs, largest: usize) -> PoolSettings {
    let max_seq_length = args
        .max_seq_length
        .unwrap_or(args.longest_prompt() + args.max_new_tokens);
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

pub(super) fn open(
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
