//! Masks for a packed query axis: the new tokens of many sequences, one after another.

use paged_kv::{PageTable, Slot};

use super::classify::count_cells;
use super::physical::push_page;
use super::{BlockMask, Lists, MaskShape, Paged, Physical, QuerySpan};
use crate::MaskMod;
use crate::error::{Error, Result};
use crate::expr::{Axis, Domain};

/// The queries that one sequence contributes to a step.
///
/// ```
/// # use paged_kv::{PageTable, PageTableConfig};
/// # let mut table = PageTable::new(PageTableConfig { n_pages: 8, page_size: 4, n_slots: 3, max_pages_per_slot: 4 }).unwrap();
/// # let slot = table.allocate_slot().unwrap();
/// # let _ = table.reserve(slot, 6).unwrap();
/// # table.advance(slot, 6).unwrap();
/// use block_mask::{BlockMask, MaskMod, PackedSequence};
///
/// // The last two of six tokens are computed now.
/// let sequence = PackedSequence { slot, q_start: 0, q_len: 2, kv_start_pos: 4 };
/// let mask = BlockMask::packed(&table, &[sequence], 1, 16, MaskMod::causal())?;
/// assert_eq!(mask.queries(0).map(|span| (span.len, span.position)), Some((2, 4)));
/// assert_eq!(mask.blocks(0, 0, 0).len(), 2, "both pages");
/// # Ok::<(), block_mask::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackedSequence {
    /// The sequence's slot.
    pub slot: Slot,
    /// Row of its first query on the packed axis.
    pub q_start: usize,
    /// Queries: tokens of a prefill chunk, or 1 when decoding.
    pub q_len: usize,
    /// Logical position of its first query. Keys up to `kv_start_pos + q_len` are visible: the step writes its own keys
    /// before it attends.
    pub kv_start_pos: usize,
}

impl BlockMask<Physical> {
    /// The mask of one step over several sequences, whose new tokens lie one after another on a packed query axis.
    ///
    /// Each sequence is a batch row (`b` = its index in `sequences`) and sees only the pages of its own slot, so no
    /// document ids are compared anywhere. `q` and `kv` are logical positions. Prefill chunks and decoding rows may be
    /// mixed. Query blocks start anew with every sequence; the classification into full and partial blocks is exact.
    ///
    /// # Errors
    /// [`Error::Zero`] for a block size or head count of 0, [`Error::DeadSlot`], [`Error::Capacity`] for a sequence whose
    /// pages end before its queries, [`Error::RangeOutOfBounds`] when two sequences share query rows,
    /// [`Error::Broadcast`] when the function reads the head but `heads` is 1, and the errors of [`MaskMod::check`].
    pub fn packed(
        table: &PageTable,
        sequences: &[PackedSequence],
        heads: usize,
        block_q: usize,
        mask_mod: MaskMod,
    ) -> Result<BlockMask<Physical>> {
        let page_size = table.page_size();
        let q_len = sequences.iter().map(|sequence| sequence.q_len).max().unwrap_or(0);
        let shape = MaskShape {
            batch: sequences.len(),
            heads,
            q_len,
            kv_len: table.n_pages() * page_size,
            block_q,
            block_kv: page_size,
        };
        // A step without sequences is an empty mask, not an error.
        MaskShape {
            batch: shape.batch.max(1),
            ..shape
        }
        .check()?;
        if heads == 1 && mask_mod.depends_on(Axis::Head) {
            return Err(Error::Broadcast {
                axis: Axis::Head,
                wanted: 2,
            });
        }
        check_rows(sequences)?;

        let mut queries = Vec::with_capacity(sequences.len());
        let mut kv_lens = Vec::with_capacity(sequences.len());
        for (batch, sequence) in sequences.iter().enumerate() {
            let slot = sequence.slot.index();
            let capacity = table
                .capacity(sequence.slot)
                .map_err(|_| Error::DeadSlot { batch, slot })?;
            let end = sequence.kv_start_pos.saturating_add(sequence.q_len);
            if end > capacity {
                return Err(Error::Capacity { slot, capacity, end });
            }
            queries.push(QuerySpan {
                row: sequence.q_start,
                len: sequence.q_len,
                position: sequence.kv_start_pos,
            });
            kv_lens.push(end);
        }
        let longest = kv_lens.iter().copied().max().unwrap_or(0);
        let first = sequences
            .iter()
            .map(|sequence| sequence.kv_start_pos)
            .min()
            .unwrap_or(0);
        mask_mod.check(&Domain {
            batch: shape.batch,
            heads,
            q: first..longest,
            kv: 0..longest,
        })?;

        let mut mask: BlockMask<Physical> = BlockMask {
            shape,
            mask_mod,
            from_function: true,
            lists: Lists::new(),
            queries,
            extra: Paged {
                slots: sequences.iter().map(|sequence| sequence.slot).collect(),
                kv_lens,
                packed: true,
                largest_page: None,
            },
        };
        let lists_per_row = if mask.mask_mod.depends_on(Axis::Head) {
            heads
        } else {
            1
        };
        let mut counts = Vec::new();
        for (b, sequence) in sequences.iter().enumerate() {
            let row = table.row(sequence.slot);
            let kv_len = mask.extra.kv_lens[b];
            for h in 0..heads {
                for r in 0..shape.q_blocks() {
                    let positions = mask.query_positions(b, r);
                    if h >= lists_per_row {
                        // Every head has the same lists: copy those of the first.
                        let first = mask.lists.offsets[shape.row(b, 0, r)]
                            ..mask.lists.offsets[shape.row(b, 0, r) + 1];
                        mask.lists.entries.extend_from_within(first);
                    } else if !positions.is_empty() {
                        let cells = (positions.len() * page_size) as u64;
                        count_cells(&mask.mask_mod, b, h, positions, kv_len, page_size, &mut counts);
                        for (block, &count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
                            push_page(&mut mask.lists, row, block, count == cells, kv_len, page_size);
                        }
                    }
                    mask.lists.end_row();
                }
            }
        }
        Ok(mask.with_largest_page())
    }
}

