//! The model on a GPU: weights, golden logits, graphs against eager runs, and what padding may touch.
#![cfg(feature = "cuda")]

mod gpu_support;

use std::time::{Duration, Instant};

use cuda_graphs::{CacheLocation, Compiler, CompilerOptions, cases, few_cases};
use gpu_support::{Gpu, POISON, config, repository, rng, tuned};
use half::bf16;
use lora_merge::cuda::MergeKernels;
use paged_kv::{PageTable, Slot};
use qwen3_model::cuda::{CudaBackend, CudaOptions, DecodeRow, SampledToken, Stage, WeightSource};
use qwen3_model::sampling::Sampling;
use qwen3_model::{
    Backend, LogitRows, Projection, Qwen3Config, SequenceChunk, StepBatch, StepPlanner, Weights,
};
use rand::Rng;
use rand::seq::SliceRandom;

/// A backend with the page table that drives it.
struct Rig {
    backend: CudaBackend,
    table: PageTable,
    planner: StepPlanner,
}

impl Rig {
    fn new(gpu: &Gpu, config: &Qwen3Config, weights: WeightSource<'_>, options: CudaOptions) -> Self {
        let backend = CudaBackend::new(&gpu.device, &gpu.compiler, config.clone(), weights, options).unwrap();
        let table = PageTable::new(options.page_table()).unwrap();
        Self {
            backend,
            table,
            planner: StepPlanner::new(),
        }
    }

    /// The bundled model.
    fn tiny(gpu: &Gpu, options: CudaOptions) -> Self {
        let (config, weights) = gpu_support::tiny();
        Self::new(gpu, &config, WeightSource::Given(&weights), options)
    }

    fn slot(&mut self) -> Slot {
        self.table.allocate_slot().unwrap()
    }

    /// Feeds tokens to the ends of sequences, in one step. Logits of all rows, or of the last row of each.
    fn feed(&mut self, parts: &[(Slot, &[u32])], rows: LogitRows) -> Vec<f32> {
        let mut token_ids = Vec::new();
        let mut chunks = Vec::new();
        for (slot, tokens) in parts {
            let start = self.table.len(*slot).unwrap();
            let reservation = self.table.reserve(*slot, start + tokens.len()).unwrap();
            assert!(reservation.copy.is_none());
            self.table.advance(*slot, tokens.len()).unwrap();
            token_ids.extend_from_slice(tokens);
            chunks.push(SequenceChunk {
                slot: *slot,
                start,
                len: tokens.len(),
                wants_logits: true,
            });
        }
        self.backend.sync_pages(&mut self.table).unwrap();
        let batch = StepBatch {
            token_ids: &token_ids,
            chunks: &chunks,
        };
        let plan = self
            .planner
            .plan(self.backend.config(), &batch, &self.table, rows)
            .unwrap();
        match rows {
            LogitRows::All => self.backend.step(&plan).unwrap(),
            LogitRows::Wanted => {
                let greedy = vec![Sampling::GREEDY; parts.len()];
                assert_eq!(self.backend.prefill(&plan, &greedy).unwrap(), parts.len());
            }
        }
        self.backend.read_logits().unwrap().to_vec()
    }

    /// The decode rows of sequences, their next position reserved.
    fn rows(&mut self, slots: &[Slot]) -> Vec<DecodeRow> {
        let rows = slots.iter().map(|&slot| {
            let position = self.table.len(slot).unwrap();
            let _ = self.table.reserve(slot, position + 1).unwrap();
            self.table.advance(slot, 1).unwrap();
            DecodeRow::greedy(slot.index(), position)
        });
        let rows = rows.collect();
        self.backend.sync_pages(&mut self.table).unwrap();
        rows
    }

    fn decode(&mut self, slots: &[Slot]) -> Vec<SampledToken> {
        let rows = self.rows(slots);
        self.backend.decode(&rows).unwrap();
        let pending = self.backend.read_back(0, rows.len()).unwrap();
        self.backend.collect(pending).unwrap()
    }
}

fn options(max_batch_size: usize, page_size: usize) -> CudaOptions {
    tuned(CudaOptions {
        max_tokens: 2048,
        max_batch_size,
        max_seq_length: 512,
        n_pages: 1 + max_batch_size * 512 / page_size,
        page_size,
        ..CudaOptions::default()
    })
}

