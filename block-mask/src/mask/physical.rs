//! From logical blocks to pages.

use paged_kv::{PageId, PageTable, Slot};

use super::arrays::{KvBlocks, read_lists};
use super::{BlockMask, Entry, Lists, Logical, MaskShape, Paged, Physical, QuerySpan};
use crate::MaskMod;
use crate::error::{Error, Result};
use crate::expr::Domain;

impl BlockMask<Logical> {
    /// The mask over the pages of `slots`, one per batch row. Blocks keep the order of the sequence; blocks whose page
    /// the slot does not own, or at or past the slot's written length ([`PageTable::len`]), are dropped, and a full block
    /// that the length cuts becomes partial. The functions go on seeing logical positions and batch rows.
    ///
    /// The mask is a snapshot: pages that change hands afterwards are not noticed.
    ///
    /// # Errors
    /// [`Error::Mismatch`] unless there is a slot per batch row, [`Error::PageSize`] unless the KV block size is the page
    /// size, [`Error::DeadSlot`].
    pub fn to_physical(&self, table: &PageTable, slots: &[Slot]) -> Result<BlockMask<Physical>> {
        let kv_lens = written_lengths(table, slots, &self.shape)?;
        // A cut full block asks the function, which then has to speak for the lists too.
        let mask_mod = self.effective_mask_mod()?;
        let mut lists = Lists::new();
        for (b, (&slot, &len)) in slots.iter().zip(&kv_lens).enumerate() {
            let row = table.row(slot);
            let kv_len = len.min(self.shape.kv_len);
            for h in 0..self.shape.heads {
                for r in 0..self.shape.q_blocks() {
                    for entry in self.entries(b, h, r) {
                        push_page(
                            &mut lists,
                            row,
                            entry.logical(),
                            entry.full(),
                            kv_len,
                            self.shape.block_kv,
                        );
                    }
                    lists.end_row();
                }
            }
        }
        let kv_lens = kv_lens.iter().map(|&len| len.min(self.shape.kv_len)).collect();
        let paged = Paged {
            slots: slots.to_vec(),
            kv_lens,
            packed: false,
            largest_page: None,
        };
        Ok(BlockMask {
            shape: MaskShape {
                kv_len: table.n_pages() * table.page_size(),
                ..self.shape
            },
            mask_mod,
            from_function: false,
            lists,
            queries: self.queries.clone(),
            extra: paged,
        }
        .with_largest_page())
    }
}

/// Adds logical block `logical` if the slot has a page there and keys before `kv_len`.
pub(super) fn push_page(
    lists: &mut Lists,
    row: &[i32],
    logical: usize,
    full: bool,
    kv_len: usize,
    page_size: usize,
) {
    let start = logical * page_size;
    let page = row.get(logical).and_then(|&page| usize::try_from(page).ok());
    if let Some(page) = page
        && start < kv_len
    {
        lists
            .entries
            .push(Entry::new(page, logical, full && start + page_size <= kv_len));
    }
}

fn written_lengths(table: &PageTable, slots: &[Slot], shape: &MaskShape) -> Result<Vec<usize>> {
    if slots.len() != shape.batch {
        return Err(Error::Mismatch {
            what: "number of slots",
            expected: shape.batch,
            found: slots.len(),
        });
    }
    if shape.block_kv != table.page_size() {
        return Err(Error::PageSize {
            block_kv: shape.block_kv,
            page_size: table.page_size(),
        });
    }
    let length = |(batch, slot): (usize, &Slot)| {
        table.len(*slot).map_err(|_| Error::DeadSlot {
            batch,
            slot: slot.index(),
        })
    };
    slots.iter().enumerate().map(length).collect()
}

