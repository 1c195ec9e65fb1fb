//! Building, changing and reading block masks.

use block_mask::expr::{Axis, IntBuffer, b, h, kv, q, score};
use block_mask::{
    BlockMask, BlockState, Error, KvBlocks, Logical, MaskMod, MaskShape, PackedSequence, ScoreMod,
    alibi_slopes, paged_causal_mask,
};
use paged_kv::{PageTable, PageTableConfig, Slot};
use proptest::prelude::*;

pub(crate) fn mask_mod(kind: usize) -> MaskMod {
    match kind {
        0 => MaskMod::all(),
        1 => MaskMod::causal(),
        2 => MaskMod::causal() & MaskMod::sliding_window(5),
        3 => MaskMod::new((kv() * 7 + q() * 3 + b() + h()).rem_floor(5).lt(3)).unwrap(),
        4 => MaskMod::new(kv().div_floor(6).equals(q().div_floor(6))).unwrap(),
        5 => MaskMod::prefix_lm(vec![3, 9, 1]) | MaskMod::new(kv().equals(11)).unwrap(),
        6 => MaskMod::new((q() * 2 - kv() * 3).ge(-10)).unwrap() & !MaskMod::new(kv().equals(2)).unwrap(),
        _ => MaskMod::none(),
    }
}

pub(crate) fn shapes() -> impl Strategy<Value = MaskShape> {
    (
        1usize..3,
        1usize..3,
        0usize..40,
        0usize..40,
        1usize..20,
        1usize..20,
    )
        .prop_map(|(batch, heads, q_len, kv_len, block_q, block_kv)| {
            MaskShape::new(batch, heads, q_len, kv_len).with_blocks(block_q, block_kv)
        })
}

fn cells(shape: &MaskShape, mask_mod: &MaskMod) -> Vec<bool> {
    let mut cells = Vec::new();
    for b in 0..shape.batch {
        for h in 0..shape.heads {
            for q in 0..shape.q_len {
                cells.extend((0..shape.kv_len).map(|kv| mask_mod.allows(b, h, q, kv)));
            }
        }
    }
    cells
}

/// Blocks are left out, partial or full exactly as their cells say.
fn assert_exact(mask: &BlockMask<Logical>, cells: &[bool]) {
    let shape = mask.shape();
    assert_eq!(mask.to_dense(), cells);
    let states = mask.block_states();
    for (i, state) in states.iter().enumerate() {
        let (row, c) = (i / shape.kv_blocks(), i % shape.kv_blocks());
        let (bh, r) = (row / shape.q_blocks(), row % shape.q_blocks());
        let mut count = 0;
        for q in r * shape.block_q..((r + 1) * shape.block_q).min(shape.q_len) {
            for kv in c * shape.block_kv..((c + 1) * shape.block_kv).min(shape.kv_len) {
                count += usize::from(cells[(bh * shape.q_len + q) * shape.kv_len + kv]);
            }
        }
        let expected = match count {
            0 => BlockState::Empty,
            n if n == shape.block_q * shape.block_kv => BlockState::Full,
            _ => BlockState::Partial,
        };
        assert_eq!(*state, expected, "block ({r}, {c})");
    }
}

