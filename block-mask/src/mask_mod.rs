//! Mask functions: which keys a query may attend to.

use std::ops::{BitAnd, BitOr, Not};

use crate::error::{Error, Result};
use crate::expr::eval::{self, Cell};
use crate::expr::ranges::{self, KeyRange};
use crate::expr::{Axis, Bool, Domain, Int, IntBuffer, b, bounds, check_size, h, kv, q};

/// A mask function `(b, h, q, kv) -> bool`; true means "may attend".
///
/// Functions combine with `&`, `|` and `!`, and cloning one is cheap.
///
/// ```
/// use block_mask::MaskMod;
/// let window = MaskMod::causal() & MaskMod::sliding_window(8);
/// assert!(window.allows(0, 0, 20, 13));
/// assert!(!window.allows(0, 0, 20, 12)); // too far back
/// assert!(!window.allows(0, 0, 20, 21)); // in the future
/// ```
#[derive(Clone, Debug)]
pub struct MaskMod {
    expr: Bool,
}

impl MaskMod {
    /// A function written from expression nodes.
    ///
    /// # Errors
    /// [`Error::ScoreInMask`] if it reads the score; [`Error::TooDeep`] or [`Error::TooLarge`] beyond
    /// [`MAX_DEPTH`](crate::expr::MAX_DEPTH) levels or [`MAX_NODES`](crate::expr::MAX_NODES) nodes.
    pub fn new(expr: Bool) -> Result<MaskMod> {
        if expr.deps().on_score() {
            return Err(Error::ScoreInMask);
        }
        let mask = MaskMod { expr };
        check_size(mask.expr.depth(), mask.expr.size())?;
        Ok(mask)
    }

    fn of(expr: Bool) -> MaskMod {
        MaskMod { expr }
    }

    /// Every key.
    pub fn all() -> MaskMod {
        MaskMod::of(Bool::constant(true))
    }

    /// No key.
    pub fn none() -> MaskMod {
        MaskMod::of(Bool::constant(false))
    }

    /// Keys at or before the query: `q >= kv`.
    pub fn causal() -> MaskMod {
        MaskMod::of(q().ge(kv()))
    }

    /// Causal with a start per batch row: `q + offset[b] >= kv`, for queries counted from the start of a step while keys
    /// are counted from the start of the sequence. No offset is so large that the sum wraps. (Masks made by
    /// [`BlockMask::packed`] pass positions already and need only [`MaskMod::causal`].)
    ///
    /// [`BlockMask::packed`]: crate::BlockMask::packed
    pub fn causal_with_offset(offset: impl Into<Vec<i32>>) -> MaskMod {
        let offset = IntBuffer::new(offset).at(b());
        // What is below 0 goes to the left and what is above to the right, so that neither side can leave 32 bits.
        MaskMod::of((q() + offset.clone().min(0)).ge(kv() - offset.max(0)))
    }

    /// The last `window` keys up to the query and everything after it: `q - kv < window`. With `window` 0 nothing at or
    /// before the query is left. Combine with [`MaskMod::causal`].
    pub fn sliding_window(window: usize) -> MaskMod {
        let window = i32::try_from(window).unwrap_or(i32::MAX);
        MaskMod::of((q() - kv()).lt(window))
    }

    /// Query and key in the same document of a packed row; `document[i]` is the document of position `i`.
    ///
    /// This reads the buffer per key. For documents that are contiguous, [`MaskMod::document_causal`] needs only a
    /// start per query.
    pub fn document(document: impl Into<Vec<i32>>) -> MaskMod {
        let document = IntBuffer::new(document);
        MaskMod::of(document.at(q()).equals(document.at(kv())))
    }

    /// Causal within each document of a packed row: `start[q] <= kv <= q`, where `lengths` are the documents' lengths in
    /// order. Positions past the last document see only themselves. A document that reaches beyond the last position
    /// there can be (`i32::MAX - 1`) has no end, and documents after it have no position.
    ///
    /// Memory: 4 bytes for each position of the documents that end.
    pub fn document_causal(lengths: &[usize]) -> MaskMod {
        let mut start = Vec::new();
        let mut endless = None;
        for &length in lengths {
            // `start` never grows beyond i32::MAX - 1 elements.
            let first = start.len() as i32;
            let end = start.len().saturating_add(length);
            if end >= i32::MAX as usize {
                endless = Some(first);
                break;
            }
            start.resize(end, first);
        }
        let past = start.len() as i32;
        // Past the documents that end, a position belongs to the one without an end or is its own start. Buffers are
        // never read outside their bounds.
        let rest = endless.map_or_else(q, Int::constant);
        let first: Int = if start.is_empty() {
            rest
        } else {
            let start = IntBuffer::new(start);
            q().lt(past).select_int(start.at(q().min(past - 1)), rest)
        };
        MaskMod::of(q().ge(kv()) & kv().ge(first))
    }

    /// Prefix-LM: the first `prefix[b]` keys are visible to every query, the rest causally.
    pub fn prefix_lm(prefix: impl Into<Vec<i32>>) -> MaskMod {
        MaskMod::of(kv().lt(IntBuffer::new(prefix).at(b()))) | MaskMod::causal()
    }

    /// Keys before the row's length: `kv < length[b]`. Says nothing about order: combine with [`MaskMod::causal`].
    pub fn padding(length: impl Into<Vec<i32>>) -> MaskMod {
        MaskMod::of(kv().lt(IntBuffer::new(length).at(b())))
    }

