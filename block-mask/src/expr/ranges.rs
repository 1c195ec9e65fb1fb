//! Rows whose allowed keys form one range, found without looking at the keys.
//!
//! Causal, sliding-window, padding, prefix and document-start masks all compare the key with something that is constant
//! along a row. Solving those comparisons gives the row's first and last key in O(tree), so neither building such a
//! mask nor attending under it evaluates anything per key.

use super::eval::{Cell, bool_at, int_at};
use super::{Axis, Bool, BoolNode, Compare, Int, IntNode, IntOp};

/// Keys `low..high` (empty when `low >= high`).
pub(crate) type KeyRange = (i64, i64);

const EMPTY: KeyRange = (0, 0);

/// The allowed keys among `keys` when they form one range, else `None`.
pub(crate) fn allowed(expr: &Bool, cell: Cell, keys: KeyRange) -> Option<KeyRange> {
    if keys.0 >= keys.1 {
        return Some(EMPTY);
    }
    if expr.deps().uniform() {
        return Some(if bool_at(expr, cell, 0.0) { keys } else { EMPTY });
    }
    match expr.node() {
        BoolNode::Const(value) => Some(if *value { keys } else { EMPTY }),
        BoolNode::CompareInt(op, x, y) => comparison(*op, x, y, cell, keys),
        BoolNode::CompareFloat(..) => None,
        BoolNode::And(x, y) => {
            let x = allowed(x, cell, keys)?;
            let y = allowed(y, cell, keys)?;
            Some((x.0.max(y.0), x.1.min(y.1)))
        }
        BoolNode::Or(x, y) => {
            let x = allowed(x, cell, keys)?;
            let y = allowed(y, cell, keys)?;
            if x.0 >= x.1 {
                Some(y)
            } else if y.0 >= y.1 {
                Some(x)
            } else if x.0 <= y.1 && y.0 <= x.1 {
                Some((x.0.min(y.0), x.1.max(y.1)))
            } else {
                None
            }
        }
        BoolNode::Not(x) => complement(allowed(x, cell, keys)?, keys),
    }
}

fn complement(x: KeyRange, keys: KeyRange) -> Option<KeyRange> {
    if x.0 >= x.1 {
        Some(keys)
    } else if x.0 <= keys.0 {
        Some((x.1, keys.1))
    } else if x.1 >= keys.1 {
        Some((keys.0, x.0))
    } else {
        None
    }
}

/// Keys in `keys` with `x op y`.
fn comparison(op: Compare, x: &Int, y: &Int, cell: Cell, keys: KeyRange) -> Option<KeyRange> {
    let x = linear(x, cell, keys)?;
    let y = linear(y, cell, keys)?;
    // x op y  ⇔  slope·kv + offset op 0
    let Linear { slope, offset } = difference(x, y)?;
    if slope == 0 {
        let holds = match op {
            Compare::Lt => offset < 0,
            Compare::Le => offset <= 0,
            Compare::Gt => offset > 0,
            Compare::Ge => offset >= 0,
            Compare::Eq => offset == 0,
            Compare::Ne => offset != 0,
        };
        return Some(if holds { keys } else { EMPTY });
    }
    // With a negative slope both sides change sign, and with them the direction of the comparison.
    let (op, slope, offset) = if slope > 0 {
        (op, slope, offset)
    } else {
        let (slope, offset) = (slope.checked_neg()?, offset.checked_neg()?);
        let mirrored = match op {
            Compare::Lt => Compare::Gt,
            Compare::Le => Compare::Ge,
            Compare::Gt => Compare::Lt,
            Compare::Ge => Compare::Le,
            same => same,
        };
        (mirrored, slope, offset)
    };
    // kv op −offset / slope, with slope > 0.
    let zero = offset.checked_neg()?;
    // Bounds far outside the keys are as good as those next to them.
    let floor = zero.div_euclid(slope).clamp(keys.0 - 2, keys.1 + 1);
    let exact = zero.rem_euclid(slope) == 0;
    let below = if exact { floor } else { floor + 1 }; // first key that is not below the bound
    let (low, high) = match op {
        Compare::Lt => (keys.0, below),
        Compare::Le => (keys.0, floor + 1),
        Compare::Gt => (floor + 1, keys.1),
        Compare::Ge => (below, keys.1),
        Compare::Eq if exact => (floor, floor + 1),
        Compare::Eq => EMPTY,
        Compare::Ne if exact => return complement((floor.max(keys.0), (floor + 1).min(keys.1)), keys),
        Compare::Ne => keys,
    };
    Some((low.max(keys.0), high.min(keys.1)))
}

/// `slope · kv + offset`, exact in 64 bits.
#[derive(Clone, Copy)]
struct Linear {
    slope: i64,
    offset: i64,
}

/// The expression as a linear function of the key, when it is one and nothing wraps for any key of `keys`.
fn linear(expr: &Int, cell: Cell, keys: KeyRange) -> Option<Linear> {
    if expr.deps().uniform() {
        return Some(Linear {
            slope: 0,
            offset: int_at(expr, cell, 0.0) as i64,
        });
    }
    let result = match expr.node() {
        IntNode::Axis(Axis::Key) => Linear { slope: 1, offset: 0 },
        IntNode::Binary(op, x, y) => {
            let x = linear(x, cell, keys)?;
            let y = linear(y, cell, keys)?;
            match op {
                IntOp::Add => Linear {
                    slope: x.slope.checked_add(y.slope)?,
                    offset: x.offset.checked_add(y.offset)?,
                },
                IntOp::Sub => difference(x, y)?,
                IntOp::Mul if x.slope == 0 => scaled(y, x.offset)?,
                IntOp::Mul if y.slope == 0 => scaled(x, y.offset)?,
                _ => return None,
            }
        }
        _ => return None,
    };
    // Between the two ends a linear function stays between its values there.
    for key in [keys.0, keys.1 - 1] {
        let value = result.slope.checked_mul(key)?.checked_add(result.offset)?;
        i32::try_from(value).ok()?;
    }
    Some(result)
}

fn difference(x: Linear, y: Linear) -> Option<Linear> {
    Some(Linear {
        slope: x.slope.checked_sub(y.slope)?,
        offset: x.offset.checked_sub(y.offset)?,
    })
}

fn scaled(x: Linear, factor: i64) -> Option<Linear> {
    Some(Linear {
        slope: x.slope.checked_mul(factor)?,
        offset: x.offset.checked_mul(factor)?,
    })
}