proptest! {
    #[test]
    fn classification_is_exact(shape in shapes(), kind in 0usize..8) {
        let mask = BlockMask::from_fn(shape, mask_mod(kind)).unwrap();
        assert_exact(&mask, &cells(&shape, &mask_mod(kind)));
    }

    #[test]
    fn dense_masks_and_block_lists_survive_the_round_trip(shape in shapes(), kind in 0usize..8) {
        let expected = cells(&shape, &mask_mod(kind));
        let dense = BlockMask::from_dense(shape, &expected).unwrap();
        assert_exact(&dense, &expected);
        let arrays = dense.kv_arrays();
        let again = BlockMask::from_kv_blocks(shape, &arrays.as_kv_blocks(), mask_mod(kind)).unwrap();
        prop_assert_eq!(again.to_dense(), expected);
        prop_assert_eq!(again.kv_arrays(), arrays);
    }

    #[test]
    fn masks_combine_cell_by_cell(shape in shapes(), x in 0usize..8, y in 0usize..8, lists in any::<bool>()) {
        let (fx, fy) = (mask_mod(x), mask_mod(y));
        let mask_y = BlockMask::from_fn(shape, fy.clone()).unwrap();
        let mut mask_x = BlockMask::from_fn(shape, fx).unwrap();
        if lists {
            // Lists that disagree with their function: what is not listed is masked, what is full is not asked.
            let arrays = mask_x.kv_arrays();
            mask_x = BlockMask::from_kv_blocks(shape, &arrays.as_kv_blocks(), fy).unwrap();
        }
        let (cells_x, cells_y) = (mask_x.to_dense(), mask_y.to_dense());
        let join = |f: fn(bool, bool) -> bool| -> Vec<bool> {
            cells_x.iter().zip(&cells_y).map(|(x, y)| f(*x, *y)).collect()
        };
        assert_exact(&(&mask_x & &mask_y).unwrap(), &join(|x, y| x & y));
        assert_exact(&(&mask_x | &mask_y).unwrap(), &join(|x, y| x | y));
    }

    #[test]
    fn slices_and_other_lengths_keep_their_cells(
        shape in shapes(),
        kind in 0usize..5,
        cut in (0usize..40, 0usize..40),
        lengths in (0usize..60, 0usize..60),
        block_q in 1usize..9,
    ) {
        let mask = BlockMask::from_fn(shape, mask_mod(kind)).unwrap();
        let dense = mask.to_dense();
        let rows = |start: usize, end: usize| -> Vec<bool> {
            (0..shape.batch * shape.heads)
                .flat_map(|bh| dense[(bh * shape.q_len + start) * shape.kv_len..(bh * shape.q_len + end) * shape.kv_len].to_vec())
                .collect()
        };
        let (low, high) = (cut.0.min(cut.1), cut.0.max(cut.1));
        let (start, end) = (low.min(shape.q_len), high.min(shape.q_len));
        let sliced = mask.slice_queries(start..end, block_q).unwrap();
        prop_assert_eq!(sliced.to_dense(), rows(start, end));
        let blocks = (low / 4).min(shape.q_blocks())..(high / 4).min(shape.q_blocks());
        let (first, last) = (blocks.start * shape.block_q, blocks.end * shape.block_q);
        let sliced = mask.slice_query_blocks(blocks).unwrap();
        prop_assert_eq!(sliced.to_dense(), rows(first.min(shape.q_len), last.min(shape.q_len)));
        // Masks made from a function grow as well as shrink.
        let other = mask.with_lengths(lengths.0, lengths.1).unwrap();
        prop_assert_eq!(other.to_dense(), cells(other.shape(), &mask_mod(kind)));
    }

    #[test]
    fn the_query_side_lists_are_the_transpose(shape in shapes(), kind in 0usize..8) {
        let mask = BlockMask::from_fn(shape, mask_mod(kind)).unwrap();
        let (states, arrays) = (mask.block_states(), mask.query_arrays());
        let (rows, columns) = (shape.q_blocks(), shape.kv_blocks());
        let mut found = vec![BlockState::Empty; states.len()];
        for line in 0..shape.batch * shape.heads * columns {
            for (counts, indices, state) in [
                (&arrays.num_blocks, &arrays.indices, BlockState::Partial),
                (&arrays.full_num_blocks, &arrays.full_indices, BlockState::Full),
            ] {
                for &r in &indices[line * rows..line * rows + counts[line] as usize] {
                    found[(line / columns * rows + r as usize) * columns + line % columns] = state;
                }
            }
        }
        prop_assert_eq!(found, states);
    }
}

#[test]
fn sparsity_counts_ragged_blocks_as_whole() {
    let mask = BlockMask::from_fn(MaskShape::new(1, 1, 130, 130), MaskMod::causal()).unwrap();
    assert_eq!(mask.n_blocks(), 3);
    assert_eq!(mask.sparsity(), 25.0);
}

