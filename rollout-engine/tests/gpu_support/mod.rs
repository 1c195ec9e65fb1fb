//! What the GPU tests share: the bundled model and the golden completions.
#![allow(
    dead_code,
    unreachable_pub,
    reason = "a module of several test binaries, each of which uses its own part"
)]

use std::path::PathBuf;

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
        let path = repository().join(format!("fixtures/golden/greedy-{policy}.json"));
        let json: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let mut goldens: Vec<Self> = json.as_array().unwrap().iter().map(Self::one).collect();
        if cuda_graphs::few_cases() {
            goldens.sort_by_key(|golden| golden.completion.len());
            goldens.truncate(4);
        }
        goldens
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
