//! A new run against measurements that were kept.

use std::fmt::Write as _;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use crate::cli::CliError;
use crate::cli::output::write_stdout;

/// Percent by which a rate may fall where the file does not say.
const TOLERANCE: f64 = 3.0;

/// What is read of one measurement. Two are of the same thing where all but rate and tokens agree.
#[derive(Clone, Debug, Deserialize)]
struct Kept {
    n_prompts: usize,
    max_new_tokens: usize,
    decode_tps_median: f64,
    device: String,
    #[serde(default)]
    backend: Option<String>,
    #[serde(default)]
    lora_rank: Option<usize>,
    #[serde(default)]
    quantize: Option<String>,
    #[serde(default)]
    sampling: Value,
    #[serde(default)]
    commit: Option<String>,
    #[serde(default)]
    tolerance_pct: Option<f64>,
    #[serde(default)]
    token_checksum: Option<String>,
}

impl Kept {
    fn is_of(&self, other: &Self) -> bool {
        let agree = |a: &Value, b: &Value| a == b || a.is_null() || b.is_null();
        self.n_prompts == other.n_prompts
            && self.max_new_tokens == other.max_new_tokens
            && self.lora_rank == other.lora_rank
            && self.quantize == other.quantize
            && self.backend == other.backend
            && agree(&self.sampling, &other.sampling)
    }
}

fn parse(value: Value) -> Result<Vec<Kept>, String> {
    let list = match value {
        Value::Array(list) => list,
        one => vec![one],
    };
    let parsed = list
        .into_iter()
        .map(|one| serde_json::from_value(one).map_err(|error| error.to_string()));
    parsed.collect()
}

/// Measurements of a file.
pub(super) struct Baseline<'a> {
    path: &'a Path,
    kept: Vec<Kept>,
}

impl<'a> Baseline<'a> {
    /// Reads what --stats-path has written.
    pub(super) fn read(path: &'a Path) -> Result<Self, CliError> {
        let fail = |reason: String| CliError::Failed(format!("{}: {reason}", path.display()));
        let text = std::fs::read_to_string(path).map_err(|error| fail(error.to_string()))?;
        let value = serde_json::from_str(&text).map_err(|error| fail(error.to_string()))?;
        let kept = parse(value).map_err(|reason| fail(format!("not what --stats-path writes: {reason}")))?;
        Ok(Self { path, kept })
    }

    /// Prints the comparison; an error if a rate has fallen too far, or if nothing can be compared.
    pub(super) fn check(&self, reports: &[Value], tokens_count: bool) -> Result<(), CliError> {
        let fail = |reason: String| CliError::Failed(format!("{}: {reason}", self.path.display()));
        let new = parse(Value::Array(reports.to_vec())).map_err(CliError::Failed)?;
        let (text, problems) = compare(&self.kept, &new, tokens_count).map_err(fail)?;
        write_stdout(&format!("\ncompared with {}\n{text}", self.path.display()))?;
        match problems.first() {
            None => Ok(()),
            Some(_) => Err(fail(problems.join("; "))),
        }
    }
}

