//! The nodes and the ways to build them.

use std::fmt;
use std::ops;
use std::sync::Arc;

use super::buffer::{FloatBuffer, IntBuffer};
use super::check_size;

/// One of the four coordinates of a cell of the attention matrix.
///
/// ```
/// use block_mask::MaskMod;
/// use block_mask::expr::Axis;
///
/// let causal = MaskMod::causal();
/// assert!(causal.depends_on(Axis::Query) && causal.depends_on(Axis::Key) && !causal.depends_on(Axis::Head));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Axis {
    /// Batch row (in a paged mask: position in the batch, not the slot).
    Batch,
    /// Query head.
    Head,
    /// Query position.
    Query,
    /// Key position, always logical.
    Key,
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Axis::Batch => "the batch row",
            Axis::Head => "the head",
            Axis::Query => "the query position",
            Axis::Key => "the key position",
        })
    }
}

/// Which leaves an expression reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Deps(u8);

impl Deps {
    const NONE: Deps = Deps(0);
    const SCORE: Deps = Deps(16);

    fn of(axis: Axis) -> Deps {
        Deps(match axis {
            Axis::Batch => 1,
            Axis::Head => 2,
            Axis::Query => 4,
            Axis::Key => 8,
        })
    }

    pub(crate) fn on(self, axis: Axis) -> bool {
        self.0 & Deps::of(axis).0 != 0
    }

    pub(crate) fn on_score(self) -> bool {
        self.0 & Deps::SCORE.0 != 0
    }

    /// True when every lane of a run of keys has the same value.
    pub(crate) fn uniform(self) -> bool {
        !self.on(Axis::Key) && !self.on_score()
    }
}

