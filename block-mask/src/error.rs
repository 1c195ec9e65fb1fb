use crate::expr::Axis;

/// Everything that can go wrong in this crate. Nothing here panics on bad input.
///
/// ```
/// use block_mask::expr::{Domain, IntBuffer, q};
/// use block_mask::{Error, MaskMod};
///
/// let lengths = IntBuffer::new([3, 5]);
/// let mask = MaskMod::new(lengths.at(q()).gt(0))?; // one value per query
/// let domain = Domain { batch: 1, heads: 1, q: 0..3, kv: 0..4 };
/// assert!(matches!(mask.check(&domain), Err(Error::IndexOutOfBounds { len: 2, highest: 2, .. })));
/// # Ok::<(), block_mask::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A length, count or block size that must be positive is zero.
    #[error("{what} must be at least 1")]
    Zero {
        /// The quantity in question.
        what: &'static str,
    },
    /// A quantity exceeds what 32-bit positions and indices can hold.
    #[error("{what} is {value}, more than the largest supported {max}")]
    TooLarge {
        /// The quantity in question.
        what: &'static str,
        /// Its value.
        value: usize,
        /// The largest value allowed.
        max: usize,
    },
    /// Two lengths that must agree do not.
    #[error("{what}: expected {expected}, found {found}")]
    Mismatch {
        /// The quantity in question.
        what: &'static str,
        /// What it had to be.
        expected: usize,
        /// What it was.
        found: usize,
    },
    /// An expression may index a captured buffer outside its bounds for some position of the domain.
    #[error(
        "an index into a captured {kind} buffer of {len} values reaches from {lowest} to {highest} for the \
         positions in use; lengthen the buffer or clamp the index"
    )]
    IndexOutOfBounds {
        /// `"integer"` or `"float"`.
        kind: &'static str,
        /// Values in the buffer.
        len: usize,
        /// Smallest index that can occur.
        lowest: i64,
        /// Largest index that can occur.
        highest: i64,
    },
    /// An expression is nested deeper than the evaluator follows.
    #[error("the expression is nested {depth} levels deep, more than {max}")]
    TooDeep {
        /// Levels found.
        depth: usize,
        /// Levels allowed.
        max: usize,
    },
    /// A mask function reads the score, which exists only in score functions.
    #[error("a mask function cannot read the attention score")]
    ScoreInMask,
    /// A function depends on an axis that the mask was built without.
    #[error(
        "the function depends on {axis}, but the mask has one entry for all of it; build the mask with {wanted}"
    )]
    Broadcast {
        /// The axis in question.
        axis: Axis,
        /// Entries needed along that axis.
        wanted: usize,
    },
    /// A block list names a block that does not exist.
    #[error("row {row} of the block lists names block {index}, but there are {blocks}")]
    BlockOutOfRange {
        /// Row of the list, counted over (batch, head, query block).
        row: usize,
        /// The index found.
        index: i64,
        /// Blocks there are.
        blocks: usize,
    },
    /// A count in a block list exceeds the width of the list.
    #[error("row {row} of the block lists counts {count} blocks, but a row holds {width}")]
    CountOutOfRange {
        /// Row of the list, counted over (batch, head, query block).
        row: usize,
        /// The count found.
        count: i64,
        /// Indices per row.
        width: usize,
    },
    /// A range reaches past the end of an axis.
    #[error("{what} {start}..{end} does not lie within 0..{len}")]
    RangeOutOfBounds {
        /// What the range selects.
        what: &'static str,
        /// First selected.
        start: usize,
        /// One past the last selected.
        end: usize,
        /// Length of the axis.
        len: usize,
    },
    /// The KV block size of a mask differs from the page size of the table.
    #[error(
        "the mask has KV blocks of {block_kv}, but pages hold {page_size} tokens; a paged mask needs them equal"
    )]
    PageSize {
        /// KV block size of the mask.
        block_kv: usize,
        /// Tokens per page.
        page_size: usize,
    },
    /// A slot that is not live (or does not exist) was named.
    #[error("slot {slot} (batch row {batch}) is not live")]
    DeadSlot {
        /// Batch row that names it.
        batch: usize,
        /// The slot.
        slot: usize,
    },
    /// A sequence has fewer tokens of capacity than its queries need.
    #[error(
        "slot {slot} has capacity for {capacity} tokens, but its queries end at position {end}; reserve first"
    )]
    Capacity {
        /// The slot.
        slot: usize,
        /// Tokens that its pages hold.
        capacity: usize,
        /// One past the last query position.
        end: usize,
    },
    /// A tensor's extents do not fit into its storage.
    #[error("{what} needs {needed} elements, but the slice has {found}")]
    SliceTooShort {
        /// The tensor.
        what: &'static str,
        /// Elements needed.
        needed: usize,
        /// Elements there are.
        found: usize,
    },
    /// The number of query heads is not a multiple of the number of KV heads.
    #[error("{query_heads} query heads cannot be shared out over {kv_heads} KV heads")]
    HeadGroups {
        /// Query heads.
        query_heads: usize,
        /// KV heads.
        kv_heads: usize,
    },
    /// The mask names a page beyond the end of the KV storage.
    #[error("the mask names page {page}, but the KV cache has {n_pages} pages")]
    PageOutOfRange {
        /// Largest page named.
        page: usize,
        /// Pages there are.
        n_pages: usize,
    },
    /// A soft cap is not a finite number above 0.
    #[error("the soft cap must be a finite number above 0")]
    SoftCap,
    /// The softmax scale is not a finite number.
    #[error("the softmax scale must be finite")]
    Scale,
}

/// Result with this crate's [`Error`].
///
/// ```
/// use block_mask::{BlockMask, Logical, MaskMod, MaskShape, Result};
///
/// fn causal(len: usize) -> Result<BlockMask<Logical>> {
///     BlockMask::from_fn(MaskShape::new(1, 1, len, len), MaskMod::causal())
/// }
/// assert_eq!(causal(300)?.n_blocks(), 6, "of 3 x 3 blocks of 128");
/// # Ok::<(), block_mask::Error>(())
/// ```
pub type Result<T> = std::result::Result<T, Error>;
