//! Attention on the CPU: decoding, packed prefill, and making the masks for both.
//!
//! Shapes are those of Qwen3-0.6B (16 query heads, 8 KV heads of 128). Throughput counts the bytes of K and V that have to
//! be read for decoding, and the multiplications and additions of unmasked cells for prefill. `read` is the floor for
//! decoding: summing as many bytes as K and V have, on as many threads.

use std::hint::black_box;

use block_mask::reference::{DenseShape, dense_attention};
use block_mask::{
    BlockMask, FlexOptions, MaskMod, MaskShape, PackedSequence, Physical, QueryView, flex_attention,
    paged_causal_mask,
};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use paged_kv::{KvCache, KvDtype, KvLayout, PageTable, PageTableConfig, Slot};
use rand::{Rng, SeedableRng};
use rayon::prelude::*;

const HEADS: usize = 16;
const KV_HEADS: usize = 8;
const DIM: usize = 128;

struct Setup {
    table: PageTable,
    cache: KvCache,
    slots: Vec<Slot>,
    k: Vec<f32>,
    v: Vec<f32>,
}

fn random(n: usize, seed: u64) -> Vec<f32> {
    let mut random = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
    (0..n).map(|_| random.random_range(-1.0f32..1.0)).collect()
}

/// `n` sequences of `len` tokens that grew in turns, all with the same keys and values.
fn setup(n: usize, len: usize, page_size: usize, dtype: KvDtype) -> Setup {
    let pages = len.div_ceil(page_size);
    let n_pages = n * pages + 1;
    let config = PageTableConfig {
        n_pages,
        page_size,
        n_slots: n + 1,
        max_pages_per_slot: pages,
    };
    let mut table = PageTable::new(config).unwrap();
    let slots: Vec<Slot> = (0..n).map(|_| table.allocate_slot().unwrap()).collect();
    for page in 1..=pages {
        for &slot in &slots {
            let _ = table.reserve(slot, (page * page_size).min(len)).unwrap();
        }
    }
    let layout = KvLayout {
        n_layers: 1,
        kv_heads: KV_HEADS,
        head_dim: DIM,
        n_pages,
        page_size,
        dtype,
    };
    let mut cache = KvCache::new(layout).unwrap();
    let (k, v) = (random(len * KV_HEADS * DIM, 1), random(len * KV_HEADS * DIM, 2));
    for &slot in &slots {
        let physical: Vec<usize> = (0..len).map(|t| table.physical(slot, t).unwrap()).collect();
        cache.write(0, &physical, &k, &v).unwrap();
        table.advance(slot, len).unwrap();
    }
    Setup {
        table,
        cache,
        slots,
        k,
        v,
    }
}

fn run(setup: &Setup, queries: &[f32], rows: usize, mask: &BlockMask<Physical>, out: &mut [f32]) {
    let q = QueryView::packed(queries, rows, HEADS, DIM).unwrap();
    flex_attention(
        q,
        setup.cache.layer(0).unwrap(),
        mask,
        None,
        &FlexOptions::default(),
        out,
        None,
    )
    .unwrap();
}

/// One row that sees `len` keys, against the oracle: the time of a wrong result is of no use.
fn check(setup: &Setup, queries: &[f32], row: usize, len: usize, out: &[f32], tolerance: f64) {
    let head_major = |x: &[f32]| -> Vec<f32> {
        let at = |h: usize, t: usize| x[(t * KV_HEADS + h) * DIM..][..DIM].to_vec();
        (0..KV_HEADS)
            .flat_map(|h| (0..len).flat_map(move |t| at(h, t)))
            .collect()
    };
    let shape = DenseShape {
        batch: 1,
        heads: HEADS,
        kv_heads: KV_HEADS,
        q_len: 1,
        kv_len: len,
        head_dim: DIM,
    };
    let own = &queries[row * HEADS * DIM..(row + 1) * HEADS * DIM];
    let (k, v) = (head_major(&setup.k), head_major(&setup.v));
    let scale = 1.0 / (DIM as f64).sqrt();
    let (expected, _) = dense_attention(
        shape,
        own,
        &k,
        &v,
        scale,
        |_, _, _, _| true,
        |score, _, _, _, _| score,
    )
    .expect("the tensors have the shape");
    for (found, expected) in out[row * HEADS * DIM..].iter().zip(&expected) {
        assert!(
            (f64::from(*found) - expected).abs() < tolerance,
            "{found} is not {expected}"
        );
    }
}

fn tolerance(dtype: KvDtype) -> f64 {
    match dtype {
        KvDtype::F32 => 1e-5,
        KvDtype::Bf16 => 1e-2,
    }
}

