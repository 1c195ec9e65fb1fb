//! What these tests share: a scheduler over a runner that computes nothing, and files of the repository.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};

use paged_kv::PageTable;
use rollout_engine::fake_runner::FakeRunner;
use rollout_engine::runner::{Runner, RunnerMemory, SampledToken, Step};
use rollout_engine::{Error, RunnerShape, SamplingParams, Scheduler};
use serde::Deserialize;

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

/// The folder of an adapter.
pub(crate) fn adapter(name: &str) -> PathBuf {
    fixtures().join("adapters").join(name)
}

/// A greedy completion by transformers in f32.
#[derive(Deserialize)]
pub(crate) struct Golden {
    pub(crate) prompt_ids: Vec<u32>,
    pub(crate) completion_ids: Vec<u32>,
    pub(crate) logprobs: Vec<f32>,
}

/// Those of a policy: an adapter, or several with `+` between them.
pub(crate) fn golden(name: &str) -> Vec<Golden> {
    let path = fixtures().join(format!("golden/greedy-{name}.json"));
    serde_json::from_str(&std::fs::read_to_string(path).expect("the golden file")).expect("JSON")
}

/// A runner of any shape that samples one token again and again, and computes nothing.
pub(crate) struct Constant {
    pub(crate) shape: RunnerShape,
    pub(crate) token: u32,
    rows: VecDeque<usize>,
}

impl Constant {
    pub(crate) fn new(shape: RunnerShape, token: u32) -> Self {
        Self {
            shape,
            token,
            rows: VecDeque::new(),
        }
    }
}

impl Runner for Constant {
    fn shape(&self) -> RunnerShape {
        self.shape
    }

    fn device(&self) -> String {
        "constant".into()
    }

    fn memory(&self) -> RunnerMemory {
        RunnerMemory::default()
    }

    fn submit(&mut self, step: &Step, _: &mut PageTable) -> Result<(), Error> {
        self.rows.push_back(step.sampled_rows());
        Ok(())
    }

    fn collect(&mut self) -> Result<Vec<SampledToken>, Error> {
        let sampled = SampledToken {
            token: self.token,
            ..SampledToken::default()
        };
        Ok(vec![sampled; self.rows.pop_front().unwrap_or_default()])
    }

    fn reset(&mut self) {
        self.rows.clear();
    }
}
