//! The table's invariants, checked from scratch.

use super::{DEAD_SLOT, NO_LOGICAL, PageTable, UNMAPPED};
use crate::{PageId, Slot};

/// The first broken invariant that [`PageTable::check_integrity`] found. No sequence of calls should lead here;
/// what does is a defect of this crate.
///
/// ```
/// use paged_kv::{IntegrityError, PageTable, PageTableConfig};
///
/// let mut table = PageTable::new(PageTableConfig { n_pages: 8, page_size: 4, n_slots: 3, max_pages_per_slot: 4 }).unwrap();
/// let slot = table.allocate_slot().unwrap();
/// let _ = table.reserve(slot, 9).unwrap();
/// let found: Result<(), IntegrityError> = table.check_integrity();
/// assert_eq!(found, Ok(()));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IntegrityError {
    /// The free list holds a page that does not exist, page 0, or a page twice.
    #[error("the free list holds page {page}, which does not belong there or is there twice")]
    FreeList {
        /// The page.
        page: PageId,
    },
    /// A page is both free and held, or neither.
    #[error("page {page}: on the free list: {free}, holders: {holders}")]
    NotPartitioned {
        /// The page.
        page: PageId,
        /// Whether the free list holds it.
        free: bool,
        /// Slots and retains that hold it.
        holders: u64,
    },
    /// A page's count of owners differs from the rows that hold it.
    #[error("page {page}: {counted} owners counted, {rows} rows hold it")]
    RefCount {
        /// The page.
        page: PageId,
        /// What the table counts.
        counted: u32,
        /// Rows that hold it.
        rows: u32,
    },
    /// A row's entry is not what it must be: a page where none belongs, or none (or one outside the pool)
    /// where one does.
    #[error("slot {slot}: entry {column} of its row is {entry}")]
    Row {
        /// The slot.
        slot: Slot,
        /// Entry of the row.
        column: usize,
        /// Its value.
        entry: i32,
    },
    /// A page's logical index is not the column at which a slot holds it, or a free page has one.
    #[error("page {page}: logical index {logical:?}, held at {column:?}")]
    Inverse {
        /// The page.
        page: PageId,
        /// The logical index the table keeps.
        logical: Option<usize>,
        /// The column at which a row holds it; `None` for a free page.
        column: Option<usize>,
    },
    /// A slot's capacity is not its pages times the page size, or less than its written length.
    #[error("slot {slot}: length {len}, {pages} pages")]
    Capacity {
        /// The slot.
        slot: Slot,
        /// Tokens written.
        len: usize,
        /// Pages held.
        pages: usize,
    },
    /// A page's written entries are not what an owner's length implies, or a page that only retains hold is not
    /// full.
    #[error("page {page}: {counted} entries written, its holders say {implied}")]
    Written {
        /// The page.
        page: PageId,
        /// What the table counts.
        counted: usize,
        /// What the owner's length implies.
        implied: usize,
    },
    /// A slot is both free and allocated, neither, or free twice; or slot 0 is not as it was made.
    #[error("slot {slot} is not exactly one of free and allocated")]
    SlotList {
        /// The slot.
        slot: Slot,
    },
    /// The list of dirty slots differs from the marks.
    #[error("slot {slot}: its dirty mark and the list of dirty slots differ")]
    Dirty {
        /// The slot.
        slot: Slot,
    },
}

impl PageTable {
    /// Checks every invariant from scratch: free ⊎ held = all pages but 0, counts of owners exact, rows and
    /// logical indices inverse of each other, capacity = page_size × pages ≥ written length, rows past a slot's
    /// pages and of dead slots cleared, slot 0's row all 0, slots and dirty marks consistent.
    ///
    /// Time `O(n_pages + n_slots * max_pages_per_slot)`, memory `O(n_pages + n_slots)`: for tests, and for an
    /// idle engine.
    ///
    /// # Errors
    /// The first broken invariant. Panics: none.
    pub fn check_integrity(&self) -> Result<(), IntegrityError> {
        let on_free_list = self.check_free_list()?;
        let row_counts = self.check_rows()?;
        self.check_pages(&on_free_list, &row_counts)?;
        self.check_slot_lists()
    }

    fn check_free_list(&self) -> Result<Vec<bool>, IntegrityError> {
        let mut on_free_list = vec![false; self.pages.len()];
        for &page in &self.free_pages {
            match on_free_list.get_mut(page.index()) {
                Some(seen) if !*seen && page != PageId::RESERVED => *seen = true,
                _ => return Err(IntegrityError::FreeList { page }),
            }
        }
        Ok(on_free_list)
    }

