//! Evaluation on the CPU, over runs of consecutive keys of one row.
//!
//! The tree is walked once per run of [`LANES`] keys; each node then works on whole arrays, which the compiler turns
//! into vector instructions. Sub-trees that do not read the key are evaluated once per run as scalars.

use super::{Axis, Bool, BoolNode, Compare, Float, FloatFn, FloatNode, FloatOp, Int, IntNode, IntOp};

/// Keys evaluated per walk of the tree.
pub(crate) const LANES: usize = 64;

/// Where a run of keys lies.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cell {
    pub(crate) b: i32,
    pub(crate) h: i32,
    pub(crate) q: i32,
    /// First key of the run.
    pub(crate) kv: i32,
}

#[inline]
fn int_op(op: IntOp, x: i32, y: i32) -> i32 {
    match op {
        IntOp::Add => x.wrapping_add(y),
        IntOp::Sub => x.wrapping_sub(y),
        IntOp::Mul => x.wrapping_mul(y),
        IntOp::Div => div_floor(x, y),
        IntOp::Rem => x.wrapping_sub(div_floor(x, y).wrapping_mul(y)) * i32::from(y != 0),
        IntOp::Min => x.min(y),
        IntOp::Max => x.max(y),
    }
}

fn div_floor(x: i32, y: i32) -> i32 {
    if y == 0 {
        return 0;
    }
    let quotient = x.wrapping_div(y);
    let remainder = x.wrapping_rem(y);
    if remainder != 0 && (remainder < 0) != (y < 0) {
        quotient - 1
    } else {
        quotient
    }
}

#[inline]
fn float_op(op: FloatOp, x: f32, y: f32) -> f32 {
    match op {
        FloatOp::Add => x + y,
        FloatOp::Sub => x - y,
        FloatOp::Mul => x * y,
        FloatOp::Div => x / y,
        FloatOp::Min => x.min(y),
        FloatOp::Max => x.max(y),
    }
}

#[inline]
fn float_fn(op: FloatFn, x: f32) -> f32 {
    match op {
        FloatFn::Neg => -x,
        FloatFn::Abs => x.abs(),
        FloatFn::Exp => x.exp(),
        FloatFn::Log => x.ln(),
        FloatFn::Sqrt => x.sqrt(),
        FloatFn::Tanh => x.tanh(),
    }
}

#[inline]
fn compare<T: PartialOrd>(op: Compare, x: T, y: T) -> bool {
    match op {
        Compare::Lt => x < y,
        Compare::Le => x <= y,
        Compare::Gt => x > y,
        Compare::Ge => x >= y,
        Compare::Eq => x == y,
        Compare::Ne => x != y,
    }
}

fn load<T: Copy + Default>(values: &[T], index: i32) -> T {
    // A negative index becomes a huge one; both read as the default, as in the printed code.
    values.get(index as u32 as usize).copied().unwrap_or_default()
}

/// One cell of an integer expression.
pub(crate) fn int_at(expr: &Int, cell: Cell, score: f32) -> i32 {
    match expr.node() {
        IntNode::Const(value) => *value,
        IntNode::Axis(Axis::Batch) => cell.b,
        IntNode::Axis(Axis::Head) => cell.h,
        IntNode::Axis(Axis::Query) => cell.q,
        IntNode::Axis(Axis::Key) => cell.kv,
        IntNode::Binary(op, x, y) => int_op(*op, int_at(x, cell, score), int_at(y, cell, score)),
        IntNode::Load(buffer, index) => load(buffer.values(), int_at(index, cell, score)),
        IntNode::Select(condition, x, y) => {
            if bool_at(condition, cell, score) {
                int_at(x, cell, score)
            } else {
                int_at(y, cell, score)
            }
        }
    }
}

