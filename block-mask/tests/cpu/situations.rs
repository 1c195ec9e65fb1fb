//! Situations that users of such code have run into, one test each.

use crate::common::{Random, Sequences, assert_close, attend, bits, oracle, place};
use block_mask::{
    BlockMask, ContiguousKv, Error, FlexOptions, KvBlocks, MaskMod, MaskShape, PackedSequence, QueryView,
    flex_attention, flex_attention_contiguous, paged_causal_mask,
};
use half::bf16;
use paged_kv::{KvCache, KvDtype, KvLayout, KvSlice, KvView, PageId, PageTable, PageTableConfig, Slot};

const DIM: usize = 16;

fn causal_queries(random: &mut Random, batch: usize, heads: usize, len: usize) -> Vec<f32> {
    random.floats(batch * heads * len * DIM)
}

/// One sequence under a mask over contiguous keys, against the oracle.
fn check_contiguous(mask: &BlockMask<block_mask::Logical>, mask_mod: &MaskMod, q_len: usize, kv_len: usize) {
    let mut random = Random::new(11);
    let sequences = Sequences::random(&mut random, &[kv_len], 2, DIM, KvDtype::F32);
    let queries = causal_queries(&mut random, 1, 4, q_len);
    let kv = ContiguousKv {
        k: KvSlice::F32(&sequences.k[0]),
        v: KvSlice::F32(&sequences.v[0]),
        batch: 1,
        kv_heads: 2,
        len: kv_len,
        head_dim: DIM,
    };
    let q = QueryView::batched(&queries, 1, 4, q_len, DIM).unwrap();
    let (mut out, mut lse) = (vec![f32::NAN; q.output_len()], vec![f32::NAN; q.lse_len()]);
    flex_attention_contiguous(
        q,
        kv,
        mask,
        None,
        &FlexOptions::default(),
        &mut out,
        Some(&mut lse),
    )
    .unwrap();
    let (expected, expected_lse) = oracle(&sequences, 0, &queries, 4, 0, mask_mod, None);
    assert_close(&out, &expected, "output");
    assert_close(&lse, &expected_lse, "log-sum-exp");
}

#[test]
fn sixty_four_keys_in_blocks_of_128() {
    let shape = MaskShape::new(1, 1, 64, 64);
    let mask = BlockMask::from_fn(shape, MaskMod::all()).unwrap();
    let blocks: Vec<_> = mask.blocks(0, 0, 0).collect();
    assert_eq!(blocks.len(), 1);
    assert!(
        !blocks[0].full,
        "a block that reaches past the length is not full"
    );
    check_contiguous(&mask, &MaskMod::all(), 64, 64);
}

#[test]
fn slots_in_any_order_give_the_rows_of_their_own_sequences() {
    let config = PageTableConfig {
        n_pages: 40,
        page_size: 4,
        n_slots: 9,
        max_pages_per_slot: 5,
    };
    let mut table = PageTable::new(config).unwrap();
    let all: Vec<Slot> = (1..9).map(|_| table.allocate_slot().unwrap()).collect();
    let by_index = |index: usize| *all.iter().find(|slot| slot.index() == index).unwrap();
    let slots = [by_index(3), by_index(7), by_index(1)];
    let layout = KvLayout {
        n_layers: 1,
        kv_heads: 1,
        head_dim: DIM,
        n_pages: 40,
        page_size: 4,
        dtype: KvDtype::F32,
    };
    let mut cache = KvCache::new(layout).unwrap();
    cache.fill(f32::NAN);
    let mut random = Random::new(5);
    let lens = [7, 13, 18];
    let sequences = Sequences::random(&mut random, &lens, 1, DIM, KvDtype::F32);
    for (i, &slot) in slots.iter().enumerate() {
        let _ = table.reserve(slot, lens[i]).unwrap();
        let physical: Vec<usize> = (0..lens[i]).map(|t| table.physical(slot, t).unwrap()).collect();
        cache
            .write(0, &physical, &sequences.k[i], &sequences.v[i])
            .unwrap();
        table.advance(slot, lens[i]).unwrap();
    }
    let mask_mod = MaskMod::causal_with_offset(vec![6, 12, 17]);
    let logical =
        BlockMask::from_fn(MaskShape::new(3, 1, 1, 20).with_blocks(1, 4), mask_mod.clone()).unwrap();
    let mask = logical.to_physical(&table, &slots).unwrap();
    let queries = causal_queries(&mut random, 3, 2, 1);
    let q = QueryView::batched(&queries, 3, 2, 1, DIM).unwrap();
    let mut out = vec![f32::NAN; q.output_len()];
    flex_attention(
        q,
        cache.layer(0).unwrap(),
        &mask,
        None,
        &FlexOptions::default(),
        &mut out,
        None,
    )
    .unwrap();
    for i in 0..3 {
        let part = i * 2 * DIM..(i + 1) * 2 * DIM;
        let (expected, _) = oracle(&sequences, i, &queries[part.clone()], 2, 0, &mask_mod, None);
        assert_close(&out[part], &expected, "output");
    }
}