fn decode(c: &mut Criterion) {
    if !benches::selected("attention/decode_16_sequences") {
        return;
    }
    let mut group = c.benchmark_group("attention/decode_16_sequences");
    for (name, dtype, page_size, len) in [
        ("f32 page 16", KvDtype::F32, 16, 1024),
        ("f32 page 128", KvDtype::F32, 128, 1024),
        ("bf16 page 16", KvDtype::Bf16, 16, 1024),
        ("f32 page 16", KvDtype::F32, 16, 128),
    ] {
        let setup = setup(16, len, page_size, dtype);
        let one = |(i, &slot): (usize, &Slot)| PackedSequence {
            slot,
            q_start: i,
            q_len: 1,
            kv_start_pos: len - 1,
        };
        let step: Vec<PackedSequence> = setup.slots.iter().enumerate().map(one).collect();
        let mask = paged_causal_mask(&setup.table, &step, 16, None).unwrap();
        let queries = random(16 * HEADS * DIM, 3);
        let mut out = vec![0.0; queries.len()];
        run(&setup, &queries, 16, &mask, &mut out);
        check(&setup, &queries, 0, len, &out, tolerance(dtype));
        let bytes = 2 * 16 * len * KV_HEADS * DIM * dtype.bytes();
        group.throughput(Throughput::Bytes(bytes as u64));
        group.bench_function(BenchmarkId::new(name, len), |bencher| {
            bencher.iter(|| run(&setup, &queries, 16, &mask, &mut out));
        });
        group.bench_function(BenchmarkId::new(format!("mask {name}"), len), |bencher| {
            bencher.iter(|| {
                paged_causal_mask(black_box(&setup.table), &step, 16, None)
                    .unwrap()
                    .n_blocks()
            });
        });
    }
    let values = random(2 * 16 * 1024 * KV_HEADS * DIM, 4);
    group.throughput(Throughput::Bytes(4 * values.len() as u64));
    group.bench_function("read", |bencher| {
        bencher.iter(|| {
            let sum: f32 = values.par_chunks(1 << 16).map(lanes_sum).sum();
            assert!(sum.is_finite());
            sum
        });
    });
    group.finish();
}

/// A sum in independent lanes, which the compiler turns into vector additions.
fn lanes_sum(values: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 64];
    for chunk in values.chunks_exact(64) {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane += value;
        }
    }
    lanes.iter().sum()
}

fn prefill(c: &mut Criterion) {
    if !benches::selected("attention/prefill_4_prompts_of_256") {
        return;
    }
    let mut group = c.benchmark_group("attention/prefill_4_prompts_of_256");
    group.sample_size(20);
    for (name, dtype, block_q) in [
        ("f32 block 16", KvDtype::F32, 16),
        ("f32 block 64", KvDtype::F32, 64),
        ("bf16 block 16", KvDtype::Bf16, 16),
    ] {
        let len = 256;
        let setup = setup(4, len, 16, dtype);
        let one = |(i, &slot): (usize, &Slot)| PackedSequence {
            slot,
            q_start: i * len,
            q_len: len,
            kv_start_pos: 0,
        };
        let step: Vec<PackedSequence> = setup.slots.iter().enumerate().map(one).collect();
        let mask = paged_causal_mask(&setup.table, &step, block_q, None).unwrap();
        let queries = random(4 * len * HEADS * DIM, 5);
        let mut out = vec![0.0; queries.len()];
        run(&setup, &queries, 4 * len, &mask, &mut out);
        check(&setup, &queries, len - 1, len, &out, tolerance(dtype));
        // Two products of DIM multiply-adds per unmasked cell.
        let flops = 4 * HEADS * (len * (len + 1) / 2) * 4 * DIM;
        group.throughput(Throughput::Elements(flops as u64));
        group.bench_function(name, |bencher| {
            bencher.iter(|| run(&setup, &queries, 4 * len, &mask, &mut out))
        });
    }
    group.finish();
}

fn logical_masks(c: &mut Criterion) {
    if !benches::selected("block_mask/8192_x_8192") {
        return;
    }
    let mut group = c.benchmark_group("block_mask/8192_x_8192");
    group.sample_size(20);
    let shape = MaskShape::new(1, 1, 8192, 8192);
    let documents: Vec<i32> = (0..8192).map(|i| i / 1024).collect();
    for (name, mask_mod, blocks) in [
        ("causal", MaskMod::causal(), 64 * 65 / 2),
        (
            "window 512",
            MaskMod::causal() & MaskMod::sliding_window(512),
            64 * 5 - 10,
        ),
        (
            "documents by id",
            MaskMod::causal() & MaskMod::document(documents),
            8 * (8 * 9 / 2),
        ),
    ] {
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                let mask = BlockMask::from_fn(shape, mask_mod.clone()).unwrap();
                assert_eq!(mask.n_blocks(), blocks);
                mask.n_blocks()
            });
        });
    }
    group.finish();
}

criterion_group!(benches, decode, prefill, logical_masks);
criterion_main!(benches);
