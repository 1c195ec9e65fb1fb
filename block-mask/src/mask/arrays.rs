//! FlexAttention's four arrays and other dense forms.

use super::{BlockMask, Entry, Lists, MaskShape, Space};
use crate::error::{Error, Result};

/// What a mask says about one block.
///
/// ```
/// use block_mask::{BlockMask, BlockState, MaskMod, MaskShape};
///
/// let mask = BlockMask::from_fn(MaskShape::new(1, 1, 6, 6).with_blocks(2, 2), MaskMod::causal())?;
/// assert_eq!(mask.block_states()[..3], [BlockState::Partial, BlockState::Empty, BlockState::Empty]);
/// # Ok::<(), block_mask::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BlockState {
    /// Not visited.
    Empty,
    /// Some cells allowed: the mask function decides.
    Partial,
    /// All cells allowed.
    Full,
}

/// Block lists to build a mask from, in FlexAttention's layout. `width` below is the length of an index array divided by
/// the number of rows (`batch · heads · q_blocks`); the two widths may differ. Of each row only the first `count` indices
/// are read. Order does not matter; a block named twice counts once, and as full if any of its entries is full.
///
/// ```
/// use block_mask::{BlockMask, KvBlocks, MaskMod, MaskShape};
///
/// // Two query blocks: the first visits block 0 partly, the second all of block 0 and a part of block 1.
/// let blocks = KvBlocks {
///     num_blocks: &[1, 1],
///     indices: &[0, 1],
///     full_num_blocks: &[0, 1],
///     full_indices: &[0, 0],
/// };
/// let shape = MaskShape::new(1, 1, 4, 4).with_blocks(2, 2);
/// let mask = BlockMask::from_kv_blocks(shape, &blocks, MaskMod::causal())?;
/// assert_eq!(mask.n_blocks(), 3);
/// # Ok::<(), block_mask::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct KvBlocks<'a> {
    /// Partly masked blocks per row, `[batch, heads, q_blocks]`.
    pub num_blocks: &'a [i32],
    /// Their indices, `[batch, heads, q_blocks, width]`.
    pub indices: &'a [i32],
    /// Full blocks per row, `[batch, heads, q_blocks]`; empty when there are none.
    pub full_num_blocks: &'a [i32],
    /// Their indices, `[batch, heads, q_blocks, width]`; empty when there are none.
    pub full_indices: &'a [i32],
}

/// FlexAttention's arrays of a mask. Past a row's count the indices are 0.
///
/// ```
/// use block_mask::{BlockMask, MaskMod, MaskShape};
///
/// let mask = BlockMask::from_fn(MaskShape::new(1, 1, 6, 6).with_blocks(2, 2), MaskMod::causal())?;
/// let arrays = mask.kv_arrays();
/// assert_eq!((arrays.num_blocks, arrays.full_num_blocks, arrays.width), (vec![1, 1, 1], vec![0, 1, 2], 3));
/// # Ok::<(), block_mask::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockArrays {
    /// Partly masked blocks per row, `[batch, heads, rows]`.
    pub num_blocks: Vec<i32>,
    /// Their indices, `[batch, heads, rows, width]`.
    pub indices: Vec<i32>,
    /// Full blocks per row, `[batch, heads, rows]`.
    pub full_num_blocks: Vec<i32>,
    /// Their indices, `[batch, heads, rows, width]`.
    pub full_indices: Vec<i32>,
    /// Indices per row.
    pub width: usize,
}

impl BlockArrays {
    fn new(rows: usize, width: usize) -> BlockArrays {
        BlockArrays {
            num_blocks: vec![0; rows],
            indices: vec![0; rows * width],
            full_num_blocks: vec![0; rows],
            full_indices: vec![0; rows * width],
            width,
        }
    }

    fn push(&mut self, row: usize, index: usize, full: bool) {
        let (counts, indices) = if full {
            (&mut self.full_num_blocks, &mut self.full_indices)
        } else {
            (&mut self.num_blocks, &mut self.indices)
        };
        indices[row * self.width + counts[row] as usize] = index as i32;
        counts[row] += 1;
    }

    /// The arrays as lists to build a mask from.
    pub fn as_kv_blocks(&self) -> KvBlocks<'_> {
        KvBlocks {
            num_blocks: &self.num_blocks,
            indices: &self.indices,
            full_num_blocks: &self.full_num_blocks,
            full_indices: &self.full_indices,
        }
    }
}

impl<S: Space> BlockMask<S> {
    /// The KV-side arrays: for each query block the KV blocks that it visits (in a physical mask: pages), in the order of
    /// the sequence. The width is the largest number of blocks that a sequence can have.
    pub fn kv_arrays(&self) -> BlockArrays {
        let mut arrays = BlockArrays::new(self.shape.rows(), self.columns());
        for row in 0..self.shape.rows() {
            for entry in self.lists.row(row) {
                arrays.push(row, entry.index as usize, entry.full());
            }
        }
        arrays
    }

    /// The query-side arrays `[batch, heads, kv_blocks, q_blocks]`, the transpose of [`kv_arrays`](Self::kv_arrays): for
    /// each *logical* KV block the query blocks that visit it.
    pub fn query_arrays(&self) -> BlockArrays {
        let (columns, width) = (self.columns(), self.shape.q_blocks());
        let mut arrays = BlockArrays::new(self.shape.batch * self.shape.heads * columns, width);
        for row in 0..self.shape.rows() {
            for entry in self.lists.row(row) {
                let column = row / width * columns + entry.logical();
                arrays.push(column, row % width, entry.full());
            }
        }
        arrays
    }

