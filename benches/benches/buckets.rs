//! Choosing the bucket of a batch, which the scheduler does once per decode step.

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use cuda_graphs::BucketSet;

fn buckets(c: &mut Criterion) {
    if !benches::selected("buckets") {
        return;
    }
    let sets: Vec<BucketSet> = [1, 64, 256, 4096]
        .iter()
        .filter_map(|&max| BucketSet::new(max).ok())
        .collect();
    assert_eq!(sets.len(), 4);
    let mut group = c.benchmark_group("buckets");
    for set in &sets {
        let max = set.max();
        // What all choices together must come to, by the rule read literally.
        let expected: usize = (1..=max)
            .map(|rows| match rows {
                rows if rows <= 8 => rows.next_power_of_two().min(max),
                rows => rows.next_multiple_of(16).min(max),
            })
            .sum();
        group.bench_function(format!("every batch to {max}"), |b| {
            b.iter(|| {
                let sum: usize = (1..=max).filter_map(|rows| set.for_batch(black_box(rows))).sum();
                assert_eq!(sum, expected);
            });
        });
    }
    group.bench_function("make the set to 256", |b| {
        b.iter(|| {
            let set = BucketSet::new(black_box(256));
            assert_eq!(set.map(|set| set.sizes().len()), Ok(20));
        });
    });
    group.finish();
}

criterion_group!(benches, buckets);
criterion_main!(benches);
