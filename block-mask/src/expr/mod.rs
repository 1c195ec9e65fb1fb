//! Expression trees over (b, h, q, kv) and captured buffers: the language of mask and score functions.
//!
//! Three kinds of values, each a cheap handle on a shared immutable node: [`Int`] (32-bit, wrapping),
//! [`Float`] (f32) and [`Bool`]. The leaves are [`b()`], [`h()`], [`q()`], [`kv()`], constants, reads of captured buffers
//! ([`IntBuffer::at`], [`FloatBuffer::at`]) and, in score functions, [`score()`].
//!
//! ```
//! use block_mask::expr::{IntBuffer, kv, q};
//! let start = IntBuffer::new(vec![0, 0, 0, 3, 3]); // first key of each query's document
//! let allowed = q().ge(kv()) & kv().ge(start.at(q()));
//! let mask = block_mask::MaskMod::new(allowed)?;
//! assert!(mask.allows(0, 0, 4, 3) && !mask.allows(0, 0, 4, 2));
//! # Ok::<(), block_mask::Error>(())
//! ```
//!
//! Every operation has one meaning on the CPU and in the printed CUDA C, for every input: integers wrap, `div` and `rem`
//! round towards −∞ and give 0 for a zero divisor, and a read outside a buffer gives 0 (although [`Domain`] checks
//! refuse expressions that could do so).

pub(crate) mod bounds;
mod buffer;
pub(crate) mod eval;
mod node;
pub(crate) mod ranges;
#[cfg(test)]
mod tests;

use crate::error::{Error, Result};

pub use bounds::Domain;
pub use buffer::{FloatBuffer, IntBuffer};
pub use node::{Axis, Bool, Float, Int, b, h, kv, q, score};
pub(crate) use node::{BoolNode, Compare, FloatFn, FloatNode, FloatOp, IntNode, IntOp};

/// Deepest nesting that is evaluated; deeper expressions are refused wherever they are used, and count as 0 or false until
/// then.
pub const MAX_DEPTH: usize = 256;

/// Most nodes of an expression, a shared sub-expression counted at each use; larger ones fare as deeper ones.
pub const MAX_NODES: usize = 1 << 16;

/// Refuses expressions that are too deep or too large.
pub(crate) fn check_size(depth: usize, size: usize) -> Result<()> {
    if depth > MAX_DEPTH {
        return Err(Error::TooDeep {
            depth,
            max: MAX_DEPTH,
        });
    }
    if size > MAX_NODES {
        return Err(Error::TooLarge {
            what: "the size of the expression",
            value: size,
            max: MAX_NODES,
        });
    }
    Ok(())
}