#[test]
fn flex_attentions_arrays_of_a_causal_mask() {
    let mask = BlockMask::from_fn(MaskShape::new(1, 1, 6, 6).with_blocks(2, 2), MaskMod::causal()).unwrap();
    let arrays = mask.kv_arrays();
    assert_eq!(arrays.num_blocks, [1, 1, 1]);
    assert_eq!(arrays.indices, [0, 0, 0, 1, 0, 0, 2, 0, 0]);
    assert_eq!(arrays.full_num_blocks, [0, 1, 2]);
    assert_eq!(arrays.full_indices, [0, 0, 0, 0, 0, 0, 0, 1, 0]);
}

#[test]
fn built_in_functions_say_what_their_names_say() {
    let document = MaskMod::document(vec![0, 0, 1, 1, 1]) & MaskMod::causal();
    let starts = MaskMod::document_causal(&[2, 3]);
    for q in 0..5 {
        for kv in 0..5 {
            assert_eq!(
                document.allows(0, 0, q, kv),
                starts.allows(0, 0, q, kv),
                "({q}, {kv})"
            );
        }
    }
    assert!(
        starts.allows(0, 0, 9, 9) && !starts.allows(0, 0, 9, 8),
        "past the documents a position sees itself"
    );
    assert!(MaskMod::document_causal(&[]).allows(0, 0, 3, 3));
    let prefix = MaskMod::prefix_lm(vec![2]);
    assert!(prefix.allows(0, 0, 0, 1) && !prefix.allows(0, 0, 0, 2) && prefix.allows(0, 0, 3, 2));
    let ranges = MaskMod::key_ranges(vec![1, 0], vec![3, 0]);
    assert!(ranges.allows(0, 0, 0, 2) && !ranges.allows(0, 0, 0, 3) && !ranges.allows(0, 0, 1, 0));
    assert!(MaskMod::every([]).allows(0, 0, 0, 1) && !MaskMod::any([]).allows(0, 0, 0, 0));
    assert_eq!(alibi_slopes(8).unwrap()[..2], [0.5, 0.25]);
    assert_eq!(alibi_slopes(12).unwrap().len(), 12);
    let alibi = ScoreMod::alibi(vec![0.5]);
    assert_eq!(alibi.eval(1.0, 0, 0, 7, 3), -1.0);
    let bias = ScoreMod::relative_bias(vec![1.0, 2.0, 3.0], 1).unwrap();
    assert_eq!(
        [9, 10, 11, 90].map(|kv| bias.eval(0.0, 0, 0, 10, kv)),
        [1.0, 2.0, 3.0, 3.0]
    );
}

