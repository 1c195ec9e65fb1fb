//! Building and changing masks in logical space.

use std::ops::{BitAnd, BitOr, Range};

use rayon::prelude::*;

use super::arrays::{BlockState, KvBlocks, read_lists};
use super::classify::count_cells;
use super::{BlockMask, Entry, Lists, Logical, MaskShape, QuerySpan};
use crate::MaskMod;
use crate::error::{Error, Result};
use crate::expr::{Axis, Domain, IntBuffer, b, h, kv, q};

impl BlockMask<Logical> {
    /// The mask of a function: blocks without an allowed cell are left out, blocks with only allowed cells are full. A
    /// block that reaches past a ragged length is never full.
    ///
    /// Functions that compare the key with something constant along a row (causal, windows, paddings, and their
    /// combinations) cost O(rows · blocks); others are evaluated at every cell.
    ///
    /// # Errors
    /// [`Error::Zero`], [`Error::TooLarge`] for the shape, [`Error::IndexOutOfBounds`] and the other errors of
    /// [`MaskMod::check`].
    ///
    /// ```
    /// use block_mask::{BlockMask, MaskMod, MaskShape};
    /// let mask = BlockMask::from_fn(MaskShape::new(1, 1, 512, 512), MaskMod::causal())?;
    /// assert_eq!(mask.n_blocks(), 10); // 4 partial on the diagonal, 6 full below
    /// assert_eq!(mask.sparsity(), 37.5);
    /// # Ok::<(), block_mask::Error>(())
    /// ```
    pub fn from_fn(shape: MaskShape, mask_mod: MaskMod) -> Result<BlockMask<Logical>> {
        BlockMask::from_fn_at(shape, mask_mod, 0)
    }

    /// As [`from_fn`](Self::from_fn), with the first query at `position` instead of 0.
    ///
    /// # Errors
    /// As [`from_fn`](Self::from_fn).
    pub fn from_fn_at(shape: MaskShape, mask_mod: MaskMod, position: usize) -> Result<BlockMask<Logical>> {
        let mut mask = BlockMask::empty(shape, mask_mod, position)?;
        // Work that does not depend on the batch row or head is done once and copied.
        let batch = if mask.mask_mod.depends_on(Axis::Batch) {
            shape.batch
        } else {
            1
        };
        let heads = if mask.mask_mod.depends_on(Axis::Head) {
            shape.heads
        } else {
            1
        };
        let q_blocks = shape.q_blocks();
        let rows: Vec<Vec<Entry>> = (0..batch * heads * q_blocks)
            .into_par_iter()
            .map_init(Vec::new, |counts, row| {
                let (bh, r) = (row / q_blocks, row % q_blocks);
                let q = mask.query_positions(0, r);
                let queries = q.len();
                count_cells(
                    &mask.mask_mod,
                    bh / heads,
                    bh % heads,
                    q,
                    shape.kv_len,
                    shape.block_kv,
                    counts,
                );
                let whole = shape.block_q as u64 * shape.block_kv as u64;
                debug_assert!(queries <= shape.block_q);
                let visited = counts.iter().enumerate().filter(|(_, count)| **count > 0);
                // A ragged block has fewer cells than a whole one, so it never counts as full.
                visited
                    .map(|(block, count)| Entry::new(block, block, *count == whole))
                    .collect()
            })
            .collect();
        for b in 0..shape.batch {
            for h in 0..shape.heads {
                for r in 0..q_blocks {
                    let row = (b.min(batch - 1) * heads + h.min(heads - 1)) * q_blocks + r;
                    mask.lists.entries.extend_from_slice(&rows[row]);
                    mask.lists.end_row();
                }
            }
        }
        Ok(mask)
    }

