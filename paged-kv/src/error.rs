//! The crate's error type.

use crate::{PageId, Slot};

/// What a page table or a cache refuses, with what was asked and what there was.
///
/// An operation that returns an error has changed nothing.
///
/// ```
/// use paged_kv::{Error, PageTable, PageTableConfig};
///
/// let mut table = PageTable::new(PageTableConfig { n_pages: 8, page_size: 4, n_slots: 3, max_pages_per_slot: 4 })?;
/// let slot = table.allocate_slot()?;
/// let error = table.reserve(slot, 17).unwrap_err();
/// assert!(matches!(error, Error::SequenceTooLong { asked: 17, limit: 16, .. }), "{error}");
/// assert_eq!(table.free_pages(), 7, "nothing has changed");
/// # Ok::<(), paged_kv::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A count in a configuration or layout is below or above what can work.
    #[error("{field} is {value}, but must be in {min}..={max}")]
    OutOfRange {
        /// Name of the field.
        field: &'static str,
        /// What was asked.
        value: u64,
        /// The smallest value that works.
        min: u64,
        /// The largest value that works.
        max: u64,
    },
    /// The product of the sizes does not fit the address space.
    #[error("the size of the {what} overflows the address space of this machine")]
    SizeOverflow {
        /// What was being sized.
        what: &'static str,
    },
    /// The system refused the memory.
    #[error("cannot allocate {bytes} bytes for the {what}")]
    OutOfMemory {
        /// What the memory was for.
        what: &'static str,
        /// How much was asked.
        bytes: u64,
    },
    /// Every slot is in use.
    #[error("all {n_slots} slots are in use (slot 0 is reserved)")]
    OutOfSlots {
        /// Slots of the table, slot 0 included.
        n_slots: usize,
    },
    /// The free list is shorter than what the operation needs.
    #[error("slot {slot}: {needed} free pages needed, {free} left")]
    OutOfPages {
        /// The slot that asked.
        slot: Slot,
        /// Free pages needed, the page of a pending copy included.
        needed: usize,
        /// Free pages there were.
        free: usize,
    },
    /// A sequence longer than a row of the table can map.
    #[error("slot {slot}: {asked} tokens asked, a slot holds at most {limit}")]
    SequenceTooLong {
        /// The slot that asked.
        slot: Slot,
        /// Tokens asked.
        asked: usize,
        /// `max_pages_per_slot * page_size`.
        limit: usize,
    },
    /// The written length would pass the reserved capacity.
    #[error("slot {slot}: length {asked} asked, {capacity} tokens reserved")]
    NotReserved {
        /// The slot that asked.
        slot: Slot,
        /// Length asked.
        asked: usize,
        /// Tokens the slot's pages hold.
        capacity: usize,
    },
    /// The positions to be written lie in a page that another owner still reads.
    #[error("slot {slot}: page {page} is shared, reserve again before writing to it")]
    PageShared {
        /// The slot that asked.
        slot: Slot,
        /// The shared page.
        page: PageId,
    },
    /// The slot is 0, which belongs to padding rows.
    #[error("slot 0 is reserved for padding rows")]
    ReservedSlot,
    /// The slot's index is not in the table.
    #[error("slot {slot} is not in a table of {n_slots} slots")]
    NoSuchSlot {
        /// The slot that was asked for.
        slot: Slot,
        /// Slots of the table, slot 0 included.
        n_slots: usize,
    },
    /// The slot was never allocated or has been erased.
    #[error("slot {slot} is not allocated")]
    DeadSlot {
        /// The slot that was asked for.
        slot: Slot,
    },
    /// The slot already holds pages, and the operation is for an empty one.
    #[error("slot {slot} already holds {pages} pages, an empty slot is needed")]
    SlotNotEmpty {
        /// The slot that was asked for.
        slot: Slot,
        /// Pages it holds.
        pages: usize,
    },
    /// The page is 0, which belongs to padding rows.
    #[error("page 0 is reserved for padding rows")]
    ReservedPage,
    /// The page's index is not in the pool.
    #[error("page {page} is not in a pool of {n_pages} pages")]
    NoSuchPage {
        /// The page that was asked for.
        page: PageId,
        /// Pages of the pool, page 0 included.
        n_pages: usize,
    },
    /// The page is on the free list: it holds no sequence's tokens.
    #[error("page {page} is free")]
    FreePage {
        /// The page that was asked for.
        page: PageId,
    },
    /// Only a page whose every entry is written can be shared outside a fork.
    #[error("page {page} holds {written} of {page_size} tokens, only a full page can be shared")]
    PageNotFull {
        /// The page that was asked for.
        page: PageId,
        /// Tokens written to it.
        written: usize,
        /// Tokens in a page.
        page_size: usize,
    },
    /// The page holds another part of its sequence than the place it should be attached at.
    #[error("page {page} holds logical page {holds} of its sequence, it cannot be attached as {wanted}")]
    WrongLogicalPage {
        /// The page that was asked for.
        page: PageId,
        /// The logical page it holds.
        holds: usize,
        /// The logical page it was to become.
        wanted: usize,
    },
    /// A release without a matching retain.
    #[error("page {page} is not retained")]
    NotRetained {
        /// The page that was asked for.
        page: PageId,
    },
    /// The count of a page's retains is full.
    #[error("page {page} is retained {} times already", u32::MAX)]
    TooManyRetains {
        /// The page that was asked for.
        page: PageId,
    },
    /// The layer's index is not in the cache.
    #[error("layer {layer} is not in a cache of {n_layers} layers")]
    NoSuchLayer {
        /// The layer that was asked for.
        layer: usize,
        /// Layers of the cache.
        n_layers: usize,
    },
    /// The physical position lies past the cache's last page.
    #[error("physical position {position} is not in a cache of {n_positions} positions")]
    NoSuchPosition {
        /// The position that was asked for.
        position: usize,
        /// `n_pages * page_size`.
        n_positions: usize,
    },
    /// A slice does not have the length that its shape calls for.
    #[error("{what} has {actual} elements, its shape calls for {expected}")]
    WrongLength {
        /// Which slice.
        what: &'static str,
        /// Elements it has.
        actual: usize,
        /// Elements it should have.
        expected: usize,
    },
    /// A page copy of more tokens than a page holds.
    #[error("a copy of {tokens} tokens, a page holds {page_size}")]
    CopyTooLong {
        /// Tokens to copy.
        tokens: usize,
        /// Tokens in a page.
        page_size: usize,
    },
}