#[test]
fn bad_input_gives_errors() {
    let shape = MaskShape::new(1, 1, 8, 8).with_blocks(4, 4);
    let causal = MaskMod::causal;
    let zero = BlockMask::from_fn(shape.with_blocks(0, 4), causal()).unwrap_err();
    assert_eq!(
        zero,
        Error::Zero {
            what: "the query block size"
        }
    );
    let huge = BlockMask::from_fn(MaskShape::new(1, 1, usize::MAX, 8), causal()).unwrap_err();
    assert!(matches!(huge, Error::TooLarge { .. }));
    let short = BlockMask::from_fn(shape, MaskMod::document(vec![0; 7])).unwrap_err();
    assert_eq!(
        short,
        Error::IndexOutOfBounds {
            kind: "integer",
            len: 7,
            lowest: 0,
            highest: 7
        }
    );
    assert_eq!(MaskMod::new(score().lt(0.0)).unwrap_err(), Error::ScoreInMask);
    let deep = (0..300).fold(q(), |x, _| x + 1);
    assert_eq!(
        MaskMod::new(deep.lt(5)).unwrap_err(),
        Error::TooDeep { depth: 302, max: 256 }
    );
    let wide = (0..40).fold(q(), |x, _| x.clone() + x);
    assert!(matches!(
        MaskMod::new(wide.lt(5)).unwrap_err(),
        Error::TooLarge { .. }
    ));
    let lists = |num_blocks: &'static [i32], indices: &'static [i32]| {
        let lists = KvBlocks {
            num_blocks,
            indices,
            ..KvBlocks::default()
        };
        BlockMask::from_kv_blocks(shape, &lists, MaskMod::all()).unwrap_err()
    };
    assert_eq!(
        lists(&[1], &[0, 0]),
        Error::Mismatch {
            what: "length of a block count array",
            expected: 2,
            found: 1
        }
    );
    assert_eq!(
        lists(&[1, 2], &[0, 0]),
        Error::CountOutOfRange {
            row: 1,
            count: 2,
            width: 1
        }
    );
    assert_eq!(
        lists(&[1, -1], &[0, 0]),
        Error::CountOutOfRange {
            row: 1,
            count: -1,
            width: 1
        }
    );
    assert_eq!(
        lists(&[0, 1], &[9, 2]),
        Error::BlockOutOfRange {
            row: 1,
            index: 2,
            blocks: 2
        }
    );
    assert!(matches!(lists(&[1, 1], &[0, 0, 0]), Error::Mismatch { .. }));
    assert!(matches!(
        BlockMask::from_dense(shape, &[true; 63]),
        Err(Error::Mismatch {
            expected: 64,
            found: 63,
            ..
        })
    ));
    let mask = BlockMask::from_fn(shape, causal()).unwrap();
    assert!(matches!(
        mask.slice_query_blocks(1..3),
        Err(Error::RangeOutOfBounds { .. })
    ));
    let other = BlockMask::from_fn(shape.with_blocks(2, 4), causal()).unwrap();
    assert!(matches!(mask.and(&other), Err(Error::Mismatch { .. })));
    for cap in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        assert_eq!(ScoreMod::soft_cap(cap).unwrap_err(), Error::SoftCap);
    }
    assert!(matches!(
        ScoreMod::relative_bias(vec![0.0; 4], 1),
        Err(Error::Mismatch { .. })
    ));
}

#[test]
fn bad_steps_give_errors() {
    let config = PageTableConfig {
        n_pages: 9,
        page_size: 4,
        n_slots: 3,
        max_pages_per_slot: 4,
    };
    let mut table = PageTable::new(config).unwrap();
    let slot = table.allocate_slot().unwrap();
    let _ = table.reserve(slot, 8).unwrap();
    let step = |slot, q_start, q_len, kv_start_pos| PackedSequence {
        slot,
        q_start,
        q_len,
        kv_start_pos,
    };
    let error = |step: &[PackedSequence]| paged_causal_mask(&table, step, 16, None).unwrap_err();
    assert_eq!(
        error(&[step(slot, 0, 1, 8)]),
        Error::Capacity {
            slot: slot.index(),
            capacity: 8,
            end: 9
        }
    );
    assert_eq!(
        error(&[step(Slot::new(2), 0, 1, 0)]),
        Error::DeadSlot { batch: 0, slot: 2 }
    );
    assert_eq!(
        error(&[step(Slot::RESERVED, 0, 1, 0)]),
        Error::DeadSlot { batch: 0, slot: 0 }
    );
    assert!(matches!(
        error(&[step(slot, 0, 3, 0), step(slot, 2, 1, 3)]),
        Error::RangeOutOfBounds { .. }
    ));
    assert!(matches!(
        error(&[step(slot, usize::MAX, 2, 0)]),
        Error::TooLarge { .. }
    ));
    assert!(matches!(
        paged_causal_mask(&table, &[step(slot, 0, 1, 0)], 0, None),
        Err(Error::Zero { .. })
    ));
    assert_eq!(paged_causal_mask(&table, &[], 16, None).unwrap().n_blocks(), 0);
    assert_eq!(
        paged_causal_mask(&table, &[step(slot, 0, 0, 0)], 16, None)
            .unwrap()
            .n_blocks(),
        0
    );
    let by_head = MaskMod::new(h().lt(1)).unwrap();
    let packed = BlockMask::packed(&table, &[step(slot, 0, 1, 0)], 1, 4, by_head.clone());
    assert_eq!(
        packed.unwrap_err(),
        Error::Broadcast {
            axis: Axis::Head,
            wanted: 2
        }
    );
    let packed = BlockMask::packed(&table, &[step(slot, 0, 1, 0)], 2, 4, by_head).unwrap();
    assert_eq!(
        (packed.blocks(0, 0, 0).len(), packed.blocks(0, 1, 0).len()),
        (1, 0)
    );
    let logical =
        BlockMask::from_fn(MaskShape::new(1, 1, 1, 8).with_blocks(1, 8), MaskMod::causal()).unwrap();
    assert_eq!(
        logical.to_physical(&table, &[slot]).unwrap_err(),
        Error::PageSize {
            block_kv: 8,
            page_size: 4
        }
    );
}

