//! The rate at which prompts were computed, over what the device's matrix products reach.

use std::fmt::Write as _;

use qwen3_model::{Projection, Qwen3Config};
use serde_json::{Value, json};

use super::BenchArgs;
use super::workload::prompt;

/// Rows and columns of the product that the rate is held against.
pub(super) const MATRIX: usize = 8192;

/// Floating-point operations of the first pass over prompts of these lengths: every token through every projection, its
/// scores and values of the tokens up to it, and one row of logits for each prompt.
fn operations(config: &Qwen3Config, lens: impl Iterator<Item = usize>) -> f64 {
    let elements = |p: &Projection| config.projection_shape(*p).iter().product::<usize>() as f64;
    let layer: f64 = Projection::ALL.iter().map(elements).sum();
    let layers = config.n_layers as f64;
    let head = (config.vocab_size * config.hidden_size) as f64;
    let cell = (4 * config.q_size()) as f64;
    lens.map(|len| {
        let len = len as f64;
        let cells = len * (len + 1.0) / 2.0;
        layers * (2.0 * layer * len + cell * cells) + 2.0 * head
    })
    .sum()
}

/// Tokens of the prompts of `sequences` sequences; completions of one prompt share its prefill.
pub(super) fn prompt_lens(args: &BenchArgs, config: &Qwen3Config, sequences: usize) -> Vec<usize> {
    (0..sequences / args.group_size)
        .map(|i| prompt(i, args.prompt_tokens, config.vocab_size).len())
        .collect()
}

/// Adds the work of the prompts of the workload to a report, and the rates where there is one to compare with.
pub(super) fn add_rates(report: &mut Value, config: &Qwen3Config, lens: &[usize], matrix_rate: Option<f64>) {
    let work = operations(config, lens.iter().copied());
    report["prefill_tokens"] = json!(lens.iter().sum::<usize>());
    report["prefill_tflop"] = json!(work / 1e12);
    // From the submission to the last first token, decode rows of the first ones included.
    let rate = report["prefill_ms"].as_f64().map(|ms| work / ms * 1e3);
    report["prefill_tflops"] = json!(rate.map(|rate| rate / 1e12));
    report["matrix_tflops"] = json!(matrix_rate.map(|rate| rate / 1e12));
    report["prefill_percent_of_matrix_rate"] =
        json!(rate.zip(matrix_rate).map(|(rate, matrix)| 100.0 * rate / matrix));
}

/// A line for each report whose rate was compared.
pub(super) fn table(reports: &[Value]) -> String {
    let mut out = String::new();
    for report in reports {
        let number = |key: &str| report[key].as_f64();
        if let (Some(ms), Some(rate), Some(matrix), Some(percent)) = (
            number("prefill_ms"),
            number("prefill_tflops"),
            number("matrix_tflops"),
            number("prefill_percent_of_matrix_rate"),
        ) {
            let _ = writeln!(
                out,
                "prefill of {} prompts, {} tokens: {ms:.1} ms, {rate:.0} TFLOP/s, {percent:.1} % of the {matrix:.0} of a product of {MATRIX} cubed",
                report["n_prompts"], report["prefill_tokens"],
            );
        }
    }
    match out.is_empty() {
        true => out,
        false => format!("\n{out}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_work_of_a_prompt_is_that_of_its_products_and_the_cells_below_its_diagonal() {
        let config = Qwen3Config::qwen3_4b();
        let one = operations(&config, [1].into_iter());
        // Two per parameter: the embedding is tied, norms are no products; and one cell per layer.
        let norms = 36 * (2 * 2560 + 2 * 128) + 2560;
        let expected = 2.0 * (config.n_parameters() - norms) as f64 + 36.0 * 4.0 * 4096.0;
        assert!((one - expected).abs() < 1e-6 * expected, "{one} and {expected}");
        let two = operations(&config, [2].into_iter());
        let head = 2.0 * (151_936 * 2560) as f64;
        let cells = 36.0 * 4.0 * 4096.0;
        assert!((two - head - (2.0 * (one - head - cells) + 3.0 * cells)).abs() < 1.0);
        assert_eq!(operations(&config, [1, 2].into_iter()), one + two);
    }

    #[test]
    fn rates_are_work_over_time() {
        let config = Qwen3Config::qwen3_4b();
        let mut report = json!({ "n_prompts": 64, "prefill_ms": 132.0 });
        let lens: Vec<usize> = (0..64)
            .map(|i| prompt(i, None, config.vocab_size).len())
            .collect();
        add_rates(&mut report, &config, &lens, Some(793e12));
        let number = |key: &str| report[key].as_f64().unwrap();
        assert_eq!(number("prefill_tokens"), 10_173.0);
        let expected = number("prefill_tflop") / 0.132;
        assert!((number("prefill_tflops") - expected).abs() < 1e-9 * expected);
        assert!((number("prefill_percent_of_matrix_rate") - expected / 7.93).abs() < 1e-9);
        assert!(table(&[report]).contains("of the 793"));
        let mut without = json!({ "n_prompts": 1, "prefill_ms": 4.0 });
        add_rates(&mut without, &config, &lens[..1], None);
        assert!(without["matrix_tflops"].is_null() && table(&[without]).is_empty());
    }
}