#[test]
fn lengths_cropped_after_construction_with_unsorted_lists() {
    let lists = KvBlocks {
        num_blocks: &[2, 3],
        indices: &[3, 0, -1, -1, 2, 0, 3, -1],
        full_num_blocks: &[1, 1],
        full_indices: &[2, -1, -1, -1, 1, -1, -1, -1],
    };
    let shape = MaskShape::of_blocks(1, 1, 2, 4, 16, 16);
    let stripes = MaskMod::new(
        (block_mask::expr::kv() + block_mask::expr::q())
            .rem_floor(3)
            .differs(0),
    )
    .unwrap();
    let whole = BlockMask::from_kv_blocks(shape, &lists, stripes).unwrap();
    let dense = whole.to_dense();
    for (q_len, kv_len) in [(32, 64), (30, 61), (17, 40), (9, 33), (16, 16), (5, 3), (0, 7)] {
        let cropped = whole.with_lengths(q_len, kv_len).unwrap();
        let expected: Vec<bool> = (0..q_len)
            .flat_map(|q| dense[q * 64..q * 64 + kv_len].to_vec())
            .collect();
        assert_eq!(cropped.to_dense(), expected, "cropped to {q_len} x {kv_len}");
        for r in 0..q_len.div_ceil(16) {
            for block in cropped.blocks(0, 0, r).filter(|block| block.full) {
                assert!(
                    (block.index + 1) * 16 <= kv_len && (r + 1) * 16 <= q_len,
                    "a ragged block is never full"
                );
            }
        }
        if q_len > 0 {
            check_contiguous(&cropped, &cropped.effective_mask_mod().unwrap(), q_len, kv_len);
        }
    }
    let error = whole.with_lengths(32, 65).unwrap_err();
    assert!(
        matches!(error, Error::RangeOutOfBounds { .. }),
        "given lists say nothing about further blocks: {error}"
    );
}

#[test]
fn the_order_of_a_list_does_not_matter() {
    let shape = MaskShape::of_blocks(1, 1, 1, 4, 8, 8);
    let build = |indices: &[i32]| {
        let lists = KvBlocks {
            num_blocks: &[3],
            indices,
            ..KvBlocks::default()
        };
        BlockMask::from_kv_blocks(shape, &lists, MaskMod::causal()).unwrap()
    };
    let sorted = build(&[0, 2, 3, 9]);
    let shuffled = build(&[3, 0, 2, -7]);
    assert_eq!(sorted.kv_arrays(), shuffled.kv_arrays());
    assert_eq!(sorted.to_dense(), shuffled.to_dense());
}

#[test]
fn a_window_of_8_leaves_the_first_block_empty() {
    let mask_mod = MaskMod::causal() & MaskMod::sliding_window(8);
    let shape = MaskShape::new(1, 1, 48, 48).with_blocks(16, 16);
    let mask = BlockMask::from_fn(shape, mask_mod.clone()).unwrap();
    assert_eq!(
        mask.blocks(0, 0, 2).map(|block| block.index).collect::<Vec<_>>(),
        [1, 2]
    );
    check_contiguous(&mask, &mask_mod, 48, 48);
    // A list that names an empty block all the same: the first visited block leaves every row without a key.
    let lists = KvBlocks {
        num_blocks: &[3, 3, 3],
        indices: &[0, 1, 2, 0, 1, 2, 0, 1, 2],
        ..KvBlocks::default()
    };
    let mask = BlockMask::from_kv_blocks(shape, &lists, mask_mod.clone()).unwrap();
    check_contiguous(&mask, &mask_mod, 48, 48);
}

