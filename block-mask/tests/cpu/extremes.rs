//! Numbers and trees at and beyond the limits: what they mean, or the error that names them.

use block_mask::expr::{Int, b, h, kv, q, score};
use block_mask::reference::{DenseShape, dense_attention};
use block_mask::{BlockMask, Error, KvBlocks, MaskMod, MaskShape, PackedSequence, ScoreMod, alibi_slopes};
use paged_kv::{PageTable, PageTableConfig};
use proptest::prelude::*;

const LAST: usize = i32::MAX as usize - 1;

#[test]
fn a_document_that_reaches_past_the_last_position_has_no_end() {
    for endless in [i32::MAX as usize, 1 << 40, usize::MAX] {
        let one = MaskMod::document_causal(&[endless]);
        assert!(one.allows(0, 0, 9, 0) && one.allows(0, 0, LAST, 0) && !one.allows(0, 0, 9, 10));
        let second = MaskMod::document_causal(&[3, endless, 5, usize::MAX]);
        assert!(
            second.allows(0, 0, 2, 0) && !second.allows(0, 0, 3, 2),
            "the first document ends"
        );
        assert!(second.allows(0, 0, 3, 3) && second.allows(0, 0, LAST, 3) && !second.allows(0, 0, LAST, 2));
        let mask = BlockMask::from_fn(MaskShape::new(1, 1, 300, 300), second).unwrap();
        assert_eq!(mask.n_blocks(), 6);
    }
    let empty = MaskMod::document_causal(&[0, 2, 0, usize::MAX]);
    assert!(empty.allows(0, 0, 1, 0) && !empty.allows(0, 0, 2, 1) && empty.allows(0, 0, 7, 2));
}

#[test]
fn offsets_windows_and_prefixes_of_any_size_do_not_wrap() {
    let offsets = [i32::MAX, i32::MIN, -1, 1, i32::MAX - 5];
    let mask = MaskMod::causal_with_offset(offsets);
    for (b, offset) in offsets.into_iter().enumerate() {
        for q in [0, 1, 9, LAST] {
            for kv in [0, 1, 8, 9, 10, LAST] {
                let expected = q as i64 + i64::from(offset) >= kv as i64;
                assert_eq!(
                    mask.allows(b, 0, q, kv),
                    expected,
                    "offset {offset}, query {q}, key {kv}"
                );
            }
        }
    }
    for window in [i32::MAX as usize, 1 << 32, usize::MAX] {
        assert!(MaskMod::sliding_window(window).allows(0, 0, LAST, 0));
    }
    let prefix = MaskMod::prefix_lm([i32::MAX, i32::MIN]);
    assert!(prefix.allows(0, 0, 0, LAST) && !prefix.allows(1, 0, 0, 1));
}

#[test]
fn positions_beyond_32_bits_are_taken_for_the_largest() {
    let causal = MaskMod::causal();
    assert!(causal.allows(0, 0, 1 << 32, 5), "not query 0");
    assert!(!causal.allows(0, 0, 5, (1 << 32) + 2), "not key 2");
    let mut row = [true; 200];
    causal.eval_row(0, 0, 5, LAST - 70, &mut row);
    assert_eq!(row, [false; 200], "no key wraps to a negative one");
    causal.eval_row(0, 0, LAST, LAST - 70, &mut row);
    assert!(row.iter().enumerate().all(|(i, &cell)| cell == (i <= 70)));
    let alibi = ScoreMod::alibi([1.0]);
    let mut scores = [0.0; 200];
    alibi.eval_row(0, 0, LAST, LAST - 70, &mut scores);
    assert_eq!((scores[70], scores[71], scores[199]), (0.0, 1.0, 1.0));
    assert_eq!(alibi.eval(0.0, 0, 0, usize::MAX, usize::MAX), 0.0);
}

#[test]
fn many_masks_are_joined_without_depth() {
    let single = |i: usize| MaskMod::new(kv().equals(i as i32)).unwrap();
    let any = MaskMod::any((0..1000).map(single));
    let shape = MaskShape::new(1, 1, 1, 1500).with_blocks(1, 500);
    assert_eq!(BlockMask::from_fn(shape, any).unwrap().sparsity(), 100.0 / 3.0);
    let none = MaskMod::every((0..1000).map(single));
    assert_eq!(BlockMask::from_fn(shape, none).unwrap().n_blocks(), 0);
}