impl ops::BitOr for Deps {
    type Output = Deps;
    fn bitor(self, other: Deps) -> Deps {
        Deps(self.0 | other.0)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IntOp {
    Add,
    Sub,
    Mul,
    Div,
    Rem,
    Min,
    Max,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FloatOp {
    Add,
    Sub,
    Mul,
    Div,
    Min,
    Max,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FloatFn {
    Neg,
    Abs,
    Exp,
    Log,
    Sqrt,
    Tanh,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Compare {
    Lt,
    Le,
    Gt,
    Ge,
    Eq,
    Ne,
}

#[derive(Debug)]
pub(crate) enum IntNode {
    Const(i32),
    Axis(Axis),
    Binary(IntOp, Int, Int),
    Load(IntBuffer, Int),
    Select(Bool, Int, Int),
}

#[derive(Debug)]
pub(crate) enum FloatNode {
    Const(f32),
    Score,
    FromInt(Int),
    Load(FloatBuffer, Int),
    Binary(FloatOp, Float, Float),
    Unary(FloatFn, Float),
    Select(Bool, Float, Float),
}

#[derive(Debug)]
pub(crate) enum BoolNode {
    Const(bool),
    CompareInt(Compare, Int, Int),
    CompareFloat(Compare, Float, Float),
    And(Bool, Bool),
    Or(Bool, Bool),
    Not(Bool),
}

macro_rules! handle {
    ($(#[$doc:meta])* $name:ident, $node:ident) => {
        $(#[$doc])*
        #[derive(Clone, Debug)]
        pub struct $name {
            node: Arc<$node>,
            deps: Deps,
            depth: usize,
            size: usize,
        }

        impl $name {
            /// A tree beyond the limits keeps its measures, by which every use refuses it, but not its nodes: walking
            /// them, or dropping them, would overflow the stack or never end.
            pub(super) fn build(node: $node, children: &[(Deps, usize, usize)]) -> $name {
                let depth = children.iter().map(|child| child.1).max().unwrap_or(0).saturating_add(1);
                let size = children.iter().fold(1usize, |acc, child| acc.saturating_add(child.2));
                if check_size(depth, size).is_err() {
                    return $name { depth, size, ..$name::constant(Default::default()) };
                }
                let deps = children.iter().fold(Deps::NONE, |acc, child| acc | child.0);
                $name { node: Arc::new(node), deps, depth, size }
            }

            fn leaf(node: $node, deps: Deps) -> $name {
                $name { node: Arc::new(node), deps, depth: 1, size: 1 }
            }

            pub(crate) fn node(&self) -> &$node {
                &self.node
            }

            pub(crate) fn deps(&self) -> Deps {
                self.deps
            }

            pub(super) fn info(&self) -> (Deps, usize, usize) {
                (self.deps, self.depth, self.size)
            }
        }
    };
}

handle!(
    /// A 32-bit integer expression; arithmetic wraps.
    Int,
    IntNode
);
handle!(
    /// An f32 expression.
    Float,
    FloatNode
);
handle!(
    /// A truth value: combine with `&`, `|`, `!`.
    Bool,
    BoolNode
);

/// What an evaluation of a whole function costs; integers never are one.
macro_rules! cost {
    ($($name:ident)*) => {$(
        impl $name {
            /// Levels of nesting.
            pub(crate) fn depth(&self) -> usize {
                self.depth
            }

            /// Nodes of the tree, shared ones counted at every use.
            pub(crate) fn size(&self) -> usize {
                self.size
            }
        }
    )*};
}
cost!(Float Bool);

/// The batch row.
pub fn b() -> Int {
    Int::axis(Axis::Batch)
}

/// The query head.
pub fn h() -> Int {
    Int::axis(Axis::Head)
}

/// The query position.
pub fn q() -> Int {
    Int::axis(Axis::Query)
}

/// The key position, always logical: position in the sequence, wherever its page lies.
pub fn kv() -> Int {
    Int::axis(Axis::Key)
}

/// The scaled score `scale · q·k` that a score function modifies.
pub fn score() -> Float {
    Float::leaf(FloatNode::Score, Deps::SCORE)
}

impl Int {
    fn axis(axis: Axis) -> Int {
        Int::leaf(IntNode::Axis(axis), Deps::of(axis))
    }

    /// A constant.
    pub fn constant(value: i32) -> Int {
        Int::leaf(IntNode::Const(value), Deps::NONE)
    }

    fn binary(op: IntOp, x: Int, y: Int) -> Int {
        let info = [x.info(), y.info()];
        Int::build(IntNode::Binary(op, x, y), &info)
    }

    fn compare(self, op: Compare, other: impl Into<Int>) -> Bool {
        let other = other.into();
        let info = [self.info(), other.info()];
        Bool::build(BoolNode::CompareInt(op, self, other), &info)
    }

    /// The quotient rounded towards −∞; 0 when the divisor is 0.
    pub fn div_floor(self, divisor: impl Into<Int>) -> Int {
        Int::binary(IntOp::Div, self, divisor.into())
    }

    /// Remainder of [`Int::div_floor`], with the sign of the divisor; 0 when the divisor is 0.
    pub fn rem_floor(self, divisor: impl Into<Int>) -> Int {
        Int::binary(IntOp::Rem, self, divisor.into())
    }

    /// The smaller of two.
    pub fn min(self, other: impl Into<Int>) -> Int {
        Int::binary(IntOp::Min, self, other.into())
    }

    /// The larger of two.
    pub fn max(self, other: impl Into<Int>) -> Int {
        Int::binary(IntOp::Max, self, other.into())
    }

    /// Limited to `low..=high`.
    pub fn clamp(self, low: impl Into<Int>, high: impl Into<Int>) -> Int {
        self.max(low).min(high)
    }

    /// `self < other`.
    pub fn lt(self, other: impl Into<Int>) -> Bool {
        self.compare(Compare::Lt, other)
    }

    /// `self <= other`.
    pub fn le(self, other: impl Into<Int>) -> Bool {
        self.compare(Compare::Le, other)
    }

    /// `self > other`.
    pub fn gt(self, other: impl Into<Int>) -> Bool {
        self.compare(Compare::Gt, other)
    }

    /// `self >= other`.
    pub fn ge(self, other: impl Into<Int>) -> Bool {
        self.compare(Compare::Ge, other)
    }

    /// `self == other`.
    pub fn equals(self, other: impl Into<Int>) -> Bool {
        self.compare(Compare::Eq, other)
    }

    /// `self != other`.
    pub fn differs(self, other: impl Into<Int>) -> Bool {
        self.compare(Compare::Ne, other)
    }

    /// Converted to f32, rounding to nearest beyond 2²⁴.
    pub fn to_float(self) -> Float {
        let info = [self.info()];
        Float::build(FloatNode::FromInt(self), &info)
    }
}

impl Float {
    /// A constant.
    pub fn constant(value: f32) -> Float {
        Float::leaf(FloatNode::Const(value), Deps::NONE)
    }

    fn binary(op: FloatOp, x: Float, y: Float) -> Float {
        let info = [x.info(), y.info()];
        Float::build(FloatNode::Binary(op, x, y), &info)
    }

    fn unary(self, op: FloatFn) -> Float {
        let info = [self.info()];
        Float::build(FloatNode::Unary(op, self), &info)
    }

    fn compare(self, op: Compare, other: impl Into<Float>) -> Bool {
        let other = other.into();
        let info = [self.info(), other.info()];
        Bool::build(BoolNode::CompareFloat(op, self, other), &info)
    }

    /// The smaller of two.
    pub fn min(self, other: impl Into<Float>) -> Float {
        Float::binary(FloatOp::Min, self, other.into())
    }

    /// The larger of two.
    pub fn max(self, other: impl Into<Float>) -> Float {
        Float::binary(FloatOp::Max, self, other.into())
    }

    /// Absolute value.
    pub fn abs(self) -> Float {
        self.unary(FloatFn::Abs)
    }

    /// eˣ.
    pub fn exp(self) -> Float {
        self.unary(FloatFn::Exp)
    }

    /// Natural logarithm.
    pub fn ln(self) -> Float {
        self.unary(FloatFn::Log)
    }

    /// Square root.
    pub fn sqrt(self) -> Float {
        self.unary(FloatFn::Sqrt)
    }

    /// Hyperbolic tangent.
    pub fn tanh(self) -> Float {
        self.unary(FloatFn::Tanh)
    }

    /// `self < other`.
    pub fn lt(self, other: impl Into<Float>) -> Bool {
        self.compare(Compare::Lt, other)
    }

    /// `self >= other`.
    pub fn ge(self, other: impl Into<Float>) -> Bool {
        self.compare(Compare::Ge, other)
    }
}

impl Bool {
    /// A constant.
    pub fn constant(value: bool) -> Bool {
        Bool::leaf(BoolNode::Const(value), Deps::NONE)
    }

    /// `then` where this holds, `otherwise` elsewhere.
    pub fn select_int(self, then: impl Into<Int>, otherwise: impl Into<Int>) -> Int {
        let (then, otherwise) = (then.into(), otherwise.into());
        let info = [self.info(), then.info(), otherwise.info()];
        Int::build(IntNode::Select(self, then, otherwise), &info)
    }

    /// `then` where this holds, `otherwise` elsewhere.
    pub fn select(self, then: impl Into<Float>, otherwise: impl Into<Float>) -> Float {
        let (then, otherwise) = (then.into(), otherwise.into());
        let info = [self.info(), then.info(), otherwise.info()];
        Float::build(FloatNode::Select(self, then, otherwise), &info)
    }
}

// Substitution of the score, for composing score functions. Parts that do not read it stay shared.
impl Float {
    pub(crate) fn with_score(&self, inner: &Float) -> Float {
        if !self.deps.on_score() {
            return self.clone();
        }
        match self.node() {
            FloatNode::Score => inner.clone(),
            FloatNode::Const(_) => self.clone(),
            FloatNode::FromInt(x) => x.with_score(inner).to_float(),
            FloatNode::Load(buffer, index) => buffer.at(index.with_score(inner)),
            FloatNode::Binary(op, x, y) => Float::binary(*op, x.with_score(inner), y.with_score(inner)),
            FloatNode::Unary(op, x) => x.with_score(inner).unary(*op),
            FloatNode::Select(condition, x, y) => condition
                .with_score(inner)
                .select(x.with_score(inner), y.with_score(inner)),
        }
    }
}

impl Int {
    fn with_score(&self, inner: &Float) -> Int {
        if !self.deps.on_score() {
            return self.clone();
        }
        match self.node() {
            IntNode::Const(_) | IntNode::Axis(_) => self.clone(),
            IntNode::Binary(op, x, y) => Int::binary(*op, x.with_score(inner), y.with_score(inner)),
            IntNode::Load(buffer, index) => buffer.at(index.with_score(inner)),
            IntNode::Select(condition, x, y) => condition
                .with_score(inner)
                .select_int(x.with_score(inner), y.with_score(inner)),
        }
    }
}

impl Bool {
    fn with_score(&self, inner: &Float) -> Bool {
        if !self.deps.on_score() {
            return self.clone();
        }
        match self.node() {
            BoolNode::Const(_) => self.clone(),
            BoolNode::CompareInt(op, x, y) => x.with_score(inner).compare(*op, y.with_score(inner)),
            BoolNode::CompareFloat(op, x, y) => x.with_score(inner).compare(*op, y.with_score(inner)),
            BoolNode::And(x, y) => x.with_score(inner) & y.with_score(inner),
            BoolNode::Or(x, y) => x.with_score(inner) | y.with_score(inner),
            BoolNode::Not(x) => !x.with_score(inner),
        }
    }
}

impl From<i32> for Int {
    fn from(value: i32) -> Int {
        Int::constant(value)
    }
}

impl From<f32> for Float {
    fn from(value: f32) -> Float {
        Float::constant(value)
    }
}

impl From<bool> for Bool {
    fn from(value: bool) -> Bool {
        Bool::constant(value)
    }
}

macro_rules! arithmetic {
    ($kind:ident, $scalar:ty, $($trait:ident $method:ident $op:expr;)*) => {$(
        impl<T: Into<$kind>> ops::$trait<T> for $kind {
            type Output = $kind;
            fn $method(self, other: T) -> $kind {
                $kind::binary($op, self, other.into())
            }
        }
        impl ops::$trait<$kind> for $scalar {
            type Output = $kind;
            fn $method(self, other: $kind) -> $kind {
                $kind::binary($op, self.into(), other)
            }
        }
    )*};
}
arithmetic!(Int, i32, Add add IntOp::Add; Sub sub IntOp::Sub; Mul mul IntOp::Mul;);
arithmetic!(Float, f32, Add add FloatOp::Add; Sub sub FloatOp::Sub; Mul mul FloatOp::Mul; Div div FloatOp::Div;);

impl ops::Neg for Float {
    type Output = Float;
    fn neg(self) -> Float {
        self.unary(FloatFn::Neg)
    }
}

impl ops::Neg for Int {
    type Output = Int;
    fn neg(self) -> Int {
        Int::binary(IntOp::Sub, Int::constant(0), self)
    }
}

impl ops::BitAnd for Bool {
    type Output = Bool;
    fn bitand(self, other: Bool) -> Bool {
        let info = [self.info(), other.info()];
        Bool::build(BoolNode::And(self, other), &info)
    }
}

impl ops::BitOr for Bool {
    type Output = Bool;
    fn bitor(self, other: Bool) -> Bool {
        let info = [self.info(), other.info()];
        Bool::build(BoolNode::Or(self, other), &info)
    }
}

impl ops::Not for Bool {
    type Output = Bool;
    fn not(self) -> Bool {
        let info = [self.info()];
        Bool::build(BoolNode::Not(self), &info)
    }
}
