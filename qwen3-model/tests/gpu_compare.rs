//! Scores given token sequences, for `scripts/compare_transformers.py`, which compares with transformers.
#![cfg(feature = "cuda")]

mod gpu_support;

use std::path::PathBuf;

use gpu_support::Gpu;
use paged_kv::PageTable;
use qwen3_model::cuda::{CudaBackend, CudaOptions, WeightSource};
use qwen3_model::{Model, Qwen3Config, SequenceChunk, StepBatch, Weights};

/// Reads `COMPARE_INPUT`, a list of `{"prompt": ids, "completion": ids}`, and writes to `COMPARE_OUTPUT` the
/// log-probability of every completion token by the model in `COMPARE_MODEL`. Without these variables it scores
/// nothing.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn score_the_sequences_of_a_file() {
    let path = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let (Some(dir), Some(input), Some(output)) = (
        path("COMPARE_MODEL"),
        path("COMPARE_INPUT"),
        path("COMPARE_OUTPUT"),
    ) else {
        eprintln!("nothing to score: set COMPARE_MODEL, COMPARE_INPUT and COMPARE_OUTPUT");
        return;
    };
    let gpu = Gpu::open();
    let config = Qwen3Config::from_dir(&dir).unwrap();
    let weights = Weights::open(&dir, &config).unwrap();
    let options = CudaOptions {
        max_tokens: 2048,
        max_batch_size: 16,
        max_seq_length: 2048,
        n_pages: 65,
        page_size: 64,
        ..CudaOptions::default()
    };
    let source = WeightSource::Given(&weights);
    let backend = CudaBackend::new(&gpu.device, &gpu.compiler, config.clone(), source, options).unwrap();
    let mut model = Model::new(backend);
    let mut table = PageTable::new(options.page_table()).unwrap();
    let sequences: serde_json::Value = serde_json::from_slice(&std::fs::read(input).unwrap()).unwrap();
    let ids = |value: &serde_json::Value| -> Vec<u32> {
        value
            .as_array()
            .unwrap()
            .iter()
            .map(|id| id.as_u64().unwrap() as u32)
            .collect()
    };
    let mut scores: Vec<Vec<f64>> = Vec::new();
    for sequence in sequences.as_array().unwrap() {
        let (prompt, completion) = (ids(&sequence["prompt"]), ids(&sequence["completion"]));
        let tokens = [prompt.clone(), completion.clone()].concat();
        let slot = table.allocate_slot().unwrap();
        let _ = table.reserve(slot, tokens.len()).unwrap();
        table.advance(slot, tokens.len()).unwrap();
        let chunks = [SequenceChunk {
            slot,
            start: 0,
            len: tokens.len(),
            wants_logits: true,
        }];
        let batch = StepBatch {
            token_ids: &tokens,
            chunks: &chunks,
        };
        let logits = model.forward_all(&batch, &table).unwrap();
        let rows = logits.chunks(config.vocab_size).skip(prompt.len() - 1);
        let score = |(row, &token): (&[f32], &u32)| {
            let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f64 = row.iter().map(|&x| f64::from(x - max).exp()).sum();
            f64::from(row[token as usize] - max) - sum.ln()
        };
        scores.push(rows.zip(&completion).map(score).collect());
        table.erase(slot).unwrap();
    }
    std::fs::write(output, serde_json::to_vec(&scores).unwrap()).unwrap();
}
