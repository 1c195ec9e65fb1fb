//! What the crates do on a GPU: attention over pages, the page table's mirror, merging an adapter, replaying a graph, and
//! decode steps of Qwen3-0.6B's shape.
//!
//! `cargo bench -p benches --bench on_gpu`
//!
//! Times are the device's own, between two events around a run of launches, but for the mirror and the decode step, where
//! the host's part counts.

use std::time::{Duration, Instant};

use block_mask::cuda::{
    AttentionShape, DecodeArgs, DecodeAttention, DecodeLimits, DecodeOptions, Functions, PrefillArgs,
    PrefillAttention, PrefillChunk, PrefillLimits, TileOptions,
};
use criterion::{Bencher, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use cuda_graphs::{
    BucketSet, CaptureOptions, Compiler, Device, DeviceBuffer, Error, Event, GraphCache, Matmul, MatmulDims,
    Rows, Stream,
};
use half::bf16;
use lora_merge::cuda::{MergeKernels, MergePlan, MergeTarget, MergeWorkspace};
use lora_merge::{LowRankTerm, ModuleUpdate, merge_into};
use paged_kv::cuda::PageTableMirror;
use paged_kv::{PageTable, PageTableConfig, Slot};
use qwen3_model::cuda::{CudaBackend, CudaOptions, DecodeRow, SampledToken, WeightSource};
use qwen3_model::sampling::Sampling;
use qwen3_model::{LogitRows, Qwen3Config, SequenceChunk, StepBatch, StepPlanner};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

const PAGE: usize = 64;
/// Attention of Qwen3-4B.
const HEADS: usize = 32;
const KV_HEADS: usize = 8;
const D: usize = 128;

struct Gpu {
    device: Device,
    stream: Stream,
    compiler: Compiler,
}

/// `None` if nothing of `group` is selected, or if there is no GPU, which is said.
fn gpu(group: &str) -> Option<Gpu> {
    if !benches::selected(group) {
        return None;
    }
    let device = match Device::open(0) {
        Ok(device) => device,
        Err(error @ (Error::NoDriver { .. } | Error::NoDevice { .. })) => {
            eprintln!("No GPU for {group}: {error}");
            return None;
        }
        Err(error) => panic!("the GPU cannot be used: {error}"),
    };
    Some(Gpu {
        stream: Stream::new(&device).unwrap(),
        compiler: Compiler::new().unwrap(),
        device,
    })
}

impl Gpu {
    /// Device time of as many launches as the bencher wants.
    fn time(&self, bencher: &mut Bencher<'_>, mut launch: impl FnMut()) {
        let (begin, end) = (
            Event::new(&self.device).unwrap(),
            Event::new(&self.device).unwrap(),
        );
        bencher.iter_custom(|launches| {
            self.stream.record(&begin).unwrap();
            for _ in 0..launches {
                launch();
            }
            self.stream.record(&end).unwrap();
            end.synchronize().unwrap();
            Duration::from_secs_f64(f64::from(begin.elapsed_ms(&end).unwrap()) / 1e3)
        });
    }

    fn put(&self, values: &[bf16]) -> DeviceBuffer<bf16> {
        DeviceBuffer::from_slice(&self.stream, values).unwrap()
    }

    fn random(&self, random: &mut ChaCha8Rng, n: usize) -> DeviceBuffer<bf16> {
        self.put(&uniform(random, n))
    }
}

fn uniform(random: &mut ChaCha8Rng, n: usize) -> Vec<bf16> {
    (0..n)
        .map(|_| bf16::from_f32(random.random_range(-1.0f32..1.0)))
        .collect()
}

/// Keys and values of sequences of one length in pages. All values of sequence `i` are `i + 1`, and so is whatever attention
/// over it gives.
struct Sequences {
    lens: Vec<usize>,
    shape: AttentionShape,
    width: usize,
    table: DeviceBuffer<i32>,
    k: DeviceBuffer<bf16>,
    v: DeviceBuffer<bf16>,
}

impl Sequences {
    fn new(gpu: &Gpu, random: &mut ChaCha8Rng, batch: usize, len: usize) -> Self {
        let width = len.div_ceil(PAGE);
        let n_pages = 1 + batch * width;
        // Page 1 + p * batch + i is page p of sequence i: no sequence is in one piece.
        let owner = |page: usize| if page == 0 { 0 } else { (page - 1) % batch + 1 };
        let head: Vec<bf16> = (0..n_pages)
            .flat_map(|page| std::iter::repeat_n(bf16::from_f32(owner(page) as f32), PAGE * D))
            .collect();
        let row = |i: usize| (0..width).map(move |p| (1 + p * batch + i) as i32);
        let table: Vec<i32> = std::iter::repeat_n(0, width)
            .chain((0..batch).flat_map(row))
            .collect();
        Self {
            lens: vec![len; batch],
            shape: AttentionShape {
                heads: HEADS,
                kv_heads: KV_HEADS,
                head_dim: D,
                page_size: PAGE,
                n_pages,
            },
            width,
            table: DeviceBuffer::from_slice(&gpu.stream, &table).unwrap(),
            k: gpu.random(random, KV_HEADS * n_pages * PAGE * D),
            v: gpu.put(&head.repeat(KV_HEADS)),
        }
    }

    /// Rows of `rows` tokens each, of which each must be its sequence's number.
    fn check(&self, gpu: &Gpu, out: &DeviceBuffer<bf16>, rows: usize) {
        let out = gpu.stream.download(out).unwrap();
        for (i, sequence) in out.chunks(rows * HEADS * D).enumerate() {
            let expected = (i + 1) as f32;
            let wrong = sequence
                .iter()
                .find(|x| (x.to_f32() - expected).abs() > 0.01 * expected);
            assert_eq!(wrong, None, "sequence {i} gives {expected}");
        }
    }
}

fn attention(c: &mut Criterion) {
    let mut random = ChaCha8Rng::seed_from_u64(1);
    if let Some(gpu) = gpu("attention/gpu_decode") {
        let mut group = c.benchmark_group("attention/gpu_decode");
        for (batch, len) in [(1, 4096), (16, 1024), (64, 1024), (64, 4096)] {
            let sequences = Sequences::new(&gpu, &mut random, batch, len);
            group.throughput(Throughput::Bytes((2 * batch * len * KV_HEADS * D * 2) as u64));
            group.bench_function(format!("{batch}_of_{len}"), |b| {
                decode_attention(&gpu, &sequences, b)
            });
        }
        group.finish();
    }
    if let Some(gpu) = gpu("attention/gpu_prefill") {
        let mut group = c.benchmark_group("attention/gpu_prefill");
        for (batch, len) in [(1, 4096), (16, 256)] {
            let sequences = Sequences::new(&gpu, &mut random, batch, len);
            group.throughput(Throughput::Elements((batch * len) as u64));
            group.bench_function(format!("{batch}_of_{len}"), |b| {
                prefill_attention(&gpu, &sequences, b)
            });
        }
        group.finish();
    }
}

fn decode_attention(gpu: &Gpu, sequences: &Sequences, bencher: &mut Bencher<'_>) {
    let (device, batch) = (&gpu.device, sequences.lens.len());
    let limits = DecodeLimits {
        max_rows: batch,
        n_slots: batch + 1,
        max_pages_per_slot: sequences.width,
    };
    let (shape, options) = (
        sequences.shape,
        DecodeOptions::for_device(device.info(), &sequences.shape),
    );
    let none = Functions::none();
    let attention =
        DecodeAttention::new(device, &gpu.compiler, shape, limits, None, None, none, options).unwrap();
    let integers = |values: Vec<i32>| DeviceBuffer::from_slice(&gpu.stream, &values).unwrap();
    let slots = integers((1..=batch as i32).collect());
    let lengths = integers(sequences.lens.iter().map(|&len| len as i32).collect());
    let q = gpu.put(&uniform(&mut ChaCha8Rng::seed_from_u64(2), batch * HEADS * D));
    let out = DeviceBuffer::zeroed(device, q.len()).unwrap();
    let plan = attention
        .plan(&gpu.stream, slots.as_slice(), lengths.as_slice(), 0)
        .unwrap();
    let args = DecodeArgs {
        q: q.as_slice(),
        q_row_stride: HEADS * D,
        k: sequences.k.as_slice(),
        v: sequences.v.as_slice(),
        page_table: sequences.table.as_slice(),
        out: out.as_slice(),
        lse: None,
    };
    gpu.time(bencher, || plan.run(&gpu.stream, &args).unwrap());
    sequences.check(gpu, &out, 1);
}

fn prefill_attention(gpu: &Gpu, sequences: &Sequences, bencher: &mut Bencher<'_>) {
    let (device, batch, len) = (&gpu.device, sequences.lens.len(), sequences.lens[0]);
    let limits = PrefillLimits {
        max_tokens: batch * len,
        max_chunks: batch,
        n_slots: batch + 1,
        max_pages_per_slot: sequences.width,
    };
    let (shape, options, none) = (
        sequences.shape,
        TileOptions::for_device(device.info()),
        Functions::none(),
    );
    let mut attention =
        PrefillAttention::new(device, &gpu.compiler, shape, limits, None, None, none, options).unwrap();
    let chunks: Vec<_> = (0..batch)
        .map(|i| PrefillChunk {
            slot: Slot::new(i as u32 + 1),
            q_start: i * len,
            q_len: len,
            position: 0,
        })
        .collect();
    let q = gpu.put(&uniform(
        &mut ChaCha8Rng::seed_from_u64(3),
        batch * len * HEADS * D,
    ));
    let out = DeviceBuffer::zeroed(device, q.len()).unwrap();
    let plan = attention.plan(&gpu.stream, &chunks).unwrap();
    let args = PrefillArgs {
        q: q.as_slice(),
        q_token_stride: HEADS * D,
        k: sequences.k.as_slice(),
        v: sequences.v.as_slice(),
        page_table: sequences.table.as_slice(),
        out: out.as_slice(),
        lse: None,
    };
    gpu.time(bencher, || plan.run(&gpu.stream, &args).unwrap());
    sequences.check(gpu, &out, len);
}

fn page_table(c: &mut Criterion) {
    let Some(gpu) = gpu("page_table/gpu_mirror") else {
        return;
    };
    let mut group = c.benchmark_group("page_table/gpu_mirror");
    for changed in [1, 64, 1024] {
        let config = PageTableConfig {
            n_pages: 1 + 2 * 1024,
            page_size: PAGE,
            n_slots: 1025,
            max_pages_per_slot: 512,
        };
        let mut table = PageTable::new(config).unwrap();
        let mut mirror = PageTableMirror::new(&gpu.device, &config).unwrap();
        mirror.update(&gpu.stream, &mut table).unwrap();
        let mut slots: Vec<Slot> = (0..changed).map(|_| table.allocate_slot().unwrap()).collect();
        group.throughput(Throughput::Elements(changed as u64));
        group.bench_function(format!("{changed}_rows_changed"), |b| {
            b.iter(|| {
                // Pages that were just given back come in another order.
                for slot in slots.drain(..) {
                    table.erase(slot).unwrap();
                }
                for _ in 0..changed {
                    let slot = table.allocate_slot().unwrap();
                    let _ = table.reserve(slot, 2 * PAGE).unwrap();
                    slots.push(slot);
                }
                assert_eq!(mirror.update(&gpu.stream, &mut table).unwrap(), changed);
                gpu.stream.synchronize().unwrap();
            });
        });
        let on_device = gpu.stream.download(mirror.rows()).unwrap();
        for &slot in &slots {
            let start = slot.index() * config.max_pages_per_slot;
            assert_eq!(on_device[start..start + 2], table.row(slot)[..2]);
        }
    }
    group.finish();
}

fn lora_merge(c: &mut Criterion) {
    let Some(gpu) = gpu("lora_merge/gpu_9728_x_2560_matrix") else {
        return;
    };
    let (rows, columns) = (9728, 2560);
    let mut random = ChaCha8Rng::seed_from_u64(4);
    let w0: Vec<bf16> = uniform(&mut random, rows * columns);
    let pristine = gpu.put(&w0);
    let merged = DeviceBuffer::<bf16>::zeroed(&gpu.device, w0.len()).unwrap();
    let kernels = MergeKernels::load(&gpu.compiler, &gpu.device).unwrap();
    let mut workspace = MergeWorkspace::new(&gpu.device).unwrap();
    let targets = [MergeTarget {
        pristine: pristine.as_slice(),
        merged: merged.as_slice(),
    }];
    let mut group = c.benchmark_group("lora_merge/gpu_9728_x_2560_matrix");
    group.throughput(Throughput::Bytes(4 * w0.len() as u64));
    group.bench_function("copy", |b| {
        gpu.time(b, || gpu.stream.copy(&merged, &pristine).unwrap())
    });
    for r in [8, 32, 128] {
        let mut factor = |n: usize| {
            (0..n)
                .map(|_| random.random_range(-0.1f32..0.1))
                .collect::<Vec<_>>()
        };
        let term = LowRankTerm {
            r,
            left: factor(rows * r).into(),
            right: factor(r * columns).into(),
            scaling: 1.7,
            magnitude: None,
        };
        let update = ModuleUpdate::from_terms(rows, columns, vec![term]).unwrap();
        let modules = [("gate_proj", &update)];
        let mut plan = MergePlan::new(&kernels, &mut workspace, &gpu.stream, &modules, &targets).unwrap();
        group.bench_function(format!("rank {r}"), |b| {
            gpu.time(b, || {
                plan.run(&kernels, &mut workspace, &gpu.stream, &targets).unwrap()
            });
        });
        plan.outcomes(&gpu.stream).unwrap();
        let mut expected = vec![bf16::ZERO; w0.len()];
        merge_into(&w0, &update, &mut expected).unwrap();
        assert!(
            gpu.stream.download(&merged).unwrap() == expected,
            "not the CPU's bits at rank {r}"
        );
        workspace.recycle(plan);
    }
    group.finish();
}

/// A graph of 32 products that each wait for the one before.
fn graph_replay(c: &mut Criterion) {
    const WIDTH: usize = 256;
    const PRODUCTS: usize = 32;
    let Some(gpu) = gpu("graphs/gpu_32_small_products") else {
        return;
    };
    let stream = &gpu.stream;
    let matmul = Matmul::new(stream).unwrap();
    let identity = |i| {
        if i / WIDTH == i % WIDTH {
            bf16::ONE
        } else {
            bf16::ZERO
        }
    };
    let weights = gpu.put(&(0..WIDTH * WIDTH).map(identity).collect::<Vec<_>>());
    let buckets = BucketSet::new(64).unwrap();
    let input = Rows::<bf16>::new(stream, buckets.max(), WIDTH, bf16::ONE).unwrap();
    let buffers: Vec<DeviceBuffer<bf16>> = (0..PRODUCTS)
        .map(|_| DeviceBuffer::zeroed(&gpu.device, buckets.max() * WIDTH).unwrap())
        .collect();
    let step = |_: &Stream, input: &Rows<bf16>, bucket: usize| {
        let dims = MatmulDims {
            m: bucket,
            n: WIDTH,
            k: WIDTH,
        };
        let mut from = input.rows(0..bucket)?;
        for to in &buffers {
            let to = to.slice(..bucket * WIDTH)?;
            matmul.multiply(dims, from, &weights, to, None)?;
            from = to;
        }
        Ok::<(), Error>(())
    };
    let graphs = GraphCache::capture(stream, buckets, input, &CaptureOptions::default(), step).unwrap();
    let values: Vec<bf16> = (0..64 * WIDTH)
        .map(|i| bf16::from_f32((i % 200) as f32))
        .collect();
    graphs.buffers().upload(stream, &values).unwrap();
    let mut group = c.benchmark_group("graphs/gpu_32_small_products");
    for rows in [1, 64] {
        group.bench_function(BenchmarkId::new("replayed", rows), |b| {
            gpu.time(b, || assert!(graphs.replay(rows).unwrap() >= rows));
        });
        let out = stream.download(&buffers[PRODUCTS - 1]).unwrap();
        assert_eq!(out[..rows * WIDTH], values[..rows * WIDTH], "replayed");
        stream.fill_bytes(&buffers[PRODUCTS - 1], 0).unwrap();
        group.bench_function(BenchmarkId::new("launched", rows), |b| {
            gpu.time(b, || step(stream, graphs.buffers(), rows).unwrap());
        });
        let out = stream.download(&buffers[PRODUCTS - 1]).unwrap();
        assert_eq!(out[..rows * WIDTH], values[..rows * WIDTH], "launched");
    }
    group.finish();
}

/// Sequences with [`Decoding::CONTEXT`] tokens each, about to decode.
struct Decoding {
    backend: CudaBackend,
    table: PageTable,
    rows: Vec<DecodeRow>,
}

impl Decoding {
    const CONTEXT: usize = 512;

    fn new(gpu: &Gpu, batch: usize) -> Self {
        let config = Qwen3Config::qwen3_0_6b();
        let options = CudaOptions {
            max_tokens: 4096,
            max_batch_size: batch,
            max_seq_length: 1024,
            n_pages: 1 + batch * 1024 / PAGE,
            page_size: PAGE,
            ..CudaOptions::default()
        };
        let weights = WeightSource::Random(1);
        let mut backend = CudaBackend::new(&gpu.device, &gpu.compiler, config, weights, options).unwrap();
        backend.capture().unwrap();
        Self {
            backend,
            table: PageTable::new(options.page_table()).unwrap(),
            rows: Vec::new(),
        }
    }

    /// Computes the prompts of `batch` sequences anew.
    fn prefill(&mut self, batch: usize) {
        for row in self.rows.drain(..) {
            self.table.erase(Slot::new(row.slot as u32)).unwrap();
        }
        for i in 0..batch {
            let slot = self.table.allocate_slot().unwrap();
            let _ = self.table.reserve(slot, Self::CONTEXT + 1).unwrap();
            self.table.advance(slot, Self::CONTEXT).unwrap();
            self.backend.sync_pages(&mut self.table).unwrap();
            let ids: Vec<u32> = (0..Self::CONTEXT)
                .map(|t| ((t * 31 + i * 7) % 570) as u32)
                .collect();
            let chunk = SequenceChunk {
                slot,
                start: 0,
                len: ids.len(),
                wants_logits: true,
            };
            let batch = StepBatch {
                token_ids: &ids,
                chunks: &[chunk],
            };
            let mut planner = StepPlanner::new();
            let plan = planner
                .plan(&Qwen3Config::qwen3_0_6b(), &batch, &self.table, LogitRows::Wanted)
                .unwrap();
            assert_eq!(self.backend.prefill(&plan, &[Sampling::GREEDY]).unwrap(), 1);
            self.table.advance(slot, 1).unwrap();
            self.rows.push(DecodeRow::greedy(slot.index(), Self::CONTEXT));
        }
    }

    /// A step, always at the same positions. Its input is the token that the last one sampled.
    fn decode(&mut self) -> Vec<SampledToken> {
        self.backend.decode(&self.rows).unwrap();
        let pending = self.backend.read_back(0, self.rows.len()).unwrap();
        self.backend.collect(pending).unwrap()
    }
}

fn model(c: &mut Criterion) {
    let Some(gpu) = gpu("model/gpu_decode_random_0_6b") else {
        return;
    };
    let mut group = c.benchmark_group("model/gpu_decode_random_0_6b");
    for batch in [1, 16, 64] {
        let mut decoding = Decoding::new(&gpu, batch);
        decoding.prefill(batch);
        let tokens = |sampled: &[SampledToken]| sampled.iter().map(|s| s.token).collect::<Vec<_>>();
        let first = decoding.decode();
        assert_eq!(first.len(), batch);
        assert!(
            first
                .iter()
                .all(|sampled| sampled.logprob.is_finite() && sampled.logprob <= 0.0)
        );
        group.throughput(Throughput::Elements(batch as u64));
        group.bench_function(BenchmarkId::from_parameter(batch), |b| {
            b.iter_custom(|steps| {
                let begin = Instant::now();
                for _ in 0..steps {
                    decoding.decode();
                }
                begin.elapsed()
            });
        });
        // Nothing of what was measured is left behind: the same prompts go on as before.
        decoding.prefill(batch);
        assert_eq!(tokens(&decoding.decode()), tokens(&first));
    }
    group.finish();
}

criterion_group!(benches, attention, page_table, lora_merge, graph_replay, model);
criterion_main!(benches);
