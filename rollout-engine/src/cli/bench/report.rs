//! What is written of the measurements: JSON for programs, a table for readers.

use std::fmt::Write as _;

use qwen3_model::QuantType;
use serde_json::{Value, json};

use super::floor::Floor;
use super::workload::{Measured, median};
use super::{BenchArgs, Run};
use crate::cli::CliError;

pub(super) fn write_reports(of: &Run<'_>, mut reports: Vec<Value>) -> Result<(), CliError> {
    let args = of.args;
    let all = reports.clone();
    let value = match args.batches.is_empty() && reports.len() == 1 {
        true => reports.remove(0),
        false => Value::Array(reports),
    };
    // What was measured comes first, whatever there is to draw.
    write_json(args, &value)?;
    if let Some(path) = &args.plot {
        crate::cli::plot::write_reports(&all, args.plot_other.as_deref(), path)?;
    }
    match of.baseline {
        Some(baseline) => baseline.check(&all, args.compare_tokens),
        None => Ok(()),
    }
}

/// Into the file of --stats-path, if there is one.
pub(super) fn write_json(args: &BenchArgs, value: &Value) -> Result<(), CliError> {
    let Some(path) = &args.stats_path else {
        return Ok(());
    };
    let text = serde_json::to_string_pretty(value).map_err(|error| CliError::Failed(error.to_string()))?;
    std::fs::write(path, text + "\n")
        .map_err(|error| CliError::Failed(format!("{}: {error}", path.display())))
}

pub(super) fn report(args: &BenchArgs, batch: &Measured, floor: &Floor) -> Value {
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
        "lora_adapter": args.lora_adapter,
        "lora_rank": args.lora_rank,
        "lora_merged": null,
        "quantize": args.quantize.map(QuantType::name),
        "refresh": null,
        "graphs": null,
        "open_s": null,
        "weights_and_kernels_s": null,
        "compile_s": null,
        "capture_s": null,
        "peak_memory_gb": null,
        "n_prompts": batch.prompts,
        "group_size": args.group_size,
        "prompt_tokens": args.prompt_tokens,
        "shared_reads": !args.no_shared_reads,
        "batch_invariant": args.batch_invariant,
        "n_decoded_tokens": tokens as u64,
        "wall_times_s": batch.wall_s,
        "median_wall_s": median_wall,
        "best_wall_s": best,
        "decode_tps_median": tokens / median_wall,
        "decode_tps_best": tokens / best,
        "max_new_tokens": args.max_new_tokens,
        "sampling": args.sampling_report().unwrap_or_default(),
        "prefill_ms": median(&batch.prefill_ms),
        "step_ms": batch.step_ms,
        "steps_ms_at": batch.steps_at,
        "host_gap": batch.host_gap,
        "host_gap_pct": batch.host_gap.map(|gap| gap.percent),
        "floor_ms": floor_ms,
        "percent_of_floor": floor_ms.map(|floor| 100.0 * floor / batch.step_ms),
        "stages": stages.collect::<Vec<_>>(),
        "tolerance_pct": args.compare_tolerance,
        "token_checksum": batch.checksum,
        "sample_completions": samples.collect::<Vec<_>>(),
    })
}

pub(super) fn table(heading: &str, peak: Option<u64>, reports: &[Value]) -> String {
    let mut out = heading.to_string();
    if let Some(peak) = peak {
        let _ = write!(out, ", {:.2} GB of device memory", peak as f64 / 1e9);
    }
    out += "\n\n";
    out += "prompts  tok/s median    best  prefill ms  step ms  floor ms  % of floor  tokens\n";
    // Of a device whose memory was not measured there is no floor.
    let number = |report: &Value, key: &str, decimals: usize| match report[key].as_f64() {
        Some(number) => format!("{number:.decimals$}"),
        None => "-".into(),
    };
    for report in reports {
        let _ = writeln!(
            out,
            "{:>7}  {:>12}  {:>6}  {:>10}  {:>7}  {:>8}  {:>10}  {}",
            report["n_prompts"],
            number(report, "decode_tps_median", 0),
            number(report, "decode_tps_best", 0),
            number(report, "prefill_ms", 1),
            number(report, "step_ms", 3),
            number(report, "floor_ms", 3),
            number(report, "percent_of_floor", 1),
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
                let _ = write!(out, "  {:>10}", number(&stage, "ms", 4));
            }
        }
        out.push('\n');
    }
    out
}