    /// A mask without lists yet, its shape and function checked.
    fn empty(shape: MaskShape, mask_mod: MaskMod, position: usize) -> Result<BlockMask<Logical>> {
        shape.check()?;
        let q_end = position.saturating_add(shape.q_len);
        let domain = Domain {
            batch: shape.batch,
            heads: shape.heads,
            q: position..q_end,
            kv: 0..shape.kv_len,
        };
        mask_mod.check(&domain)?;
        let span = QuerySpan {
            row: 0,
            len: shape.q_len,
            position,
        };
        Ok(BlockMask {
            shape,
            mask_mod,
            from_function: true,
            lists: Lists::new(),
            queries: vec![span; shape.batch],
            extra: (),
        })
    }

    /// The mask of given block lists. Blocks that are not listed are masked whatever the function says; in full blocks it
    /// is not asked. Without a function of your own pass [`MaskMod::all`]. The lengths of `shape` need not be multiples
    /// of the block sizes ([`MaskShape::of_blocks`] makes them so); a listed full block that reaches past one becomes
    /// partial.
    ///
    /// # Errors
    /// [`Error::Mismatch`], [`Error::CountOutOfRange`], [`Error::BlockOutOfRange`] for the lists, and the errors of
    /// [`from_fn`](Self::from_fn).
    pub fn from_kv_blocks(
        shape: MaskShape,
        lists: &KvBlocks<'_>,
        mask_mod: MaskMod,
    ) -> Result<BlockMask<Logical>> {
        let mut mask = BlockMask::empty(shape, mask_mod, 0)?;
        mask.lists = read_lists(&shape, lists, shape.kv_blocks(), |_, index| Some(index))?;
        mask.from_function = false;
        mask.demote_ragged()?;
        Ok(mask)
    }

    /// The mask of a dense matrix of cells, `[batch, heads, q_len, kv_len]`.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if `cells` has another length, [`Error::TooLarge`] beyond 2³¹ − 1 cells, and the errors of
    /// [`from_fn`](Self::from_fn).
    pub fn from_dense(shape: MaskShape, cells: &[bool]) -> Result<BlockMask<Logical>> {
        shape.check()?;
        let expected = [shape.heads, shape.q_len, shape.kv_len]
            .iter()
            .try_fold(shape.batch, |product, &extent| product.checked_mul(extent))
            .filter(|&cells| cells <= i32::MAX as usize)
            .ok_or(Error::TooLarge {
                what: "the number of cells",
                value: usize::MAX,
                max: i32::MAX as usize,
            })?;
        if cells.len() != expected {
            return Err(Error::Mismatch {
                what: "number of cells",
                expected,
                found: cells.len(),
            });
        }
        if cells.is_empty() {
            return BlockMask::from_fn(shape, MaskMod::none());
        }
        let values = cells.iter().map(|&cell| i32::from(cell)).collect();
        let extent = |value: usize| value as i32; // each is at most the number of cells
        let mask_mod = MaskMod::dense(
            values,
            extent(shape.heads),
            extent(shape.q_len),
            extent(shape.kv_len),
        );
        BlockMask::from_fn(shape, mask_mod)
    }

    /// A function that says exactly what lists and function say together.
    ///
    /// # Errors
    /// [`Error::TooLarge`] when the mask has more than 2³¹ − 1 blocks.
    pub fn effective_mask_mod(&self) -> Result<MaskMod> {
        if self.from_function {
            return Ok(self.mask_mod.clone());
        }
        let shape = &self.shape;
        let columns = shape.kv_blocks();
        let value = shape.rows().saturating_mul(columns);
        let max = i32::MAX as usize;
        if value > max || value == 0 {
            let too_large = Error::TooLarge {
                what: "the number of blocks",
                value,
                max,
            };
            return if value == 0 {
                Ok(MaskMod::none())
            } else {
                Err(too_large)
            };
        }
        let states: Vec<i32> = self
            .block_states()
            .iter()
            .map(|state| match state {
                BlockState::Empty => 0,
                BlockState::Partial => 1,
                BlockState::Full => 2,
            })
            .collect();
        // All extents are at most `value`, hence fit; block sizes were checked when the mask was made.
        let position = self.queries.first().map_or(0, |span| span.position);
        let mut row = (q() - position as i32).div_floor(shape.block_q as i32);
        // Axes with one entry are left out, so that the mask goes on serving every batch row or head.
        if shape.heads > 1 {
            row = h() * shape.q_blocks() as i32 + row;
        }
        if shape.batch > 1 {
            row = b() * (shape.heads * shape.q_blocks()) as i32 + row;
        }
        let state = IntBuffer::new(states).at(row * columns as i32 + kv().div_floor(shape.block_kv as i32));
        let partial = state.clone().equals(1) & self.mask_mod.expr().clone();
        MaskMod::new(state.equals(2) | partial)
    }