    /// Returns how many rows hold each page.
    fn check_rows(&self) -> Result<Vec<u32>, IntegrityError> {
        let page_size = self.config.page_size;
        let mut row_counts = vec![0_u32; self.pages.len()];
        for (index, state) in self.slots.iter().enumerate() {
            let slot = Slot::new(index as u32);
            let row = self.row(slot);
            let bad = |column: usize| IntegrityError::Row {
                slot,
                column,
                entry: row[column],
            };
            if slot == Slot::RESERVED {
                if let Some(column) = row.iter().position(|&entry| entry != 0) {
                    return Err(bad(column));
                }
                continue;
            }
            let capacity = state.pages.checked_mul(page_size);
            if state.pages > row.len()
                || capacity.is_none_or(|capacity| capacity < state.len)
                || !state.live && (state.pages, state.len) != (DEAD_SLOT.pages, DEAD_SLOT.len)
            {
                return Err(IntegrityError::Capacity {
                    slot,
                    len: state.len,
                    pages: state.pages,
                });
            }
            let (held, rest) = row.split_at(state.pages);
            if let Some(column) = rest.iter().position(|&entry| entry != UNMAPPED) {
                return Err(bad(state.pages + column));
            }
            for (column, &entry) in held.iter().enumerate() {
                let page = match u32::try_from(entry) {
                    Ok(page) if page > 0 && (page as usize) < self.pages.len() => PageId::new(page),
                    _ => return Err(bad(column)),
                };
                let page_state = &self.pages[page.index()];
                if page_state.logical as usize != column {
                    let logical = Some(page_state.logical as usize);
                    return Err(IntegrityError::Inverse {
                        page,
                        logical,
                        column: Some(column),
                    });
                }
                let implied = state.len.saturating_sub(column * page_size).min(page_size);
                if page_state.written as usize != implied {
                    let counted = page_state.written as usize;
                    return Err(IntegrityError::Written {
                        page,
                        counted,
                        implied,
                    });
                }
                row_counts[page.index()] += 1;
            }
        }
        Ok(row_counts)
    }

    fn check_pages(&self, on_free_list: &[bool], row_counts: &[u32]) -> Result<(), IntegrityError> {
        for (index, state) in self.pages.iter().enumerate() {
            let page = PageId::new(index as u32);
            let holders = self.holders(page);
            if state.owners != row_counts[index] {
                let (counted, rows) = (state.owners, row_counts[index]);
                return Err(IntegrityError::RefCount { page, counted, rows });
            }
            let free = on_free_list[index];
            // Page 0 is neither free nor held; every other page is exactly one of the two.
            let in_one = if page == PageId::RESERVED {
                !free && holders == 0
            } else {
                free == (holders == 0)
            };
            if !in_one {
                return Err(IntegrityError::NotPartitioned { page, free, holders });
            }
            if holders == 0 && state.logical != NO_LOGICAL {
                let logical = Some(state.logical as usize);
                return Err(IntegrityError::Inverse {
                    page,
                    logical,
                    column: None,
                });
            }
            if state.retains > 0 && state.logical == NO_LOGICAL {
                return Err(IntegrityError::Inverse {
                    page,
                    logical: None,
                    column: None,
                });
            }
            // A page that only retains hold was full when it was retained, and nobody can write to it.
            let implied = if holders == 0 { 0 } else { self.config.page_size };
            let counted = state.written as usize;
            if (holders == 0 || state.retains > 0) && counted != implied {
                return Err(IntegrityError::Written {
                    page,
                    counted,
                    implied,
                });
            }
        }
        Ok(())
    }

    fn check_slot_lists(&self) -> Result<(), IntegrityError> {
        let mut free = vec![false; self.slots.len()];
        for &slot in &self.free_slots {
            match free.get_mut(slot.index()) {
                Some(seen) if !*seen && slot != Slot::RESERVED => *seen = true,
                _ => return Err(IntegrityError::SlotList { slot }),
            }
        }
        let mut dirty = vec![false; self.slots.len()];
        for &slot in &self.dirty {
            match dirty.get_mut(slot.index()) {
                Some(seen) if !*seen => *seen = true,
                _ => return Err(IntegrityError::Dirty { slot }),
            }
        }
        for (index, state) in self.slots.iter().enumerate() {
            let slot = Slot::new(index as u32);
            let allocated_or_free = if slot == Slot::RESERVED {
                !state.live
            } else {
                state.live != free[index]
            };
            if !allocated_or_free {
                return Err(IntegrityError::SlotList { slot });
            }
            if state.dirty != dirty[index] {
                return Err(IntegrityError::Dirty { slot });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "integrity_tests.rs"]
mod tests;
