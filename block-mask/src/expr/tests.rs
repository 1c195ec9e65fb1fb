//! Random expressions: the three evaluators agree.

use proptest::prelude::*;

use super::eval::{bool_at, bool_row, float_at, float_row};
use super::{Bool, Float, FloatBuffer, Int, IntBuffer, b, h, kv, q, ranges, score};
use crate::mask_mod::cell;

fn ints() -> BoxedStrategy<Int> {
    let leaf = prop_oneof![
        Just(b()),
        Just(h()),
        Just(q()),
        Just(kv()),
        (-20i32..20).prop_map(Int::constant),
        Just(Int::constant(i32::MAX)),
        Just(Int::constant(i32::MIN)),
    ];
    leaf.prop_recursive(4, 24, 2, |inner| {
        (0usize..9, inner.clone(), inner).prop_map(|(op, x, y)| match op {
            0 => x + y,
            1 => x - y,
            2 => x * y,
            3 => x.div_floor(y),
            4 => x.rem_floor(y),
            5 => x.min(y),
            6 => x.max(y),
            7 => IntBuffer::new(vec![3, -1, 4, 1, 5]).at(x),
            _ => x.clone().lt(3).select_int(x, y),
        })
    })
    .boxed()
}

fn bools() -> BoxedStrategy<Bool> {
    let leaf = (0usize..7, ints(), ints()).prop_map(|(op, x, y)| match op {
        0 => x.lt(y),
        1 => x.le(y),
        2 => x.gt(y),
        3 => x.ge(y),
        4 => x.equals(y),
        5 => x.differs(y),
        _ => Bool::constant(true),
    });
    leaf.prop_recursive(3, 12, 2, |inner| {
        (0usize..3, inner.clone(), inner).prop_map(|(op, x, y)| match op {
            0 => x & y,
            1 => x | y,
            _ => !x,
        })
    })
    .boxed()
}

fn floats() -> BoxedStrategy<Float> {
    let leaf = prop_oneof![
        Just(score()),
        (-2.0f32..2.0).prop_map(Float::constant),
        ints().prop_map(Int::to_float)
    ];
    leaf.prop_recursive(4, 16, 3, |inner| {
        (0usize..10, inner.clone(), inner, bools()).prop_map(|(op, x, y, condition)| match op {
            0 => x + y,
            1 => x - y,
            2 => x * y,
            3 => x / y,
            4 => x.min(y),
            5 => x.max(y),
            6 => x.tanh(),
            7 => -x.abs(),
            8 => FloatBuffer::new(vec![0.5, -1.5]).at(q().rem_floor(2)) + x,
            _ => condition.select(x, y),
        })
    })
    .boxed()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn rows_and_ranges_agree_with_single_cells(
        expr in bools(),
        (b, h, q) in (0usize..3, 0usize..3, 0usize..90),
        (first, len) in (0usize..90, 0usize..150),
    ) {
        let mut row = vec![false; len];
        bool_row(&expr, cell(b, h, q, first), &mut row);
        let range = ranges::allowed(&expr, cell(b, h, q, 0), (first as i64, (first + len) as i64));
        for (i, &allowed) in row.iter().enumerate() {
            let key = first + i;
            prop_assert_eq!(allowed, bool_at(&expr, cell(b, h, q, key), 0.0), "key {}", key);
            if let Some((low, high)) = range {
                prop_assert_eq!(allowed, (low..high).contains(&(key as i64)), "key {} of {}..{}", key, low, high);
            }
        }
    }

    #[test]
    fn score_rows_agree_with_single_cells(
        expr in floats(),
        (q, first) in (0usize..90, 0usize..90),
        scores in prop::collection::vec(-3.0f32..3.0, 0..100),
    ) {
        let mut row = scores.clone();
        float_row(&expr, cell(1, 2, q, first), &mut row);
        for (i, (found, score)) in row.iter().zip(&scores).enumerate() {
            let expected = float_at(&expr, cell(1, 2, q, first + i), *score);
            prop_assert!(found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan()));
        }
    }
}

/// With one key only, position 0, any slope passes for one that wraps nowhere.
#[test]
fn slopes_that_leave_64_bits_are_not_compared_as_ranges() {
    let steep = kv() * i32::MAX * i32::MAX;
    let sum = steep.clone() + steep.clone() + steep.clone();
    for expr in [
        sum.clone().lt(5),
        (-sum.clone()).ge(sum.clone()),
        (sum.clone() + 5).lt(steep.clone() * -2),
        (sum * i32::MIN).equals(kv() * i32::MIN),
    ] {
        for (first, last) in [(0, 1), (0, 2), (1, 2), (i32::MAX as i64 - 1, i32::MAX as i64)] {
            if let Some((low, high)) = ranges::allowed(&expr, cell(0, 0, 0, 0), (first, last)) {
                for key in first..last {
                    let allowed = bool_at(&expr, cell(0, 0, 0, key as usize), 0.0);
                    assert_eq!((low..high).contains(&key), allowed, "key {key} of {expr:?}");
                }
            }
        }
    }
}

#[test]
fn comparisons_with_the_key_become_ranges() {
    let range = |expr: Bool, q: usize| ranges::allowed(&expr, cell(0, 0, q, 0), (0, 100));
    assert_eq!(range(q().ge(kv()), 7), Some((0, 8)));
    assert_eq!(range(q().ge(kv()) & (q() - kv()).lt(3), 7), Some((5, 8)));
    assert_eq!(range((kv() * 3 + 1).le(20), 0), Some((0, 7)));
    assert_eq!(range((kv() * 2).equals(8), 0), Some((4, 5)));
    assert_eq!(range(kv().rem_floor(2).equals(0), 0), None);
    let start = IntBuffer::new(vec![0, 0, 0, 3, 3]);
    assert_eq!(range(kv().ge(start.at(q())) & kv().le(q()), 4), Some((3, 5)));
}