    /// Makes full blocks that reach past a length partial.
    fn demote_ragged(&mut self) -> Result<()> {
        let shape = self.shape;
        let last_row = shape.q_blocks().wrapping_sub(1);
        let ragged_q = !shape.q_len.is_multiple_of(shape.block_q);
        let ragged = |row: usize, entry: &Entry| {
            (ragged_q && row % shape.q_blocks() == last_row)
                || (entry.logical() + 1).saturating_mul(shape.block_kv) > shape.kv_len
        };
        let found =
            (0..shape.rows()).any(|row| self.lists.row(row).iter().any(|e| e.full() && ragged(row, e)));
        if !found {
            return Ok(());
        }
        // The function is about to be asked about cells where it was not asked before.
        self.mask_mod = self.effective_mask_mod()?;
        for row in 0..shape.rows() {
            for i in self.lists.offsets[row]..self.lists.offsets[row + 1] {
                let entry = self.lists.entries[i];
                if entry.full() && ragged(row, &entry) {
                    self.lists.entries[i] = Entry::new(entry.index as usize, entry.logical(), false);
                }
            }
        }
        Ok(())
    }

    /// The mask of `range` of query blocks, its function still seeing the old positions.
    ///
    /// # Errors
    /// [`Error::RangeOutOfBounds`].
    pub fn slice_query_blocks(&self, range: Range<usize>) -> Result<BlockMask<Logical>> {
        let shape = &self.shape;
        check_range("query blocks", &range, shape.q_blocks())?;
        let start = (range.start * shape.block_q).min(shape.q_len);
        let end = (range.end * shape.block_q).min(shape.q_len);
        let sliced = MaskShape {
            q_len: end - start,
            ..*shape
        };
        let span = self.queries.first().copied().unwrap_or(QuerySpan {
            row: 0,
            len: 0,
            position: 0,
        });
        let mut lists = Lists::new();
        for b in 0..shape.batch {
            for h in 0..shape.heads {
                for r in range.clone() {
                    lists.entries.extend_from_slice(self.entries(b, h, r));
                    lists.end_row();
                }
            }
        }
        let span = QuerySpan {
            row: 0,
            len: end - start,
            position: span.position + start,
        };
        Ok(BlockMask {
            shape: sliced,
            mask_mod: self.mask_mod.clone(),
            from_function: self.from_function,
            lists,
            queries: vec![span; shape.batch],
            extra: (),
        })
    }

    /// The mask of `range` of queries with query blocks of `block_q`; the range may start anywhere. Lists are made anew.
    ///
    /// # Errors
    /// [`Error::RangeOutOfBounds`], and the errors of [`from_fn`](Self::from_fn).
    pub fn slice_queries(&self, range: Range<usize>, block_q: usize) -> Result<BlockMask<Logical>> {
        check_range("queries", &range, self.shape.q_len)?;
        let position = self.queries.first().map_or(0, |span| span.position);
        let shape = MaskShape {
            q_len: range.len(),
            block_q,
            ..self.shape
        };
        BlockMask::from_fn_at(shape, self.effective_mask_mod()?, position + range.start)
    }

