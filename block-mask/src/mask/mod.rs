//! Block masks: which blocks of keys each block of queries visits.

mod arrays;
mod classify;
mod logical;
mod packed;
mod physical;
mod picture;
mod shape;

use std::fmt;
use std::ops::Range;

use paged_kv::Slot;

pub use arrays::{BlockArrays, BlockState, KvBlocks};
pub use packed::{PackedSequence, paged_causal_mask};
pub use shape::{DEFAULT_BLOCK, MaskShape};

use crate::MaskMod;

/// Where the block indices of a mask point.
///
/// ```
/// use block_mask::{BlockMask, MaskMod, MaskShape, Space};
///
/// /// Whatever the indices name.
/// fn visited<S: Space>(mask: &BlockMask<S>) -> usize {
///     mask.blocks(0, 0, 0).len()
/// }
/// let mask = BlockMask::from_fn(MaskShape::new(1, 1, 6, 6).with_blocks(2, 2), MaskMod::causal())?;
/// assert_eq!(visited(&mask), 1);
/// # Ok::<(), block_mask::Error>(())
/// ```
pub trait Space: sealed::Sealed + Clone + fmt::Debug + Send + Sync + 'static {
    /// What a mask in this space carries beside its lists.
    #[doc(hidden)]
    type Extra: Clone + fmt::Debug + Send + Sync;

    /// Keys of the sequence behind batch row `b`.
    #[doc(hidden)]
    fn kv_len(extra: &Self::Extra, shape: &MaskShape, b: usize) -> usize;
}

/// Indices are blocks of the sequence: block `i` holds keys `i · block_kv ..`.
///
/// ```
/// use block_mask::{BlockMask, Logical, MaskMod, MaskShape};
///
/// let mask: BlockMask<Logical> = BlockMask::from_fn(MaskShape::new(1, 1, 300, 300), MaskMod::causal())?;
/// assert!(mask.blocks(0, 0, 2).all(|block| block.index == block.logical));
/// # Ok::<(), block_mask::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub enum Logical {}

/// Indices are pages of a paged KV cache.
///
/// ```
/// # use paged_kv::{PageTable, PageTableConfig};
/// # let mut table = PageTable::new(PageTableConfig { n_pages: 8, page_size: 4, n_slots: 3, max_pages_per_slot: 4 }).unwrap();
/// # let slot = table.allocate_slot().unwrap();
/// # let _ = table.reserve(slot, 6).unwrap();
/// # table.advance(slot, 6).unwrap();
/// use block_mask::{BlockMask, MaskMod, MaskShape, Physical};
///
/// let logical = BlockMask::from_fn(MaskShape::new(1, 1, 6, 6).with_blocks(4, 4), MaskMod::causal())?;
/// let mask: BlockMask<Physical> = logical.to_physical(&table, &[slot])?;
/// let pages: Vec<usize> = table.pages(slot).unwrap().map(|page| page.index()).collect();
/// assert!(mask.blocks(0, 0, 1).all(|block| block.index == pages[block.logical]));
/// # Ok::<(), block_mask::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub enum Physical {}

impl Space for Logical {
    type Extra = ();

    fn kv_len((): &(), shape: &MaskShape, _b: usize) -> usize {
        shape.kv_len
    }
}

impl Space for Physical {
    type Extra = Paged;

    fn kv_len(paged: &Paged, _shape: &MaskShape, b: usize) -> usize {
        paged.kv_lens.get(b).copied().unwrap_or(0)
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Logical {}
    impl Sealed for super::Physical {}
}

/// What a physical mask knows about the sequences behind its batch rows.
///
/// ```
/// # use paged_kv::{PageTable, PageTableConfig};
/// # let mut table = PageTable::new(PageTableConfig { n_pages: 8, page_size: 4, n_slots: 3, max_pages_per_slot: 4 }).unwrap();
/// # let slot = table.allocate_slot().unwrap();
/// # let _ = table.reserve(slot, 6).unwrap();
/// # table.advance(slot, 6).unwrap();
/// use block_mask::{BlockMask, MaskMod, MaskShape};
///
/// // What a physical mask carries besides its lists: slots and lengths of the sequences.
/// let logical = BlockMask::from_fn(MaskShape::new(1, 1, 6, 6).with_blocks(4, 4), MaskMod::causal())?;
/// let mask = logical.to_physical(&table, &[slot])?;
/// assert_eq!((mask.slot(0), mask.kv_len(0), mask.is_packed()), (Some(slot), 6, false));
/// # Ok::<(), block_mask::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Paged {
    slots: Vec<Slot>,
    kv_lens: Vec<usize>,
    /// True when the queries lie on one packed axis at `QuerySpan::row`.
    packed: bool,
    largest_page: Option<usize>,
}

/// The queries of one batch row.
///
/// ```
/// use block_mask::{BlockMask, MaskMod, MaskShape, QuerySpan};
///
/// // Two queries that continue a sequence of four tokens.
/// let shape = MaskShape::new(1, 1, 2, 6).with_blocks(2, 2);
/// let mask = BlockMask::from_fn_at(shape, MaskMod::causal(), 4)?;
/// assert_eq!(mask.queries(0), Some(QuerySpan { row: 0, len: 2, position: 4 }));
/// # Ok::<(), block_mask::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuerySpan {
    /// Row of the first query on the packed axis; 0 in a mask that is not packed.
    pub row: usize,
    /// Queries.
    pub len: usize,
    /// Logical position of the first query: what the functions see as `q`.
    pub position: usize,
}

