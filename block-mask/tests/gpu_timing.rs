//! What the kernels reach on this device; prints a table. Run alone, with `--nocapture`.
#![cfg(feature = "cuda")]

mod gpu_common;

use block_mask::cuda::{
    AttentionShape, DecodeArgs, DecodeAttention, DecodeLimits, DecodeOptions, Functions, PrefillArgs,
    PrefillAttention, PrefillChunk, PrefillLimits, TileOptions,
};
use cuda_graphs::{Capture, DeviceBuffer, Event};
use gpu_common::{Gpu, Random, gpu};
use half::bf16;
use paged_kv::Slot;

const HEADS: usize = 32;
const KV_HEADS: usize = 8;
const D: usize = 128;
const PAGE: usize = 64;

/// Random values, one megabyte of them again and again: zeros would be faster than real data.
struct Source(DeviceBuffer<bf16>);

impl Source {
    fn new(gpu: &Gpu) -> Source {
        let values = Random::new(1).values(1 << 19);
        Source(DeviceBuffer::from_slice(&gpu.stream, &values).unwrap())
    }

    fn filled(&self, gpu: &Gpu, n: usize) -> DeviceBuffer<bf16> {
        let all = DeviceBuffer::<bf16>::zeroed(&gpu.device, n).unwrap();
        let first = self.0.len().min(n);
        let values = self.0.slice(..first).unwrap();
        gpu.stream.copy(all.slice(..first).unwrap(), values).unwrap();
        let mut done = first;
        while done < n {
            let next = done.min(n - done);
            gpu.stream
                .copy(all.slice(done..done + next).unwrap(), all.slice(..next).unwrap())
                .unwrap();
            done += next;
        }
        all
    }
}

/// Median milliseconds of `launches` runs of a captured graph of `per_graph` launches, per launch.
fn time(gpu: &Gpu, per_graph: usize, record: impl FnOnce()) -> f32 {
    let capture = Capture::begin(&gpu.stream).unwrap();
    record();
    let graph = capture.finish().unwrap();
    let (start, end) = (Event::new(&gpu.device).unwrap(), Event::new(&gpu.device).unwrap());
    let mut times = Vec::new();
    for round in 0..13 {
        gpu.stream.record(&start).unwrap();
        graph.launch(&gpu.stream).unwrap();
        gpu.stream.record(&end).unwrap();
        end.synchronize().unwrap();
        if round >= 3 {
            times.push(start.elapsed_ms(&end).unwrap() / per_graph as f32);
        }
    }
    times.sort_by(f32::total_cmp);
    times[times.len() / 2]
}

/// A step over sequences of the given lengths, with enough layers that their keys and values do not stay in the
/// second-level cache.
struct Step {
    shape: AttentionShape,
    limits: DecodeLimits,
    cache: Vec<(DeviceBuffer<bf16>, DeviceBuffer<bf16>)>,
    table: DeviceBuffer<i32>,
    slots: DeviceBuffer<i32>,
    lengths: DeviceBuffer<i32>,
    q: DeviceBuffer<bf16>,
    out: DeviceBuffer<bf16>,
}

impl Step {
    fn new(gpu: &Gpu, source: &Source, lens: &[usize]) -> Step {
        let batch = lens.len();
        let pages_per_slot = lens.iter().max().unwrap().div_ceil(PAGE);
        let n_pages = batch * pages_per_slot + 1;
        let per_layer = KV_HEADS * n_pages * PAGE * D;
        let layers = (256usize << 20).div_ceil(2 * per_layer).clamp(1, 36);
        let mut pages: Vec<i32> = (1..n_pages as i32).collect();
        Random::new(2).shuffle(&mut pages);
        let from = |values: &[i32]| DeviceBuffer::from_slice(&gpu.stream, values).unwrap();
        let lengths: Vec<i32> = lens.iter().map(|&len| len as i32).collect();
        let slots: Vec<i32> = (1..=batch as i32).collect();
        Step {
            shape: shape(n_pages),
            limits: DecodeLimits {
                max_rows: batch,
                n_slots: batch + 1,
                max_pages_per_slot: pages_per_slot,
            },
            cache: (0..layers)
                .map(|_| (source.filled(gpu, per_layer), source.filled(gpu, per_layer)))
                .collect(),
            table: from(&[vec![0; pages_per_slot], pages].concat()),
            slots: from(&slots),
            lengths: from(&lengths),
            q: source.filled(gpu, batch * HEADS * D),
            out: DeviceBuffer::zeroed(&gpu.device, batch * HEADS * D).unwrap(),
        }
    }

