//! Pages that outlive or precede a slot: what a cache of shared prefixes needs.

use super::{NO_LOGICAL, PageTable};
use crate::{Error, PageId, Slot};

impl PageTable {
    /// Whether more than one holder (slots and retains together) keeps the page. False for a free page, for
    /// page 0 and outside the pool. Panics: none.
    pub fn is_shared(&self, page: PageId) -> bool {
        self.holders(page) > 1
    }

    /// How many slots and retains together hold the page; 0 for a free page, for page 0 and outside the pool.
    /// Panics: none.
    pub fn holders(&self, page: PageId) -> u64 {
        self.pages
            .get(page.index())
            .map_or(0, |state| u64::from(state.owners) + u64::from(state.retains))
    }

    /// Makes pages that already hold keys and values the prefix of an empty slot: page `i` of `pages` becomes
    /// logical page `i`, and the slot's written length becomes `pages.len() * page_size`. The pages are shared,
    /// not copied.
    ///
    /// The sequence's last token must still be computed for its logits, so attach pages that end before it.
    ///
    /// # Errors
    /// [`Error::SlotNotEmpty`] unless the slot holds no pages; [`Error::SequenceTooLong`];
    /// [`Error::PageNotFull`]; [`Error::WrongLogicalPage`] if a page was written as another part of its
    /// sequence; [`Error::ReservedPage`], [`Error::NoSuchPage`], [`Error::FreePage`]; those of a bad slot.
    /// Panics: none.
    pub fn attach_shared(&mut self, slot: Slot, pages: &[PageId]) -> Result<(), Error> {
        let held = self.live(slot)?.pages;
        if held > 0 {
            return Err(Error::SlotNotEmpty { slot, pages: held });
        }
        let page_size = self.config.page_size;
        if pages.len() > self.config.max_pages_per_slot {
            let asked = pages.len().saturating_mul(page_size);
            return Err(Error::SequenceTooLong {
                slot,
                asked,
                limit: self.max_len(),
            });
        }
        for (wanted, &page) in pages.iter().enumerate() {
            let holds = self.full_page(page)?;
            // This also refuses a page given twice: it cannot be at two logical places.
            if holds != wanted {
                return Err(Error::WrongLogicalPage { page, holds, wanted });
            }
        }
        if pages.is_empty() {
            return Ok(());
        }
        let row_start = slot.index() * self.config.max_pages_per_slot;
        for (entry, &page) in self.rows[row_start..].iter_mut().zip(pages) {
            *entry = page.index() as i32;
            self.pages[page.index()].owners += 1;
        }
        let state = &mut self.slots[slot.index()];
        state.pages = pages.len();
        state.len = pages.len() * page_size;
        self.mark_dirty(slot);
        Ok(())
    }

    /// Keeps a full page alive after its slots are erased, until the matching [`release`](Self::release). Each
    /// call counts.
    ///
    /// # Errors
    /// [`Error::PageNotFull`], [`Error::TooManyRetains`], [`Error::ReservedPage`], [`Error::NoSuchPage`],
    /// [`Error::FreePage`]. Panics: none.
    pub fn retain(&mut self, page: PageId) -> Result<(), Error> {
        self.full_page(page)?;
        let retains = &mut self.pages[page.index()].retains;
        *retains = retains.checked_add(1).ok_or(Error::TooManyRetains { page })?;
        Ok(())
    }

    /// Undoes one [`retain`](Self::retain). Returns whether the page became free.
    ///
    /// # Errors
    /// [`Error::NotRetained`], [`Error::ReservedPage`], [`Error::NoSuchPage`], [`Error::FreePage`].
    /// Panics: none.
    pub fn release(&mut self, page: PageId) -> Result<bool, Error> {
        self.used_page(page)?;
        let retains = &mut self.pages[page.index()].retains;
        *retains = retains.checked_sub(1).ok_or(Error::NotRetained { page })?;
        Ok(self.free_if_unused(page))
    }

    /// The logical index of a page that somebody holds.
    fn used_page(&self, page: PageId) -> Result<usize, Error> {
        if page == PageId::RESERVED {
            return Err(Error::ReservedPage);
        }
        match self.pages.get(page.index()) {
            None => Err(Error::NoSuchPage {
                page,
                n_pages: self.config.n_pages,
            }),
            Some(state) if state.logical == NO_LOGICAL => Err(Error::FreePage { page }),
            Some(state) => Ok(state.logical as usize),
        }
    }

    /// The logical index of a page that somebody holds and whose entries are all written.
    fn full_page(&self, page: PageId) -> Result<usize, Error> {
        let logical = self.used_page(page)?;
        let written = self.pages[page.index()].written as usize;
        let page_size = self.config.page_size;
        if written == page_size {
            Ok(logical)
        } else {
            Err(Error::PageNotFull {
                page,
                written,
                page_size,
            })
        }
    }
}
