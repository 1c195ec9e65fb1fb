//! The engine with the bundled model, and the scheduler alone.
//!
//! `cargo bench -p benches --bench engine`

use std::collections::VecDeque;
use std::path::Path;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use paged_kv::PageTable;
use rollout_engine::runner::{RunnerMemory, SampledToken, Step};
use rollout_engine::{DeviceChoice, Engine, Error, Request, Runner, RunnerShape};
use serde_json::Value;

/// (prompt ids, completion ids) of the golden file.
fn golden() -> Vec<(Vec<u32>, Vec<u32>)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/golden/greedy-base.json");
    let text = std::fs::read_to_string(path).expect("the golden file");
    let cases: Vec<Value> = serde_json::from_str(&text).expect("JSON");
    let ids = |value: &Value| serde_json::from_value(value.clone()).expect("token ids");
    cases
        .iter()
        .map(|case| (ids(&case["prompt_ids"]), ids(&case["completion_ids"])))
        .collect()
}

/// Tokens per second on the CPU, prefill included. Every completion is compared with the golden one.
fn generate(c: &mut Criterion) {
    if !benches::selected("engine/generate_bundled") {
        return;
    }
    let golden = golden();
    let mut group = c.benchmark_group("engine/generate_bundled");
    group.sample_size(10);
    for batch_size in [1, 16] {
        let cases = &golden[..batch_size];
        let requests: Vec<Request> = cases
            .iter()
            .map(|(prompt, _)| Request::token_ids(prompt.clone()).max_new_tokens(400))
            .collect();
        let mut engine = Engine::builder()
            .device(DeviceChoice::Cpu)
            .max_batch_size(batch_size)
            .build()
            .expect("the bundled model loads");
        group.throughput(Throughput::Elements(
            cases.iter().map(|(_, tokens)| tokens.len() as u64).sum(),
        ));
        group.bench_function(BenchmarkId::new("generate", batch_size), |b| {
            b.iter(|| {
                let completions = engine.generate(&requests).expect("runs");
                for (completion, (_, expected)) in completions.into_iter().zip(cases) {
                    assert_eq!(&completion.expect("completes").token_ids, expected);
                }
            });
        });
    }
    group.finish();
}

/// Computes nothing: every row samples token 1.
struct NoRunner {
    shape: RunnerShape,
    rows: VecDeque<usize>,
}

impl Runner for NoRunner {
    fn shape(&self) -> RunnerShape {
        self.shape
    }

    fn device(&self) -> String {
        "none".into()
    }

    fn memory(&self) -> RunnerMemory {
        RunnerMemory::default()
    }

    fn submit(&mut self, step: &Step, pages: &mut PageTable) -> Result<(), Error> {
        // What a runner on a device would upload.
        std::hint::black_box(
            pages
                .drain_dirty()
                .map(|(slot, _row)| slot.index())
                .sum::<usize>(),
        );
        self.rows.push_back(step.sampled_rows());
        Ok(())
    }

    fn collect(&mut self) -> Result<Vec<SampledToken>, Error> {
        let rows = self.rows.pop_front().unwrap_or(0);
        Ok(vec![
            SampledToken {
                token: 1,
                logprob: -1.0,
                ..SampledToken::default()
            };
            rows
        ])
    }

    fn reset(&mut self) {
        self.rows.clear();
    }
}

/// What scheduling costs per token.
fn schedule(c: &mut Criterion) {
    if !benches::selected("engine/scheduler") {
        return;
    }
    let mut group = c.benchmark_group("engine/scheduler");
    for batch_size in [1, 64, 256] {
        let shape = RunnerShape {
            vocab_size: 1000,
            max_seq_length: 1024,
            max_batch_size: batch_size,
            n_pages: 1 + batch_size * 16,
            page_size: 64,
            max_in_flight: 2,
            max_prefill_tokens: 4096,
        };
        let requests: Vec<Request> = (0..batch_size as u32)
            .map(|i| Request::token_ids(vec![i % 1000, i * 7 % 1000]).max_new_tokens(512))
            .collect();
        let mut engine = Engine::with_runner(
            NoRunner {
                shape,
                rows: VecDeque::new(),
            },
            vec![],
            None,
        )
        .expect("the shape can work");
        group.throughput(Throughput::Elements(batch_size as u64 * 512));
        group.bench_function(BenchmarkId::new("tokens", batch_size), |b| {
            b.iter(|| {
                let completions = engine.generate(&requests).expect("runs");
                assert!(
                    completions
                        .iter()
                        .all(|c| c.as_ref().is_ok_and(|c| c.token_ids.len() == 512))
                );
            });
        });
    }
    group.finish();
}

criterion_group!(benches, generate, schedule);
criterion_main!(benches);
