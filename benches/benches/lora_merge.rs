//! One matrix of Qwen3-4B (`gate_proj`, 9728 × 2560) merged at several ranks, beside copying the same bytes.
//!
//! Copying reads and writes what a merge must read and write, so it is the floor.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use half::bf16;
use lora_merge::{LowRankTerm, ModuleUpdate, merge_into, parallel_digest, sequential_digest};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::hint::black_box;
use std::sync::Arc;

const ROWS: usize = 9728;
const COLUMNS: usize = 2560;

fn merge(c: &mut Criterion) {
    if !benches::selected("lora_merge") {
        return;
    }
    let mut random = ChaCha8Rng::seed_from_u64(1);
    // Sums of uniform draws: close enough to normal ones.
    let mut draw = move |n: usize, scale: f32| -> Vec<f32> {
        let one = |random: &mut ChaCha8Rng| (0..4).map(|_| random.random_range(-0.87f32..0.87)).sum::<f32>();
        (0..n).map(|_| scale * one(&mut random)).collect()
    };
    let w0: Vec<bf16> = draw(ROWS * COLUMNS, 0.02)
        .into_iter()
        .map(bf16::from_f32)
        .collect();
    let mut out = vec![bf16::ZERO; w0.len()];
    let mut group = c.benchmark_group("lora_merge/9728_x_2560_matrix");
    group
        .sample_size(20)
        .throughput(Throughput::Bytes(4 * w0.len() as u64));

    group.bench_function("copy", |b| {
        // One part per core: the same threads as the merge.
        b.iter(|| copy(black_box(&w0), &mut out));
    });
    assert_eq!(out, w0);

    for r in [1, 4, 8, 16, 32, 128] {
        let terms = [(); 2].map(|()| LowRankTerm {
            r,
            left: Arc::from(draw(ROWS * r, 0.01)),
            right: Arc::from(draw(r * COLUMNS, 0.02)),
            scaling: 2.0,
            magnitude: None,
        });
        let exact = exact(&w0, &terms[0]);
        let update = |term| ModuleUpdate::from_terms(ROWS, COLUMNS, vec![term]).expect("the shapes fit");
        let updates = terms.map(update);
        // By turns, as a refresh changes what was merged before.
        let mut turn = 0;
        group.bench_function(format!("rank {r}"), |b| {
            b.iter(|| {
                turn = 1 - turn;
                merge_into(black_box(&w0), &updates[turn], &mut out).expect("it is finite")
            });
        });
        merge_into(&w0, &updates[0], &mut out).expect("it is finite");
        assert_eq!(out[5 * COLUMNS..6 * COLUMNS], exact, "row 5 is correctly rounded");
    }
    group.finish();

    let bytes: Vec<u8> = out.iter().flat_map(|v| v.to_le_bytes()).collect();
    let parts: Vec<(String, &[u8])> = bytes
        .chunks(1 << 20)
        .enumerate()
        .map(|(i, part)| (format!("{i:04}"), part))
        .collect();
    let tensors: Vec<(&str, &[u8])> = parts.iter().map(|(name, part)| (name.as_str(), *part)).collect();
    let mut group = c.benchmark_group("lora_merge/sha256_of_the_same");
    group
        .sample_size(20)
        .throughput(Throughput::Bytes(bytes.len() as u64));
    let expected = sequential_digest(tensors.iter().copied());
    group.bench_function("sequential", |b| {
        b.iter(|| assert_eq!(sequential_digest(black_box(&tensors).iter().copied()), expected));
    });
    let expected = parallel_digest(&tensors);
    group.bench_function("parallel", |b| {
        b.iter(|| assert_eq!(parallel_digest(black_box(&tensors)), expected));
    });
    group.finish();
}

/// Copies with as many threads as the machine has.
fn copy(from: &[bf16], to: &mut [bf16]) {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let part = from.len().div_ceil(threads);
    std::thread::scope(|scope| {
        for (from, to) in from.chunks(part).zip(to.chunks_mut(part)) {
            scope.spawn(move || to.copy_from_slice(from));
        }
    });
}

/// Row 5 of the merge, in f64.
fn exact(w0: &[bf16], term: &LowRankTerm) -> Vec<bf16> {
    let value = |j: usize| {
        let product =
            |k: usize| f64::from(term.left[5 * term.r + k]) * f64::from(term.right[k * COLUMNS + j]);
        let sum: f64 = (0..term.r).map(product).sum();
        lora_merge::bf16_from_f64(w0[5 * COLUMNS + j].to_f64() + term.scaling * sum)
    };
    (0..COLUMNS).map(value).collect()
}

criterion_group!(benches, merge);
criterion_main!(benches);
