//! Room for more tokens: pages that a slot's row gets, and the copy of a shared page before it is written to.

use super::{FREE_PAGE, PageState, PageTable};
use crate::{Error, PageId, Slot};

/// A copy that must be made in the KV cache before the slot is written to: the first `tokens` entries of page
/// `src`, in every layer and head, to the same places of page `dst`.
///
/// Make copies in the order in which the table returned them, each before any later write to the cache:
/// afterwards `src` may be written by its other owner, or be freed and written by a new one.
///
/// ```
/// use paged_kv::{PageTable, PageTableConfig};
///
/// let mut table = PageTable::new(PageTableConfig { n_pages: 8, page_size: 4, n_slots: 3, max_pages_per_slot: 4 })?;
/// let parent = table.allocate_slot()?;
/// let _ = table.reserve(parent, 6)?;
/// table.advance(parent, 6)?;
/// let child = table.fork(parent)?; // both read the same two pages
/// let copy = table.reserve(child, 7)?.copy.expect("the second page is half full and shared");
/// assert_eq!(copy.tokens, 2);
/// # Ok::<(), paged_kv::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageCopy {
    /// The page to read.
    pub src: PageId,
    /// The page to write.
    pub dst: PageId,
    /// Entries to copy, from the page's first.
    pub tokens: usize,
}

/// What [`PageTable::reserve`] did.
///
/// ```
/// use paged_kv::{PageTable, PageTableConfig};
///
/// let mut table = PageTable::new(PageTableConfig { n_pages: 8, page_size: 4, n_slots: 3, max_pages_per_slot: 4 })?;
/// let slot = table.allocate_slot()?;
/// let reservation = table.reserve(slot, 9)?;
/// assert_eq!((reservation.new_pages, reservation.copy), (3, None));
/// assert_eq!(table.reserve(slot, 12)?.new_pages, 0, "the third page holds four tokens");
/// # Ok::<(), paged_kv::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use = "a copy must be made before the slot is written to"]
pub struct Reservation {
    /// Pages appended to the slot's row. The destination of `copy` is not counted: it replaced a page.
    pub new_pages: usize,
    /// The copy on write that is due, if the next token goes into a page that another owner still reads.
    pub copy: Option<PageCopy>,
}

struct Plan {
    new_pages: usize,
    /// Column and page of the tail that must be copied before it is written.
    shared_tail: Option<(usize, PageId)>,
}

impl PageTable {
    /// Free pages that [`reserve`](Self::reserve) of the same arguments would take, a copy's destination
    /// included. To reserve for several slots in a step, compare the sum with [`free_pages`](Self::free_pages);
    /// the sum is an upper bound, since a page stops being shared when all owners but one have their copy.
    ///
    /// # Errors
    /// What `reserve` returns, except [`Error::OutOfPages`]. Panics: none.
    pub fn pages_needed(&self, slot: Slot, len: usize) -> Result<usize, Error> {
        self.plan(slot, len)
            .map(|plan| plan.new_pages + usize::from(plan.shared_tail.is_some()))
    }

    /// Whether [`reserve`](Self::reserve) of the same arguments would succeed now. Panics: none.
    pub fn can_reserve(&self, slot: Slot, len: usize) -> bool {
        self.pages_needed(slot, len)
            .is_ok_and(|needed| needed <= self.free_pages.len())
    }

    /// Makes the slot able to hold `len` tokens in total, those already written included. Never shrinks.
    ///
    /// If `len` is more than the written length and the next token goes into a page that a [`fork`](Self::fork)
    /// shares, the slot gets a page of its own instead, and the [`PageCopy`] that fills it is returned.
    ///
    /// # Errors
    /// [`Error::OutOfPages`], [`Error::SequenceTooLong`], and those of a bad slot ([`Error::ReservedSlot`],
    /// [`Error::NoSuchSlot`], [`Error::DeadSlot`]). Panics: none.
    pub fn reserve(&mut self, slot: Slot, len: usize) -> Result<Reservation, Error> {
        let Plan {
            new_pages,
            shared_tail,
        } = self.plan(slot, len)?;
        let needed = new_pages + usize::from(shared_tail.is_some());
        let free = self.free_pages.len();
        if needed > free {
            return Err(Error::OutOfPages { slot, needed, free });
        }
        if needed == 0 {
            return Ok(Reservation::default());
        }

        let row_start = slot.index() * self.config.max_pages_per_slot;
        // The pages leave the stack from its top; the slice is truncated after they are entered.
        let mut taken = free;
        let copy = shared_tail.map(|(column, src)| {
            taken -= 1;
            let dst = self.free_pages[taken];
            let shared = &mut self.pages[src.index()];
            shared.owners -= 1;
            let tokens = shared.written;
            self.pages[dst.index()] = PageState {
                owners: 1,
                retains: 0,
                logical: column as u32,
                written: tokens,
            };
            self.rows[row_start + column] = dst.index() as i32;
            PageCopy {
                src,
                dst,
                tokens: tokens as usize,
            }
        });
        let first = self.slots[slot.index()].pages;
        for column in first..first + new_pages {
            taken -= 1;
            let page = self.free_pages[taken];
            self.pages[page.index()] = PageState {
                owners: 1,
                logical: column as u32,
                ..FREE_PAGE
            };
            self.rows[row_start + column] = page.index() as i32;
        }
        self.free_pages.truncate(taken);
        self.slots[slot.index()].pages = first + new_pages;
        self.mark_dirty(slot);
        Ok(Reservation { new_pages, copy })
    }

    /// What `reserve` would do, if there are enough free pages.
    fn plan(&self, slot: Slot, len: usize) -> Result<Plan, Error> {
        let state = self.live(slot)?;
        let page_size = self.config.page_size;
        if len > self.max_len() {
            return Err(Error::SequenceTooLong {
                slot,
                asked: len,
                limit: self.max_len(),
            });
        }
        let new_pages = len.div_ceil(page_size).saturating_sub(state.pages);
        let mut shared_tail = None;
        if len > state.len {
            // Only a page that covers the written length can be shared, so only the one that holds the next
            // token can be both shared and written to.
            let column = state.len / page_size;
            if let Some(page) = self.mapped(slot, column)
                && self.is_shared(page)
            {
                shared_tail = Some((column, page));
            }
        }
        Ok(Plan {
            new_pages,
            shared_tail,
        })
    }
}
