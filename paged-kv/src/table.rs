//! The page table: which pages of the pool hold which part of which sequence.
//!
//! **Invariant.** Every page but 0 is either on the free list, once, or held by slots and retains, exactly as many
//! as it counts. A row holds its slot's pages in logical order and nothing else, and a page stands at the same
//! column in every row that holds it. A slot's pages hold at least the tokens written to it.
//! [`PageTable::check_integrity`] checks all of this from scratch.
//!
//! **What may surprise.** [`reserve`](PageTable::reserve) changes the row at once, also when it asks for a copy:
//! make the copy before anything else is written to the cache. A slot that reserved and was then forked must
//! reserve again. The table only counts tokens; whoever writes them calls [`advance`](PageTable::advance).
//!
//! ```
//! use paged_kv::{PageTable, PageTableConfig};
//!
//! let config = PageTableConfig { n_pages: 6, page_size: 4, n_slots: 3, max_pages_per_slot: 4 };
//! let mut table = PageTable::new(config)?;
//! let slot = table.allocate_slot()?;
//! assert_eq!(table.reserve(slot, 6)?.new_pages, 2);
//! table.advance(slot, 6)?;
//! assert_eq!(table.row(slot), [1, 2, -1, -1]);
//! assert_eq!(table.physical(slot, 5), Some(2 * 4 + 1));
//!
//! let sample = table.fork(slot)?;
//! let copy = table.reserve(sample, 7)?.copy.expect("the second page is shared and partly written");
//! assert_eq!((copy.src.index(), copy.dst.index(), copy.tokens), (2, 3, 2));
//! assert_eq!(table.row(sample), [1, 3, -1, -1]);
//! # Ok::<(), paged_kv::Error>(())
//! ```
//!
//! **How it works.** The rows are the only list of a slot's pages, and are what a device mirrors. Beside them each
//! page keeps its counts of holders, its column, and how many of its entries are written:
//!
//! ```text
//! rows                 column 0   1   2   3         pages    owners  column  written
//! slot 0 (reserved)         [ 0   0   0   0 ]         0         -       -       -     reserved
//! slot 1                    [ 1   2  -1  -1 ]         1         2       0       4     shared by slots 1 and 2
//! slot 2                    [ 1   3  -1  -1 ]         2         1       1       2
//!                                                     3         1       1       3
//! free list: 5 4                                      4, 5      0       -       0     free
//! ```
//!
//! One column per page, instead of one map per slot, makes the inverse of the rows cost memory for the pages alone:
//! [`logical_page`](PageTable::logical_page) takes the page's column and asks the slot's row whether it holds the
//! page there.

mod integrity;
mod lookup;
mod reserve;
mod shared;

use std::fmt;
use std::ops::Range;

use crate::{Error, PageId, Slot};

pub use integrity::IntegrityError;
pub use reserve::{PageCopy, Reservation};

/// Sizes of a [`PageTable`]. Both counts include the reserved page 0 and slot 0: a batch of 64 sequences needs
/// 65 slots, a pool of 1,000 usable pages needs 1,001 pages.
///
/// ```
/// use paged_kv::{Error, PageTable, PageTableConfig};
///
/// let config = PageTableConfig { n_pages: 8, page_size: 4, n_slots: 3, max_pages_per_slot: 4 };
/// assert_eq!(PageTable::new(config)?.max_len(), 16);
/// let error = PageTable::new(PageTableConfig { n_pages: 1, ..config }).unwrap_err();
/// assert!(matches!(error, Error::OutOfRange { field: "n_pages", .. }), "page 0 is reserved: {error}");
/// # Ok::<(), paged_kv::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageTableConfig {
    /// Pages of the pool, page 0 included. At least 2, at most `i32::MAX` (rows hold i32).
    pub n_pages: usize,
    /// Tokens in a page. At least 1.
    pub page_size: usize,
    /// Rows of the table, slot 0 included. At least 2.
    pub n_slots: usize,
    /// Pages that one row can map; a sequence holds at most `max_pages_per_slot * page_size` tokens.
    pub max_pages_per_slot: usize,
}