#[test]
fn trees_of_any_depth_are_refused_and_dropped() {
    let shape = MaskShape::new(1, 1, 4, 4);
    let deep = (0..1_000_000).fold(MaskMod::causal(), |mask, _| mask & MaskMod::all());
    assert!(!deep.allows(0, 0, 1, 1), "counts as false");
    assert!(matches!(
        BlockMask::from_fn(shape, deep.clone()),
        Err(Error::TooDeep {
            depth: 1_000_002,
            max: 256
        })
    ));
    assert!(matches!(
        MaskMod::new(deep.expr().clone()),
        Err(Error::TooDeep { .. })
    ));
    let negated = (0..1_000_000).fold(deep, |mask, _| !mask);
    assert!(!negated.allows(0, 0, 1, 1) && !format!("{negated:?}").is_empty());
    let index = (0..1_000_000).fold(q(), |x, _| x + 1);
    assert!(MaskMod::new(index.lt(kv())).is_err());
    let capped = ScoreMod::soft_cap(1.0).unwrap();
    let chain = (0..1_000_000).fold(capped.clone(), |chain, _| chain.then(&capped));
    assert_eq!(chain.eval(1.0, 0, 0, 0, 0), 0.0);
    assert!(matches!(
        ScoreMod::new(chain.expr().clone()),
        Err(Error::TooDeep { .. })
    ));
}

#[test]
fn trees_of_any_size_are_refused_and_evaluated_in_no_time() {
    let doubled = (0..200).fold(MaskMod::causal(), |mask, _| mask.clone() & mask);
    assert!(!doubled.allows(0, 0, 1, 1), "counts as false");
    let shape = MaskShape::new(1, 1, 4, 4);
    assert!(matches!(
        BlockMask::from_fn(shape, doubled.clone()),
        Err(Error::TooLarge { .. })
    ));
    assert!(doubled.to_cuda().code.len() < 10_000);
    let doubled = (0..200).fold(score(), |sum, _| sum.clone() + sum);
    assert!(matches!(ScoreMod::new(doubled), Err(Error::TooLarge { .. })));
}