    /// Logical KV blocks that a row may name.
    pub(super) fn columns(&self) -> usize {
        (0..self.shape.batch)
            .map(|b| self.kv_len(b).div_ceil(self.shape.block_kv))
            .max()
            .unwrap_or(0)
    }

    /// The state of every logical block, `[batch, heads, q_blocks, columns]` with `columns` the most blocks of a
    /// sequence.
    pub fn block_states(&self) -> Vec<BlockState> {
        let columns = self.columns();
        let mut states = vec![BlockState::Empty; self.shape.rows() * columns];
        for row in 0..self.shape.rows() {
            for entry in self.lists.row(row) {
                states[row * columns + entry.logical()] = if entry.full() {
                    BlockState::Full
                } else {
                    BlockState::Partial
                };
            }
        }
        states
    }

    /// Every cell in logical positions, `[batch, heads, q_len, keys]` with `keys` the most keys of a sequence: what the
    /// lists and the function together allow. Meant for tests and pictures; it needs a byte per cell.
    pub fn to_dense(&self) -> Vec<bool> {
        let shape = &self.shape;
        let keys = (0..shape.batch).map(|b| self.kv_len(b)).max().unwrap_or(0);
        let mut cells = vec![false; shape.batch * shape.heads * shape.q_len * keys];
        for b in 0..shape.batch {
            let kv_len = self.kv_len(b);
            for h in 0..shape.heads {
                for r in 0..shape.q_blocks() {
                    for (i, q) in self.query_positions(b, r).enumerate() {
                        let row = (b * shape.heads + h) * shape.q_len + r * shape.block_q + i;
                        let row = &mut cells[row * keys..row * keys + kv_len];
                        for entry in self.entries(b, h, r) {
                            let start = entry.logical() * shape.block_kv;
                            let end = kv_len.min(start + shape.block_kv);
                            if entry.full() {
                                row[start..end].fill(true);
                            } else {
                                self.mask_mod.eval_row(b, h, q, start, &mut row[start..end]);
                            }
                        }
                    }
                }
            }
        }
        cells
    }

    /// Share of blocks that are not visited, in percent, counting ragged blocks as whole; 0 for a mask without blocks.
    /// In a physical mask the whole is what the sequences have, not what the cache has.
    pub fn sparsity(&self) -> f64 {
        let mut total = 0;
        for (b, span) in self.queries.iter().enumerate() {
            let columns = self.kv_len(b).div_ceil(self.shape.block_kv);
            total += self.shape.heads * span.len.div_ceil(self.shape.block_q) * columns;
        }
        if total == 0 {
            0.0
        } else {
            100.0 * (1.0 - self.n_blocks() as f64 / total as f64)
        }
    }
}

/// Reads `lists` into normal form. `locate` gives the stored index and the logical block of an index, or `None` when the
/// block is not there (for pages that a slot does not own).
pub(super) fn read_lists(
    shape: &MaskShape,
    lists: &KvBlocks<'_>,
    n_blocks: usize,
    locate: impl Fn(usize, usize) -> Option<usize>,
) -> Result<Lists> {
    let rows = shape.rows();
    let width = width_of(rows, lists.num_blocks, lists.indices)?;
    let none = lists.full_num_blocks.is_empty() && lists.full_indices.is_empty();
    let full_width = if none {
        0
    } else {
        width_of(rows, lists.full_num_blocks, lists.full_indices)?
    };
    let rows_of_batch = shape.heads * shape.q_blocks();
    let mut result = Lists::new();
    let mut entries = Vec::new();
    for row in 0..rows {
        entries.clear();
        let mut read = |counts: &[i32], indices: &[i32], width: usize, full: bool| -> Result<()> {
            let Some(&count) = counts.get(row) else {
                return Ok(());
            };
            let taken = usize::try_from(count).ok().filter(|&count| count <= width);
            let Some(taken) = taken else {
                return Err(Error::CountOutOfRange {
                    row,
                    count: count.into(),
                    width,
                });
            };
            for &index in &indices[row * width..row * width + taken] {
                let valid = usize::try_from(index).ok().filter(|&index| index < n_blocks);
                let Some(valid) = valid else {
                    return Err(Error::BlockOutOfRange {
                        row,
                        index: index.into(),
                        blocks: n_blocks,
                    });
                };
                if let Some(logical) = locate(row / rows_of_batch, valid) {
                    entries.push(Entry::new(valid, logical, full));
                }
            }
            Ok(())
        };
        read(lists.num_blocks, lists.indices, width, false)?;
        read(lists.full_num_blocks, lists.full_indices, full_width, true)?;
        // Full entries come first among equals, so that they are the ones kept.
        entries.sort_unstable_by_key(|entry| (entry.logical(), !entry.full()));
        entries.dedup_by_key(|entry| entry.logical());
        result.entries.extend_from_slice(&entries);
        result.end_row();
    }
    Ok(result)
}

fn width_of(rows: usize, counts: &[i32], indices: &[i32]) -> Result<usize> {
    if counts.len() != rows {
        return Err(Error::Mismatch {
            what: "length of a block count array",
            expected: rows,
            found: counts.len(),
        });
    }
    if rows == 0 {
        return Ok(0);
    }
    if !indices.len().is_multiple_of(rows) {
        let expected = indices.len().div_ceil(rows) * rows;
        return Err(Error::Mismatch {
            what: "length of a block index array",
            expected,
            found: indices.len(),
        });
    }
    Ok(indices.len() / rows)
}
