//! Lengths and block sizes of a mask.

use crate::error::{Error, Result};

/// Block size that FlexAttention uses when none is asked for.
pub const DEFAULT_BLOCK: usize = 128;

/// Lengths and block sizes of a mask. Lengths need not be multiples of the block sizes.
///
/// ```
/// use block_mask::MaskShape;
/// let shape = MaskShape::new(2, 1, 100, 300).with_blocks(64, 16);
/// assert_eq!((shape.q_blocks(), shape.kv_blocks()), (2, 19));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MaskShape {
    /// Batch rows.
    pub batch: usize,
    /// Query heads that have lists of their own; 1 when all share one.
    pub heads: usize,
    /// Queries of a batch row.
    pub q_len: usize,
    /// Keys of a batch row (in a physical mask: positions of the whole cache).
    pub kv_len: usize,
    /// Queries of a block.
    pub block_q: usize,
    /// Keys of a block.
    pub block_kv: usize,
}

impl MaskShape {
    /// A shape with blocks of 128 × 128.
    pub const fn new(batch: usize, heads: usize, q_len: usize, kv_len: usize) -> MaskShape {
        MaskShape {
            batch,
            heads,
            q_len,
            kv_len,
            block_q: DEFAULT_BLOCK,
            block_kv: DEFAULT_BLOCK,
        }
    }

    /// The same lengths with other block sizes.
    #[must_use]
    pub const fn with_blocks(self, block_q: usize, block_kv: usize) -> MaskShape {
        MaskShape {
            block_q,
            block_kv,
            ..self
        }
    }

    /// The shape of whole blocks: `rows · block_q` queries and `columns · block_kv` keys, saturating.
    pub const fn of_blocks(
        batch: usize,
        heads: usize,
        rows: usize,
        columns: usize,
        block_q: usize,
        block_kv: usize,
    ) -> MaskShape {
        MaskShape {
            batch,
            heads,
            q_len: rows.saturating_mul(block_q),
            kv_len: columns.saturating_mul(block_kv),
            block_q,
            block_kv,
        }
    }

    /// Query blocks, the ragged last one included; 0 when `block_q` is 0.
    pub const fn q_blocks(&self) -> usize {
        if self.block_q == 0 {
            0
        } else {
            self.q_len.div_ceil(self.block_q)
        }
    }

    /// KV blocks, the ragged last one included; 0 when `block_kv` is 0.
    pub const fn kv_blocks(&self) -> usize {
        if self.block_kv == 0 {
            0
        } else {
            self.kv_len.div_ceil(self.block_kv)
        }
    }

    /// Lists of the mask: one per (batch row, head, query block).
    pub(crate) fn rows(&self) -> usize {
        self.batch * self.heads * self.q_blocks()
    }

    /// Row number of a list.
    pub(crate) fn row(&self, b: usize, h: usize, r: usize) -> usize {
        (b * self.heads + h) * self.q_blocks() + r
    }

    pub(crate) fn check(&self) -> Result<()> {
        for (what, value) in [
            ("the query block size", self.block_q),
            ("the KV block size", self.block_kv),
            ("the batch size", self.batch),
            ("the number of heads", self.heads),
        ] {
            if value == 0 {
                return Err(Error::Zero { what });
            }
        }
        let max = i32::MAX as usize;
        let rows = self
            .batch
            .checked_mul(self.heads)
            .and_then(|x| x.checked_mul(self.q_blocks()));
        // Each dense form has at most an element per cell.
        let cells = [self.heads, self.q_len, self.kv_len]
            .iter()
            .try_fold(self.batch, |product, &extent| product.checked_mul(extent))
            .filter(|&cells| cells <= isize::MAX as usize);
        for (what, value) in [
            ("the number of queries", self.q_len),
            ("the query block size", self.block_q),
            ("the KV block size", self.block_kv),
            ("the number of block lists", rows.unwrap_or(usize::MAX)),
            ("the number of KV blocks", self.kv_blocks()),
        ] {
            if value > max {
                return Err(Error::TooLarge { what, value, max });
            }
        }
        if cells.is_none() {
            return Err(Error::TooLarge {
                what: "the number of cells",
                value: usize::MAX,
                max: isize::MAX as usize,
            });
        }
        Ok(())
    }
}