/// One cell of a float expression.
pub(crate) fn float_at(expr: &Float, cell: Cell, score: f32) -> f32 {
    match expr.node() {
        FloatNode::Const(value) => *value,
        FloatNode::Score => score,
        FloatNode::FromInt(x) => int_at(x, cell, score) as f32,
        FloatNode::Load(buffer, index) => load(buffer.values(), int_at(index, cell, score)),
        FloatNode::Binary(op, x, y) => float_op(*op, float_at(x, cell, score), float_at(y, cell, score)),
        FloatNode::Unary(op, x) => float_fn(*op, float_at(x, cell, score)),
        FloatNode::Select(condition, x, y) => {
            if bool_at(condition, cell, score) {
                float_at(x, cell, score)
            } else {
                float_at(y, cell, score)
            }
        }
    }
}

/// One cell of a truth value.
pub(crate) fn bool_at(expr: &Bool, cell: Cell, score: f32) -> bool {
    match expr.node() {
        BoolNode::Const(value) => *value,
        BoolNode::CompareInt(op, x, y) => compare(*op, int_at(x, cell, score), int_at(y, cell, score)),
        BoolNode::CompareFloat(op, x, y) => compare(*op, float_at(x, cell, score), float_at(y, cell, score)),
        BoolNode::And(x, y) => bool_at(x, cell, score) && bool_at(y, cell, score),
        BoolNode::Or(x, y) => bool_at(x, cell, score) || bool_at(y, cell, score),
        BoolNode::Not(x) => !bool_at(x, cell, score),
    }
}

type Ints = [i32; LANES];
type Floats = [f32; LANES];
type Bools = [bool; LANES];

/// A mask function over `out.len()` consecutive keys from `cell.kv`.
pub(crate) fn bool_row(expr: &Bool, cell: Cell, out: &mut [bool]) {
    let mut lanes = [false; LANES];
    let scores = [0.0; LANES];
    for (i, chunk) in out.chunks_mut(LANES).enumerate() {
        let cell = Cell {
            kv: cell.kv.wrapping_add((i * LANES) as i32),
            ..cell
        };
        bools(expr, cell, &scores, &mut lanes);
        chunk.copy_from_slice(&lanes[..chunk.len()]);
    }
}

/// A score function over `scores.len()` consecutive keys from `cell.kv`, in place.
pub(crate) fn float_row(expr: &Float, cell: Cell, scores: &mut [f32]) {
    let mut input = [0.0; LANES];
    let mut output = [0.0; LANES];
    for (i, chunk) in scores.chunks_mut(LANES).enumerate() {
        let cell = Cell {
            kv: cell.kv.wrapping_add((i * LANES) as i32),
            ..cell
        };
        input[..chunk.len()].copy_from_slice(chunk);
        floats(expr, cell, &input, &mut output);
        chunk.copy_from_slice(&output[..chunk.len()]);
    }
}

fn ints(expr: &Int, cell: Cell, scores: &Floats, out: &mut Ints) {
    if expr.deps().uniform() {
        *out = [int_at(expr, cell, 0.0); LANES];
        return;
    }
    match expr.node() {
        IntNode::Const(_) | IntNode::Axis(_) => {
            // The only leaf that varies along a row is the key.
            for (i, out) in out.iter_mut().enumerate() {
                *out = cell.kv.wrapping_add(i as i32);
            }
        }
        IntNode::Binary(op, x, y) => {
            let mut rhs = [0; LANES];
            ints(x, cell, scores, out);
            ints(y, cell, scores, &mut rhs);
            // One loop per operation: the operation is chosen outside the loop so that the loop is vector code.
            macro_rules! each {
                ($($op:ident)*) => {
                    match op {
                        $(IntOp::$op => {
                            for (x, y) in out.iter_mut().zip(&rhs) {
                                *x = int_op(IntOp::$op, *x, *y);
                            }
                        })*
                    }
                };
            }
            each!(Add Sub Mul Div Rem Min Max);
        }
        IntNode::Load(buffer, index) => {
            ints(index, cell, scores, out);
            let values = buffer.values();
            for x in out.iter_mut() {
                *x = load(values, *x);
            }
        }
        IntNode::Select(condition, x, y) => {
            let mut chosen = [false; LANES];
            let mut other = [0; LANES];
            bools(condition, cell, scores, &mut chosen);
            ints(x, cell, scores, out);
            ints(y, cell, scores, &mut other);
            for ((x, y), chosen) in out.iter_mut().zip(&other).zip(&chosen) {
                *x = if *chosen { *x } else { *y };
            }
        }
    }
}

