//! `rollout verify-no-drift`.

use std::path::PathBuf;

use clap::Args;
use lora_merge::{DriftOptions, DriftReport, verify_no_drift};

use super::CliError;
use super::args::{device, positive};
use super::output::write_stdout;
use crate::builder::EngineBuilder;
use crate::device::DeviceChoice;

#[derive(Debug, Args)]
pub(super) struct VerifyArgs {
    /// Model folder in Hugging Face form, or the id of a model in Hugging Face's cache. Default: the bundled model.
    #[arg(long, value_name = "DIR|ID")]
    model: Option<PathBuf>,

    /// Adapter, a PEFT folder. May be given several times: the adapters then apply together.
    #[arg(long, value_name = "DIR", required = true)]
    adapter: Vec<PathBuf>,

    /// How often the adapter is perturbed and merged anew, in cycles.
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = positive)]
    iterations: usize,

    /// Standard deviation of the noise that each cycle adds to the adapter's weights.
    #[arg(long, value_name = "X", default_value_t = 0.01, value_parser = noise)]
    noise: f32,

    /// Seed of the noise.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,

    /// Where to run: auto (a GPU if there is a usable one, else the CPU), cpu, or cuda:N.
    #[arg(long, value_name = "DEVICE", default_value = "auto", value_parser = device)]
    device: DeviceChoice,
}

pub(super) fn run(args: &VerifyArgs) -> Result<(), CliError> {
    // Nothing is generated: the least that an engine can be built with.
    let mut builder = EngineBuilder::new()
        .device(args.device)
        .max_batch_size(1)
        .max_seq_length(64)
        .max_prefill_tokens(64)
        .capture_graphs(false);
    if let Some(dir) = &args.model {
        builder = builder.model(dir);
    }
    for dir in &args.adapter {
        builder = builder.adapter(dir);
    }
    let mut engine = builder.build()?;
    let mut options = DriftOptions::default();
    options.iterations = args.iterations;
    options.noise_scale = args.noise;
    options.seed = args.seed;
    let active = engine.active_adapters();
    let report = verify_no_drift(&mut engine, &active, &options)?;
    let json = serde_json::to_string_pretty(&report).map_err(|e| CliError::Failed(e.to_string()))?;
    write_stdout(&format!("{json}\n"))?;
    verdict(&report)
}

/// An error for a report that tells of drift.
fn verdict(report: &DriftReport) -> Result<(), CliError> {
    let what = match (report.base_bit_identical, report.inference_deterministic) {
        (true, true) => return Ok(()),
        (false, _) => "the base weights are no longer those from before",
        (true, false) => "the same adapter gave other merged weights",
    };
    Err(CliError::Failed(format!("drift: {what}")))
}

fn noise(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(x) if x.is_finite() && x >= 0.0 => Ok(x),
        _ => Err("not a finite number from 0".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drift_makes_the_command_fail() {
        let report = |base: bool, merged: bool| -> DriftReport {
            serde_json::from_value(serde_json::json!({
                "mode": "merged", "n_iters": 1, "noise_scale": 0.01,
                "base_hash_before": "a", "base_hash_after": "a", "base_bit_identical": base,
                "inference_hash_initial_merged": "b", "inference_hash_after_restore": "b",
                "inference_deterministic": merged,
            }))
            .expect("the report's keys")
        };
        assert!(verdict(&report(true, true)).is_ok());
        for (base, merged) in [(false, true), (true, false), (false, false)] {
            let error = verdict(&report(base, merged)).expect_err("drift");
            assert_eq!(error.exit_code(), 1);
        }
    }
}
