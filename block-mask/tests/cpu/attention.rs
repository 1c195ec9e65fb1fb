//! `flex_attention` against the dense f64 oracle.

use crate::common::{Random, Sequences, assert_close, attend, bits, oracle, place};
use block_mask::expr::{FloatBuffer, b, h, kv, q, score};
use block_mask::{
    BlockMask, ContiguousKv, FlexOptions, MaskMod, MaskShape, PackedSequence, QueryView, ScoreMod,
    alibi_slopes, flex_attention_contiguous, paged_causal_mask,
};
use paged_kv::{KvDtype, KvSlice};
use proptest::prelude::*;

/// Mask functions of every kind: ranges, unions of ranges, scattered cells, batch- and head-dependent ones, empty rows.
fn mask_mods(kind: usize, batch: usize, len: usize) -> MaskMod {
    let lengths: Vec<i32> = (0..batch).map(|b| (len * (b + 1) / (batch + 1)) as i32).collect();
    match kind {
        0 => MaskMod::all(),
        1 => MaskMod::causal(),
        2 => MaskMod::causal() & MaskMod::sliding_window(8),
        3 => MaskMod::causal() & MaskMod::padding(lengths),
        4 => MaskMod::prefix_lm(lengths),
        5 => MaskMod::causal() & MaskMod::document((0..len).map(|i| (i / 5) as i32).collect::<Vec<_>>()),
        6 => MaskMod::new((kv() * 7 + q() * 3 + b()).rem_floor(5).lt(2)).unwrap(),
        7 => MaskMod::causal() & MaskMod::new((kv() + h()).rem_floor(3).differs(0)).unwrap(),
        8 => MaskMod::new(q().rem_floor(4).differs(1)).unwrap() & MaskMod::causal(), // some rows are empty
        9 => MaskMod::none(),
        10 => !MaskMod::causal(),
        _ => MaskMod::causal() & (MaskMod::sliding_window(6) | MaskMod::new(kv().lt(3)).unwrap()), // sink + window
    }
}

fn score_mods(kind: usize, heads: usize, len: usize) -> Option<ScoreMod> {
    match kind {
        0 | 1 => None,
        2 => Some(ScoreMod::alibi(alibi_slopes(heads).unwrap())),
        3 => Some(
            ScoreMod::soft_cap(2.0)
                .unwrap()
                .then(&ScoreMod::alibi(alibi_slopes(heads).unwrap())),
        ),
        4 => Some(
            ScoreMod::relative_bias(
                (0..heads * 9).map(|i| (i % 5) as f32 * 0.3).collect::<Vec<_>>(),
                4,
            )
            .unwrap(),
        ),
        _ => {
            // Masks by score: −∞ on some cells.
            let bias = FloatBuffer::new(
                (0..len)
                    .map(|i| if i % 3 == 1 { f32::NEG_INFINITY } else { 0.1 })
                    .collect::<Vec<_>>(),
            );
            Some(ScoreMod::new(score() * 0.5 + bias.at(kv())).unwrap())
        }
    }
}

fn dtype(bf16: bool) -> KvDtype {
    if bf16 { KvDtype::Bf16 } else { KvDtype::F32 }
}

/// Rows of one sequence out of a packed tensor, as `[heads, rows, dim]`.
fn head_major(packed: &[f32], start: usize, rows: usize, heads: usize, dim: usize) -> Vec<f32> {
    let row = |h: usize, i: usize| packed[((start + i) * heads + h) * dim..][..dim].to_vec();
    (0..heads)
        .flat_map(|h| (0..rows).flat_map(move |i| row(h, i)))
        .collect()
}

