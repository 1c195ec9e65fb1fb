//! A mask and a score function of one's own in a kernel on a GPU, over pages, checked against the CPU.
//!
//! `cargo run --release -p examples --example custom_mask_gpu`
//!
//! Without a GPU it prints the functions as the kernel gets them, in CUDA C, and says what is missing.

use block_mask::cuda::{AttentionShape, DeviceBlockMask, FlexArgs, FlexAttention, QueryLayout, TileOptions};
use block_mask::expr::{h, kv, q, score};
use block_mask::{BlockMask, FlexOptions, MaskMod, MaskShape, QueryView, ScoreMod, flex_attention};
use cuda_graphs::{Compiler, Device, DeviceBuffer, Error, Stream};
use half::bf16;
use paged_kv::{KvCache, KvDtype, KvLayout, KvSlice, PageTable, PageTableConfig};

const LEN: usize = 300;

type Result = std::result::Result<(), Box<dyn std::error::Error>>;

fn main() -> Result {
    // The first 4 keys stay visible for ever, besides the last 100.
    let mask_mod = MaskMod::causal() & (MaskMod::new(kv().lt(4))? | MaskMod::new((q() - kv()).lt(100))?);
    // Scores fall with the distance, in the second head twice as fast.
    let score_mod = ScoreMod::new(score() - (q() - kv()).to_float() * (h() + 1).to_float() * 0.01)?;
    println!(
        "{}",
        block_mask::codegen::cuda_source(&mask_mod, Some(&score_mod)).code
    );
    match Device::open(0) {
        Ok(device) => attend(&device, &mask_mod, &score_mod),
        // Not a failure of the example: there is nothing to run on.
        Err(error @ (Error::NoDriver { .. } | Error::NoDevice { .. })) => {
            eprintln!("No GPU to compute on: {error}");
            Ok(())
        }
        Err(error) => Err(error.into()),
    }
}

fn attend(device: &Device, mask_mod: &MaskMod, score_mod: &ScoreMod) -> Result {
    let (heads, kv_heads, head_dim, page_size, n_pages) = (2, 1, 64, 64, 9);
    let (n_slots, max_pages_per_slot) = (2, 8);
    let config = PageTableConfig {
        n_pages,
        page_size,
        n_slots,
        max_pages_per_slot,
    };
    let mut table = PageTable::new(config)?;
    let slot = table.allocate_slot()?;
    let _ = table.reserve(slot, LEN)?;
    table.advance(slot, LEN)?;
    let blocks = MaskShape::new(1, 1, LEN, LEN).with_blocks(128, page_size);
    let mask = BlockMask::from_fn(blocks, mask_mod.clone())?.to_physical(&table, &[slot])?;

    let (n_layers, dtype) = (1, KvDtype::Bf16);
    let layout = KvLayout {
        n_layers,
        kv_heads,
        head_dim,
        n_pages,
        page_size,
        dtype,
    };
    let mut cache = KvCache::new(layout)?;
    cache.fill(f32::NAN); // what nobody owns must not matter
    let mut places = Vec::new();
    table.write_positions(slot, 0..LEN, &mut places)?;
    let wave = |n: usize, step: f32| (0..n).map(|i| (i as f32 * step).sin()).collect::<Vec<f32>>();
    cache.write(0, &places, &wave(LEN * 64, 0.73), &wave(LEN * 64, 1.19))?;
    let layer = cache.layer(0)?;

    // On the CPU, from the same pages.
    let to_bf16 = |x: Vec<f32>| x.into_iter().map(bf16::from_f32).collect::<Vec<_>>();
    let q = to_bf16(wave(heads * LEN * 64, 0.37));
    let q_f32: Vec<f32> = q.iter().map(|x| x.to_f32()).collect();
    let view = QueryView::batched(&q_f32, 1, heads, LEN, head_dim)?;
    let mut expected = vec![0.0; view.output_len()];
    let options = FlexOptions::default();
    flex_attention(view, layer, &mask, Some(score_mod), &options, &mut expected, None)?;

    // On the GPU. The functions are compiled into the kernel; it serves every mask that has them.
    let stream = Stream::new(device)?;
    let shape = AttentionShape {
        heads,
        kv_heads,
        head_dim,
        page_size,
        n_pages,
    };
    let (compiler, tile, function) = (Compiler::new()?, TileOptions::default(), mask.mask_mod());
    let attention = FlexAttention::new(&stream, &compiler, shape, function, Some(score_mod), None, tile)?;
    let (KvSlice::Bf16(k), KvSlice::Bf16(v)) = (layer.k, layer.v) else {
        return Err("the cache is bf16".into());
    };
    let (k, v) = (
        DeviceBuffer::from_slice(&stream, k)?,
        DeviceBuffer::from_slice(&stream, v)?,
    );
    let queries = DeviceBuffer::from_slice(&stream, &q)?;
    let out = DeviceBuffer::<bf16>::zeroed(device, q.len())?;
    let args = FlexArgs {
        q: queries.as_slice(),
        out: out.as_slice(),
        layout: QueryLayout::batched(heads, LEN, head_dim),
        lse: None,
        k: k.as_slice(),
        v: v.as_slice(),
    };
    attention.run(&stream, &DeviceBlockMask::new(&stream, &mask)?, &args)?;
    let found = stream.download(&out)?;
    let errors = found.iter().zip(&expected).map(|(x, y)| (x.to_f32() - y).abs());
    let largest = errors.fold(0.0, f32::max);
    println!(
        "{}: largest difference from the CPU: {largest:.1e}",
        device.info().name
    );
    assert!(largest < 0.01, "outputs of about 1 in bf16");
    Ok(())
}
