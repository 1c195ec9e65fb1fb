//! A mask function of one's own: attention sinks with a sliding window, checked against the dense oracle.
//!
//! cargo run --release -p examples --example custom_mask

use block_mask::expr::{kv, q};
use block_mask::reference::{DenseShape, dense_attention};
use block_mask::{
    BlockMask, BlockState, ContiguousKv, FlexOptions, MaskMod, MaskShape, QueryView,
    flex_attention_contiguous,
};
use paged_kv::KvSlice;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // The first 4 keys stay visible for ever, besides the last 32.
    let sink = MaskMod::new(kv().lt(4))?;
    let window = MaskMod::new((q() - kv()).lt(32))?;
    let mask_mod = MaskMod::causal() & (sink | window);

    let len = 160;
    let mask = BlockMask::from_fn(
        MaskShape::new(1, 1, len, len).with_blocks(16, 16),
        mask_mod.clone(),
    )?;
    println!(
        "{} of 100 blocks are visited ({:.0} % sparse):",
        mask.n_blocks(),
        mask.sparsity()
    );
    for row in mask.block_states().chunks(mask.shape().kv_blocks()) {
        let symbol = |state: &BlockState| match state {
            BlockState::Empty => " ·",
            BlockState::Partial => " ▒",
            BlockState::Full => " █",
        };
        println!("{}", row.iter().map(symbol).collect::<String>());
    }

    let shape = DenseShape {
        batch: 1,
        heads: 2,
        kv_heads: 1,
        q_len: len,
        kv_len: len,
        head_dim: 8,
    };
    let wave = |n: usize, step: f32| -> Vec<f32> { (0..n).map(|i| (i as f32 * step).sin()).collect() };
    let (queries, keys, values) = (wave(2 * len * 8, 0.37), wave(len * 8, 0.73), wave(len * 8, 1.19));
    let view = QueryView::batched(&queries, 1, 2, len, 8)?;
    let source = ContiguousKv {
        k: KvSlice::F32(&keys),
        v: KvSlice::F32(&values),
        batch: 1,
        kv_heads: 1,
        len,
        head_dim: 8,
    };
    let mut out = vec![0.0; view.output_len()];
    flex_attention_contiguous(view, source, &mask, None, &FlexOptions::default(), &mut out, None)?;

    let allowed = |b, h, q, kv| mask_mod.allows(b, h, q, kv);
    let scale = 1.0 / 8f64.sqrt();
    let (expected, _) = dense_attention(
        shape,
        &queries,
        &keys,
        &values,
        scale,
        allowed,
        |score, _, _, _, _| score,
    )?;
    let errors = out
        .iter()
        .zip(&expected)
        .map(|(found, expected)| (f64::from(*found) - expected).abs());
    let largest = errors.fold(0.0, f64::max);
    println!("largest difference from dense attention in f64: {largest:.1e}");
    assert!(largest < 1e-5);
    println!(
        "\nThe function as CUDA C:\n{}",
        mask_mod.to_cuda().code.lines().rev().nth(4).unwrap_or_default()
    );
    Ok(())
}