/// A table, and what has become worse.
fn compare(kept: &[Kept], new: &[Kept], tokens_count: bool) -> Result<(String, Vec<String>), String> {
    let mut text = String::from("prompts  tok/s then      now  change %  tokens\n");
    let (mut problems, mut compared) = (Vec::new(), 0);
    for now in new {
        let Some(then) = kept.iter().find(|then| then.is_of(now)) else {
            let _ = writeln!(text, "{:>7}  not in the file", now.n_prompts);
            continue;
        };
        if then.device != now.device {
            return Err(format!(
                "it was measured on {}, this is {}",
                then.device, now.device
            ));
        }
        compared += 1;
        let change = 100.0 * (now.decode_tps_median / then.decode_tps_median - 1.0);
        let tolerance = then.tolerance_pct.unwrap_or(TOLERANCE);
        let same_tokens = match (&then.token_checksum, &now.token_checksum) {
            (Some(then), Some(now)) => Some(then == now),
            _ => None,
        };
        let _ = writeln!(
            text,
            "{:>7}  {:>10.0}  {:>7.0}  {change:>+8.2}  {}",
            now.n_prompts,
            then.decode_tps_median,
            now.decode_tps_median,
            match same_tokens {
                Some(true) => "the same",
                Some(false) => "others",
                None => "not kept",
            }
        );
        let of = match &then.commit {
            Some(commit) => format!(" of {}", &commit[..commit.len().min(10)]),
            None => String::new(),
        };
        // Not a number is worse, too.
        if change < -tolerance || change.is_nan() {
            problems.push(format!(
                "{} prompts: {:.0} tok/s instead of {:.0}{of}, {change:+.2} % where {tolerance} % are tolerated",
                now.n_prompts, now.decode_tps_median, then.decode_tps_median
            ));
        }
        if tokens_count && same_tokens == Some(false) {
            problems.push(format!("{} prompts: other tokens than those{of}", now.n_prompts));
        }
    }
    match compared {
        0 => Err("it has no measurement of this workload and model".into()),
        _ => Ok((text, problems)),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn kept(prompts: usize, rate: f64, checksum: &str) -> Kept {
        let value = json!({
            "n_prompts": prompts, "max_new_tokens": 512, "decode_tps_median": rate, "device": "a GPU",
            "backend": "cuda, random:tiny", "token_checksum": checksum, "tolerance_pct": 2.0,
            "commit": "0123456789abcdef", "sampling": { "temperature": 0.0 },
        });
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn what_fell_further_than_tolerated_is_a_problem_and_the_rest_is_not() {
        let file = [kept(1, 100.0, "a"), kept(8, 800.0, "b")];
        let check = |new: &[Kept], tokens| compare(&file, new, tokens).unwrap();
        let (text, problems) = check(&[kept(1, 98.1, "a"), kept(8, 900.0, "b")], true);
        assert!(problems.is_empty(), "{problems:?}");
        assert!(
            text.contains("-1.90") && text.contains("+12.50") && text.contains("the same"),
            "{text}"
        );
        let (_, problems) = check(&[kept(1, 97.9, "a"), kept(8, 800.0, "b")], true);
        assert_eq!(problems.len(), 1);
        assert!(
            problems[0].contains("1 prompts") && problems[0].contains("0123456789,"),
            "{problems:?}"
        );
        let (_, problems) = check(
            &[Kept {
                decode_tps_median: f64::NAN,
                ..kept(1, 1.0, "a")
            }],
            true,
        );
        assert_eq!(problems.len(), 1);
    }

    #[test]
    fn other_tokens_are_told_and_count_if_asked_for() {
        let file = [kept(1, 100.0, "a")];
        let (text, problems) = compare(&file, &[kept(1, 100.0, "x")], false).unwrap();
        assert!(problems.is_empty() && text.contains("others"));
        let (_, problems) = compare(&file, &[kept(1, 100.0, "x")], true).unwrap();
        assert!(problems[0].contains("other tokens"));
    }

    #[test]
    fn measurements_of_something_else_are_not_compared() {
        let file = [kept(1, 100.0, "a")];
        let (text, _) = compare(&file, &[kept(1, 100.0, "a"), kept(2, 1.0, "a")], true).unwrap();
        assert!(text.contains("not in the file"));
        assert!(compare(&file, &[kept(2, 1.0, "a")], true).is_err());
        let elsewhere = Kept {
            device: "another GPU".into(),
            ..kept(1, 100.0, "a")
        };
        assert!(
            compare(&file, &[elsewhere], true)
                .unwrap_err()
                .contains("another GPU")
        );
        for other in [
            Kept {
                lora_rank: Some(32),
                ..kept(1, 1.0, "a")
            },
            Kept {
                quantize: Some("nf4".into()),
                ..kept(1, 1.0, "a")
            },
            Kept {
                max_new_tokens: 64,
                ..kept(1, 1.0, "a")
            },
            Kept {
                sampling: json!({ "temperature": 1.0 }),
                ..kept(1, 1.0, "a")
            },
        ] {
            assert!(!file[0].is_of(&other), "{other:?}");
        }
        assert!(parse(json!([{ "n_prompts": 1 }])).is_err());
    }
}