#[test]
fn the_same_page_twice_in_a_row_counts_once() {
    let mut random = Random::new(3);
    let sequences = Sequences::random(&mut random, &[16], 1, DIM, KvDtype::F32);
    let placed = place(&sequences, 8, KvDtype::F32, 7);
    let pages: Vec<i32> = placed.table.row(placed.slots[0])[..2].to_vec();
    let shape = MaskShape::new(1, 1, 4, 0).with_blocks(4, 8);
    let build = |indices: &[i32], n: i32| {
        let lists = KvBlocks {
            num_blocks: &[n],
            indices,
            ..KvBlocks::default()
        };
        BlockMask::from_page_blocks(&placed.table, &placed.slots, shape, &lists, MaskMod::all()).unwrap()
    };
    let queries = causal_queries(&mut random, 1, 1, 4);
    let q = QueryView::batched(&queries, 1, 1, 4, DIM).unwrap();
    let once = attend(q, &placed, &build(&pages, 2), None);
    let twice = attend(
        q,
        &placed,
        &build(&[pages[0], pages[0], pages[1], pages[1]], 4),
        None,
    );
    assert_eq!(bits(&once.0), bits(&twice.0));
    let (expected, _) = oracle(&sequences, 0, &queries, 1, 0, &MaskMod::all(), None);
    assert_close(&twice.0, &expected, "output");
}

#[test]
fn neighbouring_rows_may_share_a_page() {
    let mut random = Random::new(4);
    let sequences = Sequences::random(&mut random, &[8], 1, DIM, KvDtype::F32);
    let mut placed = place(&sequences, 8, KvDtype::F32, 9);
    let fork = placed.table.fork(placed.slots[0]).unwrap();
    let shape = MaskShape::new(2, 1, 1, 8).with_blocks(1, 8);
    let mask = BlockMask::from_fn(shape, MaskMod::all()).unwrap();
    let mask = mask.to_physical(&placed.table, &[placed.slots[0], fork]).unwrap();
    assert_eq!(
        mask.blocks(0, 0, 0).next(),
        mask.blocks(1, 0, 0).next(),
        "both rows read the same page"
    );
    let one = causal_queries(&mut random, 1, 2, 1);
    let queries = [one.clone(), one.clone()].concat();
    let (out, _) = attend(
        QueryView::batched(&queries, 2, 2, 1, DIM).unwrap(),
        &placed,
        &mask,
        None,
    );
    let (expected, _) = oracle(&sequences, 0, &one, 2, 0, &MaskMod::all(), None);
    assert_close(&out[..2 * DIM], &expected, "first row");
    assert_eq!(
        bits(&out[..2 * DIM]),
        bits(&out[2 * DIM..]),
        "identical rows of a batch are identical"
    );
}

#[test]
fn pages_of_others_are_masked_whatever_a_list_says() {
    let mut random = Random::new(8);
    let sequences = Sequences::random(&mut random, &[8, 8], 1, DIM, KvDtype::F32);
    let placed = place(&sequences, 8, KvDtype::F32, 2);
    let all: Vec<i32> = (0..placed.table.n_pages() as i32).collect();
    let n = all.len() as i32;
    let lists = KvBlocks {
        full_num_blocks: &[n, n],
        full_indices: &[all.clone(), all].concat(),
        num_blocks: &[0, 0],
        indices: &[],
    };
    let shape = MaskShape::new(2, 1, 8, 0).with_blocks(8, 8);
    let mask =
        BlockMask::from_page_blocks(&placed.table, &placed.slots, shape, &lists, MaskMod::all()).unwrap();
    assert_eq!(mask.n_blocks(), 2);
    let queries = causal_queries(&mut random, 2, 1, 8);
    let (out, _) = attend(
        QueryView::batched(&queries, 2, 1, 8, DIM).unwrap(),
        &placed,
        &mask,
        None,
    );
    for i in 0..2 {
        let part = i * 8 * DIM..(i + 1) * 8 * DIM;
        let (expected, _) = oracle(&sequences, i, &queries[part.clone()], 1, 0, &MaskMod::all(), None);
        assert_close(&out[part], &expected, "output");
    }
}