/// One visited block.
///
/// ```
/// use block_mask::{Block, BlockMask, MaskMod, MaskShape};
///
/// let mask = BlockMask::from_fn(MaskShape::new(1, 1, 6, 6).with_blocks(2, 2), MaskMod::causal())?;
/// let second: Vec<Block> = mask.blocks(0, 0, 1).collect();
/// assert_eq!(second[0], Block { index: 0, logical: 0, full: true });
/// assert!(!second[1].full, "the diagonal");
/// # Ok::<(), block_mask::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// The block in the space of the mask: a logical block or a page.
    pub index: usize,
    /// The block's place in its sequence; equal to `index` in a logical mask.
    pub logical: usize,
    /// Every cell is allowed: the mask function need not be asked.
    pub full: bool,
}

/// A block and its flag in 8 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    index: u32,
    logical_and_full: u32,
}

const FULL: u32 = 1 << 31;

impl Entry {
    // Indices are checked against i32::MAX when a mask is made.
    fn new(index: usize, logical: usize, full: bool) -> Entry {
        Entry {
            index: index as u32,
            logical_and_full: logical as u32 | if full { FULL } else { 0 },
        }
    }

    fn block(self) -> Block {
        Block {
            index: self.index as usize,
            logical: self.logical(),
            full: self.full(),
        }
    }

    fn logical(self) -> usize {
        (self.logical_and_full & !FULL) as usize
    }

    fn full(self) -> bool {
        self.logical_and_full & FULL != 0
    }
}

/// The lists of all rows, one after another.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Lists {
    /// Row `i` is `entries[offsets[i]..offsets[i + 1]]`.
    offsets: Vec<usize>,
    /// Sorted by logical block within a row, without duplicates.
    entries: Vec<Entry>,
}

impl Lists {
    fn new() -> Lists {
        Lists {
            offsets: vec![0],
            entries: Vec::new(),
        }
    }

    fn end_row(&mut self) {
        self.offsets.push(self.entries.len());
    }

    fn row(&self, row: usize) -> &[Entry] {
        match (self.offsets.get(row), self.offsets.get(row + 1)) {
            (Some(&start), Some(&end)) => &self.entries[start..end],
            _ => &[],
        }
    }
}

/// Which blocks of keys each block of queries visits, with the function for the cells of partly masked ones.
///
/// See the [crate documentation](crate) for what a block mask is. A mask is a set: its lists are kept in the order of
/// the sequence and without duplicates, whatever order they were given in, so neither the order of a list nor the
/// placement of pages reaches the arithmetic.
///
/// ```
/// use block_mask::{BlockMask, BlockState, MaskMod, MaskShape};
///
/// // 6 tokens in blocks of 2 x 2, as in the drawing of the crate's documentation.
/// let mask = BlockMask::from_fn(MaskShape::new(1, 1, 6, 6).with_blocks(2, 2), MaskMod::causal())?;
/// let states = mask.block_states();
/// assert_eq!(states[3..6], [BlockState::Full, BlockState::Partial, BlockState::Empty]);
/// assert_eq!(mask.n_blocks(), 6); // of 9
/// let full: Vec<usize> = mask.blocks(0, 0, 2).filter(|block| block.full).map(|block| block.index).collect();
/// assert_eq!(full, [0, 1]);
/// # Ok::<(), block_mask::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct BlockMask<S: Space> {
    shape: MaskShape,
    mask_mod: MaskMod,
    /// The lists say exactly what the function says: blocks left out are all false, full ones all true.
    from_function: bool,
    lists: Lists,
    /// One per batch row.
    queries: Vec<QuerySpan>,
    extra: S::Extra,
}

impl<S: Space> BlockMask<S> {
    /// Lengths and block sizes.
    pub fn shape(&self) -> &MaskShape {
        &self.shape
    }

    /// The function for partly masked blocks, in logical positions.
    pub fn mask_mod(&self) -> &MaskMod {
        &self.mask_mod
    }

    /// The queries of batch row `b`; `None` beyond the batch.
    pub fn queries(&self, b: usize) -> Option<QuerySpan> {
        self.queries.get(b).copied()
    }

    /// The blocks that query block `r` of head `h` of batch row `b` visits, in the order of the sequence; none when an
    /// argument is out of range.
    pub fn blocks(&self, b: usize, h: usize, r: usize) -> impl ExactSizeIterator<Item = Block> + '_ {
        self.entries(b, h, r).iter().map(|entry| entry.block())
    }

    fn entries(&self, b: usize, h: usize, r: usize) -> &[Entry] {
        if b < self.shape.batch && h < self.shape.heads && r < self.shape.q_blocks() {
            self.lists.row(self.shape.row(b, h, r))
        } else {
            &[]
        }
    }

    /// Blocks visited by all rows together, full ones included.
    pub fn n_blocks(&self) -> usize {
        self.lists.entries.len()
    }

    /// Positions of the queries of block `r` of batch row `b`.
    pub(crate) fn query_positions(&self, b: usize, r: usize) -> Range<usize> {
        let Some(span) = self.queries.get(b) else {
            return 0..0;
        };
        let first = r * self.shape.block_q;
        let last = span.len.min(first + self.shape.block_q);
        if first >= last {
            0..0
        } else {
            span.position + first..span.position + last
        }
    }

    /// Keys of the sequence behind batch row `b`: everything at or past this is masked. 0 beyond the batch.
    pub fn kv_len(&self, b: usize) -> usize {
        if b < self.shape.batch {
            S::kv_len(&self.extra, &self.shape, b)
        } else {
            0
        }
    }

    /// Largest query position asked, plus one.
    pub(crate) fn position_end(&self) -> usize {
        self.queries
            .iter()
            .map(|span| span.position + span.len)
            .max()
            .unwrap_or(0)
    }
}