    /// The mask with other lengths. Shorter ones crop it: blocks beyond are dropped and full blocks that are now ragged
    /// become partial. Longer ones extend a mask that was made from a function; lists that were given say nothing about
    /// further blocks and can grow only within their last block.
    ///
    /// # Errors
    /// [`Error::RangeOutOfBounds`] when given lists would have to grow, and the errors of [`from_fn`](Self::from_fn).
    pub fn with_lengths(&self, q_len: usize, kv_len: usize) -> Result<BlockMask<Logical>> {
        let old = &self.shape;
        let shape = MaskShape {
            q_len,
            kv_len,
            ..*old
        };
        let position = self.queries.first().map_or(0, |span| span.position);
        let grows = q_len > old.q_len || kv_len > old.kv_len;
        if grows && self.from_function {
            return BlockMask::from_fn_at(shape, self.mask_mod.clone(), position);
        }
        for (what, end, len) in [
            ("query blocks of the new length", shape.q_blocks(), old.q_blocks()),
            ("KV blocks of the new length", shape.kv_blocks(), old.kv_blocks()),
        ] {
            check_range(what, &(0..end), len)?;
        }
        // Lists keep their meaning when the grid shrinks, but a function made from them counts rows of the old grid.
        let mut mask = BlockMask::empty(shape, self.mask_mod.clone(), position)?;
        mask.from_function = self.from_function;
        for b in 0..shape.batch {
            for h in 0..shape.heads {
                for r in 0..shape.q_blocks() {
                    let kept = self
                        .entries(b, h, r)
                        .iter()
                        .filter(|entry| entry.logical() < shape.kv_blocks());
                    mask.lists.entries.extend(kept);
                    mask.lists.end_row();
                }
            }
        }
        mask.demote_ragged()?;
        Ok(mask)
    }

    /// Cells allowed by both masks.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if shapes or positions differ, and the errors of [`from_fn`](Self::from_fn).
    pub fn and(&self, other: &BlockMask<Logical>) -> Result<BlockMask<Logical>> {
        self.combine(other, |x, y| x & y)
    }

    /// Cells allowed by either mask.
    ///
    /// # Errors
    /// As [`and`](Self::and).
    pub fn or(&self, other: &BlockMask<Logical>) -> Result<BlockMask<Logical>> {
        self.combine(other, |x, y| x | y)
    }

    fn combine(
        &self,
        other: &BlockMask<Logical>,
        join: impl Fn(MaskMod, MaskMod) -> MaskMod,
    ) -> Result<BlockMask<Logical>> {
        let position = |mask: &BlockMask<Logical>| mask.queries.first().map_or(0, |span| span.position);
        let (x, y) = (&self.shape, &other.shape);
        for (what, expected, found) in [
            ("batch size of the other mask", x.batch, y.batch),
            ("heads of the other mask", x.heads, y.heads),
            ("queries of the other mask", x.q_len, y.q_len),
            ("keys of the other mask", x.kv_len, y.kv_len),
            ("query block size of the other mask", x.block_q, y.block_q),
            ("KV block size of the other mask", x.block_kv, y.block_kv),
            (
                "first query position of the other mask",
                position(self),
                position(other),
            ),
        ] {
            if expected != found {
                return Err(Error::Mismatch {
                    what,
                    expected,
                    found,
                });
            }
        }
        let mask_mod = join(self.effective_mask_mod()?, other.effective_mask_mod()?);
        BlockMask::from_fn_at(self.shape, mask_mod, position(self))
    }
}

impl BitAnd for &BlockMask<Logical> {
    type Output = Result<BlockMask<Logical>>;
    fn bitand(self, other: &BlockMask<Logical>) -> Self::Output {
        self.and(other)
    }
}

impl BitOr for &BlockMask<Logical> {
    type Output = Result<BlockMask<Logical>>;
    fn bitor(self, other: &BlockMask<Logical>) -> Self::Output {
        self.or(other)
    }
}

fn check_range(what: &'static str, range: &Range<usize>, len: usize) -> Result<()> {
    if range.start > range.end || range.end > len {
        return Err(Error::RangeOutOfBounds {
            what,
            start: range.start,
            end: range.end,
            len,
        });
    }
    Ok(())
}