/// Slots, pages, and who holds what. See the [crate's documentation](crate) for an introduction.
///
/// Two tables are equal if everything about them is, the order in which they give out pages included.
///
/// ```
/// use paged_kv::{PageTable, PageTableConfig};
///
/// let mut table = PageTable::new(PageTableConfig { n_pages: 4, page_size: 8, n_slots: 3, max_pages_per_slot: 3 })?;
/// let slot = table.allocate_slot()?;
/// assert!(!table.can_reserve(slot, 25), "three pages of 8 tokens");
/// assert_eq!(table.reserve(slot, 17)?.new_pages, 3);
/// table.advance(slot, 17)?;
/// table.erase(slot)?;
/// assert_eq!(table.free_pages(), 3); // page 0 is reserved
/// # Ok::<(), paged_kv::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct PageTable {
    config: PageTableConfig,
    pages: Vec<PageState>,
    slots: Vec<SlotState>,
    /// `[n_slots, max_pages_per_slot]`: the page ids of each slot in logical order, then `UNMAPPED`.
    rows: Vec<i32>,
    /// Stacks, so that a page or slot given back last is taken first.
    free_pages: Vec<PageId>,
    free_slots: Vec<Slot>,
    /// Slots whose row changed since the last drain; `SlotState::dirty` keeps each in here once.
    dirty: Vec<Slot>,
}

/// Entry of a row that maps no page.
const UNMAPPED: i32 = -1;
/// `PageState::logical` of a free page.
const NO_LOGICAL: u32 = u32::MAX;

#[derive(Clone, Copy, PartialEq, Eq)]
struct PageState {
    /// Slots whose row holds the page.
    owners: u32,
    /// Holds on the page from outside any slot.
    retains: u32,
    /// Which page of its sequence this is: the column at which every owner's row holds it.
    logical: u32,
    /// Entries written. Every owner agrees on it: whoever would write further gets a copy first.
    written: u32,
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct SlotState {
    live: bool,
    dirty: bool,
    /// Entries of the row that map a page.
    pages: usize,
    /// Tokens written.
    len: usize,
}

const FREE_PAGE: PageState = PageState {
    owners: 0,
    retains: 0,
    logical: NO_LOGICAL,
    written: 0,
};
const DEAD_SLOT: SlotState = SlotState {
    live: false,
    dirty: false,
    pages: 0,
    len: 0,
};

impl PageTable {
    /// A table whose pages and slots are all free.
    ///
    /// Memory: `4 * n_slots * max_pages_per_slot + 20 * n_pages + 32 * n_slots` bytes, taken here once; no
    /// other operation allocates.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] names the field that cannot work; [`Error::SizeOverflow`] and
    /// [`Error::OutOfMemory`] come before any memory is used. Panics: none.
    pub fn new(config: PageTableConfig) -> Result<Self, Error> {
        let PageTableConfig {
            n_pages,
            page_size,
            n_slots,
            max_pages_per_slot,
        } = config;
        in_range("n_pages", n_pages, 2, i32::MAX as u64)?;
        in_range("page_size", page_size, 1, u64::from(u32::MAX))?;
        in_range("n_slots", n_slots, 2, i32::MAX as u64)?;
        in_range("max_pages_per_slot", max_pages_per_slot, 1, i32::MAX as u64)?;
        let overflow = |what| move || Error::SizeOverflow { what };
        n_pages.checked_mul(page_size).ok_or_else(overflow("page pool"))?;
        max_pages_per_slot
            .checked_mul(page_size)
            .ok_or_else(overflow("longest sequence"))?;
        let n_entries = n_slots
            .checked_mul(max_pages_per_slot)
            .ok_or_else(overflow("page table"))?;

        // All memory is taken before any is touched, the largest part first.
        let mut rows = vec_with_capacity("rows of the page table", n_entries)?;
        let mut pages = vec_with_capacity("pages of the page table", n_pages)?;
        let mut slots = vec_with_capacity("slots of the page table", n_slots)?;
        let mut free_pages = vec_with_capacity("free pages of the page table", n_pages)?;
        let mut free_slots = vec_with_capacity("free slots of the page table", n_slots)?;
        let mut dirty = vec_with_capacity("dirty slots of the page table", n_slots)?;
        rows.resize(max_pages_per_slot, PageId::RESERVED.index() as i32);
        rows.resize(n_entries, UNMAPPED);
        pages.resize(n_pages, FREE_PAGE);
        // Every slot starts dirty: a mirror that follows `drain_dirty` alone is right from its first drain on.
        slots.resize(
            n_slots,
            SlotState {
                dirty: true,
                ..DEAD_SLOT
            },
        );
        dirty.extend((0..n_slots as u32).map(Slot::new));
        free_pages.extend((1..n_pages as u32).rev().map(PageId::new));
        free_slots.extend((1..n_slots as u32).rev().map(Slot::new));
        Ok(Self {
            config,
            pages,
            slots,
            rows,
            free_pages,
            free_slots,
            dirty,
        })
    }

