//! The page table at 65,536 pages of 16 tokens and 1,024 slots, half full, its free pages scattered over the
//! pool: reserve, fork and erase of a sequence of 4,096 tokens, one token of growth, and lookups.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use paged_kv::{PageId, PageTable, PageTableConfig, Slot};
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

const PAGE_SIZE: usize = 16;
const LEN: usize = 4_096;
const PAGES: usize = LEN / PAGE_SIZE;

/// 1,000 sequences grow in turns until the pool is full, then half of them are erased in random order.
fn half_full_table() -> PageTable {
    let config = PageTableConfig {
        n_pages: 65_536,
        page_size: PAGE_SIZE,
        n_slots: 1_024,
        max_pages_per_slot: 2_560,
    };
    let mut table = PageTable::new(config).unwrap();
    let mut slots: Vec<Slot> = (0..1_000).map(|_| table.allocate_slot().unwrap()).collect();
    for page in 1..=65 {
        for &slot in &slots {
            let _ = table.reserve(slot, page * PAGE_SIZE).unwrap();
            table.advance(slot, PAGE_SIZE).unwrap();
        }
    }
    slots.shuffle(&mut ChaCha8Rng::seed_from_u64(1));
    for slot in slots.drain(..500) {
        table.erase(slot).unwrap();
    }
    table.drain_dirty().for_each(drop);
    table.check_integrity().unwrap();
    assert_eq!(table.free_pages(), 65_535 - 500 * 65);
    table
}

fn written(table: &mut PageTable, len: usize) -> Slot {
    let slot = table.allocate_slot().unwrap();
    let _ = table.reserve(slot, len).unwrap();
    table.advance(slot, len).unwrap();
    slot
}

fn sequences(c: &mut Criterion) {
    if !benches::selected("page_table") {
        return;
    }
    let mut table = half_full_table();
    let free = table.free_pages();
    let mut group = c.benchmark_group("page_table/4096_tokens");
    group.throughput(Throughput::Elements(PAGES as u64));

    group.bench_function("reserve", |b| {
        b.iter_custom(|n| {
            let mut total = Duration::ZERO;
            for _ in 0..n {
                let slot = table.allocate_slot().unwrap();
                let start = Instant::now();
                let reservation = black_box(table.reserve(slot, black_box(LEN)));
                total += start.elapsed();
                assert_eq!(reservation.unwrap().new_pages, PAGES);
                table.erase(slot).unwrap();
            }
            total
        });
    });
    group.bench_function("erase", |b| {
        b.iter_custom(|n| {
            let mut total = Duration::ZERO;
            for _ in 0..n {
                let slot = written(&mut table, LEN);
                assert_eq!(table.free_pages(), free - PAGES);
                let start = Instant::now();
                black_box(table.erase(black_box(slot))).unwrap();
                total += start.elapsed();
                assert_eq!(table.free_pages(), free);
            }
            total
        });
    });
    group.bench_function("fork", |b| {
        let parent = written(&mut table, LEN);
        b.iter_custom(|n| {
            let mut total = Duration::ZERO;
            for _ in 0..n {
                let start = Instant::now();
                let child = black_box(table.fork(black_box(parent))).unwrap();
                total += start.elapsed();
                assert_eq!(table.len(child), Ok(LEN));
                assert_eq!(table.free_pages(), free - PAGES);
                table.erase(child).unwrap();
            }
            total
        });
        table.erase(parent).unwrap();
    });
    group.finish();

    let mut group = c.benchmark_group("page_table/token");
    group.bench_function("grow", |b| {
        // One token of one sequence: reserve and advance; a page is taken every 16th time.
        b.iter_custom(|n| {
            let mut total = Duration::ZERO;
            let mut left = n as usize;
            while left > 0 {
                let tokens = left.min(LEN);
                let slot = table.allocate_slot().unwrap();
                let start = Instant::now();
                for len in 1..=tokens {
                    let _ = black_box(table.reserve(slot, black_box(len))).unwrap();
                    table.advance(slot, 1).unwrap();
                }
                total += start.elapsed();
                assert_eq!(table.len(slot), Ok(tokens));
                table.erase(slot).unwrap();
                left -= tokens;
            }
            total
        });
    });
    assert_eq!(table.free_pages(), free);
    table.check_integrity().unwrap();
    group.finish();
}

fn lookups(c: &mut Criterion) {
    if !benches::selected("page_table/4096_random_lookups") {
        return;
    }
    let table = half_full_table();
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    let slots: Vec<Slot> = table.live_slots().collect();
    let queries: Vec<(Slot, usize)> = (0..4_096)
        .map(|_| {
            (
                slots[rng.random_range(0..slots.len())],
                rng.random_range(0..65 * PAGE_SIZE),
            )
        })
        .collect();
    let places: Vec<usize> = queries
        .iter()
        .map(|&(slot, position)| table.physical(slot, position).unwrap())
        .collect();
    // Nobody shares pages here, so places of different queries differ.
    let distinct = |mut values: Vec<usize>| {
        values.sort_unstable();
        values.dedup();
        values.len()
    };
    let asked = queries
        .iter()
        .map(|&(slot, position)| slot.index() * 65 * PAGE_SIZE + position)
        .collect();
    assert_eq!(distinct(places.clone()), distinct(asked));
    let sum: usize = places.iter().sum();
    let logical: usize = queries.iter().map(|&(_, position)| position / PAGE_SIZE).sum();

    let mut group = c.benchmark_group("page_table/4096_random_lookups");
    group.throughput(Throughput::Elements(queries.len() as u64));
    group.bench_function("logical_to_physical", |b| {
        b.iter(|| {
            let lookups = black_box(&queries)
                .iter()
                .filter_map(|&(slot, position)| table.physical(slot, position));
            assert_eq!(lookups.sum::<usize>(), sum);
        });
    });
    let pages: Vec<(Slot, PageId)> = queries
        .iter()
        .zip(&places)
        .map(|(&(slot, _), &place)| (slot, PageId::new((place / PAGE_SIZE) as u32)))
        .collect();
    group.bench_function("physical_to_logical", |b| {
        b.iter(|| {
            let lookups = black_box(&pages)
                .iter()
                .filter_map(|&(slot, page)| table.logical_page(slot, page));
            assert_eq!(lookups.sum::<usize>(), logical);
        });
    });
    let slot = slots[0];
    let mut places = Vec::with_capacity(1_024);
    group.throughput(Throughput::Elements(1_024));
    group.bench_function("write_positions_of_1024", |b| {
        // In place: the sequence has 1,040 tokens and shares no page.
        b.iter(|| {
            places.clear();
            table.write_positions(slot, 0..1_024, &mut places).unwrap();
            assert_eq!(places.last().copied(), table.physical(slot, 1_023));
        });
    });
    group.finish();
}

criterion_group!(benches, sequences, lookups);
criterion_main!(benches);
