//! What the GPU tests share: the bundled model and the golden completions.
#![allow(
    dead_code,
    unreachable_pub,
    reason = "a module of several test binaries, each of which uses its own part"
)]

#[path = "../../../qwen3-model/tests/gpu_support/profile.rs"]
pub mod profile;

use std::path::PathBuf;

use qwen3_model::{GenerationConfig, Qwen3Config, Weights};
use rollout_engine::PoolSettings;

/// Where the reference's two best logits are nearer than this, a bf16 engine may choose the other one.
pub const CLOSE: f64 = 0.05;

/// A greedy completion of the reference in f32.
pub struct Golden {
    pub prompt: Vec<u32>,
    pub completion: Vec<u32>,
    pub logprobs: Vec<f64>,
    /// The least distance of the two best logits at any of its tokens.
    pub gap: f64,
}

impl Golden {
    /// Those of a policy: `base`, an adapter of the fixtures, or two with a `+` between them. Few of them, and short ones, if
    /// few cases are wanted.
    pub fn all(policy: &str) -> Vec<Self> {
        let mut goldens = Self::every(policy);
        if cuda_graphs::few_cases() {
            goldens.sort_by_key(|golden| golden.completion.len());
            goldens.truncate(4);
        }
        goldens
    }

    /// All of them, however few cases are wanted.
    pub fn every(policy: &str) -> Vec<Self> {
        let path = repository().join(format!("fixtures/golden/greedy-{policy}.json"));
        let json: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        json.as_array().unwrap().iter().map(Self::one).collect()
    }

    fn one(entry: &serde_json::Value) -> Self {
        let ids = |name: &str| serde_json::from_value(entry[name].clone()).unwrap();
        Self {
            prompt: ids("prompt_ids"),
            completion: ids("completion_ids"),
            logprobs: serde_json::from_value(entry["logprobs"].clone()).unwrap(),
            gap: entry["min_top2_logit_gap"].as_f64().unwrap(),
        }
    }
}

/// The repository: where it was built, or the present folder for test binaries that were carried to another machine.
pub fn repository() -> PathBuf {
    let built = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let places = [built, PathBuf::from("."), PathBuf::from("..")];
    let found = places
        .into_iter()
        .find(|place| place.join("fixtures/golden").is_dir());
    found.expect("run this in the repository, which holds fixtures/golden")
}

/// The folder of the bundled model.
pub fn bundled_model() -> PathBuf {
    repository().join("rollout-engine/models/tiny-qwen3-math")
}

/// The bundled model: its configuration, its weights and the ids that end a completion.
pub fn tiny() -> (Qwen3Config, Weights, Vec<u32>) {
    let dir = bundled_model();
    let config = Qwen3Config::from_dir(&dir).unwrap();
    let weights = Weights::open(&dir, &config).unwrap();
    let generation = GenerationConfig::from_dir(&dir).unwrap().unwrap();
    (config, weights, generation.eos_token_ids)
}

/// The folder of an adapter of the fixtures.
pub fn adapter(name: &str) -> PathBuf {
    repository().join("fixtures/adapters").join(name)
}

/// Sizes of a pool. Pages of the usual size have that of the tuned profile that the tests run under, if there is one; other
/// sizes are what a test is about.
pub fn pool(batch: usize, page_size: usize, n_pages: usize, max_prefill_tokens: usize) -> PoolSettings {
    let (n_pages, page_size) = match page_size {
        64 => profile::pages(n_pages, page_size),
        _ => (n_pages, page_size),
    };
    PoolSettings {
        max_batch_size: Some(batch),
        max_seq_length: Some(512),
        n_pages: Some(n_pages),
        page_size: Some(page_size),
        max_prefill_tokens: Some(max_prefill_tokens),
    }
}