#[test]
fn a_padding_mask_composes_with_a_causal_one() {
    let both = MaskMod::padding(vec![3, 40]) & MaskMod::causal();
    for (b, q, kv, allowed) in [
        (0, 5, 2, true),
        (0, 5, 3, false),
        (0, 1, 2, false),
        (1, 5, 5, true),
        (1, 5, 6, false),
    ] {
        assert_eq!(both.allows(b, 0, q, kv), allowed, "({b}, {q}, {kv})");
    }
}

#[test]
fn decoding_is_causal_at_the_position_of_the_row() {
    // A buffer larger than the sequence, and a last page of which one entry is used.
    let mut random = Random::new(6);
    let sequences = Sequences::random(&mut random, &[33], 2, DIM, KvDtype::F32);
    let placed = place(&sequences, 16, KvDtype::F32, 1);
    let queries = causal_queries(&mut random, 1, 4, 1);
    let q = QueryView::packed(&queries, 1, 4, DIM).unwrap();
    for position in [0, 1, 15, 16, 31, 32] {
        let step = [PackedSequence {
            slot: placed.slots[0],
            q_start: 0,
            q_len: 1,
            kv_start_pos: position,
        }];
        let mask = paged_causal_mask(&placed.table, &step, 16, None).unwrap();
        let full = mask.blocks(0, 0, 0).filter(|block| block.full).count();
        assert_eq!(
            (full, mask.n_blocks()),
            ((position + 1) / 16, position / 16 + 1),
            "position {position}"
        );
        let (out, lse) = attend(q, &placed, &mask, None);
        let (expected, expected_lse) = oracle(&sequences, 0, &queries, 4, position, &MaskMod::causal(), None);
        assert_close(&out, &expected, "output");
        assert_close(&lse, &expected_lse, "log-sum-exp");
    }
}

#[test]
fn stale_pages_of_a_reused_slot_are_not_read() {
    let config = PageTableConfig {
        n_pages: 5,
        page_size: 4,
        n_slots: 2,
        max_pages_per_slot: 4,
    };
    let mut table = PageTable::new(config).unwrap();
    let old = table.allocate_slot().unwrap();
    let _ = table.reserve(old, 16).unwrap();
    table.advance(old, 16).unwrap();
    table.erase(old).unwrap();
    let new = table.allocate_slot().unwrap();
    let _ = table.reserve(new, 3).unwrap();
    table.advance(new, 3).unwrap();
    let mask = BlockMask::from_fn(MaskShape::new(1, 1, 1, 16).with_blocks(1, 4), MaskMod::all()).unwrap();
    let mask = mask.to_physical(&table, &[new]).unwrap();
    assert_eq!(mask.n_blocks(), 1);
    assert!(
        !mask.blocks(0, 0, 0).next().unwrap().full,
        "only three of four places are written"
    );
    table.erase(new).unwrap();
    let error = BlockMask::from_fn(MaskShape::new(1, 1, 1, 16).with_blocks(1, 4), MaskMod::all())
        .unwrap()
        .to_physical(&table, &[new]);
    assert!(matches!(error, Err(Error::DeadSlot { batch: 0, .. })));
}

