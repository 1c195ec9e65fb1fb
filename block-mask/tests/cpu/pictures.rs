//! Masks as text.

use block_mask::{BlockMask, BlockState, MaskMod, MaskShape};
use proptest::prelude::*;

use crate::masks::{mask_mod, shapes};

/// The picture of one batch row and head from the states of its blocks, `[rows, columns]`.
fn drawn(states: &[BlockState], rows: usize, columns: usize) -> Vec<String> {
    let (high, wide) = (rows.div_ceil(32).max(1), columns.div_ceil(64).max(1));
    let cell = |top: usize, left: usize| {
        let mut of = Vec::new();
        for row in top..rows.min(top + high) {
            of.extend(&states[row * columns..][left..columns.min(left + wide)]);
        }
        if of.iter().all(|&&state| state == BlockState::Full) {
            '█'
        } else if of.iter().all(|&&state| state == BlockState::Empty) {
            '·'
        } else {
            '▒'
        }
    };
    let line = |top| (0..columns).step_by(wide).map(|left| cell(top, left)).collect();
    (0..rows).step_by(high).map(line).collect()
}

proptest! {
    #[test]
    fn a_picture_shows_the_states_of_the_blocks(shape in shapes(), kind in 0usize..8) {
        let mask = BlockMask::from_fn(shape, mask_mod(kind)).unwrap();
        let (rows, columns) = (shape.q_blocks(), shape.kv_len.div_ceil(shape.block_kv));
        let states = mask.block_states();
        let mut expected = Vec::new();
        for i in 0..shape.batch * shape.heads {
            expected.push(format!("({}, {})", i / shape.heads, i % shape.heads));
            expected.extend(drawn(&states[i * rows * columns..][..rows * columns], rows, columns));
        }
        let text = mask.to_string();
        let lines: Vec<&str> = text.split('\n').collect();
        prop_assert!(lines[0].starts_with("BlockMask(shape=("), "{}", text);
        prop_assert_eq!(&lines[1..], &expected[..]);
    }
}

#[test]
fn large_masks_and_many_heads_are_drawn_small() {
    let shape = MaskShape::new(3, 40, 1 << 14, 1 << 14).with_blocks(128, 128);
    let text = BlockMask::from_fn(shape, MaskMod::causal()).unwrap().to_string();
    let lines: Vec<&str> = text.split('\n').collect();
    assert_eq!(
        lines[0],
        "BlockMask(shape=(3, 40, 16384, 16384), block_size=(128, 128), sparsity=49.61%)"
    );
    assert_eq!(lines.len(), 1 + 4 * (1 + 32) + 1);
    assert_eq!(*lines.last().unwrap(), "(and 116 more)");
    // Each character stands for four blocks of queries and two of keys.
    assert_eq!(lines[2], format!("▒▒{}", "·".repeat(62)));
    assert_eq!(lines[33], format!("{}▒▒", "█".repeat(62)));
}