/// The mask of one engine step: causal over each sequence's own pages, optionally limited to the last `window` keys
/// (the query's own included). One head list serves all heads.
///
/// ```
/// use block_mask::{PackedSequence, paged_causal_mask};
/// use paged_kv::{PageTable, PageTableConfig};
/// let mut table = PageTable::new(PageTableConfig { n_pages: 9, page_size: 4, n_slots: 3, max_pages_per_slot: 4 })?;
/// let (x, y) = (table.allocate_slot()?, table.allocate_slot()?);
/// let _ = table.reserve(x, 6)?;
/// let _ = table.reserve(y, 10)?;
/// // x: a prompt of 6 tokens; y: decoding its tenth token.
/// let step = [
///     PackedSequence { slot: x, q_start: 0, q_len: 6, kv_start_pos: 0 },
///     PackedSequence { slot: y, q_start: 6, q_len: 1, kv_start_pos: 9 },
/// ];
/// let mask = paged_causal_mask(&table, &step, 16, None)?;
/// assert_eq!(mask.blocks(1, 0, 0).filter(|block| block.full).count(), 2); // positions 0..8 of y
/// assert_eq!(mask.blocks(1, 0, 0).filter(|block| !block.full).count(), 1); // position 8, 9
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Those of [`BlockMask::packed`].
pub fn paged_causal_mask(
    table: &PageTable,
    sequences: &[PackedSequence],
    block_q: usize,
    window: Option<usize>,
) -> Result<BlockMask<Physical>> {
    let mask_mod = match window {
        Some(window) => MaskMod::causal() & MaskMod::sliding_window(window),
        None => MaskMod::causal(),
    };
    BlockMask::packed(table, sequences, 1, block_q, mask_mod)
}

/// No query row may belong to two sequences: its result would depend on which is computed last.
fn check_rows(sequences: &[PackedSequence]) -> Result<()> {
    let max = i32::MAX as usize;
    let mut ranges = Vec::with_capacity(sequences.len());
    for sequence in sequences.iter().filter(|sequence| sequence.q_len > 0) {
        let end = sequence.q_start.saturating_add(sequence.q_len);
        if end > max {
            return Err(Error::TooLarge {
                what: "the last query row",
                value: end,
                max,
            });
        }
        ranges.push((sequence.q_start, end));
    }
    ranges.sort_unstable();
    for pair in ranges.windows(2) {
        if pair[1].0 < pair[0].1 {
            let (start, end) = pair[1];
            return Err(Error::RangeOutOfBounds {
                what: "rows free of other sequences,",
                start,
                end,
                len: pair[0].1,
            });
        }
    }
    Ok(())
}