#[test]
fn contiguity_and_safe_rows_are_found_out_rather_than_assumed() {
    let config = PageTableConfig {
        n_pages: 9,
        page_size: 4,
        n_slots: 3,
        max_pages_per_slot: 4,
    };
    let mut table = PageTable::new(config).unwrap();
    let (x, y) = (table.allocate_slot().unwrap(), table.allocate_slot().unwrap());
    let _ = table.reserve(x, 8).unwrap();
    let step = |slot, kv_start_pos| {
        [PackedSequence {
            slot,
            q_start: 0,
            q_len: 1,
            kv_start_pos,
        }]
    };
    let mask = paged_causal_mask(&table, &step(x, 7), 16, None).unwrap();
    assert!(mask.is_contiguous() && mask.rows_are_safe());
    let _ = table.reserve(y, 4).unwrap();
    let _ = table.reserve(x, 16).unwrap();
    let mask = paged_causal_mask(&table, &step(x, 15), 16, None).unwrap();
    assert!(!mask.is_contiguous(), "x grew around y");
    let prefill = [PackedSequence {
        slot: x,
        q_start: 0,
        q_len: 16,
        kv_start_pos: 0,
    }];
    let windowed = paged_causal_mask(&table, &prefill, 16, Some(3)).unwrap();
    assert!(
        !windowed.rows_are_safe(),
        "late rows see nothing of the first block"
    );
}

#[test]
fn the_printed_functions_are_self_contained_cuda() {
    let buffer = IntBuffer::new(vec![1, 2]);
    let mask = MaskMod::new(kv().ge(buffer.at(b())) & q().ge(kv()) & kv().differs(i32::MIN)).unwrap();
    let score_mod = ScoreMod::soft_cap(30.0)
        .unwrap()
        .then(&ScoreMod::alibi(vec![0.5, 0.25]));
    let source = block_mask::codegen::cuda_source(&mask, Some(&score_mod));
    assert_eq!((source.ints.len(), source.floats.len()), (1, 1));
    for part in [
        "struct Captures {\n    const int* i0;\n    const float* f0;\n    int i0_len;\n    int f0_len;\n};",
        "bool mask_mod(int b, int h, int q, int kv, const Captures& c)",
        "return (((kv >= bm_at(c.i0, c.i0_len, b)) && (q >= kv)) && (kv != (-2147483647 - 1)));",
        "tanhf((score / __int_as_float(0x41f00000) /* 30 */))",
        "__fmul_rn(bm_at(c.f0, c.f0_len, h), (float)bm_sub(kv, q))",
    ] {
        assert!(source.code.contains(part), "{part}\nis not in\n{}", source.code);
    }
    let bytes = source.captures_bytes(&[0x1122_3344_5566_7788, 16]).unwrap();
    assert_eq!(bytes.len(), 24);
    assert_eq!(bytes[..8], 0x1122_3344_5566_7788u64.to_ne_bytes());
    assert_eq!(bytes[16..20], 2i32.to_ne_bytes());
    assert!(source.captures_bytes(&[1]).is_none());
    assert_eq!(MaskMod::causal().to_cuda().captures_bytes(&[]).unwrap().len(), 4);
}
