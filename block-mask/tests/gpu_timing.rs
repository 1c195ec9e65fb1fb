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
const PAGE: usize = 256;

/// Random values, one megabyte of them again and again: zeros would be faster than real data.
fn filled(gpu: &Gpu, n: usize) -> DeviceBuffer<bf16> {
    let block = Random::new(1).values(1 << 19);
    let all = DeviceBuffer::<bf16>::zeroed(&gpu.device, n).unwrap();
    let first = block.len().min(n);
    gpu.stream
        .upload(all.slice(..first).unwrap(), &block[..first])
        .unwrap();
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

fn time_decode(gpu: &Gpu, batch: usize, context: usize, options: DecodeOptions) -> f32 {
    let pages_per_slot = context.div_ceil(PAGE);
    let n_pages = batch * pages_per_slot + 1;
    let shape = AttentionShape {
        heads: HEADS,
        kv_heads: KV_HEADS,
        head_dim: D,
        page_size: PAGE,
        n_pages,
    };
    let limits = DecodeLimits {
        max_rows: batch,
        n_slots: batch + 1,
        max_pages_per_slot: pages_per_slot,
    };
    let attention = DecodeAttention::new(
        &gpu.device,
        &gpu.compiler,
        shape,
        limits,
        None,
        None,
        Functions::none(),
        options,
    )
    .unwrap();
    let per_layer = KV_HEADS * n_pages * PAGE * D;
    // Enough layers that their keys and values do not stay in the second-level cache.
    let layers = (256usize << 20).div_ceil(2 * per_layer).clamp(1, 36);
    let cache: Vec<_> = (0..layers)
        .map(|_| (filled(gpu, per_layer), filled(gpu, per_layer)))
        .collect();
    let mut pages: Vec<i32> = (1..n_pages as i32).collect();
    Random::new(2).shuffle(&mut pages);
    let table = [vec![0; pages_per_slot], pages].concat();
    let table = DeviceBuffer::from_slice(&gpu.stream, &table).unwrap();
    let slots: Vec<i32> = (1..=batch as i32).collect();
    let slots = DeviceBuffer::from_slice(&gpu.stream, &slots).unwrap();
    let lengths = DeviceBuffer::from_slice(&gpu.stream, &vec![context as i32; batch]).unwrap();
    let q = filled(gpu, batch * HEADS * D);
    let out = DeviceBuffer::<bf16>::zeroed(&gpu.device, batch * HEADS * D).unwrap();
    let launches = layers.max(12);
    time(gpu, launches, || {
        let plan = attention
            .plan(&gpu.stream, slots.as_slice(), lengths.as_slice(), 0)
            .unwrap();
        for launch in 0..launches {
            let (k, v) = &cache[launch % layers];
            let args = DecodeArgs {
                q: q.as_slice(),
                q_row_stride: HEADS * D,
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
#[ignore = "needs an NVIDIA GPU with 20 GB; measures"]
fn decode_bandwidth() {
    let gpu = gpu();
    let shape = AttentionShape {
        heads: HEADS,
        kv_heads: KV_HEADS,
        head_dim: D,
        page_size: PAGE,
        n_pages: 1,
    };
    let default = DecodeOptions::for_device(gpu.device.info(), &shape);
    eprintln!(
        "{}, decode, {HEADS}/{KV_HEADS} heads of {D}, {default:?}",
        gpu.device.info().name
    );
    eprintln!("batch  context  split  warps x stages x blocks       us    TB/s");
    let mut forms = vec![default];
    for (warps, stages, blocks, min_split) in [
        (4, 3, 2, 64),
        (4, 3, 2, 256),
        (4, 3, 2, 512),
        (2, 3, 4, 64),
        (2, 3, 4, 128),
        (4, 6, 1, 128),
        (8, 3, 1, 128),
    ] {
        let mut form = default;
        (
            form.warps,
            form.stages,
            form.blocks_per_multiprocessor,
            form.min_split,
        ) = (warps, stages, blocks, min_split);
        forms.push(form);
    }
    for (batch, context) in [
        (1, 512),
        (1, 4096),
        (1, 32_768),
        (16, 512),
        (16, 4096),
        (16, 32_768),
        (64, 600),
        (64, 4096),
        (64, 32_768),
    ] {
        for form in &forms {
            let ms = time_decode(&gpu, batch, context, *form);
            let bytes = (2 * batch * context * KV_HEADS * D * 2) as f64;
            eprintln!(
                "{batch:>5}  {context:>7}  {:>5}  {:>5} x {:>6} x {:>6}  {:>9.2}  {:>6.3}",
                form.min_split,
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

fn time_prefill(gpu: &Gpu, lens: &[usize], options: TileOptions) -> f32 {
    let width = lens.iter().max().unwrap().div_ceil(PAGE);
    let n_pages = lens.len() * width + 1;
    let shape = AttentionShape {
        heads: HEADS,
        kv_heads: KV_HEADS,
        head_dim: D,
        page_size: PAGE,
        n_pages,
    };
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
        filled(gpu, per_layer),
        filled(gpu, per_layer),
        filled(gpu, tokens * HEADS * D),
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
    eprintln!(
        "{}, causal prefill, {HEADS}/{KV_HEADS} heads of {D}",
        gpu.device.info().name
    );
    eprintln!("prompts                    m x   n  warps  stages  blocks        us  TFLOP/s");
    let common: Vec<usize> = (0..64).map(|i| 64 + (i * 37) % 193).collect();
    for (name, lens) in [
        ("1 of 4096", vec![4096]),
        ("1 of 16384", vec![16_384]),
        ("64 of 64..256", common),
    ] {
        // Products of Q K and P V over the cells on and below the diagonal.
        let cells: usize = lens.iter().map(|len| len * (len + 1) / 2).sum();
        let flop = (4 * cells * HEADS * D) as f64;
        for (block_m, block_n, warps, stages, blocks) in [
            (128, 64, 4, 1, 2),
            (64, 64, 4, 1, 2),
            (64, 64, 4, 2, 2),
            (128, 64, 8, 1, 1),
            (128, 64, 8, 2, 1),
            (128, 128, 8, 1, 1),
        ] {
            let mut options = TileOptions::default();
            (options.block_m, options.block_n, options.warps) = (block_m, block_n, warps);
            (options.stages, options.blocks_per_multiprocessor) = (stages, blocks);
            let ms = time_prefill(&gpu, &lens, options);
            eprintln!(
                "{name:<24} {block_m:>4} x {block_n:>3}  {warps:>5}  {stages:>6}  {blocks:>6}  {:>8.1}  {:>7.1}",
                ms * 1e3,
                flop / f64::from(ms) / 1e9
            );
            assert!(ms.is_finite() && ms > 0.0);
        }
    }
}
