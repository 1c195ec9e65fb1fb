//! Decode steps against the context that they read, as `rollout bench --context-lengths` measures them.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use super::{Series, extent, render, sorted};
use crate::cli::CliError;

/// What is drawn of a report.
#[derive(Deserialize)]
struct Growth {
    device: String,
    backend: String,
    /// Of the device's memory.
    read_rate_tb_s: Option<f64>,
    context_growth: Vec<Point>,
}

#[derive(Deserialize)]
struct Point {
    n_prompts: usize,
    context_tokens: usize,
    step_ms: f64,
    floor_ms: Option<f64>,
    /// `None` where noise hid it.
    read_tb_s: Option<f64>,
}

/// Whether a file holds such a report.
pub(super) fn is_growth(report: &Value) -> bool {
    report.get("context_growth").is_some()
}

/// Draws such a report.
pub(in crate::cli) fn write_growth(report: &Value, path: &Path) -> Result<(), CliError> {
    let svg = draw(report)?;
    std::fs::write(path, svg).map_err(|error| CliError::Failed(format!("{}: {error}", path.display())))
}

/// Two panels: milliseconds of a step beside their floors, and the rate at which contexts are read.
fn draw(report: &Value) -> Result<String, CliError> {
    let of = Growth::deserialize(report)
        .map_err(|error| CliError::Failed(format!("not what --context-lengths writes: {error}")))?;
    let mut batches: Vec<usize> = of.context_growth.iter().map(|point| point.n_prompts).collect();
    batches.sort_unstable();
    batches.dedup();
    let series = |name: &str, n: usize, dashed: bool, y: &dyn Fn(&Point) -> Option<f64>| {
        let points = of.context_growth.iter().filter(|point| point.n_prompts == n);
        Series {
            name: format!("{name}{n} sequences"),
            points: sorted(
                points
                    .filter_map(|point| Some((point.context_tokens as f64, y(point)?)))
                    .collect(),
            ),
            dashed,
        }
    };
    let (mut steps, mut rates) = (Vec::new(), Vec::new());
    for &n in &batches {
        steps.push(series("", n, false, &|point| Some(point.step_ms)));
        rates.push(series("", n, false, &|point| point.read_tb_s));
    }
    for &n in &batches {
        steps.push(series("floor: ", n, true, &|point| point.floor_ms));
    }
    if let Some(rate) = of.read_rate_tb_s {
        let contexts = of.context_growth.iter().map(|point| point.context_tokens as f64);
        rates.push(Series {
            name: "the memory's rate".into(),
            points: sorted(contexts.map(|context| (context, rate)).collect()),
            dashed: true,
        });
    }
    let mut svg = String::new();
    let mut panels = vec![("ms per decode step", &steps[..])];
    // On a busy machine noise can hide all of them.
    if extent(&rates).is_some() {
        panels.push(("TB of context read / s", &rates[..]));
    }
    render(
        &mut svg,
        &format!("{}; {}", of.device, of.backend),
        "tokens of context of each sequence",
        &panels,
    )
    .map_err(|error| CliError::Failed(format!("the plot cannot be drawn: {error}")))?;
    Ok(svg)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_batch_has_a_line_and_a_floor() {
        let point = |n: usize, context: usize, ms: f64| {
            serde_json::json!({
                "n_prompts": n, "context_tokens": context, "step_ms": ms, "floor_ms": ms / 2.0, "read_tb_s": 3.5,
            })
        };
        let report = serde_json::json!({
            "device": "a GPU", "backend": "cuda", "read_rate_tb_s": 4.39,
            "context_growth": [point(1, 1024, 2.0), point(1, 4096, 3.0), point(64, 1024, 5.0), point(64, 4096, 12.0)],
        });
        assert!(is_growth(&report));
        let svg = draw(&report).expect("draws");
        assert_eq!(svg.matches("<circle").count(), 8, "four points in two panels");
        for text in ["64 sequences", "floor: 1 sequences", "rate", "a GPU"] {
            assert!(svg.contains(text), "{text}");
        }
        assert!(draw(&serde_json::json!({ "context_growth": [] })).is_err());
        // On a busy machine no rate may be left: the steps are drawn alone.
        let mut noisy = report;
        noisy["read_rate_tb_s"] = Value::Null;
        for point in noisy["context_growth"].as_array_mut().expect("a list") {
            point["read_tb_s"] = Value::Null;
        }
        let svg = draw(&noisy).expect("draws");
        assert_eq!(svg.matches("<circle").count(), 4, "four points in one panel");
    }
}