fn floats(expr: &Float, cell: Cell, scores: &Floats, out: &mut Floats) {
    if expr.deps().uniform() {
        *out = [float_at(expr, cell, 0.0); LANES];
        return;
    }
    match expr.node() {
        FloatNode::Const(_) | FloatNode::Score => *out = *scores,
        FloatNode::FromInt(x) => {
            let mut values = [0; LANES];
            ints(x, cell, scores, &mut values);
            for (out, value) in out.iter_mut().zip(&values) {
                *out = *value as f32;
            }
        }
        FloatNode::Load(buffer, index) => {
            let mut indices = [0; LANES];
            ints(index, cell, scores, &mut indices);
            let values = buffer.values();
            for (out, index) in out.iter_mut().zip(&indices) {
                *out = load(values, *index);
            }
        }
        FloatNode::Binary(op, x, y) => {
            let mut rhs = [0.0; LANES];
            floats(x, cell, scores, out);
            floats(y, cell, scores, &mut rhs);
            macro_rules! each {
                ($($op:ident)*) => {
                    match op {
                        $(FloatOp::$op => {
                            for (x, y) in out.iter_mut().zip(&rhs) {
                                *x = float_op(FloatOp::$op, *x, *y);
                            }
                        })*
                    }
                };
            }
            each!(Add Sub Mul Div Min Max);
        }
        FloatNode::Unary(op, x) => {
            floats(x, cell, scores, out);
            for x in out.iter_mut() {
                *x = float_fn(*op, *x);
            }
        }
        FloatNode::Select(condition, x, y) => {
            let mut chosen = [false; LANES];
            let mut other = [0.0; LANES];
            bools(condition, cell, scores, &mut chosen);
            floats(x, cell, scores, out);
            floats(y, cell, scores, &mut other);
            for ((x, y), chosen) in out.iter_mut().zip(&other).zip(&chosen) {
                *x = if *chosen { *x } else { *y };
            }
        }
    }
}

fn compare_lanes<T: PartialOrd + Copy>(op: Compare, x: &[T; LANES], y: &[T; LANES], out: &mut Bools) {
    macro_rules! each {
        ($($op:ident)*) => {
            match op {
                $(Compare::$op => {
                    for ((out, x), y) in out.iter_mut().zip(x).zip(y) {
                        *out = compare(Compare::$op, *x, *y);
                    }
                })*
            }
        };
    }
    each!(Lt Le Gt Ge Eq Ne);
}

fn bools(expr: &Bool, cell: Cell, scores: &Floats, out: &mut Bools) {
    if expr.deps().uniform() {
        *out = [bool_at(expr, cell, 0.0); LANES];
        return;
    }
    match expr.node() {
        BoolNode::Const(value) => *out = [*value; LANES],
        BoolNode::CompareInt(op, x, y) => {
            let (mut lhs, mut rhs) = ([0; LANES], [0; LANES]);
            ints(x, cell, scores, &mut lhs);
            ints(y, cell, scores, &mut rhs);
            compare_lanes(*op, &lhs, &rhs, out);
        }
        BoolNode::CompareFloat(op, x, y) => {
            let (mut lhs, mut rhs) = ([0.0; LANES], [0.0; LANES]);
            floats(x, cell, scores, &mut lhs);
            floats(y, cell, scores, &mut rhs);
            compare_lanes(*op, &lhs, &rhs, out);
        }
        BoolNode::And(x, y) => {
            let mut rhs = [false; LANES];
            bools(x, cell, scores, out);
            bools(y, cell, scores, &mut rhs);
            for (x, y) in out.iter_mut().zip(&rhs) {
                *x &= *y;
            }
        }
        BoolNode::Or(x, y) => {
            let mut rhs = [false; LANES];
            bools(x, cell, scores, out);
            bools(y, cell, scores, &mut rhs);
            for (x, y) in out.iter_mut().zip(&rhs) {
                *x |= *y;
            }
        }
        BoolNode::Not(x) => {
            bools(x, cell, scores, out);
            for x in out.iter_mut() {
                *x = !*x;
            }
        }
    }
}