#[test]
fn offsets_beyond_two_to_the_31_elements() {
    // 2 heads of 262,145 pages: the second head starts 2³⁰ + … elements in, its last page ends beyond 2³¹. The memory is
    // asked for but only a few pages of it are touched. K and V share it.
    let (page_size, n_pages, kv_heads) = (16, (1 << 18) + 1, 2);
    let layout = KvLayout {
        n_layers: 1,
        kv_heads,
        head_dim: 256,
        n_pages,
        page_size,
        dtype: KvDtype::Bf16,
    };
    let elements = usize::try_from(layout.elements_per_layer().unwrap()).unwrap();
    assert!(elements > 1 << 31);
    let Ok(mut memory) = bytemuck::allocation::try_zeroed_slice_box::<bf16>(elements) else {
        // A machine that does not hand out memory it may not have; the arithmetic of offsets is tested there by
        // `paged-kv`.
        return;
    };
    let page = n_pages - 1;
    let start = usize::try_from(layout.offset(1, page * page_size).unwrap()).unwrap();
    assert!(start > i32::MAX as usize);
    memory[start..start + page_size * 256].fill(bf16::ONE);
    let config = PageTableConfig {
        n_pages,
        page_size,
        n_slots: 2,
        max_pages_per_slot: n_pages,
    };
    let mut table = PageTable::new(config).unwrap();
    let slot = table.allocate_slot().unwrap();
    let _ = table.reserve(slot, (n_pages - 1) * page_size).unwrap();
    let logical = table.logical_page(slot, PageId::new(page as u32)).unwrap();
    // A query that sees just that page, through a window as wide as the page.
    let position = logical * page_size + page_size - 1;
    let step = [PackedSequence {
        slot,
        q_start: 0,
        q_len: 1,
        kv_start_pos: position,
    }];
    let mask = paged_causal_mask(&table, &step, 1, Some(page_size)).unwrap();
    assert_eq!(mask.largest_page(), Some(page));
    let view = KvView {
        layout,
        k: KvSlice::Bf16(&memory),
        v: KvSlice::Bf16(&memory),
    };
    let queries = vec![0.5; 2 * 256];
    let q = QueryView::packed(&queries, 1, 2, 256).unwrap();
    let mut out = vec![f32::NAN; 2 * 256];
    flex_attention(q, view, &mask, None, &FlexOptions::default(), &mut out, None).unwrap();
    assert!(
        out[..256].iter().all(|&x| x == 0.0),
        "the first head's page is zero"
    );
    assert!(
        out[256..].iter().all(|&x| (x - 1.0).abs() < 1e-6),
        "the second head's page is one"
    );
}

#[test]
fn rows_without_a_key_give_zero_and_minus_infinity() {
    let mut random = Random::new(2);
    let sequences = Sequences::random(&mut random, &[20], 1, DIM, KvDtype::F32);
    let placed = place(&sequences, 8, KvDtype::F32, 3);
    let mask = BlockMask::from_fn(MaskShape::new(1, 1, 9, 20).with_blocks(4, 8), MaskMod::none()).unwrap();
    assert_eq!((mask.n_blocks(), mask.sparsity()), (0, 100.0));
    let mask = mask.to_physical(&placed.table, &placed.slots).unwrap();
    let queries = causal_queries(&mut random, 1, 2, 9);
    let (out, lse) = attend(
        QueryView::batched(&queries, 1, 2, 9, DIM).unwrap(),
        &placed,
        &mask,
        None,
    );
    assert!(out.iter().all(|&x| x == 0.0) && lse.iter().all(|&x| x == f32::NEG_INFINITY));
}

#[test]
fn nan_of_a_live_key_is_not_hidden() {
    let k = vec![f32::NAN; 4 * DIM];
    let v = vec![1.0; 4 * DIM];
    let kv = ContiguousKv {
        k: KvSlice::F32(&k),
        v: KvSlice::F32(&v),
        batch: 1,
        kv_heads: 1,
        len: 4,
        head_dim: DIM,
    };
    let mask = BlockMask::from_fn(MaskShape::new(1, 1, 1, 4), MaskMod::all()).unwrap();
    let queries = vec![1.0; DIM];
    let mut out = vec![0.0; DIM];
    let q = QueryView::batched(&queries, 1, 1, 1, DIM).unwrap();
    flex_attention_contiguous(q, kv, &mask, None, &FlexOptions::default(), &mut out, None).unwrap();
    assert!(out.iter().all(|x| x.is_nan()));
}