    /// Lets neighbouring rows of `group` each start with the same pages of `prefix` tokens.
    fn share(&mut self, gpu: &Gpu, group: usize, prefix: usize) {
        let (width, pages) = (self.limits.max_pages_per_slot, prefix / PAGE);
        let mut rows = gpu.stream.download(&self.table).unwrap();
        for row in 0..self.limits.max_rows {
            let (from, to) = ((row / group * group + 1) * width, (row + 1) * width);
            rows.copy_within(from..from + pages, to);
        }
        gpu.stream.upload(&self.table, &rows).unwrap();
    }

    /// Milliseconds of a launch, and the tokens of a split.
    fn time(&self, gpu: &Gpu, options: DecodeOptions) -> (f32, usize) {
        // The plan is one launch among those of all layers.
        let (device, none) = (&gpu.device, Functions::none());
        let (shape, limits) = (self.shape, self.limits);
        let attention =
            DecodeAttention::new(device, &gpu.compiler, shape, limits, None, None, none, options).unwrap();
        let launches = self.cache.len().max(12);
        let ms = time(gpu, launches, || {
            let (slots, lengths) = (self.slots.as_slice(), self.lengths.as_slice());
            let plan = attention
                .plan_shared(&gpu.stream, slots, lengths, 0, self.table.as_slice())
                .unwrap();
            for launch in 0..launches {
                let (k, v) = &self.cache[launch % self.cache.len()];
                let args = DecodeArgs {
                    q: self.q.as_slice(),
                    q_row_stride: HEADS * D,
                    k: k.as_slice(),
                    v: v.as_slice(),
                    page_table: self.table.as_slice(),
                    out: self.out.as_slice(),
                    lse: None,
                };
                plan.run(&gpu.stream, &args).unwrap();
            }
        });
        (ms, attention.split(limits.max_rows))
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU with 20 GB; measures"]
fn shared_prefixes() {
    let gpu = gpu();
    let source = Source::new(&gpu);
    let default = DecodeOptions::for_device(gpu.device.info(), &shape(1));
    let mut apart = default;
    apart.shared_prefix = None;
    eprintln!("rows  siblings  prompt  own    read per row, us    shared, us    ratio");
    for (rows, group, prompt) in [
        (64, 1, 500),
        (64, 8, 500),
        (64, 16, 500),
        (64, 8, 2000),
        (64, 16, 2000),
        (64, 64, 2000),
        (64, 2, 2000),
        (16, 16, 2000),
        (256, 16, 500),
    ] {
        for own in [16, 256] {
            let lens: Vec<usize> = (0..rows).map(|i| prompt + own + i % 7).collect();
            let mut step = Step::new(&gpu, &source, &lens);
            let (plain, _) = step.time(&gpu, apart);
            step.share(&gpu, group, prompt);
            let (hidden, _) = step.time(&gpu, apart);
            let (shared, _) = step.time(&gpu, default);
            eprintln!(
                "{rows:>4}  {group:>8}  {prompt:>6}  {own:>4}  {:>8.1} (the same pages: {:>7.1})  {:>8.1}  {:>6.2}",
                plain * 1e3,
                hidden * 1e3,
                shared * 1e3,
                hidden / shared
            );
            assert!(shared.is_finite() && shared > 0.0);
        }
    }
}

fn shape(n_pages: usize) -> AttentionShape {
    AttentionShape {
        heads: HEADS,
        kv_heads: KV_HEADS,
        head_dim: D,
        page_size: PAGE,
        n_pages,
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU with 20 GB; measures"]
fn decode_bandwidth() {
    let gpu = gpu();
    let source = Source::new(&gpu);
    let default = DecodeOptions::for_device(gpu.device.info(), &shape(1));
    eprintln!(
        "{}, decode, {HEADS}/{KV_HEADS} heads of {D}, {default:?}",
        gpu.device.info().name
    );
    eprintln!("batch  context  split  warps x stages x blocks       us    TB/s");
    let with_split = |split| {
        let mut form = default;
        form.split = Some(split);
        form
    };
    let mut narrow = default;
    (narrow.warps, narrow.stages, narrow.blocks_per_multiprocessor) = (2, 3, 4);
    let mut forms = vec![default, narrow];
    forms.extend([64, 128, 256, 512, 1024].map(with_split));
    let mixed: Vec<usize> = (0..64).map(|i| 100 + i * 389 % 1000).collect();
    let mut cases = vec![("mixed".to_owned(), mixed)];
    for (batch, context) in [
        (1, 600),
        (1, 4096),
        (1, 32_768),
        (4, 600),
        (8, 600),
        (8, 4096),
        (16, 4096),
        (32, 600),
        (64, 600),
        (64, 4096),
        (128, 600),
    ] {
        cases.push((context.to_string(), vec![context; batch]));
    }
    for (name, lens) in cases {
        let step = Step::new(&gpu, &source, &lens);
        for form in &forms {
            let (ms, split) = step.time(&gpu, *form);
            let bytes = (2 * lens.iter().sum::<usize>() * KV_HEADS * D * 2) as f64;
            let chosen = if form.split.is_none() { '*' } else { ' ' };
            eprintln!(
                "{:>5}  {name:>7}  {split:>4}{chosen}  {:>5} x {:>6} x {:>6}  {:>9.2}  {:>6.3}",
                lens.len(),
                form.warps,
                form.stages,
                form.blocks_per_multiprocessor,
                ms * 1e3,
                bytes / f64::from(ms) / 1e9
            );
            assert!(ms.is_finite() && ms > 0.0);
        }
    }
}

fn time_prefill(gpu: &Gpu, source: &Source, lens: &[usize], options: TileOptions) -> f32 {
    let width = lens.iter().max().unwrap().div_ceil(PAGE);
    let n_pages = lens.len() * width + 1;
    let shape = shape(n_pages);
    let tokens: usize = lens.iter().sum();
    let limits = PrefillLimits {
        max_tokens: tokens,
        max_chunks: lens.len(),
        n_slots: lens.len() + 1,
        max_pages_per_slot: width,
    };
    let (device, none) = (&gpu.device, Functions::none());
    let mut attention =
        PrefillAttention::new(device, &gpu.compiler, shape, limits, None, None, none, options).unwrap();
    let per_layer = KV_HEADS * n_pages * PAGE * D;
    let (k, v, q) = (
        source.filled(gpu, per_layer),
        source.filled(gpu, per_layer),
        source.filled(gpu, tokens * HEADS * D),
    );
    let out = DeviceBuffer::<bf16>::zeroed(&gpu.device, tokens * HEADS * D).unwrap();
    let mut pages: Vec<i32> = (1..n_pages as i32).collect();
    Random::new(2).shuffle(&mut pages);
    let table = DeviceBuffer::from_slice(&gpu.stream, &[vec![0; width], pages].concat()).unwrap();
    let mut q_start = 0;
    let chunks: Vec<PrefillChunk> = lens
        .iter()
        .enumerate()
        .map(|(i, &q_len)| {
            let chunk = PrefillChunk {
                slot: Slot::new(i as u32 + 1),
                q_start,
                q_len,
                position: 0,
            };
            q_start += q_len;
            chunk
        })
        .collect();
    let plan = attention.plan(&gpu.stream, &chunks).unwrap();
    gpu.stream.synchronize().unwrap();
    time(gpu, 8, || {
        for _ in 0..8 {
            let args = PrefillArgs {
                q: q.as_slice(),
                q_token_stride: HEADS * D,
                k: k.as_slice(),
                v: v.as_slice(),
                page_table: table.as_slice(),
                out: out.as_slice(),
                lse: None,
            };
            plan.run(&gpu.stream, &args).unwrap();
        }
    })
}

#[test]
#[ignore = "needs an NVIDIA GPU; measures"]
fn prefill_rate() {
    let gpu = gpu();
    let source = Source::new(&gpu);
    eprintln!(
        "{}, causal prefill, {HEADS}/{KV_HEADS} heads of {D}",
        gpu.device.info().name
    );
    eprintln!("prompts                    m x   n  warps  stages  blocks  products          us  TFLOP/s");
    let common: Vec<usize> = (0..64).map(|i| 64 + (i * 37) % 193).collect();
    for (name, lens) in [
        ("1 of 4096", vec![4096]),
        ("1 of 16384", vec![16_384]),
        ("64 of 64..256", common),
    ] {
        // Products of Q K and P V over the cells on and below the diagonal.
        let cells: usize = lens.iter().map(|len| len * (len + 1) / 2).sum();
        let flop = (4 * cells * HEADS * D) as f64;
        let mut small = TileOptions::default();
        small.block_m = 64;
        let best = TileOptions::for_device(gpu.device.info());
        let mut narrow = best;
        narrow.block_n = 64;
        for options in [TileOptions::default(), small, best, narrow] {
            let ms = time_prefill(&gpu, &source, &lens, options);
            let TileOptions {
                block_m,
                block_n,
                warps,
                stages,
                blocks_per_multiprocessor: blocks,
                warpgroup_products,
                ..
            } = options;
            let products = if warpgroup_products { "warpgroups" } else { "warps" };
            eprintln!(
                "{name:<24} {block_m:>4} x {block_n:>3}  {warps:>5}  {stages:>6}  {blocks:>6}  {products:<10}  {:>8.1}  {:>7.1}",
                ms * 1e3,
                flop / f64::from(ms) / 1e9
            );
            assert!(ms.is_finite() && ms > 0.0);
        }
    }
}
