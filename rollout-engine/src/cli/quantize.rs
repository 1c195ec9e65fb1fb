//! `rollout quantize`.

use std::path::PathBuf;

use clap::Args;
use qwen3_model::{QuantType, QuantizeOptions, quantize_folder};

use super::CliError;
use super::output::write_stdout;
use crate::memory::format_bytes;
use crate::{Error, model_folder};

#[derive(Debug, Args)]
pub(super) struct QuantizeArgs {
    /// Model folder in Hugging Face form, or the id of a model in Hugging Face's cache, in bf16, f16 or f32. Default: the
    /// bundled model.
    #[arg(long, value_name = "DIR|ID")]
    model: Option<PathBuf>,

    /// Folder to write: new or empty. transformers with bitsandbytes loads it, and so does this command.
    #[arg(long, value_name = "DIR")]
    output: PathBuf,

    /// The sixteen values of a weight: nf4 (quantiles of the normal distribution) or fp4 (floating point).
    #[arg(long, value_name = "TYPE", default_value = "nf4")]
    quant_type: QuantType,

    /// Keep the scale of every 64 weights in f32 instead of 8 bits: 4.5 instead of 4.13 bits per weight.
    #[arg(long)]
    no_double_quant: bool,

    /// Module that stays in bf16, by one or more whole parts of its dotted name, such as down_proj or model.layers.0.
    /// May be given several times. Embedding and output head always stay in bf16.
    #[arg(long, value_name = "NAME")]
    skip_module: Vec<String>,
}

pub(super) fn run(args: &QuantizeArgs) -> Result<(), CliError> {
    let model_dir = model_folder::find(args.model.as_deref())?;
    let mut options = QuantizeOptions::default();
    options.quant_type = args.quant_type;
    options.double_quant = !args.no_double_quant;
    options.skip_modules.clone_from(&args.skip_module);
    let report = quantize_folder(&model_dir, &args.output, &options).map_err(|error| match &error {
        qwen3_model::Error::Option { option, problem } => {
            let flag = match *option {
                "skip_modules" => "skip-module",
                other => other,
            };
            CliError::Usage(format!("--{flag}: {problem}"))
        }
        _ => CliError::from(Error::from(error)),
    })?;
    write_stdout(&format!(
        "{}: {} modules in {}, {} in bf16, {} instead of {}\n",
        args.output.display(),
        report.quantized_modules,
        options.quant_type.name(),
        report.kept_modules,
        format_bytes(report.bytes_after),
        format_bytes(report.bytes_before),
    ))
}