proptest! {
    /// Rectangular masks through the page table: right, and the same bits wherever pages and slots lie, with NaN in all
    /// memory that the sequences do not use.
    #[test]
    fn converted_masks_match_the_oracle_wherever_pages_lie(
        seed in any::<u64>(),
        lens in prop::collection::vec(1usize..70, 1..4),
        kv_heads in 1usize..3,
        group in 1usize..6,
        q_len in 1usize..20,
        block_q in 1usize..20,
        page_size in prop::sample::select(vec![1usize, 3, 4, 8, 16, 33, 64]),
        dim in prop::sample::select(vec![1usize, 8, 20, 64]),
        mask_kind in 0usize..12,
        score_kind in 0usize..6,
        half in any::<bool>(),
    ) {
        let heads = kv_heads * group;
        let mut random = Random::new(seed);
        let sequences = Sequences::random(&mut random, &lens, kv_heads, dim, dtype(half));
        let longest = *lens.iter().max().unwrap();
        let len = longest.max(q_len);
        let mask_mod = mask_mods(mask_kind, lens.len(), len);
        let score_mod = score_mods(score_kind, heads, len);
        let queries = random.floats(lens.len() * heads * q_len * dim);
        let q = QueryView::batched(&queries, lens.len(), heads, q_len, dim).unwrap();
        let mask_heads = if mask_mod.depends_on(block_mask::expr::Axis::Head) { heads } else { 1 };
        let shape = MaskShape::new(lens.len(), mask_heads, q_len, longest).with_blocks(block_q, page_size);
        let logical = BlockMask::from_fn(shape, mask_mod.clone()).unwrap();

        let mut first: Option<(Vec<u32>, Vec<u32>)> = None;
        for placement in 0..3 {
            let placed = place(&sequences, page_size, dtype(half), seed ^ placement);
            let mask = logical.to_physical(&placed.table, &placed.slots).unwrap();
            let (out, lse) = attend(q, &placed, &mask, score_mod.as_ref());
            for i in 0..lens.len() {
                let size = heads * q_len;
                let (expected, expected_lse) =
                    oracle(&sequences, i, &queries[i * size * dim..(i + 1) * size * dim], heads, 0, &mask_mod, score_mod.as_ref());
                assert_close(&out[i * size * dim..(i + 1) * size * dim], &expected, "output");
                assert_close(&lse[i * size..(i + 1) * size], &expected_lse, "log-sum-exp");
            }
            let found = (bits(&out), bits(&lse));
            if let Some(first) = &first {
                prop_assert_eq!(first, &found);
            }
            first = Some(found);
        }
    }

    /// Packed steps: prefill chunks and decoding rows together.
    #[test]
    fn packed_steps_match_the_oracle_and_do_not_depend_on_how_they_are_cut(
        seed in any::<u64>(),
        chunks in prop::collection::vec((0usize..60, 1usize..30), 1..5),
        gap in 0usize..3,
        kv_heads in 1usize..3,
        group in 1usize..5,
        page_size in prop::sample::select(vec![4usize, 16, 32]),
        window in prop::option::of(1usize..20),
        half in any::<bool>(),
    ) {
        let (heads, dim) = (kv_heads * group, 32);
        let mut random = Random::new(seed);
        let lens: Vec<usize> = chunks.iter().map(|(start, len)| start + len).collect();
        let sequences = Sequences::random(&mut random, &lens, kv_heads, dim, dtype(half));
        let placed = place(&sequences, page_size, dtype(half), seed);
        let mut step = Vec::new();
        let mut rows = 0;
        for (&slot, &(kv_start_pos, q_len)) in placed.slots.iter().zip(&chunks) {
            rows += gap;
            step.push(PackedSequence { slot, q_start: rows, q_len, kv_start_pos });
            rows += q_len;
        }
        rows += gap;
        let queries = random.floats(rows * heads * dim);
        let q = QueryView::packed(&queries, rows, heads, dim).unwrap();
        let mask_mod = match window {
            Some(window) => MaskMod::causal() & MaskMod::sliding_window(window),
            None => MaskMod::causal(),
        };
        let mut first: Option<(Vec<u32>, Vec<u32>)> = None;
        for block_q in [1, 5, 16, 64] {
            let mask = paged_causal_mask(&placed.table, &step, block_q, window).unwrap();
            let (out, lse) = attend(q, &placed, &mask, None);
            for (i, sequence) in step.iter().enumerate() {
                let own = head_major(&queries, sequence.q_start, sequence.q_len, heads, dim);
                let (expected, expected_lse) = oracle(&sequences, i, &own, heads, sequence.kv_start_pos, &mask_mod, None);
                assert_close(&head_major(&out, sequence.q_start, sequence.q_len, heads, dim), &expected, "output");
                assert_close(&head_major(&lse, sequence.q_start, sequence.q_len, heads, 1), &expected_lse, "log-sum-exp");
            }
            for row in 0..gap {
                prop_assert!(out[row * heads * dim..(row + 1) * heads * dim].iter().all(|&x| x == 0.0));
                prop_assert!(lse[row * heads..(row + 1) * heads].iter().all(|&x| x == f32::NEG_INFINITY));
            }
            // Query blocks only share work out: not a bit may change.
            let found = (bits(&out), bits(&lse));
            if let Some(first) = &first {
                prop_assert_eq!(first, &found);
            }
            first = Some(found);
        }
    }

    /// Contiguous keys: any block sizes give the same result within rounding.
    #[test]
    fn block_sizes_do_not_matter(
        seed in any::<u64>(),
        batch in 1usize..3,
        q_len in 1usize..40,
        kv_len in 1usize..80,
        group in 1usize..4,
        mask_kind in 0usize..12,
        score_kind in 0usize..6,
    ) {
        let (kv_heads, dim) = (2, 16);
        let heads = kv_heads * group;
        let mut random = Random::new(seed);
        let sequences = Sequences::random(&mut random, &vec![kv_len; batch], kv_heads, dim, KvDtype::F32);
        let (k, v) = (sequences.k.concat(), sequences.v.concat());
        let source = ContiguousKv { k: KvSlice::F32(&k), v: KvSlice::F32(&v), batch, kv_heads, len: kv_len, head_dim: dim };
        let len = kv_len.max(q_len);
        let (mask_mod, score_mod) = (mask_mods(mask_kind, batch, len), score_mods(score_kind, heads, len));
        let queries = random.floats(batch * heads * q_len * dim);
        let q = QueryView::batched(&queries, batch, heads, q_len, dim).unwrap();
        for (block_q, block_kv) in [(128, 128), (1, 7), (16, 64), (5, 1), (64, 16)] {
            let shape = MaskShape::new(batch, heads, q_len, kv_len).with_blocks(block_q, block_kv);
            let mask = BlockMask::from_fn(shape, mask_mod.clone()).unwrap();
            let (mut out, mut lse) = (vec![f32::NAN; queries.len()], vec![f32::NAN; batch * heads * q_len]);
            let options = FlexOptions::default();
            flex_attention_contiguous(q, source, &mask, score_mod.as_ref(), &options, &mut out, Some(&mut lse)).unwrap();
            let size = heads * q_len;
            for i in 0..batch {
                let (expected, expected_lse) =
                    oracle(&sequences, i, &queries[i * size * dim..(i + 1) * size * dim], heads, 0, &mask_mod, score_mod.as_ref());
                assert_close(&out[i * size * dim..(i + 1) * size * dim], &expected, "output");
                assert_close(&lse[i * size..(i + 1) * size], &expected_lse, "log-sum-exp");
            }
        }
    }
}