    /// The sizes the table was made with.
    pub fn config(&self) -> &PageTableConfig {
        &self.config
    }

    /// Tokens in a page.
    #[inline]
    pub fn page_size(&self) -> usize {
        self.config.page_size
    }

    /// Pages of the pool, page 0 included.
    pub fn n_pages(&self) -> usize {
        self.config.n_pages
    }

    /// Rows of the table, slot 0 included.
    pub fn n_slots(&self) -> usize {
        self.config.n_slots
    }

    /// Tokens that one slot can hold at most: `max_pages_per_slot * page_size`.
    pub fn max_len(&self) -> usize {
        self.config.max_pages_per_slot * self.config.page_size
    }

    /// Pages that nobody holds.
    pub fn free_pages(&self) -> usize {
        self.free_pages.len()
    }

    /// Slots that are not allocated.
    pub fn free_slots(&self) -> usize {
        self.free_slots.len()
    }

    /// Takes a free slot. It holds no pages yet.
    ///
    /// # Errors
    /// [`Error::OutOfSlots`]. Panics: none.
    pub fn allocate_slot(&mut self) -> Result<Slot, Error> {
        let slot = self.free_slots.pop().ok_or(Error::OutOfSlots {
            n_slots: self.config.n_slots,
        })?;
        self.slots[slot.index()].live = true;
        Ok(slot)
    }

    /// Whether [`fork`](Self::fork) of the slot would succeed now. Panics: none.
    pub fn can_fork(&self, slot: Slot) -> bool {
        self.live(slot).is_ok() && !self.free_slots.is_empty()
    }

    /// A new slot with the same tokens. It shares the pages that cover the written length; no page is taken or
    /// copied now. Capacity that the parent reserved past those pages stays the parent's alone.
    ///
    /// If the last shared page is partly written, either side must [`reserve`](Self::reserve) (again) before it
    /// writes, and the first to do so gets the copy. [`advance`](Self::advance) refuses to be called without.
    ///
    /// # Errors
    /// [`Error::OutOfSlots`], and those of a bad slot. Panics: none.
    pub fn fork(&mut self, slot: Slot) -> Result<Slot, Error> {
        let len = self.live(slot)?.len;
        let child = self.allocate_slot()?;
        let n_shared = len.div_ceil(self.config.page_size);
        let parent_start = slot.index() * self.config.max_pages_per_slot;
        let child_start = child.index() * self.config.max_pages_per_slot;
        self.rows
            .copy_within(parent_start..parent_start + n_shared, child_start);
        for &page in &self.rows[child_start..child_start + n_shared] {
            self.pages[page as usize].owners += 1;
        }
        let state = &mut self.slots[child.index()];
        state.len = len;
        state.pages = n_shared;
        if n_shared > 0 {
            self.mark_dirty(child);
        }
        Ok(child)
    }

    /// Records that `n` more tokens are written.
    ///
    /// # Errors
    /// [`Error::NotReserved`] past the capacity; [`Error::PageShared`] if the slot was forked after its last
    /// `reserve`; those of a bad slot. Panics: none.
    pub fn advance(&mut self, slot: Slot, n: usize) -> Result<(), Error> {
        let SlotState { len, .. } = *self.live(slot)?;
        let end = len.saturating_add(n);
        self.check_writable(slot, len..end)?;
        if n == 0 {
            return Ok(());
        }
        let page_size = self.config.page_size;
        let row_start = slot.index() * self.config.max_pages_per_slot;
        for column in len / page_size..end.div_ceil(page_size) {
            let page = self.rows[row_start + column] as usize;
            self.pages[page].written = (end - column * page_size).min(page_size) as u32;
        }
        self.slots[slot.index()].len = end;
        Ok(())
    }