    /// Per-query ranges `start[q] <= kv < end[q]`.
    pub fn key_ranges(start: impl Into<Vec<i32>>, end: impl Into<Vec<i32>>) -> MaskMod {
        MaskMod::of(kv().ge(IntBuffer::new(start).at(q())) & kv().lt(IntBuffer::new(end).at(q())))
    }

    /// The cells of a dense mask `[batch, heads, q_len, kv_len]`.
    pub(crate) fn dense(cells: Vec<i32>, heads: i32, q_len: i32, kv_len: i32) -> MaskMod {
        let index = ((b() * heads + h()) * q_len + q()) * kv_len + kv();
        MaskMod::of(IntBuffer::new(cells).at(index).differs(0))
    }

    /// The expression.
    pub fn expr(&self) -> &Bool {
        &self.expr
    }

    /// Whether the function reads an axis.
    pub fn depends_on(&self, axis: Axis) -> bool {
        self.expr.deps().on(axis)
    }

    /// One cell. Reads outside a captured buffer give 0. Positions count to `i32::MAX`; larger ones are taken for it.
    /// An expression beyond [`MAX_DEPTH`](crate::expr::MAX_DEPTH) or [`MAX_NODES`](crate::expr::MAX_NODES) counts as
    /// false; [`MaskMod::check`] tells.
    pub fn allows(&self, b: usize, h: usize, q: usize, kv: usize) -> bool {
        eval::bool_at(&self.expr, cell(b, h, q, kv), 0.0)
    }

    /// `out[i]` = the cell at key `kv + i`, as [`MaskMod::allows`] gives it.
    pub fn eval_row(&self, b: usize, h: usize, q: usize, kv: usize, out: &mut [bool]) {
        let (row, beyond) = out.split_at_mut(out.len().min(positions_from(kv)));
        eval::bool_row(&self.expr, cell(b, h, q, kv), row);
        if !beyond.is_empty() {
            beyond.fill(self.allows(b, h, q, usize::MAX));
        }
    }

    /// The allowed keys among `keys` if they form one range (no key is looked at).
    pub(crate) fn key_range(&self, b: usize, h: usize, q: usize, keys: KeyRange) -> Option<KeyRange> {
        ranges::allowed(&self.expr, cell(b, h, q, 0), keys)
    }

    /// Proves that no captured buffer is read outside its bounds anywhere in `domain`.
    ///
    /// # Errors
    /// [`Error::IndexOutOfBounds`] naming the buffer and the reach of the index; [`Error::TooDeep`],
    /// [`Error::TooLarge`] for expressions or positions beyond the limits.
    pub fn check(&self, domain: &Domain) -> Result<()> {
        check_size(self.expr.depth(), self.expr.size())?;
        bounds::check_bool(&self.expr, domain)
    }
}

/// A cell; positions beyond 32 bits, which no mask has, are taken for the largest.
pub(crate) fn cell(b: usize, h: usize, q: usize, kv: usize) -> Cell {
    let position = |x: usize| x.min(i32::MAX as usize) as i32;
    Cell {
        b: position(b),
        h: position(h),
        q: position(q),
        kv: position(kv),
    }
}

/// Positions from `kv` to the largest.
pub(crate) fn positions_from(kv: usize) -> usize {
    (i32::MAX as usize + 1).saturating_sub(kv)
}

impl BitAnd for MaskMod {
    type Output = MaskMod;
    fn bitand(self, other: MaskMod) -> MaskMod {
        MaskMod::of(self.expr & other.expr)
    }
}

impl BitOr for MaskMod {
    type Output = MaskMod;
    fn bitor(self, other: MaskMod) -> MaskMod {
        MaskMod::of(self.expr | other.expr)
    }
}

impl Not for MaskMod {
    type Output = MaskMod;
    fn not(self) -> MaskMod {
        MaskMod::of(!self.expr)
    }
}

/// All of several functions; of none, everything.
impl FromIterator<MaskMod> for MaskMod {
    fn from_iter<I: IntoIterator<Item = MaskMod>>(masks: I) -> MaskMod {
        balanced(masks.into_iter().collect(), |x, y| x & y).unwrap_or_else(MaskMod::all)
    }
}

/// Joins neighbours until one is left: a tree of many masks is as shallow as it can be.
fn balanced(mut masks: Vec<MaskMod>, join: impl Fn(MaskMod, MaskMod) -> MaskMod) -> Option<MaskMod> {
    while masks.len() > 1 {
        let mut left = masks.into_iter();
        let mut joined = Vec::with_capacity(left.len().div_ceil(2));
        while let Some(x) = left.next() {
            joined.push(match left.next() {
                Some(y) => join(x, y),
                None => x,
            });
        }
        masks = joined;
    }
    masks.pop()
}

impl MaskMod {
    /// Any of several functions; of none, nothing.
    pub fn any(masks: impl IntoIterator<Item = MaskMod>) -> MaskMod {
        balanced(masks.into_iter().collect(), |x, y| x | y).unwrap_or_else(MaskMod::none)
    }

    /// All of several functions; of none, everything.
    pub fn every(masks: impl IntoIterator<Item = MaskMod>) -> MaskMod {
        masks.into_iter().collect()
    }
}
