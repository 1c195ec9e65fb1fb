//! What the integration tests share: fixtures, and sequences over a page table.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part")]

pub mod folder;
pub mod oracle;

use std::path::PathBuf;

use paged_kv::{PageTable, PageTableConfig, Slot};
use qwen3_model::{CpuBackend, LoadOptions, Model, SequenceChunk, StepBatch};
use safetensors::SafeTensors;
use serde::Deserialize;

pub fn model_dir() -> PathBuf {
    PathBuf::from(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../rollout-engine/models/tiny-qwen3-math"
    ))
}

pub fn fixture(path: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures")).join(path)
}

/// One completion of `golden/greedy-*.json`.
#[derive(Deserialize)]
pub struct Greedy {
    pub prompt_ids: Vec<u32>,
    pub completion_ids: Vec<u32>,
    pub logprobs: Vec<f64>,
}

pub fn greedy(name: &str) -> Vec<Greedy> {
    let json = std::fs::read(fixture(&format!("golden/greedy-{name}.json"))).unwrap();
    serde_json::from_slice(&json).unwrap()
}

/// `(ids, logits [tokens, vocab])` of every sequence of `golden/logits-*.safetensors`.
pub fn golden_logits(name: &str) -> Vec<(Vec<u32>, Vec<f32>)> {
    let bytes = std::fs::read(fixture(&format!("golden/logits-{name}.safetensors"))).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let mut sequences = Vec::new();
    while let Ok(ids) = tensors.tensor(&format!("{}.ids", sequences.len())) {
        let logits = tensors.tensor(&format!("{}.logits", sequences.len())).unwrap();
        let width = ids.data().len() / ids.shape().iter().product::<usize>();
        let ids = ids
            .data()
            .chunks_exact(width)
            .map(|b| u32::from_le_bytes(b[..4].try_into().unwrap()));
        let logits = logits
            .data()
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes(b.try_into().unwrap()));
        sequences.push((ids.collect(), logits.collect()));
    }
    assert!(!sequences.is_empty());
    sequences
}

pub fn table(options: &LoadOptions, n_slots: usize) -> PageTable {
    PageTable::new(PageTableConfig {
        n_pages: options.n_pages,
        page_size: options.page_size,
        n_slots: n_slots + 1,
        max_pages_per_slot: options.n_pages,
    })
    .unwrap()
}

pub fn options(n_pages: usize, page_size: usize) -> LoadOptions {
    let mut options = LoadOptions::default();
    (options.n_pages, options.page_size) = (n_pages, page_size);
    options
}

/// Runs the next `ids` of every sequence and returns the logits of their last tokens, or of all.
pub fn extend(
    model: &mut Model<CpuBackend>,
    table: &mut PageTable,
    sequences: &[(Slot, &[u32])],
    all: bool,
) -> Vec<f32> {
    let mut ids = Vec::new();
    let mut chunks = Vec::new();
    for &(slot, new) in sequences {
        let start = table.len(slot).unwrap();
        let reservation = table.reserve(slot, start + new.len()).unwrap();
        model
            .copy_pages(&reservation.copy.into_iter().collect::<Vec<_>>())
            .unwrap();
        ids.extend_from_slice(new);
        chunks.push(SequenceChunk {
            slot,
            start,
            len: new.len(),
            wants_logits: true,
        });
    }
    let batch = StepBatch {
        token_ids: &ids,
        chunks: &chunks,
    };
    let logits = if all {
        model.forward_all(&batch, table)
    } else {
        model.forward(&batch, table)
    };
    let logits = logits.unwrap().to_vec();
    for &(slot, new) in sequences {
        table.advance(slot, new.len()).unwrap();
    }
    logits
}

pub fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (i, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = i;
        }
    }
    best as u32
}

pub fn log_prob(logits: &[f32], id: u32) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|x| f64::from(x - max).exp()).sum();
    f64::from(logits[id as usize] - max) - sum.ln()
}

/// Largest difference of the log-probability of the sequences' own next tokens, and of any logit.
pub fn compare(model: &mut Model<CpuBackend>, name: &str) -> (f64, f32) {
    let (mut worst, mut worst_logit) = (0.0f64, 0.0f32);
    for (ids, golden) in golden_logits(name) {
        let mut table = table(&options(40, 16), 1);
        let slot = table.allocate_slot().unwrap();
        let ours = extend(model, &mut table, &[(slot, &ids)], true);
        let rows = ours.chunks_exact(1024).zip(golden.chunks_exact(1024));
        for ((ours, golden), next) in rows.zip(&ids[1..]) {
            worst = worst.max((log_prob(ours, *next) - log_prob(golden, *next)).abs());
        }
        worst_logit = worst_logit.max(max_difference(&ours, &golden));
    }
    (worst, worst_logit)
}

pub fn max_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .map(|(a, b)| if a.is_nan() { f32::INFINITY } else { (a - b).abs() })
        .fold(0.0, f32::max)
}
