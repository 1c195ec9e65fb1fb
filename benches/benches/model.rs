//! The model on the CPU: decode steps and prefill of the bundled model, and decoding with random
//! weights of Qwen3-0.6B's shape against what reading those weights once takes on this machine.
//!
//! The ratio to the machine's read bandwidth is measured in turns with the step and printed first;
//! both are the best of several, so that other work on the machine disturbs neither.

use std::hint::black_box;
use std::path::Path;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use paged_kv::{KvDtype, PageTable, PageTableConfig, Slot};
use qwen3_model::{CpuBackend, LoadOptions, Model, Qwen3Config, SequenceChunk, StepBatch};
use rayon::prelude::*;

const BUNDLED: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../rollout-engine/models/tiny-qwen3-math"
);
/// Positions in the cache before a measured decode step.
const CONTEXT: usize = 128;

struct Setup {
    model: Model<CpuBackend>,
    table: PageTable,
    slots: Vec<Slot>,
}

fn options(batch: usize) -> LoadOptions {
    let mut options = LoadOptions::default();
    options.n_pages = 1 + batch * (CONTEXT / options.page_size + 1);
    options.kv_dtype = KvDtype::Bf16;
    options
}

/// `batch` sequences with [`CONTEXT`] tokens each.
fn setup(mut model: Model<CpuBackend>, batch: usize) -> Setup {
    let LoadOptions {
        n_pages, page_size, ..
    } = options(batch);
    let config = PageTableConfig {
        n_pages,
        page_size,
        n_slots: batch + 1,
        max_pages_per_slot: n_pages,
    };
    let mut table = PageTable::new(config).unwrap();
    let slots: Vec<Slot> = (0..batch).map(|_| table.allocate_slot().unwrap()).collect();
    for (i, &slot) in slots.iter().enumerate() {
        let _ = table.reserve(slot, CONTEXT + 1).unwrap();
        let ids: Vec<u32> = (0..CONTEXT).map(|t| ((t * 31 + i * 7) % 570) as u32).collect();
        let chunk = SequenceChunk {
            slot,
            start: 0,
            len: CONTEXT,
            wants_logits: false,
        };
        model
            .forward(
                &StepBatch {
                    token_ids: &ids,
                    chunks: &[chunk],
                },
                &table,
            )
            .unwrap();
        table.advance(slot, CONTEXT).unwrap();
    }
    Setup { model, table, slots }
}

impl Setup {
    /// The same decode step every time: nothing advances.
    fn decode(&mut self) -> &[f32] {
        let chunk = |&slot| SequenceChunk {
            slot,
            start: CONTEXT,
            len: 1,
            wants_logits: true,
        };
        let chunks: Vec<_> = self.slots.iter().map(chunk).collect();
        let ids = vec![7; chunks.len()];
        self.model
            .forward(
                &StepBatch {
                    token_ids: &ids,
                    chunks: &chunks,
                },
                &self.table,
            )
            .unwrap()
    }

    fn check(&mut self) {
        let first = self.decode().to_vec();
        assert!(first.iter().all(|x| x.is_finite()));
        assert_eq!(self.decode(), first);
    }
}

fn bundled(batch: usize) -> Setup {
    setup(Model::load(Path::new(BUNDLED), &options(batch)).unwrap(), batch)
}

fn decode_bundled(c: &mut Criterion) {
    if !benches::selected("model/decode_bundled") {
        return;
    }
    let mut group = c.benchmark_group("model/decode_bundled");
    for batch in [1, 4, 16, 48] {
        let mut setup = bundled(batch);
        setup.check();
        group.throughput(Throughput::Elements(batch as u64));
        group.bench_function(BenchmarkId::from_parameter(batch), |b| {
            b.iter(|| black_box(setup.decode())[0])
        });
    }
}

fn prefill_bundled(c: &mut Criterion) {
    if !benches::selected("model/prefill_bundled") {
        return;
    }
    let mut setup = bundled(4);
    let ids: Vec<u32> = (0..4 * CONTEXT).map(|t| (t % 570) as u32).collect();
    let chunk = |&slot| SequenceChunk {
        slot,
        start: 0,
        len: CONTEXT,
        wants_logits: true,
    };
    let chunks: Vec<_> = setup.slots.iter().map(chunk).collect();
    let mut group = c.benchmark_group("model/prefill_bundled");
    group.throughput(Throughput::Elements(ids.len() as u64));
    group.bench_function(BenchmarkId::from_parameter(ids.len()), |b| {
        b.iter(|| {
            let batch = StepBatch {
                token_ids: &ids,
                chunks: &chunks,
            };
            let logits = setup.model.forward(&batch, &setup.table).unwrap();
            assert_eq!(logits.len(), 4 * 1024);
            logits[0]
        });
    });
}

/// Sums `words` on all threads: as many bytes as the machine can read.
fn read(words: &[u64]) -> u64 {
    let sum = |words: &[u64]| {
        let mut sums = [0u64; 32];
        for words in words.chunks_exact(32) {
            for (sum, word) in sums.iter_mut().zip(words) {
                *sum = sum.wrapping_add(*word);
            }
        }
        sums.iter().fold(0u64, |a, b| a.wrapping_add(*b))
    };
    words.par_chunks(1 << 15).map(sum).reduce(|| 0, u64::wrapping_add)
}

fn timed(f: impl FnOnce()) -> Duration {
    let start = Instant::now();
    f();
    start.elapsed()
}

fn decode_random_0_6b(c: &mut Criterion) {
    if !benches::selected("model/decode_random_0_6b") {
        return;
    }
    let model = Model::random(Qwen3Config::qwen3_0_6b(), 1, &options(1)).unwrap();
    let bytes = model.backend().weights().bytes();
    let mut setup = setup(model, 1);
    setup.check();
    let words = vec![1u64; bytes as usize / 8];
    let (mut best_read, mut best_step) = (Duration::MAX, Duration::MAX);
    for _ in 0..10 {
        best_read = best_read.min(timed(|| {
            black_box(read(black_box(&words)));
        }));
        best_step = best_step.min(timed(|| {
            black_box(setup.decode());
        }));
    }
    drop(words);
    let rate = |time: Duration| bytes as f64 / time.as_secs_f64() / 1e9;
    eprintln!(
        "Qwen3-0.6B, batch 1: {best_step:?} a step = {:.1} GB/s of weights; reading them alone: {best_read:?} = \
         {:.1} GB/s; the step reaches {:.0} %",
        rate(best_step),
        rate(best_read),
        100.0 * rate(best_step) / rate(best_read),
    );
    let mut group = c.benchmark_group("model/decode_random_0_6b");
    group.sample_size(10).throughput(Throughput::Bytes(bytes));
    group.bench_function(BenchmarkId::from_parameter(1), |b| {
        b.iter(|| black_box(setup.decode())[0])
    });
}

criterion_group!(benches, decode_random_0_6b, decode_bundled, prefill_bundled);
criterion_main!(benches);