impl BlockMask<Physical> {
    /// The mask of lists of pages, as [`BlockMask::<Logical>::from_kv_blocks`] is of logical blocks. Pages that the row's
    /// slot does not own are dropped. `shape.kv_len` is ignored: each row ends at its slot's written length.
    ///
    /// # Errors
    /// Those of [`BlockMask::<Logical>::from_kv_blocks`] and of [`BlockMask::<Logical>::to_physical`].
    ///
    /// [`BlockMask::<Logical>::from_kv_blocks`]: BlockMask::from_kv_blocks
    /// [`BlockMask::<Logical>::to_physical`]: BlockMask::to_physical
    pub fn from_page_blocks(
        table: &PageTable,
        slots: &[Slot],
        shape: MaskShape,
        lists: &KvBlocks<'_>,
        mask_mod: MaskMod,
    ) -> Result<BlockMask<Physical>> {
        shape.check()?;
        let kv_lens = written_lengths(table, slots, &shape)?;
        let longest = kv_lens.iter().copied().max().unwrap_or(0);
        let logical_shape = MaskShape {
            kv_len: longest,
            ..shape
        };
        let pages = read_lists(&logical_shape, lists, table.n_pages(), |b, page| {
            table.logical_page(slots[b], PageId::new(page as u32))
        })?;
        // In logical terms this is an ordinary mask from lists, whose conversion handles lengths and raggedness.
        let entries = pages
            .entries
            .iter()
            .map(|entry| Entry::new(entry.logical(), entry.logical(), entry.full()));
        let keeps = |entry: &Entry| entry.logical() < logical_shape.kv_blocks();
        let mut kept = Lists::new();
        let all: Vec<Entry> = entries.collect();
        for row in 0..logical_shape.rows() {
            kept.entries.extend(
                all[pages.offsets[row]..pages.offsets[row + 1]]
                    .iter()
                    .copied()
                    .filter(keeps),
            );
            kept.end_row();
        }
        let domain = Domain {
            batch: shape.batch,
            heads: shape.heads,
            q: 0..shape.q_len,
            kv: 0..longest,
        };
        mask_mod.check(&domain)?;
        let logical = BlockMask::<Logical> {
            shape: logical_shape,
            mask_mod,
            from_function: false,
            lists: kept,
            queries: vec![
                QuerySpan {
                    row: 0,
                    len: shape.q_len,
                    position: 0
                };
                shape.batch
            ],
            extra: (),
        };
        logical.to_physical(table, slots)
    }

    /// The slot of batch row `b`.
    pub fn slot(&self, b: usize) -> Option<Slot> {
        self.extra.slots.get(b).copied()
    }

    /// Whether the queries of all sequences lie on one axis (see [`BlockMask::packed`]).
    pub fn is_packed(&self) -> bool {
        self.extra.packed
    }

    /// Rows of the packed query axis that the mask reaches: one past the last row of any sequence. For a mask that is not
    /// packed, the queries of a batch row.
    pub fn query_rows(&self) -> usize {
        if self.extra.packed {
            self.queries
                .iter()
                .filter(|span| span.len > 0)
                .map(|span| span.row + span.len)
                .max()
                .unwrap_or(0)
        } else {
            self.shape.q_len
        }
    }

    /// The largest page named.
    pub fn largest_page(&self) -> Option<usize> {
        self.extra.largest_page
    }

    /// Whether in every list neighbouring blocks of the sequence are neighbouring pages, so that a kernel may step
    /// through memory instead of the list. Slots that grow in turns do not have this.
    pub fn is_contiguous(&self) -> bool {
        (0..self.shape.rows()).all(|row| {
            self.lists.row(row).windows(2).all(|pair| {
                let (x, y) = (pair[0].block(), pair[1].block());
                y.index.checked_sub(x.index) == y.logical.checked_sub(x.logical)
            })
        })
    }

    /// Whether every query has an allowed key in the first block that it visits, so that a kernel may skip the check
    /// against empty rows. Evaluates the function on first blocks.
    pub fn rows_are_safe(&self) -> bool {
        let mut cells = vec![false; self.shape.block_kv];
        for b in 0..self.shape.batch {
            for h in 0..self.shape.heads {
                for r in 0..self.shape.q_blocks() {
                    let queries = self.query_positions(b, r);
                    if queries.is_empty() {
                        continue;
                    }
                    let Some(first) = self.entries(b, h, r).first() else {
                        return false;
                    };
                    if first.full() {
                        continue;
                    }
                    let start = first.logical() * self.shape.block_kv;
                    let cells = &mut cells[..self.shape.block_kv.min(self.kv_len(b).saturating_sub(start))];
                    for q in queries {
                        self.mask_mod.eval_row(b, h, q, start, cells);
                        if !cells.contains(&true) {
                            return false;
                        }
                    }
                }
            }
        }
        true
    }

    pub(super) fn with_largest_page(mut self) -> BlockMask<Physical> {
        self.extra.largest_page = self.lists.entries.iter().map(|entry| entry.index as usize).max();
        self
    }
}