fn parts<'a>(slots: &[Slot], tokens: &'a [Vec<u32>]) -> Vec<(Slot, &'a [u32])> {
    slots
        .iter()
        .copied()
        .zip(tokens.iter().map(Vec::as_slice))
        .collect()
}

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&x| f64::from(x - max).exp()).sum();
    logits.iter().map(|&x| f64::from(x - max) - sum.ln()).collect()
}

fn prompts(seed: u64, n: usize) -> Vec<Vec<u32>> {
    let mut rng = rng(seed);
    (0..n)
        .map(|_| {
            (0..rng.random_range(1..if few_cases() { 12 } else { 90 }))
                .map(|_| rng.random_range(5..560))
                .collect()
        })
        .collect()
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn random_weights_are_those_of_the_cpu_and_uploads_keep_every_bit() {
    let gpu = Gpu::open();
    // More than one chunk of random numbers per matrix, and sizes that are no power of two.
    let config = config(520, 128, 6, 2);
    let weights = Weights::random(&config, 42);
    for source in [WeightSource::Random(42), WeightSource::Given(&weights)] {
        let backend =
            CudaBackend::new(&gpu.device, &gpu.compiler, config.clone(), source, options(4, 16)).unwrap();
        assert_eq!(backend.weight_bytes(), weights.bytes());
        assert_eq!(
            gpu.stream.download(backend.embedding()).unwrap(),
            weights.embed_tokens.data()
        );
        for (layer, expected) in weights.layers.iter().enumerate() {
            for projection in Projection::ALL {
                let found = gpu
                    .stream
                    .download(backend.projection(layer, projection).unwrap())
                    .unwrap();
                assert!(
                    found == expected.projection(projection).data(),
                    "layer {layer}, {projection:?}"
                );
            }
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn golden_logits_within_what_bf16_allows() {
    let gpu = Gpu::open();
    let bytes = std::fs::read(repository().join("fixtures/golden/logits-base.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    for page_size in [16, 128] {
        let mut rig = Rig::tiny(&gpu, options(16, page_size));
        let vocab = rig.backend.config().vocab_size;
        let (mut sum, mut largest, mut count, mut agree, mut rows) = (0f64, 0f64, 0usize, 0usize, 0usize);
        for i in 0..if few_cases() { 3 } else { usize::MAX } {
            let Ok(ids) = file.tensor(&format!("{i}.ids")) else {
                break;
            };
            let width = ids.data().len() / ids.shape().iter().product::<usize>();
            let ids: Vec<u32> = ids
                .data()
                .chunks_exact(width)
                .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect();
            let golden: Vec<f32> = file
                .tensor(&format!("{i}.logits"))
                .unwrap()
                .data()
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect();
            let slot = rig.slot();
            let logits = rig.feed(&[(slot, &ids)], LogitRows::All);
            rig.table.erase(slot).unwrap();
            assert_eq!(logits.len(), golden.len(), "prompt {i}");
            for (ours, golden) in logits.chunks(vocab).zip(golden.chunks(vocab)) {
                let best = |x: &[f32]| (0..x.len()).max_by(|&a, &b| x[a].total_cmp(&x[b])).unwrap();
                agree += usize::from(best(ours) == best(golden));
                rows += 1;
                let chosen = best(golden);
                let difference = (log_softmax(ours)[chosen] - log_softmax(golden)[chosen]).abs();
                assert!(difference.is_finite(), "prompt {i}");
                (sum, count) = (sum + difference, count + 1);
                largest = largest.max(difference);
            }
        }
        let mean = sum / count as f64;
        eprintln!(
            "page size {page_size}: {rows} rows, best token agrees in {agree}, log-probability off by {mean:.5}, at most {largest:.4}"
        );
        assert!(count > 0);
        assert!(mean < 0.05, "mean {mean}");
        assert!(agree * 100 >= rows * 97, "{agree} of {rows}");
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn replay_equals_eager_bit_for_bit_in_every_batch_from_1_to_64_and_in_larger_buckets() {
    let gpu = Gpu::open();
    // One batch for each form of the products.
    let larger = [256, 241, 224, 200, 192, 170, 160, 129, 128, 112, 96, 70];
    let batches = match few_cases() {
        true => vec![40, 20, 3],
        false => larger.into_iter().chain((1..=64).rev()).collect(),
    };
    let most = batches[0];
    let mut rig = Rig::tiny(&gpu, options(most, 16));
    rig.backend.capture().unwrap();
    eprintln!("{}", rig.backend.capture_report().unwrap());
    let prompts = prompts(3, most);
    let slots: Vec<Slot> = prompts.iter().map(|_| rig.slot()).collect();
    for (&slot, prompt) in slots.iter().zip(&prompts) {
        rig.feed(&[(slot, prompt)], LogitRows::Wanted);
    }
    for n in batches {
        let rows = rig.rows(&slots[most - n..]);
        let report = rig.backend.verify_decode(&rows).unwrap();
        assert!(report.changed > 0, "{n} rows: the step changed nothing");
        // And a plain replay follows from the state that the check left.
        let tokens = rig.decode(&slots[most - n..]);
        assert!(
            tokens.iter().all(|t| t.logprob.is_finite() && t.token < 1024),
            "{n} rows"
        );
    }
}

/// Decodes `steps` tokens of `n` sequences, then feeds what came out as prompts: what log-probabilities differ by on average and at
/// most, and how far those of a row lie apart (their standard deviation).
fn decoded_against_fed(mut rig: Rig, capture: bool, n: usize, steps: usize) -> [f64; 3] {
    if capture {
        rig.backend.capture().unwrap();
    }
    let vocab = rig.backend.config().vocab_size;
    let mut prompts = prompts(5, n);
    let ids = prompts.iter_mut().flatten();
    ids.for_each(|id| *id %= vocab as u32);
    let slots: Vec<Slot> = prompts.iter().map(|_| rig.slot()).collect();
    let parts = parts(&slots, &prompts);
    let mut sequences: Vec<Vec<u32>> = prompts.clone();
    let mut logprobs: Vec<Vec<f32>> = vec![Vec::new(); n];
    let mut take = |sampled: Vec<SampledToken>| {
        for (i, sampled) in sampled.into_iter().enumerate() {
            sequences[i].push(sampled.token);
            logprobs[i].push(sampled.logprob);
        }
    };
    // A step takes 2,048 tokens.
    let mut first = Vec::new();
    for parts in parts.chunks(20) {
        rig.feed(parts, LogitRows::Wanted);
        let pending = rig.backend.read_back(parts.len(), 0).unwrap();
        first.extend(rig.backend.collect(pending).unwrap());
    }
    take(first);
    for _ in 0..steps {
        take(rig.decode(&slots));
    }
    let (mut differences, mut spread) = (Vec::new(), 0.0);
    let mut compared = 0;
    let each = sequences.iter().zip(&logprobs).zip(&prompts);
    for ((sequence, logprobs), prompt) in each.step_by(if few_cases() { 8 } else { 1 }) {
        compared += 1;
        let slot = rig.slot();
        let logits = rig.feed(&[(slot, sequence)], LogitRows::All);
        rig.table.erase(slot).unwrap();
        let rows = logits.chunks(vocab).skip(prompt.len() - 1);
        for ((row, &token), &logprob) in rows.zip(&sequence[prompt.len()..]).zip(logprobs) {
            let fed = log_softmax(row);
            differences.push((fed[token as usize] - f64::from(logprob)).abs());
            let mean = fed.iter().sum::<f64>() / vocab as f64;
            spread += (fed.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / vocab as f64).sqrt();
        }
    }
    assert_eq!(differences.len(), compared * (steps + 1));
    let mean = differences.iter().sum::<f64>() / differences.len() as f64;
    let largest = differences.iter().copied().fold(0.0, f64::max);
    let spread = spread / differences.len() as f64;
    eprintln!(
        "{n} rows, captured {capture}: off by {mean:.5} on average, {largest:.4} at most, of {spread:.4}"
    );
    [mean, largest, spread]
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn decoding_continues_as_if_the_tokens_had_been_prompts() {
    let gpu = Gpu::open();
    // Rows and steps; products of more than 16, 64, 128 and 192 rows go through other kernels.
    let batches = [
        (5, 40),
        (20, 20),
        (50, 10),
        (75, 10),
        (120, 10),
        (180, 5),
        (250, 5),
    ];
    let all = [false, true]
        .into_iter()
        .flat_map(|capture| batches.map(|batch| (capture, batch)));
    let chosen = match few_cases() {
        true => vec![(false, (75, 1)), (false, (20, 2)), (true, (5, 3))],
        false => all.collect(),
    };
    for (capture, (n, steps)) in chosen {
        let rig = Rig::tiny(&gpu, options(n + 3, 32));
        // The same numbers, rounded at other places.
        let [mean, largest, _] = decoded_against_fed(rig, capture, n, steps);
        assert!(mean < 0.05 && largest < 1.0, "mean {mean}, largest {largest}");
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn heads_that_fill_the_device_decode_as_if_the_tokens_had_been_prompts() {
    let gpu = Gpu::open();
    // As many heads as Qwen3-4B has.
    let config = config(256, 128, 32, 8);
    let all = [
        (false, 40, 5),
        (true, 64, 5),
        (false, 75, 5),
        (true, 96, 5),
        (true, 120, 5),
        (false, 180, 3),
        (true, 250, 5),
    ];
    for (capture, n, steps) in if few_cases() {
        vec![(false, 40, 1), (false, 130, 1)]
    } else {
        all.to_vec()
    } {
        let rig = Rig::new(&gpu, &config, WeightSource::Random(7), options(n + 3, 32));
        let [mean, _, spread] = decoded_against_fed(rig, capture, n, steps);
        assert!(mean < 0.05 * spread, "mean {mean} of {spread}");
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn large_steps_rotate_and_write_the_cache_within_qkv_where_heads_fill_the_device() {
    let gpu = Gpu::open();
    for (heads, kv_heads, within) in [(32, 8, true), (4, 2, false)] {
        let config = config(256, 128, heads, kv_heads);
        let mut rig = Rig::new(&gpu, &config, WeightSource::Random(7), options(256, 32));
        for n in cases([65, 96, 97, 130, 200, 256]) {
            let rows = vec![DecodeRow::greedy(0, 0); n];
            let stages = [Some(Stage::Qkv), Some(Stage::Rope)];
            let times = rig.backend.profile_stages(&rows, &stages).unwrap();
            assert!(times[0].nodes >= config.n_layers, "{n} rows: {times:?}");
            assert_eq!(times[1].nodes < config.n_layers, within, "{n} rows: {times:?}");
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn padded_rows_change_no_real_page_and_unowned_pages_may_hold_nan() {
    let gpu = Gpu::open();
    let mut rig = Rig::tiny(&gpu, options(16, 16));
    rig.backend.capture().unwrap();
    rig.backend
        .cache()
        .fill_bytes(rig.backend.stream(), POISON)
        .unwrap();
    let prompts = prompts(9, 5);
    let slots: Vec<Slot> = prompts.iter().map(|_| rig.slot()).collect();
    let parts = parts(&slots, &prompts);
    rig.feed(&parts, LogitRows::Wanted);
    let layout = *rig.backend.kv_layout();
    let (positions, head) = (layout.n_pages * layout.page_size, layout.head_dim);
    for _ in 0..if few_cases() { 3 } else { 20 } {
        // Five rows in the bucket of eight.
        let rows = rig.rows(&slots);
        let stream = rig.backend.stream().clone();
        let read = |rig: &Rig| -> Vec<(Vec<bf16>, Vec<bf16>)> {
            let layer = |layer| rig.backend.cache().download_layer(&stream, layer).unwrap();
            (0..layout.n_layers).map(layer).collect()
        };
        let before = read(&rig);
        rig.backend.decode(&rows).unwrap();
        let pending = rig.backend.read_back(0, rows.len()).unwrap();
        let sampled = rig.backend.collect(pending).unwrap();
        assert!(
            sampled.iter().all(|s| s.logprob.is_finite()),
            "NaN of an unowned place was read"
        );
        let written: Vec<usize> = rows
            .iter()
            .zip(&slots)
            .map(|(row, &slot)| rig.table.physical(slot, row.position).unwrap())
            .collect();
        for ((k0, v0), (k1, v1)) in before.iter().zip(&read(&rig)) {
            for (before, after) in [(k0, k1), (v0, v1)] {
                let pairs = before.chunks(head).zip(after.chunks(head)).enumerate();
                for (place, (before, after)) in pairs {
                    let position = place % positions;
                    let same = before.iter().zip(after).all(|(a, b)| a.to_bits() == b.to_bits());
                    let own = written.contains(&position);
                    assert!(
                        same || own || position < layout.page_size,
                        "place {position} was changed"
                    );
                    assert!(
                        !own || after.iter().all(|x| x.is_finite()),
                        "place {position} was not written"
                    );
                }
            }
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn where_pages_and_slots_lie_changes_no_bit() {
    let gpu = Gpu::open();
    let prompts = prompts(11, 6);
    let mut rig = Rig::tiny(&gpu, options(16, 16));
    rig.backend.capture().unwrap();
    let mut results: Vec<(Vec<u32>, Vec<SampledToken>)> = Vec::new();
    for seed in 0..3 {
        // Other sequences take and give back slots and pages first, so that the pool is out of order.
        let mut rng = rng(seed);
        let mut others: Vec<Slot> = (0..10 * seed).take(10).map(|_| rig.slot()).collect();
        for &slot in &others {
            let _ = rig.table.reserve(slot, rng.random_range(1..200)).unwrap();
        }
        others.shuffle(&mut rng);
        for slot in others {
            rig.table.erase(slot).unwrap();
        }
        let slots: Vec<Slot> = prompts.iter().map(|_| rig.slot()).collect();
        let parts = parts(&slots, &prompts);
        let logits = rig
            .feed(&parts, LogitRows::Wanted)
            .iter()
            .map(|x| x.to_bits())
            .collect();
        let decoded = (0..10).flat_map(|_| rig.decode(&slots)).collect();
        results.push((logits, decoded));
        for slot in slots {
            rig.table.erase(slot).unwrap();
        }
    }
    for other in &results[1..] {
        assert!(results[0] == *other, "placement changed the result");
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn identical_rows_of_a_batch_give_identical_results() {
    let gpu = Gpu::open();
    let mut rig = Rig::tiny(&gpu, options(16, 16));
    rig.backend.capture().unwrap();
    let prompt = &prompts(13, 1)[0];
    let slots: Vec<Slot> = (0..12).map(|_| rig.slot()).collect();
    for &slot in &slots {
        rig.feed(&[(slot, prompt)], LogitRows::Wanted);
    }
    for step in 0..30 {
        let sampled = rig.decode(&slots);
        assert!(sampled.iter().all(|row| *row == sampled[0]), "step {step}");
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn sizes_that_cannot_work_are_refused_before_anything_is_allocated() {
    let gpu = Gpu::open();
    let small = config(256, 128, 4, 2);
    let good = options(4, 16);
    let refused = |config: &Qwen3Config, options: CudaOptions| {
        CudaBackend::new(
            &gpu.device,
            &gpu.compiler,
            config.clone(),
            WeightSource::Random(0),
            options,
        )
        .is_err()
    };
    assert!(!refused(&small, good));
    for bad in [
        CudaOptions { page_size: 8, ..good },
        CudaOptions {
            page_size: 48,
            ..good
        },
        CudaOptions { page_size: 0, ..good },
        CudaOptions { n_pages: 1, ..good },
        CudaOptions {
            max_batch_size: 0,
            ..good
        },
        CudaOptions {
            max_tokens: 0,
            ..good
        },
        CudaOptions {
            max_seq_length: 1 << 20,
            ..good
        },
        CudaOptions {
            max_batch_size: usize::MAX,
            ..good
        },
    ] {
        assert!(refused(&small, bad), "{bad:?}");
    }
    let mut rig = Rig::new(&gpu, &small, WeightSource::Random(1), good);
    let row = DecodeRow::greedy;
    assert!(
        rig.backend.decode(&[row(5, 0)]).is_err(),
        "a slot outside the table"
    );
    assert!(
        rig.backend.decode(&[row(1, 512)]).is_err(),
        "a position outside the table"
    );
    assert!(
        rig.backend.decode(&[row(1, 0); 5]).is_err(),
        "more rows than the largest batch"
    );
    assert!(
        rig.backend.verify_decode(&[row(1, 0)]).is_err(),
        "nothing was captured"
    );
    assert!(rig.backend.decode(&[]).is_ok());
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn the_first_start_takes_seconds_and_later_ones_less_than_one() {
    let gpu = Gpu::open();
    let folder = tempfile::tempdir().unwrap();
    let (config, _) = gpu_support::tiny();
    // Every kernel that an engine with adapters loads.
    let start = || {
        let options = CompilerOptions {
            cache: CacheLocation::Folder(folder.path().to_path_buf()),
            ..CompilerOptions::default()
        };
        let started = Instant::now();
        let compiler = Compiler::with_options(&options).unwrap();
        let weights = WeightSource::Random(1);
        CudaBackend::new(
            &gpu.device,
            &compiler,
            config.clone(),
            weights,
            self::options(64, 64),
        )
        .unwrap();
        MergeKernels::load(&compiler, &gpu.device).unwrap();
        started.elapsed()
    };
    let (first, later) = (start(), start());
    eprintln!("first start {first:.2?}, later {later:.2?}");
    if !few_cases() {
        assert!(first < Duration::from_secs(20), "first start took {first:.2?}");
        assert!(later < Duration::from_secs(1), "a later start took {later:.2?}");
    }
}
