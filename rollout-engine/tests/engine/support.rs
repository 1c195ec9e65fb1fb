//! What these tests share: a scheduler over a runner that computes nothing, and files of the repository.

use std::path::{Path, PathBuf};

use rollout_engine::fake_runner::FakeRunner;
use rollout_engine::{RunnerShape, SamplingParams, Scheduler};

pub(crate) fn scheduler(shape: RunnerShape) -> Scheduler<FakeRunner> {
    Scheduler::new(FakeRunner::new(shape), vec![]).expect("a valid shape")
}

pub(crate) fn new_tokens(max_new_tokens: usize) -> SamplingParams {
    SamplingParams {
        max_new_tokens,
        ..Default::default()
    }
}

pub(crate) fn prompt(len: usize, salt: u32) -> Vec<u32> {
    (0..len as u32).map(|i| (i * 7 + salt * 131) % 1000).collect()
}

pub(crate) fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures")
}

/// The folder of the bundled model.
pub(crate) fn bundled_model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("models/tiny-qwen3-math")
}