#[test]
fn a_mask_with_more_cells_than_memory_has_bytes_is_refused() {
    let most = i32::MAX as usize;
    let shape = MaskShape::new(4, 1, most, most).with_blocks(most, most);
    let lists = KvBlocks {
        num_blocks: &[1; 4],
        indices: &[0; 4],
        ..KvBlocks::default()
    };
    let error = BlockMask::from_kv_blocks(shape, &lists, MaskMod::all()).unwrap_err();
    assert!(
        matches!(
            error,
            Error::TooLarge {
                what: "the number of cells",
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn slopes_of_absurdly_many_heads_are_refused() {
    for heads in [usize::MAX, 1 << 63, (1 << 16) + 1] {
        let error = alibi_slopes(heads).unwrap_err();
        assert!(
            matches!(error, Error::TooLarge { value, .. } if value == heads),
            "{error}"
        );
    }
    assert!(alibi_slopes(0).unwrap().is_empty());
    assert_eq!(alibi_slopes(1 << 16).unwrap().len(), 1 << 16);
}

#[test]
fn the_oracle_refuses_tensors_that_do_not_have_the_shape() {
    let shape = DenseShape {
        batch: 1,
        heads: 2,
        kv_heads: 1,
        q_len: 1,
        kv_len: 1,
        head_dim: 1,
    };
    let run = |shape: DenseShape, q: &[f32], k: &[f32], v: &[f32]| {
        dense_attention(shape, q, k, v, 1.0, |_, _, _, _| true, |score, _, _, _, _| score)
    };
    assert_eq!(run(shape, &[1.0; 2], &[1.0], &[3.0]).unwrap().0, [3.0; 2]);
    for what in ["queries", "keys", "values"] {
        let [q, k, v] = ["queries", "keys", "values"].map(|name| usize::from(name == what));
        let error = run(shape, &[1.0; 3][..2 + q], &[1.0; 2][..1 + k], &[1.0; 2][..1 + v]).unwrap_err();
        assert!(error.to_string().contains(what), "{error}");
    }
    for extent in [usize::MAX, 1 << 63, 1 << 32, 3] {
        for field in 0..6 {
            let mut shape = shape;
            let fields = [
                &mut shape.batch,
                &mut shape.heads,
                &mut shape.kv_heads,
                &mut shape.q_len,
                &mut shape.kv_len,
                &mut shape.head_dim,
            ];
            *fields.into_iter().nth(field).unwrap() = extent;
            assert!(run(shape, &[1.0; 2], &[1.0], &[3.0]).is_err(), "{shape:?}");
        }
    }
    let nothing = DenseShape {
        batch: usize::MAX,
        q_len: 0,
        kv_len: 0,
        ..shape
    };
    assert_eq!(run(nothing, &[], &[], &[]).unwrap(), (vec![], vec![]));
    assert!(matches!(
        run(DenseShape { head_dim: 0, ..shape }, &[], &[], &[]),
        Err(Error::Zero {
            what: "the head size"
        })
    ));
    assert!(matches!(
        run(DenseShape { kv_heads: 0, ..shape }, &[], &[], &[]),
        Err(Error::HeadGroups {
            query_heads: 2,
            kv_heads: 0
        })
    ));
}

#[test]
fn lists_that_cannot_grow_name_the_axis() {
    let lists = KvBlocks {
        num_blocks: &[1, 1],
        indices: &[0, 1],
        ..KvBlocks::default()
    };
    let shape = MaskShape::new(1, 1, 8, 8).with_blocks(4, 4);
    let mask = BlockMask::from_kv_blocks(shape, &lists, MaskMod::all()).unwrap();
    let error = |q_len, kv_len| mask.with_lengths(q_len, kv_len).unwrap_err().to_string();
    assert!(error(9, 8).starts_with("query blocks"), "{}", error(9, 8));
    assert!(error(8, 9).starts_with("KV blocks"), "{}", error(8, 9));
}

#[test]
fn a_sequence_without_queries_claims_no_rows() {
    let config = PageTableConfig {
        n_pages: 4,
        page_size: 4,
        n_slots: 3,
        max_pages_per_slot: 2,
    };
    let mut table = PageTable::new(config).unwrap();
    let slot = table.allocate_slot().unwrap();
    let _ = table.reserve(slot, 4).unwrap();
    let sequence = |q_start, q_len| PackedSequence {
        slot,
        q_start,
        q_len,
        kv_start_pos: 0,
    };
    let steps = [sequence(2, 3), sequence(usize::MAX, 0), sequence(900, 0)];
    let mask = BlockMask::packed(&table, &steps, 1, 4, MaskMod::causal()).unwrap();
    assert_eq!(mask.query_rows(), 5);
}

fn extreme() -> impl Strategy<Value = usize> {
    let edge = prop_oneof![
        Just(0usize),
        Just(1),
        Just(3),
        Just(i32::MAX as usize),
        Just(u32::MAX as usize),
        Just(1 << 31),
        Just(1 << 32),
        Just(1 << 62),
        Just(usize::MAX),
    ];
    (edge, 0usize..3, any::<bool>()).prop_map(|(x, near, below)| {
        if below {
            x.saturating_sub(near)
        } else {
            x.saturating_add(near)
        }
    })
}

fn leaf() -> impl Strategy<Value = Int> {
    let number = prop_oneof![Just(i32::MAX), Just(i32::MIN), -2i32..3];
    prop_oneof![
        Just(b()),
        Just(h()),
        Just(q()),
        Just(kv()),
        number.prop_map(Int::constant)
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Whatever the numbers are, an answer or an error comes back. Lengths that would make real lists are kept short.
    #[test]
    fn no_number_makes_a_constructor_panic(
        (batch, heads, position) in (extreme(), extreme(), extreme()),
        (q_len, kv_len) in (extreme(), extreme()),
        (block_q, block_kv) in (extreme(), extreme()),
        (x, y, z) in (leaf(), leaf(), leaf()),
        (start, end) in (extreme(), extreme()),
    ) {
        let q_blocks = MaskShape { batch, heads, q_len, kv_len, block_q, block_kv }.q_blocks();
        // Many batch rows and heads are kept only where there are too many lists.
        let too_many = batch.saturating_mul(heads).saturating_mul(q_blocks) > i32::MAX as usize;
        let (batch, heads) = if too_many { (batch, heads) } else { (batch.min(8), heads.min(8)) };
        let shape = MaskShape { batch, heads, q_len, kv_len, block_q, block_kv };
        let queries = batch.saturating_mul(heads).saturating_mul(q_len);
        let lists = KvBlocks { num_blocks: &[1], indices: &[0], full_num_blocks: &[1], full_indices: &[0] };
        let mask_mod = MaskMod::new((x - y).lt(z)).unwrap();
        // Dense forms, also of the function for what lists leave ragged, take memory for every block.
        if shape.kv_blocks() < 10_000 || kv_len > i32::MAX as usize {
            let _ = BlockMask::from_kv_blocks(shape, &lists, mask_mod.clone()).map(|mask| {
                let _ = mask.slice_query_blocks(start..end);
                let _ = mask.with_lengths(start.min(100), end.min(100));
                let _ = mask.effective_mask_mod();
                (mask.sparsity(), mask.kv_arrays(), mask.query_arrays(), mask.block_states())
            });
        }
        if queries.saturating_mul(shape.kv_blocks().max(1)) < 10_000 && kv_len < 10_000 || shape.q_blocks() == 0 {
            let _ = BlockMask::from_fn_at(shape, mask_mod.clone(), position).map(|mask| mask.to_dense());
        }
        let mut row = [false; 70];
        mask_mod.eval_row(batch, heads, position, start, &mut row);
        for (i, cell) in row.into_iter().enumerate() {
            prop_assert_eq!(cell, mask_mod.allows(batch, heads, position, start.saturating_add(i)));
        }
        let _ = ScoreMod::relative_bias(vec![0.0; 3], start);
        let _ = MaskMod::sliding_window(end).allows(start, end, position, q_len);
        let _ = MaskMod::document_causal(&[start.min(9), end.max(1 << 31)]).allows(0, 0, position, end);
    }
}