    /// Gives the slot back, and every page that nobody else holds. The slot's row is cleared.
    ///
    /// # Errors
    /// [`Error::DeadSlot`] if it is erased already; those of a bad slot. Panics: none.
    pub fn erase(&mut self, slot: Slot) -> Result<(), Error> {
        let SlotState { pages: n_pages, .. } = *self.live(slot)?;
        let row_start = slot.index() * self.config.max_pages_per_slot;
        // Backwards, so that the next sequence takes the pages in the order this one had them.
        for entry in (row_start..row_start + n_pages).rev() {
            let page = PageId::new(self.rows[entry] as u32);
            self.rows[entry] = UNMAPPED;
            self.pages[page.index()].owners -= 1;
            self.free_if_unused(page);
        }
        let state = &mut self.slots[slot.index()];
        *state = SlotState {
            dirty: state.dirty,
            ..DEAD_SLOT
        };
        self.free_slots.push(slot);
        if n_pages > 0 {
            self.mark_dirty(slot);
        }
        Ok(())
    }

    /// Tokens written to the slot.
    ///
    /// # Errors
    /// Those of a bad slot. Panics: none.
    pub fn len(&self, slot: Slot) -> Result<usize, Error> {
        self.live(slot).map(|state| state.len)
    }

    /// Tokens that the slot's pages hold: its pages times the page size.
    ///
    /// # Errors
    /// Those of a bad slot. Panics: none.
    pub fn capacity(&self, slot: Slot) -> Result<usize, Error> {
        self.live(slot).map(|state| state.pages * self.config.page_size)
    }

    fn live(&self, slot: Slot) -> Result<&SlotState, Error> {
        if slot == Slot::RESERVED {
            return Err(Error::ReservedSlot);
        }
        match self.slots.get(slot.index()) {
            None => Err(Error::NoSuchSlot {
                slot,
                n_slots: self.config.n_slots,
            }),
            Some(state) if !state.live => Err(Error::DeadSlot { slot }),
            Some(state) => Ok(state),
        }
    }

    /// Whether the slot may write the positions: all reserved, none in a shared page.
    fn check_writable(&self, slot: Slot, range: Range<usize>) -> Result<(), Error> {
        let page_size = self.config.page_size;
        let capacity = self.capacity(slot)?;
        if range.end > capacity {
            return Err(Error::NotReserved {
                slot,
                asked: range.end,
                capacity,
            });
        }
        if range.is_empty() {
            return Ok(());
        }
        for column in range.start / page_size..range.end.div_ceil(page_size) {
            if let Some(page) = self.mapped(slot, column)
                && self.is_shared(page)
            {
                return Err(Error::PageShared { slot, page });
            }
        }
        Ok(())
    }

    fn mapped(&self, slot: Slot, column: usize) -> Option<PageId> {
        let page = *self.row(slot).get(column)?;
        (page >= 0).then(|| PageId::new(page as u32))
    }

    fn free_if_unused(&mut self, page: PageId) -> bool {
        let state = &mut self.pages[page.index()];
        let unused = state.owners == 0 && state.retains == 0;
        if unused {
            *state = FREE_PAGE;
            self.free_pages.push(page);
        }
        unused
    }

    fn mark_dirty(&mut self, slot: Slot) {
        let state = &mut self.slots[slot.index()];
        if !state.dirty {
            state.dirty = true;
            self.dirty.push(slot);
        }
    }
}

impl fmt::Debug for PageTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PageTable")
            .field("config", &self.config)
            .field("free_pages", &self.free_pages())
            .field("free_slots", &self.free_slots())
            .finish_non_exhaustive()
    }
}

fn in_range(field: &'static str, value: usize, min: u64, max: u64) -> Result<(), Error> {
    let value = value as u64;
    if (min..=max).contains(&value) {
        Ok(())
    } else {
        Err(Error::OutOfRange {
            field,
            value,
            min,
            max,
        })
    }
}

fn vec_with_capacity<T>(what: &'static str, n: usize) -> Result<Vec<T>, Error> {
    let mut vec = Vec::new();
    let bytes = (n as u64).saturating_mul(size_of::<T>() as u64);
    vec.try_reserve_exact(n)
        .map_err(|_| Error::OutOfMemory { what, bytes })?;
    Ok(vec)
}
