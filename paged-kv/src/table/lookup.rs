//! Reading the table: rows, lookups in both directions, and what changed for a device's mirror.

use std::ops::Range;

use super::PageTable;
use crate::{Error, PageId, Slot};

impl PageTable {
    /// Whether the slot is allocated. False for slot 0 and for slots outside the table. Panics: none.
    pub fn is_live(&self, slot: Slot) -> bool {
        self.live(slot).is_ok()
    }

    /// The allocated slots, in ascending order.
    pub fn live_slots(&self) -> impl Iterator<Item = Slot> + '_ {
        let live = self.slots.iter().enumerate().filter(|(_, state)| state.live);
        live.map(|(index, _)| Slot::new(index as u32))
    }

    /// The slot's pages in logical order.
    ///
    /// # Errors
    /// Those of a bad slot. Panics: none.
    pub fn pages(&self, slot: Slot) -> Result<impl ExactSizeIterator<Item = PageId> + '_, Error> {
        let n_pages = self.live(slot)?.pages;
        Ok(self.row(slot)[..n_pages]
            .iter()
            .map(|&page| PageId::new(page as u32)))
    }

    /// Where the cache keeps the token at `position` of the slot's sequence: `page * page_size + offset`.
    ///
    /// `None` past the slot's capacity and for a slot that is not allocated. For slot 0, whose row maps every
    /// page to page 0, the place is in page 0. To write, use [`write_positions`](Self::write_positions), which
    /// refuses shared pages. Panics: none.
    #[inline]
    pub fn physical(&self, slot: Slot, position: usize) -> Option<usize> {
        let page_size = self.config.page_size;
        let (column, offset) = (position / page_size, position % page_size);
        let page = *self.row(slot).get(column)?;
        (page >= 0).then(|| page as usize * page_size + offset)
    }

    /// Appends to `out` the places of the positions `range` of the slot's sequence, for writing.
    ///
    /// # Errors
    /// [`Error::NotReserved`] past the capacity; [`Error::PageShared`] if a position lies in a page that
    /// another owner still reads; those of a bad slot. `out` is then unchanged. Panics: none.
    pub fn write_positions(
        &self,
        slot: Slot,
        range: Range<usize>,
        out: &mut Vec<usize>,
    ) -> Result<(), Error> {
        self.check_writable(slot, range.clone())?;
        let page_size = self.config.page_size;
        let row = self.row(slot);
        let mut position = range.start;
        while position < range.end {
            let column = position / page_size;
            let page_start = column * page_size;
            let end = range.end.min(page_start + page_size);
            let base = row[column] as usize * page_size;
            out.extend(base + position - page_start..base + end - page_start);
            position = end;
        }
        Ok(())
    }

    /// Which page of the slot's sequence `page` holds: the inverse of the row. `None` if the slot does not own
    /// the page, for slot 0 and for page 0. Panics: none.
    #[inline]
    pub fn logical_page(&self, slot: Slot, page: PageId) -> Option<usize> {
        // A page has the same logical index for all its owners, so one index per page is enough; the row says
        // whether this slot is one of them. The index of page 0 and of free pages is past every row.
        let logical = self.pages.get(page.index())?.logical as usize;
        let entry = *self.row(slot).get(logical)?;
        (entry == page.index() as i32).then_some(logical)
    }

    /// The slot's row, `[max_pages_per_slot]`: its pages in logical order, then −1. All −1 for a slot that is
    /// not allocated, all 0 for slot 0, empty for a slot outside the table. Panics: none.
    #[inline]
    pub fn row(&self, slot: Slot) -> &[i32] {
        let width = self.config.max_pages_per_slot;
        let start = slot.index().saturating_mul(width);
        self.rows.get(start..start.saturating_add(width)).unwrap_or(&[])
    }

    /// All rows, `[n_slots, max_pages_per_slot]`, row-major: what a device mirrors.
    #[inline]
    pub fn rows(&self) -> &[i32] {
        &self.rows
    }

    /// The slots whose row changed since the last drain, each once, with its row; for incremental upload. At
    /// first every slot is dirty. Whether or not the iterator is run to its end, all are clean afterwards.
    pub fn drain_dirty(&mut self) -> impl ExactSizeIterator<Item = (Slot, &[i32])> {
        for slot in &self.dirty {
            self.slots[slot.index()].dirty = false;
        }
        let (rows, width) = (&self.rows, self.config.max_pages_per_slot);
        self.dirty
            .drain(..)
            .map(move |slot| (slot, &rows[slot.index() * width..][..width]))
    }

    /// Makes every slot dirty, for a mirror that has been lost. Panics: none.
    pub fn mark_all_dirty(&mut self) {
        for index in 0..self.slots.len() {
            self.mark_dirty(Slot::new(index as u32));
        }
    }
}
