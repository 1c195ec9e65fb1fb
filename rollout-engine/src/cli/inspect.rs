//! `rollout inspect`.

use std::fmt::Write as _;
use std::path::Path;

use paged_kv::{KvDtype, KvLayout};
use qwen3_model::{GenerationConfig, Projection, Qwen3Config, RopeScaling, Weights};

use super::CliError;
use super::args::InspectArgs;
use super::output::write_stdout;
use crate::memory::{available_memory, format_bytes};
use crate::text::TextPipeline;
use crate::{Error, model_folder};

pub(super) fn run(args: &InspectArgs) -> Result<(), CliError> {
    let dir = model_folder::find(args.model.as_deref())?;
    write_stdout(&describe(&dir, args.memory)?)
}

/// The report, in lines of `name  value`.
fn describe(dir: &Path, memory: Option<u64>) -> Result<String, Error> {
    let config = Qwen3Config::from_dir(dir)?;
    let generation = GenerationConfig::from_dir(dir)?.unwrap_or_default();
    let eos = match generation.eos_token_ids.is_empty() {
        true => &config.eos_token_ids,
        false => &generation.eos_token_ids,
    };
    let text = TextPipeline::from_dir(dir)?;
    let rope = match config.rope.scaling {
        RopeScaling::Yarn { factor, .. } => format!("theta {}, yarn x {factor}", config.rope.theta),
        _ => format!("theta {}", config.rope.theta),
    };
    let in_bf16 = 2 * config.n_parameters();
    let (weights, quantized) = four_bit(dir, &config)?.map_or((in_bf16, None), |(bytes, n)| (bytes, Some(n)));
    let mut out = String::new();
    let mut row = |name: &str, value: String| {
        let _ = writeln!(out, "{name:<22}{value}");
    };
    row("model", dir.display().to_string());
    row(
        "parameters",
        format!(
            "{} ({} in bf16)",
            group_digits(config.n_parameters()),
            format_bytes(in_bf16)
        ),
    );
    if let Some(n) = quantized {
        let all = config.n_layers * Projection::ALL.len();
        let size = format_bytes(weights);
        row(
            "quantised",
            format!("{n} of {all} modules in 4 bits: {size} of weights"),
        );
    }
    row("layers", config.n_layers.to_string());
    row("hidden", config.hidden_size.to_string());
    row("intermediate", config.intermediate_size.to_string());
    row(
        "heads",
        format!(
            "{} query, {} KV, of {} each",
            config.n_heads, config.n_kv_heads, config.head_dim
        ),
    );
    row(
        "vocabulary",
        match &text {
            Some(text) => format!(
                "{} ({} with a token)",
                config.vocab_size,
                text.tokenizer().vocab_size()
            ),
            None => format!("{} (no tokenizer.json)", config.vocab_size),
        },
    );
    row(
        "output head",
        if config.tie_word_embeddings {
            "tied to the embedding"
        } else {
            "of its own"
        }
        .into(),
    );
    row("rope", rope);
    row("positions", config.max_positions().to_string());
    row("stop ids", format!("{eos:?}"));
    let templates = text
        .as_ref()
        .is_some_and(|text| !text.chat_templates().is_empty());
    row("chat template", if templates { "yes" } else { "no" }.into());
    for (name, dtype) in [("bf16", KvDtype::Bf16), ("f32", KvDtype::F32)] {
        row(
            &format!("KV per token, {name}"),
            format!("{} bytes", group_digits(bytes_per_token(&config, dtype)?)),
        );
    }
    let (memory, whose) = match (memory, available_memory()) {
        (Some(memory), _) => (memory, "given"),
        (None, Some(memory)) => (memory, "available now"),
        (None, None) => return Ok(out),
    };
    row("memory", format!("{} ({whose})", format_bytes(memory)));
    let Some(left) = memory.checked_sub(weights) else {
        row("fits", "no: the weights alone take more".into());
        return Ok(out);
    };
    for (name, dtype) in [("bf16", KvDtype::Bf16), ("f32", KvDtype::F32)] {
        let tokens = left / bytes_per_token(&config, dtype)?.max(1);
        let sequences = tokens / config.max_positions().max(1) as u64;
        row(
            &format!("fits, {name} KV"),
            format!(
                "{} tokens: {} sequences of {}",
                group_digits(tokens),
                group_digits(sequences),
                config.max_positions()
            ),
        );
    }
    Ok(out)
}

/// Bytes of the weights and number of modules in 4 bits, for a folder that says that it is quantised.
fn four_bit(dir: &Path, config: &Qwen3Config) -> Result<Option<(u64, usize)>, Error> {
    let text = std::fs::read_to_string(dir.join("config.json")).unwrap_or_default();
    if !text.contains("\"quantization_config\"") {
        return Ok(None);
    }
    let weights = Weights::open(dir, config)?;
    let layers = weights.layers.iter();
    let matrices = layers.flat_map(|layer| Projection::ALL.map(|p| layer.projection(p)));
    let quantized = matrices.filter(|matrix| matrix.quantized().is_some()).count();
    Ok(Some((weights.bytes(), quantized)))
}

fn bytes_per_token(config: &Qwen3Config, dtype: KvDtype) -> Result<u64, Error> {
    let layout = KvLayout {
        n_layers: config.n_layers,
        kv_heads: config.n_kv_heads,
        head_dim: config.head_dim,
        n_pages: 2,
        page_size: 1,
        dtype,
    };
    Ok(layout.bytes_per_token()?)
}

/// `1,234,567`.
fn group_digits(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bundled_model_is_described() {
        let dir = crate::bundled::model_dir().expect("is there");
        let text = describe(&dir, Some(1_000_000_000)).expect("describes");
        for line in [
            "vocabulary            1024 (571 with a token)",
            "heads                 8 query, 2 KV, of 128 each",
            "stop ids              [570, 568]",
            "KV per token, bf16    4,096 bytes",
            "memory                1.00 GB (given)",
        ] {
            assert!(text.lines().any(|l| l == line), "{line:?} is not in\n{text}");
        }
        assert!(
            describe(&dir, Some(1000))
                .expect("describes")
                .contains("the weights alone")
        );
    }

    #[test]
    fn digits_are_grouped() {
        assert_eq!(group_digits(0), "0");
        assert_eq!(group_digits(1234567), "1,234,567");
        assert_eq!(group_digits(123), "123");
    }
}
