//! The two index newtypes: which page of the pool, which slot of the batch.

use std::fmt;

/// A page of the KV cache: an index in `0..n_pages`.
///
/// Page 0 is reserved: padding rows read and write only there, and no slot ever owns it.
///
/// ```
/// use paged_kv::{PageId, PageTable, PageTableConfig};
///
/// let mut table = PageTable::new(PageTableConfig { n_pages: 8, page_size: 4, n_slots: 3, max_pages_per_slot: 4 })?;
/// let slot = table.allocate_slot()?;
/// let _ = table.reserve(slot, 5)?; // two pages of four tokens
/// let pages: Vec<PageId> = table.pages(slot)?.collect();
/// assert!(pages.len() == 2 && !pages.contains(&PageId::RESERVED));
/// # Ok::<(), paged_kv::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageId(u32);

impl PageId {
    /// The page that padding rows use and that no slot owns.
    pub const RESERVED: PageId = PageId(0);

    /// The page with this index. Panics: none; a page outside a table is refused by the table.
    #[inline]
    pub const fn new(index: u32) -> Self {
        Self(index)
    }

    /// The page's index in `0..n_pages`.
    #[inline]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for PageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A row of the page table: an index in `0..n_slots`. Each running sequence holds one.
///
/// Slot 0 is reserved for padding rows. An erased slot's index is given out again, so a `Slot` kept after
/// [`erase`](crate::PageTable::erase) may later name another sequence.
///
/// ```
/// use paged_kv::{PageTable, PageTableConfig, Slot};
///
/// let mut table = PageTable::new(PageTableConfig { n_pages: 8, page_size: 4, n_slots: 3, max_pages_per_slot: 4 })?;
/// assert_ne!(table.allocate_slot()?, Slot::RESERVED);
/// assert!(table.reserve(Slot::RESERVED, 1).is_err(), "padding rows own nothing");
/// # Ok::<(), paged_kv::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(u32);

impl Slot {
    /// The slot that padding rows use; its row maps every page to page 0.
    pub const RESERVED: Slot = Slot(0);

    /// The slot with this index. Panics: none; a slot outside a table is refused by the table.
    #[inline]
    pub const fn new(index: u32) -> Self {
        Self(index)
    }

    /// The slot's index in `0..n_slots`.
    #[inline]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
